// A stand-in for an accelerator: torch's device type PrivateUse1 in host memory. See ../__init__.py.
//
// Every tensor on it lies where the CPU can read it, so kernels are the CPU's, on the same bytes. What is like a GPU:
// tensors of the CPU and of the device do not mix, memory is not zero when it comes, copies of `non_blocking=True` are
// late, and what waits for the device is counted.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <string>

namespace stand_in {

constexpr auto KIND = c10::DeviceType::PrivateUse1;

// The allocator of device memory. Its counts are torch.accelerator's memory statistics.
c10::DeviceAllocator& allocator();
// Device memory that holds on to `memory` of the CPU: a result of a kernel. Raises OutOfMemoryError.
c10::Storage adopt(const c10::Storage& memory, c10::Device device);
// The block of device memory that a storage has, and keeping one for a copy that is late: not through its storage, whose
// users are counted by who wonders whether the memory may be used again.
void* block_of(const c10::Storage& storage);
void keep_block(void* block);
void free_block(void* block);

// Counts what happened, by name.
void count(const std::string& name);
bool copies_are_late();

c10::Stream current_stream(c10::DeviceIndex device);
// A copy to the device that runs when the next kernel of its stream, or of one that waits for it, does. `source` is
// compared with what it was when the host waits for the stream: another content is a race, and so is memory of the host
// that was freed before that.
void queue_to_device(c10::Stream stream, const at::Tensor& target, const at::Tensor& source);
// A copy to the host that runs when the host waits for its stream. `target` reads as NaN until then.
void queue_to_host(c10::Stream stream, const at::Tensor& target, const at::Tensor& source);
// Everything queued on the stream reaches the device: before each of its kernels.
void before_kernel(c10::Stream stream);
void wait_for(c10::Stream stream, const std::string& reason);

bool is_ours(const at::Tensor& tensor);
// A call of an operation whose arguments are on the stack, on tensors of the device.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);
// The same memory as a tensor of the CPU. The tensor itself must outlive the result.
at::Tensor on_cpu(const at::Tensor& tensor);
// The same, and the memory outlives the tensor.
at::Tensor kept_on_cpu(const at::Tensor& tensor);

}  // namespace stand_in
