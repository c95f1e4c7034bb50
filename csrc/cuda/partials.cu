// Adds up the partial sums of dweight, dbias or dinput_scale that another kernel has left in the workspace: from
// [segments of all samples, pitch] to the gradient [samples, cols].
#include <algorithm>

#include "row.cuh"

namespace layernorm::cuda {
namespace {

constexpr int kMaxWarps = 32;      // of a block
constexpr int kLoadsInFlight = 8;  // of a thread

// The partial sums [samples, segments, pitch] of a gradient [samples, cols] in the workspace.
struct Partials {
  int64_t first_row;  // of the workspace
  int64_t samples, segments;
  View gradient;
};

// Adds up the elements first, first + step, ... of a column of `rows` rows that are `pitch` elements apart.
template <class Number>
__device__ __forceinline__ double sum_column(const Number* column, int first, int step, int64_t rows, int64_t pitch) {
  double sum = 0;
#pragma unroll kLoadsInFlight
  for (int64_t i = first; i < rows; i += step) sum += column[i * pitch];
  return sum;
}

// Stores element i of a gradient.
__device__ __forceinline__ void store_rounded(void* to, int64_t i, double value, Dtype dtype) {
  if (dtype == Dtype::kFloat16) {
    static_cast<__half*>(to)[i] = static_cast<__half>(value);
  } else if (dtype == Dtype::kBFloat16) {
    static_cast<__nv_bfloat16*>(to)[i] = static_cast<__nv_bfloat16>(value);
  } else {
    static_cast<float*>(to)[i] = static_cast<float>(value);
  }
}

// Adds the partial sums of the first gradient (blockIdx.z is 0) or the second, in a fixed order. A block has 32
// columns, one per lane (blockIdx.x), of every gridDim.y-th sample. Warp w adds the segments w, w + warps, ...; then
// warp 0 adds the sums of the warps. The kernel waits for memory, so each thread has many loads in flight.
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, 2)
    add_partials(const void* workspace, const bool is_double, const Partials first, const Partials second,
                 const int64_t pitch, const int64_t cols, const Dtype dtype) {
  __shared__ double warp_sums[kMaxWarps][kWarpSize];
  const Partials partials = blockIdx.z > 0 ? second : first;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int64_t column = int64_t{blockIdx.x} * kWarpSize + lane;
  wait_for_previous_grid();
  for (int64_t sample = blockIdx.y; sample < partials.samples; sample += gridDim.y) {
    const int64_t begin = (partials.first_row + sample * partials.segments) * pitch + column;
    double sum = 0;
    if (column < cols) {
      sum = is_double ? sum_column(static_cast<const double*>(workspace) + begin, warp, warps, partials.segments, pitch)
                      : sum_column(static_cast<const float*>(workspace) + begin, warp, warps, partials.segments, pitch);
    }
    warp_sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < cols) {
#pragma unroll 4
      for (int w = 1; w < warps; ++w) sum += warp_sums[w][lane];
      store_rounded(partials.gradient.data, sample * partials.gradient.sample_stride + column,
                    is_double ? sum : static_cast<float>(sum), dtype);
    }
    __syncthreads();  // before the next sample overwrites warp_sums
  }
}

}  // namespace

void launch_add_partials(const BackwardParams& p, const void* workspace, bool is_double, int64_t pitch,
                         PartialSums first, PartialSums second, LaunchConfig config) {
  const auto partials_of = [&](const PartialSums& sums, int64_t first_row) {
    const int64_t samples = std::min(sums.is_per_sample ? p.samples : 1, sums.num);  // 0 without partial sums
    return Partials{first_row, samples, sums.num / std::max(samples, int64_t{1}), sums.gradient};
  };
  const Partials a = partials_of(first, 0), b = partials_of(second, first.num);
  const int64_t samples = std::max(a.samples, b.samples);
  if (samples == 0) return;
  // A thread adds at least four partial sums: with more warps, adding up their sums would take longer.
  const int64_t warps = ceil_div(std::max(a.segments, b.segments), 4);
  config.grid = dim3(static_cast<unsigned>(ceil_div(p.cols, kWarpSize)),
                     static_cast<unsigned>(std::min(samples, kMaxGridY)), a.samples > 0 && b.samples > 0 ? 2 : 1);
  config.block = static_cast<unsigned>(std::min<int64_t>(warps, kMaxWarps) * kWarpSize);
  config.shared_bytes = 0;
  config.cluster = 1;
  config.overlaps_previous = true;
  launch(config, add_partials, workspace, is_double, a.samples > 0 ? a : b, b, pitch, p.cols, p.param_dtype);
}

}  // namespace layernorm::cuda
