// Exact addition of fp64 numbers as integers, cut into 32-bit digits; the constants are those of optim/norm.py.
#include <cstring>

#include "norm.h"

namespace gemini {

namespace {
constexpr int lowest_exponent = -352;
constexpr int inf_limb = 20, nan_limb = 21;
}  // namespace

bool add_tile_sum(int64_t* limbs, double sum) {
    uint64_t bits;
    std::memcpy(&bits, &sum, sizeof bits);
    const int biased = int((bits >> 52) & 0x7ff);
    const uint64_t fraction = bits & ((uint64_t(1) << 52) - 1);
    if (biased == 0x7ff) {
        ++limbs[fraction ? nan_limb : inf_limb];
        return false;
    }
    if (biased == 0) return true;  // zero: subnormal sums do not occur
    const int shift = biased - (1075 + lowest_exponent);
    const unsigned __int128 shifted = static_cast<unsigned __int128>(fraction | uint64_t(1) << 52) << (shift & 31);
    int64_t* limb = limbs + (shift >> 5);
    limb[0] += int64_t(uint64_t(shifted) & 0xffffffffu);
    limb[1] += int64_t(uint64_t(shifted >> 32) & 0xffffffffu);
    limb[2] += int64_t(uint64_t(shifted >> 64));
    return true;
}

}  // namespace gemini
