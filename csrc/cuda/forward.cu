// y = (x - mean) * rstd * weight + bias for every row of x [groups, rows, cols] on a GPU. RMSNorm's mean is 0.
//
// Most rows fit into a tile, which a few threads or a block hold in registers. They are read and written once:
// 2 * groups * rows * cols * sizeof(T) bytes are moved, the minimum. Longer rows are divided into chunks of a tile's
// size, and the chunks into parts, one for each block. From compute capability 9.0 on, a cluster of up to 8 blocks
// keeps its parts in shared memory and exchanges their moments. Still longer rows, and those on older GPUs, are read
// twice: by one kernel for the moments of the parts and by another for the output.
//
// The numerical method is that of the CPU kernels (cpu/forward.cpp): the mean is rounded, the average of x - mean is
// its error to full precision, and this correction enters the mean, the variance and the output. Each warp has its own
// mean; the formula of Chan, Golub and LeVeque merges the moments of the warps with one exchange. The division of a row
// depends only on the dtypes and the number of columns, and so do the results.
//
// A residual is added when a row is loaded. A row that is read again is read as the sum. If the sum is float and the
// input has 16 bits, a vector of the input and of the output has 8 bytes.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467. Chan, Golub and LeVeque,
// Updating formulae and a pairwise algorithm for computing sample variances, 1979.
#include <algorithm>

#include "../dtypes.h"
#include "channels_first.h"
#include "staged_row.cuh"

namespace layernorm::cuda {

// The division of a row that is longer than a tile.
struct ChunkLayout {
  int chunk_cols, chunks_per_part;
  unsigned num_parts;
  unsigned first_row;  // of a launch; 32 bits suffice, because 2^32 such rows would be 128 TiB
};

template <class Acc>
struct Divisor {
  Acc value, reciprocal;

  // x / value rounded to nearest, so that the mean of equal numbers is that number; NaN if x is infinite.
  __device__ __forceinline__ Acc divide(Acc x) const { return divide_by_count(x, value, reciprocal); }
};

// ForwardParams packed for the kernel: testing a flag takes one instruction, testing a pointer three.
template <class Acc>
struct PackedParams {
  static constexpr unsigned kAligned = 1, kResidual = 2, kWeight = 4, kBias = 8, kZeroCentered = 16, kRms = 32,
                            kGroups = 64;
  unsigned flags;
  Acc eps;
  Divisor<Acc> cols;
  FastDivisor<int64_t> rows;

  PackedParams(const ForwardParams& p, bool aligned)
      : flags((aligned ? kAligned : 0) | (p.residual.data ? kResidual : 0) | (p.weight.data ? kWeight : 0) |
              (p.bias.data ? kBias : 0) | (p.zero_centered_weight ? kZeroCentered : 0) | (p.rms ? kRms : 0) |
              (p.groups > 1 ? kGroups : 0)),
        eps(static_cast<Acc>(p.eps)),
        cols{static_cast<Acc>(p.cols), 1 / static_cast<Acc>(p.cols)},
        rows(p.rows) {}
  __device__ __forceinline__ bool has(unsigned flag) const { return flags & flag; }
  __device__ __forceinline__ RowIndex find_group(int64_t row) const {
    return cuda::find_group(row, has(kGroups), rows);
  }
};

namespace {

// ---- moments --------------------------------------------------------------------------------------------------------

template <class Acc>
__device__ __forceinline__ Divisor<Acc> make_divisor(Acc value) {
  const Acc approximation = approximate_reciprocal(value);
  return {value, fma(fma(-value, approximation, Acc(1)), approximation, approximation)};
}

// The moments of `count` numbers x * scale. Their mean is pivot + correction, where the correction is the rounding
// error of the pivot. m2 is the sum of the squares of their differences from the mean; for RMSNorm the mean is 0.
template <class Acc>
struct Moments {
  Acc pivot, correction, m2, count, scale;
};

// Merges the moments of kLanes lanes, which must have the same scale; a lane without columns holds zeros.
template <int kLanes, class Acc>
__device__ __forceinline__ Moments<Acc> merge_lanes(const Moments<Acc>& own, const Divisor<Acc>& total) {
  const Acc pivot = __shfl_sync(kAllLanes, own.pivot, 0), correction = __shfl_sync(kAllLanes, own.correction, 0);
  const Acc mean_diff = ((own.pivot - pivot) + own.correction) - correction;
  const Acc mean_shift = total.divide(sum_lanes<kLanes>(own.count * mean_diff));
  const Acc rest = mean_diff - mean_shift;
  return {pivot, correction + mean_shift, sum_lanes<kLanes>(fma(own.count * rest, rest, own.m2)), total.value,
          own.scale};
}

// The moments of a row, or of a warp's part of one, from the vectors `v`, which hold zeros after the end of the row.
// `remaining` is the number of columns from this thread's first one on. `x` becomes x * scale - pivot, or x if the tile
// is a chunk, whose row has another pivot.
template <class Tile, class T, int kVec, class Acc>
__device__ __forceinline__ Moments<Acc> compute_warp_moments(Acc (&x)[Tile::kVectors][kVec],
                                                             const Vector<T, kVec> (&v)[Tile::kVectors], Acc scale,
                                                             const Position<Tile>& position, int cols, int remaining,
                                                             const PackedParams<Acc>& packed) {
  const bool rms = packed.has(packed.kRms);
  Acc sums[2] = {};
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) {
    if (!position.template warp_has_vector<kVec>(i, cols)) break;
    widen(x[i], v[i]);
#pragma unroll
    for (int e = 0; e < kVec; ++e) sums[e % 2] = fma(x[i][e], scale, sums[e % 2]);
  }
  const int count = position.template warp_columns<kVec>(cols);
  const Divisor<Acc> divisor =
      Tile::kWarps > 1 ? make_divisor<Acc>(Tile::kAllWarpsActive ? count : max(count, 1)) : packed.cols;
  Moments<Acc> own = {};
  if (!rms) own.pivot = sum_lanes<Tile::kLanes>(sums[0] + sums[1]) * divisor.reciprocal;

