// Forward and backward as compositions of aten operations, with the precision of the kernels. Variable names are those
// of kernel_params.h: xhat, rstd, and g = dy * weight.
#include "composite.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp2.h>
#include <ATen/ops/log2.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/round.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "checks.h"
#include "shapes.h"

namespace layernorm {
namespace {

at::DimVector last_dims(int64_t count) {
  at::DimVector dims(count);
  for (int64_t d = 0; d < count; ++d) dims[d] = d - count;
  return dims;
}

// The mean over the last `dims` dimensions.
Tensor mean_of(const Tensor& t, int64_t dims) { return t.mean(last_dims(dims), /*keepdim=*/true); }

// The differences x - mean, or x for RMSNorm, multiplied by a row_scale that keeps their squares from overflow and
// underflow. The row_scale is a power of two, and a constant for autograd. As in the kernels, the mean is corrected for
// its rounding, and a constant row has differences of zero.
struct Differences {
  // The row_scale is the product of two powers of two. first_factor makes the differences finite. second_factor then
  // brings the standard deviation to the order of 1. estimate_std(first_factor, largest) returns the order of magnitude
  // of first_factor * (standard deviation), where `largest` is the largest |first_factor * (x - mean)| in the row.
  template <class F>
  Differences(const Tensor& x, int64_t normalized_dims, const Options& options, const F& estimate_std) {
    // The factors are powers of 2^step. Products of three numbers between 2^-step and 2^step are far from overflow.
    const double step = x.scalar_type() == at::kDouble ? 320 : 40;
    const auto dims = last_dims(normalized_dims);
    const Tensor constant = x.detach();
    const bool empty = TORCH_GUARD_OR_FALSE(x.sym_numel().sym_eq(0));  // amin() refuses empty rows
    const Tensor low = empty ? mean_of(constant, normalized_dims) : constant.amin(dims, /*keepdim=*/true);
    const Tensor high = empty ? low : constant.amax(dims, /*keepdim=*/true);
    // Numbers whose sums or differences might overflow are multiplied by the first factor before the subtraction. A sum
    // of up to 2^step numbers below 2^(2.2 * step) stays below 2^(3.2 * step), where overflow begins.
    const Tensor one = at::ones_like(low);
    const Tensor first_factor = at::where(at::maximum(high, -low) > std::exp2(2.2 * step), one * std::exp2(-step), one);
    values = x * first_factor;
    Tensor center = at::zeros_like(low);
    if (!options.rms) {
      const Tensor rounded = mean_of(constant * first_factor, normalized_dims);
      center = at::minimum(at::maximum(rounded, low * first_factor), high * first_factor);  // exact for a constant row
      values = values - center;
      const Tensor correction = mean_of(values, normalized_dims);
      values = values - correction;
      mean = (center + correction.detach()) / first_factor;
    }
    // The exponent is clamped so that the product of both factors is finite.
    const Tensor largest = at::maximum(high * first_factor - center, center - low * first_factor);
    const Tensor exponent = at::clamp(at::round(at::log2(estimate_std(first_factor, largest)) / step), -3, 2);
    const Tensor second_factor = at::exp2(exponent * -step);
    values = values * second_factor;
    row_scale = first_factor * second_factor;
  }

  Tensor values;  // the differences
  Tensor row_scale;
  Tensor mean;  // undefined for RMSNorm
};

// The multiplier of xhat, in the accumulation type: weight or weight + 1.
Tensor multiplier(const Tensor& weight, at::ScalarType acc, const Options& options) {
  const Tensor w = weight.to(acc);
  return options.zero_centered_weight ? w + 1 : w;
}

// The activation f(gate), and its derivative f'(gate).
Tensor activate(const Tensor& gate, const Options& options) {
  const Tensor s = at::sigmoid(gate);
  return options.sigmoid ? s : gate * s;
}
Tensor derivative_of_activation(const Tensor& gate, const Options& options) {
  const Tensor s = at::sigmoid(gate), one_minus_s = at::sigmoid(-gate);  // 1 - s would cancel
  return options.sigmoid ? s * one_minus_s : s * (gate * one_minus_s + 1);
}

// The dimensions of a tensor by descending strides.
at::DimVector memory_order(const Tensor& t) {
  at::DimVector order(t.dim());
  std::iota(order.begin(), order.end(), 0);
  const auto strides = t.sym_strides();
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return TORCH_GUARD_OR_FALSE(strides[a].sym_gt(strides[b])); });
  return order;
}

