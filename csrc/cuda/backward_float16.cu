// Compiles backward for float16 rows, and for those of their sums with a float32 residual.
#include "backward_kernel.cuh"

namespace layernorm::cuda {

template void launch_backward<__half, __half>(const BackwardParams&);
template void launch_backward<__half, float>(const BackwardParams&);

}  // namespace layernorm::cuda
