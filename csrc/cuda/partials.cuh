// The gradients of the weight and the bias from the partial sums in the workspace.
#pragma once

#include "row.cuh"

namespace layernorm::cuda {
namespace {

constexpr int kThreadsPerColumn = 8;  // of add_partials

// Adds the rows of the workspace in a fixed order: of the first gradient if blockIdx.y is 0, else of the second.
template <class Acc, class W>
__global__ void __launch_bounds__(kThreadsPerColumn* kWarpSize)
    add_partials(const Acc* const workspace, const int64_t num_partials, const int64_t pitch, const int64_t cols,
                 W* const first_grad, W* const second_grad) {
  __shared__ double sums[kThreadsPerColumn][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t column = int64_t{blockIdx.x} * kWarpSize + lane;
  const Acc* const partials = workspace + blockIdx.y * num_partials * pitch + column;
  double sum = 0;
  wait_for_previous_grid();
  if (column < cols) {
    for (int64_t i = warp; i < num_partials; i += kThreadsPerColumn) sum += partials[i * pitch];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= cols) return;
  for (int w = 1; w < kThreadsPerColumn; ++w) sum += sums[w][lane];
  (blockIdx.y == 0 ? first_grad : second_grad)[column] = W(static_cast<Acc>(sum));
}

// The workspace has the partial sums [num_partials, pitch] of each gradient that is not null, first the weight's. The
// kernel that computes them must be the stream's previous launch.
template <class Acc, class W>
void launch_add_partials(const Acc* workspace, int64_t num_partials, int64_t pitch, int64_t cols, W* grad_weight,
                         W* grad_bias, Stream stream) {
  if (!grad_weight && !grad_bias) return;
  LaunchConfig config = {dim3(static_cast<unsigned>(ceil_div(cols, kWarpSize)), grad_weight && grad_bias ? 2 : 1),
                         kThreadsPerColumn * kWarpSize, 0, stream};
  config.overlaps_previous = true;
  launch(config, add_partials<Acc, W>, workspace, num_partials, pitch, cols, grad_weight ? grad_weight : grad_bias,
         grad_bias);
}

}  // namespace
}  // namespace layernorm::cuda
