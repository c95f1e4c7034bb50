// The scope of an operator's kernels: their device, their stream, and the data of their tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#if defined(WITH_CUDA)
#include <c10/cuda/CUDAStream.h>
#endif

namespace layernorm {

class LaunchScope {
 public:
  explicit LaunchScope(const at::Tensor& input) : guard_(input.device()) {}
  LaunchScope(const LaunchScope&) = delete;

  // Return the data of a tensor that kernels only read, only write, or change; null for an undefined tensor.
  const void* input(const at::Tensor& tensor, const char* /*name*/) const {
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
  }
  void* output(const at::Tensor& tensor, const char* /*name*/) const {
    return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
  }
  void* in_out(const at::Tensor& tensor, const char* name) const { return output(tensor, name); }

  // Returns a cudaStream_t without needing CUDA's headers.
  void* stream() const {
#if defined(WITH_CUDA)
    if (guard_.current_device().is_cuda()) return c10::cuda::getCurrentCUDAStream().stream();
#endif
    return nullptr;
  }

 private:
  c10::DeviceGuard guard_;
};

}  // namespace layernorm
