// y = (x - mean) * rstd * weight + bias for every row of x [groups, rows, cols] on a GPU. RMSNorm's mean is 0.
//
// A block fetches its part of a row to shared memory, computes the moments of each chunk, merges them, and computes the
// output from shared memory: 2 * groups * rows * cols * sizeof(T) bytes are moved. A block keeps up to four chunks.
// From compute capability 9.0 on, the blocks of a cluster share a longer row and exchange the moments. Still longer
// rows, and those on older GPUs, take two launches, the first of which stores the moments.
//
// The mean is rounded; the average of x - mean is its error, which enters the mean, the variance and the output. The
// formula of Chan, Golub and LeVeque merges the moments of chunks.
//
// A residual is added when a chunk is loaded, and the chunk in shared memory becomes the sum. If the sum is float and
// the input has 16 bits, a vector of the input and of the output has 8 bytes.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467. Chan, Golub and LeVeque,
// Updating formulae and a pairwise algorithm for computing sample variances, 1979.
#include <algorithm>

#include "../dtypes.h"
#include "tile.cuh"

namespace layernorm::cuda {

constexpr int kMaxBlockChunks = 4;                   // that a block keeps if no other block shares the row
constexpr int kMaxRowChunks = 10 * kMaxClusterSize;  // of a row that a cluster keeps
constexpr int kForwardThreads = 256;

template <class Acc>
struct ForwardPlan : RowLayout {
  explicit ForwardPlan(const RowLayout& layout) : RowLayout(layout) {}

