// Normalization over the channels of images x [images, channels, pixels], and its gradients, on a GPU. The formulas are
// those of forward.cu and backward.cu, where a row is a pixel.
//
// A block handles 32 pixels, one per lane, so that a warp reads neighbouring elements of one channel. Its warps share
// the channels, and meet once for each sum over channels. Each thread keeps its elements in shared memory, where it
// needs no barrier to read them again, so that x and dy are read once: with n = images * channels * pixels, forward
// moves 2 * n * sizeof(T) bytes and backward 3 * n * sizeof(T). If the channels do not fit into shared memory, each
// pass over them reads global memory.
//
// Backward's blocks take tiles of 32 pixels in turn. Each block adds its part of dweight and dbias in the workspace,
// and a second kernel adds the blocks' parts in order.
//
// The numerical method is that of the CPU kernels (cpu/channels_first.cpp).
//
// Source: Ba et al. 2016, arXiv:1607.06450.
#include <algorithm>

#include "../dtypes.h"
#include "partials.cuh"
#include "row.cuh"

namespace layernorm::cuda {

// A division of 64-bit integers or doubles would be a function call, around which registers spill.
struct Reciprocals {
  double pixels, channels;
};

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kUnroll = 8;
constexpr int kMinBlocksPerSM = 3;  // by default nvcc aims at more, and spills registers

// The static shared memory of sum_warps(): for one sum and for two in forward, for three in backward.
constexpr int64_t kStaticShared = 3 * kWarps * kWarpSize * static_cast<int64_t>(sizeof(double));

template <class Params>
Reciprocals make_reciprocals(const Params& p) {
  return {1.0 / static_cast<double>(p.pixels), 1.0 / static_cast<double>(p.channels)};
}

// As Groups::mean of cpu/row.h, which gives the reason.
template <class Acc>
__device__ __forceinline__ double mean_over_channels(double sum, int64_t channels, const Reciprocals& reciprocals) {
  return sizeof(Acc) == 4 ? sum * reciprocals.channels : sum / static_cast<double>(channels);
}

struct Pixel {
  __device__ __forceinline__ Pixel(int64_t index, int64_t images, int64_t pixels, const Reciprocals& reciprocals)
      : index(index), exists(index < images * pixels), image(0), in_image(0) {
    if (!exists) return;
    image = static_cast<int64_t>(static_cast<double>(index) * reciprocals.pixels);  // or one less, below 2^52
    in_image = index - image * pixels;
    if (in_image >= pixels) ++image, in_image -= pixels;
  }
  int64_t index;  // over all images
  bool exists;
  int64_t image, in_image;
};

// The number of elements that a thread adds in Acc before it continues in double. With 64 elements, one outlier among
// thousands of equal values exceeds the promised error.
constexpr int kRunLength = 16;

// Calls f(c) for this warp's channels, and end_of_run() after each kRunLength of them. kUnroll loads are in flight.
template <class F, class G>
__device__ __forceinline__ void for_each_channel(int64_t channels, const F& f, const G& end_of_run) {
  for (int64_t first = threadIdx.x / kWarpSize; first < channels; first += kRunLength * kWarps) {
    const int run_length = static_cast<int>(min(ceil_div(channels - first, kWarps), int64_t{kRunLength}));
#pragma unroll kUnroll
    for (int i = 0; i < run_length; ++i) f(first + i * kWarps);
    end_of_run();
  }
}

// Sums each lane's values over the warps. All warps get the result.
template <int kCount>
__device__ __forceinline__ void sum_warps(double (&values)[kCount]) {
  __shared__ double warp_values[kCount][kWarps][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int k = 0; k < kCount; ++k) warp_values[k][warp][lane] = values[k];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    values[k] = warp_values[k][0][lane];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) values[k] += warp_values[k][w][lane];
  }
  __syncthreads();  // before the next call overwrites the shared memory
}

template <class Acc, class W>
__device__ __forceinline__ Acc parameter(const void* parameters, int64_t channel, Acc default_value) {
  return parameters ? static_cast<Acc>(static_cast<const W*>(parameters)[channel]) : default_value;
}

