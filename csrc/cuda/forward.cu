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
};

namespace {

// ---- moments --------------------------------------------------------------------------------------------------------

// Of `count` numbers x * scale: their mean is pivot + shift, where the pivot is one number of Acc and the shift what
// its rounding has left out; the sum of the squares of their distances from it. For RMSNorm, of those from 0.
template <class Acc>
struct Moments {
  Acc pivot, shift, squares, count, scale;
};

// Those of `total` numbers from those that kLanes lanes have of disjoint parts; a lane of none has zeros. Of one scale.
template <int kLanes, class Acc>
__device__ __forceinline__ Moments<Acc> merge_lanes(const Moments<Acc>& own, Acc total) {
  const Acc pivot = __shfl_sync(kAllLanes, own.pivot, 0), shift = __shfl_sync(kAllLanes, own.shift, 0);
  const Acc distance = ((own.pivot - pivot) + own.shift) - shift;  // of the means
  const Acc correction = sum_lanes<kLanes>(own.count * distance) / total;
  const Acc rest = distance - correction;
  return {pivot, shift + correction, sum_lanes<kLanes>(own.squares + own.count * rest * rest), total, own.scale};
}

// Of a row, or of a chunk of one, which the threads of a tile have in `x`, with zeros beyond its end. What is left
// there is x * scale - pivot, with a pivot of each warp, which is returned, too.
template <class Tile, int kCount, class Acc>
__device__ __forceinline__ Moments<Acc> moments(Acc (&x)[Tile::kVectors][kCount], Acc& pivot_of_warp, Acc scale,
                                                const Place<Tile>& place, int cols, bool aligned, bool rms) {
  Acc sums[2] = {};
  int count = Tile::kWarps > 1 ? 0 : cols;  // columns of this warp
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) {
    if (!place.template has_columns<kCount>(i, cols)) continue;
    if (Tile::kWarps > 1) count += place.template columns_of_warp<kCount>(i, cols);
#pragma unroll
    for (int e = 0; e < kCount; ++e) sums[e % 2] = fma(x[i][e], scale, sums[e % 2]);
  }
  const Acc divisor = Tile::kWarps > 1 ? max(count, 1) : count;
  Moments<Acc> own = {};
  if (!rms) own.pivot = fast_divide(sum_lanes<Tile::kLanes>(sums[0] + sums[1]), divisor);
  pivot_of_warp = own.pivot;

  Acc distances[2] = {}, squares[2] = {};
  const auto subtract = [&](auto is_whole) {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (!place.template has_columns<kCount>(i, cols)) continue;
      const int valid = cols - place.vector(i) * kCount;
      const Acc pivot = valid > 0 ? own.pivot : 0;  // so that numbers that are not there stay 0
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const Acc d = x[i][e] = fma(x[i][e], scale, is_whole || e < valid ? -pivot : 0);
        distances[e % 2] += d;
        squares[e % 2] = fma(d, d, squares[e % 2]);
      }
    }
  };
  if (aligned) {
    subtract(std::true_type{});
  } else {
    subtract(std::false_type{});
  }
  if (!rms) own.shift = sum_lanes<Tile::kLanes>(distances[0] + distances[1]) / divisor;
  own.count = count;
  own.squares = sum_lanes<Tile::kLanes>(squares[0] + squares[1]) - own.count * own.shift * own.shift;
  if (own.squares < 0) own.squares = 0;  // written so that NaN stays NaN
  own.scale = scale;
  if constexpr (Tile::kWarps == 1) return own;

  // Each lane stands for a warp, or for none.
  LAYERNORM_SHARED(of_warps, Moments<Acc>[Tile::kWarps]);
  if (place.lane == 0) of_warps[place.warp] = own;
  __syncthreads();
  const int warp = place.lane % Tile::kWarps;
  own = warp * kWarpSize < place.threads() ? of_warps[warp] : Moments<Acc>{0, 0, 0, 0, scale};
  return merge_lanes<Tile::kWarps>(own, static_cast<Acc>(cols));
}

