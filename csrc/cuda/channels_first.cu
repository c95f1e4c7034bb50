// Normalization over the channels of images x [images, channels, pixels], and its gradients, on a GPU. The formulas are
// those of forward.cu and backward.cu; a row is a pixel.
//
// A block has 32 pixels, one for each lane, so that a warp reads neighbouring numbers of one channel; its warps share
// the channels, and meet once for each sum over them. Each thread keeps its numbers in shared memory, where it finds
// them again without a barrier, so that x (and dy) come from memory once: 2 * images * channels * pixels * sizeof(T)
// bytes are moved in forward, and 3 times as many as one in backward. Of so many channels that they do not fit, the
// later sweeps read from memory again.
//
// Backward's blocks take 32 pixels after 32; each adds up its part of dweight and dbias in the workspace, and a second
// kernel adds those up in order.
//
// Exactness is that of the CPU kernels (cpu/channels_first.cpp).
//
// Source: Ba et al. 2016, arXiv:1607.06450.
#include <algorithm>

#include "../dtypes.h"
#include "partials.cuh"
#include "row.cuh"

namespace layernorm::cuda {

// To divide by: quotients of 64-bit integers and of doubles would be calls of functions, around which registers spill.
struct Reciprocals {
  double pixels, channels;
};

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kUnroll = 8;
// Of a multiprocessor, at the least. Left to itself, nvcc aims at more, and spills registers.
constexpr int kBlocks = 3;

// Bytes of static shared memory, which sum_warps() declares: for one sum and for two in forward, for three in backward.
constexpr int64_t kStaticShared = 3 * kWarps * kWarpSize * static_cast<int64_t>(sizeof(double));

template <class Params>
Reciprocals reciprocals_of(const Params& p) {
  return {1.0 / static_cast<double>(p.pixels), 1.0 / static_cast<double>(p.channels)};
}

// As Groups::mean of cpu/row.h, which says why.
template <class Acc>
__device__ __forceinline__ double average(double sum, int64_t channels, const Reciprocals& reciprocals) {
  return sizeof(Acc) == 4 ? sum * reciprocals.channels : sum / static_cast<double>(channels);
}

// Where a pixel is, of all images.
struct Pixel {
  __device__ __forceinline__ Pixel(int64_t index, int64_t images, int64_t pixels, const Reciprocals& reciprocals)
      : index(index), exists(index < images * pixels), image(0), in_image(0) {
    if (!exists) return;
    image = static_cast<int64_t>(static_cast<double>(index) * reciprocals.pixels);  // or one less, below 2^52
    in_image = index - image * pixels;
    if (in_image >= pixels) ++image, in_image -= pixels;
  }
  int64_t index;
  bool exists;
  int64_t image, in_image;
};

// How many numbers a thread adds up in Acc; beyond, it goes on in double. Of one outlier and thousands of equal
// numbers, four times as many in Acc put the output off by more than is promised.
constexpr int kRun = 16;

// Calls f(c) for this warp's channels; after each kRun of them end_of_run(), because sums over more in Acc would
// be too inexact. kUnroll of them are on their way from memory at a time.
template <class F, class G>
__device__ __forceinline__ void for_each_channel(int64_t channels, const F& f, const G& end_of_run) {
  for (int64_t first = threadIdx.x / kWarpSize; first < channels; first += kRun * kWarps) {
    const int run = static_cast<int>(min(ceil_div(channels - first, kWarps), int64_t{kRun}));
#pragma unroll kUnroll
    for (int i = 0; i < run; ++i) f(first + i * kWarps);
    end_of_run();
  }
}

// The sums over the warps, of each lane; every warp gets them.
template <int kCount>
__device__ __forceinline__ void sum_warps(double (&values)[kCount]) {
  __shared__ double of_warps[kCount][kWarps][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int k = 0; k < kCount; ++k) of_warps[k][warp][lane] = values[k];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    values[k] = of_warps[k][0][lane];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) values[k] += of_warps[k][w][lane];
  }
  __syncthreads();  // before the next sums
}

// A parameter of a channel, or `otherwise`.
template <class Acc, class W>
__device__ __forceinline__ Acc parameter(const void* parameters, int64_t channel, Acc otherwise) {
  return parameters ? static_cast<Acc>(static_cast<const W*>(parameters)[channel]) : otherwise;
}

