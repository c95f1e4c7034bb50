// y = (x - mean) * rstd * weight + bias for every row of x [rows, cols], on a GPU. RMSNorm's mean is 0.
//
// A tile is what a few threads, or a block, hold in registers. Most rows are tiles, and read and written once:
// 2 * rows * cols * sizeof(T) bytes are moved, the least there is. Longer rows are cut into chunks of that size, and
// these are shared out in parts to blocks. From compute capability 9.0 on, up to 8 blocks of a cluster keep their parts
// in shared memory and exchange their moments there; still longer rows, and those on older GPUs, are read twice, by
// one kernel for the moments of the parts and one for the output.
//
// Exactness is that of the CPU kernels (cpu/forward.cpp): the mean as first computed is off by its rounding; the
// average of x - mean is that error to full precision, and corrects the mean, the variance and the output. Each warp
// has a mean of its own, and their moments are merged by the formula of Chan, Golub and LeVeque, which takes one
// exchange. How a row is cut depends on the dtype and the number of columns alone, and so do its results.
//
// A residual is added to a row as it is loaded; another look at the row is one at the sum.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467. Chan, Golub and LeVeque,
// Updating formulae and a pairwise algorithm for computing sample variances, 1979.
#include <algorithm>

#include "../dtypes.h"
#include "image.cuh"

namespace layernorm::cuda {

// How rows of more than a tile are cut: into chunks of so many columns, and parts of so many chunks.
struct Cut {
  int chunk, chunks_of_part;
  unsigned parts;
  unsigned first_row;  // of a launch: 2^32 rows that are cut would be 128 TiB
};

// Division by a whole number.
template <class Acc>
struct Divisor {
  Acc number, reciprocal;

  // To the nearest, which makes a sum of equal numbers that number again; NaN for infinity.
  __device__ __forceinline__ Acc divide(Acc x) const { return average(x, number, reciprocal); }
};

// What the kernels ask of ForwardParams, as it takes fewest instructions: a bit takes one, a pointer three.
template <class Acc>
struct Known {
  static constexpr unsigned kAligned = 1, kResidual = 2, kWeight = 4, kBias = 8, kZeroCentered = 16, kRms = 32;
  unsigned flags;
  Acc eps;
  Divisor<Acc> cols;

  Known(const ForwardParams& p, bool aligned)
      : flags((aligned ? kAligned : 0) | (p.residual ? kResidual : 0) | (p.weight ? kWeight : 0) |
              (p.bias ? kBias : 0) | (p.zero_centered_weight ? kZeroCentered : 0) | (p.rms ? kRms : 0)),
        eps(static_cast<Acc>(p.eps)),
        cols{static_cast<Acc>(p.cols), 1 / static_cast<Acc>(p.cols)} {}
  __device__ __forceinline__ bool is(unsigned flag) const { return flags & flag; }
  __device__ __forceinline__ bool aligned() const { return is(kAligned); }
};

namespace {

// ---- moments --------------------------------------------------------------------------------------------------------

template <class Acc>
__device__ __forceinline__ Divisor<Acc> divisor_of(Acc number) {
  const Acc near = approximate_reciprocal(number);
  return {number, fma(fma(-number, near, Acc(1)), near, near)};
}

// Of `count` numbers x * scale: their mean is pivot + shift, where the pivot is one number of Acc and the shift what
// its rounding has left out; the sum of the squares of their distances from it. For RMSNorm, of those from 0.
template <class Acc>
struct Moments {
  Acc pivot, shift, squares, count, scale;
};

// Those of `total` numbers from those that kLanes lanes have of disjoint parts; a lane of none has zeros. Of one scale.
template <int kLanes, class Acc>
__device__ __forceinline__ Moments<Acc> merge_lanes(const Moments<Acc>& own, const Divisor<Acc>& total) {
  const Acc pivot = __shfl_sync(kAllLanes, own.pivot, 0), shift = __shfl_sync(kAllLanes, own.shift, 0);
  const Acc distance = ((own.pivot - pivot) + own.shift) - shift;  // of the means
  const Acc correction = total.divide(sum_lanes<kLanes>(own.count * distance));
  const Acc rest = distance - correction;
  return {pivot, shift + correction, sum_lanes<kLanes>(fma(own.count * rest, rest, own.squares)), total.number,
          own.scale};
}

// Of a row, or of a warp's part of one, which the threads of a tile have in `v`, with zeros beyond its end: this one
// has `valid` columns from its first one on. What is left in `x` is x * scale - pivot for a row; for a chunk of one,
// whose other chunks have other pivots, x.
template <class Tile, class T, int kCount, class Acc>
__device__ __forceinline__ Moments<Acc> moments_of_warp(Acc (&x)[Tile::kVectors][kCount],
                                                        const Vector<T, kCount> (&v)[Tile::kVectors], Acc scale,
                                                        const Place<Tile>& place, int cols, int valid,
                                                        const Known<Acc>& known) {
  const bool rms = known.is(known.kRms);
  Acc sums[2] = {};
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) {
    if (!place.template has_columns<kCount>(i, cols)) break;
    widen(x[i], v[i]);
#pragma unroll
    for (int e = 0; e < kCount; ++e) sums[e % 2] = fma(x[i][e], scale, sums[e % 2]);
  }
  const int count = place.template columns_of_warp<kCount>(cols);
  const Divisor<Acc> divisor = Tile::kWarps > 1 ? divisor_of<Acc>(Tile::kIsRow ? count : max(count, 1)) : known.cols;
  Moments<Acc> own = {};
  if (!rms) own.pivot = sum_lanes<Tile::kLanes>(sums[0] + sums[1]) * divisor.reciprocal;