  Acc diff_sums[2] = {}, m2[2] = {};
  with_constant(packed.has(packed.kAligned), [&](auto is_whole) {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (!position.template warp_has_vector<kVec>(i, cols)) break;
      const int first = i * Tile::kLanes * kVec;
      const Acc pivot = remaining > first ? own.pivot : 0;  // the zeros after the end of the row stay zeros
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const Acc d = fma(x[i][e], scale, is_whole || first + e < remaining ? -pivot : 0);
        if (Tile::kAllWarpsActive) x[i][e] = d;
        diff_sums[e % 2] = i == 0 && e < 2 ? d : diff_sums[e % 2] + d;  // adding d to 0 would take an instruction
        m2[e % 2] = fma(d, d, m2[e % 2]);
      }
    }
  });
  if (!rms) own.correction = divisor.divide(sum_lanes<Tile::kLanes>(diff_sums[0] + diff_sums[1]));
  own.count = Tile::kWarps > 1 ? count : divisor.value;
  own.m2 = fma(-own.count * own.correction, own.correction, sum_lanes<Tile::kLanes>(m2[0] + m2[1]));
  if (own.m2 < 0) own.m2 = 0;  // this comparison keeps NaN
  own.scale = scale;
  return own;
}

// Returns to lane i the moments of warp i % kWarps, or empty moments if the block has fewer warps.
template <class Tile, class Acc>
__device__ __forceinline__ Moments<Acc> exchange_warps(const Moments<Acc>& own, const Position<Tile>& position) {
  __shared__ Moments<Acc> warp_moments[Tile::kWarps];
  if (position.lane == 0) warp_moments[position.warp] = own;
  __syncthreads();
  const unsigned warp = static_cast<unsigned>(position.lane) % Tile::kWarps;
  return warp * kWarpSize < blockDim.x ? warp_moments[warp] : Moments<Acc>{0, 0, 0, 0, 1};
}

// The moments of a row, or of a warp's part of a chunk. If they overflow, reload(v) reads the vectors again, and the
// moments are computed with kScale. A row that holds NaN or infinity still gives NaN. `pivot` is this warp's pivot.
template <class Tile, class T, int kVec, class Acc, class F>
__device__ __forceinline__ Moments<Acc> compute_moments(Acc (&x)[Tile::kVectors][kVec],
                                                        Vector<T, kVec> (&v)[Tile::kVectors], Acc& pivot,
                                                        const Position<Tile>& position, int cols, int remaining,
                                                        const PackedParams<Acc>& packed, const F& reload) {
  constexpr bool kMergesWarps = Tile::kAllWarpsActive && Tile::kWarps > 1;
  Acc scale = 1;
  for (;;) {
    Moments<Acc> result = compute_warp_moments<Tile>(x, v, scale, position, cols, remaining, packed);
    pivot = result.pivot;
    if constexpr (kMergesWarps) {
      result = exchange_warps(result, position);
      result.scale = scale;
      result = merge_lanes<Tile::kWarps>(result, packed.cols);
    }
    const bool overflows = !(result.m2 < kInfinity<Acc>) && scale == 1;
    if (!__any_sync(kAllLanes, overflows)) return result;
    if (overflows) scale = kScale<Acc>;  // the warp's other rows are computed again with the same result
    if constexpr (kMergesWarps) {
      __syncthreads();
    } else {
      __syncwarp();  // only for the compiler: the branch costs nothing if it is not taken
    }
    reload(v);
  }
}

