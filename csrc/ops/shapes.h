// The shapes and dtypes of a call's tensors.
//
// The input, and tensors of its shape, are [*batch, *normalized]. The parameters, that is, weight, bias and
// input_scale, are [*first batch dimensions, *normalized], where each batch size is the input's or 1; the other batch
// dimensions count as 1. With `images`, the normalized dimension is the second one: tensors are [N, C, *], and
// parameters are [C], [N, C] or [N, C, 1, ...]. With num_groups, there is one normalized dimension, each group has
// adjacent elements of it, and each group is a row. The statistics mean and rstd have the dimensions of the input. In
// the normalized dimensions, their sizes are num_groups in the last one and 1 in the others.
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

// A view of a parameter with as many dimensions as the input; those that the parameter lacks have size 1.
inline Tensor with_all_dims(Tensor parameter, int64_t input_dims, int64_t normalized_dims, const Options& options) {
  if (options.images && parameter.dim() < 2) parameter = parameter.unsqueeze(0);  // [C] becomes [1, C]
  while (parameter.dim() < input_dims) parameter = parameter.unsqueeze(options.images ? -1 : -1 - normalized_dims);
  return parameter;
}

// The accumulation type, in which statistics and sums are computed: double for double input, else float.
inline at::ScalarType accumulate_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The shape and dtype of the gradient of a parameter. They are those of `like`: the parameter or, if backward does not
// get it, the `other` one, which is the bias for a weight and the weight for a bias. If both are absent, they are
// normalized_shape and the input's dtype.
struct GradientType {
  GradientType(const Tensor& input, const optional<Tensor>& parameter, const optional<Tensor>& other)
      : like(present(parameter) ? parameter : other), dtype((present(like) ? *like : input).scalar_type()) {}
  SymIntArrayRef sizes(SymIntArrayRef normalized_shape) const {
    return present(like) ? like->sym_sizes() : normalized_shape;
  }

  const optional<Tensor>& like;
  at::ScalarType dtype;
};

// The types of the gradients of the parameters, and the dtype that the kernels have for all of them: the input's if all
// parameters have it and there is no gate, else the accumulation type (fewer kernels make the library smaller). Other
// parameters are converted, and their gradients are converted back. `input` is the tensor that is normalized, or has
// its dtype: with a residual, it is the residual or the sum.
struct ParameterTypes {
  template <class Args>
  ParameterTypes(const Tensor& input, const Args& args)
      : weight(input, args.weight, args.bias),
        bias(input, args.bias, args.weight),
        input_scale(input, args.input_scale, args.input_scale),
        kernel_dtype(!args.gate && weight.dtype == bias.dtype && weight.dtype == input.scalar_type() &&
                             (!args.input_scale || weight.dtype == input_scale.dtype)
                         ? weight.dtype
                         : accumulate_type(input)) {}

  GradientType weight, bias, input_scale;
  at::ScalarType kernel_dtype;  // in which the kernels read the parameters and write their gradients
};

// Calls f(gradient, type) for the gradient of each parameter.
template <class F>
void for_each_parameter_gradient(BackwardOutputs& grads, const ParameterTypes& types, const F& f) {
  f(grads.grad_weight, types.weight);
  f(grads.grad_bias, types.bias);
  f(grads.grad_input_scale, types.input_scale);
}

}  // namespace layernorm