  Acc distances[2] = {}, squares[2] = {};
  const auto subtract = [&](auto is_whole) {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (!place.template has_columns<kCount>(i, cols)) break;
      const int at = i * place.kDistance * kCount;
      const Acc pivot = valid > at ? own.pivot : 0;  // so that numbers that are not there stay 0
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const Acc d = fma(x[i][e], scale, is_whole || at + e < valid ? -pivot : 0);
        if (Tile::kIsRow) x[i][e] = d;
        distances[e % 2] = i == 0 && e < 2 ? d : distances[e % 2] + d;  // 0 + d would take an instruction
        squares[e % 2] = fma(d, d, squares[e % 2]);
      }
    }
  };
  if (known.aligned()) {
    subtract(std::true_type{});
  } else {
    subtract(std::false_type{});
  }
  if (!rms) own.shift = divisor.divide(sum_lanes<Tile::kLanes>(distances[0] + distances[1]));
  own.count = Tile::kWarps > 1 ? count : divisor.number;
  own.squares = fma(-own.count * own.shift, own.shift, sum_lanes<Tile::kLanes>(squares[0] + squares[1]));
  if (own.squares < 0) own.squares = 0;  // written so that NaN stays NaN
  own.scale = scale;
  return own;
}

// Those of the warps of a block, each of which leaves them in shared memory: lanes stand for warps, or for none.
template <class Tile, class Acc>
__device__ __forceinline__ Moments<Acc> exchange(const Moments<Acc>& own, const Place<Tile>& place) {
  __shared__ Moments<Acc> of_warps[Tile::kWarps];
  if (place.lane == 0) of_warps[place.warp] = own;
  __syncthreads();
  const unsigned warp = static_cast<unsigned>(place.lane) % Tile::kWarps;
  return warp * kWarpSize < blockDim.x ? of_warps[warp] : Moments<Acc>{0, 0, 0, 0, 1};
}

// The moments of a row, or of a warp's part of a chunk, with the scale at which nothing overflows; get_again(v) is for
// that. (A row that holds NaN or infinity gives NaN again.) Each warp has its own pivot.
template <class Tile, class T, int kCount, class Acc, class F>
__device__ __forceinline__ Moments<Acc> scaled_moments(Acc (&x)[Tile::kVectors][kCount],
                                                       Vector<T, kCount> (&v)[Tile::kVectors], Acc& pivot,
                                                       const Place<Tile>& place, int cols, int valid,
                                                       const Known<Acc>& known, const F& get_again) {
  constexpr bool kTogether = Tile::kIsRow && Tile::kWarps > 1;
  Acc scale = 1;
  for (;;) {
    Moments<Acc> result = moments_of_warp<Tile>(x, v, scale, place, cols, valid, known);
    pivot = result.pivot;
    if constexpr (kTogether) {
      result = exchange(result, place);
      result.scale = scale;
      result = merge_lanes<Tile::kWarps>(result, known.cols);
    }
    const bool again = !(result.squares < kInfinity<Acc>) && scale == 1;
    if (!__any_sync(kAllLanes, again)) return result;
    if (again) scale = kScale<Acc>;  // a warp's other rows get what they had before
    if constexpr (kTogether) {
      __syncthreads();
    } else {
      __syncwarp();  // for the compiler: a branch that costs others nothing
    }
    get_again(v);
  }
}

