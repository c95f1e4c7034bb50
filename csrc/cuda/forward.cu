// Forward on a GPU, for every row of x [samples, rows, cols]:
//
//   y = (x - mean) * rstd * weight + bias        RMSNorm's mean is 0
//
// A residual is added first, to the input or to its product with input_scale, and the sum is stored. Input and output
// are of type T, x of X (float with a float32 residual, else T), weights of W (T or float), sums of Acc (float).
//
//   columns (16 bits / float32)   threads that share a row      file                    memory of the row
//   whole vectors, up to
//     248 / 124                   lanes with 4 rows each        forward_registers.cu    registers
//     1024 / 512                  lanes with 2 rows each        forward_registers.cu    registers
//     16384 / 8192                a warp, or a block            forward_registers.cu    registers
//   others, and gated norms, up to
//     512                         some lanes, or a warp         forward_staged.cu       shared memory
//     8192                        a block                       forward_staged.cu       shared memory
//     65536                       a cluster of 4 or 8 blocks    block_exchange.cuh too  shared memory
//     any number                  blocks, in two launches       block_exchange.cuh too  shared memory
//   images                        a lane of each warp           channels_first.cu       shared memory
//
// "Whole vectors" means that the number of columns is a multiple of the 8 or 4 elements in 16 bytes. Before compute
// capability 9.0 there are no clusters, and staged rows of more than 8192 columns take two launches, which read them
// twice. The choice depends on the dtype and the number of columns alone, and so does the order of summation, except
// for rows further apart than 2 GiB and for more than 2^30 rows, which are always staged. moments.cuh has the numerical
// method.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include "launch_plan.h"

namespace layernorm::cuda {

void forward(const ForwardParams& p) {
  if (p.channels_first) return channels_first_forward(p);
  const int64_t bytes = p.cols * bytes_of(p.sum_dtype);
  const bool fits_registers = bytes % 16 == 0 && bytes / 16 <= kMaxRegisterVectors;
  if (fits_registers && p.activation == Activation::kNone && forward_registers(p)) return;
  forward_staged(p);
}

}  // namespace layernorm::cuda
