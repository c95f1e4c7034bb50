// How threads share rows, and add up what they found. Shared by forward and backward.
#pragma once

#include <algorithm>
#include <limits>

#include "../layer_norm.h"
#include "launch_limits.h"
#include "vec.cuh"

namespace layernorm::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr bool is_power_of_2(int n) { return (n & (n - 1)) == 0; }

// ---- tiles: rows, or chunks of rows, in registers -------------------------------------------------------------------

// kThreads threads share a row, each with up to kVectors vectors of it; those next to each other have vectors next
// to each other. A block has several rows, or one row and as many warps as it takes, kWarps at most.
template <int kThreads_, int kVectors_ = 4>
struct Tile {
  static constexpr int kThreads = kThreads_, kVectors = kVectors_;
  static constexpr int kBlock = std::max(kThreads, 128);
  static constexpr int kRows = kBlock / kThreads;
  static constexpr int kLanes = std::min(kThreads, kWarpSize);
  static constexpr int kWarps = kThreads / kLanes;
  static constexpr bool kIsRow = true;  // so that each warp has columns, if there are as many as threads_of() says
  static_assert(is_power_of_2(kThreads) && kWarps <= kLanes && (kWarps == 1 || kRows == 1));
};

// How many threads a block has for rows of so many columns.
template <class Tile, class T>
unsigned threads_of(int64_t cols) {
  const int64_t warps = ceil_div(ceil_div(cols, kVectorSize<T>), kWarpSize * Tile::kVectors);
  return Tile::kWarps == 1 ? Tile::kBlock : static_cast<unsigned>(warps) * kWarpSize;
}

// Calls f(Tile{}) with the smallest tile for rows of so many columns, or returns false for those that none can hold. It
// looks at nothing else, so that the order of summation is a function of the dtype and the number of columns. For
// rows of two vectors, lanes with room for one issue 30.9 instructions per element of bfloat16, with room for
// four 34.9.
template <class T, class F>
bool with_tile(int64_t cols, const F& f) {
  const int64_t vectors = ceil_div(cols, kVectorSize<T>);
  if (vectors > kMaxTileVectors) return false;
  const auto is_for = [&](auto tile) {
    if (vectors > tile.kThreads * tile.kVectors) return false;
    f(tile);
    return true;
  };
  return is_for(Tile<1, 1>{}) || is_for(Tile<2, 1>{}) || is_for(Tile<2>{}) || is_for(Tile<4>{}) || is_for(Tile<8>{}) ||
         is_for(Tile<16>{}) || is_for(Tile<32>{}) || is_for(Tile<512>{});
}

// This thread's place in its tile.
template <class Tile>
struct Place {
  int row, thread, lane, warp;  // row: in the block; the others: in the row

  __device__ __forceinline__ explicit Place(unsigned thread_of_block = threadIdx.x, int = 0)
      : row(Tile::kWarps == 1 ? thread_of_block / Tile::kThreads : 0),
        thread(Tile::kWarps == 1 ? thread_of_block % Tile::kThreads : thread_of_block),
        lane(thread_of_block % Tile::kLanes),
        warp(Tile::kWarps == 1 ? 0 : thread_of_block / Tile::kLanes) {}

  // That share the row.
  __device__ __forceinline__ static int threads() { return Tile::kWarps == 1 ? Tile::kThreads : blockDim.x; }

  __device__ __forceinline__ static int rows() { return Tile::kRows; }  // of the block

