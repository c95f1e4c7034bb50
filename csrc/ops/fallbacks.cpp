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

// Copies a result to the strides of at::empty_like(input), unless it is undefined.
void copy_to_layout(Tensor& result, const Tensor& input) {
  if (result.defined()) result = at::empty_like(input, result.options()).copy_(result);
}

// Whether the input is images whose channels are not the last dimension in memory.
bool are_channels_first(const Tensor& input, const Options& options) {
  return options.images && !input.movedim(1, -1).is_contiguous();
}

// Replaces the parameters of a call by expanded views that this object owns, and converts them if a dtype is given. All
// get the same batch sizes: in each dimension the largest of any parameter. This suffices if the kernels could not take
// the call because the sizes differed. If all have these sizes already, the dimensions of the samples are not adjacent,
// and the parameters get the batch sizes of the input. A parameter that all rows share stays as it is.
class ExpandedParameters {
 public:
  template <class Args>
  explicit ExpandedParameters(Args& args, optional<at::ScalarType> dtype = std::nullopt) {
    const Tensor& input = args.input;
    const Options& options = args.options;
    const auto normalized_dims = static_cast<int64_t>(args.normalized_shape.size());
    const auto is_shared = [&](const Tensor& t) { return t.dim() == normalized_dims && !options.has_groups(); };
    const auto all_dims = [&](const Tensor& t) { return with_all_dims(t, input.dim(), normalized_dims, options); };
    at::DimVector sizes(input.dim(), 1);
    for_each_parameter(args, [&](const char*, const OptionalTensorRef& parameter) {
      if (!parameter || is_shared(*parameter)) return;
      const Tensor t = all_dims(*parameter);
      for (int64_t d = 0; d < input.dim(); ++d) sizes[d] = std::max(sizes[d], t.size(d));
    });
    bool have_sizes = true;
    for_each_parameter(args, [&](const char*, const OptionalTensorRef& parameter) {
      have_sizes &= !parameter || is_shared(*parameter) || all_dims(*parameter).sizes() == at::IntArrayRef(sizes);
    });
    for_each_parameter(args, [&](const char*, OptionalTensorRef& parameter) {
      if (!parameter) return;
      Tensor t = *parameter;
      if (!is_shared(t)) t = all_dims(t).expand(have_sizes ? input.sizes() : at::IntArrayRef(sizes));
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
    const Tensor rows = channels_last(input);
    args.input = rows;
    ForwardOutputs outputs = forward(args);
    copy_to_layout(outputs.output, input);
    return outputs;
  }
  const ExpandedParameters expanded(args);
  return forward(args);
}

BackwardOutputs backward_by_copies(BackwardFunction backward, BackwardArgs args) {
  const Tensor& input = args.input;
  if (are_channels_first(input, args.options)) {
    const Tensor rows = channels_last(input);
    args.input = rows;
    BackwardOutputs grads = backward(args);
    copy_to_layout(grads.grad_input, input);
    return grads;
  }
  // The kernel computes a gradient for each sample of the expanded parameters. It computes them in the accumulation
  // type, so that they are not rounded before they are summed.
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
  const ParameterTypes types(args.input, args);  // of the original input, whose dtype the gradients may have
  BackwardOutputs grads = backward(in_acc);
  const auto cast = [](Tensor& gradient, at::ScalarType to) {
    if (gradient.defined()) gradient = gradient.to(to);
  };
  cast(grads.grad_input, type);
  for_each_parameter_gradient(grads, types, [&](Tensor& t, const GradientType& type) { cast(t, type.dtype); });
  cast(grads.grad_gate, args.gate->scalar_type());
  return grads;
}

namespace {

// Calls aten's operations on copies whose rows are contiguous, so that strides change no bit.
template <class Function, class Args>
auto call_with_contiguous_rows(const Function& function, const Args& args) {
  return call_with(function, args, [&](const Tensor& t) {
    return args.options.images && t.dim() > 1 ? channels_last(t) : t.contiguous();
  });
}

// Gives results the layout that the operators promise: contiguous, except that of images `first`, which has the shape
// of the input, has the strides of at::empty_like(input). Images have no other result of the input's shape.
template <class... Tensors>
void restore_layout(const Tensor& input, const Options& options, Tensor& first, Tensors&... others) {
  const auto make_contiguous = [](Tensor& t) {
    if (t.defined()) t = t.contiguous();
  };
  options.images ? copy_to_layout(first, input) : make_contiguous(first);
  (make_contiguous(others), ...);
}

}  // namespace

ForwardOutputs forward_float64(ForwardArgs args) {
  const bool inplace = std::exchange(args.inplace, false);
  ForwardOutputs outputs = call_with_contiguous_rows(forward_composite, args);
  restore_layout(args.input, args.options, outputs.output, outputs.sum, outputs.mean, outputs.rstd);
  if (inplace) outputs.sum = args.residual->copy_(outputs.sum);
  return outputs;
}

BackwardOutputs backward_float64(const BackwardArgs& args) {
  const auto function = args.options.memory_efficient ? backward_memory_efficient : backward_composite;
  BackwardOutputs grads = call_with_contiguous_rows(function, args);
  std::apply([&](auto&... all) { restore_layout(args.input, args.options, all...); }, grads.fields());
  return grads;
}

bool has_other_dtype(const Tensor& input, const OptionalTensorRef& gate) {
  return gate && gate->scalar_type() != input.scalar_type();
}

namespace {

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