// Multiplies numbers by kScale, unless they have been.
template <class Acc>
__device__ __forceinline__ void rescale(Moments<Acc>& m) {
  if (m.scale != 1) return;
  m.scale = kScale<Acc>;
  m.pivot *= m.scale;
  m.shift *= m.scale;
  m.squares = m.squares * m.scale * m.scale;
}

// The moments of two disjoint sets of numbers, of which the first is not empty.
template <class Acc>
__device__ __forceinline__ Moments<Acc> merge(Moments<Acc> a, Moments<Acc> b) {
  if (a.scale != b.scale) rescale(a), rescale(b);
  for (;;) {
    const Acc count = a.count + b.count, weight = divisor_of(count).divide(b.count);
    const Acc distance = ((b.pivot - a.pivot) + b.shift) - a.shift;  // of the means
    const Acc squares = fma(distance * distance, a.count * weight, a.squares + b.squares);
    if (squares < kInfinity<Acc> || a.scale != 1) {
      return {a.pivot, fma(distance, weight, a.shift), squares, count, a.scale};
    }
    rescale(a), rescale(b);
  }
}

// The same as merge_lanes, of any scales.
template <int kLanes, class Acc>
__device__ __forceinline__ Moments<Acc> merge_scaled_lanes(Moments<Acc> own, const Divisor<Acc>& total) {
  if (__any_sync(kAllLanes, own.scale != 1)) rescale(own);
  const Moments<Acc> merged = merge_lanes<kLanes>(own, total);
  if (merged.squares < kInfinity<Acc> || own.scale != 1) return merged;
  rescale(own);
  return merge_lanes<kLanes>(own, total);
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

// Shared memory for the images of a tile: of the input, whose place its sum with the residual takes, and of that.
template <class T, class Tile>
struct Images {
  Image<T, Tile> x, residual;

  __device__ __forceinline__ Images(void* x, void* residual, const Place<Tile>& place, bool aligned)
      : x(x, place, aligned), residual(residual, place, aligned) {}

  // Starts to load `cols` columns of a row, from column `begin` on.
  template <class Acc>
  __device__ __forceinline__ void fetch(const ForwardParams& p, const Known<Acc>& known, int64_t row, int64_t begin,
                                        int cols) {
    x.fetch(static_cast<const T*>(p.input) + row * p.input_stride + begin, cols);
    if (known.is(known.kResidual)) {
      residual.fetch(static_cast<const T*>(p.residual) + row * p.residual_stride + begin, cols);
    }
  }

  // Reads them, so that x.get() gets them again; stores their sum.
  template <class Acc>
  __device__ __forceinline__ void read(typename Image<T, Tile>::Vectors& v, const ForwardParams& p,
                                       const Known<Acc>& known, int64_t row, int64_t begin, int cols) {
    x.wait();
    x.read(v, cols);
    const bool has_residual = known.is(known.kResidual);
    if (has_residual) {
      typename Image<T, Tile>::Vectors r;
      residual.read(r, cols);
#pragma unroll
      for (int i = 0; i < Tile::kVectors; ++i) v[i] = sum(v[i], r[i]);
      residual.store(static_cast<T*>(p.sum) + row * p.cols + begin, v, cols);
    }
    if (x.is_aligned() && !has_residual) return;
    x.release();
    x.put(v);
  }

 private:
  static constexpr int kCount = kVectorSize<T>;
  __device__ __forceinline__ static Vector<T, kCount> sum(const Vector<T, kCount>& a, const Vector<T, kCount>& b) {
    AccOf<T> wide_a[kCount], wide_b[kCount];
    widen(wide_a, a);
    widen(wide_b, b);
#pragma unroll
    for (int e = 0; e < kCount; ++e) wide_a[e] += wide_b[e];
    return rounded<T>(wide_a);
  }
};

// The weight or the bias of this thread's columns, if there is one.
template <class T, class W, class Tile>
struct Parameter {
  static constexpr int kCount = kVectorSize<T>;
  Vector<W, kCount> of[Tile::kVectors];

  __device__ __forceinline__ void load(const void* parameter, bool exists, int64_t begin, const Place<Tile>& place,
                                       int cols, bool aligned) {
    if (!exists) return;
    const W* const from = static_cast<const W*>(parameter) + begin + place.vector(0) * kCount;
    const int valid = place.template valid<kCount>(0, cols);
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      const int at = i * place.kDistance * kCount;
      if (aligned) {
        if (valid > at) of[i] = *reinterpret_cast<const Vector<W, kCount>*>(from + at);
      } else {
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
          if (at + e < valid) of[i].of[e] = from[at + e];
        }
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) of[i] = {};
  }
};

