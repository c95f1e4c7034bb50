#include "fallbacks.h"

#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "composite.h"
#include "shapes.h"

namespace layernorm {

Tensor channels_last(const Tensor& images) { return images.movedim(1, -1).contiguous().movedim(-1, 1); }

namespace {

// Replaces a result, unless it is undefined, by a copy with the strides of at::empty_like(input).
void copy_to_input_layout(Tensor& result, const Tensor& input) {
  if (result.defined()) result = at::empty_like(input, result.options()).copy_(result);
}

// Whether the input consists of images whose channels are not the last dimension in memory.
bool are_channels_first(const Tensor& input, const Options& options) {
  return options.images && !input.movedim(1, -1).is_contiguous();
}

// Replaces the parameters of a call by expanded views that this object owns, and converts them if a dtype is given. A
// parameter that all rows share keeps its shape. The kernels cannot take the call for one of two reasons:
//  - The parameters have different batch sizes. They are expanded to common ones, in each dimension the largest size of
//    any parameter.
//  - They have these common sizes already, but the dimensions of the samples cannot be merged. They are expanded to the
//    batch sizes of the input, so that each row is a sample.
class ExpandedParameters {
 public:
  template <class Args>
  explicit ExpandedParameters(Args& args, optional<at::ScalarType> dtype = std::nullopt) {
    const Tensor& input = args.input;
    const Options& options = args.options;
    const auto normalized_dims = static_cast<int64_t>(args.normalized_shape.size());
    const auto is_shared = [&](const Tensor& t) { return t.dim() == normalized_dims && !options.has_groups(); };
    const auto all_dims = [&](const Tensor& t) { return with_all_dims(t, input.dim(), normalized_dims, options); };
    at::DimVector common_sizes(input.dim(), 1);
    for_each_parameter(args, [&](const char*, const OptionalTensorRef& parameter) {
      if (!parameter || is_shared(*parameter)) return;
      const Tensor t = all_dims(*parameter);
      for (int64_t d = 0; d < input.dim(); ++d) common_sizes[d] = std::max(common_sizes[d], t.size(d));
    });
    bool have_common_sizes = true;
    for_each_parameter(args, [&](const char*, const OptionalTensorRef& p) {
      have_common_sizes &= !p || is_shared(*p) || all_dims(*p).sizes() == at::IntArrayRef(common_sizes);
    });
    const auto sizes = have_common_sizes ? input.sizes() : at::IntArrayRef(common_sizes);
    for_each_parameter(args, [&](const char*, OptionalTensorRef& parameter) {
      if (!parameter) return;
      Tensor t = *parameter;
      if (!is_shared(t)) t = all_dims(t).expand(sizes);
      parameter.refer_to(expanded_.emplace_back(dtype ? t.to(*dtype) : t));
    });
  }
  ExpandedParameters(const ExpandedParameters&) = delete;