// The same, with the scale at which nothing overflows; reload(x) gets the numbers again. (A row that holds NaN or
// infinity gives NaN again.)
template <class Tile, int kCount, class Acc, class F>
__device__ __forceinline__ Moments<Acc> scaled_moments(Acc (&x)[Tile::kVectors][kCount], Acc& pivot_of_warp,
                                                       const Place<Tile>& place, int cols, bool aligned, bool rms,
                                                       const F& reload) {
  Acc scale = 1;
  for (;;) {
    const Moments<Acc> result = moments<Tile>(x, pivot_of_warp, scale, place, cols, aligned, rms);
    const bool again = !(result.squares < kInfinity<Acc>) && scale == 1;
    if (!__any_sync(kAllLanes, again)) return result;
    if (again) scale = kScale<Acc>;  // a warp's other rows get what they had before
    if constexpr (Tile::kWarps > 1) __syncthreads();
    reload(x);
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
    const Acc count = a.count + b.count, weight = b.count / count;
    const Acc distance = ((b.pivot - a.pivot) + b.shift) - a.shift;  // of the means
    const Acc squares = (a.squares + b.squares) + distance * distance * (a.count * weight);
    if (squares < kInfinity<Acc> || a.scale != 1) {
      return {a.pivot, a.shift + distance * weight, squares, count, a.scale};
    }
    rescale(a), rescale(b);
  }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

// Shared memory for the images of a tile: of the input, whose place its sum with the residual takes, and of that.
template <class T, class Tile>
struct Images {
  Image<T, Tile> x, residual;

  __device__ __forceinline__ Images(void* x, void* residual, const Place<Tile>& place, bool aligned)
      : x(x, place, aligned), residual(residual, place, aligned) {}

  // Starts to load `cols` columns of a row, from column `begin` on.
  __device__ __forceinline__ void fetch(const ForwardParams& p, int64_t row, int64_t begin, int cols) {
    x.fetch(static_cast<const T*>(p.input) + row * p.input_stride + begin, cols);
    if (p.residual) {
      residual.fetch(static_cast<const T*>(p.residual) + row * p.residual_stride + begin, cols);
    }
  }

  // Reads them; stores their sum.
  __device__ __forceinline__ void read(typename Image<T, Tile>::Values& v, const ForwardParams& p, int64_t row,
                                       int64_t begin, int cols) {
    x.wait();
    x.read(v, cols);
    if (!p.residual) return;
    typename Image<T, Tile>::Values r;
    residual.read(r, cols);
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
#pragma unroll
      for (int e = 0; e < kVectorSize<T>; ++e) v[i][e] += r[i][e];
      widen(v[i], rounded<T>(v[i]));
    }
    x.release();
    x.put(v);
    residual.store(static_cast<T*>(p.sum) + row * p.cols + begin, v, cols);
  }
};

// The weight or the bias of this thread's columns.
template <class T, class W, class Tile>
struct Parameter {
  static constexpr int kCount = kVectorSize<T>;
  Vector<W, kCount> of[Tile::kVectors];

  __device__ __forceinline__ void load(const void* parameter, float otherwise, int64_t begin, const Place<Tile>& place,
                                       int cols, bool aligned) {
    if (!parameter) {
#pragma unroll
      for (int i = 0; i < Tile::kVectors; ++i) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) of[i].of[e] = W(otherwise);
      }
      return;
    }
    const W* const from = static_cast<const W*>(parameter) + begin;
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      const int column = place.vector(i) * kCount, valid = cols - column;
      if (aligned) {
        if (valid > 0) of[i] = *reinterpret_cast<const Vector<W, kCount>*>(from + column);
      } else {
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
          if (e < valid) of[i].of[e] = from[column + e];
        }
      }
    }
  }
};

