// Normalization over the channels of images, and its gradients, on a GPU. The formulas are those of forward.cu and
// backward.cu: a sample is an image, a row is a pixel, and the columns are its channels.
//
// x is [images, channels, pixels], and the pixels of a channel are contiguous. A block takes a tile of 32 successive
// pixels, of one or more images, with all their channels: lane l of each warp has pixel l, and warp w of 8 has the
// channels w, w + 8, w + 16, ...
//
// So warps load contiguous pixels, and each sum over the channels adds the sums of the 8 warps in shared memory, with
// two barriers. A tile [channels, 32] is staged in shared memory if it fits (`staged`): with n = images * channels *
// pixels, forward then moves 2 * n * sizeof(T) bytes, and backward 3 * n * sizeof(T). Otherwise, each pass over the
// channels reads global memory. Staged tiles whose channels start at multiples of 16 bytes are copied in vectors of 16
// bytes (kAlignedChannels). Forward sums each tile twice: first for the mean, and then for the variance and for the
// average of x - mean, which corrects the mean.
//
// Source: Ba et al. 2016, arXiv:1607.06450.
#include <algorithm>

#include "../dtypes.h"
#include "row.cuh"

namespace layernorm::cuda {

// The values that the host computes from Params. Forward uses only flags and rows_per_sample of GradientPlan.
struct ChannelsFirstPlan : GradientPlan {
  FloatDivisor<double> channels;
  bool staged;  // a tile fits into shared memory
};

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kUnroll = 8;  // channels that a thread loads before it uses them
// The resident blocks per multiprocessor that __launch_bounds__ asks for. Without these numbers, nvcc aims at more
// resident blocks and spills registers.
constexpr int kMinBlocksOfForward = 3, kMinBlocksOfBackward = 2;

// Bytes of static shared memory of either kernel: forward has the arrays of sum_warps<1> and sum_warps<2>, and backward
// has the array of sum_warps<3>.
constexpr int64_t kStaticShared = 3 * kWarps * kWarpSize * static_cast<int64_t>(sizeof(double));

// The channels of one pixel, in global memory or in a staged tile. They are `stride` elements apart, 32 in a tile.
template <class E>
struct Channels {
  E* data;
  int64_t stride;

  __device__ __forceinline__ Channels(E* data, int64_t stride) : data(data), stride(stride) {}
  __device__ __forceinline__ Channels(const View& view, const RowIndex& pixel)
      : data(address<E>(view, pixel)), stride(view.col_stride) {}
  __device__ __forceinline__ E& operator[](int64_t c) const { return data[c * stride]; }
};

// The weight or the bias of a pixel's image, indexed by channel: elements of T or float, or default_value without it.
template <class T>
struct ChannelWeight {
  const Flags flags;
  const void* data = nullptr;
  const Acc default_value;