// A contiguous view or copy of a tensor. The gradient of the tensor is contiguous, too, because autograd reshapes it
// from the gradient of reshape(-1), which has one dimension.
Tensor with_contiguous_gradient(const Tensor& t) { return t.reshape(-1).view_symint(t.sym_sizes()); }

// Returns f(t), computed with the dimensions of t in another order.
template <class F>
Tensor in_order(const Tensor& t, at::IntArrayRef order, const F& f) {
  if (order.empty()) return f(t);
  at::DimVector inverse(order.size());
  for (size_t d = 0; d < order.size(); ++d) inverse[order[d]] = static_cast<int64_t>(d);
  return f(t.permute(order)).permute(inverse);
}

// Views the tensors of a call, whose shapes shapes.h describes, so that the normalized dimensions are the last ones and
// parameters and statistics are broadcast to the input. Below, `rows(t)` is this view of t. Results and gradients are
// contiguous or, for images, laid out as at::empty_like(input).
struct RowViews {
  template <class Args>
  explicit RowViews(const Args& args)
      : dims(args.input->dim()),
        normalized_dims(static_cast<int64_t>(args.normalized_shape.size())),
        options(args.options) {
    if (options.images) order = memory_order(at::empty_like(*args.input));
  }

  // Views the input, another tensor of its shape, a statistic or a parameter.
  Tensor operator()(const Tensor& t) const {
    Tensor rows = t.dim() == dims ? in_order(t, order, with_contiguous_gradient) : t;
    if (t.dim() == normalized_dims && !options.has_groups()) return rows;
    if (t.dim() != normalized_dims) rows = with_all_dims(rows, dims, normalized_dims, options);
    if (options.images) rows = rows.movedim(1, -1);
    if (!options.has_groups()) return rows;
    c10::SymDimVector sizes(rows.sym_sizes().begin(), rows.sym_sizes().end());
    sizes.back() = sizes.back() / options.groups();
    sizes.insert(sizes.end() - 1, options.groups());
    return rows.reshape_symint(sizes);  // unflatten() and flatten() have no rule for is_grads_batched
  }
  optional<Tensor> operator()(const OptionalTensorRef& t) const {
    return t ? optional<Tensor>((*this)(*t)) : std::nullopt;
  }
  // Undoes the view of a tensor of the input's shape.
  Tensor undo(const Tensor& rows) const { return undo(rows, order); }
  // Undoes the view of such a tensor or of a statistic; the dimensions get the given order in memory.
  Tensor undo(Tensor rows, at::IntArrayRef order) const {
    if (!rows.defined()) return rows;
    if (options.has_groups()) {
      c10::SymDimVector sizes(rows.sym_sizes().begin(), rows.sym_sizes().end() - 1);
      sizes.back() = sizes.back() * rows.sym_size(-1);
      rows = rows.reshape_symint(sizes);
    }
    return in_order(options.images ? rows.movedim(-1, 1) : rows, order, [](const Tensor& t) { return t.contiguous(); });
  }
  // Sums `gradient`, which has values for each row, over the rows that share the parameter.
  Tensor parameter_gradient(const Tensor& gradient, const GradientType& type, SymIntArrayRef normalized_shape) const {
    c10::SymDimVector sizes(normalized_shape.begin(), normalized_shape.end());
    if (present(type.like)) {
      const Tensor rows = (*this)(*type.like);
      sizes.assign(rows.sym_sizes().begin(), rows.sym_sizes().end());
    } else if (options.has_groups()) {
      sizes = {options.groups(), sizes[0] / options.groups()};
    }
    Tensor result = at::sum_to(gradient, sizes);
    if (result.is_same(gradient)) result = result.clone();  // an operator must not return an argument
    if (options.images && result.dim() > 1) result = result.movedim(-1, 1);
    // Flatten first: a reshape to the same sizes would keep the strides of dimensions of size 1.
    return result.reshape(-1).view_symint(type.sizes(normalized_shape)).to(type.dtype);
  }

  int64_t dims, normalized_dims;
  const Options& options;
  at::DimVector order;  // of the dimensions of images in memory, by descending strides; empty for other tensors
};