// Multiplies the numbers by kScale, unless they are scaled already.
template <class Acc>
__device__ __forceinline__ void rescale(Moments<Acc>& m) {
  if (m.scale != 1) return;
  m.scale = kScale<Acc>;
  m.pivot *= m.scale;
  m.correction *= m.scale;
  m.m2 = m.m2 * m.scale * m.scale;
}

// Merges the moments of two disjoint sets of numbers. The first set is not empty.
template <class Acc>
__device__ __forceinline__ Moments<Acc> merge(Moments<Acc> a, Moments<Acc> b) {
  if (a.scale != b.scale) rescale(a), rescale(b);
  for (;;) {
    const Acc count = a.count + b.count, weight = make_divisor(count).divide(b.count);
    const Acc mean_diff = ((b.pivot - a.pivot) + b.correction) - a.correction;
    const Acc m2 = fma(mean_diff * mean_diff, a.count * weight, a.m2 + b.m2);
    if (m2 < kInfinity<Acc> || a.scale != 1) {
      return {a.pivot, fma(mean_diff, weight, a.correction), m2, count, a.scale};
    }
    rescale(a), rescale(b);
  }
}

// merge_lanes() for any scales.
template <int kLanes, class Acc>
__device__ __forceinline__ Moments<Acc> merge_scaled_lanes(Moments<Acc> own, const Divisor<Acc>& total) {
  if (__any_sync(kAllLanes, own.scale != 1)) rescale(own);
  const Moments<Acc> merged = merge_lanes<kLanes>(own, total);
  if (merged.m2 < kInfinity<Acc> || own.scale != 1) return merged;
  rescale(own);
  return merge_lanes<kLanes>(own, total);
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

// A tile of x in shared memory. With a residual, it first holds the residual and then the sum, and the input has shared
// memory of its own.
template <class T, class X, class Tile>
struct StagedInput {
  static constexpr int kVec = kVectorSize<X>;
  StagedRow<X, Tile> x;
  StagedRow<T, Tile, kVec> input;

  __device__ __forceinline__ StagedInput(void* x, void* input, const Position<Tile>& position, bool aligned)
      : x(x, position, aligned), input(input, position, aligned) {}

  // Starts to load columns [begin, begin + cols) of a row.
  template <class Acc>
  __device__ __forceinline__ void fetch(const ForwardParams& p, const PackedParams<Acc>& packed, const RowIndex& row,
                                        int64_t begin, int cols) {
    if (packed.has(packed.kResidual)) {
      x.fetch(address<const X>(p.residual, row) + begin, cols);
      input.fetch(address<const T>(p.input, row) + begin, cols);
    } else {
      x.fetch(address<const X>(p.input, row) + begin, cols);
    }
  }

  // Reads the fetched columns so that x.read() can read them again. Adds the residual and stores the sum.
  template <class Acc>
  __device__ __forceinline__ void read(typename StagedRow<X, Tile>::Vectors& v, const ForwardParams& p,
                                       const PackedParams<Acc>& packed, const RowIndex& row, int64_t begin, int cols) {
    x.wait();
    x.read_fetched(v, cols);
    if (packed.has(packed.kResidual)) {
      typename StagedRow<T, Tile, kVec>::Vectors u;
      input.read_fetched(u, cols);
#pragma unroll
      for (int i = 0; i < Tile::kVectors; ++i) v[i] = sum(u[i], v[i]);
      x.store(address<X>(p.sum, row) + begin, v, cols);
      if (x.is_aligned()) x.write(v);
    } else if (!x.is_aligned()) {
      x.release();
      x.write(v);
    }
  }

 private:
  __device__ __forceinline__ static Vector<X, kVec> sum(const Vector<T, kVec>& a, const Vector<X, kVec>& b) {
    AccOf<X> wide_a[kVec], wide_b[kVec];
    widen(wide_a, a);
    widen(wide_b, b);
#pragma unroll
    for (int e = 0; e < kVec; ++e) wide_a[e] += wide_b[e];
    return round_to<X>(wide_a);
  }
};

// The weight or the bias of this thread's columns.
template <class W, class Tile, int kVec>
struct Parameter {
  Vector<W, kVec> vectors[Tile::kVectors];

  __device__ __forceinline__ void load(const View& parameter, bool exists, const RowIndex& row, int64_t begin,
                                       const Position<Tile>& position, int cols, bool aligned) {
    if (!exists) return;
    const W* const src = address<const W>(parameter, {row.group, 0}) + begin + position.vector_index(0) * kVec;
    const int remaining = position.template remaining<kVec>(0, cols);
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      const int first = i * Tile::kLanes * kVec;
      if (aligned) {
        if (remaining > first) vectors[i] = *reinterpret_cast<const Vector<W, kVec>*>(src + first);
      } else {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          if (first + e < remaining) vectors[i].values[e] = src[first + e];
        }
      }
    }
  }

  __device__ __forceinline__ void set_zero() {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) vectors[i] = {};
  }
};