  __device__ __forceinline__ ChannelWeight(const View& view, const RowIndex& pixel, Flags flags, Acc default_value)
      : flags(flags), default_value(default_value) {
    if (!view.data) return;
    with_weight_type<T>(flags, [&](auto element) { data = address<decltype(element)>(view, {pixel.sample, 0}); });
  }
  __device__ __forceinline__ Acc operator[](int64_t c) const {
    if (!data) return default_value;
    return with_weight_type<T>(
        flags, [&](auto element) { return static_cast<Acc>(static_cast<const decltype(element)*>(data)[c]); });
  }
};

// The channels of a chunk, which a thread sums in float before it adds the sum to its sum in double. With 64 channels,
// one outlier among thousands of equal values would give a larger error than promised.
constexpr int kChannelChunk = 16;

// Calls f(c) for each channel c of this warp, and end_of_chunk() after each kChannelChunk of them.
template <class F, class G = DoNothing>
__device__ __forceinline__ void for_each_channel(int64_t channels, const F& f, const G& end_of_chunk = {}) {
  for (int64_t first = threadIdx.x / kWarpSize; first < channels; first += kChannelChunk * kWarps) {
    const int count = static_cast<int>(min(ceil_div(channels - first, kWarps), int64_t{kChannelChunk}));
#pragma unroll kUnroll
    for (int i = 0; i < count; ++i) f(first + i * kWarps);
    end_of_chunk();
  }
}

// Calls copy(shared, global) for each vector that this thread moves between a staged tile [channels, 32] and global
// memory. The tile starts at first_pixel. Pixels from end_pixel on, after the array or the segment, are not copied.
template <class E, class F>
__device__ __forceinline__ void for_each_vector(void* shared, const View& view, int64_t first_pixel, int64_t end_pixel,
                                                const Params& p, const ChannelsFirstPlan& plan, const F& copy) {
  using Pixels = Vector<E, kVectorSize<E>>;
  constexpr int kVectors = kWarpSize / kVectorSize<E>;  // of a channel in the tile
  const int64_t pixel = first_pixel + threadIdx.x % kVectors * kVectorSize<E>;
  if (pixel >= end_pixel) return;
  const Channels<E> global(view, split_row_number(pixel, p.samples > 1, plan.rows_per_sample));
  auto* staged = static_cast<Pixels*>(shared) + threadIdx.x;
#pragma unroll 4
  for (int64_t c = threadIdx.x / kVectors; c < p.cols; c += kThreads / kVectors, staged += kThreads) {
    copy(staged, reinterpret_cast<Pixels*>(&global[c]));
  }
}

// Replaces each lane's values by their sums over all warps of the block. Lane l of every warp has the same pixel.
template <int kCount>
__device__ __forceinline__ void sum_warps(double (&values)[kCount]) {
  __shared__ double warp_values[kCount][kWarps][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int k = 0; k < kCount; ++k) warp_values[k][warp][lane] = values[k];
  __syncthreads();
  for (int k = 0; k < kCount; ++k) {
    values[k] = warp_values[k][0][lane];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) values[k] += warp_values[k][w][lane];
  }
  __syncthreads();  // before the next call overwrites the shared memory
}

// Computes kCount sums over all channels of each lane's pixel: add(c, sums) adds the terms of channel c. All warps call
// this and get the sums.
template <int kCount, class F>
__device__ __forceinline__ void sum_channels(double (&sums)[kCount], int64_t channels, const F& add) {
  Acc chunk_sums[kCount] = {};
  for_each_channel(
      channels, [&](int64_t c) { add(c, chunk_sums); },
      [&] {
        for (int k = 0; k < kCount; ++k) {
          sums[k] += chunk_sums[k];
          chunk_sums[k] = 0;
        }
      });
  sum_warps(sums);
}

