// Device memory: malloc's, filled with NaN, with a capacity that a test may set.

#include "device.h"

#include <c10/core/CPUAllocator.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace stand_in {
namespace {

constexpr int MAX_DEVICES = 8;
constexpr size_t ALIGNMENT = 64;  // the CPU allocator's: some kernels give other bits at other alignments

struct Counts {
    int64_t allocated = 0, peak = 0, total = 0, num_ooms = 0, num_allocations = 0;
    int64_t capacity = int64_t(1) << 40;
};

std::mutex lock;
std::array<Counts, MAX_DEVICES> counts;

struct Block {
    void* data;
    c10::Storage adopted;  // or none, then `data` is malloc's
    size_t num_bytes;
    c10::DeviceIndex device;
    std::atomic<int> num_users{1};
    Block(void* data, c10::Storage adopted, size_t num_bytes, c10::DeviceIndex device)
        : data(data), adopted(std::move(adopted)), num_bytes(num_bytes), device(device) {}
};

void take(c10::DeviceIndex device, size_t num_bytes) {
    std::lock_guard<std::mutex> guard(lock);
    auto& own = counts.at(device);
    if (own.allocated + int64_t(num_bytes) > own.capacity) {
        own.num_ooms++;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "stand_in out of memory: ", num_bytes, " bytes more than ", own.allocated, " of ",
            own.capacity);
    }
    own.allocated += int64_t(num_bytes);
    own.total += int64_t(num_bytes);
    own.num_allocations++;
    own.peak = std::max(own.peak, own.allocated);
}

void drop(Block* block) {
    if (--block->num_users != 0) return;
    if (!block->adopted) std::free(block->data);
    delete block;
}

void free_memory(void* context) {
    auto* block = static_cast<Block*>(context);
    {
        std::lock_guard<std::mutex> guard(lock);
        counts.at(block->device).allocated -= int64_t(block->num_bytes);
    }
    drop(block);
}

struct Memory final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t num_bytes) override {
        auto device = current_stream(-1).device();
        if (num_bytes == 0) return {nullptr, nullptr, &free_memory, device};
        take(device.index(), num_bytes);
        void* data = nullptr;
        TORCH_CHECK(posix_memalign(&data, ALIGNMENT, num_bytes) == 0, "malloc failed");
        std::memset(data, 0xFF, num_bytes);
        return {data, new Block(data, {}, num_bytes, device.index()), &free_memory, device};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* target, const void* source, size_t num_bytes) const override {
        std::memcpy(target, source, num_bytes);
    }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override { count("empty_cache"); }
    void recordStream(const c10::DataPtr&, c10::Stream) override {}
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        std::lock_guard<std::mutex> guard(lock);
        auto& own = counts.at(device);
        c10::CachingDeviceAllocator::DeviceStats stats;
        for (auto* each : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes}) {
            (*each)[0].current = own.allocated;
            (*each)[0].peak = own.peak;
            (*each)[0].allocated = own.total;
            (*each)[0].freed = own.total - own.allocated;
        }
        stats.allocation[0].allocated = own.num_allocations;
        stats.num_ooms = own.num_ooms;
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex device) override {
        std::lock_guard<std::mutex> guard(lock);
        counts.at(device).peak = counts.at(device).allocated;
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
        std::lock_guard<std::mutex> guard(lock);
        auto& own = counts.at(device);
        return {size_t(std::max<int64_t>(0, own.capacity - own.allocated)), size_t(own.capacity)};
    }
};

Memory memory;
[[maybe_unused]] const bool registered = (c10::SetAllocator(KIND, &memory), true);

}  // namespace

c10::DeviceAllocator& allocator() { return memory; }

c10::Storage adopt(const c10::Storage& cpu, c10::Device device) {
    auto num_bytes = cpu.nbytes();
    void* data = cpu.mutable_data();
    c10::DataPtr pointer(nullptr, nullptr, &free_memory, device);
    if (num_bytes != 0) {
        take(device.index(), num_bytes);
        pointer = {data, new Block(data, cpu, num_bytes, device.index()), &free_memory, device};
    }
    return {c10::Storage::use_byte_size_t(), num_bytes, std::move(pointer), &memory, true};
}

void* block_of(const c10::Storage& storage) { return storage.data_ptr().get_context(); }
void keep_block(void* block) {
    if (block != nullptr) static_cast<Block*>(block)->num_users++;
}
void free_block(void* block) {
    if (block != nullptr) drop(static_cast<Block*>(block));
}

}  // namespace stand_in

extern "C" void stand_in_set_capacity(int device, int64_t num_bytes) {
    std::lock_guard<std::mutex> guard(stand_in::lock);
    stand_in::counts.at(device).capacity = num_bytes;
}
