// Forward and backward as compositions of differentiable aten operations, and the terms of their derivatives.
#pragma once

#include <ATen/TensorOperators.h>

#include "ops.h"

namespace layernorm {

// For forward-mode AD and torch.func.
ForwardOutputs forward_composite(const ForwardArgs& args);
BackwardOutputs backward_composite(const BackwardArgs& args);
// For memory_efficient, which cannot be differentiated again.
BackwardOutputs backward_from_output(const BackwardArgs& args);

// The terms of the derivatives of one call, in the accumulation type.
struct Terms {
  // `saved_rstd` is a constant for autograd. To differentiate rstd, it is multiplied by a factor of value one that has
  // the derivatives of rstd but needs no eps:
  //   rstd = 1 / sqrt(var + eps) = saved / sqrt(1 + saved^2 * (var - detach(var)))
  Terms(const Tensor& grad_output, const Tensor& input, const Tensor& saved_rstd, const Tensor& weight_, int64_t count,
        bool differentiate_rstd, const Options& options);

  Tensor mean(const Tensor& t) const;  // over a row
  Tensor times_weight(const Tensor& t) const { return weight.defined() ? t * weight : t; }
  Tensor project(const Tensor& z) const { return (options.rms ? z : z - mean(z)) - xhat * mean(z * xhat); }

  Options options;
  int64_t count;
  Tensor dy, rstd, weight, xhat, g;
};

// rstd is not a function of the output, so it cannot be differentiated in a backward from the output.
constexpr const char* kNoDerivative =
    "The derivative of a backward pass needs the input, which memory_efficient=True does not keep; use "
    "memory_efficient=False";

}  // namespace layernorm
