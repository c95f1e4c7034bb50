// The emulator's version of csrc/ops/launch_scope.h: registers the memory of CPU tensors as the kernels' global memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "emulator.h"

namespace layernorm {

class LaunchScope {
 public:
  explicit LaunchScope(const at::Tensor&) {}
  ~LaunchScope() { emulator::clear_buffers(); }
  LaunchScope(const LaunchScope&) = delete;

  const void* input(const at::Tensor& tensor, const char* name) const {
    return add(tensor, name, emulator::Contents::kInput);
  }
  void* output(const at::Tensor& tensor, const char* name) const {
    return add(tensor, name, emulator::Contents::kOutput);
  }
  void* in_out(const at::Tensor& tensor, const char* name) const {
    return add(tensor, name, emulator::Contents::kInOut);
  }
  void* stream() const { return nullptr; }

 private:
  static void* add(const at::Tensor& tensor, const char* name, emulator::Contents contents) {
    if (!tensor.defined()) return nullptr;
    void* const data =
        contents == emulator::Contents::kInput ? const_cast<void*>(tensor.const_data_ptr()) : tensor.mutable_data_ptr();
    if (tensor.numel() == 0) return data;
    size_t elements = 1;  // up to the last one
    for (int64_t d = 0; d < tensor.dim(); ++d) elements += (tensor.size(d) - 1) * tensor.stride(d);
    emulator::register_buffer(data, elements * tensor.element_size(), name, contents);
    return data;
  }
};

}  // namespace layernorm