  Flags flags;
  int chunks_per_block;
  FastDivisor blocks_per_row;
  FastDivisor rows;  // of a group
  Acc eps;
  Divisor<Acc> cols, chunk, last_chunk;
  void* workspace = nullptr;
};

namespace {

// ---- moments --------------------------------------------------------------------------------------------------------

// The moments of `count` numbers x * scale. Their mean is pivot + correction, where the correction is the rounding
// error of the pivot. m2 is the sum of the squares of their differences from the mean; for RMSNorm the mean is 0.
template <class Acc>
struct Moments {
  Acc pivot, correction, m2, count, scale;
};

// The moments of `cols` columns from this thread's vectors, which hold zeros after the end. If they overflow, they are
// computed again with kScale. Columns that hold NaN or infinity still give NaN.
template <bool kIsAligned, class Tile, class X, int kVec, class Acc>
__device__ __forceinline__ Moments<Acc> reduce_moments(const Vector<X, kVec> (&v)[kTileVectors], const Tile& tile,
                                                       int cols, const Divisor<Acc>& divisor, bool rms, int& buffer) {
  Moments<Acc> result = {0, 0, 0, divisor.value, 1};
  for (;;) {
    if (!rms) {
      Acc sums[2] = {};
      tile.template for_each_vector<kVec>(cols, [&](int i) {
        Acc x[kVec];
        widen(x, v[i]);
#pragma unroll
        for (int e = 0; e < kVec; ++e) sums[e % 2] = fma(x[e], result.scale, sums[e % 2]);
      });
      Acc sum[1] = {sums[0] + sums[1]};
      sum_tile(sum, tile, buffer ^= 1);
      result.pivot = sum[0] * divisor.reciprocal;
    }
    Acc diffs[2] = {}, squares[2] = {};
    tile.template for_each_vector<kVec>(cols, [&](int i) {
      const int remaining = tile.template remaining<kVec>(i, cols);
      Acc x[kVec];
      widen(x, v[i]);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {  // the zeros after the end stay zeros
        const Acc d = fma(x[e], result.scale, kIsAligned || e < remaining ? -result.pivot : 0);
        diffs[e % 2] += d;
        squares[e % 2] = fma(d, d, squares[e % 2]);
      }
    });
    Acc sums[2] = {diffs[0] + diffs[1], squares[0] + squares[1]};
    sum_tile(sums, tile, buffer ^= 1);
    result.correction = rms ? 0 : divisor.divide(sums[0]);
    result.m2 = fma(-result.count * result.correction, result.correction, sums[1]);
    if (result.m2 < 0) result.m2 = 0;  // this comparison keeps NaN
    const bool overflows = !(result.m2 < kInfinity<Acc>) && result.scale == 1;
    if (!__any_sync(kAllLanes, overflows)) return result;
    if (overflows) result.scale = kScale<Acc>;  // the warp's other rows are computed again with the same result
  }
}

// The moments multiplied by `scale`. Moments that are scaled already are not finite without their scale.
template <class Acc>
__device__ __forceinline__ Moments<Acc> rescale(Moments<Acc> m, Acc scale) {
  if (m.scale == scale) return m;
  if (scale == 1) return {0, 0, kInfinity<Acc>, m.count, 1};
  return {m.pivot * scale, m.correction * scale, m.m2 * scale * scale, m.count, scale};
}

// Merges the moments of two disjoint sets of numbers of the same scale. Either set may be empty.
template <class Acc>
__device__ __forceinline__ Moments<Acc> merge(const Moments<Acc>& a, const Moments<Acc>& b) {
  if (a.count == 0) return b;
  if (b.count == 0) return a;
  const Acc count = a.count + b.count, weight = b.count / count;
  const Acc mean_diff = ((b.pivot - a.pivot) + b.correction) - a.correction;
  return {a.pivot, fma(mean_diff, weight, a.correction), fma(mean_diff * mean_diff, a.count * weight, a.m2 + b.m2),
          count, a.scale};
}

// Merges the moments of a row's chunks, in an order that depends only on their number. All lanes get the result.
template <class Acc>
__device__ __forceinline__ Moments<Acc> merge_chunks(const Moments<Acc>* chunks, int num_chunks) {
  for (Acc scale = 1;; scale = kScale<Acc>) {
    Moments<Acc> own = {0, 0, 0, 0, scale};
    for (int i = threadIdx.x % kWarpSize; i < num_chunks; i += kWarpSize) own = merge(own, rescale(chunks[i], scale));
    for (int offset = 1; offset < kWarpSize; offset *= 2) {  // only lane 0 gets the sum of all lanes
      const int other = threadIdx.x % kWarpSize + offset;
      const auto get = [&](Acc value) { return __shfl_sync(kAllLanes, value, other % kWarpSize); };
      own = merge(own, Moments<Acc>{get(own.pivot), get(own.correction), get(own.m2), get(own.count), scale});
    }
    const auto first = [](Acc value) { return __shfl_sync(kAllLanes, value, 0); };
    own = {first(own.pivot), first(own.correction), first(own.m2), first(own.count), scale};
    if (own.m2 < kInfinity<Acc> || scale != 1) return own;
  }
}

template <class Acc>
__device__ __forceinline__ void store_statistics(const ForwardParams& p, const RowIndex& row,
                                                 const Moments<Acc>& moments, Acc rstd) {
  if (!p.rms) {
    *address<Acc>(p.mean, row) = (moments.pivot + moments.correction) * (moments.scale == 1 ? 1 : 1 / kScale<Acc>);
  }
  *address<Acc>(p.rstd, row) = rstd * moments.scale;
}

// ---- chunks ---------------------------------------------------------------------------------------------------------

// Columns [begin, begin + cols) of a row, and their shared memory. Without a residual, x is the input.
template <class Types, class Tile>
struct Chunk {
  using T = typename Types::T;
  using X = typename Types::X;
  using W = typename Types::W;
  using Acc = AccOf<X>;
  static constexpr int kVec = kVectorSize<X>;
  using Vectors = Vector<X, kVec>[kTileVectors];

  const ForwardParams& p;
  const Flags flags;
  const Tile& tile;
  RowIndex row;
  int64_t begin;
  int cols;
  unsigned char* shared;

