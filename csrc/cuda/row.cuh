// The mapping of rows to threads, and the arithmetic that forward and backward share.
#pragma once

#include <algorithm>
#include <limits>

#include "../layer_norm.h"
#include "launch_limits.h"
#include "vec.cuh"

namespace layernorm::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxClusterSize = 8;
constexpr int kMaxParts = 256;  // of a row that is read twice

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls f with the flag as a compile-time constant.
template <class F>
__device__ __forceinline__ void with_constant(bool flag, const F& f) {
  if (flag) {
    f(std::true_type{});
  } else {
    f(std::false_type{});
  }
}

// ---- groups of rows -------------------------------------------------------------------------------------------------

__device__ __forceinline__ int64_t multiply_high(int64_t a, uint64_t b) {
  return static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(a), b));
}
__device__ __forceinline__ int multiply_high(int a, unsigned b) {
  return static_cast<int>(__umulhi(static_cast<unsigned>(a), b));
}

// Divides numbers that are not negative without a division instruction, which would be a function call.
template <class Int>
class FastDivisor {
 public:
  struct Result {
    Int quotient, remainder;
  };

  FastDivisor() = default;
  explicit FastDivisor(Int divisor)
      : divisor_(divisor), reciprocal_(std::numeric_limits<Unsigned>::max() / static_cast<Unsigned>(divisor)) {}

  __host__ __device__ __forceinline__ Int divisor() const { return divisor_; }

  // The product is the quotient or, because the reciprocal is rounded down, one less.
  __device__ __forceinline__ Result divide(Int n) const {
    Result result;
    result.quotient = multiply_high(n, reciprocal_);
    result.remainder = n - result.quotient * divisor_;
    if (result.remainder >= divisor_) ++result.quotient, result.remainder -= divisor_;
    return result;
  }

 private:
  using Unsigned = std::make_unsigned_t<Int>;
  Int divisor_;
  Unsigned reciprocal_;
};

struct RowIndex {
  int64_t group, row;  // row: in the group
};

// The group of a row of [groups * rows].
__device__ __forceinline__ RowIndex find_group(int64_t row, bool has_groups, const FastDivisor<int64_t>& rows) {
  if (!has_groups) return {0, row};
  const auto [group, row_in_group] = rows.divide(row);
  return {group, row_in_group};
}

template <class E>
__device__ __forceinline__ E* address(const View& view, const RowIndex& index) {
  return static_cast<E*>(view.data) + index.group * view.group_stride + index.row * view.row_stride;
}

// ---- tiles: rows, or chunks of rows, in registers -------------------------------------------------------------------

// kThreads threads share a row, and each holds up to kVectors vectors. Neighbouring threads hold neighbouring vectors.
// A block handles several rows, or one row with as many warps as the row needs, up to kWarps.
template <int kThreads_, int kVectors_ = 4>
struct Tile {
  static constexpr int kThreads = kThreads_, kVectors = kVectors_;
  static constexpr int kBlockThreads = std::max(kThreads, 128);
  static constexpr int kRows = kBlockThreads / kThreads;
  static constexpr int kLanes = std::min(kThreads, kWarpSize);
  static constexpr int kWarps = kThreads / kLanes;
  static constexpr bool kAllWarpsActive = true;  // each warp has columns if the block has block_threads() threads
  static_assert((kThreads & (kThreads - 1)) == 0 && kWarps <= kLanes && (kWarps == 1 || kRows == 1));
};

// The number of threads of a block for rows of `cols` columns.
template <class Tile, class T>
unsigned block_threads(int64_t cols) {
  const int64_t warps = ceil_div(ceil_div(cols, kVectorSize<T>), kWarpSize * Tile::kVectors);
  return Tile::kWarps == 1 ? Tile::kBlockThreads : static_cast<unsigned>(warps) * kWarpSize;
}

// Calls f(Tile{}) with the smallest tile that holds a row, or returns false if none does. The choice depends on nothing
// but the dtypes and the number of columns, and so does the order of summation. Rows of two vectors take 30.9
// instructions per bfloat16 element in Tile<2, 1>, and 34.9 in Tile<2, 4>. `few_tiles` says to choose among two.
template <class X, bool few_tiles, class F>
bool dispatch_tile(int64_t cols, const F& f) {
  const int64_t vectors = ceil_div(cols, kVectorSize<X>);
  if (vectors > kMaxTileVectors) return false;
  const auto try_tile = [&](auto tile) {
    if (vectors > tile.kThreads * tile.kVectors) return false;
    f(tile);
    return true;
  };
  if constexpr (few_tiles) {
    return try_tile(Tile<8>{}) || try_tile(Tile<512>{});
  } else {
    return try_tile(Tile<1, 1>{}) || try_tile(Tile<2, 1>{}) || try_tile(Tile<2>{}) || try_tile(Tile<4>{}) ||
           try_tile(Tile<8>{}) || try_tile(Tile<16>{}) || try_tile(Tile<32>{}) || try_tile(Tile<512>{});
  }
}

