// Images [N, C, *] as rows.
#pragma once

#include "ops.h"

namespace layernorm {

// Images [N, C, *], or a parameter of them, as rows: the channels are the last of `dims` dimensions. Parameters [N, C]
// lack the last dimensions, and parameters [C] have nothing to move. [N, C, 1, 1] becomes [N, C] first, so that
// autograd gives its gradient contiguous strides.
Tensor channels_last(Tensor t, int64_t dims);

// Whether no kernel but those of autograd and of a backend takes part in a call, so that it may use aliases. Autocast
// has no kernel for these operators.
bool is_plain(const ForwardArgs& args);

// Calls forward on plain images by aliases that autograd does not know.
ForwardOutputs call_forward_on_images(const ForwardArgs& args);

}  // namespace layernorm