// Registers hold no wide bias beside the row: that is loaded later.
template <class T, class W>
constexpr bool kBiasLater = (sizeof(W) > sizeof(T));

template <class Acc>
__device__ __forceinline__ Acc rstd_of(const Moments<Acc>& row, const Known<Acc>& known) {
  return reciprocal_deviation(row.squares * known.cols.reciprocal, known.eps, row.scale);
}

template <class Acc>
__device__ __forceinline__ void store_statistics(const ForwardParams& p, const Known<Acc>& known, int64_t row,
                                                 const Moments<Acc>& of_row, Acc rstd) {
  if (!known.is(known.kRms)) {
    static_cast<Acc*>(p.mean)[row] = (of_row.pivot + of_row.shift) * (of_row.scale == 1 ? 1 : 1 / kScale<Acc>);
  }
  static_cast<Acc*>(p.rstd)[row] = rstd * of_row.scale;
}

// x * scale - pivot of x, for a chunk of a row.
template <class Tile, int kCount, class Acc>
__device__ __forceinline__ void subtract_pivot(Acc (&x)[Tile::kVectors][kCount], const Moments<Acc>& row,
                                               const Place<Tile>& place, int cols) {
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) {
    if (!place.template has_columns<kCount>(i, cols)) break;
#pragma unroll
    for (int e = 0; e < kCount; ++e) x[i][e] = fma(x[i][e], row.scale, -row.pivot);
  }
}

// y from d = x * scale - pivot. The correction is added before anything is multiplied: for a constant row the sum is
// exactly 0.
template <class T, class W, class Tile, int kCount, class Acc>
__device__ __forceinline__ void transform(Vector<T, kCount> (&y)[Tile::kVectors],
                                          const Acc (&d)[Tile::kVectors][kCount], const Known<Acc>& known,
                                          const Place<Tile>& place, int cols, Acc correction, Acc rstd,
                                          Parameter<T, W, Tile>& weight, Parameter<T, W, Tile>& bias) {
  const auto scale_and_shift = [&](auto has_bias, auto centre) {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (!place.template has_columns<kCount>(i, cols)) break;
      Acc w[kCount], b[kCount], result[kCount];
      widen(w, weight.of[i]);
      if (has_bias) widen(b, bias.of[i]);
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const Acc xhat = (d[i][e] + correction) * rstd;
        result[e] = fma(xhat, centre ? w[e] + 1 : w[e], has_bias ? b[e] : 0);
      }
      y[i] = rounded<T>(result);
    }
  };
  constexpr unsigned kBoth = known.kWeight | known.kBias;
  const unsigned which = known.flags & (kBoth | known.kZeroCentered);
  if (which == kBoth) {
    scale_and_shift(std::true_type{}, std::false_type{});
  } else if (which == known.kWeight) {
    scale_and_shift(std::false_type{}, std::false_type{});
  } else {  // what is missing is 0: a weight less one
    if (!known.is(known.kWeight)) weight.clear();
    if (!known.is(known.kBias)) bias.clear();
    scale_and_shift(std::true_type{}, std::true_type{});
  }
}

// ---- kernels --------------------------------------------------------------------------------------------------------

