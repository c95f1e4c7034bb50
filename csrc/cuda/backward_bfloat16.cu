// Compiles backward for bfloat16 input, also with a float32 residual: then x, the sum, is float32.
#include "backward_kernel.cuh"

namespace layernorm::cuda {

template void launch_backward<__nv_bfloat16, __nv_bfloat16>(const BackwardParams&);
template void launch_backward<__nv_bfloat16, float>(const BackwardParams&);

}  // namespace layernorm::cuda
