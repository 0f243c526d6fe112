// Streams, events, and copies that are as late as their stream allows. The device guard and the hooks name them.

#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

namespace stand_in {

namespace {

using Key = std::pair<c10::DeviceIndex, c10::StreamId>;

// Contiguous memory of the host that a late copy reads or writes. The copy does not keep it, as nothing does on a GPU.
struct HostMemory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    char* begin = nullptr;
    size_t num_bytes = 0;

    HostMemory() = default;
    explicit HostMemory(const at::Tensor& tensor)
        : storage(tensor.storage().getWeakStorageImpl()),
          begin(static_cast<char*>(tensor.data_ptr())),
          num_bytes(tensor.nbytes()) {}
    bool overlaps(const HostMemory& other) const {
        return begin < other.begin + other.num_bytes && other.begin < begin + num_bytes;
    }
    bool is_there() const {
        bool found = storage.lock().defined();
        if (!found) count("freed too early");
        return found;
    }
};

struct Work {
    enum Kind { TO_DEVICE, TO_HOST, AFTER } kind;
    HostMemory host;      // what TO_DEVICE reads, where TO_HOST writes
    at::Tensor device;    // where TO_DEVICE writes
    at::Tensor content;   // what TO_DEVICE has read, what TO_HOST brings
    Key other{};          // of AFTER: it comes after everything of this stream up to `until`
    int64_t until = 0;
    int64_t number = 0;
    bool reached_device = false, reached_host = false;

    c10::weak_intrusive_ptr<c10::StorageImpl> target{c10::intrusive_ptr<c10::StorageImpl>()};  // of TO_DEVICE

    // Nobody has the device's memory any more, as when a model is dropped: what the copy brings is all the same.
    bool is_unseen() const { return kind == TO_DEVICE && !target.lock().defined(); }
};

struct Queue {
    int64_t number = 0;
    std::deque<Work> work;
};

struct Event {
    Key stream;
    int64_t until;
};

constexpr c10::DeviceIndex NUM_DEVICES = 2;
std::recursive_mutex lock;
std::map<Key, Queue> queues;
std::map<std::string, int64_t> counted;
std::atomic<bool> late{false};
std::atomic<c10::StreamId> last_stream{0};
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[NUM_DEVICES] = {};

Key key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

void deliver(Work& work) {
    if (work.kind != Work::TO_HOST || work.reached_host) return;
    work.reached_host = true;
    if (work.host.is_there()) std::memcpy(work.host.begin, work.content.const_data_ptr(), work.host.num_bytes);
}

// The host has left alone what a copy to the device reads.
void verify(Work& work) {
    if (work.kind != Work::TO_DEVICE || work.reached_host) return;
    work.reached_host = true;
    if (work.is_unseen()) return;
    if (work.host.is_there() && std::memcmp(work.host.begin, work.content.const_data_ptr(), work.host.num_bytes) != 0)
        count("written too early");
}

void reach_device(Key key, int64_t until) {
    for (auto& work : queues[key].work) {
        if (work.number > until) break;
        if (work.reached_device) continue;
        work.reached_device = true;
        if (work.kind == Work::AFTER) reach_device(work.other, work.until);
        if (work.kind != Work::TO_DEVICE) continue;
        // A copy to the host that this one comes after has written the memory that this one reads.
        for (auto& [_, queue] : queues)
            for (auto& each : queue.work)
                if (each.host.overlaps(work.host)) deliver(each);
        if (work.is_unseen() || !work.host.is_there()) continue;
        std::memcpy(work.content.mutable_data_ptr(), work.host.begin, work.host.num_bytes);
        work.device.copy_(work.content);
    }
}

void reach_host(Key key, int64_t until) {
    reach_device(key, until);
    auto& queue = queues[key];
    while (!queue.work.empty() && queue.work.front().number <= until) {
        auto work = std::move(queue.work.front());
        queue.work.pop_front();
        if (work.kind == Work::AFTER) reach_host(work.other, work.until);
        verify(work);
        deliver(work);
    }
}

void append(Key key, Work work) {
    auto& queue = queues[key];
    work.number = ++queue.number;
    queue.work.push_back(std::move(work));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return KIND; }
    c10::Device exchangeDevice(c10::Device device) const override {
        auto before = getDevice();
        setDevice(device);
        return before;
    }
    c10::Device getDevice() const override { return {KIND, current_device}; }
    void setDevice(c10::Device device) const override {
        TORCH_CHECK(device.index() < NUM_DEVICES, "stand_in: no device ", device);
        uncheckedSetDevice(device);
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.index() >= 0) current_device = device.index();
    }
    c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return c10::Stream(c10::Stream::DEFAULT, current_stream(device.index()).device());
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return c10::Stream(c10::Stream::UNSAFE, current_stream(device.index()).device(), ++last_stream);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        auto before = current_stream(stream.device_index());
        current_streams[stream.device_index()] = stream.id();
        return before;
    }
    c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
    c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
    void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
        std::lock_guard<std::recursive_mutex> guard(lock);
        if (*event == nullptr) *event = new Event;
        *static_cast<Event*>(*event) = {key_of(stream), queues[key_of(stream)].number};
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event == nullptr) return;
        std::lock_guard<std::recursive_mutex> guard(lock);
        auto& of = *static_cast<Event*>(event);
        if (of.stream != key_of(stream)) append(key_of(stream), {Work::AFTER, {}, {}, {}, of.stream, of.until});
    }
    bool queryEvent(void* event) const override {
        if (event == nullptr) return true;
        std::lock_guard<std::recursive_mutex> guard(lock);
        auto& of = *static_cast<Event*>(event);
        auto& work = queues[of.stream].work;
        bool is_done = work.empty() || work.front().number > of.until;
        reach_host(of.stream, of.until);  // whoever asks again finds it done
        return is_done;
    }
    bool queryStream(const c10::Stream& stream) const override {
        std::lock_guard<std::recursive_mutex> guard(lock);
        bool is_done = queues[key_of(stream)].work.empty();
        reach_host(key_of(stream), queues[key_of(stream)].number);
        return is_done;
    }
    void synchronizeStream(const c10::Stream& stream) const override { wait_for(stream, "stream"); }
    void synchronizeEvent(void* event) const override {
        if (event == nullptr) return;
        std::lock_guard<std::recursive_mutex> guard(lock);
        count("wait: event");
        auto& of = *static_cast<Event*>(event);
        reach_host(of.stream, of.until);
    }
    void synchronizeDevice(c10::DeviceIndex device) const override {
        std::lock_guard<std::recursive_mutex> guard(lock);
        count("wait: device");
        for (auto& [key, queue] : queues)
            if (key.first == device) reach_host(key, queue.number);
    }
    double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0.0; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
    void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({KIND, device}); }
    c10::DeviceIndex getCurrentDevice() const override { return current_device; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        return Guard().exchangeDevice({KIND, device}).index();
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
        return at::detail::getDefaultCPUGenerator();
    }
    at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
    bool isPinnedPtr(const void*) const override { return false; }
    at::Device getDeviceFromPtr(void*) const override { return {KIND, current_device}; }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
        auto memory = allocator().allocate(num_bytes);
        auto kept = std::min(num_bytes, storage.nbytes());
        before_kernel(current_stream(-1));
        if (kept != 0) std::memcpy(memory.get(), storage.data(), kept);
        storage.set_data_ptr_noswap(std::move(memory));
        storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