  template <class E>
  __device__ __forceinline__ StagedRow<E, kVec, Tile> staged(E* first) const {
    return {shared, first + begin, cols, tile, flags.has(kAligned)};
  }
  // Before and after the residual is added.
  __device__ __forceinline__ StagedRow<X, kVec, Tile> fetched_x() const {
    return staged(flags.has(kResidual) ? address<X>(p.residual, row) : address<X>(p.input, row));
  }
  __device__ __forceinline__ StagedRow<X, kVec, Tile> loaded_x() const {
    return staged(flags.has(kResidual) ? address<X>(p.sum, row) : address<X>(p.input, row));
  }

  // Waits for x, adds the residual and stores the sum.
  __device__ __forceinline__ void load(Vectors& v) const {
    const bool aligned = flags.has(kAligned);
    Vector<T, kVec> input[kTileVectors];
    if (flags.has(kResidual)) {
      const T* const src = address<const T>(p.input, row) + begin;
      tile.template for_each_vector<kVec>(cols, [&](int i) {
        load_or(input[i], src + tile.vector_index(i) * kVec, true, tile.template remaining<kVec>(i, cols), aligned,
                T(0.0f));
      });
    }
    async_wait<0>();
    if (!aligned) tile.sync();
    const auto x = fetched_x();
    tile.template for_each_vector<kVec>(cols, [&](int i) { v[i] = x.read(i); });
    if (!flags.has(kResidual)) return;
    if (!aligned) tile.sync();
    const auto sum = loaded_x();
    tile.template for_each_vector<kVec>(cols, [&](int i) {
      Acc a[kVec], b[kVec];
      widen(a, input[i]);
      widen(b, v[i]);
#pragma unroll
      for (int e = 0; e < kVec; ++e) a[e] += b[e];
      v[i] = round_to<X>(a);
      sum.store(i, v[i]);
      if (aligned) sum.write(i, v[i]);
    });
    sum.end_of_store();
  }

