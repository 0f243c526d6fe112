// One level's loops: a loop per gradient type, layout and kind of weight decay, vectorised by the compiler.
#include "adam.h"

#include <cmath>
#include <cstring>

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

template <Layout layout, Decay decay, class Grad>
void update(const AdamPiece& piece, const AdamScalars& scalars, int64_t begin, int64_t end) {
    const AdamScalars s = scalars;
    const int64_t count = end - begin;
    const Grad* __restrict grad = static_cast<const Grad*>(piece.grad) + begin;
    float* __restrict exp_avg = piece.exp_avg + begin;
    float* __restrict exp_avg_sq = piece.exp_avg_sq + begin;
    if constexpr (layout == Layout::split) {
        uint16_t* __restrict weight = static_cast<uint16_t*>(piece.weight) + begin;
        int16_t* __restrict remainder = piece.remainder + begin;
        for (int64_t i = 0; i < count; ++i) {
            float m = exp_avg[i], v = exp_avg_sq[i];
            const float p = as_float(joined(weight[i], remainder[i]));
            const uint32_t bits = as_bits(updated<decay>(p, widen(grad[i]), m, v, s));
            exp_avg[i] = m;
            exp_avg_sq[i] = v;
            const uint16_t rounded = to_bf16(bits).bits;
            weight[i] = rounded;
            remainder[i] = is_nan_bits(bits) ? int16_t(0) : int16_t(bits - (uint32_t(rounded) << 16));
        }
    } else {
        float* __restrict weight = static_cast<float*>(piece.weight) + begin;
        uint16_t* __restrict half = static_cast<uint16_t*>(piece.half) + (layout == Layout::whole ? 0 : begin);
        for (int64_t i = 0; i < count; ++i) {
            float m = exp_avg[i], v = exp_avg_sq[i];
            const float p = updated<decay>(weight[i], widen(grad[i]), m, v, s);
            exp_avg[i] = m;
            exp_avg_sq[i] = v;
            weight[i] = p;
            if constexpr (layout == Layout::whole_and_bf16) half[i] = to_bf16(as_bits(p)).bits;
            if constexpr (layout == Layout::whole_and_fp16) half[i] = to_fp16(as_bits(p)).bits;
        }
    }
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
