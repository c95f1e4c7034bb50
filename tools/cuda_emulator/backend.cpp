// Calls the emulated CUDA kernels in the place of the CPU kernels, and registers the arrays of a call as their global
// memory.
#include "emulator.h"
#include "kernel_params.h"

namespace layernorm {
namespace {

using emulator::Contents;

// Registers arrays of a call, and its workspace, while it exists.
class GlobalMemory final : public Allocator {
 public:
  explicit GlobalMemory(const Params& p) : p_(p) {
    add_parameter(p.weight, "weight", Contents::kInput);
    add_parameter(p.bias, "bias", Contents::kInput);
    add_parameter(p.input_scale, "input_scale", Contents::kInput);
    add_rows(p.gate, p.dtype, "gate", Contents::kInput);
  }
  GlobalMemory(const GlobalMemory&) = delete;
  ~GlobalMemory() { emulator::clear_buffers(); }

  void add_rows(const View& view, Dtype dtype, const char* name, Contents contents) {
    add(view, p_.rows, p_.cols, dtype, name, contents);
  }
  void add_statistic(const View& view, const char* name, Contents contents) {
    add(view, p_.rows, 1, Dtype::kFloat32, name, contents);
  }
  void add_parameter(const View& view, const char* name, Contents contents) {
    add(view, 1, p_.cols, p_.param_dtype, name, contents);
  }

  void* allocate(int64_t bytes) override {
    void* const data = p_.allocator->allocate(bytes);
    emulator::register_buffer(data, bytes, "workspace", Contents::kOutput);
    return data;
  }

 private:
  void add(const View& view, int64_t rows, int64_t cols, Dtype dtype, const char* name, Contents contents) {
    if (view.data == nullptr) return;
    const int64_t last =
        (p_.samples - 1) * view.sample_stride + (rows - 1) * view.row_stride + (cols - 1) * view.col_stride;
    emulator::register_buffer(view.data, (last + 1) * (dtype == Dtype::kFloat32 ? 4 : 2), name, contents);
  }

  const Params& p_;
};

}  // namespace

namespace cpu {

void forward(const ForwardParams& params) {
  GlobalMemory memory(params);
  const bool inplace = params.sum.data != nullptr && params.sum.data == params.residual.data;
  memory.add_rows(params.input, params.dtype, "input", Contents::kInput);
  if (!inplace) memory.add_rows(params.residual, params.sum_dtype, "residual", Contents::kInput);
  memory.add_rows(params.sum, params.sum_dtype, inplace ? "residual" : "sum",
                  inplace ? Contents::kInOut : Contents::kOutput);
  memory.add_rows(params.output, params.dtype, "output", Contents::kOutput);
  memory.add_statistic(params.mean, "mean", Contents::kOutput);
  memory.add_statistic(params.rstd, "rstd", Contents::kOutput);
  ForwardParams on_device = params;
  on_device.allocator = &memory;
  cuda::forward(on_device);
}

void backward(const BackwardParams& params) {
  GlobalMemory memory(params);
  memory.add_rows(params.grad_output, params.dtype, "grad_output", Contents::kInput);
  memory.add_rows(params.input, params.sum_dtype, "input", Contents::kInput);
  memory.add_rows(params.grad_sum, params.sum_dtype, "grad_sum", Contents::kInput);
  memory.add_rows(params.scaled_input, params.dtype, "scaled_input", Contents::kInput);
  memory.add_statistic(params.mean, "mean", Contents::kInput);
  memory.add_statistic(params.rstd, "rstd", Contents::kInput);
  memory.add_rows(params.grad_input, params.sum_dtype, "grad_input", Contents::kOutput);
  memory.add_rows(params.grad_scaled_input, params.dtype, "grad_scaled_input", Contents::kOutput);
  memory.add_rows(params.grad_gate, params.dtype, "grad_gate", Contents::kOutput);
  memory.add_parameter(params.grad_weight, "grad_weight", Contents::kOutput);
  memory.add_parameter(params.grad_bias, "grad_bias", Contents::kOutput);
  memory.add_parameter(params.grad_input_scale, "grad_input_scale", Contents::kOutput);
  BackwardParams on_device = params;
  on_device.allocator = &memory;
  cuda::backward(on_device);
}

}  // namespace cpu
}  // namespace layernorm
