// bf16 and fp16 to fp32 and back, in integer and exact fp32 operations that compilers turn into vector code.
// Included inside a level's namespace, after <cstdint> and <cstring>: nothing here may be shared between levels.

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct Bf16 {
    uint16_t bits;
};

struct Fp16 {
    uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(Bf16 value) { return as_float(uint32_t(value.bits) << 16); }

inline float widen(Fp16 value) {
    const uint32_t magnitude = uint32_t(value.bits & 0x7fff) << 13;
    // the exponent's bias differs by 112; the product is exact for normal and subnormal numbers
    const uint32_t finite = as_bits(as_float(magnitude) * 0x1p112f);
    const uint32_t infinite_or_nan = magnitude >= (0x7c00u << 13) ? 0x7f800000u : 0u;
    return as_float(finite | infinite_or_nan | uint32_t(value.bits & 0x8000) << 16);
}

inline bool is_nan_bits(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// Half up on the bit pattern, see optim/rounding.py.
inline Bf16 to_bf16(uint32_t bits) {
    const uint32_t rounded = (bits + 0x8000u) >> 16;
    return Bf16{uint16_t(is_nan_bits(bits) ? 0x7fc0u : rounded)};
}

// To nearest even.
inline Fp16 to_fp16(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
    // below 2**-14 results are multiples of 2**-24, which is what the sum with 0.5 rounds to
    const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
    const uint32_t odd = (magnitude >> 13) & 1u;
    const uint32_t normal = (magnitude + 0xfffu + odd - (112u << 23)) >> 13;
    uint32_t rounded = magnitude < (113u << 23) ? subnormal : normal;
    rounded = magnitude >= (143u << 23) ? 0x7c00u : rounded;
    rounded = magnitude > 0x7f800000u ? 0x7e00u : rounded;
    return Fp16{uint16_t(rounded | sign)};
}

// bf16 to nearest even, as moments are rounded; every NaN is 0x7fc0.
inline uint16_t to_bf16_even(uint32_t bits) {
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return uint16_t(is_nan_bits(bits) ? 0x7fc0u : rounded);
}
