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

// bf16 that is rounded stochastically.
struct Drawn {
    uint16_t bits;
};

// optim/reference.py, `draws_of`: the random numbers of elements from `first` on.
struct Draws {
    uint32_t key0, key1, first;

    static GEMINI_ALWAYS_INLINE uint32_t mixed(uint32_t h) {
        h ^= h >> 16;
        h *= 0x7feb352du;
        h ^= h >> 15;
        h *= 0x846ca68bu;
        return h ^ (h >> 16);
    }

    GEMINI_ALWAYS_INLINE uint32_t of(uint32_t i) const { return mixed(mixed((first + i) ^ key0) + key1); }
};

GEMINI_ALWAYS_INLINE Drawn to_drawn(uint32_t bits, uint32_t number) {
    return Drawn{uint16_t(is_nan_bits(bits) ? 0x7fc0u : (bits + number) >> 16)};
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
GEMINI_ALWAYS_INLINE void update_some(const Streams<layout, Grad, Moment>& at, const AdamScalars& s, int64_t count,
                                      const Draws& draws = {}) {
    constexpr bool in_bf16 = std::is_same_v<Moment, uint16_t>, is_drawn = std::is_same_v<Moment, Drawn>;  // else float
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
        } else if constexpr (is_drawn) {
            m = widen(Bf16{exp_avg[i].bits});
            v = widen(Bf16{exp_avg_sq[i].bits});
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
        } else if constexpr (is_drawn) {
            const uint32_t number = draws.of(uint32_t(i));
            exp_avg[i] = to_drawn(as_bits(m), number & 0xffffu);
            exp_avg_sq[i] = to_drawn(as_bits(v), number >> 16);
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
    Draws draws{uint32_t(piece.key), uint32_t(piece.key >> 32), uint32_t(piece.first + uint64_t(begin))};
    int64_t left = end - begin;
    for (; left >= block_numel; left -= block_numel) {
        at.prefetch_block();
        update_some<layout, decay>(at, s, block_numel, draws);
        at.advance(block_numel);
        draws.first += uint32_t(block_numel);
    }
    update_some<layout, decay>(at, s, left, draws);
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
    // By the low five bits of an element's exponent, from 2**-24 on: the border inside of its power of two, and below that
    // border 23 less the decade (22 for second moments), by which the place in a decade is shifted. Zero is the decade
    // below the first, and 1 the one above the last: both have a power of 0, and so the first place in their decade.
    static constexpr int least_exponent = 127 - 24;
    alignas(64) float border[32];
    alignas(64) int32_t shift[32];
    alignas(64) float power[16];  // by the low four bits of the shift
    // What a byte means is 0.9 * g - 0.8, times a power of ten, if 2**e * g is the odd number 2n + 1 (2n + 3 for second
    // moments) of its number n in the map. By the low four bits of e + 127: a factor of the odd number and what is added,
    // as sums of a high part, with which every product and sum is exact, and a low one. So one rounding is left, and the
    // result is the map's entry: a test compares all of them.
    alignas(64) float factor[16], factor_low[16], offset[16], offset_low[16];
#endif

    Lookups(const DynamicMap& its, bool is_signed) : map(its) {
#ifdef __AVX512F__
        const int first = is_signed ? 23 : 22;
        for (int each = 0; each < 32; ++each) border[each] = INFINITY, shift[each] = first + 1;
        for (int exponent = least_exponent; exponent < 128; ++exponent) {
            const uint32_t begin = exponent == least_exponent ? 0u : uint32_t(exponent) << 23, end = uint32_t(exponent + 1) << 23;
            for (const float each : its.borders) {
                const uint32_t bits = as_bits(each);
                if (bits < begin) --shift[exponent & 31];
                if (bits >= begin && bits < end) border[exponent & 31] = each;
            }
        }
        for (int each = 0; each < 16; ++each) power[each] = factor[each] = factor_low[each] = offset[each] = offset_low[each] = 0.0f;
        double ten = 1e-6;
        for (int decade = 0; decade < 7; ++decade, ten *= 10.0) {
            power[(first - decade) & 15] = its.powers[decade];
            const int exponent = decade + (is_signed ? 1 : 2), at = (127 + exponent) & 15;
            const double unit = std::ldexp(1.0, int(std::ceil(std::log2(ten))) - 24);
            const double whole_factor = std::ldexp(0.9 * ten, -exponent), whole_offset = -0.8 * ten;
            const double high_factor = std::nearbyint(whole_factor / unit) * unit, high_offset = std::nearbyint(whole_offset / unit) * unit;
            factor[at] = float(high_factor), factor_low[at] = float(whole_factor - high_factor);
            offset[at] = float(high_offset), offset_low[at] = float(whole_offset - high_offset);
        }
        offset[(127 + (is_signed ? 8 : 9)) & 15] = 1.0f;
#endif
    }
};

// One block of finite elements, as optim/reference.py's `quantize_`. largest: `largest_of` them. A function of its own, or
// each of the many loops would have a copy.
template <bool is_signed>
__attribute__((noinline)) void quantize(const float* __restrict values, int64_t count, uint32_t largest, const Lookups& lookups,
                                        uint8_t* __restrict codes, float* scale) {
    const uint32_t magnitude = largest >> 1;
    if (magnitude == 0) {
        *scale = 0.0f;
        std::memset(codes, 0, size_t(count));
        return;
    }
    const DynamicMap& map = lookups.map;
    const float divisor = as_float(magnitude | (largest & 1u ? 0u : 0x80000000u));
    const float factor = as_float(magnitude) < 0x1p-64f ? 0x1p64f : 1.0f;
    const float inverse = 1.0f / (divisor * factor);
    *scale = divisor;
    int64_t i = 0;
#ifdef __AVX512F__
    const __m512 border0 = _mm512_load_ps(lookups.border), border1 = _mm512_load_ps(lookups.border + 16);
    const __m512i shift0 = _mm512_load_si512(lookups.shift), shift1 = _mm512_load_si512(lookups.shift + 16);
    const __m512 powers = _mm512_load_ps(lookups.power);
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512i fraction = _mm512_set1_epi32(0x7fffff), implicit = _mm512_set1_epi32(0x800000);
    const int64_t whole = count / 16 * 16;
    for (; i < whole; i += 16) {
        const __m512 value =
            _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(values + i), _mm512_set1_ps(factor)), _mm512_set1_ps(inverse));
        const __m512 y = is_signed ? _mm512_abs_ps(value) : value;
        const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(_mm512_max_ps(y, _mm512_set1_ps(0x1p-24f))), 23);
        const __mmask16 above = _mm512_cmp_ps_mask(y, _mm512_permutex2var_ps(border0, exponent, border1), _CMP_GT_OQ);
        __m512i shift = _mm512_permutex2var_epi32(shift0, exponent, shift1);
        shift = _mm512_mask_sub_epi32(shift, above, shift, _mm512_set1_epi32(1));
        __m512 place = _mm512_sub_ps(_mm512_mul_ps(y, _mm512_permutexvar_ps(shift, powers)), _mm512_set1_ps(0.1f));
        place = _mm512_add_ps(_mm512_mul_ps(place, _mm512_set1_ps(1.0f / 0.9f)), one);
        place = _mm512_min_ps(_mm512_max_ps(place, one), _mm512_set1_ps(0x1.fffffep0f));
        // (place & fraction) | implicit, shifted: the integer part of the place times the decade's size.
        const __m512i bits = _mm512_ternarylogic_epi32(_mm512_castps_si512(place), fraction, implicit, 0xea);
        __m512i index = _mm512_srlv_epi32(bits, shift);
        __m128i packed;
        if constexpr (is_signed) {
            // The byte of a negative number is its index, of which there are 127, and that of a positive one minus it.
            const __mmask16 is_positive = _mm512_testn_epi32_mask(_mm512_castps_si512(value), _mm512_set1_epi32(int(0x80000000u)));
            index = _mm512_mask_sub_epi32(index, is_positive, _mm512_setzero_si512(), index);
            packed = _mm512_cvtsepi32_epi8(index);
        } else {
            packed = _mm512_cvtepi32_epi8(_mm512_sub_epi32(index, _mm512_set1_epi32(1)));
        }
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), packed);
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