// A bias that is wider than x does not fit into the registers beside it, and is loaded after the moments.
template <class X, class W>
constexpr bool kLoadsBiasLate = (sizeof(W) > sizeof(X));

template <class Acc>
__device__ __forceinline__ Acc compute_rstd(const Moments<Acc>& row, const PackedParams<Acc>& packed) {
  return scaled_rstd(row.m2 * packed.cols.reciprocal, packed.eps, row.scale);
}

template <class Acc>
__device__ __forceinline__ void store_statistics(const ForwardParams& p, const PackedParams<Acc>& packed,
                                                 const RowIndex& row, const Moments<Acc>& moments, Acc rstd) {
  if (!packed.has(packed.kRms)) {
    *address<Acc>(p.mean, row) = (moments.pivot + moments.correction) * (moments.scale == 1 ? 1 : 1 / kScale<Acc>);
  }
  *address<Acc>(p.rstd, row) = rstd * moments.scale;
}

// Turns the x of a chunk into x * scale - pivot.
template <class Tile, int kVec, class Acc>
__device__ __forceinline__ void subtract_pivot(Acc (&x)[Tile::kVectors][kVec], const Moments<Acc>& row,
                                               const Position<Tile>& position, int cols) {
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) {
    if (!position.template warp_has_vector<kVec>(i, cols)) break;
#pragma unroll
    for (int e = 0; e < kVec; ++e) x[i][e] = fma(x[i][e], row.scale, -row.pivot);
  }
}

// Computes y from d = x * scale - pivot, where d + offset is x * scale - mean. The offset is added before any
// multiplication, so that the sum is exactly 0 for a constant row.
template <class T, class W, class Tile, int kVec, class Acc>
__device__ __forceinline__ void transform(Vector<T, kVec> (&y)[Tile::kVectors], const Acc (&d)[Tile::kVectors][kVec],
                                          const PackedParams<Acc>& packed, const Position<Tile>& position, int cols,
                                          Acc offset, Acc rstd, Parameter<W, Tile, kVec>& weight,
                                          Parameter<W, Tile, kVec>& bias) {
  const auto scale_and_shift = [&](auto has_bias, auto zero_centered) {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (!position.template warp_has_vector<kVec>(i, cols)) break;
      Acc w[kVec], b[kVec], result[kVec];
      widen(w, weight.vectors[i]);
      if (has_bias) widen(b, bias.vectors[i]);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const Acc xhat = (d[i][e] + offset) * rstd;
        result[e] = fma(xhat, zero_centered ? w[e] + 1 : w[e], has_bias ? b[e] : 0);
      }
      y[i] = round_to<T>(result);
    }
  };
  constexpr unsigned kBoth = packed.kWeight | packed.kBias;
  const unsigned mode = packed.flags & (kBoth | packed.kZeroCentered);
  if (mode == kBoth) {
    scale_and_shift(std::true_type{}, std::false_type{});
  } else if (mode == packed.kWeight) {
    scale_and_shift(std::false_type{}, std::false_type{});
  } else {  // a missing weight is a zero-centered weight of 0
    if (!packed.has(packed.kWeight)) weight.set_zero();
    if (!packed.has(packed.kBias)) bias.set_zero();
    scale_and_shift(std::true_type{}, std::true_type{});
  }
}

// ---- kernels --------------------------------------------------------------------------------------------------------

