// An operation on the device: the CPU's kernel on the same memory. Tensors of both devices in one call are refused.

#include "device.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <unordered_set>

namespace stand_in {
namespace {

c10::Storage alias_of(const c10::Storage& storage) {
    // A kernel may resize it: `Call` then finds other memory in it.
    c10::DataPtr pointer(storage.mutable_data(), c10::Device(c10::kCPU));
    return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), c10::GetAllocator(c10::kCPU), true};
}

at::Tensor shaped_like(const at::Tensor& shaped, at::Tensor made) {
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(shaped.sizes(), shaped.strides(), shaped.storage_offset());
    if (shaped.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return made;
}

at::Tensor tensor_like(const at::Tensor& shaped, const c10::Storage& storage, c10::DispatchKey key) {
    auto keys = c10::DispatchKeySet(key);
    return shaped_like(shaped, at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, shaped.dtype()));
}

// A view is for inference if what it shows is.
at::Tensor view_like(const at::Tensor& shaped, const c10::Storage& storage, c10::DispatchKeySet keys) {
    return shaped_like(
        shaped, at::detail::make_tensor<c10::TensorImpl>(
                    c10::TensorImpl::VIEW, c10::Storage(storage), keys, shaped.dtype()));
}

// One call of an operation: its tensors of the device as tensors of the CPU, and its results on the device.
class Call {
   public:
    explicit Call(const c10::OperatorHandle& op) : op_(op), name_(op.schema().operator_name().name) {}

    void run(torch::jit::Stack* stack) {
        const auto& arguments = op_.schema().arguments();
        auto begin = stack->size() - arguments.size();
        for (size_t i = 0; i < arguments.size(); i++) look_at((*stack)[begin + i]);
        check();
        for (size_t i = 0; i < arguments.size(); i++) (*stack)[begin + i] = to_cpu((*stack)[begin + i]);
        before_kernel(current_stream(device_.index()));
        count("kernel");
        {
            at::AutoDispatchBelowADInplaceOrView below;
            op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
        }
        follow_resizes();
        for (auto& value : *stack) value = to_device(value);
        // A number that depends on a tensor's content has to come to the host.
        if (has_tensors_ && !returns_tensors()) wait_for(current_stream(device_.index()), name_);
        if (sizes_depend_on_content()) wait_for(current_stream(device_.index()), name_);
    }

   private:
    struct Shared {
        c10::Storage device, cpu;
        c10::DispatchKeySet keys;
    };
    struct Alias {
        at::Tensor device, cpu;
    };

    void look_at(const c10::IValue& value) {
        if (value.isTensor()) {
            look_at(value.toTensor());
        } else if (value.isTensorList()) {
            for (const at::Tensor& each : value.toTensorVector()) look_at(each);
        } else if (value.isList()) {
            for (const c10::IValue& each : value.toListRef()) look_at(each);
        } else if (value.isDevice() && value.toDevice().type() == KIND) {
            note(value.toDevice());
        }
    }

    void look_at(const at::Tensor& tensor) {
        if (is_ours(tensor)) {
            has_tensors_ = true;
            note(tensor.device());
        } else if (tensor.defined() && tensor.dim() > 0) {
            has_cpu_tensors_ = true;
        }
    }

    void note(c10::Device device) {
        if (device.index() < 0) device = current_stream(-1).device();
        TORCH_CHECK(
            device_.index() < 0 || device == device_, "Expected all tensors to be on the same device, but ", name_,
            " found ", device, " and ", device_);
        device_ = device;
    }

    void check() const {
        // Indexing takes positions on the CPU, as on a GPU.
        static const std::unordered_set<std::string> mixed{
            "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_copy_from"};
        TORCH_CHECK(
            !has_tensors_ || !has_cpu_tensors_ || mixed.count(name_) != 0,
            "Expected all tensors to be on the same device, but ", name_, " found cpu and ", device_);
    }

