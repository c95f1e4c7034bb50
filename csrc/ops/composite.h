// Forward and backward as compositions of differentiable aten operations.
#pragma once

#include "norm.h"

namespace layernorm {

// For higher derivatives, forward-mode AD, torch.func and vmap.
ForwardOutputs forward_composite(const ForwardArgs& args);
BackwardOutputs backward_composite(const BackwardArgs& args);
// For memory_efficient. Autograd must not record it: its derivatives would be wrong without the derivative of rstd.
BackwardOutputs backward_memory_efficient(const BackwardArgs& args);

// With memory_efficient, backward gets the output and rstd, and the derivative of rstd by the output is unknown.
constexpr const char* kNoDerivative =
    "The derivative of a backward pass needs the input, which memory_efficient=True does not keep; use "
    "memory_efficient=False";

}  // namespace layernorm