// One block, as optim/reference.py's `dequantize_`.
template <bool is_signed>
__attribute__((noinline)) void dequantize(const uint8_t* __restrict codes, int64_t count, const Lookups& lookups, float scale,
                                          float* __restrict values) {
    int64_t i = 0;
#ifdef __AVX512F__
    // Without a lookup of the 256 numbers: loads of 16 elements from 16 places are slow where they are mitigated against
    // Downfall, and a map takes half of all registers.
    const __m512 factors = _mm512_load_ps(lookups.factor), factors_low = _mm512_load_ps(lookups.factor_low);
    const __m512 offsets = _mm512_load_ps(lookups.offset), offsets_low = _mm512_load_ps(lookups.offset_low);
    const __m512 scales = _mm512_set1_ps(scale);
    const int64_t whole = count / 16 * 16;
    for (; i < whole; i += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
        const __m512i code = is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
        const __m512 number = _mm512_cvtepi32_ps(is_signed ? _mm512_abs_epi32(code) : code);
        const __m512 odd = _mm512_fmadd_ps(number, _mm512_set1_ps(2.0f), _mm512_set1_ps(is_signed ? 1.0f : 3.0f));
        const __m512i at = _mm512_srli_epi32(_mm512_castps_si512(odd), 23);
        const __m512 high = _mm512_fmadd_ps(odd, _mm512_permutexvar_ps(at, factors), _mm512_permutexvar_ps(at, offsets));
        const __m512 low = _mm512_fmadd_ps(odd, _mm512_permutexvar_ps(at, factors_low), _mm512_permutexvar_ps(at, offsets_low));
        __m512 value = _mm512_add_ps(high, low);
        if constexpr (is_signed) {
            // Bytes from 1 to 127 are of negative numbers: value ^ (-code & the sign).
            const __m512i sign = _mm512_sub_epi32(_mm512_setzero_si512(), code);
            value = _mm512_castsi512_ps(
                _mm512_ternarylogic_epi32(_mm512_castps_si512(value), sign, _mm512_set1_epi32(int(0x80000000u)), 0x78));
        }
        _mm512_storeu_ps(values + i, _mm512_mul_ps(value, scales));
    }
#endif
    for (; i < count; ++i) values[i] = lookups.map.entries[codes[i]] * scale;
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
    const Lookups first_map(maps.exp_avg, true), second_map(maps.exp_avg_sq, false);
    float* first_scale = piece.exp_avg_scale + begin / moment_block;
    float* second_scale = piece.exp_avg_sq_scale + begin / moment_block;
    for (int64_t left = end - begin; left > 0; left -= moment_block, ++first_scale, ++second_scale) {
        const int64_t count = left < moment_block ? left : moment_block;
        stored.template prefetch_block<moment_block>();
        dequantize<true>(stored.exp_avg, count, first_map, *first_scale, first);
        dequantize<false>(stored.exp_avg_sq, count, second_map, *second_scale, second);
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
        case Moments::drawn: return update<layout, decay, Grad, Drawn>(piece, s, begin, end);
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
