// Forward and backward for any backend, and their shape functions.
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/empty_strided_cpu_dispatch.h>
#include <ATen/ops/zeros.h>

#include "checks.h"
#include "composite.h"
#include "dtypes.h"
#include "launch_scope.h"
#include "layer_norm.h"
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

// A new tensor for an output in the layout of the call, see Options::preserve_layout.
Tensor allocate_like(const Tensor& input, at::ScalarType type, bool preserve_layout) {
  const auto options = input.options().dtype(type);
  if (!preserve_layout) return allocate(input.sizes(), options.memory_format(at::MemoryFormat::Contiguous));
  if (!input.is_non_overlapping_and_dense()) return at::empty_like(input, options);
  return input.is_cpu() ? at::cpu::empty_strided(input.sizes(), input.strides(), options)
                        : at::empty_strided(input.sizes(), input.strides(), options);
}

// RMSNorm keeps the memory format channels_last, as in torch.
Tensor with_format(Tensor output, const ForwardArgs& args) {
  if (!args.options.rms || present(args.residual) || args.options.preserve_layout) return output;
  const auto format = args.input.suggest_memory_format();
  return format == at::MemoryFormat::Contiguous ? output : output.clone(format);
}

Tensor copy_to_layout(const Tensor& result, const Tensor& input) {
  return result.defined() ? at::empty_like(input, result.options()).copy_(result) : result;
}
// Expands a parameter with batch dimensions to the input's shape.
Tensor expand_groups(const Tensor& t, const Tensor& input) {
  return t.dim() == input.dim() && t.numel() != input.numel() ? t.expand(input.sizes()) : t;
}

// Forward and backward for tensors that the kernels cannot use in place, see Views. Layouts that they do not have
// are made by a copy, and parameters whose groups are not adjacent dimensions are expanded.
template <ForwardFunction kForward>
ForwardOutputs forward_by_copies(ForwardArgs args) {
  if (args.options.preserve_layout) {
    args.options.preserve_layout = false;
    auto [output, sum, mean, rstd] = kForward(args);
    if (!args.in_place) sum = copy_to_layout(sum, args.input);
    return {copy_to_layout(output, args.input), sum, mean, rstd};
  }
  return call_with(kForward, args, [&](const Tensor& t) { return expand_groups(t, args.input); });
}

template <BackwardFunction kBackward>
BackwardOutputs backward_by_copies(BackwardArgs args) {
  if (args.options.preserve_layout) {
    args.options.preserve_layout = false;
    BackwardOutputs grads = kBackward(args);
    grads.grad_input = copy_to_layout(grads.grad_input, args.input);
    grads.grad_gated_input = copy_to_layout(grads.grad_gated_input, args.input);
    if (args.options.is_gated_norm()) grads.grad_gate = copy_to_layout(grads.grad_gate, args.input);
    return grads;
  }
  // The kernel then computes a gradient for each row. They are not rounded before they are summed.
  const auto acc = accumulate_type(args.input);
  const ParameterTypes types(args.input, args.weight, args.bias, args.gate, args.options);
  const auto in_acc = [&](const optional<Tensor>& parameter) {
    return present(parameter) ? expand_groups(*parameter, args.input).to(acc) : parameter;
  };
  const auto weight = in_acc(args.weight), bias = in_acc(args.bias);
  const auto gate = args.options.is_gated_norm() ? args.gate : in_acc(args.gate);
  BackwardOutputs grads = kBackward({args.grad_output, args.input, args.normalized_shape, args.mean, args.rstd, weight,
                                     bias, args.output_mask, args.grad_sum, args.options, gate, args.gated_input});
  const auto sum_rows = [&](Tensor& gradient, const GradientType& type) {
    if (gradient.defined()) gradient = at::sum_to(gradient, type.sizes(args.normalized_shape)).to(type.dtype);
  };
  sum_rows(grads.grad_weight, types.weight);
  sum_rows(grads.grad_bias, types.bias);
  if (!args.options.is_gated_norm()) sum_rows(grads.grad_gate, types.gate);
  return grads;
}

// Forward and backward of a gated norm whose gate has another dtype than the input, in the accumulation type.
template <ForwardFunction kForward>
ForwardOutputs forward_in_acc(const ForwardArgs& args) {
  const auto type = args.input.scalar_type(), acc = accumulate_type(args.input);
  const optional<Tensor> gate = args.gate->to(acc);
  ForwardOutputs outputs = kForward({args.input.to(acc), args.normalized_shape, args.weight, args.bias, args.eps,
                                     args.options, /*residual=*/kAbsent, gate});
  outputs.output = outputs.output.to(type);
  return outputs;
}

