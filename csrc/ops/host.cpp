// Forward and backward as templates over the backends, and as shape functions for the dispatch key Meta.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#if defined(WITH_CUDA)
#include <c10/cuda/CUDAStream.h>
#endif

#include "../dtypes.h"
#include "../kernel_params.h"
#include "call.h"
#include "checks.h"
#include "fallbacks.h"
#include "norm.h"
#include "shapes.h"

namespace layernorm {

void no_kernel_for(const Params& p) {
  TORCH_INTERNAL_ASSERT(false, "no kernel for dtypes ", static_cast<int>(p.dtype), ", ", static_cast<int>(p.sum_dtype),
                        ", ", static_cast<int>(p.param_dtype));
}

namespace {

// The kernels of a backend, and what they support or require.
struct Cpu {
  static constexpr auto forward = cpu::forward;
  static constexpr auto backward = cpu::backward;
  static constexpr bool has_float64 = true, needs_alignment = false;
};
#if defined(WITH_CUDA)
struct Cuda {
  static constexpr auto forward = cuda::forward;
  static constexpr auto backward = cuda::backward;
  static constexpr bool has_float64 = false, needs_alignment = true;
};
#endif

Dtype dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return Dtype::kFloat64;
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kHalf:
      return Dtype::kFloat16;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    default:
      TORCH_INTERNAL_ASSERT(false, "the checks have let through ", type);
  }
}

// The device's current CUDA stream as void*, so that kernel_params.h needs no header of CUDA; null on a CPU.
void* current_stream([[maybe_unused]] const at::Device& device) {
#if defined(WITH_CUDA)
  if (device.is_cuda()) return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#endif
  return nullptr;
}

// The workspace of a call, on the device of the input. It is freed when the call returns, which is safe although CUDA
// kernels may still run: the caching allocator reuses its memory only for later work on the same stream.
class Workspace final : public Allocator {
 public:
  explicit Workspace(const Tensor& input) : input_(input) {}

  void* allocate(int64_t bytes) override {
    tensor_ = layernorm::allocate({bytes}, input_.options().dtype(at::kByte));
    return tensor_.mutable_data_ptr();
  }

 private:
  const Tensor& input_;
  Tensor tensor_;
};

// Returns a contiguous output in the memory format that forward returns, see keeps_channels_last().
Tensor to_result_format(Tensor output, const ForwardArgs& args) {
  return keeps_channels_last(args) ? output.clone(args.input->suggest_memory_format()) : output;
}

// Fills the fields of Params that forward and backward set alike.
template <class Args>
void set_common(Params& params, Call& call, const Args& args, Allocator& allocator) {
  const Options& options = args.options;
  params.samples = call.samples;
  params.rows = call.rows;
  params.cols = call.cols;
  params.channels_first = call.channels_first;
  params.weight = call.read_parameter(args.weight);
  params.input_scale = call.read_parameter(args.input_scale);
  params.gate = call.read(args.gate);
  params.activation = !args.gate ? Activation::kNone : options.sigmoid ? Activation::kSigmoid : Activation::kSilu;
  params.gate_first = args.gate && options.gate_first;
  params.rms = options.rms;
  params.zero_centered_weight = args.weight && options.zero_centered_weight;
  params.param_dtype = dtype_of(call.types.kernel_dtype);
  params.allocator = &allocator;
  params.stream = current_stream(args.input->device());
}

// ---- forward and backward for any backend ---------------------------------------------------------------------------

