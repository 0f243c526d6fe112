// One level's loops: a loop per gradient type, layout and kind of weight decay, vectorised by the compiler.
#include "adam.h"

#include <cmath>
#include <cstring>
#include <type_traits>

namespace gemini::GEMINI_LEVEL {

namespace {

#include "half.h"

// See optim/split.py.
inline uint32_t joined(uint16_t weight, int16_t remainder) {
    const bool was_zeroed = (weight & 0x7fff) == 0 && remainder < 0;
    return (uint32_t(weight) << 16) + (was_zeroed ? 0u : uint32_t(int32_t(remainder)));
}

enum class Decay { none, l2, decoupled };

template <Decay decay>
inline float updated(float p, float g, float& m, float& v, const AdamScalars& s) {
    g = g * s.grad_scale;  // by 1 where there is nothing to do: no bit changes
    g = g * s.clip;
    if constexpr (decay == Decay::l2) g = g + p * s.l2;
    m = s.beta1 * m + s.one_minus_beta1 * g;
    v = s.beta2 * v + (s.one_minus_beta2 * g) * g;
    const float denominator = std::sqrt(v) / s.root_bias2 + s.eps;
    if constexpr (decay == Decay::decoupled) p = p - s.decay * p;
    return p - (s.step_size * m) / denominator;
}

// Elements that are updated between two rounds of prefetching, a cache line or two of every tensor; and how far ahead.
constexpr int64_t block_numel = 64;
constexpr int64_t prefetch_bytes = 2048;

// always_inline: GCC 12 takes a function that only prefetches for one without effect, and drops the calls.
#define GEMINI_ALWAYS_INLINE __attribute__((always_inline)) inline

template <class T>
GEMINI_ALWAYS_INLINE void prefetch(const T* values) {
    const char* ahead = reinterpret_cast<const char*>(values) + prefetch_bytes;
    for (int64_t at = 0; at < block_numel * int64_t(sizeof(T)); at += 64) __builtin_prefetch(ahead + at, 0, 3);
}

template <Layout layout, class Grad>
struct Streams {
    using Weight = std::conditional_t<layout == Layout::split, uint16_t, float>;

    Weight* __restrict weight;
    const Grad* grad;
    float* __restrict exp_avg;
    float* __restrict exp_avg_sq;
    uint16_t* half;  // may be the memory of a 16-bit gradient
    int16_t* __restrict remainder;

    Streams(const AdamPiece& piece, int64_t begin)
        : weight(static_cast<Weight*>(piece.weight) + begin),
          grad(static_cast<const Grad*>(piece.grad) + begin),
          exp_avg(piece.exp_avg + begin),
          exp_avg_sq(piece.exp_avg_sq + begin),
          half(piece.half ? static_cast<uint16_t*>(piece.half) + begin : nullptr),
          remainder(piece.remainder ? piece.remainder + begin : nullptr) {}

    GEMINI_ALWAYS_INLINE void prefetch_block() const {
        prefetch(weight);
        prefetch(grad);
        prefetch(exp_avg);
        prefetch(exp_avg_sq);
        if constexpr (layout == Layout::split) prefetch(remainder);
        if constexpr (layout == Layout::whole_and_bf16 || layout == Layout::whole_and_fp16) prefetch(half);
    }

    void advance(int64_t count) {
        weight += count;
        grad += count;
        exp_avg += count;
        exp_avg_sq += count;
        if constexpr (layout == Layout::split) remainder += count;
        if constexpr (layout == Layout::whole_and_bf16 || layout == Layout::whole_and_fp16) half += count;
    }
};

template <Layout layout, Decay decay, class Grad>
inline void update_some(const Streams<layout, Grad>& at, const AdamScalars& s, int64_t count) {
    auto* __restrict weight = at.weight;
    const Grad* grad = at.grad;
    float* __restrict exp_avg = at.exp_avg;
    float* __restrict exp_avg_sq = at.exp_avg_sq;
    uint16_t* half = at.half;
    int16_t* __restrict remainder = at.remainder;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
        float m = exp_avg[i], v = exp_avg_sq[i], p;
        if constexpr (layout == Layout::split) {
            p = as_float(joined(weight[i], remainder[i]));
        } else {
            p = weight[i];
        }
        p = updated<decay>(p, widen(grad[i]), m, v, s);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        const uint32_t bits = as_bits(p);
        if constexpr (layout == Layout::split) {
            const uint16_t rounded = to_bf16(bits).bits;
            weight[i] = rounded;
            remainder[i] = is_nan_bits(bits) ? int16_t(0) : int16_t(bits - (uint32_t(rounded) << 16));
        } else {
            weight[i] = p;
        }
        if constexpr (layout == Layout::whole_and_bf16) half[i] = to_bf16(bits).bits;
        if constexpr (layout == Layout::whole_and_fp16) half[i] = to_fp16(bits).bits;
    }
}

template <Layout layout, Decay decay, class Grad>
void update(const AdamPiece& piece, const AdamScalars& scalars, int64_t begin, int64_t end) {
    const AdamScalars s = scalars;
    Streams<layout, Grad> at(piece, begin);
    int64_t left = end - begin;
    for (; left >= block_numel; left -= block_numel) {
        at.prefetch_block();
        update_some<layout, decay>(at, s, block_numel);
        at.advance(block_numel);
    }
    update_some<layout, decay>(at, s, left);
}

template <Layout layout, class Grad>
void by_decay(const AdamPiece& piece, const AdamScalars& s, int64_t begin, int64_t end) {
    if (s.l2 != 0.0f) return update<layout, Decay::l2, Grad>(piece, s, begin, end);
    if (s.decay != 0.0f) return update<layout, Decay::decoupled, Grad>(piece, s, begin, end);
    return update<layout, Decay::none, Grad>(piece, s, begin, end);
}

template <Layout layout>
void by_grad(const AdamPiece& piece, const AdamScalars& s, int64_t begin, int64_t end) {
    switch (piece.grad_type) {
        case GradType::fp32: return by_decay<layout, float>(piece, s, begin, end);
        case GradType::bf16: return by_decay<layout, Bf16>(piece, s, begin, end);
        case GradType::fp16: return by_decay<layout, Fp16>(piece, s, begin, end);
    }
}

}  // namespace

void adam_update(const AdamPiece& piece, const AdamScalars& s, int64_t begin, int64_t end) {
    switch (piece.layout) {
        case Layout::whole: return by_grad<Layout::whole>(piece, s, begin, end);
        case Layout::whole_and_bf16: return by_grad<Layout::whole_and_bf16>(piece, s, begin, end);
        case Layout::whole_and_fp16: return by_grad<Layout::whole_and_fp16>(piece, s, begin, end);
        case Layout::split: return by_grad<Layout::split>(piece, s, begin, end);
    }
}

}  // namespace gemini::GEMINI_LEVEL
