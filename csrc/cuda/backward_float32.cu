// Compiles backward for float32 input. Each dtype has its own file, because the kernels take long to compile.
#include "backward_kernel.cuh"

namespace layernorm::cuda {

template void launch_backward<float, float>(const BackwardParams&);

}  // namespace layernorm::cuda
