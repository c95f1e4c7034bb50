// The checks of the operators' arguments.
#pragma once

#include <string_view>

#include "norm.h"

namespace layernorm {

// The name of an argument in error messages. The public functions have other names for some arguments. The operator
// does not know which function has called it, so that the messages have both names: the adaptive functions call a
// zero-centered weight and its bias scale and shift, and functions that add a residual call the input_scale gate.
std::string_view public_name(std::string_view name, const Options& options);
// Throw an error that names the argument if a tensor is sparse, nested, quantized or in MKL-DNN's layout.
void check_layout(std::string_view name, const Tensor& tensor);
void check_layouts(const ForwardArgs& args);
void check_layouts(const BackwardArgs& args);
// Throw an error that names the argument and both values if shapes, dtypes, devices or options do not fit together.
void check_forward(const ForwardArgs& args);
void check_backward(const BackwardArgs& args);
// Throws torch's errors if the residual cannot be overwritten.
void check_inplace(const ForwardArgs& args);
// Throw torch's error for a tensor whose storage was freed, as FSDP and offloading do. A kernel would take its null
// pointer for an absent tensor.
void check_allocated(const ForwardArgs& args);
void check_allocated(const BackwardArgs& args);
void check_allocated(const Tensor& tensor, std::string_view name);
// Calls the operator check_allocated, through which the dispatcher removes the wrappers that torch.func and vmap put
// around a tensor. Without this check, aten's operations on a freed tensor in a wrapper would end the process.
void call_check_allocated(const Tensor& tensor, std::string_view name);

}  // namespace layernorm