// Forward of one tile per block: the mean, then the variance of differences from the mean, then the output.
template <class T>
__global__ void __launch_bounds__(kThreads, kMinBlocksOfForward)
    channels_first_forward(const ForwardParams p, const ChannelsFirstPlan plan) {
  const Flags flags = plan.flags;
  const bool aligned = flags.has(kAlignedChannels), rms = flags.has(kRms);
  const int lane = threadIdx.x % kWarpSize;
  const int64_t first_pixel = int64_t{blockIdx.x} * kWarpSize, end_pixel = p.samples * p.rows;
  const bool exists = first_pixel + lane < end_pixel;
  const RowIndex pixel =
      split_row_number(exists ? first_pixel + lane : 0, flags.has(kSeveralSamples), plan.rows_per_sample);
  const int64_t channels = exists ? p.cols : 0;
  extern __shared__ __align__(16) unsigned char shared[];  // x [channels, kWarpSize]
  const Channels<T> staged_x(reinterpret_cast<T*>(shared) + lane, kWarpSize);
  const Channels<T> global_x(p.input, pixel);
  const Channels<T> x = plan.staged ? staged_x : global_x;
  if (aligned) {
    for_each_vector<T>(shared, p.input, first_pixel, end_pixel, p, plan,
                       [](auto* to, auto* from) { async_copy<16>(to, from); });
    async_commit();
    async_wait<0>();
    __syncthreads();
  } else if (plan.staged) {
    for_each_channel(channels, [&](int64_t c) { staged_x[c] = global_x[c]; });
  }
  const auto load = [&](int64_t c) { return static_cast<Acc>(x[c]); };

  Acc row_scale = 1, mean = 0;
  double correction = 0, variance;  // the correction, the average of x - mean, is the rounding error of the mean
  for (bool is_second_try = false;; is_second_try = true) {
    if (!rms) {
      double sum[1] = {};
      sum_channels(sum, channels, [&](int64_t c, Acc(&sums)[1]) { sums[0] = fma(load(c), row_scale, sums[0]); });
      mean = static_cast<Acc>(plan.channels.divide(sum[0]));
    }
    double moments[2] = {};
    sum_channels(moments, channels, [&](int64_t c, Acc(&sums)[2]) {
      const Acc d = fma(load(c), row_scale, -mean);
      sums[0] += d;
      sums[1] = fma(d, d, sums[1]);
    });
    if (!rms) correction = plan.channels.divide(moments[0]);
    variance = moments[1] * plan.channels.reciprocal - correction * correction;
    if (variance < 0) variance = 0;  // this comparison keeps NaN
    // If a sum of a pixel has overflowed, the block repeats all sums, with a row_scale for this pixel; other pixels get
    // the same result. Sums of a pixel that has NaN or infinity are repeated, too, and give NaN again.
    const bool overflows = !(variance < kInfinity);
    if (is_second_try || !__syncthreads_or(overflows)) break;
    if (overflows) row_scale = kRowScale;
  }

  constexpr double kMax = std::numeric_limits<Acc>::max();
  const double exact_rstd = rescaled_rstd<double>(variance, p.eps, row_scale);
  const Acc rstd = static_cast<Acc>(p.eps > 0 && exact_rstd > kMax ? kMax : exact_rstd);
  if (threadIdx.x < kWarpSize && exists) {
    const double exact_mean = (mean + correction) * (row_scale == 1 ? 1 : 1 / kRowScale);
    if (!rms) *address<Acc>(p.mean, pixel) = static_cast<Acc>(exact_mean);
    *address<Acc>(p.rstd, pixel) = undo_row_scale(rstd, p.eps, row_scale);
  }
  const Acc rounded_correction = static_cast<Acc>(correction), weight_offset = flags.has(kZeroCentered) ? 1 : 0;
  const ChannelWeight<T> weight(p.weight, pixel, flags, 1), bias(p.bias, pixel, flags, 0);
  const Channels<T> staged_y(reinterpret_cast<T*>(shared) + lane, kWarpSize), global_y(p.output, pixel);
  const Channels<T> y = aligned ? staged_y : global_y;
  for_each_channel(channels, [&](int64_t c) {
    const Acc d = fma(load(c), row_scale, -mean) - rounded_correction;
    y[c] = static_cast<T>(fma(d * rstd, weight[c] + weight_offset, bias[c]));
  });
  if (!aligned) return;
  __syncthreads();
  for_each_vector<T>(shared, p.output, first_pixel, end_pixel, p, plan, [](auto* from, auto* to) { *to = *from; });
}

