// Adam in the written order of optim/reference.py, on a range of elements of one piece.
#pragma once

#include <cstdint>

#include "level.h"

namespace gemini {

enum class GradType : int { fp32, bf16, fp16 };
// whole: fp32 master, without or with a half-precision copy; split: bf16 weight and int16 remainder
enum class Layout : int { whole, whole_and_bf16, whole_and_fp16, split };

struct AdamScalars {  // optim/scalars.py
    float grad_scale, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, root_bias2, eps, step_size, l2, decay;
};

struct AdamPiece {
    void* weight;  // float, or uint16_t where split
    const void* grad;
    float* exp_avg;
    float* exp_avg_sq;
    void* half;          // uint16_t, or null
    int16_t* remainder;  // or null
    int64_t numel;
    GradType grad_type;
    Layout layout;
};

// Updates elements [begin, end).
using AdamRange = void (*)(const AdamPiece&, const AdamScalars&, int64_t begin, int64_t end);
AdamRange adam_range(Level level);

namespace portable {
void adam_update(const AdamPiece&, const AdamScalars&, int64_t, int64_t);
}
namespace avx2 {
void adam_update(const AdamPiece&, const AdamScalars&, int64_t, int64_t);
}
namespace avx512 {
void adam_update(const AdamPiece&, const AdamScalars&, int64_t, int64_t);
}

}  // namespace gemini
