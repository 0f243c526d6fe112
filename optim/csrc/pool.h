// Threads of our own: neither torch's nor OpenMP's, so that a step's budget does not change theirs.
#pragma once

#include <cstdint>
#include <functional>

namespace gemini {

// Calls work(begin, end) for ranges of `grain` elements that cover [0, count), on at most `num_threads` threads, the
// caller's being one. Ranges may run in any order. Several threads may call it; who finds the pool busy works alone.
void parallel_for(int64_t count, int64_t grain, int num_threads, const std::function<void(int64_t, int64_t)>& work);

// Rounding to nearest and subnormal numbers, as IEEE 754 has them, whatever the thread was set to (where there is SSE;
// elsewhere the thread's setting counts); restored at the end.
class PlainArithmetic {
public:
    PlainArithmetic();
    ~PlainArithmetic();
    PlainArithmetic(const PlainArithmetic&) = delete;

private:
    unsigned before_ = 0;
};

}  // namespace gemini
