// What the operators need of the device the CUDA kernels run on: a GPU, or the emulator of tests/emulator,
// which keeps its tensors on the CPU. The one place where tensors become the pointers of a kernel's
// parameters.
#pragma once

#include <ATen/core/Tensor.h>

#if defined(LAYERNORM_EMULATE)
#include "buffers.h"
#else
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace layernorm::cuda {

#if defined(LAYERNORM_EMULATE)

constexpr auto kDeviceType = c10::DeviceType::CPU;

// The scope of an operator's launches, on the device of its input.
class Launching {
 public:
  explicit Launching(const at::Tensor&) { emulator::clear_buffers(); }
  ~Launching() { emulator::clear_buffers(); }
  Launching(const Launching&) = delete;

  void* stream() const { return nullptr; }

  // The data of a tensor that kernels only read, or of one they fill. Null for an undefined one. The names
  // are for reports.
  const void* input(const at::Tensor& tensor, const char* name) const {
    return pointer(tensor, name, emulator::Contents::kInput);
  }
  void* output(const at::Tensor& tensor, const char* name) const {
    return pointer(tensor, name, emulator::Contents::kOutput);
  }

 private:
  static void* pointer(const at::Tensor& tensor, const char* name, emulator::Contents contents) {
    if (!tensor.defined() || tensor.numel() == 0) return nullptr;
    int64_t last = 0;  // offset of the last element
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    void* data = const_cast<void*>(tensor.const_data_ptr());
    emulator::register_buffer(data, static_cast<size_t>(last + 1) * tensor.element_size(), name, contents);
    return data;
  }
};

#else

constexpr auto kDeviceType = c10::DeviceType::CUDA;

class Launching {
 public:
  explicit Launching(const at::Tensor& tensor) : guard_(tensor.device()) {}

  void* stream() const { return c10::cuda::getCurrentCUDAStream().stream(); }

  const void* input(const at::Tensor& tensor, const char*) const {
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
  }
  void* output(const at::Tensor& tensor, const char*) const {
    return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
  }

 private:
  c10::cuda::CUDAGuard guard_;
};

#endif

}  // namespace layernorm::cuda
