// Forward and backward for any backend, and their shape functions.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/empty_strided_cpu_dispatch.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "../dtypes.h"
#include "../kernel_params.h"
#include "checks.h"
#include "fallbacks.h"
#include "geometry.h"
#include "launch_scope.h"
#include "ops.h"
#include "types.h"
#include "views.h"

namespace layernorm {

void no_kernel_for(const Params& p) {
  TORCH_INTERNAL_ASSERT(false, "no kernel for dtypes ", static_cast<int>(p.dtype), ", ", static_cast<int>(p.sum_dtype),
                        ", ", static_cast<int>(p.param_dtype));
}

namespace {

// The kernels of a backend, and what the host code does because they cannot.
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

// Allocates CPU tensors without the dispatcher, which costs a small call one percent of its time per tensor.
Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return options.device().is_cpu() ? at::cpu::empty(sizes, options) : at::empty(sizes, options);
}

// The workspace of a call, on the device of the input. The caching allocator of CUDA reuses its memory only for later
// work on the same stream, so that it may be freed when the call returns.
class Workspace final : public Allocator {
 public:
  Workspace(const Tensor& input, const LaunchScope& on) : input_(input), on_(on) {}

  void* allocate(int64_t bytes) override {
    tensor_ = layernorm::allocate({bytes}, input_.options().dtype(at::kByte));
    return on_.output(tensor_, "workspace");
  }

