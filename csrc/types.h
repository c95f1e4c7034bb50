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
// converted to the accumulation type, and their gradients back to their own dtype. So are all of a gated norm.
struct ParameterTypes {
  ParameterTypes(const Tensor& input, const optional<Tensor>& weight_, const optional<Tensor>& bias_,
                 const optional<Tensor>& gate_, const Options& options)
      : weight(input, weight_, bias_),
        bias(input, bias_, weight_),
        gate(input, gate_, gate_),
        kernel(!options.is_gated_norm() && weight.dtype == bias.dtype && weight.dtype == input.scalar_type() &&
                       (!present(gate_) || weight.dtype == gate.dtype)
                   ? weight.dtype
                   : accumulate_type(input)) {}

  GradientType weight, bias, gate;
  at::ScalarType kernel;  // in which the kernels read the parameters and write their gradients
};

inline c10::SymDimVector statistics_shape(const Tensor& input, SymIntArrayRef normalized_shape) {
  const auto sizes = input.sym_sizes();
  c10::SymDimVector shape(sizes.begin(), sizes.end() - normalized_shape.size());
  shape.resize(sizes.size(), 1);
  return shape;
}

// Whether a parameter has the dimensions of the input, so that it may differ between rows.
inline bool has_all_dims(const optional<Tensor>& parameter, const Tensor& input) {
  return present(parameter) && parameter->dim() == input.dim();
}

}  // namespace layernorm
