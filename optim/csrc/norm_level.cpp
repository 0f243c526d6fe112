// One level's sums of squares, tile by tile, in the written order: the upper half onto the lower one until one is left.
#include "norm.h"

#include <cmath>
#include <cstring>

namespace gemini::GEMINI_LEVEL {

namespace {

#include "half.h"

template <int width, class Lane>
inline void halve(Lane* __restrict sums) {
    for (int i = 0; i < width; ++i) sums[i] = sums[i] + sums[i + width];
    if constexpr (width > 1) halve<width / 2>(sums);
}

template <class Lane, class Value>
inline Lane sum_of_squares(const Value* __restrict tile) {
    constexpr int width = tile_numel / 2;
    alignas(64) Lane sums[width];
    for (int i = 0; i < width; ++i) {
        const Lane low = widen(tile[i]), high = widen(tile[i + width]);
        sums[i] = low * low + high * high;
    }
    halve<width / 2>(sums);
    return sums[0];
}

inline double tile_sum(const float* tile) { return sum_of_squares<double>(tile); }

template <class Half>
inline double tile_sum(const Half* tile) {
    const float sum = sum_of_squares<float>(tile);
    if (sum >= 0x1p-80f && sum < INFINITY) return sum;
    return sum_of_squares<double>(tile);
}

template <class Value>
int64_t first_bad(const Value* tile, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (!std::isfinite(widen(tile[i]))) return i;
    return -1;
}

template <class Value>
int64_t add(const Value* values, int64_t numel, int64_t first, int64_t last, int64_t* limbs) {
    int64_t bad = -1;
    for (int64_t t = first; t < last; ++t) {
        const Value* tile = values + t * tile_numel;
        const int64_t count = numel - t * tile_numel;
        Value padded[tile_numel];
        if (count < tile_numel) {
            std::memset(padded, 0, sizeof padded);
            std::memcpy(padded, tile, size_t(count) * sizeof(Value));
            tile = padded;
        }
        const bool finite = add_tile_sum(limbs, tile_sum(tile));
        if (!finite && bad < 0) {
            const int64_t at = first_bad(tile, tile_numel);
            if (at >= 0) bad = t * tile_numel + at;
        }
    }
    return bad;
}

}  // namespace

int64_t add_squares(const void* values, ValueType type, int64_t numel, int64_t first, int64_t last, int64_t* limbs) {
    switch (type) {
        case ValueType::bf16: return add(static_cast<const Bf16*>(values), numel, first, last, limbs);
        case ValueType::fp16: return add(static_cast<const Fp16*>(values), numel, first, last, limbs);
        default: return add(static_cast<const float*>(values), numel, first, last, limbs);
    }
}

}  // namespace gemini::GEMINI_LEVEL
