// The gradients of the weight and the bias from the partial sums in the workspace.
#pragma once

#include <algorithm>

#include "tile.cuh"

namespace layernorm::cuda {
namespace {

constexpr int kThreadsPerColumn = 8;  // of add_partials

// The partial sums [groups, count, pitch] of a gradient [groups, cols].
template <class Acc, class W>
struct Partials {
  const Acc* sums;
  int64_t groups, count;
  W* gradient;
  int64_t group_stride;  // of the gradient
};

// Adds the partial sums of each group in a fixed order: of the first gradient if blockIdx.z is 0, else of the second.
template <class Acc, class W>
__global__ void __launch_bounds__(kThreadsPerColumn* kWarpSize)
    add_partials(const Partials<Acc, W> first, const Partials<Acc, W> second, const int64_t pitch, const int64_t cols) {
  __shared__ double sums[kThreadsPerColumn][kWarpSize];
  const Partials<Acc, W> partials = blockIdx.z > 0 ? second : first;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t column = int64_t{blockIdx.x} * kWarpSize + lane;
  wait_for_previous_grid();
  for (int64_t group = blockIdx.y; group < partials.groups; group += gridDim.y) {
    const Acc* const from = partials.sums + group * partials.count * pitch + column;
    double sum = 0;
    if (column < cols) {
      for (int64_t i = warp; i < partials.count; i += kThreadsPerColumn) sum += from[i * pitch];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < cols) {
      for (int w = 1; w < kThreadsPerColumn; ++w) sum += sums[w][lane];
      partials.gradient[group * partials.group_stride + column] = W(static_cast<Acc>(sum));
    }
    __syncthreads();
  }
}

// Adds the partial sums of dweight [plan.weight_partials, pitch] and dbias [plan.bias_partials, pitch] in the
// workspace. `config` launched the kernel that computes them.
template <class Acc, class W>
void launch_add_partials(const BackwardParams& p, const GradientPlan& plan, int64_t pitch, LaunchConfig config) {
  const auto make = [&](const View& gradient, bool is_per_group, int64_t first, int64_t rows) {
    const int64_t groups = std::min(is_per_group ? p.groups : 1, rows);  // 0 without partial sums
    return Partials<Acc, W>{static_cast<const Acc*>(plan.workspace) + first * pitch, groups,
                            rows / std::max(groups, int64_t{1}), static_cast<W*>(gradient.data), gradient.group_stride};
  };
  const auto weight = make(p.grad_weight, plan.flags.has(kWeightPerGroup), 0, plan.weight_partials);
  const auto bias = make(p.grad_bias, plan.flags.has(kBiasPerGroup), plan.weight_partials, plan.bias_partials);
  const int64_t groups = std::max(weight.groups, bias.groups);
  if (groups == 0) return;
  config.grid = dim3(static_cast<unsigned>(ceil_div(p.cols, kWarpSize)),
                     static_cast<unsigned>(std::min(groups, kMaxGridY)), weight.groups > 0 && bias.groups > 0 ? 2 : 1);
  config.block = kThreadsPerColumn * kWarpSize;
  config.shared_bytes = 0;
  config.cluster = 1;
  config.overlaps_previous = true;
  launch(config, add_partials<Acc, W>, weight.groups > 0 ? weight : bias, bias, pitch, p.cols);
}

}  // namespace
}  // namespace layernorm::cuda
