// With xhat = (x - mean) * rstd and g = dy * weight, for every row of x and dy [rows, cols], on a GPU:
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat))      dweight = sum of dy * xhat over the rows      dbias = of dy
//
// and dx = rstd * (g - xhat * mean(g * xhat)) for RMSNorm, whose mean is 0. Where forward has also returned x as a sum,
// the gradient of that is added to dx.
//
// Short rows: blocks take rows in turn. The threads that share a row hold it in registers, so that x and dy come from
// memory once; each adds up dweight and dbias of its columns over the rows it sees, and leaves them in the workspace,
// whose rows a second kernel adds up in order: 3 * rows * cols * sizeof(T) bytes are moved, and no atomic operation
// leaves the result to chance. Long rows: a block sweeps a row twice; another kernel goes down the columns.
//
// Exactness is that of the CPU kernels (cpu/backward.cpp): the saved mean is rounded, so that the average of xhat is
// not 0; a third sum finds it, and it is taken off before xhat is used.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include <algorithm>

#include "../dtypes.h"
#include "partials.cuh"
#include "row.cuh"

namespace layernorm::cuda {
namespace {

// After so many rows, sums in Acc go to the workspace, to keep them exact.
constexpr int64_t kRowsPerSum = 256;

// xhat of a vector of x, or recovered from one of the output: less `shift`, and 0 for columns that do not exist.
template <class T, class W, int kCount, class Acc>
__device__ __forceinline__ void normalize(Acc (&xhat)[kCount], const Vector<T, kCount>& x, const Vector<W, kCount>& w,
                                          const BackwardParams& p, const Statistics<Acc>& row, Acc shift,
                                          Columns columns) {
  if (p.from_output) {
    Vector<W, kCount> b;
    load_or(b, static_cast<const W*>(p.bias), columns, W(0.0f));
    const Acc centre = p.zero_centered_weight ? 1 : 0;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const Acc v = static_cast<Acc>(x.of[e]) - static_cast<Acc>(b.of[e]);
      xhat[e] = e < columns.valid ? v / (static_cast<Acc>(w.of[e]) + centre) - shift : 0;
    }
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) xhat[e] = row.xhat(x.of[e], shift);
  }
}

// g = dy * weight.
template <class T, class W, int kCount, class Acc>
__device__ __forceinline__ void multiply(Acc (&g)[kCount], const Vector<T, kCount>& dy, const Vector<W, kCount>& w,
                                         bool zero_centered) {
  if (zero_centered) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) g[e] = static_cast<Acc>(dy.of[e]) * (static_cast<Acc>(w.of[e]) + 1);
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) g[e] = static_cast<Acc>(dy.of[e]) * static_cast<Acc>(w.of[e]);
  }
}

// That of a vector, from g, with the gradient of the sum if there is one.
template <class T, int kCount, class Acc>
__device__ __forceinline__ Vector<T, kCount> grad_input(Acc (&g)[kCount], const Acc (&xhat)[kCount],
                                                        const Means<Acc>& means, const Statistics<Acc>& statistics,
                                                        const BackwardParams& p, int64_t row, Columns columns) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) g[e] = means.grad_input(g[e], xhat[e], statistics);
  if (p.grad_sum) {
    Vector<T, kCount> dsum;
    load<Cache::kPastL1>(dsum, static_cast<const T*>(p.grad_sum) + row * p.grad_sum_stride, columns);
#pragma unroll
    for (int e = 0; e < kCount; ++e) g[e] += static_cast<Acc>(dsum.of[e]);
  }
  return rounded<T>(g);
}

// Three sums over the threads of a tile. Double-buffered, by `phase`: one barrier a row.
template <class Tile, class Acc>
__device__ __forceinline__ void sum_tile(Acc (&sums)[3], const Place<Tile>& place, int phase) {
#pragma unroll
  for (Acc& sum : sums) sum = sum_lanes<Tile::kLanes>(sum);
  if constexpr (Tile::kWarps > 1) {
    LAYERNORM_SHARED(of_warps, Acc[2][Tile::kWarps][3]);
    if (place.lane == 0) {
#pragma unroll
      for (int k = 0; k < 3; ++k) of_warps[phase][place.warp][k] = sums[k];
    }
    __syncthreads();
    const int warp = place.lane % Tile::kWarps;  // which may not exist
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      sums[k] = sum_lanes<Tile::kWarps>(warp * kWarpSize < place.threads() ? of_warps[phase][warp][k] : 0);
    }
  }
}

