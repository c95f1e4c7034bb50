// The choice of the kernel for forward. It depends on the dtype and the number of columns alone, and so does the order
// of summation.
#include "geometry.h"

namespace layernorm::cuda {

void forward(const ForwardParams& p) {
  if (p.channels_first) return channels_first_forward(p);
  const int64_t bytes = p.cols * bytes_of(p.sum_dtype);
  const bool fits_registers = bytes % 16 == 0 && bytes / 16 <= kMaxRegisterVectors;
  if (fits_registers && p.sum_dtype != Dtype::kFloat64 && p.activation == Activation::kNone) return forward_rows(p);
  forward_slices(p);
}

}  // namespace layernorm::cuda