// Rows that fit into a tile. Types is that of dtypes.h.
template <class Types, class Tile>
__global__ void __launch_bounds__(Tile::kBlockThreads, 1)
    forward_rows(const ForwardParams p, const PackedParams<AccOf<typename Types::X>> packed) {
  using T = typename Types::T;
  using X = typename Types::X;
  using W = typename Types::W;
  using Acc = AccOf<X>;
  constexpr int kVec = kVectorSize<X>;
  const Position<Tile> position;
  // The last block may have rows that do not exist. They have no columns, and their vectors are zeros.
  const int64_t row_of_all = int64_t{blockIdx.x} * Tile::kRows + position.row;
  const bool exists = Tile::kRows == 1 || row_of_all < p.groups * p.rows;
  const RowIndex row = packed.find_group(row_of_all);
  const int cols = static_cast<int>(p.cols), existing_cols = exists ? cols : 0;
  extern __shared__ __align__(16) unsigned char shared[];
  const size_t bytes = StagedRow<X, Tile>::bytes(position.threads_per_row());
  unsigned char* const shared_x = shared + position.row * bytes;

  typename StagedRow<X, Tile>::Vectors v;
  Parameter<W, Tile, kVec> weight, bias;
  const auto load_bias = [&](bool aligned) {
    bias.load(p.bias, packed.has(packed.kBias), row, 0, position, existing_cols, aligned);
  };
  with_constant(packed.has(packed.kAligned), [&](auto aligned) {
    StagedInput<T, X, Tile> input(shared_x, shared_x + Tile::kRows * bytes, position, aligned);
    input.fetch(p, packed, row, 0, existing_cols);
    weight.load(p.weight, packed.has(packed.kWeight), row, 0, position, existing_cols, aligned);
    if (!kLoadsBiasLate<X, W>) load_bias(aligned);
    input.read(v, p, packed, row, 0, existing_cols);
  });

  const bool aligned = packed.has(packed.kAligned);
  const StagedRow<X, Tile> staged(shared_x, position, aligned);
  Acc x[Tile::kVectors][kVec], pivot;
  const int remaining = position.template remaining<kVec>(0, existing_cols);
  const auto moments =
      compute_moments<Tile>(x, v, pivot, position, cols, remaining, packed, [&](auto& v) { staged.read(v); });
  const Acc rstd = compute_rstd(moments, packed);
  if (position.thread == 0 && exists) store_statistics(p, packed, row, moments, rstd);
  if (kLoadsBiasLate<X, W>) load_bias(aligned);
  const Acc offset = Tile::kWarps > 1 ? (pivot - moments.pivot) - moments.correction : -moments.correction;
  StagedRow<T, Tile, kVec> output(shared_x, position, aligned);
  typename StagedRow<T, Tile, kVec>::Vectors y;
  transform(y, x, packed, position, cols, offset, rstd, weight, bias);
  output.store(address<T>(p.output, row), y, existing_cols);
}

// The tile of a chunk is smaller than the largest tile of a row, so that two blocks fit on a multiprocessor; one block
// alone would have too few bytes in flight. Each warp keeps moments of its own over all chunks.
struct ChunkTile : Tile<256> {
  static constexpr int kMinBlocksPerSM = 2;
  static constexpr bool kAllWarpsActive = false;  // some warps have no columns in the last chunk of a row
};
// The number of chunks that a block of a cluster keeps in shared memory, if they fit.
constexpr int kMaxStagedChunks = 10;

// For kernels that loop over chunks; parameters that are wider than the row take more registers.
template <class Types>
constexpr int kMinBlocksPerSM = sizeof(typename Types::W) > sizeof(typename Types::X) ? 1 : ChunkTile::kMinBlocksPerSM;

// A block's part of a row: columns [begin, begin + cols).
struct Part {
  int64_t row_of_all, begin;
  int cols;
  RowIndex row;

  template <class Acc>
  __device__ __forceinline__ Part(const ChunkLayout& layout, const PackedParams<Acc>& packed, int64_t row_cols)
      : row_of_all(int64_t{layout.first_row + blockIdx.y}),
        begin(int64_t{layout.chunk_cols * layout.chunks_per_part} * blockIdx.x),
        cols(static_cast<int>(min(row_cols - begin, int64_t{layout.chunk_cols * layout.chunks_per_part}))),
        row(packed.find_group(row_of_all)) {}

  // Calls f(first column of the chunk in the part, number of columns, index of the chunk) for each chunk.
  template <class F>
  __device__ __forceinline__ void for_each_chunk(const ChunkLayout& layout, const F& f) const {
    int index = 0;
    for (int begin = 0; begin < cols; begin += layout.chunk_cols)
      f(begin, min(cols - begin, layout.chunk_cols), index++);
  }
};