// Adds the sums of this thread's columns to those of the block in the workspace [cols], or begins them.
template <class Tile, int kCount, class Acc>
__device__ __forceinline__ void add_to_workspace(Acc* workspace, const Acc (&sums)[Tile::kVectors][kCount], bool first,
                                                 const Place<Tile>& place, int cols, bool aligned) {
  if constexpr (Tile::kRows == 1) {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      const Columns columns = place.template columns<kCount>(i, cols, aligned);
      Vector<Acc, kCount> total = {};
      if (!first) load(total, workspace, columns);
#pragma unroll
      for (int e = 0; e < kCount; ++e) total.of[e] += sums[i][e];
      store(workspace, total, columns);
    }
  } else {
    constexpr int kCols = Tile::kThreads * kCount;  // of one vector of all threads
    LAYERNORM_SHARED(of_rows, Acc[Tile::kRows][kCols]);
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kCount; ++e) of_rows[place.row][place.thread * kCount + e] = sums[i][e];
      __syncthreads();
      for (int c = threadIdx.x; c < kCols && i * kCols + c < cols; c += Tile::kBlock) {
        Acc total = 0;
        for (int r = 0; r < Tile::kRows; ++r) total += of_rows[r][c];
        Acc& sum = workspace[i * kCols + c];
        sum = first ? total : sum + total;
      }
    }
  }
}

// Blocks take the rows in turn, and leave dweight [blocks, cols] in the workspace and after it dbias [blocks, cols].
template <class T, class W, class Tile>
__global__ void __launch_bounds__(Tile::kBlock, 1) backward_in_registers(const BackwardParams p, const bool aligned) {
  using Acc = AccOf<T>;
  constexpr int kCount = kVectorSize<T>;
  const Place<Tile> place;
  const bool needs_x = p.grad_input || p.grad_weight;
  const int64_t step = int64_t{gridDim.x} * Tile::kRows;
  Acc* const dweight = static_cast<Acc*>(p.workspace) + blockIdx.x * p.cols;
  Acc* const dbias = dweight + (p.grad_weight ? gridDim.x * p.cols : 0);

  int phase = 0;
  int64_t first_row = int64_t{blockIdx.x} * Tile::kRows;
  for (bool first = true; first_row < p.rows; first = false) {
    Acc dw[Tile::kVectors][kCount] = {}, db[Tile::kVectors][kCount] = {};
    const int64_t end = min(p.rows, first_row + kRowsPerSum * step);
    for (; first_row < end; first_row += step) {
      // A block's last rows may not exist. They have no columns, and numbers that keep NaN away from the sums.
      const bool exists = first_row + place.row < p.rows;
      const int64_t row = exists ? first_row + place.row : 0;
      const int cols = exists ? static_cast<int>(p.cols) : 0;
      const T* const x_row = static_cast<const T*>(p.input) + row * p.input_stride;
      const T* const dy_row = static_cast<const T*>(p.grad_output) + row * p.grad_output_stride;
      const auto statistics = exists ? Statistics<Acc>(p, row) : Statistics<Acc>();

      Vector<T, kCount> x[Tile::kVectors], dy[Tile::kVectors];
#pragma unroll
      for (int i = 0; i < Tile::kVectors; ++i) {
        const Columns columns = place.template columns<kCount>(i, cols, aligned);
        if (needs_x) load<Cache::kPastL1>(x[i], x_row, columns);
        load<Cache::kPastL1>(dy[i], dy_row, columns);
      }
      Means<Acc> means = {};
      if (needs_x) {
        Acc sums[3] = {};
#pragma unroll
        for (int i = 0; i < Tile::kVectors; ++i) {
          const Columns columns = place.template columns<kCount>(i, cols, aligned);
          Vector<W, kCount> w;
          load_or(w, static_cast<const W*>(p.weight), columns, W(1.0f));
          Acc xhat[kCount], g[kCount];
          normalize(xhat, x[i], w, p, statistics, Acc(0), columns);
          multiply(g, dy[i], w, p.zero_centered_weight);
          for_each_valid<kCount>(columns, [&](int e) {
            sums[0] += xhat[e];
            sums[1] += g[e];
            sums[2] = fma(g[e], xhat[e], sums[2]);
          });
        }
        sum_tile<Tile>(sums, place, phase);
        phase ^= 1;
        if (!p.rms) {
          means.xhat = sums[0] / static_cast<int>(p.cols);
          means.g = sums[1] / static_cast<int>(p.cols);
        }
        means.g_xhat = sums[2] / static_cast<int>(p.cols) - means.xhat * means.g;
      }
#pragma unroll
      for (int i = 0; i < Tile::kVectors; ++i) {
        if (p.grad_bias) {
#pragma unroll
          for (int e = 0; e < kCount; ++e) db[i][e] += static_cast<Acc>(dy[i].of[e]);
        }
        if (!needs_x) continue;
        const Columns columns = place.template columns<kCount>(i, cols, aligned);
        Vector<W, kCount> w;
        if (p.grad_input || p.from_output) load_or(w, static_cast<const W*>(p.weight), columns, W(1.0f));
        Acc xhat[kCount];
        normalize(xhat, x[i], w, p, statistics, means.xhat, columns);
        if (p.grad_weight) {
#pragma unroll
          for (int e = 0; e < kCount; ++e) dw[i][e] = fma(static_cast<Acc>(dy[i].of[e]), xhat[e], dw[i][e]);
        }
        if (p.grad_input) {
          Acc g[kCount];
          multiply(g, dy[i], w, p.zero_centered_weight);
          store(static_cast<T*>(p.grad_input) + row * p.cols,
                grad_input<T>(g, xhat, means, statistics, p, row, columns), columns);
        }
      }
    }
    const int cols = static_cast<int>(p.cols);
    if (p.grad_weight) add_to_workspace<Tile>(dweight, dw, first, place, cols, aligned);
    if (p.grad_bias) add_to_workspace<Tile>(dbias, db, first, place, cols, aligned);
  }
}