void count(const std::string& name) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    counted[name]++;
}

bool copies_are_late() { return late; }

c10::Stream current_stream(c10::DeviceIndex device) {
    if (device < 0) device = current_device;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, device), current_streams[device]);
}

void queue_to_device(c10::Stream stream, const at::Tensor& target, const at::Tensor& source) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Work work{Work::TO_DEVICE, HostMemory(source), kept_on_cpu(target), at::empty_like(source)};
    work.target = target.storage().getWeakStorageImpl();
    append(key_of(stream), std::move(work));
}

void queue_to_host(c10::Stream stream, const at::Tensor& target, const at::Tensor& source) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    reach_device(key_of(stream), queues[key_of(stream)].number);
    // What earlier copies read may be written by a later one, on this stream or on one that waited for them.
    HostMemory host(target);
    for (auto& [_, queue] : queues)
        for (auto& work : queue.work)
            if (work.reached_device && work.host.overlaps(host)) verify(work);
    auto brought = source.to(target.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    std::memset(target.mutable_data_ptr(), 0xFF, target.nbytes());
    append(key_of(stream), {Work::TO_HOST, host, {}, std::move(brought)});
}

void before_kernel(c10::Stream stream) {
    if (!late) return;
    std::lock_guard<std::recursive_mutex> guard(lock);
    reach_device(key_of(stream), queues[key_of(stream)].number);
}

void wait_for(c10::Stream stream, const std::string& reason) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    count("wait: " + reason);
    reach_host(key_of(stream), queues[key_of(stream)].number);
}

}  // namespace stand_in

extern "C" {
void stand_in_set_late(int on) { stand_in::late = on != 0; }
// Writes "name\tcount\n" of everything counted since the last call, and begins anew. Returns the length.
int64_t stand_in_take_counts(char* text, int64_t room) {
    std::lock_guard<std::recursive_mutex> guard(stand_in::lock);
    std::string all;
    for (auto& [name, number] : stand_in::counted) all += name + "\t" + std::to_string(number) + "\n";
    stand_in::counted.clear();
    std::strncpy(text, all.c_str(), size_t(room) - 1);
    return int64_t(all.size());
}
}
