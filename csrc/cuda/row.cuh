// How threads share rows, and add up what they found. Shared by forward and backward.
#pragma once

#include <algorithm>
#include <limits>

#include "../layer_norm.h"
#include "vec.cuh"

namespace layernorm::cuda {

constexpr int kWarpSize = 32;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr bool is_power_of_2(int n) { return (n & (n - 1)) == 0; }

// ---- short rows: held in registers ----------------------------------------------------------------------------------

// kThreads threads share a row, each with up to kVectors vectors of it; those next to each other have vectors next
// to each other. A block has several rows if they are short.
template <int kThreads_, int kVectors_>
struct Tile {
  static constexpr int kThreads = kThreads_, kVectors = kVectors_;
  static constexpr int kBlock = std::max(kThreads, 128);
  static constexpr int kRows = kBlock / kThreads;
  static constexpr int kLanes = std::min(kThreads, kWarpSize);
  static constexpr int kWarps = kThreads / kLanes;
  static_assert(is_power_of_2(kThreads) && kBlock % kWarpSize == 0 && kWarps <= kLanes);
};

// The one table of tiles: calls f(Tile{}) for rows of so many columns, or returns false for those of more than
// kLongest vectors. It looks at nothing else, so that the order of summation is a function of the dtype and the number
// of columns.
template <class T, int kLongest, class F>
bool with_tile(int64_t cols, const F& f) {
  static_assert(kLongest <= 2048);
  const int64_t vectors = ceil_div(cols, kVectorSize<T>);
  if (vectors > path_limit(kLongest)) return false;
  if (vectors <= 8) {
    f(Tile<8, 1>{});
  } else if (vectors <= 16) {
    f(Tile<16, 1>{});
  } else if (vectors <= 32) {
    f(Tile<32, 1>{});
  } else if (vectors <= 64) {
    f(Tile<32, 2>{});
  } else if (vectors <= 128) {
    f(Tile<32, 4>{});
  } else if (vectors <= 256) {
    f(Tile<128, 2>{});
  } else if (vectors <= 512) {
    f(Tile<128, 4>{});
  } else if (vectors <= 1024) {
    f(Tile<256, 4>{});
  } else if constexpr (kLongest > 1024) {
    f(Tile<512, 4>{});
  }
  return true;
}

// This thread's place in its tile.
template <class Tile>
struct Place {
  int row, thread, lane, warp;  // row: in the block; the others: in the row
  unsigned lanes;               // mask of the row's lanes of this warp

  __device__ __forceinline__ Place()
      : row(threadIdx.x / Tile::kThreads),
        thread(threadIdx.x % Tile::kThreads),
        lane(thread % Tile::kLanes),
        warp(thread / Tile::kLanes),
        lanes((0xffffffffu >> (kWarpSize - Tile::kLanes)) << (threadIdx.x % kWarpSize - lane)) {}

  template <int kCount>
  __device__ __forceinline__ Columns columns(int i, int cols, bool aligned) const {
    const int begin = (i * Tile::kThreads + thread) * kCount;
    return {begin, cols - begin, aligned};
  }

  // How many columns a warp has in its vectors of index i.
  __device__ __forceinline__ int columns_of_warp(int warp, int i, int cols, int vector_size) const {
    const int left = cols - (i * Tile::kThreads + warp * Tile::kLanes) * vector_size;
    return max(0, min(left, Tile::kLanes * vector_size));
  }
};

// The sum of the values of kLanes neighbouring lanes, in all of them.
template <int kLanes, class Acc>
__device__ __forceinline__ Acc sum_lanes(Acc value, unsigned mask) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(mask, value, distance);
  return value;
}

// ---- long rows: swept by a whole block ------------------------------------------------------------------------------

constexpr int kSweepThreads = 512;
// How many numbers a thread adds up in Acc; beyond, it goes on in double. Of one outlier and thousands of equal
// numbers, four times as many in Acc put the output off by more than is promised.
constexpr int kSweepRun = 16;

