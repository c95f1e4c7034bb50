// y = (x - mean) * rstd * weight + bias for every row of x [rows, cols] on a GPU. RMSNorm's mean is 0.
//
// Most rows fit into a tile, which a few threads or a block hold in registers. They are read and written once:
// 2 * rows * cols * sizeof(T) bytes are moved, the minimum. Longer rows are divided into chunks of a tile's size, and
// the chunks into parts, one for each block. From compute capability 9.0 on, a cluster of up to 8 blocks keeps its
// parts in shared memory and exchanges their moments. Still longer rows, and those on older GPUs, are read twice: by
// one kernel for the moments of the parts and by another for the output.
//
// The numerical method is that of the CPU kernels (cpu/forward.cpp): the mean is rounded, the average of x - mean is
// its error to full precision, and this correction enters the mean, the variance and the output. Each warp has its own
// mean; the formula of Chan, Golub and LeVeque merges the moments of the warps with one exchange. The division of a row
// depends only on the dtype and the number of columns, and so do the results.
//
// A residual is added when a row is loaded. A row that is read again is read as the sum.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467. Chan, Golub and LeVeque,
// Updating formulae and a pairwise algorithm for computing sample variances, 1979.
#include <algorithm>

#include "../dtypes.h"
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
  static constexpr unsigned kAligned = 1, kResidual = 2, kWeight = 4, kBias = 8, kZeroCentered = 16, kRms = 32;
  unsigned flags;
  Acc eps;
  Divisor<Acc> cols;

  PackedParams(const ForwardParams& p, bool aligned)
      : flags((aligned ? kAligned : 0) | (p.residual ? kResidual : 0) | (p.weight ? kWeight : 0) |
              (p.bias ? kBias : 0) | (p.zero_centered_weight ? kZeroCentered : 0) | (p.rms ? kRms : 0)),
        eps(static_cast<Acc>(p.eps)),
        cols{static_cast<Acc>(p.cols), 1 / static_cast<Acc>(p.cols)} {}
  __device__ __forceinline__ bool has(unsigned flag) const { return flags & flag; }
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

// The input and the residual of a tile in shared memory. The sum replaces the input.
template <class T, class Tile>
struct StagedInput {
  StagedRow<T, Tile> x, residual;

  __device__ __forceinline__ StagedInput(void* x, void* residual, const Position<Tile>& position, bool aligned)
      : x(x, position, aligned), residual(residual, position, aligned) {}

  // Starts to load columns [begin, begin + cols) of a row.
  template <class Acc>
  __device__ __forceinline__ void fetch(const ForwardParams& p, const PackedParams<Acc>& packed, int64_t row,
                                        int64_t begin, int cols) {
    x.fetch(static_cast<const T*>(p.input) + row * p.input_stride + begin, cols);
    if (packed.has(packed.kResidual)) {
      residual.fetch(static_cast<const T*>(p.residual) + row * p.residual_stride + begin, cols);
    }
  }

  // Reads the fetched columns so that x.read() can read them again. Adds the residual and stores the sum.
  template <class Acc>
  __device__ __forceinline__ void read(typename StagedRow<T, Tile>::Vectors& v, const ForwardParams& p,
                                       const PackedParams<Acc>& packed, int64_t row, int64_t begin, int cols) {
    x.wait();
    x.read_fetched(v, cols);
    const bool has_residual = packed.has(packed.kResidual);
    if (has_residual) {
      typename StagedRow<T, Tile>::Vectors r;
      residual.read_fetched(r, cols);
#pragma unroll
      for (int i = 0; i < Tile::kVectors; ++i) v[i] = sum(v[i], r[i]);
      residual.store(static_cast<T*>(p.sum) + row * p.cols + begin, v, cols);
    }
    if (x.is_aligned() && !has_residual) return;
    x.release();
    x.write(v);
  }

 private:
  static constexpr int kVec = kVectorSize<T>;
  __device__ __forceinline__ static Vector<T, kVec> sum(const Vector<T, kVec>& a, const Vector<T, kVec>& b) {
    AccOf<T> wide_a[kVec], wide_b[kVec];
    widen(wide_a, a);
    widen(wide_b, b);
#pragma unroll
    for (int e = 0; e < kVec; ++e) wide_a[e] += wide_b[e];
    return round_to<T>(wide_a);
  }
};

