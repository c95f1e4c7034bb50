// The gradients of parameters from their partial sums in the workspace.
#include <algorithm>

#include "row.cuh"

namespace layernorm::cuda {
namespace {

constexpr int kMaxWarpsPerColumn = 32;  // of add_partials
constexpr int kLoadsInFlight = 8;       // of a thread

// The partial sums [samples, count, pitch] of a gradient [samples, cols].
struct Partials {
  int64_t first;  // row of the workspace
  int64_t samples, count;
  View gradient;
};

// Adds up every `step`-th of `count` numbers that are `pitch` apart, from number `first` on.
template <class Number>
__device__ __forceinline__ double sum_column(const Number* from, int first, int step, int64_t count, int64_t pitch) {
  double sum = 0;
#pragma unroll kLoadsInFlight
  for (int64_t i = first; i < count; i += step) sum += from[i * pitch];
  return sum;
}

__device__ __forceinline__ void store_rounded(void* to, int64_t i, double value, Dtype dtype) {
  if (dtype == Dtype::kFloat16) {
    static_cast<__half*>(to)[i] = static_cast<__half>(value);
  } else if (dtype == Dtype::kBFloat16) {
    static_cast<__nv_bfloat16*>(to)[i] = static_cast<__nv_bfloat16>(value);
  } else {
    static_cast<float*>(to)[i] = static_cast<float>(value);
  }
}

// Adds the partial sums of each sample of the first gradient (blockIdx.z is 0) or the second, in a fixed order. A lane
// owns a column, and the warps of a block take the partial sums in turn. The kernel waits for memory, so each thread
// has many loads in flight.
__global__ void __launch_bounds__(kMaxWarpsPerColumn* kWarpSize, 2)
    add_partials(const void* workspace, const bool is_double, const Partials first, const Partials second,
                 const int64_t pitch, const int64_t cols, const Dtype dtype) {
  __shared__ double sums[kMaxWarpsPerColumn][kWarpSize];
  const Partials partials = blockIdx.z > 0 ? second : first;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int64_t column = int64_t{blockIdx.x} * kWarpSize + lane;
  wait_for_previous_grid();
  for (int64_t sample = blockIdx.y; sample < partials.samples; sample += gridDim.y) {
    const int64_t begin = (partials.first + sample * partials.count) * pitch + column;
    double sum = 0;
    if (column < cols) {
      sum = is_double ? sum_column(static_cast<const double*>(workspace) + begin, warp, warps, partials.count, pitch)
                      : sum_column(static_cast<const float*>(workspace) + begin, warp, warps, partials.count, pitch);
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < cols) {
#pragma unroll 4
      for (int w = 1; w < warps; ++w) sum += sums[w][lane];
      store_rounded(partials.gradient.data, sample * partials.gradient.sample_stride + column,
                    is_double ? sum : static_cast<float>(sum), dtype);
    }
    __syncthreads();
  }
}

}  // namespace

void launch_add_partials(const BackwardParams& p, const GradientPlan& plan, bool is_double, int64_t pitch,
                         LaunchConfig config) {
  const auto make = [&](const View& gradient, bool is_per_sample, int64_t first, int64_t rows) {
    const int64_t samples = std::min(is_per_sample ? p.samples : 1, rows);  // 0 without partial sums
    return Partials{first, samples, rows / std::max(samples, int64_t{1}), gradient};
  };
  const auto weight = make(p.grad_weight, plan.flags.has(kWeightPerSample), 0, plan.weight_partials);
  const auto bias = make(p.grad_bias, plan.flags.has(kBiasPerSample), plan.weight_partials, plan.bias_partials);
  const int64_t samples = std::max(weight.samples, bias.samples);
  if (samples == 0) return;
  // A thread adds at least four partial sums: with more warps, adding up their sums would take longer.
  const int64_t warps = ceil_div(std::max(weight.count, bias.count), 4);
  config.grid =
      dim3(static_cast<unsigned>(ceil_div(p.cols, kWarpSize)), static_cast<unsigned>(std::min(samples, kMaxGridY)),
           weight.samples > 0 && bias.samples > 0 ? 2 : 1);
  config.block = static_cast<unsigned>(std::min<int64_t>(warps, kMaxWarpsPerColumn) * kWarpSize);
  config.shared_bytes = 0;
  config.cluster = 1;
  config.overlaps_previous = true;
  launch(config, add_partials, plan.workspace, is_double, weight.samples > 0 ? weight : bias, bias, pitch, p.cols,
         p.param_dtype);
}

}  // namespace layernorm::cuda