// Registers hold no wide bias, or any of many threads, beside the row: that is loaded later.
template <class T, class W, class Tile>
constexpr bool kBiasLater = sizeof(W) > sizeof(T) || Tile::kThreads >= 512;

template <class Acc>
__device__ __forceinline__ Acc rstd_of(const Moments<Acc>& row, double eps) {
  return reciprocal_deviation(row.squares / row.count, static_cast<Acc>(eps), row.scale);
}

template <class Acc>
__device__ __forceinline__ void store_statistics(const ForwardParams& p, int64_t row, const Moments<Acc>& of_row,
                                                 Acc rstd) {
  if (p.mean) {
    static_cast<Acc*>(p.mean)[row] = (of_row.pivot + of_row.shift) * (of_row.scale == 1 ? 1 : 1 / kScale<Acc>);
  }
  static_cast<Acc*>(p.rstd)[row] = rstd * of_row.scale;
}

// y from d = x * scale - pivot, in its place. The correction is added before anything is multiplied: for a constant row
// the sum is exactly 0.
template <class T, class W, class Tile, int kCount, class Acc>
__device__ __forceinline__ void transform(Acc (&d)[Tile::kVectors][kCount], const ForwardParams& p,
                                          const Place<Tile>& place, int cols, Acc correction, Acc rstd,
                                          const Parameter<T, W, Tile>& weight, const Parameter<T, W, Tile>& bias) {
  const auto scale_and_shift = [&](auto centre) {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (!place.template has_columns<kCount>(i, cols)) continue;
      Acc w[kCount], b[kCount];
      widen(w, weight.of[i]);
      widen(b, bias.of[i]);
#pragma unroll
      for (int e = 0; e < kCount; ++e) d[i][e] = fma((d[i][e] + correction) * rstd, centre ? w[e] + 1 : w[e], b[e]);
    }
  };
  if (p.zero_centered_weight) {
    scale_and_shift(std::true_type{});
  } else {
    scale_and_shift(std::false_type{});
  }
}

// ---- kernels --------------------------------------------------------------------------------------------------------

// Rows of one tile.
template <class T, class W, class Tile>
__global__ void __launch_bounds__(Tile::kBlock, 1) forward_rows(const ForwardParams p, const bool aligned) {
  using Acc = AccOf<T>;
  const Place<Tile> place;
  // A block's last rows may not exist. They are zeros, of which nothing is stored.
  const bool exists = Tile::kRows == 1 || int64_t{blockIdx.x} * Tile::kRows + place.row < p.rows;
  const int64_t row = exists ? int64_t{blockIdx.x} * Tile::kRows + place.row : 0;
  const int cols = static_cast<int>(p.cols), existing_cols = exists ? cols : 0;

  LAYERNORM_DYNAMIC_SHARED(shared, unsigned char);
  const size_t bytes = Image<T, Tile>::bytes(place.threads());
  Images<T, Tile> images(shared + place.row * bytes, shared + (Tile::kRows + place.row) * bytes, place, aligned);
  images.fetch(p, row, 0, existing_cols);
  Parameter<T, W, Tile> weight, bias;
  weight.load(p.weight, 1, 0, place, cols, aligned);
  if (!kBiasLater<T, W, Tile>) bias.load(p.bias, 0, 0, place, cols, aligned);
  typename Image<T, Tile>::Values x;
  images.read(x, p, row, 0, existing_cols);
  const auto reload = [&](auto& again) { images.x.read(again, existing_cols); };
  Acc pivot;
  const auto of_row = scaled_moments<Tile>(x, pivot, place, cols, aligned, p.rms, reload);
  const Acc rstd = rstd_of(of_row, p.eps);
  if (place.thread == 0 && exists) store_statistics(p, row, of_row, rstd);
  if (kBiasLater<T, W, Tile>) bias.load(p.bias, 0, 0, place, cols, aligned);
  const Acc from_pivot = Tile::kWarps > 1 ? pivot - of_row.pivot : 0;
  transform(x, p, place, cols, from_pivot - of_row.shift, rstd, weight, bias);
  images.x.store(static_cast<T*>(p.output) + row * p.cols, x, existing_cols);
}

