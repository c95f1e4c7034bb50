// Normalization over the channels of images: forward and backward for Params::channels_first.
#pragma once

#include "../layer_norm.h"

namespace layernorm::cuda {

void channels_first_forward(const ForwardParams& params);
void channels_first_backward(const BackwardParams& params);
int64_t channels_first_backward_workspace(const BackwardParams& params);

}  // namespace layernorm::cuda
