// Backward for rows of float32.
#include "backward_kernel.cuh"

namespace layernorm::cuda {

template void launch_backward<float, float>(const BackwardParams&);

}  // namespace layernorm::cuda
