// Compiles backward for float16 input, also with a float32 residual: then x, the sum, is float32.
#include "backward_kernel.cuh"

namespace layernorm::cuda {

template void launch_backward<__half, __half>(const BackwardParams&);
template void launch_backward<__half, float>(const BackwardParams&);

}  // namespace layernorm::cuda
