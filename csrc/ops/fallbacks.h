// The functions to which host.cpp passes calls that the kernels cannot take. Most of them change the arguments, and
// call `forward` or `backward`, which are those of the backend, again.
#pragma once

#include "norm.h"

namespace layernorm {

// A copy of images whose channels are the last dimension in memory.
Tensor channels_last(const Tensor& images);

// For calls without a view as [samples, rows, cols], see Call: copies images to channels_last, and expands parameters
// whose samples are not adjacent dimensions.
ForwardOutputs forward_by_copies(ForwardFunction forward, ForwardArgs args);
BackwardOutputs backward_by_copies(BackwardFunction backward, BackwardArgs args);

// For a gated norm whose gate has another dtype than the input: computes in the accumulation type.
bool has_other_dtype(const Tensor& input, const OptionalTensorRef& gate);
ForwardOutputs forward_in_acc(ForwardFunction forward, const ForwardArgs& args);
BackwardOutputs backward_in_acc(BackwardFunction backward, const BackwardArgs& args);

// For a backend without kernels of float64: composes aten's operations.
ForwardOutputs forward_float64(ForwardArgs args);
BackwardOutputs backward_float64(const BackwardArgs& args);

// For tensors that may share elements with a residual that is overwritten: copies them. check_inplace() has refused
// tensors that surely share some. Where strides leave gaps, at::get_overlap_status() does not decide it.
bool may_overlap(const ForwardArgs& args);
ForwardOutputs forward_without_overlap(ForwardFunction forward, const ForwardArgs& args);

}  // namespace layernorm