template <class T, class W, bool staged>
__global__ void __launch_bounds__(kThreads, kMinBlocksPerSM)
    channels_first_forward(const ChannelsFirstForwardParams p, const Reciprocals reciprocals) {
  using Acc = AccOf<T>;
  const Pixel pixel(int64_t{blockIdx.x} * kWarpSize + threadIdx.x % kWarpSize, p.images, p.pixels, reciprocals);
  const T* const x = static_cast<const T*>(p.input) + pixel.image * p.input_image_stride + pixel.in_image;
  T* const y = static_cast<T*>(p.output) + pixel.image * p.channels * p.pixels + pixel.in_image;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  T* const shared = reinterpret_cast<T*>(shared_bytes);  // [channels, kWarpSize]
  T* const staged_x = shared + threadIdx.x % kWarpSize;
  const int64_t channels = pixel.exists ? p.channels : 0;
  const auto mean_of = [&](double sum) { return mean_over_channels<Acc>(sum, p.channels, reciprocals); };

  if (staged) {
    for_each_channel(channels, [&](int64_t c) { staged_x[c * kWarpSize] = x[c * p.input_channel_stride]; }, [] {});
  }
  const auto load = [&](int64_t c) {
    return static_cast<Acc>(staged ? staged_x[c * kWarpSize] : x[c * p.input_channel_stride]);
  };

  Acc scale = 1, mean;
  double correction, variance;
  for (bool is_second_try = false;; is_second_try = true) {
    double sums[1] = {};
    Acc sum = 0;
    for_each_channel(channels, [&](int64_t c) { sum = fma(load(c), scale, sum); }, [&] { sums[0] += sum, sum = 0; });
    sum_warps(sums);
    mean = static_cast<Acc>(mean_of(sums[0]));

    double moments[2] = {};
    Acc diff = 0, square = 0;
    for_each_channel(
        channels,
        [&](int64_t c) {
          const Acc d = fma(load(c), scale, -mean);
          diff += d;
          square = fma(d, d, square);
        },
        [&] { moments[0] += diff, moments[1] += square, diff = square = 0; });
    sum_warps(moments);
    correction = mean_of(moments[0]);
    variance = mean_of(moments[1]) - correction * correction;
    if (variance < 0) variance = 0;  // this comparison keeps NaN
    // A sum has overflowed, or the pixel holds NaN or infinity and gives NaN again. The other pixels do not change.
    const bool overflows = !(variance < kInfinity<Acc>);
    if (is_second_try || !__syncthreads_or(overflows)) break;
    if (overflows) scale = kScale<Acc>;
  }

  const Acc rstd = static_cast<Acc>(scaled_rstd<double>(variance, p.eps, scale));
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

// Blocks take tiles of pixels in turn. The workspace gets dweight [blocks, channels] and dbias [blocks, channels].
template <class T, class W, bool staged>
__global__ void __launch_bounds__(kThreads, kMinBlocksPerSM)
    channels_first_backward(const ChannelsFirstBackwardParams p, const Reciprocals reciprocals) {
  using Acc = AccOf<T>;
  const int lane = threadIdx.x % kWarpSize;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  T* const shared = reinterpret_cast<T*>(shared_bytes);  // [2, channels, kWarpSize]
  T* const staged_x = shared + lane;
  T* const staged_dy = staged_x + p.channels * kWarpSize;
  const bool needs_x = p.grad_input || p.grad_weight;
  double* const dweight = static_cast<double*>(p.workspace) + blockIdx.x * p.channels;
  double* const dbias = dweight + (p.grad_weight ? gridDim.x * p.channels : 0);
  const auto mean_of = [&](double sum) { return mean_over_channels<Acc>(sum, p.channels, reciprocals); };
  const auto nothing = [] {};

  const int64_t tiles = ceil_div(p.images * p.pixels, kWarpSize);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Pixel pixel(tile * kWarpSize + lane, p.images, p.pixels, reciprocals);
    const auto offset = [&](int64_t image_stride) { return pixel.image * image_stride + pixel.in_image; };
    const T* const x = static_cast<const T*>(p.input) + offset(p.input_image_stride);
    const T* const dy = static_cast<const T*>(p.grad_output) + offset(p.grad_output_image_stride);
    T* const dx = static_cast<T*>(p.grad_input) + offset(p.channels * p.pixels);
    // A pixel that does not exist adds 0 to the sums over pixels.
    const Statistics<Acc> statistics(p, pixel.index, pixel.exists && needs_x);
    const auto load_x = [&](int64_t c) {
      if (!pixel.exists) return Acc(0);
      return static_cast<Acc>(staged ? staged_x[c * kWarpSize] : x[c * p.input_channel_stride]);
    };
    const auto load_dy = [&](int64_t c) {
      if (!pixel.exists) return Acc(0);
      return static_cast<Acc>(staged && needs_x ? staged_dy[c * kWarpSize] : dy[c * p.grad_output_channel_stride]);
    };

    RowMeans<Acc> means = {};
    if (needs_x) {
      if (staged && pixel.exists) {
        for_each_channel(
            p.channels,
            [&](int64_t c) {
              staged_x[c * kWarpSize] = x[c * p.input_channel_stride];
              staged_dy[c * kWarpSize] = dy[c * p.grad_output_channel_stride];
            },
            nothing);
      }
      Acc run_sums[3] = {};
      double sums[3] = {};
      for_each_channel(
          p.channels,
          [&](int64_t c) {
            const Acc xhat = statistics.xhat(load_x(c), 0);
            const Acc g = load_dy(c) * parameter<Acc, W>(p.weight, c, 1);
            run_sums[0] += xhat;
            run_sums[1] += g;
            run_sums[2] = fma(g, xhat, run_sums[2]);
          },
          [&] {
#pragma unroll
            for (int k = 0; k < 3; ++k) sums[k] += run_sums[k], run_sums[k] = 0;
          });
      sum_warps(sums);
      const double xhat_mean = mean_of(sums[0]), g_mean = mean_of(sums[1]);
      means = {static_cast<Acc>(xhat_mean), static_cast<Acc>(g_mean),
               static_cast<Acc>(mean_of(sums[2]) - xhat_mean * g_mean)};
    }
    for_each_channel(
        p.channels,
        [&](int64_t c) {
          const Acc v = load_dy(c);
          Acc dw = 0;
          if (needs_x) {
            const Acc xhat = statistics.xhat(load_x(c), means.xhat);
            dw = v * xhat;
            if (p.grad_input && pixel.exists) {
              const Acc g = v * parameter<Acc, W>(p.weight, c, 1);
              dx[c * p.pixels] = static_cast<T>(means.grad_input(g, xhat, statistics));
            }
          }
          if (!p.grad_weight && !p.grad_bias) return;
          // Both sums over the lanes at once: dweight in the lower half of the warp, dbias in the upper half.
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

// Calls f(whether the elements fit into shared memory, their bytes of shared memory).
template <class F>
void dispatch_staging(int64_t bytes, const F& f) {
  const int64_t most = std::min(kMaxStagedBytes, static_cast<int64_t>(max_shared_memory()) - kStaticShared);
  if (bytes <= most) {
    f(std::true_type{}, static_cast<size_t>(bytes));
  } else {
    f(std::false_type{}, size_t{0});
  }
}

// Calls f(W{}, kernel, configuration without the grid, blocks). The number of blocks is what the device holds at once.
template <class F>
void dispatch_backward(const ChannelsFirstBackwardParams& p, const F& f) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    dispatch_staging(2 * p.channels * kWarpSize * static_cast<int64_t>(sizeof(T)), [&](auto staged, size_t bytes) {
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
    dispatch_staging(p.channels * kWarpSize * static_cast<int64_t>(sizeof(T)), [&](auto staged, size_t bytes) {
      launch({static_cast<unsigned>(num_tiles(p.images, p.pixels)), kThreads, bytes, static_cast<Stream>(p.stream)},
             channels_first_forward<T, W, staged>, p, make_reciprocals(p));
    });
  });
}

int64_t channels_first_backward_workspace(const ChannelsFirstBackwardParams& p) {
  int64_t bytes = 0;
  dispatch_backward(p, [&](auto, auto, const LaunchConfig&, int64_t blocks) {
    const int gradients = (p.grad_weight != nullptr) + (p.grad_bias != nullptr);
    bytes = gradients * blocks * p.channels * static_cast<int64_t>(sizeof(double));
  });
  return bytes;
}

void channels_first_backward(const ChannelsFirstBackwardParams& p) {
  dispatch_backward(p, [&](auto parameter, auto kernel, LaunchConfig config, int64_t blocks) {
    using W = decltype(parameter);
    config.grid = static_cast<unsigned>(blocks);
    launch(config, kernel, p, make_reciprocals(p));
    launch_add_partials(static_cast<const double*>(p.workspace), blocks, p.channels, p.channels,
                        static_cast<W*>(p.grad_weight), static_cast<W*>(p.grad_bias), config.stream);
  });
}

}  // namespace layernorm::cuda
