// The shapes and dtypes of a call's tensors.
//
// Tensors are [*batch, *normalized]. Parameters are [*first batch dimensions, *normalized], where each batch size is
// the input's or 1; batch dimensions that a parameter lacks have size 1. With `images`, tensors are [N, C, *] and
// parameters [C], [N, C] or [N, C, 1, ...]: the normalized dimension C comes second. With num_groups, the only
// normalized dimension is [groups, elements], and each group is a row of its own. Statistics have the dimensions of the
// input, with num_groups in place of the last normalized size and 1 in place of the others.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "norm.h"

namespace layernorm {

// The shape of the statistics, as a vector of integers or symbolic integers.
template <class Shape, class Sizes>
Shape statistics_shape(const Sizes& input_sizes, int64_t normalized_dims, const Options& options) {
  Shape shape(input_sizes.begin(), input_sizes.end());
  const auto end = shape.begin() + (options.images ? 2 : static_cast<int64_t>(shape.size()));
  std::fill(end - normalized_dims, end, 1);
  if constexpr (std::is_same_v<typename Shape::value_type, c10::SymInt>) {
    *(end - 1) = options.groups();
  } else {
    *(end - 1) = options.groups().expect_int();
  }
  return shape;
}

// Whether the output has the memory format channels_last of the input, which RMSNorm keeps as in torch.
inline bool keeps_channels_last(const ForwardArgs& args) {
  const Options& options = args.options;
  return options.rms && !options.images && !args.residual &&
         args.input->suggest_memory_format() != at::MemoryFormat::Contiguous;
}

// A parameter with all dimensions of the input; those that it lacks have size 1.
inline Tensor with_all_dims(Tensor parameter, int64_t dims, int64_t normalized_dims, const Options& options) {
  if (options.images && parameter.dim() < 2) parameter = parameter.unsqueeze(0);  // [C] becomes [1, C]
  while (parameter.dim() < dims) parameter = parameter.unsqueeze(options.images ? -1 : -1 - normalized_dims);
  return parameter;
}

// The dtype of statistics and sums: double for double input, else float.
inline at::ScalarType accumulate_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The shape and dtype of the gradient of a parameter: those of `model`, which is the parameter or, if backward lacks
// it, `other`: the bias for a weight and the weight for a bias. Without both, they are normalized_shape and the input's
// dtype.
struct GradientType {
  GradientType(const Tensor& input, const optional<Tensor>& parameter, const optional<Tensor>& other)
      : model(present(parameter) ? parameter : other), dtype((present(model) ? *model : input).scalar_type()) {}
  SymIntArrayRef sizes(SymIntArrayRef normalized_shape) const {
    return present(model) ? model->sym_sizes() : normalized_shape;
  }

  const optional<Tensor>& model;
  at::ScalarType dtype;
};

// The types of the gradients of the parameters, for the input or, with a residual, its sum. Kernels exist for
// parameters of the input's dtype and of the accumulation type; other parameters, or two of different dtypes, are
// converted to the accumulation type, and their gradients back to their own dtype. A gated norm converts all of them.
struct ParameterTypes {
  template <class Args>
  ParameterTypes(const Tensor& input, const Args& args)
      : weight(input, args.weight, args.bias),
        bias(input, args.bias, args.weight),
        input_scale(input, args.input_scale, args.input_scale),
        kernel(!args.gate && weight.dtype == bias.dtype && weight.dtype == input.scalar_type() &&
                       (!args.input_scale || weight.dtype == input_scale.dtype)
                   ? weight.dtype
                   : accumulate_type(input)) {}

  GradientType weight, bias, input_scale;
  at::ScalarType kernel;  // in which the kernels read the parameters and write their gradients
};

// Calls f(gradient, type) for the gradient of each parameter.
template <class F>
void for_each_gradient(BackwardOutputs& grads, const ParameterTypes& types, const F& f) {
  f(grads.grad_weight, types.weight);
  f(grads.grad_bias, types.bias);
  f(grads.grad_input_scale, types.input_scale);
}

}  // namespace layernorm
