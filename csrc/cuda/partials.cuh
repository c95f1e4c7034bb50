// The gradients of the weight and of the bias from partial sums that blocks have left in the workspace.
#pragma once

#include "row.cuh"

namespace layernorm::cuda {
namespace {

constexpr int kAdders = 8;  // threads that share a column of add_partials

// The second stage: adds up the rows of the workspace in a fixed order. blockIdx.y: of dweight, or of dbias.
template <class Acc, class W>
__global__ void __launch_bounds__(kAdders* kWarpSize)
    add_partials(const Acc* const workspace, const int64_t partials, const int64_t pitch, const int64_t cols,
                 W* const first, W* const second) {
  __shared__ double sums[kAdders][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, adder = threadIdx.x / kWarpSize;
  const int64_t column = int64_t{blockIdx.x} * kWarpSize + lane;
  const Acc* const partial = workspace + blockIdx.y * partials * pitch + column;
  double sum = 0;
  wait_for_previous_grid();
  if (column < cols) {
    for (int64_t r = adder; r < partials; r += kAdders) sum += partial[r * pitch];
  }
  sums[adder][lane] = sum;
  __syncthreads();
  if (adder > 0 || column >= cols) return;
  for (int a = 1; a < kAdders; ++a) sum += sums[a][lane];
  (blockIdx.y == 0 ? first : second)[column] = W(static_cast<Acc>(sum));
}

// Of partial sums of those gradients that are not null: the weight's [partials, cols], after them the bias's, with
// `pitch` numbers from row to row. The kernel that leaves them has been launched last.
template <class Acc, class W>
void launch_add_partials(const Acc* workspace, int64_t partials, int64_t pitch, int64_t cols, W* grad_weight,
                         W* grad_bias, Stream stream) {
  if (!grad_weight && !grad_bias) return;
  LaunchConfig config = {dim3(static_cast<unsigned>(ceil_div(cols, kWarpSize)), grad_weight && grad_bias ? 2 : 1),
                         kAdders * kWarpSize, 0, stream};
  config.overlaps_previous = true;
  launch(config, add_partials<Acc, W>, workspace, partials, pitch, cols, grad_weight ? grad_weight : grad_bias,
         grad_bias);
}

}  // namespace
}  // namespace layernorm::cuda