template <class Backend>
ForwardOutputs forward(const ForwardArgs& args) {
  check_forward(args);
  check_allocated(args);
  if (args.inplace) {
    check_inplace(args);
    if (may_overlap(args)) return forward_without_overlap(forward<Backend>, args);
  }
  const Tensor& input = args.input;
  const auto& residual = args.residual;
  if (gate_has_other_dtype(input, args.gate)) return forward_in_acc(forward<Backend>, args);
  Call call(residual ? *residual : input, args, Backend::needs_alignment);
  if (!Backend::has_float64 && input.scalar_type() == at::kDouble && !call.is_empty()) {
    ForwardOutputs outputs = forward_float64(args);
    outputs.output = to_result_format(std::move(outputs.output), args);
    return outputs;
  }
  if (!call.has_kernel()) return forward_by_copies(forward<Backend>, args);

  const c10::DeviceGuard guard(input.device());
  Tensor output = call.allocate_like_input(input.scalar_type()), sum, mean, rstd = call.allocate_statistic();
  if (!args.options.rms) mean = allocate(rstd.sizes(), rstd.options());
  if (residual) {
    const bool kernel_overwrites = args.inplace && call.has_layout_of_output(*residual);
    sum = kernel_overwrites ? *residual : call.allocate_like_input(residual->scalar_type());
  }
  if (call.is_empty()) {
    if (mean.defined()) mean.zero_();
    return {to_result_format(output, args), sum, mean, rstd.zero_()};
  }
  Workspace workspace(input);
  ForwardParams params;
  set_common(params, call, args, workspace);
  params.bias = call.read_parameter(args.bias);
  params.input = call.read(input);
  params.sum = call.write(sum);
  params.residual = sum.defined() && sum.is_same(*residual) ? params.sum : call.read(residual);
  params.output = call.write(output);
  params.mean = call.write_statistic(mean);
  params.rstd = call.write_statistic(rstd);
  params.eps = args.eps;
  params.dtype = dtype_of(input.scalar_type());
  params.sum_dtype = residual ? dtype_of(residual->scalar_type()) : params.dtype;
  Backend::forward(params);
  if (args.inplace && !sum.is_same(*residual)) sum = residual->copy_(sum);
  return {to_result_format(std::move(output), args), std::move(sum), std::move(mean), std::move(rstd)};
}

// Calls the kernels, which write the tensors of `grads` that are defined.
template <class Backend>
void run_backward(Call& call, const BackwardArgs& args, const BackwardOutputs& grads) {
  const auto& types = call.types;
  Workspace workspace(args.input);
  BackwardParams params;
  set_common(params, call, args, workspace);
  if (needs_bias(args)) params.bias = call.read_parameter(args.bias);
  params.grad_output = call.read(args.grad_output);
  params.input = call.read(args.input);
  if (grads.grad_input.defined()) params.grad_sum = call.read(args.grad_sum);
  if (needs_mean(args.options)) params.mean = call.read_statistic(*args.mean);
  params.rstd = call.read_statistic(args.rstd);
  params.grad_input = call.write(grads.grad_input);
  params.grad_weight = call.write_gradient(types.weight, grads.grad_weight);
  params.grad_bias = call.write_gradient(types.bias, grads.grad_bias);
  params.grad_gate = call.write(grads.grad_gate);
  if (grads.grad_input_scale.defined()) params.scaled_input = call.read(args.scaled_input);
  params.grad_scaled_input = call.write(grads.grad_scaled_input);
  params.grad_input_scale = call.write_gradient(types.input_scale, grads.grad_input_scale);
  params.memory_efficient = args.options.memory_efficient;
  params.dtype = dtype_of(args.grad_output->scalar_type());
  params.sum_dtype = dtype_of(args.input->scalar_type());
  Backend::backward(params);
}

