// y = (x - mean) * rstd * weight + bias for every row of x [rows, cols], on a GPU. RMSNorm's mean is 0.
//
// Short rows: a few threads (of one warp, or of a block) hold a row in registers; 2 * rows * cols * sizeof(T) bytes are
// moved, the least there is. Long rows: a block sweeps the row three times (mean; variance; output).
//
// Exactness is that of the CPU kernels (cpu/forward.cpp): the mean as first computed is off by its rounding; the
// average of x - mean is that error to full precision, and corrects the mean, the variance and the output. In
// registers, each warp has a mean of its own, and their moments are merged by the formula of Chan, Golub and LeVeque,
// which takes one exchange between the warps.
//
// A residual is added to a row as it is loaded; another look at the row is one at the sum.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467. Chan, Golub and LeVeque,
// Updating formulae and a pairwise algorithm for computing sample variances, 1979.
#include "../dtypes.h"
#include "row.cuh"

namespace layernorm::cuda {
namespace {

// Loads a vector of a row: of the input, or of its sum with the residual, which is made the first time.
template <Cache cache, class T, int kCount>
__device__ __forceinline__ void load_row(Vector<T, kCount>& v, const ForwardParams& p, int64_t row, Columns columns,
                                         bool first) {
  using Acc = AccOf<T>;
  const T* const x = static_cast<const T*>(p.input) + row * p.input_stride;
  if (!p.residual) {
    load<cache>(v, x, columns);
    return;
  }
  T* const sum = static_cast<T*>(p.sum) + row * p.cols;
  if (!first) {
    load(v, sum, columns);  // what this thread has stored
    return;
  }
  Vector<T, kCount> residual;
  load<cache>(v, x, columns);
  load(residual, static_cast<const T*>(p.residual) + row * p.residual_stride, columns);  // may be the sum
  Acc sums[kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) sums[e] = static_cast<Acc>(v.of[e]) + static_cast<Acc>(residual.of[e]);
  v = rounded<T>(sums);
  store(sum, v, columns);
}

// y = xhat * w + b, which are those of a vector.
template <class T, class W, int kCount, class Acc>
__device__ __forceinline__ Vector<T, kCount> scale_and_shift(Acc (&xhat)[kCount], const Vector<W, kCount>& w,
                                                             const Vector<W, kCount>& b, bool zero_centered) {
  if (zero_centered) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      xhat[e] = fma(xhat[e], static_cast<Acc>(w.of[e]) + 1, static_cast<Acc>(b.of[e]));
    }
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) xhat[e] = fma(xhat[e], static_cast<Acc>(w.of[e]), static_cast<Acc>(b.of[e]));
  }
  return rounded<T>(xhat);
}

// Of some numbers: their mean is pivot + shift, where the pivot is one number of Acc and the shift what its rounding
// has left out; the sum of the squares of their distances from the mean.
template <class Acc>
struct Moments {
  Acc pivot, shift, squares;
};

// The moments of a row from those of its warps, which are left in `of_warps`. Ends a phase of shared memory only at the
// beginning: a second merge needs a barrier before it.
template <class Tile, int kCount, class Acc>
__device__ __forceinline__ Moments<Acc> merge(const Moments<Acc>& own, const Place<Tile>& place, int cols) {
  LAYERNORM_SHARED(of_warps, Moments<Acc>[Tile::kWarps]);
  if (place.lane == 0) of_warps[place.warp] = own;

  // Each lane stands for a warp, of `count` columns.
  const int warp = place.lane % Tile::kWarps;
  int count = 0;
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) count += place.columns_of_warp(warp, i, cols, kCount);
  __syncthreads();
  const Moments<Acc> of_warp = of_warps[warp];
  const Acc pivot = __shfl_sync(place.lanes, of_warp.pivot, 0);
  const Acc mean = (of_warp.pivot - pivot) + of_warp.shift;  // less the pivot
  const Acc shift = sum_lanes<Tile::kWarps>(count * mean, place.lanes) / cols;
  const Acc distance = mean - shift;
  return {pivot, shift, sum_lanes<Tile::kWarps>(of_warp.squares + count * distance * distance, place.lanes)};
}