  // Computes the output from x in shared memory. The correction is subtracted before any multiplication, so that the
  // difference is exactly 0 for a constant row.
  __device__ __forceinline__ void normalize_and_store(const Moments<Acc>& moments, Acc rstd) const {
    const W* const weight = address<const W>(p.weight, {row.group, 0}) + begin;
    const W* const bias = address<const W>(p.bias, {row.group, 0}) + begin;
    const Acc weight_offset = flags.has(kZeroCentered) ? 1 : 0;
    const auto x = loaded_x();
    Vector<T, kVec> y[kTileVectors];
    tile.template for_each_vector<kVec>(cols, [&](int i) {
      const int column = tile.vector_index(i) * kVec, remaining = cols - column;
      Vector<W, kVec> w, b;
      load_or(w, weight + column, flags.has(kWeight), remaining, flags.has(kAlignedParameters), W(1.0f));
      load_or(b, bias + column, flags.has(kBias), remaining, flags.has(kAlignedParameters), W(0.0f));
      Acc v[kVec], wide_w[kVec], wide_b[kVec];
      widen(v, x.read(i));
      widen(wide_w, w);
      widen(wide_b, b);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const Acc xhat = (fma(v[e], moments.scale, -moments.pivot) - moments.correction) * rstd;
        v[e] = fma(xhat, wide_w[e] + weight_offset, wide_b[e]);
      }
      y[i] = round_to<T>(v);
    });
    if (!flags.has(kAligned)) tile.sync();
    const auto output = staged(address<T>(p.output, row));
    tile.template for_each_vector<kVec>(cols, [&](int i) { output.store(i, y[i]); });
    output.end_of_store();
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// Types is that of dtypes.h. Two launches that read a row need the workspace [groups * rows, num_chunks] of Moments.
// With registers for three blocks per multiprocessor, the kernel for double would spill.
template <class Types, class Tile>
__global__ void __launch_bounds__(kForwardThreads, sizeof(typename Types::X) == 8 ? 2 : 3)
    forward_rows(const ForwardParams p, const ForwardPlan<AccOf<typename Types::X>> plan) {
  using Acc = AccOf<typename Types::X>;
  using BlockChunk = Chunk<Types, Tile>;
  const Tile tile{{plan.log2_lanes, static_cast<int>(threadIdx.x)}};
  const Flags flags = plan.flags;
  int64_t block_row = blockIdx.x;
  int first_chunk = 0;
  if constexpr (Tile::kIsBlock) {
    const auto [quotient, remainder] = plan.blocks_per_row.divide(block_row);
    block_row = quotient, first_chunk = static_cast<int>(remainder) * plan.chunks_per_block;
  }
  // The last block may have rows that do not exist. They have no columns, and their vectors are zeros.
  const int64_t row_number = block_row * tile.rows_per_block() + tile.row();
  const bool exists = Tile::kIsBlock || row_number < p.groups * p.rows;
  const RowIndex row = find_group(exists ? row_number : 0, flags.has(kHasGroups), plan.rows);
  extern __shared__ __align__(16) unsigned char shared[];
  const auto chunk_at = [&](int k) {
    const int64_t begin = int64_t{plan.chunk_cols} * (first_chunk + k);
    const int cols = static_cast<int>(min(p.cols - begin, int64_t{plan.chunk_cols}));
    unsigned char* const chunk_shared =
        shared + (k + tile.row()) * StagedRow<typename Types::X, BlockChunk::kVec, Tile>::bytes(tile.threads());
    return BlockChunk{p, flags, tile, row, begin, exists ? cols : 0, chunk_shared};
  };
  const int num_chunks = Tile::kIsBlock ? min(plan.chunks_per_block, plan.num_chunks - first_chunk) : 1;
  const bool in_cluster = Tile::kIsBlock && flags.has(kInCluster);
  __shared__ Moments<Acc> row_moments[Tile::kIsBlock ? kMaxRowChunks : 1];
  __shared__ TransactionBarrier barrier;  // for the moments of all blocks of a cluster
  if (in_cluster) {
    if (threadIdx.x == 0) barrier.init(), barrier.expect(plan.num_chunks * sizeof(Moments<Acc>));
    cluster_arrive();
  }
  if (flags.has(kLoadsSums)) wait_for_previous_grid();
  for (int k = 0; k < num_chunks; ++k) chunk_at(k).fetched_x().fetch();
  async_commit();

  auto* const stored_moments = static_cast<Moments<Acc>*>(plan.workspace) + row_number * plan.num_chunks;
  Moments<Acc> moments;
  if (!flags.has(kLoadsSums)) {
    int buffer = 0;
    for (int k = 0; k < num_chunks; ++k) {
      const BlockChunk chunk = chunk_at(k);
      const int index = first_chunk + k;
      typename BlockChunk::Vectors v;
      chunk.load(v);
      const bool is_last = index + 1 == plan.num_chunks, rms = flags.has(kRms);
      const Divisor<Acc> divisor(is_last ? plan.last_chunk.value : plan.chunk.value,
                                 is_last ? plan.last_chunk.reciprocal : plan.chunk.reciprocal);
      moments = flags.has(kAligned) ? reduce_moments<true>(v, tile, chunk.cols, divisor, rms, buffer)
                                    : reduce_moments<false>(v, tile, chunk.cols, divisor, rms, buffer);
      if (!Tile::kIsBlock || plan.num_chunks == 1) break;
      if (in_cluster) {
        if (k == 0) cluster_wait();  // all blocks have started
        if (threadIdx.x < plan.blocks_per_row.divisor()) barrier.store(row_moments[index], moments, threadIdx.x);
      } else if (threadIdx.x == 0) {
        (flags.has(kStoresSums) ? stored_moments : row_moments)[index] = moments;
      }
    }
    if (flags.has(kStoresSums)) return let_next_grid_start();
  }
  if (Tile::kIsBlock && plan.num_chunks > 1) {
    async_wait<0>();
    if (in_cluster) {
      barrier.wait(0);
    } else {
      __syncthreads();
    }
    moments = merge_chunks(flags.has(kLoadsSums) ? stored_moments : row_moments, plan.num_chunks);
  }

  const Acc rstd = scaled_rstd(moments.m2 * plan.cols.reciprocal, plan.eps, moments.scale);
  if (first_chunk == 0 && tile.thread() == 0 && exists) store_statistics(p, row, moments, rstd);
  for (int k = 0; k < num_chunks; ++k) chunk_at(k).normalize_and_store(moments, rstd);
}

// ---- host code ------------------------------------------------------------------------------------------------------

template <class Types, class Tile>
void launch_forward(const ForwardParams& p, const RowLayout& layout) {
  using X = typename Types::X;
  using Acc = AccOf<X>;
  const auto kernel = forward_rows<Types, Tile>;
  LaunchConfig config;
  ForwardPlan<Acc> plan(layout);
  plan.flags = make_flags<typename Types::T, X, typename Types::W>(p);
  plan.rows = FastDivisor(p.rows);
  plan.eps = static_cast<Acc>(p.eps);
  plan.cols = Divisor<Acc>(p.cols);
  plan.chunk = Divisor<Acc>(plan.chunk_cols);
  plan.last_chunk = Divisor<Acc>(p.cols - int64_t{plan.chunk_cols} * (plan.num_chunks - 1));

  const int64_t vectors = ceil_div(plan.chunk_cols, kVectorSize<X>);
  const int64_t threads = plan.is_warp_tile ? 128 : round_up(ceil_div(vectors, kTileVectors), kWarpSize);
  const int rows = plan.rows_per_block(threads);
  const auto bytes = [&](int64_t chunks) {
    return rows * chunks * StagedRow<X, kVectorSize<X>, Tile>::bytes(static_cast<int>(threads) / rows);
  };
  constexpr size_t kStaticBytes =
      kMaxRowChunks * sizeof(Moments<Acc>) + 6 * kMaxBlockThreads / kWarpSize * sizeof(Acc);  // sum_tile()
  const auto in_cluster = static_cast<int>(ceil_div(plan.num_chunks, kMaxClusterSize));       // chunks of a block
  plan.chunks_per_block = plan.num_chunks;
  bool reads_twice = false;
  if (plan.num_chunks > kMaxBlockChunks) {
    reads_twice = plan.num_chunks > kMaxRowChunks || bytes(in_cluster) + kStaticBytes > max_shared_memory(config) ||
                  !has_clusters(config, kernel);
    plan.chunks_per_block = reads_twice ? 1 : in_cluster;
  }
  const int64_t blocks_per_row = ceil_div(plan.num_chunks, plan.chunks_per_block);
  plan.flags.set(kInCluster, !reads_twice && blocks_per_row > 1);
  plan.blocks_per_row = FastDivisor(blocks_per_row);

  config.grid = static_cast<unsigned>(ceil_div(p.groups * p.rows, rows) * blocks_per_row);
  config.block = static_cast<unsigned>(threads);
  config.shared_bytes = bytes(plan.chunks_per_block);
  config.stream = static_cast<Stream>(p.stream);
  config.cluster = reads_twice ? 1 : static_cast<unsigned>(blocks_per_row);
  if (!reads_twice) return launch(config, kernel, p, plan);

  const auto bytes_per_row = plan.num_chunks * static_cast<int64_t>(sizeof(Moments<Acc>));
  plan.workspace = p.allocator->allocate(p.groups * p.rows * bytes_per_row);
  plan.flags.set(kStoresSums, true);
  launch(config, kernel, p, plan);
  plan.flags.set(kStoresSums, false);
  plan.flags.set(kLoadsSums, true);
  plan.flags.set(kResidual, false);
  ForwardParams second = p;
  if (p.residual.data) second.input = p.sum;
  config.overlaps_previous = true;
  launch(config, kernel, second, plan);
}

}  // namespace

void forward(const ForwardParams& p) {
  if (p.channels_first) return channels_first_forward(p);
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using Types = decltype(types);
    const RowLayout layout(p.cols, kVectorSize<typename Types::X>, kMaxChunkVectors);
    layout.is_warp_tile ? launch_forward<Types, WarpTile>(p, layout) : launch_forward<Types, BlockTile>(p, layout);
  });
}

}  // namespace layernorm::cuda