template <class Backend>
BackwardOutputs backward(const BackwardArgs& args) {
  check_backward(args);
  check_allocated(args);
  const Tensor& input = args.input;
  if (gate_has_other_dtype(input, args.gate)) return backward_in_acc(backward<Backend>, args);
  Call call(input, args, Backend::needs_alignment);
  if (!Backend::has_float64 && input.scalar_type() == at::kDouble && !call.is_empty()) return backward_float64(args);
  if (!call.has_kernel()) return backward_by_copies(backward<Backend>, args);

  const c10::DeviceGuard guard(input.device());
  const OutputMask& mask = args.output_mask;
  const auto& types = call.types;
  const auto parameter_gradient = [&](const GradientType& type) {
    const auto sizes = C10_AS_INTARRAYREF_SLOW(type.sizes(args.normalized_shape));
    const auto options = input.options().memory_format(at::MemoryFormat::Contiguous);
    if (call.is_empty()) return at::zeros(sizes, options.dtype(type.dtype));
    return allocate(sizes, options.dtype(types.kernel_dtype));
  };
  BackwardOutputs grads;
  // The kernels compute grad_scaled_input and grad_input_scale from grad_input, which is dropped at the end if
  // only they are needed.
  const bool needs_grad_input = mask.input || (args.input_scale && (mask.scaled_input || mask.input_scale));
  if (needs_grad_input) grads.grad_input = call.allocate_like_input(input.scalar_type());
  if (mask.weight) grads.grad_weight = parameter_gradient(types.weight);
  if (mask.bias) grads.grad_bias = parameter_gradient(types.bias);
  if (mask.gate && args.gate) grads.grad_gate = call.allocate_like_input(input.scalar_type());
  if (mask.scaled_input && args.input_scale) {
    grads.grad_scaled_input = call.allocate_like_input(args.grad_output->scalar_type());
  }
  if (mask.input_scale && args.input_scale) grads.grad_input_scale = parameter_gradient(types.input_scale);
  const bool computes_any = grads.grad_input.defined() || mask.weight || mask.bias || grads.grad_gate.defined();
  if (!call.is_empty() && computes_any) {
    run_backward<Backend>(call, args, grads);
    for_each_parameter_gradient(grads, types, [](Tensor& gradient, const GradientType& type) {
      // Without this test of the dtype, to() would cost a small call 0.2 us.
      if (gradient.defined() && gradient.scalar_type() != type.dtype) gradient = gradient.to(type.dtype);
    });
  }
  if (!mask.input) grads.grad_input = Tensor();
  return grads;
}

// ---- shape functions, for the key Meta ------------------------------------------------------------------------------

// The meta tensor with the sizes and strides of Call::allocate_like_input().
Tensor meta_like(const Tensor& input, at::ScalarType type, bool images) {
  const auto options = input.options().dtype(type);
  return images ? at::empty_like(input, options) : at::empty_symint(input.sym_sizes(), options);
}

ForwardOutputs forward_meta(const ForwardArgs& args) {
  check_forward(args);
  if (args.inplace) check_inplace(args);
  const Tensor& input = args.input;
  const auto options = input.options().dtype(accumulate_type(input));
  const auto normalized_dims = static_cast<int64_t>(args.normalized_shape.size());
  const auto shape = statistics_shape<c10::SymDimVector>(input.sym_sizes(), normalized_dims, args.options);
  const bool images = args.options.images;
  ForwardOutputs outputs;
  outputs.output = to_result_format(meta_like(input, input.scalar_type(), images), args);
  if (args.residual) {  // images have none
    outputs.sum = args.inplace ? *args.residual : at::empty_symint(input.sym_sizes(), args.residual->options());
  }
  if (!args.options.rms) outputs.mean = at::empty_symint(shape, options);
  outputs.rstd = at::empty_symint(shape, options);
  return outputs;
}

BackwardOutputs backward_meta(const BackwardArgs& args) {
  check_backward(args);
  const Tensor& input = args.input;
  const ParameterTypes types(input, args);
  const auto gradient = [&](const GradientType& type) {
    return at::empty_symint(type.sizes(args.normalized_shape), input.options().dtype(type.dtype));
  };
  const auto like_input = [&](at::ScalarType type) { return meta_like(input, type, args.options.images); };
  const OutputMask& mask = args.output_mask;
  BackwardOutputs grads;
  if (mask.input) grads.grad_input = like_input(input.scalar_type());
  if (mask.weight) grads.grad_weight = gradient(types.weight);
  if (mask.bias) grads.grad_bias = gradient(types.bias);
  if (mask.gate && args.gate) grads.grad_gate = like_input(args.gate->scalar_type());
  if (mask.scaled_input && args.input_scale) grads.grad_scaled_input = like_input(args.grad_output->scalar_type());
  if (mask.input_scale && args.input_scale) grads.grad_input_scale = gradient(types.input_scale);
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(layernorm, CPU, m) { implement<forward<Cpu>, backward<Cpu>>(m); }

#if defined(WITH_CUDA)
TORCH_LIBRARY_IMPL(layernorm, CUDA, m) { implement<forward<Cuda>, backward<Cuda>>(m); }
#endif

TORCH_LIBRARY_IMPL(layernorm, Meta, m) { implement<forward_meta, backward_meta>(m); }

}  // namespace layernorm
