#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace gemini {

namespace {

struct Job {
    const std::function<void(int64_t, int64_t)>* work;
    int64_t count, grain;
    std::atomic<int64_t> next{0};

    void run() {
        PlainArithmetic plain;
        for (;;) {
            const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
            if (begin >= count) return;
            (*work)(begin, std::min(begin + grain, count));
        }
    }
};

class Pool {
public:
    // False if another thread's job is running.
    bool run(Job& job, int num_helpers) {
        std::unique_lock<std::mutex> busy(busy_, std::try_to_lock);
        if (!busy.owns_lock()) return false;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            num_helpers = start(num_helpers);
            job_ = &job;
            num_helpers_ = num_helpers;
            num_running_ = num_helpers;
            ++generation_;
        }
        wake_.notify_all();
        job.run();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return num_running_ == 0; });
        return true;
    }

private:
    // Threads there are then; fewer than wanted where the system has no more.
    int start(int num_wanted) {
        try {
            for (; num_threads_ < num_wanted; ++num_threads_)
                std::thread([this, number = num_threads_] { help(number); }).detach();
        } catch (const std::system_error&) {
        }
        return std::min(num_threads_, num_wanted);
    }

    [[noreturn]] void help(int number) {
        uint64_t seen = 0;
        for (;;) {
            Job* job;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return generation_ != seen && number < num_helpers_; });
                seen = generation_;
                job = job_;
            }
            job->run();
            std::lock_guard<std::mutex> lock(mutex_);
            if (--num_running_ == 0) done_.notify_one();
        }
    }

    std::mutex busy_, mutex_;
    std::condition_variable wake_, done_;
    Job* job_ = nullptr;
    uint64_t generation_ = 0;
    int num_threads_ = 0, num_helpers_ = 0, num_running_ = 0;
};

std::atomic<Pool*> current{nullptr};

// A forked child has none of the threads, and locks that they held stay locked: it forgets the pool and makes its own.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });

// Never destroyed: its threads sleep until the process ends.
Pool& pool() {
    Pool* found = current.load();
    if (found) return *found;
    auto mine = std::make_unique<Pool>();
    return current.compare_exchange_strong(found, mine.get()) ? *mine.release() : *found;
}

}  // namespace

void parallel_for(int64_t count, int64_t grain, int num_threads, const std::function<void(int64_t, int64_t)>& work) {
    Job job{&work, count, grain};
    const int64_t num_ranges = (count + grain - 1) / grain;
    const int num_helpers = int(std::min<int64_t>(num_threads, num_ranges)) - 1;
    if (num_helpers < 1 || !pool().run(job, num_helpers)) job.run();
}

PlainArithmetic::PlainArithmetic() {
#ifdef __SSE__
    before_ = _mm_getcsr();
    _mm_setcsr(0x1f80);
#endif
}

PlainArithmetic::~PlainArithmetic() {
#ifdef __SSE__
    _mm_setcsr(before_);
#endif
}

}  // namespace gemini