// The moments of a row, of which this thread has `x`; that is left as x * scale less the pivot of this warp, which is
// returned too. Those of RMSNorm are about 0.
template <class Tile, int kCount, class Acc>
__device__ __forceinline__ Moments<Acc> moments(Acc (&x)[Tile::kVectors][kCount], Acc scale, const Place<Tile>& place,
                                                int cols, bool aligned, bool rms, Acc& own_pivot) {
  Acc sums[2] = {};
  int count = 0;  // columns of this warp
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) sums[e % 2] = fma(x[i][e], scale, sums[e % 2]);
    count += place.columns_of_warp(place.warp, i, cols, kCount);
  }
  Moments<Acc> own;
  own.pivot = own_pivot = rms ? 0 : sum_lanes<Tile::kLanes>(sums[0] + sums[1], place.lanes) / count;
  Acc distances[2] = {}, squares[2] = {};
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) {
    for_each_valid<kCount>(place.template columns<kCount>(i, cols, aligned), [&](int e) {
      const Acc d = x[i][e] = fma(x[i][e], scale, -own.pivot);
      distances[e % 2] += d;
      squares[e % 2] = fma(d, d, squares[e % 2]);
    });
  }
  own.shift = rms ? 0 : sum_lanes<Tile::kLanes>(distances[0] + distances[1], place.lanes) / count;
  own.squares = sum_lanes<Tile::kLanes>(squares[0] + squares[1], place.lanes) - count * own.shift * own.shift;
  if (own.squares < 0) own.squares = 0;  // written so that NaN stays NaN
  if constexpr (Tile::kWarps > 1) return merge<Tile, kCount>(own, place, cols);
  return own;
}

template <class T, class W, class Tile>
__global__ void __launch_bounds__(Tile::kBlock, 1) forward_in_registers(const ForwardParams p, const bool aligned) {
  using Acc = AccOf<T>;
  constexpr int kCount = kVectorSize<T>;
  const Place<Tile> place;
  const int64_t row = int64_t{blockIdx.x} * Tile::kRows + place.row;
  if (row >= p.rows) return;
  T* const y = static_cast<T*>(p.output) + row * p.cols;
  const int cols = static_cast<int>(p.cols);

  // The parameters are asked for before the row is waited for; but registers hold no wide bias as well.
  constexpr bool kBiasLater = sizeof(W) > sizeof(T);
  Vector<W, kCount> w[Tile::kVectors], b[Tile::kVectors];
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) {
    const Columns columns = place.template columns<kCount>(i, cols, aligned);
    load_or(w[i], static_cast<const W*>(p.weight), columns, W(1.0f));
    if (!kBiasLater) load_or(b[i], static_cast<const W*>(p.bias), columns, W(0.0f));
  }

  Acc d[Tile::kVectors][kCount];
  Acc scale = 1, own_pivot;
  Moments<Acc> row_moments;
  for (;;) {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      Vector<T, kCount> v;
      load_row<Cache::kPastL1>(v, p, row, place.template columns<kCount>(i, cols, aligned), scale == 1);
#pragma unroll
      for (int e = 0; e < kCount; ++e) d[i][e] = static_cast<Acc>(v.of[e]);
    }
    row_moments = moments<Tile, kCount>(d, scale, place, cols, aligned, p.rms, own_pivot);
    if (row_moments.squares < kInfinity<Acc> || scale != 1) break;
    scale = kScale<Acc>;  // a sum has overflowed, or the row holds NaN or infinity and gives NaN again
    if constexpr (Tile::kWarps > 1) __syncthreads();
  }

  const Acc rstd = reciprocal_deviation(row_moments.squares / cols, static_cast<Acc>(p.eps), scale);
  if (place.thread == 0) {
    const Acc mean = (row_moments.pivot + row_moments.shift) * (scale == 1 ? 1 : 1 / kScale<Acc>);
    if (p.mean) static_cast<Acc*>(p.mean)[row] = mean;
    static_cast<Acc*>(p.rstd)[row] = rstd * scale;
  }
  // Added to d and not to d * rstd: for a constant row the sum is exactly 0.
  const Acc correction = (own_pivot - row_moments.pivot) - row_moments.shift;
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) {
    const Columns columns = place.template columns<kCount>(i, cols, aligned);
    if (kBiasLater) load_or(b[i], static_cast<const W*>(p.bias), columns, W(0.0f));
#pragma unroll
    for (int e = 0; e < kCount; ++e) d[i][e] = (d[i][e] + correction) * rstd;
    store(y, scale_and_shift<T>(d[i], w[i], b[i], p.zero_centered_weight), columns);
  }
}

