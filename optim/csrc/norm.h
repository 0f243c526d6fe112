// The order-independent sum of squares of optim/norm.py.
#pragma once

#include <cstdint>

#include "level.h"

namespace gemini {

constexpr int64_t tile_numel = 256;
constexpr int num_limbs = 22;

enum class ValueType : int { fp32, bf16, fp16 };

// Adds tiles [first, last) of `values` (numel elements) to `limbs`; returns the index of their first element that is not
// finite, or -1.
using NormTiles = int64_t (*)(const void* values, ValueType, int64_t numel, int64_t first, int64_t last, int64_t* limbs);
NormTiles norm_tiles(Level level);

// Adds one tile's sum, exactly; false if it is infinite or NaN and was counted instead.
bool add_tile_sum(int64_t* limbs, double sum);

namespace portable {
int64_t add_squares(const void*, ValueType, int64_t, int64_t, int64_t, int64_t*);
}
namespace avx2 {
int64_t add_squares(const void*, ValueType, int64_t, int64_t, int64_t, int64_t*);
}
namespace avx512 {
int64_t add_squares(const void*, ValueType, int64_t, int64_t, int64_t, int64_t*);
}

}  // namespace gemini