// y of a row that is one tile, or of a chunk of one: `cols` columns from column `begin` on, of which `existing_cols`
// exist. row_from(own) is to return the row's moments from those of the tile.
template <class T, class W, class Tile, class F>
__device__ __forceinline__ void forward_tile(const ForwardParams& p, const Known<AccOf<T>>& known,
                                             const Place<Tile>& place, void* of_x, void* of_residual, int64_t row,
                                             int64_t begin, int cols, int existing_cols, const F& row_from) {
  using Acc = AccOf<T>;
  constexpr int kCount = kVectorSize<T>;
  typename Image<T, Tile>::Vectors v;
  Parameter<T, W, Tile> weight, bias;
  const auto load = [&](auto aligned) {
    Images<T, Tile> images(of_x, of_residual, place, aligned);
    images.fetch(p, known, row, begin, existing_cols);
    weight.load(p.weight, known.is(known.kWeight), begin, place, existing_cols, aligned);
    if (!kBiasLater<T, W>) bias.load(p.bias, known.is(known.kBias), begin, place, existing_cols, aligned);
    images.read(v, p, known, row, begin, existing_cols);
  };
  if (known.aligned()) {
    load(std::true_type{});
  } else {
    load(std::false_type{});
  }

  Image<T, Tile> image(of_x, place, known.aligned());
  Acc x[Tile::kVectors][kCount], pivot;
  const auto own = scaled_moments<Tile>(x, v, pivot, place, cols, place.template valid<kCount>(0, existing_cols), known,
                                        [&](auto& again) { image.get(again); });
  const auto of_row = row_from(own);
  const Acc rstd = rstd_of(of_row, known);
  if (begin == 0 && place.thread == 0 && (Tile::kRows == 1 || existing_cols > 0)) {
    store_statistics(p, known, row, of_row, rstd);
  }
  if (kBiasLater<T, W>) {
    bias.load(p.bias, known.is(known.kBias), begin, place, existing_cols, known.aligned());
  }
  if constexpr (!Tile::kIsRow) subtract_pivot<Tile>(x, of_row, place, cols);
  const Acc correction = Tile::kIsRow && Tile::kWarps > 1 ? (pivot - of_row.pivot) - of_row.shift : -of_row.shift;
  transform(v, x, known, place, cols, correction, rstd, weight, bias);
  image.store(static_cast<T*>(p.output) + row * p.cols + begin, v, existing_cols);
}

// Rows of one tile.
template <class T, class W, class Tile>
__global__ void __launch_bounds__(Tile::kBlock, 1) forward_rows(const ForwardParams p, const Known<AccOf<T>> known) {
  const Place<Tile> place;
  // A block's last rows may not exist. They have no columns, and are zeros.
  const int64_t row = int64_t{blockIdx.x} * Tile::kRows + place.row;
  const int cols = static_cast<int>(p.cols), existing_cols = Tile::kRows == 1 || row < p.rows ? cols : 0;
  extern __shared__ __align__(16) unsigned char shared[];
  const size_t bytes = Image<T, Tile>::bytes(place.threads());
  unsigned char* const of_x = shared + place.row * bytes;
  forward_tile<T, W>(p, known, place, of_x, of_x + Tile::kRows * bytes, row, 0, cols, existing_cols,
                     [](const auto& own) { return own; });
}

// Rows of up to 512 threads are one tile; longer ones are cut into chunks of tiles of which two fit a multiprocessor.
struct ChunkTile : Tile<256> {
  static constexpr int kResident = 2;    // blocks of a multiprocessor; with one, few bytes would be on their way
  static constexpr bool kIsRow = false;  // its warps have moments of their own; a row's last chunk may leave some none
};
constexpr int kLargestCluster = 8, kMostParts = 256;
// Chunks that a block of a cluster keeps in shared memory, where there is room for them.
constexpr int kMostChunksKept = 10;

// The same of blocks that loop over chunks, where wider parameters take more registers.
template <class T, class W>
constexpr int kResidentParts = sizeof(W) > sizeof(T) ? 1 : ChunkTile::kResident;

// A block's part of a row: `cols` columns, which are less than 2^31, from column `begin` on.
struct Part {
  int64_t row, begin;
  int cols;

  __device__ __forceinline__ Part(const Cut& cut, int64_t cols_of_row)
      : row(int64_t{cut.first_row + blockIdx.y}), begin(int64_t{cut.chunk * cut.chunks_of_part} * blockIdx.x) {
    cols = static_cast<int>(min(cols_of_row - begin, int64_t{cut.chunk * cut.chunks_of_part}));
  }

  // Calls f(begin, cols, index) for each chunk, of so many columns from column `begin` of the part on.
  template <class F>
  __device__ __forceinline__ void for_each_chunk(const Cut& cut, const F& f) const {
    int index = 0;
    for (int at = 0; at < cols; at += cut.chunk) f(at, min(cols - at, cut.chunk), index++);
  }
};