template <BackwardFunction kBackward>
BackwardOutputs backward_in_acc(const BackwardArgs& args) {
  const auto type = args.input.scalar_type(), acc = accumulate_type(args.input);
  const optional<Tensor> gate = args.gate->to(acc);
  // Without parameters, their gradients have the dtype of the input.
  const ParameterTypes types(args.input, args.weight, args.bias, args.gate, args.options);
  BackwardOutputs grads =
      kBackward({args.grad_output.to(acc), args.input.to(acc), args.normalized_shape, args.mean, args.rstd, args.weight,
                 args.bias, args.output_mask, /*grad_sum=*/kAbsent, args.options, gate});
  const auto cast = [](Tensor& gradient, at::ScalarType to) {
    if (gradient.defined()) gradient = gradient.to(to);
  };
  cast(grads.grad_input, type);
  cast(grads.grad_weight, types.weight.dtype);
  cast(grads.grad_bias, types.bias.dtype);
  cast(grads.grad_gate, types.gate.dtype);
  return grads;
}

// Forward and backward of float64 by aten's operations, on contiguous copies, so that strides change no bit.
Tensor contiguous(const Tensor& t) { return t.contiguous(); }

ForwardOutputs forward_float64(ForwardArgs args) {
  const bool in_place = std::exchange(args.in_place, false);
  ForwardOutputs outputs = call_with(forward_composite, args, contiguous);
  if (in_place) outputs.sum = args.residual->copy_(outputs.sum);
  outputs.output = outputs.output.contiguous();
  return outputs;
}

BackwardOutputs backward_float64(const BackwardArgs& args) {
  const auto dense = [](const optional<Tensor>& t) { return present(t) ? optional<Tensor>(t->contiguous()) : t; };
  const Tensor dy = args.grad_output.contiguous(), x = args.input.contiguous(), rstd = args.rstd.contiguous();
  const auto mean = dense(args.mean), weight = dense(args.weight), bias = dense(args.bias);
  const auto grad_sum = dense(args.grad_sum), gate = dense(args.gate), gated_input = dense(args.gated_input);
  const BackwardArgs copies = {dy,     x,          args.normalized_shape, mean,     rstd,
                               weight, bias,       args.output_mask,      grad_sum, args.options,
                               gate,   gated_input};
  BackwardOutputs grads = args.options.memory_efficient ? backward_from_output(copies) : backward_composite(copies);
  for (Tensor* t :
       {&grads.grad_input, &grads.grad_weight, &grads.grad_bias, &grads.grad_gated_input, &grads.grad_gate}) {
    if (t->defined()) *t = t->contiguous();
  }
  return grads;
}

bool has_other_dtype(const Tensor& input, const optional<Tensor>& gate, const Options& options) {
  return options.is_gated_norm() && gate->scalar_type() != input.scalar_type();
}

// Whether a tensor may share elements with a residual that is overwritten, where torch's check cannot tell.
bool may_overlap(const Tensor& residual, const Tensor& t) {
  return t.is_alias_of(residual) && at::get_overlap_status(residual, t) == at::MemOverlapStatus::TooHard;
}
bool may_overlap(const ForwardArgs& args) {
  const auto overlaps = [&](const optional<Tensor>& t) { return present(t) && may_overlap(*args.residual, *t); };
  return may_overlap(*args.residual, args.input) || overlaps(args.weight) || overlaps(args.bias) || overlaps(args.gate);
}

// Forward with copies of the tensors that may share elements with a residual that is overwritten.
template <ForwardFunction kForward>
ForwardOutputs forward_apart(const ForwardArgs& args) {
  return call_with(kForward, args, [&](const Tensor& t) { return may_overlap(*args.residual, t) ? t.clone() : t; });
}

// A parameter as the kernels read it; undefined if absent.
MaybeOwned kernel_parameter(const optional<Tensor>& t, at::ScalarType type, const Views& views) {
  if (!present(t)) return MaybeOwned();
  if (t->scalar_type() == type && views.fits_parameter(*t)) return MaybeOwned::borrowed(*t);
  Tensor converted = t->to(type).contiguous();
  if (!views.fits_parameter(converted)) converted = converted.clone();
  return MaybeOwned::owned(std::move(converted));
}

// The gate as a parameter, or as the array of a gated norm; the other one is absent.
struct Gate {
  Gate(const optional<Tensor>& gate, const Options& options)
      : parameter(options.is_gated_norm() ? kAbsent : gate), elementwise(options.is_gated_norm() ? gate : kAbsent) {}

