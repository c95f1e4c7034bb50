// Compiles backward for float32 rows: a file for each dtype, because the kernels take long to compile.
#include "backward_kernel.cuh"

namespace layernorm::cuda {

template void launch_backward<float, float>(const BackwardParams&);

}  // namespace layernorm::cuda
