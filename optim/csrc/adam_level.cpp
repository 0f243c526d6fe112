// One level's loops: a loop per gradient type, layout and kind of weight decay, vectorised by the compiler.
#include "adam.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace gemini::GEMINI_LEVEL {

namespace {

// GCC 12 takes a function that only prefetches for one without effect, and drops the calls. And so many loops make this
// file too large for it: it would not inline their bodies, and not vectorise them.
#define GEMINI_ALWAYS_INLINE __attribute__((always_inline)) inline

#include "half.h"

// See optim/split.py.
GEMINI_ALWAYS_INLINE uint32_t joined(uint16_t weight, int16_t remainder) {
    const bool was_zeroed = (weight & 0x7fff) == 0 && remainder < 0;
    return (uint32_t(weight) << 16) + (was_zeroed ? 0u : uint32_t(int32_t(remainder)));
}

enum class Decay { none, l2, decoupled };

template <Decay decay>
GEMINI_ALWAYS_INLINE float updated(float p, float g, float& m, float& v, const AdamScalars& s) {
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

template <int64_t numel, class T>
GEMINI_ALWAYS_INLINE void prefetch(const T* values) {
    const char* ahead = reinterpret_cast<const char*>(values) + prefetch_bytes;
    for (int64_t at = 0; at < numel * int64_t(sizeof(T)); at += 64) __builtin_prefetch(ahead + at, 0, 3);
}

template <Layout layout, class Grad, class Moment>
struct Streams {
    using Weight = std::conditional_t<layout == Layout::split, uint16_t, float>;

    Weight* __restrict weight;
    const Grad* grad;
    Moment* __restrict exp_avg;
    Moment* __restrict exp_avg_sq;
    uint16_t* half;  // may be the memory of a 16-bit gradient
    int16_t* __restrict remainder;

    Streams(const AdamPiece& piece, int64_t begin)
        : weight(static_cast<Weight*>(piece.weight) + begin),
          grad(static_cast<const Grad*>(piece.grad) + begin),
          exp_avg(static_cast<Moment*>(piece.exp_avg) + begin),
          exp_avg_sq(static_cast<Moment*>(piece.exp_avg_sq) + begin),
          half(piece.half ? static_cast<uint16_t*>(piece.half) + begin : nullptr),
          remainder(piece.remainder ? piece.remainder + begin : nullptr) {}

    // The same elements with other memory for their moments.
    template <class Other>
    Streams(const Streams<layout, Grad, Other>& other, Moment* first, Moment* second)
        : weight(other.weight), grad(other.grad), exp_avg(first), exp_avg_sq(second), half(other.half), remainder(other.remainder) {}

    template <int64_t numel = block_numel>
    GEMINI_ALWAYS_INLINE void prefetch_block() const {
        prefetch<numel>(weight);
        prefetch<numel>(grad);
        prefetch<numel>(exp_avg);
        prefetch<numel>(exp_avg_sq);
        if constexpr (layout == Layout::split) prefetch<numel>(remainder);
        if constexpr (layout == Layout::whole_and_bf16 || layout == Layout::whole_and_fp16) prefetch<numel>(half);
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

template <Layout layout, Decay decay, class Grad, class Moment>
GEMINI_ALWAYS_INLINE void update_some(const Streams<layout, Grad, Moment>& at, const AdamScalars& s, int64_t count) {
    constexpr bool in_bf16 = std::is_same_v<Moment, uint16_t>;  // else float
    auto* __restrict weight = at.weight;
    const Grad* grad = at.grad;
    Moment* __restrict exp_avg = at.exp_avg;
    Moment* __restrict exp_avg_sq = at.exp_avg_sq;
    uint16_t* half = at.half;
    int16_t* __restrict remainder = at.remainder;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
        float m, v, p;
        if constexpr (in_bf16) {
            m = widen(Bf16{exp_avg[i]});
            v = widen(Bf16{exp_avg_sq[i]});
        } else {
            m = exp_avg[i];
            v = exp_avg_sq[i];
        }
        if constexpr (layout == Layout::split) {
            p = as_float(joined(weight[i], remainder[i]));
        } else {
            p = weight[i];
        }
        p = updated<decay>(p, widen(grad[i]), m, v, s);
        if constexpr (in_bf16) {
            exp_avg[i] = to_bf16_even(as_bits(m));
            exp_avg_sq[i] = to_bf16_even(as_bits(v));
        } else {
            exp_avg[i] = m;
            exp_avg_sq[i] = v;
        }
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

template <Layout layout, Decay decay, class Grad, class Moment>
void update(const AdamPiece& piece, const AdamScalars& scalars, int64_t begin, int64_t end) {
    const AdamScalars s = scalars;
    Streams<layout, Grad, Moment> at(piece, begin);
    int64_t left = end - begin;
    for (; left >= block_numel; left -= block_numel) {
        at.prefetch_block();
        update_some<layout, decay>(at, s, block_numel);
        at.advance(block_numel);
    }
    update_some<layout, decay>(at, s, left);
}

// The largest magnitude, times two, plus one where a positive element has it.
GEMINI_ALWAYS_INLINE uint32_t largest_of(const float* __restrict values, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = as_bits(values[i]);
        const uint32_t key = (bits << 1) | (~bits >> 31);
        largest = key > largest ? key : largest;
    }
    return largest;
}

// Elements of which a moment is not finite lose both, and leave the scales of their block alone.
__attribute__((noinline)) void drop_lost(float* __restrict first, float* __restrict second, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const bool is_lost = !std::isfinite(first[i]) || !std::isfinite(second[i]);
        first[i] = is_lost ? 0.0f : first[i];
        second[i] = is_lost ? 0.0f : second[i];
    }
}

// The constants of a map where each instruction finds them.
struct Lookups {
    DynamicMap map;
#ifdef __AVX512F__
    // By an element's power of two, from 2**-24 on: the border inside of it, and the decade below that border.
    static constexpr int least_exponent = 127 - 24;
    alignas(64) float border[32];
    alignas(64) int32_t decade[32];
    alignas(64) float powers[16], sizes[16];  // by decade
#endif

    explicit Lookups(const DynamicMap& its) : map(its) {
#ifdef __AVX512F__
        for (int each = 0; each < 32; ++each) {
            const uint32_t begin = uint32_t(least_exponent + each) << 23, end = begin + (1u << 23);
            border[each] = INFINITY;
            decade[each] = 0;
            for (int number = 1; number < 7; ++number) {
                const uint32_t bits = as_bits(its.borders[number]);
                if (bits < begin) ++decade[each];
                if (bits >= begin && bits < end) border[each] = its.borders[number];
            }
        }
        for (int each = 0; each < 16; ++each) {
            powers[each] = each < 7 ? its.powers[each] : 0.0f;
            sizes[each] = each < 7 ? its.sizes[each] : 0.0f;
        }
#endif
    }
};

// One block of finite elements, as optim/reference.py's `quantize_`. largest: `largest_of` them.
template <bool is_signed>
GEMINI_ALWAYS_INLINE void quantize(const float* __restrict values, int64_t count, uint32_t largest, const Lookups& lookups,
                                   uint8_t* __restrict codes, float* scale) {
    const uint32_t magnitude = largest >> 1;
    if (magnitude == 0) {
        *scale = 0.0f;
        std::memset(codes, 0, size_t(count));
        return;
    }
    const DynamicMap map = lookups.map;
    const float divisor = as_float(magnitude | (largest & 1u ? 0u : 0x80000000u));
    const float factor = as_float(magnitude) < 0x1p-64f ? 0x1p64f : 1.0f;
    const float inverse = 1.0f / (divisor * factor);
    *scale = divisor;
    int64_t i = 0;
#ifdef __AVX512F__
    const __m512 border0 = _mm512_load_ps(lookups.border), border1 = _mm512_load_ps(lookups.border + 16);
    const __m512i decade0 = _mm512_load_si512(lookups.decade), decade1 = _mm512_load_si512(lookups.decade + 16);
    const __m512 powers = _mm512_load_ps(lookups.powers), sizes = _mm512_load_ps(lookups.sizes);
    const __m512 one = _mm512_set1_ps(1.0f);
    const int64_t whole = count / 16 * 16;
    for (; i < whole; i += 16) {
        const __m512 value =
            _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(values + i), _mm512_set1_ps(factor)), _mm512_set1_ps(inverse));
        const __m512 y = is_signed ? _mm512_abs_ps(value) : value;
        // Negative numbers and those below 2**-24 have the first entry, which is right for what lies above no border.
        const __m512i exponent = _mm512_srai_epi32(_mm512_castps_si512(y), 23);
        const __m512i at =
            _mm512_max_epi32(_mm512_sub_epi32(exponent, _mm512_set1_epi32(Lookups::least_exponent)), _mm512_setzero_si512());
        const __mmask16 above = _mm512_cmp_ps_mask(y, _mm512_permutex2var_ps(border0, at, border1), _CMP_GT_OQ);
        __m512i decade = _mm512_permutex2var_epi32(decade0, at, decade1);
        decade = _mm512_mask_add_epi32(decade, above, decade, _mm512_set1_epi32(1));
        const __m512 power = _mm512_permutexvar_ps(decade, powers), size = _mm512_permutexvar_ps(decade, sizes);
        __m512 place = _mm512_sub_ps(_mm512_mul_ps(y, power), _mm512_set1_ps(0.1f));
        place = _mm512_add_ps(_mm512_mul_ps(place, _mm512_set1_ps(1.0f / 0.9f)), one);
        place = _mm512_min_ps(_mm512_max_ps(place, one), _mm512_set1_ps(0x1.fffffep0f));
        __m512i index = _mm512_cvttps_epi32(_mm512_mul_ps(place, size));
        index = _mm512_sub_epi32(index, _mm512_set1_epi32(map.first));
        const __mmask16 is_some = _mm512_cmp_ps_mask(y, _mm512_set1_ps(map.borders[0]), _CMP_GT_OQ);
        const __mmask16 is_top = _mm512_cmp_ps_mask(y, _mm512_set1_ps(map.borders[7]), _CMP_GT_OQ);
        index = _mm512_maskz_mov_epi32(is_some, index);
        index = _mm512_mask_mov_epi32(index, is_top, _mm512_set1_epi32(map.top));
        if constexpr (is_signed) {
            const __m512i zero = _mm512_set1_epi32(127);
            const __mmask16 is_negative = _mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_LT_OQ);
            const __m512i below = _mm512_max_epi32(_mm512_sub_epi32(zero, index), _mm512_setzero_si512());
            index = _mm512_mask_mov_epi32(_mm512_add_epi32(zero, index), is_negative, below);
            index = _mm512_xor_si512(index, zero);
        }
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(index));
    }