  MaybeOwned for_kernel(at::ScalarType parameter_type, const Views& views) const {
    return present(elementwise) ? views.fit(*elementwise) : kernel_parameter(parameter, parameter_type, views);
  }

  const optional<Tensor>&parameter, &elementwise;
};

void set_common(Params& params, const Views& views, const Options& options, const Tensor& weight, const Tensor& bias,
                const Tensor& gate, const LaunchScope& on, Allocator& allocator) {
  params.groups = views.groups;
  params.rows = views.rows;
  params.cols = views.cols;
  params.channels_first = views.channels_first;
  params.weight = views.parameter_view(weight, on.input(weight, "weight"));
  params.bias = views.parameter_view(bias, on.input(bias, "bias"));
  if (gate.defined()) {
    const void* const data = on.input(gate, "gate");
    params.gate = options.is_gated_norm() ? views.view(gate, data) : views.parameter_view(gate, data);
  }
  params.activation = static_cast<Activation>(options.activation);
  params.gate_first = options.is_gated_norm() && options.gate_first;
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
  if (args.in_place) {
    check_in_place(args);
    if (may_overlap(args)) return forward_apart<forward<Backend>>(args);
  }
  if (has_other_dtype(input, args.gate, args.options)) return forward_in_acc<forward<Backend>>(args);
  if (!Backend::has_float64 && input.scalar_type() == at::kDouble && input.numel() > 0) {
    if (args.options.preserve_layout) return forward_by_copies<forward<Backend>>(args);
    ForwardOutputs outputs = forward_float64(args);
    outputs.output = with_format(std::move(outputs.output), args);
    return outputs;
  }
  const LaunchScope on(input);
  const auto normalized_dims = static_cast<int64_t>(args.normalized_shape.size());
  Tensor output = allocate_like(input, input.scalar_type(), args.options.preserve_layout), sum, mean;
  at::DimVector shape(input.sizes().slice(0, input.dim() - normalized_dims));
  shape.resize(input.dim(), 1);
  const auto statistics_options =
      input.options().dtype(accumulate_type(input)).memory_format(at::MemoryFormat::Contiguous);
  if (!args.options.rms) mean = allocate(shape, statistics_options);
  Tensor rstd = allocate(shape, statistics_options);
  const Gate gate_as(args.gate, args.options);
  const Views views(output, input, normalized_dims, args.weight, args.bias, gate_as.parameter, gate_as.elementwise,
                    Backend::needs_alignment);
  const bool empty = input.numel() == 0;  // its strides mean nothing
  const bool lacks_kernel = views.channels_first && (present(residual) || present(args.gate));
  if (!empty && (lacks_kernel || !(views.fits(output) && views.fits(rstd)))) {
    return forward_by_copies<forward<Backend>>(args);
  }
  if (present(residual)) {
    const bool reuse = args.in_place && residual->strides() == output.strides() && views.is_aligned(*residual);
    sum = reuse ? *residual : allocate_like(input, residual->scalar_type(), args.options.preserve_layout);
  }
  if (empty) {
    if (mean.defined()) mean.zero_();
    return {with_format(output, args), sum, mean, rstd.zero_()};
  }

  const auto parameter_type =
      ParameterTypes(present(residual) ? *residual : input, args.weight, args.bias, args.gate, args.options).kernel;
  const auto x = views.fit(input), weight = kernel_parameter(args.weight, parameter_type, views);
  const auto bias = kernel_parameter(args.bias, parameter_type, views);
  const auto gate = gate_as.for_kernel(parameter_type, views);
  Workspace workspace(input, on);
  ForwardParams params;
  set_common(params, views, args.options, *weight, *bias, *gate, on, workspace);
  params.input = views.view(*x, on.input(*x, "input"));
  MaybeOwned added;
  if (present(residual)) {
    added = views.fit(*residual);
    params.sum = views.view(sum, sum.is_same(*added) ? on.in_out(sum, "residual") : on.output(sum, "sum"));
    params.residual = sum.is_same(*added) ? params.sum : views.view(*added, on.input(*added, "residual"));
  }
  params.eps = args.eps;
  params.output = views.view(output, on.output(output, "output"));
  params.mean = views.statistic_view(mean, on.output(mean, "mean"));
  params.rstd = views.statistic_view(rstd, on.output(rstd, "rstd"));
  params.dtype = dtype_of(input.scalar_type());
  params.sum_dtype = present(residual) ? dtype_of(residual->scalar_type()) : params.dtype;
  params.param_dtype = dtype_of(parameter_type);
  Backend::forward(params);
  if (args.in_place && !sum.is_same(*residual)) sum = residual->copy_(sum);
  return {with_format(std::move(output), args), std::move(sum), std::move(mean), std::move(rstd)};
}