template <class T, class W, bool staged>
__global__ void __launch_bounds__(kThreads, kBlocks)
    channels_first_forward(const ChannelsFirstForwardParams p, const Reciprocals reciprocals) {
  using Acc = AccOf<T>;
  const Pixel pixel(int64_t{blockIdx.x} * kWarpSize + threadIdx.x % kWarpSize, p.images, p.pixels, reciprocals);
  const T* const x = static_cast<const T*>(p.input) + pixel.image * p.input_image_stride + pixel.in_image;
  T* const y = static_cast<T*>(p.output) + pixel.image * p.channels * p.pixels + pixel.in_image;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const kept = reinterpret_cast<T*>(shared);  // [channels, kWarpSize]
  T* const kept_x = kept + threadIdx.x % kWarpSize;
  const int64_t channels = pixel.exists ? p.channels : 0;
  const auto mean_of = [&](double sum) { return average<Acc>(sum, p.channels, reciprocals); };

  if (staged) {
    for_each_channel(channels, [&](int64_t c) { kept_x[c * kWarpSize] = x[c * p.input_channel_stride]; }, [] {});
  }
  const auto load = [&](int64_t c) {
    return static_cast<Acc>(staged ? kept_x[c * kWarpSize] : x[c * p.input_channel_stride]);
  };

  Acc scale = 1, mean;
  double correction, variance;
  for (bool again = false;; again = true) {
    double sums[1] = {};
    Acc sum = 0;
    for_each_channel(channels, [&](int64_t c) { sum = fma(load(c), scale, sum); }, [&] { sums[0] += sum, sum = 0; });
    sum_warps(sums);
    mean = static_cast<Acc>(mean_of(sums[0]));

    double deviations[2] = {};
    Acc distance = 0, square = 0;
    for_each_channel(
        channels,
        [&](int64_t c) {
          const Acc d = fma(load(c), scale, -mean);
          distance += d;
          square = fma(d, d, square);
        },
        [&] { deviations[0] += distance, deviations[1] += square, distance = square = 0; });
    sum_warps(deviations);
    correction = mean_of(deviations[0]);
    variance = mean_of(deviations[1]) - correction * correction;
    if (variance < 0) variance = 0;  // written so that NaN stays NaN
    // A sum has overflowed, or the pixel holds NaN or infinity and gives NaN again; to the others nothing changes.
    const bool is_huge = !(variance < kInfinity<Acc>);
    if (again || !__syncthreads_or(is_huge)) break;
    if (is_huge) scale = kScale<Acc>;
  }

  const Acc rstd = static_cast<Acc>(reciprocal_deviation<double>(variance, p.eps, scale));
  if (threadIdx.x < kWarpSize && pixel.exists) {
    const double exact_mean = (mean + correction) * (scale == 1 ? 1 : 1 / kScale<Acc>);
    static_cast<Acc*>(p.mean)[pixel.index] = static_cast<Acc>(exact_mean);
    static_cast<Acc*>(p.rstd)[pixel.index] = rstd * scale;
  }
  const Acc rounded_correction = static_cast<Acc>(correction);
  for_each_channel(
      channels,
      [&](int64_t c) {
        const Acc d = fma(load(c), scale, -mean) - rounded_correction;
        y[c * p.pixels] =
            static_cast<T>(fma(d * rstd, parameter<Acc, W>(p.weight, c, 1), parameter<Acc, W>(p.bias, c, 0)));
      },
      [] {});
}