// Merges the moments of up to kMax parts of a row, in an order that depends only on their number.
template <int kMax, class Acc>
__device__ __forceinline__ Moments<Acc> merge_parts(const Moments<Acc>* part_moments, unsigned num_parts,
                                                    const Divisor<Acc>& cols) {
  const unsigned lane = threadIdx.x % kWarpSize;
  Moments<Acc> own = {0, 0, 0, 0, 1};
  if (lane < num_parts) own = part_moments[lane];
  if constexpr (kMax > kWarpSize) {
    for (unsigned i = lane + kWarpSize; i < num_parts; i += kWarpSize) own = merge(own, part_moments[i]);
  }
  return merge_scaled_lanes<kWarpSize>(own, cols);
}

// Merges the moments of the block's warps.
template <class Acc>
__device__ __forceinline__ Moments<Acc> merge_warps(const Moments<Acc>& own, const Position<ChunkTile>& position,
                                                    int cols) {
  return merge_scaled_lanes<ChunkTile::kWarps>(exchange_warps(own, position), make_divisor(static_cast<Acc>(cols)));
}

// A chunk in shared memory. The input of a residual comes first, and all chunks share it.
template <class T, class X>
__device__ __forceinline__ StagedInput<T, X, ChunkTile> staged_chunk(unsigned char* shared, int index, bool aligned) {
  const Position<ChunkTile> position;
  const size_t bytes = StagedRow<X, ChunkTile>::bytes(position.threads_per_row());
  return {shared + (1 + index) * bytes, shared, position, aligned};
}

// The moments of a part. If `keep` is true, its chunks stay in shared memory, else each chunk overwrites the previous.
template <class T, class X>
__device__ __forceinline__ Moments<AccOf<X>> compute_part_moments(const ForwardParams& p,
                                                                  const PackedParams<AccOf<X>>& packed,
                                                                  const ChunkLayout& layout, const Part& part,
                                                                  unsigned char* shared, bool keep) {
  using Acc = AccOf<X>;
  constexpr int kVec = kVectorSize<X>;
  const Position<ChunkTile> position;
  Moments<Acc> own;  // of this warp's columns in all chunks: the warps do not wait for each other
  part.for_each_chunk(layout, [&](int begin, int cols, int index) {
    typename StagedRow<X, ChunkTile>::Vectors v;
    with_constant(packed.has(packed.kAligned), [&](auto aligned) {
      auto input = staged_chunk<T, X>(shared, keep ? index : 0, aligned);
      input.fetch(p, packed, part.row, part.begin + begin, cols);
      input.read(v, p, packed, part.row, part.begin + begin, cols);
    });
    const auto staged = staged_chunk<T, X>(shared, keep ? index : 0, packed.has(packed.kAligned)).x;
    Acc x[ChunkTile::kVectors][kVec], pivot;
    const int remaining = position.template remaining<kVec>(0, cols);
    const auto chunk_moments =
        compute_moments<ChunkTile>(x, v, pivot, position, cols, remaining, packed, [&](auto& v) { staged.read(v); });
    if (index == 0) {
      own = chunk_moments;
    } else if (position.template warp_has_vector<kVec>(0, cols)) {
      own = merge(own, chunk_moments);
    }
    staged.release();
  });
  return merge_warps(own, position, part.cols);
}

// Stores a part of the output, from the chunks in shared memory if `kept` is true, else from the input.
template <class Types>
__device__ __forceinline__ void store_part(const ForwardParams& p, const PackedParams<AccOf<typename Types::X>>& packed,
                                           const ChunkLayout& layout, const Part& part,
                                           const Moments<AccOf<typename Types::X>>& moments, unsigned char* shared,
                                           bool kept) {
  using T = typename Types::T;
  using X = typename Types::X;
  using Acc = AccOf<X>;
  constexpr int kVec = kVectorSize<X>;
  const Position<ChunkTile> position;
  const Acc rstd = compute_rstd(moments, packed);
  if (part.begin == 0 && position.thread == 0) store_statistics(p, packed, part.row, moments, rstd);
  const X* const input = address<const X>(p.input, part.row) + part.begin;
  T* const output = address<T>(p.output, part.row) + part.begin;
  part.for_each_chunk(layout, [&](int begin, int cols, int index) {
    Parameter<typename Types::W, ChunkTile, kVec> weight, bias;
    typename StagedRow<X, ChunkTile>::Vectors v;
    const auto staged_x = [&](bool aligned) { return staged_chunk<T, X>(shared, kept ? index : 0, aligned).x; };
    with_constant(packed.has(packed.kAligned), [&](auto aligned) {
      auto staged = staged_x(aligned);
      if (!kept) staged.fetch(input + begin, cols);
      weight.load(p.weight, packed.has(packed.kWeight), part.row, part.begin + begin, position, cols, aligned);
      bias.load(p.bias, packed.has(packed.kBias), part.row, part.begin + begin, position, cols, aligned);
      if (kept) {
        staged.read(v);
      } else {
        staged.wait();
        staged.read_fetched(v, cols);
      }
    });
    Acc x[ChunkTile::kVectors][kVec];
#pragma unroll
    for (int i = 0; i < ChunkTile::kVectors; ++i) widen(x[i], v[i]);
    subtract_pivot<ChunkTile>(x, moments, position, cols);
    typename StagedRow<T, ChunkTile, kVec>::Vectors y;
    transform(y, x, packed, position, cols, -moments.correction, rstd, weight, bias);
    const bool aligned = packed.has(packed.kAligned);
    const StagedRow<T, ChunkTile, kVec> staged(staged_x(aligned).data(), position, aligned);
    staged.store(output + begin, y, cols);
    if (!kept) staged.release();
  });
}

