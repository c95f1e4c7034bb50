// Where tensors become the pointers of a kernel's parameters, on the CPU, on a GPU, and in the emulator of
// tests/emulator, which runs the CUDA kernels on CPU tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#if defined(LAYERNORM_EMULATE)
#include "buffers.h"
#elif defined(WITH_CUDA)
#include <c10/cuda/CUDAStream.h>
#endif

namespace layernorm {

// The scope of an operator's kernels, on the device of its input.
class Launching {
 public:
  explicit Launching(const at::Tensor& input) : guard_(input.device()) {}
  Launching(const Launching&) = delete;
#if defined(LAYERNORM_EMULATE)
  ~Launching() { emulator::clear_buffers(); }
#endif

  // The data of a tensor that kernels only read, of one that they fill, and of one that they change; null for an
  // undefined one. The emulator learns their extents here, and calls them `name` in its reports.
  const void* input(const at::Tensor& tensor, const char* name) const {
    return tensor.defined() ? known(tensor.const_data_ptr(), tensor, name, Use::kInput) : nullptr;
  }
  void* output(const at::Tensor& tensor, const char* name) const {
    return tensor.defined() ? known(tensor.mutable_data_ptr(), tensor, name, Use::kOutput) : nullptr;
  }
  void* in_out(const at::Tensor& tensor, const char* name) const {
    return tensor.defined() ? known(tensor.mutable_data_ptr(), tensor, name, Use::kInOut) : nullptr;
  }

  // A cudaStream_t, without CUDA's headers.
  void* stream() const {
#if defined(WITH_CUDA) && !defined(LAYERNORM_EMULATE)
    if (guard_.current_device().is_cuda()) return c10::cuda::getCurrentCUDAStream().stream();
#endif
    return nullptr;
  }

 private:
#if defined(LAYERNORM_EMULATE)
  using Use = emulator::Contents;
#else
  enum class Use { kInput, kOutput, kInOut };
#endif

  template <class Data>
  static Data* known(Data* data, const at::Tensor& tensor, const char* name, Use use) {
#if defined(LAYERNORM_EMULATE)
    if (tensor.numel() == 0) return data;
    size_t last = 0;  // offset of the last element
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    emulator::register_buffer(data, (last + 1) * tensor.element_size(), name, use);
#else
    static_cast<void>(tensor), static_cast<void>(name), static_cast<void>(use);
#endif
    return data;
  }

  c10::DeviceGuard guard_;
};

}  // namespace layernorm