// Rows of up to 512 threads are one tile; longer ones are cut into chunks of tiles of which two fit a multiprocessor.
constexpr int kMostThreads = 512;
using ChunkTile = Tile<256>;
constexpr int kLargestCluster = 8, kMostParts = 256;
// Chunks that a block of a cluster keeps in shared memory, where there is room for them.
constexpr int kMostChunksKept = 10;

// A block's part of a row.
struct Part {
  int64_t row, begin, end;

  __device__ __forceinline__ Part(const Cut& cut, int64_t cols) : row(blockIdx.x / cut.parts) {
    const int64_t columns = int64_t{cut.chunk} * cut.chunks_of_part;
    begin = columns * (blockIdx.x - row * cut.parts);
    end = min(cols, begin + columns);
  }

  // Calls f(begin, cols, index) for each chunk.
  template <class F>
  __device__ __forceinline__ void for_each_chunk(const Cut& cut, const F& f) const {
    int index = 0;
    for (int64_t at = begin; at < end; at += cut.chunk) {
      f(at, static_cast<int>(min(end - at, int64_t{cut.chunk})), index++);
    }
  }
};

// The moments of a row from those of its parts, merged in an order that depends on their number alone.
template <class Acc>
__device__ __forceinline__ Moments<Acc> merge_parts(const Moments<Acc>* of_parts, unsigned parts, int64_t cols) {
  const unsigned lane = threadIdx.x % kWarpSize;
  Moments<Acc> own = {0, 0, 0, 0, 1};
  if (lane < parts) own = of_parts[lane];
  for (unsigned i = lane + kWarpSize; i < parts; i += kWarpSize) own = merge(own, of_parts[i]);
  if (__any_sync(kAllLanes, own.scale != 1)) rescale(own);
  const Moments<Acc> of_row = merge_lanes<kWarpSize>(own, static_cast<Acc>(cols));
  if (of_row.squares < kInfinity<Acc> || own.scale != 1) return of_row;
  rescale(own);
  return merge_lanes<kWarpSize>(own, static_cast<Acc>(cols));
}

// A chunk's place in shared memory, after that of the residuals.
template <class T>
__device__ __forceinline__ Images<T, ChunkTile> images_of_chunk(unsigned char* shared, int index, bool aligned) {
  const Place<ChunkTile> place;
  return {shared + (1 + index) * Image<T, ChunkTile>::bytes(place.threads()), shared, place, aligned};
}

// The moments of a part, whose chunks are left in shared memory, or the last of them, if they are not `kept`.
template <class T>
__device__ __forceinline__ Moments<AccOf<T>> moments_of_part(const ForwardParams& p, const Cut& cut, const Part& part,
                                                             unsigned char* shared, bool aligned, bool kept) {
  using Acc = AccOf<T>;
  Moments<Acc> result;
  part.for_each_chunk(cut, [&](int64_t begin, int cols, int index) {
    auto images = images_of_chunk<T>(shared, kept ? index : 0, aligned);
    images.fetch(p, part.row, begin, cols);
    typename Image<T, ChunkTile>::Values x;
    images.read(x, p, part.row, begin, cols);
    if (kept) {  // as one that is aligned
      images.x.release();
      images.x.put(x);
    }
    const auto reload = [&](auto& again) { images.x.read(again, cols); };
    Acc pivot;
    const auto of_chunk = scaled_moments<ChunkTile>(x, pivot, Place<ChunkTile>(), cols, aligned, p.rms, reload);
    result = index == 0 ? of_chunk : merge(result, of_chunk);
    __syncthreads();  // before the next chunk
  });
  return result;
}

