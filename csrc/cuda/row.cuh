// Tiles: rows, or chunks of rows, that the lanes of a warp or the threads of a block share, and their shared memory.
#pragma once

#include "geometry.h"
#include "vec.cuh"

namespace layernorm::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxBlockThreads = 512;
constexpr int kWholeBlock = 30;  // log2_threads of a tile that always takes a whole block

// Returns to all lanes the sum over each group of kLanes neighbouring lanes. All lanes of the warp must call it.
template <int kLanes, class Acc>
__device__ __forceinline__ Acc sum_lanes(Acc value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

// This thread's position in its tile: of some lanes of a warp, or of whole warps of a block. Neighbouring threads hold
// neighbouring vectors.
template <bool kIsBlock_>
struct TileOf {
  static constexpr bool kIsBlock = kIsBlock_;
  int log2_threads, thread_in_block;
  int block_tile_threads, block_tile_row;  // if kIsBlock: known without arithmetic, and the same in all lanes of a warp

  // The threads of a row: a power of two unless the row takes a whole block.
  __device__ __forceinline__ int threads() const { return kIsBlock ? block_tile_threads : 1 << log2_threads; }
  __device__ __forceinline__ int thread() const { return thread_in_block & ((1 << log2_threads) - 1); }
  __device__ __forceinline__ int row() const { return kIsBlock ? block_tile_row : thread_in_block >> log2_threads; }
  __device__ __forceinline__ int rows_per_block() const { return max(static_cast<int>(blockDim.x) >> log2_threads, 1); }

  // Synchronizes at least the threads of the row. The rows of a block take each step together.
  __device__ __forceinline__ static void sync() {
    if constexpr (kIsBlock) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  // The index in the row of this thread's vector i.
  __device__ __forceinline__ int vector_index(int i) const { return i * threads() + thread(); }
  // The number of columns from this thread's vector i to the end; not positive after the end.
  template <int kVec>
  __device__ __forceinline__ int remaining(int i, int cols) const {
    return cols - vector_index(i) * kVec;
  }
  // Calls f(i) for each vector i of this thread that has columns.
  template <int kVec, class F>
  __device__ __forceinline__ void for_each_vector(int cols, const F& f) const {
#pragma unroll
    for (int i = 0; i < kTileVectors; ++i) {
      if (remaining<kVec>(i, cols) > 0) f(i);
    }
  }
};

using WarpTile = TileOf<false>;
using BlockTile = TileOf<true>;

// Returns to all threads of a row the sums over them. Successive calls alternate `buffer` between 0 and 1, so that one
// barrier per call suffices.
template <class Tile, int kCount, class Acc>
__device__ __forceinline__ void sum_tile(Acc (&sums)[kCount], const Tile& tile, int buffer) {
  if constexpr (!Tile::kIsBlock) {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      if (offset >= tile.threads()) continue;
#pragma unroll
      for (Acc& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, offset);
    }
  } else {
    constexpr int kMaxWarps = kMaxBlockThreads / kWarpSize;
    __shared__ Acc warp_sums[2][kCount][kMaxWarps];
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
    for (Acc& sum : sums) sum = sum_lanes<kWarpSize>(sum);
    if (lane == 0) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) warp_sums[buffer][k][warp] = sums[k];
    }
    __syncthreads();
    const int other = lane % kMaxWarps, first_warp = warp - tile.thread() / kWarpSize;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      sums[k] = sum_lanes<kMaxWarps>(other * kWarpSize < tile.threads() ? warp_sums[buffer][k][first_warp + other] : 0);
    }
  }
}

// Values that the blocks of a cluster exchange once per round. Two buffers take turns. No block overwrites values that
// another one still reads: a block sends those of the next round after it has received those of this round from all
// blocks, and their threads had read the last round's before.
template <class Value>
struct ClusterExchange {
  Value values[2][kMaxClusterSize];
  TransactionBarrier barriers[2];

  // One thread calls this before its cluster_arrive().
  __device__ __forceinline__ void init() { barriers[0].init(), barriers[1].init(); }

  // The block's first warp sends a value to the cluster's blocks, all of which must have started.
  __device__ __forceinline__ void send(const Value& value, int blocks, int round) {
    const int buffer = round % 2;
    if (threadIdx.x == 0) barriers[buffer].expect(blocks * sizeof(Value));
    if (static_cast<int>(threadIdx.x) < blocks) {
      barriers[buffer].store(values[buffer][cluster_rank()], value, threadIdx.x);
    }
  }
  // Returns to all threads the values of the cluster's blocks.
  __device__ __forceinline__ const Value* receive(int round) {
    barriers[round % 2].wait(round / 2);
    return values[round % 2];
  }
  __device__ __forceinline__ const Value* gather(const Value& value, int blocks, int round) {
    send(value, blocks, round);
    return receive(round);
  }
};