// Calls f(columns) for this thread's vectors of one tile after the other, and between tiles end_of_tile().
template <int kCount, class F, class G>
__device__ __forceinline__ void sweep(int64_t cols, bool aligned, const F& f, const G& end_of_tile) {
  static_assert(kSweepRun % kCount == 0);
  constexpr int64_t kTile = int64_t{kSweepThreads} * kSweepRun;
  for (int64_t tile = 0; tile < cols; tile += kTile) {
#pragma unroll
    for (int i = 0; i < kSweepRun / kCount; ++i) {
      const int64_t begin = tile + (i * kSweepThreads + static_cast<int>(threadIdx.x)) * kCount;
      const int64_t valid = cols - begin;
      f(Columns{begin, static_cast<int>(valid < kCount ? valid : kCount), aligned});
    }
    end_of_tile();
  }
}

// Sums kCount values each over the threads of the block; every thread gets the sums.
template <int kCount>
__device__ __forceinline__ void sum_block(double (&values)[kCount]) {
  constexpr int kWarps = kSweepThreads / kWarpSize;
  static_assert(kSweepThreads % kWarpSize == 0 && is_power_of_2(kWarps) && kWarps <= kWarpSize);
  LAYERNORM_SHARED(partial, double[kWarps][kCount]);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const double sum = sum_lanes<kWarpSize>(values[k], 0xffffffffu);
    if (lane == 0) partial[warp][k] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kCount; ++k) values[k] = sum_lanes<kWarps>(partial[lane % kWarps][k], 0xffffffffu);
  __syncthreads();  // before the next sums
}

// ---- large numbers --------------------------------------------------------------------------------------------------

// As on the CPU: rows whose numbers are so large that sums of squares, or differences, overflow are scaled by a power
// of two first, which rounds nothing. Other rows are multiplied by 1 in an instruction that subtracts or adds anyway.
template <class Acc>
constexpr Acc kScale = sizeof(Acc) == 4 ? Acc(0x1p-96) : Acc(0x1p-768);
template <class Acc>
constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();

// 1 / sqrt(variance + eps) for the variance of x * scale; scaled, eps itself may be too small a number, but its root is
// not.
template <class Acc>
__device__ __forceinline__ Acc reciprocal_deviation(Acc variance, Acc eps, Acc scale) {
  return 1 / (scale == 1 ? sqrt(variance + eps) : hypot(sqrt(variance), sqrt(eps) * scale));
}

// ---- backward of a row ----------------------------------------------------------------------------------------------

// The saved statistics of a row, for numbers that are multiplied by `scale` first.
template <class Acc>
struct Statistics {
  Acc scale = 1, mean = 0, rstd = 0;

  // Of a row that does not exist.
  __device__ __forceinline__ Statistics() {}

  // A row whose standard deviation is below 2^60 holds no difference that overflows, however long it is.
  template <class Params>
  __device__ __forceinline__ Statistics(const Params& p, int64_t row) {
    if (p.mean) mean = static_cast<const Acc*>(p.mean)[row];
    rstd = static_cast<const Acc*>(p.rstd)[row];
    const bool is_huge = rstd < Acc(0x1p-60);
    scale = is_huge ? kScale<Acc> : 1;
    mean *= scale;
    rstd *= is_huge ? 1 / kScale<Acc> : 1;
  }
  __device__ __forceinline__ Acc xhat(Acc x, Acc shift) const { return fma(fma(x, scale, -mean), rstd, -shift); }
};

// What the gradients need to know of a row besides.
template <class Acc>
struct Means {
  Acc xhat;  // that of xhat as computed from the saved mean
  Acc g;
  Acc g_xhat;  // with xhat corrected

  // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)). Its first difference is exactly 0 if g is the same in the whole
  // row, as it is for the sum of the outputs, or for one column.
  __device__ __forceinline__ Acc grad_input(Acc g_, Acc xhat_, const Statistics<Acc>& row) const {
    return fma(xhat_, -g_xhat, g_ - g) * (row.rstd * row.scale);
  }
};

// ---- alignment ------------------------------------------------------------------------------------------------------

// Whether rows of T at `base`, so many elements apart, all begin at a multiple of 16 bytes.
template <class T>
bool is_aligned(const void* base, int64_t stride) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride * static_cast<int64_t>(sizeof(T)) % 16 == 0;
}

}  // namespace layernorm::cuda
