// The functions to which host.cpp passes calls that the kernels cannot take. Most of them replace the arguments by
// tensors that the kernels can read, and call the backend's `forward` or `backward` of host.cpp again.
#pragma once

#include "norm.h"

namespace layernorm {

// A copy of images whose channels are the last dimension in memory.
Tensor channels_last(const Tensor& images);

// For calls whose tensors the kernels cannot view as [samples, rows, cols], see Call: copies images to channels_last,
// or expands the parameters.
ForwardOutputs forward_by_copies(ForwardFunction forward, ForwardArgs args);
BackwardOutputs backward_by_copies(BackwardFunction backward, BackwardArgs args);

// For a gated norm whose gate has another dtype than the input: computes in the accumulation type.
bool gate_has_other_dtype(const Tensor& input, const OptionalTensorRef& gate);
ForwardOutputs forward_in_acc(ForwardFunction forward, const ForwardArgs& args);
BackwardOutputs backward_in_acc(BackwardFunction backward, const BackwardArgs& args);

// For a backend without kernels of float64: composes aten's operations.
ForwardOutputs forward_float64(ForwardArgs args);
BackwardOutputs backward_float64(const BackwardArgs& args);

// For arguments that may share elements with a residual that is overwritten: copies them. check_inplace() has already
// refused arguments that certainly do. at::get_overlap_status() does not decide it where strides leave gaps.
bool may_overlap(const ForwardArgs& args);
ForwardOutputs forward_without_overlap(ForwardFunction forward, const ForwardArgs& args);

}  // namespace layernorm