// Stores a part of the output from chunks that are `kept`, or loads them again.
template <class T, class W>
__device__ __forceinline__ void store_part(const ForwardParams& p, const Cut& cut, const Part& part,
                                           const Moments<AccOf<T>>& of_row, unsigned char* shared, bool aligned,
                                           bool kept) {
  using Acc = AccOf<T>;
  constexpr int kCount = kVectorSize<T>;
  const Place<ChunkTile> place;
  const Acc rstd = rstd_of(of_row, p.eps);
  if (part.begin == 0 && place.thread == 0) store_statistics(p, part.row, of_row, rstd);
  part.for_each_chunk(cut, [&](int64_t begin, int cols, int index) {
    auto image = images_of_chunk<T>(shared, kept ? index : 0, aligned).x;
    if (!kept) image.fetch(static_cast<const T*>(p.input) + part.row * p.input_stride + begin, cols);
    Parameter<T, W, ChunkTile> weight, bias;
    weight.load(p.weight, 1, begin, place, cols, aligned);
    typename Image<T, ChunkTile>::Values x;
    if (!kept) image.wait();
    image.read(x, cols);
#pragma unroll
    for (int i = 0; i < ChunkTile::kVectors; ++i) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) x[i][e] = fma(x[i][e], of_row.scale, -of_row.pivot);
    }
    bias.load(p.bias, 0, begin, place, cols, aligned);
    transform(x, p, place, cols, -of_row.shift, rstd, weight, bias);
    image.store(static_cast<T*>(p.output) + part.row * p.cols + begin, x, cols);
    image.release();
  });
}

// Each part of a row to a block of a cluster, which keeps it in shared memory.
template <class T, class W>
__global__ void __launch_bounds__(ChunkTile::kBlock, 1)
    forward_in_cluster(const ForwardParams p, const Cut cut, const bool aligned) {
  const Part part(cut, p.cols);
  LAYERNORM_SHARED(of_parts, Moments<AccOf<T>>[kLargestCluster]);
  LAYERNORM_DYNAMIC_SHARED(shared, unsigned char);
  cluster_arrive();
  const auto own = moments_of_part<T>(p, cut, part, shared, aligned, true);
  cluster_wait();  // all blocks have begun
  if (threadIdx.x < cut.parts) *cluster_peer(&of_parts[cluster_rank()], threadIdx.x) = own;
  cluster_arrive();
  cluster_wait();
  store_part<T, W>(p, cut, part, merge_parts(of_parts, cut.parts, p.cols), shared, aligned, true);
}

// Each part of a row to a block: its moments, in the workspace [rows, parts].
template <class T>
__global__ void __launch_bounds__(ChunkTile::kBlock, 1)
    forward_moments(const ForwardParams p, const Cut cut, const bool aligned) {
  LAYERNORM_DYNAMIC_SHARED(shared, unsigned char);
  const auto own = moments_of_part<T>(p, cut, Part(cut, p.cols), shared, aligned, false);
  if (threadIdx.x == 0) static_cast<Moments<AccOf<T>>*>(p.workspace)[blockIdx.x] = own;
  let_next_grid_start();
}

// And its output, from those.
template <class T, class W>
__global__ void __launch_bounds__(ChunkTile::kBlock, 1)
    forward_output(const ForwardParams p, const Cut cut, const bool aligned) {
  const Part part(cut, p.cols);
  LAYERNORM_DYNAMIC_SHARED(shared, unsigned char);
  wait_for_previous_grid();
  const auto* const of_parts = static_cast<const Moments<AccOf<T>>*>(p.workspace) + part.row * cut.parts;
  store_part<T, W>(p, cut, part, merge_parts(of_parts, cut.parts, p.cols), shared, aligned, false);
}

// ---- host code ------------------------------------------------------------------------------------------------------