// The terms of the derivatives of one call, in the accumulation type.
struct Terms {
  // `saved_rstd` is a constant for autograd. It is multiplied by a factor whose value is 1, so that the product has the
  // derivatives of rstd although eps is not known here:
  //   rstd = 1 / sqrt(var + eps) = saved / sqrt(1 + saved^2 * (var - detach(var)))
  Terms(const Tensor& grad_output, const Tensor& input, const Tensor& saved_rstd, const optional<Tensor>& weight_,
        int64_t normalized_dims, const Options& options)
      : options(options), normalized_dims(normalized_dims), dy(grad_output.to(saved_rstd.scalar_type())) {
    const auto acc = saved_rstd.scalar_type();
    const Differences d(input.to(acc), normalized_dims, options,
                        [&](const Tensor& first_factor, const Tensor&) { return first_factor / saved_rstd.detach(); });
    const Tensor saved = saved_rstd / d.row_scale, variance = mean(d.values * d.values);
    const Tensor rescaled_rstd = saved * at::rsqrt(saved * saved * (variance - variance.detach()) + 1);
    rstd = rescaled_rstd * d.row_scale;
    xhat = d.values * rescaled_rstd;
    if (present(weight_)) weight = multiplier(*weight_, acc, options);
    g = times_weight(dy);
  }

  Tensor mean(const Tensor& t) const { return mean_of(t, normalized_dims); }  // over a row
  Tensor times_weight(const Tensor& t) const { return weight.defined() ? t * weight : t; }
  // The projection P(z), see autograd.cpp.
  Tensor project(const Tensor& z) const { return (options.rms ? z : z - mean(z)) - xhat * mean(z * xhat); }

  const Options& options;
  int64_t normalized_dims;
  Tensor dy, rstd, weight, xhat, g;
};

}  // namespace

ForwardOutputs forward_composite(const ForwardArgs& args) {
  check(args);
  if (args.inplace) check_inplace(args);
  const Options& options = args.options;
  const RowViews rows(args);
  const Tensor input = rows(*args.input);
  const auto weight = rows(args.weight), bias = rows(args.bias), residual = rows(args.residual);
  const auto normalized_dims = rows.normalized_dims;
  const auto acc = accumulate_type(input);
  Tensor sum, activated;
  if (args.gate) activated = activate(rows(*args.gate).to(acc), options);
  if (args.input_scale) {
    sum = (residual->to(acc) + rows(*args.input_scale).to(acc) * input.to(acc)).to(residual->scalar_type());
  } else if (residual) {
    sum = input + *residual;
  }
  Tensor x = (sum.defined() ? sum : input).to(acc);
  if (activated.defined() && options.gate_first) x = x * activated;
  // The square root of |eps|. If it were rounded to zero in acc, constant rows would become NaN.
  const double eps = args.eps, smallest = eps == 0 || acc == at::kDouble ? 0 : std::numeric_limits<float>::denorm_min();
  const double root = std::max(std::sqrt(std::fabs(eps)), smallest);
  const Differences d(x, normalized_dims, options, [&](const Tensor& first_factor, const Tensor& largest) {
    return at::maximum(largest, first_factor * root);
  });
  // d.values are multiplied by d.row_scale, so the square root of eps must be, too, and rstd is divided by it.
  const Tensor rescaled_root = d.row_scale * root, rescaled_eps = rescaled_root * rescaled_root;
  const Tensor variance = mean_of(d.values * d.values, normalized_dims);
  const Tensor rstd = at::rsqrt(eps < 0 ? variance - rescaled_eps : variance + rescaled_eps);
  Tensor y = d.values * rstd;
  if (weight) y = y * multiplier(*weight, acc, options);
  if (bias) y = y + bias->to(acc);
  if (activated.defined() && !options.gate_first) y = y * activated;
  sum = rows.undo(sum);
  // The residual changes last, because other arguments may share its memory.
  if (args.inplace) sum = args.residual->copy_(sum);
  const auto order = keeps_channels_last(args) ? memory_order(args.input) : rows.order;
  return {rows.undo(y.to(input.scalar_type()), order), sum, rows.undo(d.mean, {}),
          rows.undo(rstd.detach() * d.row_scale, {})};
}