#endif
    for (; i < count; ++i) {
        const float value = (values[i] * factor) * inverse;
        const float y = is_signed ? std::fabs(value) : value;
        float power = map.powers[0], size = map.sizes[0];
        for (int decade = 1; decade < 7; ++decade) {
            power = y > map.borders[decade] ? map.powers[decade] : power;
            size = y > map.borders[decade] ? map.sizes[decade] : size;
        }
        float place = (y * power - 0.1f) * (1.0f / 0.9f) + 1.0f;
        place = place > 1.0f ? place : 1.0f;
        place = place < 0x1.fffffep0f ? place : 0x1.fffffep0f;
        int32_t index = int32_t(place * size) - map.first;
        index = y > map.borders[0] ? index : 0;
        index = y > map.borders[7] ? map.top : index;
        if constexpr (is_signed) {
            const int32_t below = 127 - index;
            index = (value < 0.0f ? (below < 0 ? 0 : below) : 127 + index) ^ 127;
        }
        codes[i] = uint8_t(index);
    }
}

inline void dequantize(const uint8_t* __restrict codes, int64_t count, const float* __restrict entries, float scale,
                       float* __restrict values) {
    int64_t i = 0;
#ifdef __AVX512F__
    // Lookups in registers: loads of 16 elements from 16 places are slow where they are mitigated against Downfall.
    __m512 part[16];
    for (int each = 0; each < 16; ++each) part[each] = _mm512_loadu_ps(entries + 16 * each);
    const __m512 scales = _mm512_set1_ps(scale);
    const int64_t whole = count / 16 * 16;
    for (; i < whole; i += 16) {
        const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
        const auto pair = [&](int each) { return _mm512_permutex2var_ps(part[2 * each], code, part[2 * each + 1]); };
        const __mmask16 bit5 = _mm512_test_epi32_mask(code, _mm512_set1_epi32(32));
        const __mmask16 bit6 = _mm512_test_epi32_mask(code, _mm512_set1_epi32(64));
        const __mmask16 bit7 = _mm512_test_epi32_mask(code, _mm512_set1_epi32(128));
        const auto four = [&](int each) {
            return _mm512_mask_blend_ps(bit6, _mm512_mask_blend_ps(bit5, pair(4 * each), pair(4 * each + 1)),
                                        _mm512_mask_blend_ps(bit5, pair(4 * each + 2), pair(4 * each + 3)));
        };
        _mm512_storeu_ps(values + i, _mm512_mul_ps(_mm512_mask_blend_ps(bit7, four(0), four(1)), scales));
    }
#endif
    for (; i < count; ++i) values[i] = entries[codes[i]] * scale;
}