// Backward. A block takes every gridDim.x-th segment, and the tiles of a segment one after the other. It stores the
// partial sums of dweight [num_weight_partials, channels] and of dbias [num_bias_partials, channels] in the workspace,
// which has a row for each segment.
template <class T>
__global__ void __launch_bounds__(kThreads, kMinBlocksOfBackward)
    channels_first_backward(const BackwardParams p, const ChannelsFirstPlan plan) {
  const Flags flags = plan.flags;  // the kernel reads some options from p instead, which takes fewer registers
  const int lane = threadIdx.x % kWarpSize;
  extern __shared__ __align__(16) unsigned char shared[];  // x and dy [channels, kWarpSize]
  const Channels<T> staged_x(reinterpret_cast<T*>(shared) + lane, kWarpSize);
  unsigned char* const shared_dy = shared + p.cols * kWarpSize * sizeof(T);
  const Channels<T> staged_dy(reinterpret_cast<T*>(shared_dy) + lane, kWarpSize);
  const bool has_dx = flags.has(kGradInput), has_dweight = flags.has(kGradWeight), has_dbias = flags.has(kGradBias);
  const bool needs_x = has_dx || has_dweight, staged = plan.staged && needs_x;
  const bool aligned = flags.has(kAlignedChannels) && needs_x;

  // Stores dx of the tile from first_pixel on, and adds its sums of dweight and dbias to those of the segment, or
  // stores them if it is the segment's first tile. The segment ends before end_pixel; lanes without a pixel add 0.
  const auto process_tile = [&](int64_t segment, bool is_first, int64_t first_pixel, int64_t end_pixel) {
    const bool exists = first_pixel + lane < end_pixel;
    const RowIndex pixel = split_row_number(exists ? first_pixel + lane : 0, p.samples > 1, plan.rows_per_sample);
    const Channels<T> global_dy(p.grad_output, pixel), dy = staged ? staged_dy : global_dy;
    const Channels<T> global_x(p.input, pixel), x = staged ? staged_x : global_x;
    const Channels<T> global_dx(p.grad_input, pixel), dx = aligned ? staged_x : global_dx;
    const ChannelWeight<T> weight(p.weight, pixel, flags, 1), bias(p.bias, pixel, flags, 0);
    const bool has_statistics = exists && needs_x;
    const ScaledStatistics statistics(has_statistics && p.mean.data ? *address<const Acc>(p.mean, pixel) : 0,
                                      has_statistics ? *address<const Acc>(p.rstd, pixel) : 0, p.memory_efficient);
    const auto load_weight = [&](int64_t c) { return p.zero_centered_weight ? weight[c] + 1 : weight[c]; };
    const auto load_dy = [&](int64_t c) { return exists ? static_cast<Acc>(dy[c]) : 0; };
    const auto load_d = [&](int64_t c, Acc w) {  // xhat = d * scaled_rstd - mean_xhat, see ScaledStatistics
      if (!exists) return Acc(0);
      const Acc v = static_cast<Acc>(x[c]);
      return p.memory_efficient ? recover_xhat(v, w, bias[c]) : fma(v, statistics.row_scale, -statistics.scaled_mean);
    };

    RowMeans means = {};
    if (needs_x) {
      if (aligned) {
        const auto fetch = [](auto* to, auto* from) { async_copy<16>(to, from); };
        __syncthreads();  // the previous tile has been read
        for_each_vector<T>(shared, p.input, first_pixel, end_pixel, p, plan, fetch);
        for_each_vector<T>(shared_dy, p.grad_output, first_pixel, end_pixel, p, plan, fetch);
        async_commit();
        async_wait<0>();
        __syncthreads();
      } else if (staged && exists) {
        for_each_channel(p.cols, [&](int64_t c) { staged_x[c] = global_x[c], staged_dy[c] = global_dy[c]; });
      }
      double sums[3] = {};  // of d (ScaledStatistics), g = dy * weight, and g * d
      sum_channels(sums, p.cols, [&](int64_t c, Acc(&chunk_sums)[3]) {
        const Acc w = load_weight(c), d = load_d(c, w), g = load_dy(c) * w;
        chunk_sums[0] += d;
        chunk_sums[1] += g;
        chunk_sums[2] = fma(g, d, chunk_sums[2]);
      });
      const auto mean_of = [&](double sum) { return plan.channels.divide(sum); };
      const double mean_xhat = p.rms ? 0 : mean_of(sums[0]) * statistics.scaled_rstd,
                   mean_g = p.rms ? 0 : mean_of(sums[1]);
      means = {static_cast<Acc>(mean_xhat), static_cast<Acc>(mean_g),
               static_cast<Acc>(mean_of(sums[2]) * statistics.scaled_rstd - mean_xhat * mean_g)};
    }
    for_each_channel(p.cols, [&](int64_t c) {
      const Acc dy_value = load_dy(c);
      Acc dw = 0;
      if (needs_x) {
        const Acc w = load_weight(c), xhat = fma(load_d(c, w), statistics.scaled_rstd, -means.mean_xhat);
        dw = dy_value * xhat;
        if (has_dx && exists) {
          dx[c] = static_cast<T>(means.dx(dy_value * w - means.mean_g, xhat, statistics));
        }
      }
      if (!has_dweight && !has_dbias) return;
      // Adds dweight and dbias over the lanes with 5 shuffles instead of 10: after the first one, the lower half of the
      // warp has dweight, and the upper half dbias.
      const bool is_upper = lane >= kWarpSize / 2;
      Acc sum = (is_upper ? dy_value : dw) + __shfl_xor_sync(kAllLanes, is_upper ? dw : dy_value, kWarpSize / 2);
      sum = sum_over_lanes<kWarpSize / 2>(sum);
      if (lane % (kWarpSize / 2) == 0 && (is_upper ? has_dbias : has_dweight)) {
        const int64_t partial = segment + (is_upper ? plan.num_weight_partials : 0);
        double& segment_sum = static_cast<double*>(plan.workspace)[partial * p.cols + c];
        segment_sum = is_first ? sum : segment_sum + sum;
      }
    });
    if (!aligned || !has_dx) return;
    __syncthreads();
    for_each_vector<T>(shared, p.grad_input, first_pixel, end_pixel, p, plan,
                       [](auto* from, auto* to) { *to = *from; });
  };

  for (int64_t segment = blockIdx.x; segment < plan.num_segments; segment += gridDim.x) {
    const auto [sample, first_row, rows] = Segment<int64_t>(plan, segment);
    for (int row = 0; row < rows; row += kWarpSize) process_tile(segment, row == 0, first_row + row, first_row + rows);
  }
}