// A block for each row: dx, and for sum_columns the mean of xhat, in xhat_means [rows].
template <class T, class W>
__global__ void __launch_bounds__(kSweepThreads, 1)
    backward_in_sweeps(const BackwardParams p, AccOf<T>* const xhat_means, const bool aligned) {
  using Acc = AccOf<T>;
  constexpr int kCount = kVectorSize<T>;
  const int64_t row = blockIdx.x;
  const T* const x_row = static_cast<const T*>(p.input) + row * p.input_stride;
  const T* const dy_row = static_cast<const T*>(p.grad_output) + row * p.grad_output_stride;
  const Statistics<Acc> statistics(p, row);
  const auto load_row = [&](Acc(&xhat)[kCount], Acc(&g)[kCount], Acc shift, Columns columns) {
    Vector<T, kCount> x, dy;
    Vector<W, kCount> w;
    load(x, x_row, columns);
    load(dy, dy_row, columns);
    load_or(w, static_cast<const W*>(p.weight), columns, W(1.0f));
    normalize(xhat, x, w, p, statistics, shift, columns);
    multiply(g, dy, w, p.zero_centered_weight);
  };

  Acc run[3] = {};
  double sums[3] = {};
  sweep<kCount>(
      p.cols, aligned,
      [&](Columns columns) {
        Acc xhat[kCount], g[kCount];
        load_row(xhat, g, Acc(0), columns);
        for_each_valid<kCount>(columns, [&](int e) {
          run[0] += xhat[e];
          run[1] += g[e];
          run[2] = fma(g[e], xhat[e], run[2]);
        });
      },
      [&] {
#pragma unroll
        for (int k = 0; k < 3; ++k) sums[k] += run[k], run[k] = 0;
      });
  sum_block(sums);
  const double cols = static_cast<double>(p.cols);
  const double xhat_mean = p.rms ? 0 : sums[0] / cols, g_mean = p.rms ? 0 : sums[1] / cols;
  const Means<Acc> means = {static_cast<Acc>(xhat_mean), static_cast<Acc>(g_mean),
                            static_cast<Acc>(sums[2] / cols - xhat_mean * g_mean)};
  if (threadIdx.x == 0) xhat_means[row] = means.xhat;
  if (!p.grad_input) return;
  sweep<kCount>(
      p.cols, aligned,
      [&](Columns columns) {
        Acc xhat[kCount], g[kCount];
        load_row(xhat, g, means.xhat, columns);
        store(static_cast<T*>(p.grad_input) + row * p.cols, grad_input<T>(g, xhat, means, statistics, p, row, columns),
              columns);
      },
      [] {});
}

constexpr int kColumnThreads = 128;