template <class T, class W>
__global__ void __launch_bounds__(kSweepThreads, 1) forward_in_sweeps(const ForwardParams p, const bool aligned) {
  using Acc = AccOf<T>;
  constexpr int kCount = kVectorSize<T>;
  const int64_t row = blockIdx.x;
  T* const y = static_cast<T*>(p.output) + row * p.cols;
  const double cols = static_cast<double>(p.cols);

  Acc scale = 1, mean;
  double correction, variance;
  for (;;) {
    double sums[1] = {};
    Acc sum = 0;
    sweep<kCount>(
        p.cols, aligned,
        [&](Columns columns) {
          Vector<T, kCount> v;
          load_row<Cache::kAll>(v, p, row, columns, scale == 1);
#pragma unroll
          for (int e = 0; e < kCount; ++e) sum = fma(static_cast<Acc>(v.of[e]), scale, sum);
        },
        [&] { sums[0] += sum, sum = 0; });
    sum_block(sums);
    mean = p.rms ? 0 : static_cast<Acc>(sums[0] / cols);

    double deviations[2] = {};
    Acc distance = 0, square = 0;
    sweep<kCount>(
        p.cols, aligned,
        [&](Columns columns) {
          Vector<T, kCount> v;
          load_row<Cache::kAll>(v, p, row, columns, false);
          for_each_valid<kCount>(columns, [&](int e) {
            const Acc d = fma(static_cast<Acc>(v.of[e]), scale, -mean);
            distance += d;
            square = fma(d, d, square);
          });
        },
        [&] { deviations[0] += distance, deviations[1] += square, distance = square = 0; });
    sum_block(deviations);
    correction = p.rms ? 0 : deviations[0] / cols;
    variance = deviations[1] / cols - correction * correction;
    if (variance < 0) variance = 0;
    if (variance < kInfinity<Acc> || scale != 1) break;
    scale = kScale<Acc>;
  }

  const Acc rstd = static_cast<Acc>(reciprocal_deviation<double>(variance, p.eps, scale));
  if (threadIdx.x == 0) {
    const double exact_mean = (mean + correction) * (scale == 1 ? 1 : 1 / kScale<Acc>);
    if (p.mean) static_cast<Acc*>(p.mean)[row] = static_cast<Acc>(exact_mean);
    static_cast<Acc*>(p.rstd)[row] = rstd * scale;
  }
  const Acc rounded_correction = static_cast<Acc>(correction);
  sweep<kCount>(
      p.cols, aligned,
      [&](Columns columns) {
        Vector<T, kCount> v;
        Vector<W, kCount> w, b;
        load_row<Cache::kAll>(v, p, row, columns, false);
        load_or(w, static_cast<const W*>(p.weight), columns, W(1.0f));
        load_or(b, static_cast<const W*>(p.bias), columns, W(0.0f));
        Acc results[kCount];
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
          results[e] = (fma(static_cast<Acc>(v.of[e]), scale, -mean) - rounded_correction) * rstd;
        }
        store(y, scale_and_shift<T>(results, w, b, p.zero_centered_weight), columns);
      },
      [] {});
}

constexpr int kLongestInRegisters = 2048;

}  // namespace

void forward(const ForwardParams& p) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    const bool aligned = p.cols % kVectorSize<T> == 0 && is_aligned<T>(p.input, p.input_stride) &&
                         is_aligned<T>(p.residual, p.residual_stride) && is_aligned<T>(p.sum, p.cols) &&
                         is_aligned<T>(p.output, p.cols) && is_aligned<W>(p.weight, 0) && is_aligned<W>(p.bias, 0);
    const auto stream = static_cast<Stream>(p.stream);
    const bool is_short = with_tile<T, kLongestInRegisters>(p.cols, [&](auto tile) {
      using Tile = decltype(tile);
      const unsigned blocks = static_cast<unsigned>(ceil_div(p.rows, Tile::kRows));
      launch({blocks, Tile::kBlock, 0, stream}, forward_in_registers<T, W, Tile>, p, aligned);
    });
    if (is_short) return;
    launch({static_cast<unsigned>(p.rows), kSweepThreads, 0, stream}, forward_in_sweeps<T, W>, p, aligned);
  });
}

}  // namespace layernorm::cuda