 private:
  const Tensor& input_;
  const LaunchScope& on_;
  Tensor tensor_;
};

// ---- forward and backward for any backend ---------------------------------------------------------------------------

// A new tensor for an output: contiguous or, for images, with the strides of at::empty_like().
Tensor allocate_like(const Tensor& input, at::ScalarType type, bool images) {
  const auto options = input.options().dtype(type);
  if (!images) return allocate(input.sizes(), options.memory_format(at::MemoryFormat::Contiguous));
  if (!input.is_non_overlapping_and_dense()) return at::empty_like(input, options);
  return input.is_cpu() ? at::cpu::empty_strided(input.sizes(), input.strides(), options)
                        : at::empty_strided(input.sizes(), input.strides(), options);
}

Tensor with_format(Tensor output, const ForwardArgs& args) {
  return keeps_channels_last(args) ? output.clone(args.input->suggest_memory_format()) : output;
}

// A parameter as the kernels read it; undefined if absent.
MaybeOwned kernel_parameter(const OptionalTensorRef& t, at::ScalarType type, const Views& views,
                            const Options& options) {
  if (!t) return MaybeOwned();
  if (t->scalar_type() == type && views.fits_parameter(*t)) return MaybeOwned::borrowed(*t);
  Tensor converted = t->to(type);
  converted = has_pixels(*t, options) ? channels_last(converted) : converted.contiguous();
  if (!views.fits_parameter(converted)) converted = converted.clone();  // a new tensor is aligned
  return MaybeOwned::owned(std::move(converted));
}

void set_common(Params& params, const Views& views, const Options& options, const Tensor& weight, const Tensor& bias,
                const Tensor& gate, const Tensor& input_scale, const LaunchScope& on, Allocator& allocator) {
  params.groups = views.groups;
  params.rows = views.rows;
  params.cols = views.cols;
  params.channels_first = views.channels_first;
  params.weight = views.parameter_view(weight, on.input(weight, "weight"));
  params.bias = views.parameter_view(bias, on.input(bias, "bias"));
  params.gate = views.view(gate, on.input(gate, "gate"));
  params.input_scale = views.parameter_view(input_scale, on.input(input_scale, "input_scale"));
  params.activation = static_cast<Activation>(options.activation);
  params.gate_first = options.gate_first;
  params.rms = options.rms;
  params.zero_centered_weight = weight.defined() && options.zero_centered_weight;
  params.allocator = &allocator;
  params.stream = on.stream();
}

template <class Backend>
ForwardOutputs forward(const ForwardArgs& args) {
  check_forward(args);
  const Tensor& input = args.input;
  const auto& residual = args.residual;
  check_allocated(args);
  if (args.inplace) {
    check_inplace(args);
    if (may_overlap(args)) return forward_apart(forward<Backend>, args);
  }
  if (has_other_dtype(input, args.gate)) return forward_in_acc(forward<Backend>, args);
  if (!Backend::has_float64 && input.scalar_type() == at::kDouble && input.numel() > 0) {
    ForwardOutputs outputs = forward_float64(args);
    outputs.output = with_format(std::move(outputs.output), args);
    return outputs;
  }
  const LaunchScope on(input);
  const auto normalized_dims = static_cast<int64_t>(args.normalized_shape.size());
  Tensor output = allocate_like(input, input.scalar_type(), args.options.images), sum, mean;
  const auto shape = statistics_shape<at::DimVector>(input.sizes(), normalized_dims, args.options);
  const auto statistics_options =
      input.options().dtype(accumulate_type(input)).memory_format(at::MemoryFormat::Contiguous);
  if (!args.options.rms) mean = allocate(shape, statistics_options);
  Tensor rstd = allocate(shape, statistics_options);
  const Views views(output, args, Backend::needs_alignment);
  const bool empty = input.numel() == 0;  // its strides mean nothing
  const bool lacks_kernel = views.channels_first && (residual || args.gate);
  if (!empty && (lacks_kernel || !(views.fits(output) && views.fits(rstd)))) {
    return forward_by_copies(forward<Backend>, args);
  }
  if (residual) {
    const bool reuse = args.inplace && residual->strides() == output.strides() && views.is_aligned(*residual);
    sum = reuse ? *residual : allocate_like(input, residual->scalar_type(), args.options.images);
  }
  if (empty) {
    if (mean.defined()) mean.zero_();
    return {with_format(output, args), sum, mean, rstd.zero_()};
  }

  const auto parameter_type = ParameterTypes(residual ? *residual : input, args).kernel;
  const auto x = views.fit(input), weight = kernel_parameter(args.weight, parameter_type, views, args.options);
  const auto bias = kernel_parameter(args.bias, parameter_type, views, args.options);
  const auto input_scale = kernel_parameter(args.input_scale, parameter_type, views, args.options);
  const auto gate = args.gate ? views.fit(*args.gate) : MaybeOwned();
  Workspace workspace(input, on);
  ForwardParams params;
  set_common(params, views, args.options, *weight, *bias, *gate, *input_scale, on, workspace);
  params.input = views.view(*x, on.input(*x, "input"));
  MaybeOwned added;
  if (residual) {
    added = views.fit(*residual);
    params.sum = views.view(sum, sum.is_same(*added) ? on.in_out(sum, "residual") : on.output(sum, "sum"));
    params.residual = sum.is_same(*added) ? params.sum : views.view(*added, on.input(*added, "residual"));
  }
  params.eps = args.eps;
  params.output = views.view(output, on.output(output, "output"));
  params.mean = views.statistic_view(mean, on.output(mean, "mean"));
  params.rstd = views.statistic_view(rstd, on.output(rstd, "rstd"));
  params.dtype = dtype_of(input.scalar_type());
  params.sum_dtype = residual ? dtype_of(residual->scalar_type()) : params.dtype;
  params.param_dtype = dtype_of(parameter_type);
  Backend::forward(params);
  if (args.inplace && !sum.is_same(*residual)) sum = residual->copy_(sum);
  return {with_format(std::move(output), args), std::move(sum), std::move(mean), std::move(rstd)};
}

template <class Backend>
BackwardOutputs backward(const BackwardArgs& args) {
  check_backward(args);
  check_allocated(args);
  const Tensor& input = args.input;
  if (has_other_dtype(input, args.gate)) return backward_in_acc(backward<Backend>, args);
  if (lacks_groups(args)) return backward_with_weight(backward<Backend>, args);
  if (!Backend::has_float64 && input.scalar_type() == at::kDouble && input.numel() > 0) return backward_float64(args);
  const LaunchScope on(input);
  auto [wants_input, wants_weight, wants_bias, wants_gate, wants_scaled_input, wants_scale] = args.output_mask;
  wants_gate &= static_cast<bool>(args.gate);
  wants_scaled_input &= static_cast<bool>(args.input_scale);
  wants_scale &= static_cast<bool>(args.input_scale);
  // The gradients of the scale of the input and of what it multiplies are computed from grad_input.
  const bool returns_input = wants_input;
  wants_input |= wants_scaled_input || wants_scale;
  const auto options = input.options().memory_format(at::MemoryFormat::Contiguous);
  const ParameterTypes types(input, args);
  // A tensor with the layout of grad_input. If grad_input is not wanted, the input can take its place, unless its
  // elements share memory: copies of other tensors get this layout, and are written.
  const bool images = args.options.images;
  const bool allocates = wants_input || !(images ? input.is_non_overlapping_and_dense() : input.is_contiguous());
  const auto like_input = [&](at::ScalarType type) { return allocate_like(input, type, images); };
  const Tensor grad = allocates ? like_input(input.scalar_type()) : input;
  const Views views(grad, args, Backend::needs_alignment);
  const bool empty = input.numel() == 0;
  const bool lacks_kernel = views.channels_first && (args.grad_sum || args.gate || args.input_scale ||
                                                     input.scalar_type() != args.grad_output->scalar_type());
  if (!empty && (lacks_kernel || !(views.fits(grad) && views.fits(args.rstd->contiguous())))) {
    return backward_by_copies(backward<Backend>, args);
  }
  // The kernels write the gradient of a parameter with pixels as [N, *, C].
  const auto parameter_gradient = [&](const GradientType& type) {
    at::DimVector sizes(present(type.model) ? type.model->sizes() : C10_AS_INTARRAYREF_SLOW(args.normalized_shape));
    if (empty) return at::zeros(sizes, options.dtype(type.dtype));
    if (present(type.model) && has_pixels(*type.model, args.options)) {
      std::rotate(sizes.begin() + 1, sizes.begin() + 2, sizes.end());
    }
    return allocate(sizes, options.dtype(types.kernel));
  };
  BackwardOutputs grads;
  auto& [grad_input, grad_weight, grad_bias, grad_gate, grad_scaled_input, grad_scale] = grads;
  if (wants_input) grad_input = grad;
  if (wants_weight) grad_weight = parameter_gradient(types.weight);
  if (wants_bias) grad_bias = parameter_gradient(types.bias);
  if (wants_gate) grad_gate = like_input(input.scalar_type());
  if (wants_scaled_input) grad_scaled_input = like_input(args.grad_output->scalar_type());
  if (wants_scale) grad_scale = parameter_gradient(types.input_scale);
  const auto result = [&] {
    if (!returns_input) grads.grad_input = Tensor();
    return grads;
  };
  if (empty || !(wants_input || wants_weight || wants_bias || wants_gate)) return result();

  const auto statistic = [&](const Tensor& t) {
    return views.fits(t) ? MaybeOwned::borrowed(t) : MaybeOwned::owned(t.contiguous());
  };
  const auto dy = views.fit(args.grad_output), x = views.fit(input);
  const auto dsum = wants_input && args.grad_sum ? views.fit(*args.grad_sum) : MaybeOwned();
  const auto weight = kernel_parameter(args.weight, types.kernel, views, args.options);
  const auto bias =
      needs_bias(args.options) ? kernel_parameter(args.bias, types.kernel, views, args.options) : MaybeOwned();
  const auto gate = args.gate ? views.fit(*args.gate) : MaybeOwned();
  const auto input_scale = kernel_parameter(args.input_scale, types.kernel, views, args.options);
  const auto scaled_input = wants_scale ? views.fit(*args.scaled_input) : MaybeOwned();
  const auto mean = needs_mean(args.options) ? statistic(*args.mean) : MaybeOwned(), rstd = statistic(args.rstd);
  Workspace workspace(input, on);
  BackwardParams params;
  set_common(params, views, args.options, *weight, *bias, *gate, *input_scale, on, workspace);
  params.grad_output = views.view(*dy, on.input(*dy, "grad_output"));
  params.input = views.view(*x, on.input(*x, "input"));
  params.grad_sum = views.view(*dsum, on.input(*dsum, "grad_sum"));
  params.mean = views.statistic_view(*mean, on.input(*mean, "mean"));
  params.rstd = views.statistic_view(*rstd, on.input(*rstd, "rstd"));
  params.grad_input = views.view(grad_input, on.output(grad_input, "grad_input"));
  params.grad_weight = views.gradient_view(types.weight.model, on.output(grad_weight, "grad_weight"));
  params.grad_bias = views.gradient_view(types.bias.model, on.output(grad_bias, "grad_bias"));
  params.scaled_input = views.view(*scaled_input, on.input(*scaled_input, "scaled_input"));
  params.grad_scaled_input = views.view(grad_scaled_input, on.output(grad_scaled_input, "grad_scaled_input"));
  params.grad_gate = views.view(grad_gate, on.output(grad_gate, "grad_gate"));
  params.grad_input_scale = views.gradient_view(types.input_scale.model, on.output(grad_scale, "grad_input_scale"));
  params.memory_efficient = args.options.memory_efficient;
  params.dtype = dtype_of(args.grad_output->scalar_type());
  params.sum_dtype = dtype_of(input.scalar_type());
  params.param_dtype = dtype_of(types.kernel);
  Backend::backward(params);
  const auto finish = [&](Tensor& t, const GradientType& type) {
    if (!t.defined()) return;
    if (present(type.model) && has_pixels(*type.model, args.options)) {
      t = t.movedim(-1, 1).reshape(-1).reshape(type.model->sizes());
    }
    if (t.scalar_type() != type.dtype) t = t.to(type.dtype);  // to() costs a small call 0.2 us
  };
  finish(grad_weight, types.weight);
  finish(grad_bias, types.bias);
  finish(grad_scale, types.input_scale);
  return result();
}

// ---- meta functions -------------------------------------------------------------------------------------------------

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
  outputs.output = with_format(meta_like(input, input.scalar_type(), images), args);
  if (args.residual) {
    outputs.sum = args.inplace ? *args.residual : meta_like(input, args.residual->scalar_type(), images);
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
  const auto [wants_input, wants_weight, wants_bias, wants_gate, wants_scaled_input, wants_scale] = args.output_mask;
  BackwardOutputs grads;
  if (wants_input) grads.grad_input = like_input(input.scalar_type());
  if (wants_weight) grads.grad_weight = gradient(types.weight);
  if (wants_bias) grads.grad_bias = gradient(types.bias);
  if (wants_gate && args.gate) grads.grad_gate = like_input(args.gate->scalar_type());
  if (wants_scaled_input && args.input_scale) grads.grad_scaled_input = like_input(args.grad_output->scalar_type());
  if (wants_scale && args.input_scale) grads.grad_input_scale = gradient(types.input_scale);
  return grads;
}

}  // namespace

void Operators::implement_cpu(torch::Library& m) { implement<forward<Cpu>, backward<Cpu>>(m); }

#if defined(WITH_CUDA)
void Operators::implement_cuda(torch::Library& m) { implement<forward<Cuda>, backward<Cuda>>(m); }
#endif

void Operators::implement_meta(torch::Library& m) { implement<forward_meta, backward_meta>(m); }

}  // namespace layernorm
