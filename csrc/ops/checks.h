// The checks of the arguments. Each names the argument and both values.
#pragma once

#include <string_view>

#include "norm.h"

namespace layernorm {

// The name of an argument in error messages: the operator's and, if it differs, that of the adaptive functions, which
// call a zero-centered weight and its bias scale and shift. The operator does not know its caller, so layer_norm with a
// zero-centered weight also says "weight (scale)".
std::string_view public_name(std::string_view name, const Options& options);
// Throw an error that names a tensor that is sparse, nested, quantized or in MKL-DNN's layout. The kernels do not get
// such tensors.
void check_layout(std::string_view name, const Tensor& tensor);
void check_layouts(const ForwardArgs& args);
void check_layouts(const BackwardArgs& args);
// Throw an error that names the argument and both values if the kernels cannot use these arguments.
void check_forward(const ForwardArgs& args);
void check_backward(const BackwardArgs& args);
// Throws torch's errors if the residual cannot be overwritten.
void check_inplace(const ForwardArgs& args);
// Throw torch's error for a tensor whose storage was freed, as FSDP and offloading do. A kernel would take its null
// pointer for an absent tensor.
void check_allocated(const ForwardArgs& args);
void check_allocated(const BackwardArgs& args);
void check_allocated(const Tensor& tensor, std::string_view name);
// The same by an operator, because only the dispatcher removes the wrappers of torch.func and vmap. Without it, aten
// would end the process where parameters that FSDP has freed are transformed.
void call_check_allocated(const Tensor& tensor, std::string_view name);

}  // namespace layernorm
