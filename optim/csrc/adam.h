// Adam in the written order of optim/reference.py, on a range of elements of one piece.
#pragma once

#include <cstdint>

#include "level.h"

namespace gemini {

enum class GradType : int { fp32, bf16, fp16 };
// whole: fp32 master, without or with a half-precision copy; split: bf16 weight and int16 remainder
enum class Layout : int { whole, whole_and_bf16, whole_and_fp16, split };
// blocks: bytes, with a scale for each block of elements, the first of which is the piece's first
// drawn: bf16 that is rounded stochastically
enum class Moments : int { fp32, bf16, blocks, drawn };

constexpr int64_t moment_block = 256;  // optim/piece.py, BLOCK

// The dynamic map of one moment: optim/reference.py, DynamicMap.
struct DynamicMap {
    const float* entries;
    float borders[8], powers[7], sizes[7];
    int32_t first, top;
};

struct DynamicMaps {
    DynamicMap exp_avg, exp_avg_sq;
};

struct AdamScalars {  // optim/scalars.py
    float grad_scale, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, root_bias2, eps, step_size, l2, decay;
};

struct AdamPiece {
    void* weight;  // float, or uint16_t where split
    const void* grad;
    void* exp_avg;  // float, uint16_t or uint8_t
    void* exp_avg_sq;
    void* half;          // uint16_t, or null
    int16_t* remainder;  // or null
    int64_t numel;
    GradType grad_type;
    Layout layout;
    Moments moments;
    float* exp_avg_scale;  // or null
    float* exp_avg_sq_scale;
    uint64_t key;    // of the random numbers, and the place of the first element in its tensor: optim/piece.py, Draws
    uint64_t first;
};

// Updates elements [begin, end). With moments in blocks both are multiples of `moment_block`, or the piece's end.
using AdamRange = void (*)(const AdamPiece&, const AdamScalars&, const DynamicMaps&, int64_t begin, int64_t end);
AdamRange adam_range(Level level);

namespace portable {
void adam_update(const AdamPiece&, const AdamScalars&, const DynamicMaps&, int64_t, int64_t);
}
namespace avx2 {
void adam_update(const AdamPiece&, const AdamScalars&, const DynamicMaps&, int64_t, int64_t);
}
namespace avx512 {
void adam_update(const AdamPiece&, const AdamScalars&, const DynamicMaps&, int64_t, int64_t);
}

}  // namespace gemini
