#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

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
            while (int(threads_.size()) < num_helpers) {
                const int number = int(threads_.size());
                threads_.emplace_back([this, number] { help(number); });
                threads_.back().detach();
            }
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
    std::vector<std::thread> threads_;
    Job* job_ = nullptr;
    uint64_t generation_ = 0;
    int num_helpers_ = 0, num_running_ = 0;
};

// Never destroyed: its threads sleep until the process ends. A forked child has none of them and starts its own.
Pool& pool() {
    static std::mutex mutex;
    static Pool* current = nullptr;
    static pid_t owner = 0;
    std::lock_guard<std::mutex> lock(mutex);
    if (owner != getpid()) {
        current = new Pool;
        owner = getpid();
    }
    return *current;
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