// The moments of a row from those of its parts, kMost at most, merged in an order that depends on their number alone.
template <int kMost, class Acc>
__device__ __forceinline__ Moments<Acc> merge_parts(const Moments<Acc>* of_parts, unsigned parts,
                                                    const Divisor<Acc>& cols) {
  const unsigned lane = threadIdx.x % kWarpSize;
  Moments<Acc> own = {0, 0, 0, 0, 1};
  if (lane < parts) own = of_parts[lane];
  if constexpr (kMost > kWarpSize) {
    for (unsigned i = lane + kWarpSize; i < parts; i += kWarpSize) own = merge(own, of_parts[i]);
  }
  return merge_scaled_lanes<kWarpSize>(own, cols);
}

// The moments of a part from those of the block's warps.
template <class Acc>
__device__ __forceinline__ Moments<Acc> merge_warps(const Moments<Acc>& own, const Place<ChunkTile>& place, int cols) {
  return merge_scaled_lanes<ChunkTile::kWarps>(exchange(own, place), divisor_of(static_cast<Acc>(cols)));
}

// A chunk's place in shared memory, after that of the residuals.
template <class T>
__device__ __forceinline__ Images<T, ChunkTile> images_of_chunk(unsigned char* shared, int index, bool aligned) {
  const Place<ChunkTile> place;
  return {shared + (1 + index) * Image<T, ChunkTile>::bytes(place.threads()), shared, place, aligned};
}

// The moments of a part, whose chunks are left in shared memory, or the last of them, if they are not `kept`.
template <class T>
__device__ __forceinline__ Moments<AccOf<T>> moments_of_part(const ForwardParams& p, const Known<AccOf<T>>& known,
                                                             const Cut& cut, const Part& part, unsigned char* shared,
                                                             bool kept) {
  using Acc = AccOf<T>;
  constexpr int kCount = kVectorSize<T>;
  const Place<ChunkTile> place;
  Moments<Acc> own;  // of this warp's columns of all chunks: warps do not wait for each other
  part.for_each_chunk(cut, [&](int begin, int cols, int index) {
    typename Image<T, ChunkTile>::Vectors v;
    const auto load = [&](auto aligned) {
      auto images = images_of_chunk<T>(shared, kept ? index : 0, aligned);
      images.fetch(p, known, part.row, part.begin + begin, cols);
      images.read(v, p, known, part.row, part.begin + begin, cols);
    };
    if (known.aligned()) {
      load(std::true_type{});
    } else {
      load(std::false_type{});
    }
    const auto image = images_of_chunk<T>(shared, kept ? index : 0, known.aligned()).x;
    Acc x[ChunkTile::kVectors][kCount], pivot;
    const auto of_chunk = scaled_moments<ChunkTile>(x, v, pivot, place, cols, place.template valid<kCount>(0, cols),
                                                    known, [&](auto& again) { image.get(again); });
    if (index == 0) {
      own = of_chunk;
    } else if (place.template has_columns<kCount>(0, cols)) {
      own = merge(own, of_chunk);
    }
    image.release();  // before the next chunk
  });
  return merge_warps(own, place, part.cols);
}

// Stores a part of the output from chunks that are `kept`, or loads them again.
template <class T, class W>
__device__ __forceinline__ void store_part(const ForwardParams& p, const Known<AccOf<T>>& known, const Cut& cut,
                                           const Part& part, const Moments<AccOf<T>>& of_row, unsigned char* shared,
                                           bool kept) {
  using Acc = AccOf<T>;
  constexpr int kCount = kVectorSize<T>;
  const Place<ChunkTile> place;
  const Acc rstd = rstd_of(of_row, known);
  if (part.begin == 0 && place.thread == 0) store_statistics(p, known, part.row, of_row, rstd);
  const T* const input = static_cast<const T*>(p.input) + part.row * p.input_stride + part.begin;
  T* const output = static_cast<T*>(p.output) + part.row * p.cols + part.begin;
  part.for_each_chunk(cut, [&](int begin, int cols, int index) {
    Parameter<T, W, ChunkTile> weight, bias;
    typename Image<T, ChunkTile>::Vectors v;
    const auto load = [&](auto aligned) {
      auto image = images_of_chunk<T>(shared, kept ? index : 0, aligned).x;
      if (!kept) image.fetch(input + begin, cols);
      weight.load(p.weight, known.is(known.kWeight), part.begin + begin, place, cols, aligned);
      bias.load(p.bias, known.is(known.kBias), part.begin + begin, place, cols, aligned);
      if (kept) {
        image.get(v);
      } else {
        image.wait();
        image.read(v, cols);
      }
    };
    if (known.aligned()) {
      load(std::true_type{});
    } else {
      load(std::false_type{});
    }
    Acc x[ChunkTile::kVectors][kCount];
#pragma unroll
    for (int i = 0; i < ChunkTile::kVectors; ++i) widen(x[i], v[i]);
    subtract_pivot<ChunkTile>(x, of_row, place, cols);
    transform(v, x, known, place, cols, -of_row.shift, rstd, weight, bias);
    auto image = images_of_chunk<T>(shared, kept ? index : 0, known.aligned()).x;
    image.store(output + begin, v, cols);
    if (!kept) image.release();  // before the next chunk
  });
}