// Update a block whose moments are in `at`, and store them.
template <Layout layout, Decay decay, class Grad>
GEMINI_ALWAYS_INLINE void update_block(const Streams<layout, Grad, float>& at, const AdamScalars& s, int64_t count,
                                       const Lookups& first_map, const Lookups& second_map,
                                       const Streams<layout, Grad, uint8_t>& stored, float* first_scale, float* second_scale) {
    update_some<layout, decay>(at, s, count);
    uint32_t first = largest_of(at.exp_avg, count), second = largest_of(at.exp_avg_sq, count);
    if ((first >> 1) >= 0x7f800000u || (second >> 1) >= 0x7f800000u) {
        drop_lost(at.exp_avg, at.exp_avg_sq, count);
        first = largest_of(at.exp_avg, count), second = largest_of(at.exp_avg_sq, count);
    }
    quantize<true>(at.exp_avg, count, first, first_map, stored.exp_avg, first_scale);
    quantize<false>(at.exp_avg_sq, count, second, second_map, stored.exp_avg_sq, second_scale);
}

template <Layout layout, Decay decay, class Grad>
void update_blocks(const AdamPiece& piece, const AdamScalars& scalars, const DynamicMaps& maps, int64_t begin, int64_t end) {
    const AdamScalars s = scalars;
    alignas(64) float first[moment_block], second[moment_block];
    Streams<layout, Grad, uint8_t> stored(piece, begin);
    const Lookups first_map(maps.exp_avg), second_map(maps.exp_avg_sq);
    float* first_scale = piece.exp_avg_scale + begin / moment_block;
    float* second_scale = piece.exp_avg_sq_scale + begin / moment_block;
    for (int64_t left = end - begin; left > 0; left -= moment_block, ++first_scale, ++second_scale) {
        const int64_t count = left < moment_block ? left : moment_block;
        stored.template prefetch_block<moment_block>();
        dequantize(stored.exp_avg, count, maps.exp_avg.entries, *first_scale, first);
        dequantize(stored.exp_avg_sq, count, maps.exp_avg_sq.entries, *second_scale, second);
        const Streams<layout, Grad, float> at(stored, first, second);
        if (count == moment_block) {
            update_block<layout, decay>(at, s, moment_block, first_map, second_map, stored, first_scale, second_scale);
        } else {
            update_block<layout, decay>(at, s, count, first_map, second_map, stored, first_scale, second_scale);
        }
        stored.advance(count);
    }
}