// The weight or the bias of this thread's columns.
template <class T, class W, class Tile>
struct Parameter {
  static constexpr int kVec = kVectorSize<T>;
  Vector<W, kVec> vectors[Tile::kVectors];

  __device__ __forceinline__ void load(const void* parameter, bool exists, int64_t begin,
                                       const Position<Tile>& position, int cols, bool aligned) {
    if (!exists) return;
    const W* const src = static_cast<const W*>(parameter) + begin + position.vector_index(0) * kVec;
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

// A bias that is wider than the row does not fit into the registers beside it, and is loaded after the moments.
template <class T, class W>
constexpr bool kLoadsBiasLate = (sizeof(W) > sizeof(T));

template <class Acc>
__device__ __forceinline__ Acc compute_rstd(const Moments<Acc>& row, const PackedParams<Acc>& packed) {
  return scaled_rstd(row.m2 * packed.cols.reciprocal, packed.eps, row.scale);
}

template <class Acc>
__device__ __forceinline__ void store_statistics(const ForwardParams& p, const PackedParams<Acc>& packed, int64_t row,
                                                 const Moments<Acc>& moments, Acc rstd) {
  if (!packed.has(packed.kRms)) {
    static_cast<Acc*>(p.mean)[row] = (moments.pivot + moments.correction) * (moments.scale == 1 ? 1 : 1 / kScale<Acc>);
  }
  static_cast<Acc*>(p.rstd)[row] = rstd * moments.scale;
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
                                          Acc offset, Acc rstd, Parameter<T, W, Tile>& weight,
                                          Parameter<T, W, Tile>& bias) {
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

// Computes y of a row that is one tile, or of columns [begin, begin + cols) of a row that are one chunk.
// `existing_cols` is 0 for a row that does not exist. row_moments(own) returns the row's moments from the tile's.
template <class T, class W, class Tile, class F>
__device__ __forceinline__ void forward_tile(const ForwardParams& p, const PackedParams<AccOf<T>>& packed,
                                             const Position<Tile>& position, void* shared_x, void* shared_residual,
                                             int64_t row, int64_t begin, int cols, int existing_cols,
                                             const F& row_moments) {
  using Acc = AccOf<T>;
  constexpr int kVec = kVectorSize<T>;
  typename StagedRow<T, Tile>::Vectors v;
  Parameter<T, W, Tile> weight, bias;
  with_constant(packed.has(packed.kAligned), [&](auto aligned) {
    StagedInput<T, Tile> input(shared_x, shared_residual, position, aligned);
    input.fetch(p, packed, row, begin, existing_cols);
    weight.load(p.weight, packed.has(packed.kWeight), begin, position, existing_cols, aligned);
    if (!kLoadsBiasLate<T, W>) bias.load(p.bias, packed.has(packed.kBias), begin, position, existing_cols, aligned);
    input.read(v, p, packed, row, begin, existing_cols);
  });

  StagedRow<T, Tile> staged(shared_x, position, packed.has(packed.kAligned));
  Acc x[Tile::kVectors][kVec], pivot;
  const int remaining = position.template remaining<kVec>(0, existing_cols);
  const auto own =
      compute_moments<Tile>(x, v, pivot, position, cols, remaining, packed, [&](auto& v) { staged.read(v); });
  const auto moments = row_moments(own);
  const Acc rstd = compute_rstd(moments, packed);
  if (begin == 0 && position.thread == 0 && (Tile::kRows == 1 || existing_cols > 0)) {
    store_statistics(p, packed, row, moments, rstd);
  }
  if (kLoadsBiasLate<T, W>) {
    bias.load(p.bias, packed.has(packed.kBias), begin, position, existing_cols, packed.has(packed.kAligned));
  }
  if constexpr (!Tile::kAllWarpsActive) subtract_pivot<Tile>(x, moments, position, cols);
  const Acc offset =
      Tile::kAllWarpsActive && Tile::kWarps > 1 ? (pivot - moments.pivot) - moments.correction : -moments.correction;
  transform(v, x, packed, position, cols, offset, rstd, weight, bias);
  staged.store(static_cast<T*>(p.output) + row * p.cols + begin, v, existing_cols);
}

// Rows that fit into a tile.
template <class T, class W, class Tile>
__global__ void __launch_bounds__(Tile::kBlockThreads, 1)
    forward_rows(const ForwardParams p, const PackedParams<AccOf<T>> packed) {
  const Position<Tile> position;
  // The last block may have rows that do not exist. They have no columns, and their vectors are zeros.
  const int64_t row = int64_t{blockIdx.x} * Tile::kRows + position.row;
  const int cols = static_cast<int>(p.cols), existing_cols = Tile::kRows == 1 || row < p.rows ? cols : 0;
  extern __shared__ __align__(16) unsigned char shared[];
  const size_t bytes = StagedRow<T, Tile>::bytes(position.threads_per_row());
  unsigned char* const shared_x = shared + position.row * bytes;
  forward_tile<T, W>(p, packed, position, shared_x, shared_x + Tile::kRows * bytes, row, 0, cols, existing_cols,
                     [](const auto& own) { return own; });
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
template <class T, class W>
constexpr int kMinBlocksPerSM = sizeof(W) > sizeof(T) ? 1 : ChunkTile::kMinBlocksPerSM;

// A block's part of a row: columns [begin, begin + cols).
struct Part {
  int64_t row, begin;
  int cols;

  __device__ __forceinline__ Part(const ChunkLayout& layout, int64_t row_cols)
      : row(int64_t{layout.first_row + blockIdx.y}),
        begin(int64_t{layout.chunk_cols * layout.chunks_per_part} * blockIdx.x) {
    cols = static_cast<int>(min(row_cols - begin, int64_t{layout.chunk_cols * layout.chunks_per_part}));
  }

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

// A chunk in shared memory. The residual comes first, and all chunks share it.
template <class T>
__device__ __forceinline__ StagedInput<T, ChunkTile> staged_chunk(unsigned char* shared, int index, bool aligned) {
  const Position<ChunkTile> position;
  const size_t bytes = StagedRow<T, ChunkTile>::bytes(position.threads_per_row());
  return {shared + (1 + index) * bytes, shared, position, aligned};
}

// The moments of a part. If `keep` is true, its chunks stay in shared memory, else each chunk overwrites the previous.
template <class T>
__device__ __forceinline__ Moments<AccOf<T>> compute_part_moments(const ForwardParams& p,
                                                                  const PackedParams<AccOf<T>>& packed,
                                                                  const ChunkLayout& layout, const Part& part,
                                                                  unsigned char* shared, bool keep) {
  using Acc = AccOf<T>;
  constexpr int kVec = kVectorSize<T>;
  const Position<ChunkTile> position;
  Moments<Acc> own;  // of this warp's columns in all chunks: the warps do not wait for each other
  part.for_each_chunk(layout, [&](int begin, int cols, int index) {
    typename StagedRow<T, ChunkTile>::Vectors v;
    with_constant(packed.has(packed.kAligned), [&](auto aligned) {
      auto input = staged_chunk<T>(shared, keep ? index : 0, aligned);
      input.fetch(p, packed, part.row, part.begin + begin, cols);
      input.read(v, p, packed, part.row, part.begin + begin, cols);
    });
    const auto staged = staged_chunk<T>(shared, keep ? index : 0, packed.has(packed.kAligned)).x;
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
template <class T, class W>
__device__ __forceinline__ void store_part(const ForwardParams& p, const PackedParams<AccOf<T>>& packed,
                                           const ChunkLayout& layout, const Part& part,
                                           const Moments<AccOf<T>>& moments, unsigned char* shared, bool kept) {
  using Acc = AccOf<T>;
  constexpr int kVec = kVectorSize<T>;
  const Position<ChunkTile> position;
  const Acc rstd = compute_rstd(moments, packed);
  if (part.begin == 0 && position.thread == 0) store_statistics(p, packed, part.row, moments, rstd);
  const T* const input = static_cast<const T*>(p.input) + part.row * p.input_stride + part.begin;
  T* const output = static_cast<T*>(p.output) + part.row * p.cols + part.begin;
  part.for_each_chunk(layout, [&](int begin, int cols, int index) {
    Parameter<T, W, ChunkTile> weight, bias;
    typename StagedRow<T, ChunkTile>::Vectors v;
    with_constant(packed.has(packed.kAligned), [&](auto aligned) {
      auto staged = staged_chunk<T>(shared, kept ? index : 0, aligned).x;
      if (!kept) staged.fetch(input + begin, cols);
      weight.load(p.weight, packed.has(packed.kWeight), part.begin + begin, position, cols, aligned);
      bias.load(p.bias, packed.has(packed.kBias), part.begin + begin, position, cols, aligned);
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
    transform(v, x, packed, position, cols, -moments.correction, rstd, weight, bias);
    auto staged = staged_chunk<T>(shared, kept ? index : 0, packed.has(packed.kAligned)).x;
    staged.store(output + begin, v, cols);
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

// Each block of a cluster keeps a part of one chunk in registers.
template <class T, class W>
__global__ void __launch_bounds__(ChunkTile::kBlockThreads, ChunkTile::kMinBlocksPerSM)
    forward_chunk_in_cluster(const ForwardParams p, const ChunkLayout layout, const PackedParams<AccOf<T>> packed) {
  const Part part(layout, p.cols);
  const Position<ChunkTile> position;
  extern __shared__ __align__(16) unsigned char shared[];
  cluster_arrive();
  forward_tile<T, W>(p, packed, position, shared + StagedRow<T, ChunkTile>::bytes(position.threads_per_row()), shared,
                     part.row, part.begin, part.cols, part.cols, [&](const auto& own) {
                       return exchange_parts(merge_warps(own, position, part.cols), layout, packed);
                     });
}

// Each block of a cluster keeps a part of several chunks in shared memory.
template <class T, class W>
__global__ void __launch_bounds__(ChunkTile::kBlockThreads, kMinBlocksPerSM<T, W>)
    forward_in_cluster(const ForwardParams p, const ChunkLayout layout, const PackedParams<AccOf<T>> packed) {
  const Part part(layout, p.cols);
  extern __shared__ __align__(16) unsigned char shared[];
  cluster_arrive();
  const auto own = compute_part_moments<T>(p, packed, layout, part, shared, true);
  const auto moments = exchange_parts(own, layout, packed);
  store_part<T, W>(p, packed, layout, part, moments, shared, true);
}

// Each block writes the moments of a part to the workspace [rows, num_parts].
template <class T>
__global__ void __launch_bounds__(ChunkTile::kBlockThreads, ChunkTile::kMinBlocksPerSM)
    forward_moments(const ForwardParams p, const ChunkLayout layout, const PackedParams<AccOf<T>> packed) {
  const Part part(layout, p.cols);
  extern __shared__ __align__(16) unsigned char shared[];
  const auto own = compute_part_moments<T>(p, packed, layout, part, shared, false);
  if (threadIdx.x == 0) static_cast<Moments<AccOf<T>>*>(p.workspace)[part.row * layout.num_parts + blockIdx.x] = own;
  let_next_grid_start();
}

// Each block computes a part of the output from the moments in the workspace.
template <class T, class W>
__global__ void __launch_bounds__(ChunkTile::kBlockThreads, kMinBlocksPerSM<T, W>)
    forward_output(const ForwardParams p, const ChunkLayout layout, const PackedParams<AccOf<T>> packed) {
  const Part part(layout, p.cols);
  extern __shared__ __align__(16) unsigned char shared[];
  wait_for_previous_grid();
  const auto* const part_moments = static_cast<const Moments<AccOf<T>>*>(p.workspace) + part.row * layout.num_parts;
  const auto moments = merge_parts<kMaxParts>(part_moments, layout.num_parts, packed.cols);
  store_part<T, W>(p, packed, layout, part, moments, shared, false);
}

// ---- host code ------------------------------------------------------------------------------------------------------

template <class T>
ChunkLayout make_chunk_layout(int64_t cols) {
  const int64_t vectors = ceil_div(cols, kVectorSize<T>);
  const int64_t chunk = ceil_div(ceil_div(vectors, ceil_div(vectors, kMaxChunkVectors)), kWarpSize) * kWarpSize;
  const int64_t num_chunks = ceil_div(vectors, chunk);
  const int64_t num_parts = num_chunks <= kMaxClusterSize * kMaxStagedChunks ? kMaxClusterSize : kMaxParts;
  const int64_t chunks_per_part = ceil_div(num_chunks, num_parts);
  return {static_cast<int>(chunk * kVectorSize<T>), static_cast<int>(chunks_per_part),
          static_cast<unsigned>(ceil_div(num_chunks, chunks_per_part)), 0};
}

// The dynamic shared memory of a block that holds so many chunks, and one chunk of a residual.
template <class T>
size_t chunk_bytes(const ChunkLayout& layout, int chunks) {
  return (1 + chunks) * StagedRow<T, ChunkTile>::bytes(block_threads<ChunkTile, T>(layout.chunk_cols));
}

template <class T, class W>
bool fits_cluster(const ChunkLayout& layout) {
  if constexpr (sizeof(T) == 8) {
    return false;
  } else {
    constexpr size_t kStaticBytes = (kMaxClusterSize + ChunkTile::kWarps) * sizeof(Moments<AccOf<T>>);
    return layout.num_parts <= kMaxClusterSize && has_clusters(forward_in_cluster<T, W>) &&
           chunk_bytes<T>(layout, layout.chunks_per_part) + kStaticBytes <= max_shared_memory();
  }
}

}  // namespace

int64_t forward_workspace(const ForwardParams& p) {
  int64_t bytes = 0;
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    if (dispatch_tile<T>(p.cols, [](auto) {})) return;
    const ChunkLayout layout = make_chunk_layout<T>(p.cols);
    if (fits_cluster<T, W>(layout)) return;
    bytes = p.rows * layout.num_parts * static_cast<int64_t>(sizeof(Moments<AccOf<T>>));
  });
  return bytes;
}

void forward(const ForwardParams& p) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    // The rows of the output are aligned only if they are whole vectors. So are those of the sum, unless it is the
    // residual.
    const bool aligned = is_aligned<T>(p.input, p.input_stride) && is_aligned<T>(p.residual, p.residual_stride) &&
                         is_aligned<T>(p.output, p.cols) && is_aligned<W>(p.weight, 0) && is_aligned<W>(p.bias, 0);
    const PackedParams<AccOf<T>> packed(p, aligned);
    const auto stream = static_cast<Stream>(p.stream);
    const bool is_tile = dispatch_tile<T>(p.cols, [&](auto tile) {
      using Tile = decltype(tile);
      const unsigned threads = block_threads<Tile, T>(p.cols);
      const unsigned blocks = static_cast<unsigned>(ceil_div(p.rows, Tile::kRows));
      const size_t bytes = (p.residual ? 2 : 1) * Tile::kRows * StagedRow<T, Tile>::bytes(threads / Tile::kRows);
      launch({blocks, threads, bytes, stream}, forward_rows<T, W, Tile>, p, packed);
    });
    if (is_tile) return;
    ChunkLayout layout = make_chunk_layout<T>(p.cols);
    const bool in_cluster = fits_cluster<T, W>(layout);
    const size_t bytes = chunk_bytes<T>(layout, in_cluster ? layout.chunks_per_part : 1);
    for (; layout.first_row < p.rows; layout.first_row += static_cast<unsigned>(kMaxGridY)) {
      const int64_t rows = std::min(p.rows - layout.first_row, kMaxGridY);
      const dim3 grid(layout.num_parts, static_cast<unsigned>(rows));
      LaunchConfig config = {grid, block_threads<ChunkTile, T>(layout.chunk_cols), bytes, stream};
      if constexpr (sizeof(T) < 8) {
        if (in_cluster) {
          config.cluster = layout.num_parts;
          const bool is_chunk = layout.chunks_per_part == 1;
          launch(config, is_chunk ? forward_chunk_in_cluster<T, W> : forward_in_cluster<T, W>, p, layout, packed);
          continue;
        }
      }
      launch(config, forward_moments<T>, p, layout, packed);
      ForwardParams second = p;
      if (p.residual) second.input = p.sum, second.input_stride = p.cols, second.residual = nullptr;
      config.overlaps_previous = true;
      launch(config, forward_output<T, W>, second, layout, PackedParams<AccOf<T>>(second, aligned));
    }
  });
}

}  // namespace layernorm::cuda