// The moments of a row from those of its parts, which the blocks of a cluster have. cluster_arrive() comes first.
template <class Acc>
__device__ __forceinline__ Moments<Acc> exchange_parts(const Moments<Acc>& own, const Cut& cut,
                                                       const Known<Acc>& known) {
  __shared__ Moments<Acc> of_parts[kLargestCluster];
  cluster_wait();  // all blocks have begun
  if (threadIdx.x < cut.parts) *cluster_peer(&of_parts[cluster_rank()], threadIdx.x) = own;
  cluster_arrive();
  cluster_wait();
  return merge_parts<kLargestCluster>(of_parts, cut.parts, known.cols);
}

// Each part of a row, which is one chunk, to a block of a cluster, which keeps it in registers.
template <class T, class W>
__global__ void __launch_bounds__(ChunkTile::kBlock, ChunkTile::kResident)
    forward_chunk_in_cluster(const ForwardParams p, const Cut cut, const Known<AccOf<T>> known) {
  const Part part(cut, p.cols);
  const Place<ChunkTile> place;
  extern __shared__ __align__(16) unsigned char shared[];
  cluster_arrive();
  forward_tile<T, W>(p, known, place, shared + Image<T, ChunkTile>::bytes(place.threads()), shared, part.row,
                     part.begin, part.cols, part.cols,
                     [&](const auto& own) { return exchange_parts(merge_warps(own, place, part.cols), cut, known); });
}

// Each part of a row to a block of a cluster, which keeps it in shared memory.
template <class T, class W>
__global__ void __launch_bounds__(ChunkTile::kBlock, kResidentParts<T, W>)
    forward_in_cluster(const ForwardParams p, const Cut cut, const Known<AccOf<T>> known) {
  const Part part(cut, p.cols);
  extern __shared__ __align__(16) unsigned char shared[];
  cluster_arrive();
  const auto own = moments_of_part<T>(p, known, cut, part, shared, true);
  const auto of_row = exchange_parts(own, cut, known);
  store_part<T, W>(p, known, cut, part, of_row, shared, true);
}

// Each part of a row to a block: its moments, in the workspace [rows, parts].
template <class T>
__global__ void __launch_bounds__(ChunkTile::kBlock, ChunkTile::kResident)
    forward_moments(const ForwardParams p, const Cut cut, const Known<AccOf<T>> known) {
  const Part part(cut, p.cols);
  extern __shared__ __align__(16) unsigned char shared[];
  const auto own = moments_of_part<T>(p, known, cut, part, shared, false);
  if (threadIdx.x == 0) static_cast<Moments<AccOf<T>>*>(p.workspace)[part.row * cut.parts + blockIdx.x] = own;
  let_next_grid_start();
}

// And its output, from those.
template <class T, class W>
__global__ void __launch_bounds__(ChunkTile::kBlock, kResidentParts<T, W>)
    forward_output(const ForwardParams p, const Cut cut, const Known<AccOf<T>> known) {
  const Part part(cut, p.cols);
  extern __shared__ __align__(16) unsigned char shared[];
  wait_for_previous_grid();
  const auto* const of_parts = static_cast<const Moments<AccOf<T>>*>(p.workspace) + part.row * cut.parts;
  store_part<T, W>(p, known, cut, part, merge_parts<kMostParts>(of_parts, cut.parts, known.cols), shared, false);
}

// ---- host code ------------------------------------------------------------------------------------------------------

