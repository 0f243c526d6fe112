// What the device cannot leave to kernels of the CPU: making tensors, copies, and what torch asks of each device.

#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

namespace stand_in {
namespace {

c10::Device device_of(std::optional<c10::Device> device) {
    return device.has_value() && device->index() >= 0 ? *device : current_stream(-1).device();
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    c10::OptionalDeviceGuard guard(device_of(device));
    return at::detail::empty_generic(
        size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
    c10::OptionalDeviceGuard guard(device_of(device));
    return at::detail::empty_strided_generic(
        size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
    auto stream = current_stream((is_ours(target) ? target : source).device().index());
    auto from = on_cpu(source), to = on_cpu(target);
    auto whole = source.sizes() == target.sizes() && from.is_contiguous() && to.is_contiguous();
    std::string link = is_ours(source) ? (is_ours(target) ? "on device" : "to host") : "to device";
    if (link == "on device") {
        before_kernel(stream);
        count("kernel");
        to.copy_(from);
        return target;
    }
    count("copy " + link + (non_blocking ? "" : ", blocking"));
    // One number travels with the launch.
    bool is_number = link == "to device" && source.dim() == 0;
    if (copies_are_late() && non_blocking && whole && to.numel() != 0) {
        if (is_ours(source)) {
            queue_to_host(stream, target, from);
        } else {
            queue_to_device(stream, target, source);
        }
        return target;
    }
    if (non_blocking || is_number) {
        before_kernel(stream);
    } else {
        wait_for(stream, "copy " + link);
    }
    to.copy_(from);
    return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
    target.resize_(source.sizes());
    return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
    wait_for(current_stream(self.device().index()), "item");
    return on_cpu(self).item();
}

at::Tensor& set_storage_offset(
    at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(source));
    if (stride.data() == nullptr || (stride.empty() && !size.empty())) {
        impl->set_storage_offset(offset);
        impl->set_sizes_contiguous(size);
    } else {
        impl->set_sizes_and_strides(size, stride, offset);
    }
    return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
    auto numel = int64_t(source.nbytes() / self.dtype().itemsize());
    return set_storage_offset(self, std::move(source), 0, {numel}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
    return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
    c10::OptionalDeviceGuard guard(self.device());
    return set_storage(self, {c10::Storage::use_byte_size_t(), 0, &allocator(), true});
}

// As on CUDA: `.data =` takes a dense tensor of any device.
bool may_share_data(const at::Tensor& self, const at::Tensor& from) {
    auto is_dense = [](const at::Tensor& tensor) { return tensor.layout() == at::kStrided && tensor.has_storage(); };
    return self.key_set() == from.key_set() || (is_dense(self) && (is_dense(from) || is_ours(from)));
}

// torch asks devices of this type for convolutions of their own.
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
    run_on_cpu(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
    auto argument = [&](size_t index) { return stack->end() - 10 + int64_t(index); };
    auto weight = argument(2)->toTensor();
    auto numel = argument(6)->toBool() ? weight.size(1) * argument(8)->toInt() : weight.size(0);
    stack->insert(argument(3), c10::IValue(std::vector<int64_t>{numel}));  // the sizes of the bias
    run_on_cpu(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack);
}

void record_stream(at::Tensor&, c10::Stream) { count("record_stream"); }

int64_t plain_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
    return 0;  // the written formula
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", local_scalar_dense);
    m.impl("set_.source_Storage_storage_offset", set_storage_offset);
    m.impl("set_.source_Storage", set_storage);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("set_", set_nothing);
    m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
    m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
    m.impl("_has_compatible_shallow_copy_type", may_share_data);
    m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace

}  // namespace stand_in

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &stand_in::plain_attention)
}

namespace at::autocast {
#define IN_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WITH_RESULT_IN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define IN_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    AT_FORALL_LOWER_PRECISION_FP(IN_LOWER_PRECISION)
    AT_FORALL_FP32(IN_FP32)
    AT_FORALL_FP32_SET_OPT_DTYPE(WITH_RESULT_IN_FP32)
    AT_FORALL_PROMOTE(IN_WIDEST)
}
}  // namespace at::autocast