// ---- rows in shared memory ------------------------------------------------------------------------------------------

// A tile of an array in shared memory, in vectors of kVec elements: 16 bytes, or 8 if only x has 32 bits. In shared
// memory a row has the same offset from 16 bytes as in global memory, so that whole vectors can be copied even if the
// row is not aligned. Then a thread reads and writes its vectors by elements, after a barrier.
template <class T, int kVec, class Tile>
class StagedRow {
 public:
  // The shared memory of a tile. There is one more vector for the row's offset; or several, so that the rows of lanes
  // that read together are in different banks.
  __host__ __device__ static constexpr size_t bytes(int threads) {
    return (threads * kTileVectors + (threads < 8 ? threads : 1)) * sizeof(Vector<T, kVec>);
  }

  __device__ __forceinline__ StagedRow(void* shared, T* row, int cols, const Tile& tile, bool aligned)
      : row_(compute_once(row)), cols_(cols), tile_(tile), aligned_(aligned) {
    const auto offset = aligned ? 0 : reinterpret_cast<uintptr_t>(row) % sizeof(Vector<T, kVec>);
    shared_ = reinterpret_cast<T*>(static_cast<unsigned char*>(shared) + offset);
  }

  // Starts to copy the row to shared memory.
  __device__ __forceinline__ void fetch() const {
    if (aligned_) {
      tile_.template for_each_vector<kVec>(
          cols_, [&](int i) { async_copy<sizeof(Vector<T, kVec>)>(shared_ + column(i), row_ + column(i)); });
    } else {
      for_each_piece([&](int column) { async_copy<sizeof(Vector<T, kVec>)>(shared_ + column, row_ + column); },
                     [&](int column) { shared_[column] = row_[column]; });
    }
  }

  // Reads a vector of a fetched or written row, with zeros after its end: from a column on, or this thread's vector i.
  __device__ __forceinline__ Vector<T, kVec> read_from(int column) const {
    if (aligned_) return vector(shared_, column);
    Vector<T, kVec> v;
#pragma unroll
    for (int e = 0; e < kVec; ++e) v.values[e] = e < cols_ - column ? shared_[column + e] : T(0.0f);
    return v;
  }
  __device__ __forceinline__ Vector<T, kVec> read(int i) const { return read_from(column(i)); }
  __device__ __forceinline__ void write(int i, const Vector<T, kVec>& v) const {
    if (aligned_) {
      vector(shared_, column(i)) = v;
      return;
    }
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      if (e < remaining(i)) shared_[column(i) + e] = v.values[e];
    }
  }

  // Stores vector i in global memory; call end_of_store() after the last one. An unaligned row is staged in shared
  // memory, and end_of_store() copies it.
  __device__ __forceinline__ void store(int i, const Vector<T, kVec>& v) const {
    if (!aligned_) {
      write(i, v);
    } else {
      vector(row_, column(i)) = v;
    }
  }
  __device__ __forceinline__ void end_of_store() const {
    if (aligned_) return;
    tile_.sync();
    for_each_piece([&](int column) { vector(row_, column) = vector(shared_, column); },
                   [&](int column) { row_[column] = shared_[column]; });
  }

 private:
  __device__ __forceinline__ int remaining(int i) const { return tile_.template remaining<kVec>(i, cols_); }
  __device__ __forceinline__ int column(int i) const { return tile_.vector_index(i) * kVec; }
  __device__ __forceinline__ static Vector<T, kVec>& vector(T* data, int column) {
    return *reinterpret_cast<Vector<T, kVec>*>(data + column);
  }

  // Calls whole(column) for the aligned vectors of an unaligned row, and single(column) for the other elements.
  template <class F, class G>
  __device__ __forceinline__ void for_each_piece(const F& whole, const G& single) const {
    const int before = static_cast<int>((0 - reinterpret_cast<uintptr_t>(row_)) % sizeof(Vector<T, kVec>) / sizeof(T));
    const int begin = min(before, cols_), end = begin + (cols_ - begin) / kVec * kVec;
#pragma unroll 1
    for (int column = begin + tile_.thread() * kVec; column < end; column += tile_.threads() * kVec) whole(column);
    const int singles = cols_ - (end - begin);
#pragma unroll 1
    for (int i = tile_.thread(); i < singles; i += tile_.threads()) single(i < begin ? i : i + end - begin);
  }

  T *row_, *shared_;
  int cols_;
  Tile tile_;
  bool aligned_;
};

// ---- large numbers --------------------------------------------------------------------------------------------------

// As on the CPU, a row whose sums of squares or differences overflow is first scaled by a power of two, which rounds
// nothing. Other rows are multiplied by 1 in an instruction that subtracts or adds anyway.
template <class Acc>
constexpr Acc kScale = sizeof(Acc) == 4 ? Acc(0x1p-96) : Acc(0x1p-768);
template <class Acc>
constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();