BackwardOutputs backward_composite(const BackwardArgs& args) {
  check_layouts(args);
  check_backward(args);
  check_allocated(args);
  const Options& options = args.options;
  TORCH_CHECK_NOT_IMPLEMENTED(!options.memory_efficient, kNoDerivative);
  const OutputMask& mask = args.output_mask;
  const RowViews rows(args);
  const auto acc = args.rstd->scalar_type();
  const Tensor input = rows(*args.input), grad_output = rows(*args.grad_output);
  Tensor x = input, dy = grad_output, gate, activated;
  if (args.gate) {
    Tensor& factor = options.gate_first ? x : dy;
    gate = rows(*args.gate).to(acc);
    activated = activate(gate, options);
    factor = factor.to(acc) * activated;
  }
  const ParameterTypes types(args.input, args);
  BackwardOutputs grads;
  const auto parameter_gradient = [&](const Tensor& gradient, const GradientType& type) {
    return rows.parameter_gradient(gradient, type, args.normalized_shape);
  };
  if (mask.bias) grads.grad_bias = parameter_gradient(dy.to(acc), types.bias);
  const bool needs_dx = mask.input || mask.gate || mask.scaled_input || mask.input_scale;
  if (!(mask.weight || needs_dx)) return grads;

  const Terms t(dy, x, rows(*args.rstd), rows(args.weight), rows.normalized_dims, options);
  if (mask.weight) grads.grad_weight = parameter_gradient(t.dy * t.xhat, types.weight);
  if (!needs_dx) return grads;

  Tensor dx = t.rstd * t.project(t.g);
  if (args.grad_sum) dx = dx + rows(*args.grad_sum).to(acc);
  if (args.gate) {
    if (mask.gate) {
      Tensor upstream = input.to(acc) * dx;  // the upstream gradient of f(gate)
      if (!options.gate_first) {
        upstream = t.times_weight(t.xhat);
        if (args.bias) upstream = upstream + rows(*args.bias).to(acc);
        upstream = upstream * grad_output.to(acc);
      }
      grads.grad_gate = rows.undo((upstream * derivative_of_activation(gate, options)).to(args.gate->scalar_type()));
    }
    if (options.gate_first) dx = dx * activated;
  } else if (args.input_scale) {
    if (mask.scaled_input) {
      grads.grad_scaled_input = rows.undo((rows(*args.input_scale).to(acc) * dx).to(grad_output.scalar_type()));
    }
    if (mask.input_scale) {
      grads.grad_input_scale = parameter_gradient(dx * rows(*args.scaled_input).to(acc), types.input_scale);
    }
  }
  if (mask.input) grads.grad_input = rows.undo(dx.to(input.scalar_type()));
  return grads;
}

BackwardOutputs backward_memory_efficient(const BackwardArgs& args) {
  check_layouts(args);
  check_backward(args);
  check_allocated(args);
  const RowViews rows(args);
  const auto acc = args.rstd->scalar_type();
  Tensor xhat = rows(*args.input).to(acc);
  if (args.bias) xhat = xhat - rows(*args.bias).to(acc);
  if (args.weight) {
    const Tensor w = multiplier(rows(*args.weight), acc, args.options);
    xhat = at::where(w.abs() < kSmallestDivisor, std::numeric_limits<double>::quiet_NaN(), xhat / w);
  }
  // A norm of xhat whose rstd is 1 has the same gradients, except that dx lacks the factor rstd.
  xhat = rows.undo(xhat);
  const Tensor grad_output = args.grad_output->to(acc), ones = at::ones_like(args.rstd);
  const optional<Tensor> unused_mean = *args.rstd;  // check_backward() requires a mean, whose values are not read
  BackwardArgs from_xhat = args;
  from_xhat.grad_output = grad_output;
  from_xhat.input = xhat;
  from_xhat.mean = unused_mean;
  from_xhat.rstd = ones;
  from_xhat.options.memory_efficient = false;
  BackwardOutputs grads = backward_composite(from_xhat);
  if (!args.output_mask.input) return grads;
  const Tensor dx = rows.undo(rows(grads.grad_input) * rows(*args.rstd));
  grads.grad_input = dx.to(args.input->scalar_type());
  return grads;
}

}  // namespace layernorm