// Merges the moments of the parts that the blocks of a cluster hold. The kernel must have called cluster_arrive().
template <class Acc>
__device__ __forceinline__ Moments<Acc> exchange_parts(const Moments<Acc>& own, const ChunkLayout& layout,
                                                       const PackedParams<Acc>& packed) {
  __shared__ Moments<Acc> part_moments[kMaxClusterSize];
  cluster_wait();  // all blocks have started
  if (threadIdx.x < layout.num_parts) *cluster_peer(&part_moments[cluster_rank()], threadIdx.x) = own;
  cluster_arrive();
  cluster_wait();
  return merge_parts<kMaxClusterSize>(part_moments, layout.num_parts, packed.cols);
}

// Each block of a cluster keeps a part of a row in shared memory.
template <class Types>
__global__ void __launch_bounds__(ChunkTile::kBlockThreads, kMinBlocksPerSM<Types>)
    forward_in_cluster(const ForwardParams p, const ChunkLayout layout,
                       const PackedParams<AccOf<typename Types::X>> packed) {
  const Part part(layout, packed, p.cols);
  extern __shared__ __align__(16) unsigned char shared[];
  cluster_arrive();
  const auto own = compute_part_moments<typename Types::T, typename Types::X>(p, packed, layout, part, shared, true);
  const auto moments = exchange_parts(own, layout, packed);
  store_part<Types>(p, packed, layout, part, moments, shared, true);
}

// Each block writes the moments of a part to the workspace [groups * rows, num_parts].
template <class T, class X>
__global__ void __launch_bounds__(ChunkTile::kBlockThreads, ChunkTile::kMinBlocksPerSM)
    forward_moments(const ForwardParams p, const ChunkLayout layout, const PackedParams<AccOf<X>> packed) {
  const Part part(layout, packed, p.cols);
  extern __shared__ __align__(16) unsigned char shared[];
  const auto own = compute_part_moments<T, X>(p, packed, layout, part, shared, false);
  auto* const part_moments = static_cast<Moments<AccOf<X>>*>(p.workspace) + part.row_of_all * layout.num_parts;
  if (threadIdx.x == 0) part_moments[blockIdx.x] = own;
  let_next_grid_start();
}

// Each block computes a part of the output from the moments in the workspace. The input is x.
template <class Types>
__global__ void __launch_bounds__(ChunkTile::kBlockThreads, kMinBlocksPerSM<Types>)
    forward_output(const ForwardParams p, const ChunkLayout layout,
                   const PackedParams<AccOf<typename Types::X>> packed) {
  using Acc = AccOf<typename Types::X>;
  const Part part(layout, packed, p.cols);
  extern __shared__ __align__(16) unsigned char shared[];
  wait_for_previous_grid();
  const auto* const part_moments = static_cast<const Moments<Acc>*>(p.workspace) + part.row_of_all * layout.num_parts;
  const auto moments = merge_parts<kMaxParts>(part_moments, layout.num_parts, packed.cols);
  store_part<Types>(p, packed, layout, part, moments, shared, false);
}

// ---- host code ------------------------------------------------------------------------------------------------------

template <class X>
ChunkLayout make_chunk_layout(int64_t cols) {
  const int64_t vectors = ceil_div(cols, kVectorSize<X>);
  const int64_t chunk = ceil_div(ceil_div(vectors, ceil_div(vectors, kMaxChunkVectors)), kWarpSize) * kWarpSize;
  const int64_t num_chunks = ceil_div(vectors, chunk);
  const int64_t num_parts = num_chunks <= kMaxClusterSize * kMaxStagedChunks ? kMaxClusterSize : kMaxParts;
  const int64_t chunks_per_part = ceil_div(num_chunks, num_parts);
  return {static_cast<int>(chunk * kVectorSize<X>), static_cast<int>(chunks_per_part),
          static_cast<unsigned>(ceil_div(num_chunks, chunks_per_part)), 0};
}

