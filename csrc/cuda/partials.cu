// Adds up, over the segments of rows, the partial sums of dweight, dbias or dinput_scale that another kernel has stored
// in the workspace: from [samples, segments, pitch] to the gradient [samples, cols].
#include <algorithm>

#include "row.cuh"

namespace layernorm::cuda {
namespace {

constexpr int kMaxWarps = 32;      // per block
constexpr int kLoadsInFlight = 8;  // per thread

// Adds up the elements first, first + step, ... of a column with `rows` elements, which are `pitch` apart in memory.
template <class Number>
__device__ __forceinline__ double sum_column(const Number* column, int first, int step, int64_t rows, int64_t pitch) {
  double sum = 0;
#pragma unroll kLoadsInFlight
  for (int64_t i = first; i < rows; i += step) sum += column[i * pitch];
  return sum;
}

// Rounds a value to the dtype of a gradient, and stores it as element i.
__device__ __forceinline__ void store_rounded(void* gradient, Dtype dtype, int64_t i, double value) {
  if (dtype == Dtype::kFloat16) {
    static_cast<__half*>(gradient)[i] = static_cast<__half>(value);
  } else if (dtype == Dtype::kBFloat16) {
    static_cast<__nv_bfloat16*>(gradient)[i] = static_cast<__nv_bfloat16>(value);
  } else {
    static_cast<float*>(gradient)[i] = static_cast<float>(value);
  }
}

// Adds the partial sums of the first gradient (blockIdx.z is 0) or the second (1), in a fixed order. A block has 32
// columns, one per lane, and takes every gridDim.y-th sample. Warp w adds the segments w, w + warps, ...; then warp 0
// adds the sums of the warps. Memory bounds the kernel, so each thread has many loads in flight.
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, 2)
    add_partials(const void* workspace, const bool is_double, const PartialSums first, const PartialSums second,
                 const int64_t pitch, const int64_t cols, const Dtype dtype) {
  __shared__ double warp_sums[kMaxWarps][kWarpSize];
  const PartialSums partials = blockIdx.z > 0 ? second : first;
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
      // A sum of floats is rounded to float first, as in backward blocks that store a gradient themselves.
      store_rounded(partials.gradient.data, dtype, sample * partials.gradient.sample_stride + column,
                    is_double ? sum : static_cast<float>(sum));
    }
    __syncthreads();  // before the next sample overwrites warp_sums
  }
}

}  // namespace

void launch_add_partials(const BackwardParams& p, const void* workspace, bool is_double, int64_t pitch,
                         const PartialSums& first, const PartialSums& second, LaunchConfig config) {
  const int64_t samples = std::max(first.samples, second.samples);
  if (samples == 0) return;
  // A thread adds about four partial sums or more, because adding up the sums of more warps would take longer.
  const int64_t warps = ceil_div(std::max(first.segments, second.segments), 4);
  const bool has_first = first.samples > 0, has_second = second.samples > 0;
  config.grid = dim3(static_cast<unsigned>(ceil_div(p.cols, kWarpSize)),
                     static_cast<unsigned>(std::min(samples, kMaxGridY)), has_first && has_second ? 2 : 1);
  config.block = static_cast<unsigned>(std::min<int64_t>(warps, kMaxWarps) * kWarpSize);
  config.shared_bytes = 0;
  config.cluster = 1;
  config.overlaps_previous = true;
  launch(config, add_partials, workspace, is_double, has_first ? first : second, second, pitch, p.cols, p.param_dtype);
}

}  // namespace layernorm::cuda