// This thread's position in its tile.
template <class Tile>
struct Position {
  int row;                 // in the block
  int thread, lane, warp;  // in the row

  __device__ __forceinline__ explicit Position(unsigned thread_in_block = threadIdx.x, int = 0)
      : row(Tile::kWarps == 1 ? thread_in_block / Tile::kThreads : 0),
        thread(Tile::kWarps == 1 ? thread_in_block % Tile::kThreads : thread_in_block),
        lane(thread_in_block % Tile::kLanes),
        warp(Tile::kWarps == 1 ? 0 : thread_in_block / Tile::kLanes) {}

  __device__ __forceinline__ static int threads_per_row() { return Tile::kWarps == 1 ? Tile::kThreads : blockDim.x; }
  __device__ __forceinline__ static int rows_per_block() { return Tile::kRows; }

  // Synchronizes at least the threads of the row.
  __device__ __forceinline__ static void sync() {
    if constexpr (Tile::kWarps > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  // The index in the row of this thread's vector i. A warp's vectors are contiguous, so that their stride is a
  // constant.
  __device__ __forceinline__ static constexpr int vector_stride() { return Tile::kLanes; }
  __device__ __forceinline__ int vector_index(int i) const {
    return (Tile::kWarps == 1 ? thread : warp * Tile::kVectors * Tile::kLanes + lane) + i * Tile::kLanes;
  }
  // The number of columns from this thread's vector i to the end of the row; not positive if the vector is past the
  // end.
  template <int kVec>
  __device__ __forceinline__ int remaining(int i, int cols) const {
    return cols - vector_index(0) * kVec - i * Tile::kLanes * kVec;
  }

  // The number of columns of a row that this warp holds.
  template <int kVec>
  __device__ __forceinline__ int warp_columns(int cols) const {
    if (Tile::kWarps == 1) return cols;
    constexpr int kMaxColumns = Tile::kVectors * Tile::kLanes * kVec;
    const int columns = min(cols - warp * kMaxColumns, kMaxColumns);
    return Tile::kAllWarpsActive ? columns : max(columns, 0);
  }
  // Whether vector i of any lane of this warp has columns. If not, the later vectors have none either.
  template <int kVec>
  __device__ __forceinline__ bool warp_has_vector(int i, int cols) const {
    return (i == 0 && Tile::kAllWarpsActive) || warp_columns<kVec>(cols) > i * Tile::kLanes * kVec;
  }
};

// The tile of rows that some lanes of a warp hold. The number of lanes is known at run time.
struct WarpTile {
  static constexpr int kThreads = kWarpSize, kVectors = 4, kBlockThreads = 128, kWarps = 1;
};

template <>
struct Position<WarpTile> {
  int lanes, row, thread;  // row: in the block; thread: in the row

  __device__ __forceinline__ Position(unsigned thread_in_block, int log2_lanes)
      : lanes(1 << log2_lanes), row(thread_in_block >> log2_lanes), thread(thread_in_block & (lanes - 1)) {}

  __device__ __forceinline__ int threads_per_row() const { return lanes; }
  __device__ __forceinline__ int rows_per_block() const { return WarpTile::kBlockThreads / lanes; }
  __device__ __forceinline__ static void sync() { __syncwarp(); }
  __device__ __forceinline__ int vector_stride() const { return lanes; }
  __device__ __forceinline__ int vector_index(int i) const { return i * lanes + thread; }
  template <int kVec>
  __device__ __forceinline__ int remaining(int i, int cols) const {
    return cols - vector_index(i) * kVec;
  }
  template <int kVec>
  __device__ __forceinline__ bool warp_has_vector(int i, int cols) const {
    return i == 0 || i * lanes * kVec < cols;
  }
};

// The number of lanes, as a logarithm, that hold a row of so many vectors. Only rows of one vector have one lane.
inline int log2_lanes_for(int64_t vectors) {
  int log2_lanes = vectors > 1 ? 1 : 0;
  while (WarpTile::kVectors << log2_lanes < vectors) ++log2_lanes;
  return log2_lanes;
}

// The tile of rows, or chunks of rows, that a whole block holds. Some of its warps may have no columns.
struct BlockTile : Tile<512> {
  static constexpr bool kAllWarpsActive = false;
};

// Returns to all lanes the sum over each group of kLanes neighbouring lanes. All lanes of the warp must call it.
template <int kLanes, class Acc>
__device__ __forceinline__ Acc sum_lanes(Acc value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// ---- large numbers --------------------------------------------------------------------------------------------------

// As on the CPU, a row whose sums of squares or differences overflow is first scaled by a power of two, which rounds
// nothing. Other rows are multiplied by 1 in an instruction that subtracts or adds anyway.
template <class Acc>
constexpr Acc kScale = sizeof(Acc) == 4 ? Acc(0x1p-96) : Acc(0x1p-768);
template <class Acc>
constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();

// 1 / sqrt(x) with an error of at most two roundings. For float, one Newton step takes half as many instructions as a
// square root and a division; it is skipped for 0 and infinity, where it would give NaN.
__device__ __forceinline__ double reciprocal_sqrt(double x) { return 1 / sqrt(x); }
__device__ __forceinline__ float reciprocal_sqrt(float x) {
  const float root = rsqrtf(x), residual = fma(-x * root, root, 1.0f);
  return residual == residual ? fma(root / 2, residual, root) : root;
}

// 1 / sqrt(variance + eps * scale^2) for the variance of x * scale. eps * scale^2 may underflow, its root does not.
template <class Acc>
__device__ __forceinline__ Acc scaled_rstd(Acc variance, Acc eps, Acc scale) {
  if (scale == 1) return reciprocal_sqrt(variance + eps);
  return 1 / hypot(sqrt(variance), sqrt(eps) * scale);
}

// sum / count rounded to nearest, from the reciprocal of count rounded to nearest, for a finite sum (Markstein,
// Computation of elementary functions on the IBM RISC System/6000 processor, 1990). A division would be a function call
// that needs more registers.
template <class Acc>
__device__ __forceinline__ Acc divide_by_count(Acc sum, Acc count, Acc reciprocal) {
  const Acc quotient = sum * reciprocal;
  return fma(fma(-quotient, count, sum), reciprocal, quotient);
}

// ---- backward of a row ----------------------------------------------------------------------------------------------

// The statistics that forward saved, for x * scale; zeros for a row that does not exist.
template <class Acc>
struct Statistics {
  Acc scale, mean = 0, rstd = 0;

  __device__ __forceinline__ Statistics(const Params& p, const RowIndex& index, bool exists = true) {
    if (exists) {
      if (p.mean.data) mean = *address<const Acc>(p.mean, index);
      rstd = *address<const Acc>(p.rstd, index);
    }
    // A row whose standard deviation is below 2^60 holds no difference that overflows, however long it is.
    const bool is_huge = rstd < Acc(0x1p-60);
    scale = is_huge ? kScale<Acc> : 1;
    mean *= scale;
    rstd *= is_huge ? 1 / kScale<Acc> : 1;
  }
  __device__ __forceinline__ static void prefetch(const Params& p, const RowIndex& index) {
    if (p.mean.data) layernorm::prefetch(address<const Acc>(p.mean, index));
    layernorm::prefetch(address<const Acc>(p.rstd, index));
  }
  __device__ __forceinline__ Acc xhat(Acc x, Acc correction) const {
    return fma(fma(x, scale, -mean), rstd, -correction);
  }
};

// The means over a row from which dx is computed.
template <class Acc>
struct RowMeans {
  Acc xhat;  // of xhat as computed from the saved mean: the correction
  Acc g;
  Acc g_xhat;  // of g times the corrected xhat

  // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)). The first difference is exactly 0 if g is constant over the row,
  // as for a row of one column or the gradient of the sum of the outputs.
  __device__ __forceinline__ Acc grad_input(Acc g_, Acc xhat_, const Statistics<Acc>& row) const {
    return fma(xhat_, -g_xhat, g_ - g) * (row.rstd * row.scale);
  }
};

// xhat from the output, where the weight is weight + weight_offset. A weight that is too small to divide by gives NaN.
template <class Acc>
__device__ __forceinline__ Acc recover_xhat(Acc y, Acc weight, Acc bias, Acc weight_offset, Acc correction) {
  const Acc divisor = weight + weight_offset;
  if (abs(divisor) < Acc(kSmallestDivisor)) return std::numeric_limits<Acc>::quiet_NaN();
  return fast_divide(y - bias, divisor) - correction;
}

// ---- alignment ------------------------------------------------------------------------------------------------------

// Whether every row of an array starts at a multiple of 16 bytes. An absent array is aligned.
template <class E>
bool is_aligned(const View& view) {
  const auto is_multiple = [](int64_t elements) { return elements * static_cast<int64_t>(sizeof(E)) % 16 == 0; };
  return !view.data || (reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && is_multiple(view.group_stride) &&
                        is_multiple(view.row_stride));
}

}  // namespace layernorm::cuda