template <class T>
Cut cut(int64_t cols) {
  const int64_t vectors = ceil_div(cols, kVectorSize<T>);
  const int64_t chunk = ceil_div(ceil_div(vectors, ceil_div(vectors, kMaxChunkVectors)), kWarpSize) * kWarpSize;
  const int64_t chunks = ceil_div(vectors, chunk);
  const int64_t of_part = ceil_div(chunks, chunks <= kLargestCluster * kMostChunksKept ? kLargestCluster : kMostParts);
  return {static_cast<int>(chunk * kVectorSize<T>), static_cast<int>(of_part),
          static_cast<unsigned>(ceil_div(chunks, of_part)), 0};
}

// Dynamic shared memory of a block that has so many chunks at a time, and a residual's.
template <class T>
size_t bytes_of_chunks(const Cut& cut, int chunks) {
  return (1 + chunks) * Image<T, ChunkTile>::bytes(threads_of<ChunkTile, T>(cut.chunk));
}

template <class T, class W>
bool is_for_cluster(const Cut& cut) {
  if constexpr (sizeof(T) == 8) {
    return false;
  } else {
    constexpr size_t kStatic = (kLargestCluster + ChunkTile::kWarps) * sizeof(Moments<AccOf<T>>);
    return cut.parts <= kLargestCluster && has_clusters(forward_in_cluster<T, W>) &&
           bytes_of_chunks<T>(cut, cut.chunks_of_part) + kStatic <= max_shared_memory();
  }
}

}  // namespace

int64_t forward_workspace(const ForwardParams& p) {
  int64_t bytes = 0;
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    if (with_tile<T>(p.cols, [](auto) {})) return;
    const Cut parts = cut<T>(p.cols);
    if (is_for_cluster<T, W>(parts)) return;
    bytes = p.rows * parts.parts * static_cast<int64_t>(sizeof(Moments<AccOf<T>>));
  });
  return bytes;
}

void forward(const ForwardParams& p) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    // The sum is new, or it is the residual. Rows of the output are aligned only if they are whole vectors.
    const bool aligned = is_aligned<T>(p.input, p.input_stride) && is_aligned<T>(p.residual, p.residual_stride) &&
                         is_aligned<T>(p.output, p.cols) && is_aligned<W>(p.weight, 0) && is_aligned<W>(p.bias, 0);
    const Known<AccOf<T>> known(p, aligned);
    const auto stream = static_cast<Stream>(p.stream);
    const bool is_tile = with_tile<T>(p.cols, [&](auto tile) {
      using Tile = decltype(tile);
      const unsigned threads = threads_of<Tile, T>(p.cols);
      const unsigned blocks = static_cast<unsigned>(ceil_div(p.rows, Tile::kRows));
      const size_t bytes = (p.residual ? 2 : 1) * Tile::kRows * Image<T, Tile>::bytes(threads / Tile::kRows);
      launch({blocks, threads, bytes, stream}, forward_rows<T, W, Tile>, p, known);
    });
    if (is_tile) return;
    Cut parts = cut<T>(p.cols);
    const bool in_cluster = is_for_cluster<T, W>(parts);
    const size_t bytes = bytes_of_chunks<T>(parts, in_cluster ? parts.chunks_of_part : 1);
    for (; parts.first_row < p.rows; parts.first_row += static_cast<unsigned>(kMaxGridY)) {
      const int64_t rows = std::min(p.rows - parts.first_row, kMaxGridY);
      const dim3 grid(parts.parts, static_cast<unsigned>(rows));
      LaunchConfig config = {grid, threads_of<ChunkTile, T>(parts.chunk), bytes, stream};
      if constexpr (sizeof(T) < 8) {
        if (in_cluster) {
          config.cluster = parts.parts;
          const bool is_chunk = parts.chunks_of_part == 1;
          launch(config, is_chunk ? forward_chunk_in_cluster<T, W> : forward_in_cluster<T, W>, p, parts, known);
          continue;
        }
      }
      launch(config, forward_moments<T>, p, parts, known);
      ForwardParams again = p;
      if (p.residual) again.input = p.sum, again.input_stride = p.cols, again.residual = nullptr;
      config.overlaps_previous = true;
      launch(config, forward_output<T, W>, again, parts, Known<AccOf<T>>(again, aligned));
    }
  });
}

}  // namespace layernorm::cuda