template <class T>
Cut cut(int64_t cols) {
  const int64_t vectors = ceil_div(cols, kVectorSize<T>);
  const int64_t most = std::max(path_limit(ChunkTile::kThreads * ChunkTile::kVectors), int64_t{kWarpSize});
  const int64_t chunk = ceil_div(ceil_div(vectors, ceil_div(vectors, most)), kWarpSize) * kWarpSize;
  const int64_t chunks = ceil_div(vectors, chunk);
  const int64_t of_part = ceil_div(chunks, chunks <= kLargestCluster * kMostChunksKept ? kLargestCluster : kMostParts);
  return {static_cast<int>(chunk * kVectorSize<T>), static_cast<int>(of_part),
          static_cast<unsigned>(ceil_div(chunks, of_part))};
}

// Dynamic shared memory of a block that has so many chunks at a time, and a residual's.
template <class T>
size_t bytes_of_chunks(const Cut& cut, int chunks) {
  return (1 + chunks) * Image<T, ChunkTile>::bytes(threads_of<ChunkTile, T>(cut.chunk));
}

template <class T>
bool is_for_cluster(const Cut& cut) {
  constexpr size_t kStatic = (kLargestCluster + ChunkTile::kWarps) * sizeof(Moments<AccOf<T>>);
  return sizeof(T) < 8 && cut.parts <= kLargestCluster && cut.chunks_of_part <= kMostChunksKept &&
         architecture() >= 90 && bytes_of_chunks<T>(cut, cut.chunks_of_part) + kStatic <= most_shared_memory();
}

}  // namespace

int64_t forward_workspace(const ForwardParams& p) {
  int64_t bytes = 0;
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    if (with_tile<T, kMostThreads>(p.cols, [](auto) {})) return;
    const Cut parts = cut<T>(p.cols);
    if (is_for_cluster<T>(parts)) return;
    bytes = p.rows * parts.parts * static_cast<int64_t>(sizeof(Moments<AccOf<T>>));
  });
  return bytes;
}

void forward(const ForwardParams& p) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    const bool aligned = p.cols % kVectorSize<T> == 0 && is_aligned<T>(p.input, p.input_stride) &&
                         is_aligned<T>(p.residual, p.residual_stride) && is_aligned<T>(p.sum, p.cols) &&
                         is_aligned<T>(p.output, p.cols) && is_aligned<W>(p.weight, 0) && is_aligned<W>(p.bias, 0);
    const auto stream = static_cast<Stream>(p.stream);
    const bool is_tile = with_tile<T, kMostThreads>(p.cols, [&](auto tile) {
      using Tile = decltype(tile);
      const unsigned threads = threads_of<Tile, T>(p.cols);
      const unsigned blocks = static_cast<unsigned>(ceil_div(p.rows, Tile::kRows));
      const size_t bytes = (p.residual ? 2 : 1) * Tile::kRows * Image<T, Tile>::bytes(threads / Tile::kRows);
      launch({blocks, threads, bytes, stream}, forward_rows<T, W, Tile>, p, aligned);
    });
    if (is_tile) return;
    const Cut parts = cut<T>(p.cols);
    const bool in_cluster = is_for_cluster<T>(parts);
    LaunchConfig config = {static_cast<unsigned>(p.rows * parts.parts), threads_of<ChunkTile, T>(parts.chunk)};
    config.shared_bytes = bytes_of_chunks<T>(parts, in_cluster ? parts.chunks_of_part : 1);
    config.stream = stream;
    if constexpr (sizeof(T) < 8) {
      if (in_cluster) {
        config.cluster = parts.parts;
        launch(config, forward_in_cluster<T, W>, p, parts, aligned);
        return;
      }
    }
    launch(config, forward_moments<T>, p, parts, aligned);
    ForwardParams again = p;
    if (p.residual) again.input = p.sum, again.input_stride = p.cols, again.residual = nullptr;
    config.overlaps_previous = true;
    launch(config, forward_output<T, W>, again, parts, aligned);
  });
}

}  // namespace layernorm::cuda
