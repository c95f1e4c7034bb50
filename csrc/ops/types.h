// The dtypes and shapes of a call's statistics, parameters and gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops.h"

namespace layernorm {

// The dtype of statistics and sums: double for double input, else float.
inline at::ScalarType accumulate_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The shape and dtype of the gradient of a parameter: those of `model`, which is the parameter or, if it is absent, the
// other one. Without parameters they are normalized_shape and the dtype of the input.
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

}  // namespace layernorm