template <class Backend>
BackwardOutputs backward(const BackwardArgs& args) {
  check_backward(args);
  check_allocated(args);
  const Tensor& input = args.input;
  if (has_other_dtype(input, args.gate, args.options)) return backward_in_acc<backward<Backend>>(args);
  if (!Backend::has_float64 && input.scalar_type() == at::kDouble && input.numel() > 0) {
    return args.options.preserve_layout ? backward_by_copies<backward<Backend>>(args) : backward_float64(args);
  }
  const LaunchScope on(input);
  auto [wants_input, wants_weight, wants_bias, wants_gated_input, wants_gate] = args.output_mask;
  wants_gate &= present(args.gate);
  wants_gated_input &= present(args.gate) && !args.options.is_gated_norm();
  // The gradients of a gate beside a residual and of what it multiplies are computed from grad_input.
  const bool returns_input = wants_input;
  wants_input |= wants_gated_input || (wants_gate && !args.options.is_gated_norm());
  const auto normalized_dims = static_cast<int64_t>(args.normalized_shape.size());
  const auto options = input.options().memory_format(at::MemoryFormat::Contiguous);
  const ParameterTypes types(args.input, args.weight, args.bias, args.gate, args.options);
  // A tensor with the layout of grad_input. If grad_input is not wanted, the input can take its place, unless its
  // elements share memory: copies of other tensors get this layout, and are written.
  const bool allocates =
      wants_input || !(args.options.preserve_layout ? input.is_non_overlapping_and_dense() : input.is_contiguous());
  const Tensor grad = allocates ? allocate_like(input, input.scalar_type(), args.options.preserve_layout) : input;
  const Gate gate_as(args.gate, args.options);
  const Views views(grad, input, normalized_dims, args.weight, args.bias, gate_as.parameter, gate_as.elementwise,
                    Backend::needs_alignment);
  const bool empty = input.numel() == 0;
  const bool lacks_kernel = views.channels_first && (present(args.grad_sum) || present(args.gate) ||
                                                     input.scalar_type() != args.grad_output.scalar_type());
  if (!empty && (lacks_kernel || !(views.fits(grad) && views.fits(args.rstd.contiguous())))) {
    return backward_by_copies<backward<Backend>>(args);
  }
  const auto parameter_gradient = [&](const GradientType& type) {
    const auto sizes = present(type.model) ? type.model->sizes() : input.sizes().slice(input.dim() - normalized_dims);
    return empty ? at::zeros(sizes, options.dtype(type.dtype)) : allocate(sizes, options.dtype(types.kernel));
  };
  BackwardOutputs grads;
  auto& [grad_input, grad_weight, grad_bias, grad_gated_input, grad_gate] = grads;
  if (wants_input) grad_input = grad;
  if (wants_weight) grad_weight = parameter_gradient(types.weight);
  if (wants_bias) grad_bias = parameter_gradient(types.bias);
  if (wants_gated_input) {
    grad_gated_input = allocate_like(input, args.grad_output.scalar_type(), args.options.preserve_layout);
  }
  if (wants_gate) {
    grad_gate = present(gate_as.elementwise) ? allocate_like(input, input.scalar_type(), args.options.preserve_layout)
                                             : parameter_gradient(types.gate);
  }
  const auto result = [&] {
    if (!returns_input) grads.grad_input = Tensor();
    return grads;
  };
  if (empty || !(wants_input || wants_weight || wants_bias || wants_gate)) return result();

  const auto statistic = [&](const Tensor& t) {
    return views.fits(t) ? MaybeOwned::borrowed(t) : MaybeOwned::owned(t.contiguous());
  };
  const auto dy = views.fit(args.grad_output), x = views.fit(input);
  const auto dsum = wants_input && present(args.grad_sum) ? views.fit(*args.grad_sum) : MaybeOwned();
  const auto weight = kernel_parameter(args.weight, types.kernel, views);
  const auto bias = needs_bias(args.options) ? kernel_parameter(args.bias, types.kernel, views) : MaybeOwned();
  const auto gate = gate_as.for_kernel(types.kernel, views);
  const auto gated_input = wants_gate && present(gate_as.parameter) ? views.fit(*args.gated_input) : MaybeOwned();
  const auto mean = needs_mean(args.options) ? statistic(*args.mean) : MaybeOwned(), rstd = statistic(args.rstd);
  Workspace workspace(input, on);
  BackwardParams params;
  set_common(params, views, args.options, *weight, *bias, *gate, on, workspace);
  params.grad_output = views.view(*dy, on.input(*dy, "grad_output"));
  params.input = views.view(*x, on.input(*x, "input"));
  params.grad_sum = views.view(*dsum, on.input(*dsum, "grad_sum"));
  params.mean = views.statistic_view(*mean, on.input(*mean, "mean"));
  params.rstd = views.statistic_view(*rstd, on.input(*rstd, "rstd"));
  params.grad_input = views.view(grad_input, on.output(grad_input, "grad_input"));
  params.grad_weight = views.gradient_view(types.weight.model, on.output(grad_weight, "grad_weight"));
  params.grad_bias = views.gradient_view(types.bias.model, on.output(grad_bias, "grad_bias"));
  params.gated_input = views.view(*gated_input, on.input(*gated_input, "gated_input"));
  params.grad_gated_input = views.view(grad_gated_input, on.output(grad_gated_input, "grad_gated_input"));
  void* const grad_gate_data = on.output(grad_gate, "grad_gate");
  params.grad_gate = present(gate_as.elementwise) ? views.view(grad_gate, grad_gate_data)
                                                  : views.gradient_view(types.gate.model, grad_gate_data);
  params.from_output = args.options.memory_efficient;
  params.dtype = dtype_of(args.grad_output.scalar_type());
  params.sum_dtype = dtype_of(input.scalar_type());
  params.param_dtype = dtype_of(types.kernel);
  Backend::backward(params);
  const auto cast = [](Tensor& t, const GradientType& type) {
    if (t.defined() && t.scalar_type() != type.dtype) t = t.to(type.dtype);  // to() costs a small call 0.2 us
  };
  cast(grad_weight, types.weight);
  cast(grad_bias, types.bias);
  cast(grad_gate, types.gate);
  return result();
}