// Blocks take their pixels in turn, and leave dweight [blocks, channels] in the workspace and after it dbias [blocks,
// channels].
template <class T, class W, bool staged>
__global__ void __launch_bounds__(kThreads, kBlocks)
    channels_first_backward(const ChannelsFirstBackwardParams p, const Reciprocals reciprocals) {
  using Acc = AccOf<T>;
  const int lane = threadIdx.x % kWarpSize;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const kept = reinterpret_cast<T*>(shared);  // [2, channels, kWarpSize]
  T* const kept_x = kept + lane;
  T* const kept_dy = kept_x + p.channels * kWarpSize;
  const bool needs_x = p.grad_input || p.grad_weight;
  double* const dweight = static_cast<double*>(p.workspace) + blockIdx.x * p.channels;
  double* const dbias = dweight + (p.grad_weight ? gridDim.x * p.channels : 0);
  const auto mean_of = [&](double sum) { return average<Acc>(sum, p.channels, reciprocals); };
  const auto nothing = [] {};

  const int64_t tiles = ceil_div(p.images * p.pixels, kWarpSize);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Pixel pixel(tile * kWarpSize + lane, p.images, p.pixels, reciprocals);
    const auto in_image = [&](int64_t image_stride) { return pixel.image * image_stride + pixel.in_image; };
    const T* const x = static_cast<const T*>(p.input) + in_image(p.input_image_stride);
    const T* const dy = static_cast<const T*>(p.grad_output) + in_image(p.grad_output_image_stride);
    T* const dx = static_cast<T*>(p.grad_input) + in_image(p.channels * p.pixels);
    // What a pixel that does not exist adds to the sums over pixels is 0.
    const Statistics<Acc> statistics(pixel.exists && needs_x ? Saved<Acc>(p, pixel.index) : Saved<Acc>());
    const auto x_of = [&](int64_t c) {
      if (!pixel.exists) return Acc(0);
      return static_cast<Acc>(staged ? kept_x[c * kWarpSize] : x[c * p.input_channel_stride]);
    };
    const auto dy_of = [&](int64_t c) {
      if (!pixel.exists) return Acc(0);
      return static_cast<Acc>(staged && needs_x ? kept_dy[c * kWarpSize] : dy[c * p.grad_output_channel_stride]);
    };

    Means<Acc> means = {};
    if (needs_x) {
      if (staged && pixel.exists) {
        for_each_channel(
            p.channels,
            [&](int64_t c) {
              kept_x[c * kWarpSize] = x[c * p.input_channel_stride];
              kept_dy[c * kWarpSize] = dy[c * p.grad_output_channel_stride];
            },
            nothing);
      }
      Acc run[3] = {};
      double sums[3] = {};
      for_each_channel(
          p.channels,
          [&](int64_t c) {
            const Acc xhat = statistics.xhat(x_of(c), 0);
            const Acc g = dy_of(c) * parameter<Acc, W>(p.weight, c, 1);
            run[0] += xhat;
            run[1] += g;
            run[2] = fma(g, xhat, run[2]);
          },
          [&] {
#pragma unroll
            for (int k = 0; k < 3; ++k) sums[k] += run[k], run[k] = 0;
          });
      sum_warps(sums);
      const double xhat_mean = mean_of(sums[0]), g_mean = mean_of(sums[1]);
      means = {static_cast<Acc>(xhat_mean), static_cast<Acc>(g_mean),
               static_cast<Acc>(mean_of(sums[2]) - xhat_mean * g_mean)};
    }
    for_each_channel(
        p.channels,
        [&](int64_t c) {
          const Acc v = dy_of(c);
          Acc dw = 0;
          if (needs_x) {
            const Acc xhat = statistics.xhat(x_of(c), means.xhat);
            dw = v * xhat;
            if (p.grad_input && pixel.exists) {
              const Acc g = v * parameter<Acc, W>(p.weight, c, 1);
              dx[c * p.pixels] = static_cast<T>(means.grad_input(g, xhat, statistics));
            }
          }
          if (!p.grad_weight && !p.grad_bias) return;
          // Both sums over the lanes at once: dweight's in the lower half of the warp, dbias's in the upper.
          const bool is_upper = lane >= kWarpSize / 2;
          Acc sum = (is_upper ? v : dw) + __shfl_xor_sync(kAllLanes, is_upper ? dw : v, kWarpSize / 2);
          sum = sum_lanes<kWarpSize / 2>(sum);
          if (lane % (kWarpSize / 2) == 0 && (is_upper ? p.grad_bias : p.grad_weight)) {
            double& total = (is_upper ? dbias : dweight)[c];
            total = tile == blockIdx.x ? sum : total + sum;
          }
        },
        nothing);
  }
}

int64_t num_tiles(int64_t images, int64_t pixels) { return ceil_div(images * pixels, kWarpSize); }

// Calls f(whether the numbers fit, bytes of shared memory for them).
template <class F>
void with_staging(int64_t bytes, const F& f) {
  const int64_t most = std::min(kMaxStagedBytes, static_cast<int64_t>(max_shared_memory()) - kStaticShared);
  if (bytes <= most) {
    f(std::true_type{}, static_cast<size_t>(bytes));
  } else {
    f(std::false_type{}, size_t{0});
  }
}

// Calls f(W{}, kernel, its configuration but for the grid, and how many blocks there are: as many as the device holds
// at once).
template <class F>
void with_backward(const ChannelsFirstBackwardParams& p, const F& f) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    with_staging(2 * p.channels * kWarpSize * static_cast<int64_t>(sizeof(T)), [&](auto staged, size_t bytes) {
      const auto kernel = channels_first_backward<T, W, staged>;
      const LaunchConfig config = {1, kThreads, bytes, static_cast<Stream>(p.stream)};
      f(W{}, kernel, config, std::min(num_tiles(p.images, p.pixels), int64_t{resident_blocks(config, kernel)}));
    });
  });
}

}  // namespace

void channels_first_forward(const ChannelsFirstForwardParams& p) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    with_staging(p.channels * kWarpSize * static_cast<int64_t>(sizeof(T)), [&](auto staged, size_t bytes) {
      launch({static_cast<unsigned>(num_tiles(p.images, p.pixels)), kThreads, bytes, static_cast<Stream>(p.stream)},
             channels_first_forward<T, W, staged>, p, reciprocals_of(p));
    });
  });
}

int64_t channels_first_backward_workspace(const ChannelsFirstBackwardParams& p) {
  int64_t bytes = 0;
  with_backward(p, [&](auto, auto, const LaunchConfig&, int64_t blocks) {
    const int gradients = (p.grad_weight != nullptr) + (p.grad_bias != nullptr);
    bytes = gradients * blocks * p.channels * static_cast<int64_t>(sizeof(double));
  });
  return bytes;
}

void channels_first_backward(const ChannelsFirstBackwardParams& p) {
  with_backward(p, [&](auto parameter, auto kernel, LaunchConfig config, int64_t blocks) {
    using W = decltype(parameter);
    config.grid = static_cast<unsigned>(blocks);
    launch(config, kernel, p, reciprocals_of(p));
    launch_add_partials(static_cast<const double*>(p.workspace), blocks, p.channels, p.channels,
                        static_cast<W*>(p.grad_weight), static_cast<W*>(p.grad_bias), config.stream);
  });
}

}  // namespace layernorm::cuda