// ---- host code ------------------------------------------------------------------------------------------------------

// Whether every channel of every image starts at a multiple of 16 bytes, or the array is absent.
bool is_aligned(const Params& p, const View& view) {
  const int64_t vector = 16 / bytes_of(p.dtype);
  return !view.data || (reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.sample_stride % vector == 0 &&
                        view.col_stride % vector == 0);
}

// Plans a launch, without the segments of backward. `are_aligned` tells whether is_aligned() holds for all arrays of
// pixels. bytes_per_channel are the bytes of one channel of one pixel in all staged arrays together.
template <class P>
ChannelsFirstPlan make_plan(const P& p, bool are_aligned, int64_t bytes_per_channel, LaunchConfig& config) {
  ChannelsFirstPlan plan = {};
  plan.rows_per_sample = IntegerDivisor(p.rows);
  plan.channels = FloatDivisor<double>(p.cols);
  const int64_t bytes = p.cols * kWarpSize * bytes_per_channel;
  plan.staged = bytes <= std::min(kMaxStagedBytes, static_cast<int64_t>(max_shared_memory(config)) - kStaticShared);
  plan.flags = make_flags(p);
  plan.flags.set(kAlignedChannels, plan.staged && p.rows * bytes_of(p.dtype) % 16 == 0 && are_aligned);
  config.grid = static_cast<unsigned>(ceil_div(p.samples * p.rows, kWarpSize));
  config.block = kThreads;
  config.shared_bytes = plan.staged ? static_cast<size_t>(bytes) : 0;
  config.stream = static_cast<Stream>(p.stream);
  return plan;
}

}  // namespace

void channels_first_forward(const ForwardParams& p) {
  LaunchConfig config;
  const auto plan = make_plan(p, is_aligned(p, p.input) && is_aligned(p, p.output), bytes_of(p.dtype), config);
  dispatch_dtypes_of_images<Elements>(
      p, [&](auto types) { launch(config, channels_first_forward<typename decltype(types)::T>, p, plan); });
}

void channels_first_backward(const BackwardParams& p) {
  LaunchConfig config;
  const bool are_aligned = is_aligned(p, p.input) && is_aligned(p, p.grad_output) && is_aligned(p, p.grad_input);
  auto plan = make_plan(p, are_aligned, 2 * bytes_of(p.dtype), config);
  dispatch_dtypes_of_images<Elements>(p, [&](auto types) {
    const auto kernel = channels_first_backward<typename decltype(types)::T>;
    const int64_t resident = resident_blocks(config, kernel);
    plan.set_segments(p, kWarpSize, resident, /*min_iterations=*/4);
    plan.num_weight_partials = p.grad_weight.data ? plan.num_segments : 0;  // this kernel stores no gradient
    plan.num_bias_partials = p.grad_bias.data ? plan.num_segments : 0;
    config.grid = static_cast<unsigned>(std::min(plan.num_segments, resident));
    const int64_t elements = (plan.num_weight_partials + plan.num_bias_partials) * p.cols;
    if (elements > 0) plan.workspace = p.allocator->allocate(elements * static_cast<int64_t>(sizeof(double)));
    launch(config, kernel, p, plan);
  });
  launch_add_partials(p, plan.workspace, /*is_double=*/true, p.cols, plan.weight_sums(p), plan.bias_sums(p), config);
}

}  // namespace layernorm::cuda