template <Layout layout, Decay decay, class Grad>
void by_moments(const AdamPiece& piece, const AdamScalars& s, const DynamicMaps& maps, int64_t begin, int64_t end) {
    switch (piece.moments) {
        case Moments::fp32: return update<layout, decay, Grad, float>(piece, s, begin, end);
        case Moments::bf16: return update<layout, decay, Grad, uint16_t>(piece, s, begin, end);
        case Moments::blocks: return update_blocks<layout, decay, Grad>(piece, s, maps, begin, end);
    }
}

template <Layout layout, class Grad>
void by_decay(const AdamPiece& piece, const AdamScalars& s, const DynamicMaps& maps, int64_t begin, int64_t end) {
    if (s.l2 != 0.0f) return by_moments<layout, Decay::l2, Grad>(piece, s, maps, begin, end);
    if (s.decay != 0.0f) return by_moments<layout, Decay::decoupled, Grad>(piece, s, maps, begin, end);
    return by_moments<layout, Decay::none, Grad>(piece, s, maps, begin, end);
}

template <Layout layout>
void by_grad(const AdamPiece& piece, const AdamScalars& s, const DynamicMaps& maps, int64_t begin, int64_t end) {
    switch (piece.grad_type) {
        case GradType::fp32: return by_decay<layout, float>(piece, s, maps, begin, end);
        case GradType::bf16: return by_decay<layout, Bf16>(piece, s, maps, begin, end);
        case GradType::fp16: return by_decay<layout, Fp16>(piece, s, maps, begin, end);
    }
}

}  // namespace

void adam_update(const AdamPiece& piece, const AdamScalars& s, const DynamicMaps& maps, int64_t begin, int64_t end) {
    switch (piece.layout) {
        case Layout::whole: return by_grad<Layout::whole>(piece, s, maps, begin, end);
        case Layout::whole_and_bf16: return by_grad<Layout::whole_and_bf16>(piece, s, maps, begin, end);
        case Layout::whole_and_fp16: return by_grad<Layout::whole_and_fp16>(piece, s, maps, begin, end);
        case Layout::split: return by_grad<Layout::split>(piece, s, maps, begin, end);
    }
}

}  // namespace gemini::GEMINI_LEVEL