 private:
  std::deque<optional<Tensor>> expanded_;
};

}  // namespace

ForwardOutputs forward_by_copies(ForwardFunction forward, ForwardArgs args) {
  const Tensor& input = args.input;
  if (are_channels_first(input, args.options)) {
    const Tensor copy = channels_last(input);
    args.input = copy;
    ForwardOutputs outputs = forward(args);
    copy_to_input_layout(outputs.output, input);
    return outputs;
  }
  const ExpandedParameters expanded(args);
  return forward(args);
}

BackwardOutputs backward_by_copies(BackwardFunction backward, BackwardArgs args) {
  const Tensor& input = args.input;
  if (are_channels_first(input, args.options)) {
    const Tensor copy = channels_last(input);
    args.input = copy;
    BackwardOutputs grads = backward(args);
    copy_to_input_layout(grads.grad_input, input);
    return grads;
  }
  // The kernel computes a gradient of each expanded parameter for each sample, in the accumulation type. So these
  // gradients are not rounded before they are summed to the shape of the parameter.
  const auto acc = accumulate_type(input);
  const ParameterTypes types(input, args);
  const auto normalized_dims = static_cast<int64_t>(args.normalized_shape.size());
  const ExpandedParameters expanded(args, acc);
  BackwardOutputs grads = backward(args);
  for_each_parameter_gradient(grads, types, [&](Tensor& gradient, const GradientType& type) {
    if (!gradient.defined()) return;
    if (present(type.like) && gradient.dim() != normalized_dims) {
      gradient = at::sum_to(gradient, with_all_dims(*type.like, input.dim(), normalized_dims, args.options).sizes())
                     .reshape(type.like->sizes());
    }
    gradient = gradient.to(type.dtype);
  });
  return grads;
}

ForwardOutputs forward_in_acc(ForwardFunction forward, const ForwardArgs& args) {
  const auto type = args.input->scalar_type(), acc = accumulate_type(args.input);
  const Tensor input = args.input->to(acc);
  const optional<Tensor> gate = args.gate->to(acc);
  ForwardArgs in_acc = args;
  in_acc.input = input;
  in_acc.gate = gate;
  ForwardOutputs outputs = forward(in_acc);
  outputs.output = outputs.output.to(type);
  return outputs;
}

BackwardOutputs backward_in_acc(BackwardFunction backward, const BackwardArgs& args) {
  const auto type = args.input->scalar_type(), acc = accumulate_type(args.input);
  const Tensor input = args.input->to(acc), grad_output = args.grad_output->to(acc);
  const optional<Tensor> gate = args.gate->to(acc);
  BackwardArgs in_acc = args;
  in_acc.input = input;
  in_acc.grad_output = grad_output;
  in_acc.gate = gate;
  const ParameterTypes types(args.input, args);  // an absent parameter's gradient has the input's original dtype
  BackwardOutputs grads = backward(in_acc);
  const auto cast = [](Tensor& gradient, at::ScalarType to) {
    if (gradient.defined()) gradient = gradient.to(to);
  };
  cast(grads.grad_input, type);
  for_each_parameter_gradient(grads, types, [&](Tensor& t, const GradientType& own) { cast(t, own.dtype); });
  cast(grads.grad_gate, args.gate->scalar_type());
  return grads;
}

namespace {

// Calls `function`, a composition of aten's operations, with tensors whose rows are contiguous, so that the bits of the
// results do not depend on strides.
template <class Function, class Args>
auto call_with_contiguous_rows(const Function& function, const Args& args) {
  return call_with(function, args, [&](const Tensor& t) {
    return args.options.images && t.dim() > 1 ? channels_last(t) : t.contiguous();
  });
}

// Gives the results the layout that the operators promise. `first`, which has the shape of the input, gets the strides
// of at::empty_like(input) if the input is images. All other results become contiguous.
template <class... Tensors>
void restore_layout(const Tensor& input, const Options& options, Tensor& first, Tensors&... others) {
  const auto make_contiguous = [](Tensor& t) {
    if (t.defined()) t = t.contiguous();
  };
  options.images ? copy_to_input_layout(first, input) : make_contiguous(first);
  (make_contiguous(others), ...);
}

}  // namespace

ForwardOutputs forward_float64(ForwardArgs args) {
  const bool inplace = std::exchange(args.inplace, false);
  ForwardOutputs outputs = call_with_contiguous_rows(forward_composite, args);
  restore_layout(args.input, args.options, outputs.output, outputs.sum, outputs.mean, outputs.rstd);
  if (inplace) outputs.sum = args.residual->copy_(outputs.sum);  // forward_composite() may have got a copy
  return outputs;
}

BackwardOutputs backward_float64(const BackwardArgs& args) {
  const auto function = args.options.memory_efficient ? backward_memory_efficient : backward_composite;
  BackwardOutputs grads = call_with_contiguous_rows(function, args);
  std::apply([&](auto&... all) { restore_layout(args.input, args.options, all...); }, grads.fields());
  return grads;
}

bool gate_has_other_dtype(const Tensor& input, const OptionalTensorRef& gate) {
  return gate && gate->scalar_type() != input.scalar_type();
}

namespace {

// Whether torch cannot tell if two tensors overlap, because strides leave gaps. Certain overlaps are refused before.
bool may_overlap(const Tensor& residual, const Tensor& t) {
  return t.is_alias_of(residual) && at::get_overlap_status(residual, t) == at::MemOverlapStatus::TooHard;
}

}  // namespace

bool may_overlap(const ForwardArgs& args) {
  bool result = false;
  for_each_tensor(args, [&](const char*, const Tensor& t) { result |= may_overlap(*args.residual, t); });
  return result;
}

ForwardOutputs forward_without_overlap(ForwardFunction forward, const ForwardArgs& args) {
  return call_with(forward, args, [&](const Tensor& t) { return may_overlap(*args.residual, t) ? t.clone() : t; });
}

}  // namespace layernorm
