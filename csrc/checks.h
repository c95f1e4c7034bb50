// The checks of the arguments. Each names the argument and both values.
#pragma once

#include <string_view>

#include "ops.h"

namespace layernorm {

// Throw an error that names a tensor that is sparse, nested, quantized or in MKL-DNN's layout. The kernels do not get
// such tensors.
void check_layout(const char* name, const Tensor& tensor);
void check_layouts(const ForwardArgs& args);
void check_layouts(const BackwardArgs& args);
// Throw an error that names the argument and both values if the kernels cannot use these arguments.
void check_forward(const ForwardArgs& args);
// The same for arguments from Python or a graph.
void check_arguments(const Tensor& input, const optional<Tensor>& residual, SymIntArrayRef normalized_shape,
                     const optional<Tensor>& weight, const optional<Tensor>& bias, const optional<Tensor>& gate,
                     const ActivationName& activation);
void check_backward(const BackwardArgs& args);
// Throws torch's errors if the residual cannot be overwritten.
void check_in_place(const ForwardArgs& args);
// Throw torch's error for a tensor whose storage was freed, as FSDP and offloading do. A kernel would take its null
// pointer for an absent tensor.
void check_allocated(const ForwardArgs& args);
void check_allocated(const BackwardArgs& args);
void check_allocated(const Tensor& tensor, std::string_view name);
// The same through the dispatcher, which removes the wrappers of torch.func and vmap.
void call_check_allocated(const Tensor& tensor, std::string_view name);
// The same as check_forward() for a forward pass over the channels of images [N, C, *], before the channels are moved
// last.
void check_images(const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias);
// The same for scale and shift of ada_layer_norm, and for a gate: [*batch, *normalized_shape], see insert_batch_dims().
void check_modulation(const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& scale,
                      const optional<Tensor>& shift, const optional<Tensor>& gate);

}  // namespace layernorm