// ---- meta functions -------------------------------------------------------------------------------------------------

Tensor empty_like(const Tensor& input, at::ScalarType type, bool preserve_layout) {
  const auto options = input.options().dtype(type);
  return preserve_layout ? at::empty_like(input, options) : at::empty_symint(input.sym_sizes(), options);
}

ForwardOutputs forward_meta(const ForwardArgs& args) {
  check_forward(args);
  if (args.in_place) check_in_place(args);
  const Tensor& input = args.input;
  const auto options = input.options().dtype(accumulate_type(input));
  const auto shape = statistics_shape(input, args.normalized_shape);
  const bool preserve_layout = args.options.preserve_layout;
  ForwardOutputs outputs;
  outputs.output = with_format(empty_like(input, input.scalar_type(), preserve_layout), args);
  if (present(args.residual)) {
    outputs.sum = args.in_place ? *args.residual : empty_like(input, args.residual->scalar_type(), preserve_layout);
  }
  if (!args.options.rms) outputs.mean = at::empty_symint(shape, options);
  outputs.rstd = at::empty_symint(shape, options);
  return outputs;
}

BackwardOutputs backward_meta(const BackwardArgs& args) {
  check_backward(args);
  const Tensor& input = args.input;
  const ParameterTypes types(args.input, args.weight, args.bias, args.gate, args.options);
  const auto gradient = [&](const GradientType& type) {
    return at::empty_symint(type.sizes(args.normalized_shape), input.options().dtype(type.dtype));
  };
  const auto like_input = [&](at::ScalarType type) { return empty_like(input, type, args.options.preserve_layout); };
  const auto [wants_input, wants_weight, wants_bias, wants_gated_input, wants_gate] = args.output_mask;
  const bool is_gated_norm = args.options.is_gated_norm();
  BackwardOutputs grads;
  if (wants_input) grads.grad_input = like_input(input.scalar_type());
  if (wants_weight) grads.grad_weight = gradient(types.weight);
  if (wants_bias) grads.grad_bias = gradient(types.bias);
  if (wants_gated_input && present(args.gate) && !is_gated_norm) {
    grads.grad_gated_input = like_input(args.grad_output.scalar_type());
  }
  if (wants_gate && present(args.gate)) {
    grads.grad_gate = is_gated_norm ? like_input(types.gate.dtype) : gradient(types.gate);
  }
  return grads;
}

}  // namespace

void Operators::implement_cpu(torch::Library& m) { implement<forward<Cpu>, backward<Cpu>>(m); }

#if defined(WITH_CUDA)
void Operators::implement_cuda(torch::Library& m) { implement<forward<Cuda>, backward<Cuda>>(m); }
#endif

void Operators::implement_meta(torch::Library& m) { implement<forward_meta, backward_meta>(m); }

}  // namespace layernorm
