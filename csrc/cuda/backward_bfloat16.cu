// Compiles backward for bfloat16 rows, and for those of their sums with a float32 residual.
#include "backward_kernel.cuh"

namespace layernorm::cuda {

template void launch_backward<__nv_bfloat16, __nv_bfloat16>(const BackwardParams&);
template void launch_backward<__nv_bfloat16, float>(const BackwardParams&);

}  // namespace layernorm::cuda
