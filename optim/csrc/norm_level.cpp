// One level's sums of squares, tile by tile, in the written order: the upper half onto the lower one until one is left.
#include "norm.h"

#include <cmath>
#include <cstring>
#include <type_traits>

namespace gemini::GEMINI_LEVEL {

namespace {

#include "half.h"

// Lanes that one instruction takes.
#if defined(__AVX512F__)
constexpr int register_bytes = 64;
#elif defined(__AVX__)
constexpr int register_bytes = 32;
#else
constexpr int register_bytes = 16;
#endif

typedef double Doubles __attribute__((vector_size(register_bytes)));
typedef float Floats __attribute__((vector_size(register_bytes)));
typedef uint32_t Words __attribute__((vector_size(register_bytes)));
typedef float FewFloats __attribute__((vector_size(register_bytes / 2)));

template <class To, class From>
inline To copied(const From* source) {
    To target;
    std::memcpy(&target, source, sizeof target);
    return target;
}

inline void load(const float* values, Doubles& out) { out = __builtin_convertvector(copied<FewFloats>(values), Doubles); }

// bf16 values as they lie in memory, two in a word: those at even places, below, and those at odd ones.
struct Pairs {
    Floats even, odd;
};
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

inline Pairs operator*(const Pairs& a, const Pairs& b) { return {a.even * b.even, a.odd * b.odd}; }
inline Pairs operator+(const Pairs& a, const Pairs& b) { return {a.even + b.even, a.odd + b.odd}; }

inline void load(const Bf16* values, Pairs& out) {
    const Words words = copied<Words>(values), even = words << 16, odd = words & 0xffff0000u;
    out = {copied<Floats>(&even), copied<Floats>(&odd)};
}

template <class Value, class Register>
inline void load(const Value* values, Register& out) {
    constexpr int lanes = int(sizeof(Register) / sizeof out[0]);
    std::remove_reference_t<decltype(out[0])> each[lanes];
    for (int i = 0; i < lanes; ++i) each[i] = widen(values[i]);
    out = copied<Register>(each);
}

// A tile is `count` registers. Sum `i` of `level` is sum `i` of twice that level and, onto it, the one `level` further on:
// depth first, so that few are waiting at any time.
template <int level, int count, class Register, class Value>
inline Register sum_of_squares(const Value* tile, int i) {
    if constexpr (level == count) {
        Register values;
        load(tile + i * (tile_numel / count), values);
        return values * values;
    } else {
        const Register lower = sum_of_squares<level * 2, count, Register>(tile, i);
        return lower + sum_of_squares<level * 2, count, Register>(tile, i + level);
    }
}

template <int width, class Lane>
inline Lane sum_of_array(Lane* sums) {
    for (int i = 0; i < width / 2; ++i) sums[i] = sums[i] + sums[i + width / 2];
    if constexpr (width > 2) return sum_of_array<width / 2>(sums);
    return sums[0];
}

template <class Lane, class Register>
inline Lane sum_of_lanes(const Register& sums) {
    constexpr int lanes = int(sizeof(Register) / sizeof(Lane));
    Lane each[lanes];
    std::memcpy(each, &sums, sizeof each);
    return sum_of_array<lanes>(each);
}

template <class Lane>
inline Lane sum_of_lanes(const Pairs& sums) {
    return sum_of_lanes<Lane>(sums.even) + sum_of_lanes<Lane>(sums.odd);
}

template <class Lane, class Register, class Value>
inline Lane sum_of_squares(const Value* tile) {
    constexpr int count = int(tile_numel * int64_t(sizeof(Lane)) / int64_t(sizeof(Register)));
    return sum_of_lanes<Lane>(sum_of_squares<1, count, Register>(tile, 0));
}

inline double tile_sum(const float* tile) { return sum_of_squares<double, Doubles>(tile); }

inline float sum_in_fp32(const Bf16* tile) { return sum_of_squares<float, Pairs>(tile); }
inline float sum_in_fp32(const Fp16* tile) { return sum_of_squares<float, Floats>(tile); }

template <class Half>
inline double tile_sum(const Half* tile) {
    const float sum = sum_in_fp32(tile);
    if (sum >= 0x1p-80f && sum < INFINITY) return sum;
    return sum_of_squares<double, Doubles>(tile);
}

constexpr int64_t prefetch_bytes = 8192;  // ahead of the tile that is summed

template <class Value>
class Sum {
public:
    Sum(const Value* values, int64_t numel, int64_t* limbs) : values_(values), numel_(numel), limbs_(limbs) {}

    void add_tile(int64_t t) {
        const Value* tile = values_ + t * tile_numel;
        const char* ahead = reinterpret_cast<const char*>(tile) + prefetch_bytes;
        for (int64_t at = 0; at < tile_numel * int64_t(sizeof(Value)); at += 64) __builtin_prefetch(ahead + at, 0, 3);
        const int64_t count = numel_ - t * tile_numel;
        Value padded[tile_numel];
        if (count < tile_numel) {
            std::memset(padded, 0, sizeof padded);
            std::memcpy(padded, tile, size_t(count) * sizeof(Value));
            tile = padded;
        }
        if (!add_tile_sum(limbs_, tile_sum(tile))) note_bad(t * tile_numel, tile);
    }

    int64_t first_bad() const { return bad_; }

private:
    void note_bad(int64_t start, const Value* tile) {
        if (bad_ >= 0 && bad_ < start) return;
        for (int64_t i = 0; i < tile_numel; ++i) {
            if (std::isfinite(widen(tile[i]))) continue;
            bad_ = start + i;
            return;
        }
    }

    const Value* values_;
    int64_t numel_;
    int64_t* limbs_;
    int64_t bad_ = -1;
};

// Memory gives more to who reads at several places at once, and tiles may come in any order.
constexpr int64_t num_places = 2;

template <class Value>
int64_t add(const Value* values, int64_t numel, int64_t first, int64_t last, int64_t* limbs) {
    Sum<Value> sum(values, numel, limbs);
    const int64_t stride = (last - first) / num_places;
    for (int64_t t = first; t < first + stride; ++t) {
        for (int64_t place = 0; place < num_places; ++place) sum.add_tile(t + place * stride);
    }
    for (int64_t t = first + num_places * stride; t < last; ++t) sum.add_tile(t);
    return sum.first_bad();
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