// Each thread has a vector of columns, each blockIdx.y a part of the rows: dweight and dbias of these, as
// backward_in_registers leaves them.
template <class T, class W>
__global__ void __launch_bounds__(kColumnThreads, 1)
    sum_columns(const BackwardParams p, const AccOf<T>* const xhat_means, const bool aligned) {
  using Acc = AccOf<T>;
  constexpr int kCount = kVectorSize<T>;
  const int64_t begin = (int64_t{blockIdx.x} * kColumnThreads + threadIdx.x) * kCount, valid = p.cols - begin;
  if (valid <= 0) return;
  const Columns columns{begin, static_cast<int>(min(valid, int64_t{kCount})), aligned};
  Vector<W, kCount> w;
  load_or(w, static_cast<const W*>(p.weight), columns, W(1.0f));
  double dweight[kCount] = {}, dbias[kCount] = {};
  int64_t row = p.rows * blockIdx.y / gridDim.y;
  const int64_t end = p.rows * (blockIdx.y + 1) / gridDim.y;
  while (row < end) {
    Acc dw[kCount] = {}, db[kCount] = {};
    for (const int64_t part_end = min(end, row + kRowsPerSum); row < part_end; ++row) {
      Vector<T, kCount> x, dy;
      load(dy, static_cast<const T*>(p.grad_output) + row * p.grad_output_stride, columns);
#pragma unroll
      for (int e = 0; e < kCount; ++e) db[e] += static_cast<Acc>(dy.of[e]);
      if (!p.grad_weight) continue;
      const Statistics<Acc> statistics(p, row);
      load(x, static_cast<const T*>(p.input) + row * p.input_stride, columns);
      Acc xhat[kCount];
      normalize(xhat, x, w, p, statistics, xhat_means[row], columns);
#pragma unroll
      for (int e = 0; e < kCount; ++e) dw[e] = fma(static_cast<Acc>(dy.of[e]), xhat[e], dw[e]);
    }
#pragma unroll
    for (int e = 0; e < kCount; ++e) dweight[e] += dw[e], dbias[e] += db[e];
  }
  Acc* workspace = static_cast<Acc*>(p.workspace) + blockIdx.y * p.cols;
  if (p.grad_weight) {
    store(workspace, rounded<Acc>(dweight), columns);
    workspace += gridDim.y * p.cols;
  }
  if (p.grad_bias) store(workspace, rounded<Acc>(dbias), columns);
}

// Of 16-bit elements and of doubles, longer rows do not fit into registers beside the sums.
template <class T>
constexpr int kMostThreads = sizeof(T) == 4 ? 512 : 256;

// How many rows of partial sums there are: for short rows the blocks, which is as many as the device holds at once; for
// long ones the parts that sum_columns has.
template <class T, class W>
int64_t num_partials(const BackwardParams& p) {
  int64_t partials = std::min(ceil_div(p.rows, 32), int64_t{64});
  with_tile<T, kMostThreads<T>>(p.cols, [&](auto tile) {
    using Tile = decltype(tile);
    const LaunchConfig config = {1, threads_of<Tile, T>(p.cols)};
    partials =
        std::min(ceil_div(p.rows, Tile::kRows), int64_t{resident_blocks(config, backward_in_registers<T, W, Tile>)});
  });
  return partials;
}

template <class Acc>
int64_t size_of_partials(const BackwardParams& p, int64_t partials) {
  const int gradients = (p.grad_weight != nullptr) + (p.grad_bias != nullptr);
  return gradients * partials * p.cols * static_cast<int64_t>(sizeof(Acc));
}

}  // namespace

int64_t backward_workspace(const BackwardParams& p) {
  int64_t bytes = 0;
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    using Acc = AccOf<T>;
    const bool is_short = with_tile<T, kMostThreads<T>>(p.cols, [](auto) {});
    bytes = size_of_partials<Acc>(p, num_partials<T, W>(p)) + (is_short ? 0 : p.rows * sizeof(Acc));
  });
  return bytes;
}

void backward(const BackwardParams& p) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    using Acc = AccOf<T>;
    const bool aligned = p.cols % kVectorSize<T> == 0 && is_aligned<T>(p.input, p.input_stride) &&
                         is_aligned<T>(p.grad_output, p.grad_output_stride) && is_aligned<T>(p.grad_input, p.cols) &&
                         is_aligned<T>(p.grad_sum, p.grad_sum_stride) && is_aligned<W>(p.weight, 0) &&
                         is_aligned<W>(p.bias, 0);
    const auto stream = static_cast<Stream>(p.stream);
    const int64_t partials = num_partials<T, W>(p);
    const unsigned parts = static_cast<unsigned>(partials);
    const bool is_short = with_tile<T, kMostThreads<T>>(p.cols, [&](auto tile) {
      using Tile = decltype(tile);
      launch({parts, threads_of<Tile, T>(p.cols), 0, stream}, backward_in_registers<T, W, Tile>, p, aligned);
    });
    if (!is_short) {
      auto* const xhat_means =
          reinterpret_cast<Acc*>(static_cast<char*>(p.workspace) + size_of_partials<Acc>(p, partials));
      if (p.grad_input || p.grad_weight) {
        launch({static_cast<unsigned>(p.rows), kSweepThreads, 0, stream}, backward_in_sweeps<T, W>, p, xhat_means,
               aligned);
      }
      if (p.grad_weight || p.grad_bias) {
        const int64_t blocks = ceil_div(p.cols, kColumnThreads * kVectorSize<T>);
        launch({dim3(static_cast<unsigned>(blocks), parts), kColumnThreads, 0, stream}, sum_columns<T, W>, p,
               xhat_means, aligned);
      }
    }
    launch_add_partials(static_cast<const Acc*>(p.workspace), partials, p.cols, static_cast<W*>(p.grad_weight),
                        static_cast<W*>(p.grad_bias), stream);
  });
}

}  // namespace layernorm::cuda
