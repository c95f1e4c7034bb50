// Forward and backward as compositions of differentiable aten operations.
#pragma once

#include "norm.h"

namespace layernorm {

// For forward-mode AD and torch.func.
ForwardOutputs forward_composite(const ForwardArgs& args);
BackwardOutputs backward_composite(const BackwardArgs& args);
// For memory_efficient, which cannot be differentiated again.
BackwardOutputs backward_memory_efficient(const BackwardArgs& args);

// rstd is not a function of the output, so it cannot be differentiated in a backward from the output.
constexpr const char* kNoDerivative =
    "The derivative of a backward pass needs the input, which memory_efficient=True does not keep; use "
    "memory_efficient=False";

}  // namespace layernorm