  // Of the threads of the tile, at least.
  __device__ __forceinline__ static void barrier() {
    if constexpr (Tile::kWarps > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  // This thread's vector of index i: its index in the row, and its first column, if it has kCount. Each warp has
  // vectors next to each other, so that their distances are constants.
  static constexpr int kDistance = Tile::kLanes;
  __device__ __forceinline__ static constexpr int distance() { return kDistance; }
  __device__ __forceinline__ int vector(int i) const {
    return (Tile::kWarps == 1 ? thread : warp * Tile::kVectors * kDistance + lane) + i * kDistance;
  }
  // How many columns there are from its first one on: less than 1, if it has none.
  template <int kCount>
  __device__ __forceinline__ int valid(int i, int cols) const {
    return cols - vector(0) * kCount - i * kDistance * kCount;
  }

  // How many columns this warp has of a row, and whether any of these are in its vectors of index i: if not, then none
  // are in its next ones.
  template <int kCount>
  __device__ __forceinline__ int columns_of_warp(int cols) const {
    if (Tile::kWarps == 1) return cols;
    constexpr int kMost = Tile::kVectors * kDistance * kCount;
    const int columns = min(cols - warp * kMost, kMost);
    return Tile::kIsRow ? columns : max(columns, 0);
  }
  template <int kCount>
  __device__ __forceinline__ bool has_columns(int i, int cols) const {
    return (i == 0 && Tile::kIsRow) || columns_of_warp<kCount>(cols) > i * kDistance * kCount;
  }
};

// The tile of rows that a warp, or some of its lanes, can hold: how many is known at run time.
struct WarpTile {
  static constexpr int kThreads = kWarpSize, kVectors = 4, kBlock = 128, kWarps = 1;
};

template <>
struct Place<WarpTile> {
  int lanes, row, thread;  // row: in the block; thread: in the row

  // Of 2^log2_lanes lanes.
  __device__ __forceinline__ Place(unsigned thread_of_block, int log2_lanes)
      : lanes(1 << log2_lanes), row(thread_of_block >> log2_lanes), thread(thread_of_block & (lanes - 1)) {}

  __device__ __forceinline__ int threads() const { return lanes; }
  __device__ __forceinline__ int rows() const { return WarpTile::kBlock / lanes; }
  __device__ __forceinline__ static void barrier() { __syncwarp(); }
  __device__ __forceinline__ int distance() const { return lanes; }
  __device__ __forceinline__ int vector(int i) const { return i * lanes + thread; }
  template <int kCount>
  __device__ __forceinline__ int valid(int i, int cols) const {
    return cols - vector(i) * kCount;
  }
  template <int kCount>
  __device__ __forceinline__ bool has_columns(int i, int cols) const {
    return i == 0 || i * lanes * kCount < cols;
  }
};

// The tile of rows, or chunks of rows, that have a block to themselves. Some of its warps may have no columns.
struct BlockTile : Tile<512> {
  static constexpr bool kIsRow = false;
};

// The logarithm of the number of lanes that hold so many vectors: one holds one.
inline int log2_lanes_for(int64_t vectors) {
  int log2_lanes = vectors > 1 ? 1 : 0;
  while (WarpTile::kVectors << log2_lanes < vectors) ++log2_lanes;
  return log2_lanes;
}

// The sum of the values of kLanes neighbouring lanes, in all of them; called by all lanes of a warp.
template <int kLanes, class Acc>
__device__ __forceinline__ Acc sum_lanes(Acc value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// ---- large numbers --------------------------------------------------------------------------------------------------

// As on the CPU: rows whose numbers are so large that sums of squares, or differences, overflow are scaled by a power
// of two first, which rounds nothing. Other rows are multiplied by 1 in an instruction that subtracts or adds anyway.
template <class Acc>
constexpr Acc kScale = sizeof(Acc) == 4 ? Acc(0x1p-96) : Acc(0x1p-768);
template <class Acc>
constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();

// 1 / sqrt(x), off by two roundings at most. In float, one step of Newton's method takes half as many instructions as a
// root and a division; from 0 or infinity it goes nowhere.
__device__ __forceinline__ double reciprocal_root(double x) { return 1 / sqrt(x); }
__device__ __forceinline__ float reciprocal_root(float x) {
  const float root = rsqrtf(x), rest = fma(-x * root, root, 1.0f);
  return rest == rest ? fma(root / 2, rest, root) : root;
}

// 1 / sqrt(variance + eps) for the variance of x * scale; scaled, eps itself may be too small a number, but its root is
// not.
template <class Acc>
__device__ __forceinline__ Acc reciprocal_deviation(Acc variance, Acc eps, Acc scale) {
  if (scale == 1) return reciprocal_root(variance + eps);
  return 1 / hypot(sqrt(variance), sqrt(eps) * scale);
}

// sum / count for a finite sum, to the nearest, with the nearest number to 1 / count (Markstein, Computation of
// elementary functions on the IBM RISC System/6000 processor, 1990). A division would be a subroutine, and cost its
// registers.
template <class Acc>
__device__ __forceinline__ Acc average(Acc sum, Acc count, Acc reciprocal) {
  const Acc quotient = sum * reciprocal;
  return fma(fma(-quotient, count, sum), reciprocal, quotient);
}

// ---- backward of a row ----------------------------------------------------------------------------------------------

// What forward has saved of a row.
template <class Acc>
struct Saved {
  Acc mean = 0, rstd = 0;

  // Of a row that does not exist.
  __device__ __forceinline__ Saved() {}

  template <class Params>
  __device__ __forceinline__ Saved(const Params& p, int64_t row) {
    if (p.mean) mean = static_cast<const Acc*>(p.mean)[row];
    rstd = static_cast<const Acc*>(p.rstd)[row];
  }

  // To the cache.
  template <class Params>
  __device__ __forceinline__ static void prefetch(const Params& p, int64_t row) {
    if (p.mean) layernorm::prefetch(static_cast<const Acc*>(p.mean) + row);
    layernorm::prefetch(static_cast<const Acc*>(p.rstd) + row);
  }
};

// The same, for numbers that are multiplied by `scale` first.
template <class Acc>
struct Statistics {
  Acc scale, mean, rstd;

  // A row whose standard deviation is below 2^60 holds no difference that overflows, however long it is.
  __device__ __forceinline__ explicit Statistics(const Saved<Acc>& saved) {
    const bool is_huge = saved.rstd < Acc(0x1p-60);
    scale = is_huge ? kScale<Acc> : 1;
    mean = saved.mean * scale;
    rstd = saved.rstd * (is_huge ? 1 / kScale<Acc> : 1);
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
