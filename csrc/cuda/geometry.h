// The mapping of rows to threads, blocks and clusters, for the host code of both passes and for the kernels.
//
// A row of up to kMaxWarpVectors vectors is a tile of some lanes of a warp. A longer row is divided into chunks, and a
// chunk is a tile of a whole block. A thread holds up to kTileVectors vectors of a tile. The division of a row depends
// only on the GPU, the dtypes and the number of columns, and so does the order of summation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "../layer_norm.h"
#include "device.h"
#include "launch_limits.h"

namespace layernorm::cuda {

constexpr int kWarpSize = 32;
constexpr int kTileVectors = 4;
constexpr int kMaxClusterSize = 8;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// ---- flags ----------------------------------------------------------------------------------------------------------

// The options of a call. A kernel tests a bit in one instruction, and a pointer in three.
enum Flag : unsigned {
  kAligned = 1 << 0,  // every row of x and of its kind starts at a multiple of 16 bytes and consists of whole vectors
  kAlignedParameters = 1 << 1,  // so do weight, bias and their gradients, whose last vector may be partial
  kHasGroups = 1 << 2,
  kRms = 1 << 3,
  kWeight = 1 << 4,
  kBias = 1 << 5,
  kZeroCentered = 1 << 6,
  kInCluster = 1 << 7,   // a cluster shares a row
  kStoresSums = 1 << 8,  // the first of two launches that read a row: it stores the row's sums in the workspace
  kLoadsSums = 1 << 9,   // the second launch
  kResidual = 1 << 10,   // the flags from here to kPerGroup are those of one pass: forward
  kGradInput = 1 << 11,  // backward
  kGradWeight = 1 << 12,
  kGradBias = 1 << 13,
  kGradSum = 1 << 14,
  kFromOutput = 1 << 15,
  kWeightPerGroup = 1 << 16,  // each group has a gradient of its own
  kBiasPerGroup = 1 << 17,
};

struct Flags {
  unsigned bits = 0;

  __host__ __device__ __forceinline__ bool has(unsigned flag) const { return (bits & flag) != 0; }
  void set(Flag flag, bool value) { bits = value ? bits | flag : bits & ~flag; }
};

// Whether every row of an array starts at a multiple of 16 bytes. An absent array is aligned.
template <class E>
bool is_aligned(const View& view) {
  const auto is_multiple = [](int64_t elements) { return elements * static_cast<int64_t>(sizeof(E)) % 16 == 0; };
  return !view.data || (reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && is_multiple(view.group_stride) &&
                        is_multiple(view.row_stride));
}

// Also for a gradient that is not wanted, so that the other gradient does not depend on that.
inline bool is_per_group(const Params& p, const View& gradient) { return gradient.group_stride != 0 && p.groups > 1; }

template <class W>
Flags common_flags(const Params& p) {
  Flags flags;
  flags.set(kAlignedParameters, is_aligned<W>(p.weight) && is_aligned<W>(p.bias));
  flags.set(kHasGroups, p.groups > 1);
  flags.set(kRms, p.rms);
  flags.set(kWeight, p.weight.data);
  flags.set(kBias, p.bias.data);
  flags.set(kZeroCentered, p.zero_centered_weight);
  return flags;
}

template <class T, class X, class W>
Flags make_flags(const ForwardParams& p) {
  Flags flags = common_flags<W>(p);
  flags.set(kAligned, p.cols * static_cast<int64_t>(sizeof(T)) % 16 == 0 && is_aligned<T>(p.input) &&
                          is_aligned<X>(p.residual) && is_aligned<X>(p.sum) && is_aligned<T>(p.output));
  flags.set(kResidual, p.residual.data);
  return flags;
}

template <class T, class X, class W>
Flags make_flags(const BackwardParams& p) {
  Flags flags = common_flags<W>(p);
  flags.set(kAlignedParameters,
            flags.has(kAlignedParameters) && is_aligned<W>(p.grad_weight) && is_aligned<W>(p.grad_bias));
  flags.set(kAligned, p.cols * static_cast<int64_t>(sizeof(T)) % 16 == 0 && is_aligned<X>(p.input) &&
                          is_aligned<T>(p.grad_output) && is_aligned<X>(p.grad_input) && is_aligned<X>(p.grad_sum));
  flags.set(kGradInput, p.grad_input.data);
  flags.set(kGradWeight, p.grad_weight.data);
  flags.set(kGradBias, p.grad_bias.data);
  flags.set(kGradSum, p.grad_sum.data);
  flags.set(kFromOutput, p.from_output);
  flags.set(kWeightPerGroup, is_per_group(p, p.grad_weight));
  flags.set(kBiasPerGroup, is_per_group(p, p.grad_bias));
  return flags;
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

// The division of a gradient group's rows into segments: the rows whose weight gradients a block sums. A segment takes
// `rounds` rounds of a block. If all rows share their gradients, each resident block has a segment. Else 64 segments of
// a group keep the GPU busy with few groups; a segment has at least `min_rounds` rounds, which limits the memory
// traffic of its sums, and at most 256, which limits their rounding errors.
struct Segments {
  int64_t rounds, per_group;

  Segments(int64_t rounds_of_group, bool per_group_gradients, int64_t resident, int64_t min_rounds) {
    rounds = ceil_div(rounds_of_group, per_group_gradients ? 64 : resident);
    if (per_group_gradients) rounds = std::clamp(rounds, min_rounds, int64_t{256});
    per_group = ceil_div(rounds_of_group, rounds);
    rounds = ceil_div(rounds_of_group, per_group);
  }
};

// ---- tiles ----------------------------------------------------------------------------------------------------------

// The division of a row among threads, the same for all rows of a call.
struct RowLayout {
  bool is_warp_tile;  // else a chunk is a tile of a block
  int log2_lanes;     // of a warp tile: the number of lanes that share a row, as a logarithm
  int chunk_cols;
  int64_t num_chunks;

  // kVec is the number of elements of a vector.
  RowLayout(int64_t cols, int64_t vec, int64_t max_chunk) {
    const int64_t vectors = ceil_div(cols, vec);
    is_warp_tile = vectors <= kMaxWarpVectors;
    log2_lanes = vectors > 1 ? 1 : 0;  // only rows of one vector have one lane
    while (is_warp_tile && kTileVectors << log2_lanes < vectors) ++log2_lanes;
    const int64_t chunks = ceil_div(vectors, is_warp_tile ? vectors : max_chunk);
    const int64_t chunk = chunks == 1 ? vectors : round_up(ceil_div(vectors, chunks), kWarpSize);
    chunk_cols = static_cast<int>(std::min(chunk * vec, cols));
    num_chunks = ceil_div(cols, chunk_cols);
  }
  int rows_per_block(int64_t threads) const { return is_warp_tile ? static_cast<int>(threads) >> log2_lanes : 1; }
};

}  // namespace layernorm::cuda