// The dynamic shared memory of a block that holds so many chunks, and one chunk of the input of a residual.
template <class X>
size_t chunk_bytes(const ChunkLayout& layout, int chunks) {
  return (1 + chunks) * StagedRow<X, ChunkTile>::bytes(block_threads<ChunkTile, X>(layout.chunk_cols));
}

template <class Types>
bool fits_cluster(const ChunkLayout& layout) {
  using X = typename Types::X;
  if constexpr (sizeof(X) == 8) {
    return false;
  } else {
    constexpr size_t kStaticBytes = (kMaxClusterSize + ChunkTile::kWarps) * sizeof(Moments<AccOf<X>>);
    return layout.num_parts <= kMaxClusterSize && has_clusters(forward_in_cluster<Types>) &&
           chunk_bytes<X>(layout, layout.chunks_per_part) + kStaticBytes <= max_shared_memory();
  }
}

template <class Types>
constexpr bool kFewTiles = !std::is_same_v<typename Types::T, typename Types::X>;

// Whether all rows consist of whole vectors that are aligned in every array.
template <class T, class X, class W>
bool has_aligned_vectors(const ForwardParams& p) {
  return p.cols * static_cast<int64_t>(sizeof(T)) % 16 == 0 && is_aligned<T>(p.input) && is_aligned<X>(p.residual) &&
         is_aligned<X>(p.sum) && is_aligned<T>(p.output) && is_aligned<W>(p.weight) && is_aligned<W>(p.bias);
}

}  // namespace

int64_t forward_workspace(const ForwardParams& p) {
  if (p.channels_first) return 0;
  int64_t bytes = 0;
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using Types = decltype(types);
    using X = typename Types::X;
    if (dispatch_tile<X, kFewTiles<Types>>(p.cols, [](auto) {})) return;
    const ChunkLayout layout = make_chunk_layout<X>(p.cols);
    if (fits_cluster<Types>(layout)) return;
    bytes = p.groups * p.rows * layout.num_parts * static_cast<int64_t>(sizeof(Moments<AccOf<X>>));
  });
  return bytes;
}

void forward(const ForwardParams& p) {
  if (p.channels_first) return channels_first_forward(p);
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using Types = decltype(types);
    using X = typename Types::X;
    const int64_t all_rows = p.groups * p.rows;
    const bool aligned = has_aligned_vectors<typename Types::T, X, typename Types::W>(p);
    const PackedParams<AccOf<X>> packed(p, aligned);
    const auto stream = static_cast<Stream>(p.stream);
    const bool is_tile = dispatch_tile<X, kFewTiles<Types>>(p.cols, [&](auto tile) {
      using Tile = decltype(tile);
      const unsigned threads = block_threads<Tile, X>(p.cols);
      const unsigned blocks = static_cast<unsigned>(ceil_div(all_rows, Tile::kRows));
      const size_t bytes = (p.residual.data ? 2 : 1) * Tile::kRows * StagedRow<X, Tile>::bytes(threads / Tile::kRows);
      launch({blocks, threads, bytes, stream}, forward_rows<Types, Tile>, p, packed);
    });
    if (is_tile) return;
    ChunkLayout layout = make_chunk_layout<X>(p.cols);
    const bool in_cluster = fits_cluster<Types>(layout);
    const size_t bytes = chunk_bytes<X>(layout, in_cluster ? layout.chunks_per_part : 1);
    for (; layout.first_row < all_rows; layout.first_row += static_cast<unsigned>(kMaxGridY)) {
      const int64_t rows = std::min(all_rows - layout.first_row, kMaxGridY);
      const dim3 grid(layout.num_parts, static_cast<unsigned>(rows));
      LaunchConfig config = {grid, block_threads<ChunkTile, X>(layout.chunk_cols), bytes, stream};
      if constexpr (sizeof(X) < 8) {
        if (in_cluster) {
          config.cluster = layout.num_parts;
          launch(config, forward_in_cluster<Types>, p, layout, packed);
          continue;
        }
      }
      launch(config, forward_moments<typename Types::T, X>, p, layout, packed);
      ForwardParams second = p;
      if (p.residual.data) second.input = p.sum, second.residual = {};
      config.overlaps_previous = true;
      launch(config, forward_output<Types>, second, layout, PackedParams<AccOf<X>>(second, aligned));
    }
  });
}

}  // namespace layernorm::cuda