    c10::IValue to_cpu(const c10::IValue& value) {
        if (value.isTensor()) return is_ours(value.toTensor()) ? c10::IValue(to_cpu(value.toTensor())) : value;
        if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor& each : value.toTensorVector()) list.push_back(is_ours(each) ? to_cpu(each) : each);
            return list;
        }
        if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> list;
            for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
                list.push_back(each.has_value() && is_ours(*each) ? to_cpu(*each) : each);
            return list;
        }
        if (value.isDevice() && value.toDevice().type() == KIND) return c10::Device(c10::kCPU);
        return value;
    }

    at::Tensor to_cpu(const at::Tensor& tensor) {
        for (auto& each : aliases_)
            if (each.device.is_same(tensor)) return each.cpu;
        auto cpu = tensor_like(tensor, shared(tensor), c10::DispatchKey::CPU);
        aliases_.push_back({tensor, cpu});
        return cpu;
    }

    const c10::Storage& shared(const at::Tensor& tensor) {
        for (auto& each : storages_)
            if (each.device.is_alias_of(tensor.storage())) return each.cpu;
        storages_.push_back({tensor.storage(), alias_of(tensor.storage()), tensor.key_set()});
        return storages_.back().cpu;
    }

    // An `out=` that was resized, and an operation in place that changed a shape.
    void follow_resizes() {
        for (auto& each : storages_) {
            if (each.cpu.data() == each.device.data() && each.cpu.nbytes() == each.device.nbytes()) continue;
            c10::Storage own(
                c10::Storage::use_byte_size_t(), each.cpu.nbytes(),
                each.cpu.set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::kCPU))), c10::GetAllocator(c10::kCPU), true);
            auto grown = adopt(own, device_);
            each.device.set_data_ptr_noswap(grown.set_data_ptr(c10::DataPtr(nullptr, device_)));
            each.device.unsafeGetStorageImpl()->set_nbytes(own.nbytes());
        }
        for (auto& each : aliases_) {
            auto same = each.device.sizes() == each.cpu.sizes() && each.device.strides() == each.cpu.strides() &&
                        each.device.storage_offset() == each.cpu.storage_offset();
            if (!same)
                each.device.unsafeGetTensorImpl()->set_sizes_and_strides(
                    each.cpu.sizes(), each.cpu.strides(), each.cpu.storage_offset());
        }
    }

    c10::IValue to_device(const c10::IValue& value) {
        if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(to_device(value.toTensor())) : value;
        if (!value.isTensorList()) return value;
        c10::List<at::Tensor> list;
        for (const at::Tensor& each : value.toTensorVector()) list.push_back(each.defined() ? to_device(each) : each);
        return list;
    }

    at::Tensor to_device(const at::Tensor& cpu) {
        for (auto& each : aliases_)
            if (each.cpu.is_same(cpu)) return each.device;
        for (auto& each : storages_)
            if (each.cpu.is_alias_of(cpu.storage())) return view_like(cpu, each.device, each.keys);
        auto result = tensor_like(cpu, adopt(cpu.storage(), device_), c10::DispatchKey::PrivateUse1);
        storages_.push_back({result.storage(), cpu.storage(), result.key_set()});
        return result;
    }

    bool returns_tensors() const {
        for (const auto& each : op_.schema().returns()) {
            auto kind = each.type()->kind();
            if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return false;
        }
        return true;
    }

    bool sizes_depend_on_content() const {
        static const std::unordered_set<std::string> names{
            "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
            "aten::repeat_interleave", "aten::bincount"};
        return names.count(name_) != 0;
    }

    const c10::OperatorHandle& op_;
    std::string name_;
    c10::Device device_{KIND, -1};
    bool has_tensors_ = false, has_cpu_tensors_ = false;
    std::vector<Shared> storages_;
    std::vector<Alias> aliases_;
};

}  // namespace

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    // The results alone are what `Call` looks at: a caller may have more on the stack.
    torch::jit::Stack own(stack->end() - int64_t(op.schema().arguments().size()), stack->end());
    torch::jit::drop(*stack, op.schema().arguments().size());
    Call(op).run(&own);
    stack->insert(stack->end(), own.begin(), own.end());
}

at::Tensor on_cpu(const at::Tensor& tensor) {
    return is_ours(tensor) ? tensor_like(tensor, alias_of(tensor.storage()), c10::DispatchKey::CPU) : tensor;
}

at::Tensor kept_on_cpu(const at::Tensor& tensor) {
    auto* block = block_of(tensor.storage());
    keep_block(block);
    c10::DataPtr pointer(tensor.storage().mutable_data(), block, &free_block, c10::Device(c10::kCPU));
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(pointer), nullptr, false);
    return tensor_like(tensor, storage, c10::DispatchKey::CPU);
}

}  // namespace stand_in