__device__ __forceinline__ double reciprocal_sqrt(double x) { return 1 / sqrt(x); }
__device__ __forceinline__ float reciprocal_sqrt(float x) { return __frsqrt_rn(x); }

// 1 / sqrt(variance + eps * scale^2) for the variance of x * scale. eps * scale^2 may underflow, its root does not. In
// constant rows of large numbers, whose differences are zero, the largest number replaces an overflow.
template <class Acc>
__device__ __forceinline__ Acc scaled_rstd(Acc variance, Acc eps, Acc scale) {
  if (scale == 1) return reciprocal_sqrt(variance + eps);
  const Acc rstd = 1 / hypot(sqrt(variance), sqrt(eps) * scale);
  return eps > 0 && rstd == kInfinity<Acc> ? std::numeric_limits<Acc>::max() : rstd;
}

// The rstd of x, from the result of scaled_rstd().
template <class Acc, class Eps>
__device__ __forceinline__ Acc unscaled_rstd(Acc rstd, Eps eps, Acc scale) {
  return rstd == std::numeric_limits<Acc>::max() ? static_cast<Acc>(reciprocal_sqrt(eps)) : rstd * scale;
}

// A number of columns, and its reciprocal rounded to nearest.
template <class Acc>
struct Divisor {
  Acc value, reciprocal;

  Divisor() = default;
  explicit Divisor(int64_t count) : Divisor(static_cast<Acc>(count), 1 / static_cast<Acc>(count)) {}
  __host__ __device__ __forceinline__ Divisor(Acc value, Acc reciprocal) : value(value), reciprocal(reciprocal) {}

  // x / value rounded to nearest, so that the mean of equal numbers is that number; NaN if x is infinite (Markstein,
  // Computation of elementary functions on the IBM RISC System/6000 processor, 1990). A division would be a function
  // call that needs more registers.
  __device__ __forceinline__ Acc divide(Acc x) const {
    const Acc quotient = x * reciprocal;
    return fma(fma(-quotient, value, x), reciprocal, quotient);
  }
};

// ---- backward of a row ----------------------------------------------------------------------------------------------

// The largest power of two up to x, for positive normal x, and the reciprocal of a power of two.
__device__ __forceinline__ float power_of_two(float x) { return __uint_as_float(__float_as_uint(x) & 0x7f800000u); }
__device__ __forceinline__ float invert(float power) { return __uint_as_float(0x7f000000u - __float_as_uint(power)); }
__device__ __forceinline__ double power_of_two(double x) {
  return __longlong_as_double(__double_as_longlong(x) & 0x7ff0000000000000);
}
__device__ __forceinline__ double invert(double power) {
  return __longlong_as_double(0x7fe0000000000000 - __double_as_longlong(power));
}

// The statistics that forward saved, for x * scale: d = x * scale - mean and xhat = d * rstd - correction. The scale is
// a power of two, which rounds nothing, and brings the deviation of the row near 1, so that products with d neither
// overflow nor underflow. If d is xhat, computed from the output, then rstd is 1 and the scale is the rstd of x.
template <class Acc>
struct Statistics {
  Acc scale = 0, mean = 0, rstd = 0;

  Statistics() = default;
  // Zeros for a row that does not exist.
  __device__ __forceinline__ Statistics(const Params& p, const RowIndex& index, bool from_output, bool exists)
      : Statistics(exists && p.mean.data ? *address<const Acc>(p.mean, index) : 0,
                   exists ? *address<const Acc>(p.rstd, index) : 0, from_output) {}
  __device__ __forceinline__ Statistics(Acc mean_, Acc rstd_, bool from_output) : mean(mean_), rstd(rstd_) {
    if (from_output) {
      scale = rstd, rstd = 1;
      return;
    }
    // Numbers around so large a mean are too far apart for a product to underflow; the scaled mean might overflow.
    const bool is_far = rstd > 1 && abs(mean) > Acc(0x1p20);
    scale = is_far ? 1 : power_of_two(max(rstd, std::numeric_limits<Acc>::min()));
    mean *= scale;
    rstd *= invert(scale);
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
  __device__ __forceinline__ Acc grad_input(Acc g_minus_mean, Acc xhat_, const Statistics<Acc>& row) const {
    return fma(xhat_, -g_xhat, g_minus_mean) * (row.rstd * row.scale);
  }
};

// xhat from the output. A weight that is too small to divide by gives NaN.
template <class Acc>
__device__ __forceinline__ Acc recover_xhat(Acc y, Acc weight, Acc bias) {
  return abs(weight) < Acc(kSmallestDivisor) ? std::numeric_limits<Acc>::quiet_NaN() : fast_divide(y - bias, weight);
}

}  // namespace layernorm::cuda
