// With xhat = (x - mean) * rstd and g = dy * weight, for every row of x and dy [groups, rows, cols] on a GPU:
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat))      dweight = sum of dy * xhat over rows      dbias = sum of dy
//
// and dx = rstd * (g - xhat * mean(g * xhat)) for RMSNorm, whose mean is 0. If forward also returned x as a sum, the
// gradient of that sum is added to dx.
//
// The workspace has partial sums of dweight [weight_partials, pitch] and dbias [bias_partials, pitch], and then, if two
// launches read the rows, the sums of their chunks [rows, num_chunks].
//
// Blocks are persistent: a block takes the rows of a segment in turn, and fetches the next rows to shared memory while
// it works. It reads a row twice from there, for the row's sums and for dx, and keeps the sums of dweight and dbias in
// registers until the end of the segment. A second kernel adds the sums of the segments in order, without atomic
// operations. 3 * groups * rows * cols * sizeof(T) bytes are moved.
//
// The blocks of a cluster share a longer row, and exchange their sums once per row. Still longer rows, and those on
// older GPUs, take two launches, the first of which stores the sums of each chunk.
//
// The numerical method is that of the CPU kernels (cpu/backward.cpp): the mean of xhat as computed from the saved mean
// is subtracted.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include <algorithm>

#include "../dtypes.h"
#include "partials.cuh"

namespace layernorm::cuda {

struct BackwardPlan : GradientPlan, RowLayout {
  explicit BackwardPlan(const RowLayout& layout) : GradientPlan(), RowLayout(layout) {}

  int stages, tile_threads;
  int64_t pitch;  // elements from row to row of the workspace
  double reciprocal_cols;
};

namespace {

// Sums in Acc over this many rounds are added to the workspace, which limits their rounding errors.
constexpr int kRoundsPerSum = 256;

constexpr int kMaxStages = 2;
// Threads of a block: many, so that few blocks store partial sums. Two blocks fit on a multiprocessor. Rows of more
// than 512 vectors take a block of their own, with up to 512 threads.
constexpr int kThreads = 256;

// The sums over a row of d (see Statistics), g and g * d.
template <class Acc>
using RowSums = Acc[3];

// The flags of the most usual calls: aligned rows, a weight and all gradients; and the flags that they may have
// besides. Their loop is compiled separately, because the tests of the other flags take a fifth more instructions.
constexpr unsigned kFastPathFlags = kAligned | kAlignedParameters | kWeight | kGradInput | kGradWeight;
constexpr unsigned kFastPathOptions = kInCluster | kRms | kBias | kGradBias;

// ---- the rows of a block --------------------------------------------------------------------------------------------

// Whether the block has a segment in this round.
__device__ __forceinline__ bool has_round(const BackwardPlan& plan, Flags flags, int round) {
  if (!flags.has(kWeightPerGroup | kBiasPerGroup)) return round < plan.rounds.divisor();
  return blockIdx.y + plan.rounds.divide(round).quotient * gridDim.y < plan.num_segments;
}

// This thread's row, or chunk of a row, in a round, and the staged rows. A row that does not exist has no columns, and
// the index of row 0. The shared memory of a block has, for each stage, the rows of dy, x and grad_sum that are needed;
// and then dx, if it is not aligned.
template <class Types, class Tile>
struct Round {
  using T = typename Types::T;
  using X = typename Types::X;
  using W = typename Types::W;
  using Acc = AccOf<X>;
  // A vector is processed two elements at a time, because 64 sums leave few registers for temporary values.
  static constexpr int kVec = kVectorSize<X>, kSub = 2;
  template <class E>
  using Row = StagedRow<E, kVec, Tile>;

  static size_t shared_bytes(int threads, int rows, int arrays, int stages, bool aligned) {
    return (stages * arrays + !aligned) * rows * Row<X>::bytes(threads);
  }

  const BackwardParams& p;
  const BackwardPlan& plan;
  const Flags flags;
  unsigned char* const shared;
  const Tile tile;
  const int64_t begin;
  const int block_cols, stage;
  int round_in_segment, cols;
  int64_t segment, number;  // of the row among all rows
  RowIndex index = {0, 0};

  __device__ __forceinline__ Round(const BackwardParams& p, const BackwardPlan& plan, Flags flags,
                                   unsigned char* shared, int round, int tile_row)
      : p(p),
        plan(plan),
        flags(flags),
        shared(shared),
        tile{plan.log2_threads, static_cast<int>(threadIdx.x), plan.tile_threads, tile_row},
        begin(Tile::kIsBlock ? int64_t{plan.chunk_cols} * blockIdx.x : 0),
        block_cols(static_cast<int>(min(p.cols - begin, int64_t{plan.chunk_cols}))),
        stage(round & (plan.stages - 1)),  // there are 1 or 2
        round_in_segment(round),
        segment(blockIdx.y) {
    int64_t group = 0, segment_in_group = segment;
    if (flags.has(kWeightPerGroup | kBiasPerGroup)) {
      const auto turn = plan.rounds.divide(round);
      round_in_segment = static_cast<int>(turn.remainder);
      segment += turn.quotient * gridDim.y;
      const auto divided = plan.segments_per_group.divide(segment);
      group = divided.quotient, segment_in_group = divided.remainder;
    }
    const int64_t first = segment_in_group * plan.segment_rows;
    const int64_t row = first + int64_t{round_in_segment} * tile.rows_per_block() + tile.row();
    number = group * plan.gradient_group_rows + row;
    const bool exists = segment < plan.num_segments && row < min(first + plan.segment_rows, plan.gradient_group_rows);
    cols = exists ? block_cols : 0;
    if (exists) index = find_group(number, flags.has(kHasGroups), plan.rows);
  }

  __device__ __forceinline__ bool needs_x() const { return flags.has(kGradInput | kGradWeight); }
  __device__ __forceinline__ Row<T> dy() const { return row<T>(stage * arrays(), p.grad_output); }
  __device__ __forceinline__ Row<X> x() const { return row<X>(stage * arrays() + 1, p.input); }
  __device__ __forceinline__ Row<X> grad_sum() const { return row<X>((stage + 1) * arrays() - 1, p.grad_sum); }
  __device__ __forceinline__ Row<X> dx() const { return row<X>(plan.stages * arrays(), p.grad_input); }
  // The sums of the row's chunks, after all partial sums.
  __device__ __forceinline__ RowSums<Acc>* chunk_sums() const {
    Acc* const first = static_cast<Acc*>(plan.workspace) + (plan.weight_partials + plan.bias_partials) * plan.pitch;
    return reinterpret_cast<RowSums<Acc>*>(first) + number * plan.num_chunks;
  }
  // Waits until the other threads have written to this thread's shared memory, or read what this thread overwrites.
  __device__ __forceinline__ void sync_unaligned() const {
    if (!flags.has(kAligned)) tile.sync();
  }

  __device__ __forceinline__ Statistics<Acc> statistics() const {
    return {p, index, flags.has(kFromOutput), needs_x() && cols > 0};
  }

  // Loads the weight or the bias from a column on, with zeros after the end. Aligned rows have no partial vectors.
  template <int kSize>
  __device__ __forceinline__ void load_parameter(Vector<W, kSize>& v, const View& view, Flag exists, int column,
                                                 W default_value) const {
    const int remaining = flags.has(kAligned) ? kSize : cols - column;
    load_or(v, address<const W>(view, {index.group, 0}) + begin + column, flags.has(exists), remaining,
            flags.has(kAlignedParameters), default_value);
  }

  // This function and the next compute elements [k, k + kSub) of a vector.
  __device__ __forceinline__ void widen_weight(Acc (&w)[kSub], const Vector<W, kVec>& weight, int k) const {
    widen(w, weight, k);
#pragma unroll
    for (int e = 0; e < kSub; ++e) w[e] = flags.has(kZeroCentered) ? w[e] + 1 : w[e];
  }

  // Computes d (see Statistics) from x, or from the output.
  __device__ __forceinline__ void subtract_mean(Acc (&d)[kSub], const Vector<X, kVec>& x, const Acc (&w)[kSub],
                                                const Statistics<Acc>& statistics, int first_column, int k) const {
    const int column = first_column + k;
    widen(d, x, k);
    Vector<W, kSub> b;
    if (flags.has(kFromOutput)) load_parameter(b, p.bias, kBias, column, W(0.0f));
#pragma unroll
    for (int e = 0; e < kSub; ++e) {
      d[e] = flags.has(kFromOutput) ? recover_xhat(d[e], w[e], static_cast<Acc>(b.values[e]))
                                    : fma(d[e], statistics.scale, -statistics.mean);
    }
  }

  // Starts to fetch the rows, and prefetches the statistics.
  __device__ __forceinline__ void fetch() const {
    dy().fetch();
    if (needs_x()) x().fetch();
    if (flags.has(kGradSum)) grad_sum().fetch();
    if (!needs_x() || cols == 0) return;
    if (p.mean.data) prefetch(address<const Acc>(p.mean, index));
    prefetch(address<const Acc>(p.rstd, index));
  }

 private:
  __device__ __forceinline__ int arrays() const { return 1 + needs_x() + flags.has(kGradSum); }
  template <class E>
  __device__ __forceinline__ Row<E> row(int array, const View& view) const {
    unsigned char* const memory = shared + (array * tile.rows_per_block() + tile.row()) * Row<X>::bytes(tile.threads());
    return {memory, address<E>(view, index) + begin, cols, tile, flags.has(kAligned)};
  }
};

// ---- sums of a row --------------------------------------------------------------------------------------------------

// Adds the sums of a row's chunks, in an order that depends only on their number.
template <class Acc>
__device__ __forceinline__ void reduce_chunks(RowSums<Acc>& sums, const RowSums<Acc>* chunk_sums, int num_chunks) {
  RowSums<double> lane_sums = {};
#pragma unroll 1
  for (int i = threadIdx.x % kWarpSize; i < num_chunks; i += kWarpSize) {
#pragma unroll
    for (int k = 0; k < 3; ++k) lane_sums[k] += chunk_sums[i][k];
  }
#pragma unroll
  for (int k = 0; k < 3; ++k) sums[k] = static_cast<Acc>(sum_lanes<kWarpSize>(lane_sums[k]));
}

template <class Acc>
__device__ __forceinline__ RowMeans<Acc> compute_means(const RowSums<Acc>& sums, const BackwardParams& p,
                                                       const BackwardPlan& plan, bool rms, Acc rstd) {
  const Divisor<Acc> cols(static_cast<Acc>(p.cols), static_cast<Acc>(plan.reciprocal_cols));
  RowMeans<Acc> means = {};
  if (!rms) means.xhat = cols.divide(sums[0]) * rstd, means.g = cols.divide(sums[1]);
  means.g_xhat = cols.divide(sums[2]) * rstd - means.xhat * means.g;
  return means;
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

// Adds this thread's part of a row to the sums; those of g only if dx is wanted.
template <class Types, class Tile, class Acc>
__device__ __forceinline__ void add_to_sums(RowSums<Acc>& sums, const Round<Types, Tile>& row,
                                            const Statistics<Acc>& statistics) {
  using W = typename Types::W;
  constexpr int kVec = Round<Types, Tile>::kVec, kSub = Round<Types, Tile>::kSub;
  const auto x = row.x();
  const auto dy = row.dy();
  row.tile.template for_each_vector<kVec>(row.cols, [&](int i) {
    const auto x_vector = x.read(i);
    const auto dy_vector = dy.read(i);
    const int first_column = row.tile.vector_index(i) * kVec;
    Vector<W, kVec> weight;
    row.load_parameter(weight, row.p.weight, kWeight, first_column, W(1.0f));
#pragma unroll
    for (int k = 0; k < kVec; k += kSub) {
      Acc w[kSub], d[kSub], dy_values[kSub];
      row.widen_weight(w, weight, k);
      row.subtract_mean(d, x_vector, w, statistics, first_column, k);
#pragma unroll
      for (int e = 0; e < kSub; ++e) {
        if (!row.flags.has(kAligned) && first_column + k + e >= row.cols) d[e] = 0;
        sums[0] += d[e];
      }
      if (!row.flags.has(kGradInput)) continue;
      widen(dy_values, dy_vector, k);
#pragma unroll
      for (int e = 0; e < kSub; ++e) {
        const Acc g = dy_values[e] * w[e];
        sums[1] += g;
        sums[2] = fma(g, d[e], sums[2]);
      }
    }
  });
}

// Stores this thread's part of dx, and adds to its columns' sums of dweight and dbias, whether they are wanted or not.
template <class Types, class Tile, int kVec, class Acc>
__device__ __forceinline__ void store_grad_input(Acc (&dw)[kTileVectors][kVec], Acc (&db)[kTileVectors][kVec],
                                                 const Round<Types, Tile>& row, const Statistics<Acc>& statistics,
                                                 const RowMeans<Acc>& means) {
  using X = typename Types::X;
  using W = typename Types::W;
  constexpr int kSub = Round<Types, Tile>::kSub;
  const Flags flags = row.flags;
  // The product of two 16-bit numbers is exact in float, so fusing changes nothing; weight + 1 may need more bits.
  const bool fuses = sizeof(typename Types::T) == 2 && sizeof(W) == 2 && !flags.has(kZeroCentered);
  const auto x = row.x(), dx = row.dx();
  const auto dy = row.dy();
  row.tile.template for_each_vector<kVec>(row.cols, [&](int i) {
    const int first_column = row.tile.vector_index(i) * kVec;
    Vector<X, kVec> dx_vector, x_vector;
    Vector<W, kVec> weight;
    if (row.needs_x()) {
      x_vector = x.read(i);
      row.load_parameter(weight, row.p.weight, kWeight, first_column, W(1.0f));
    }
    const auto dy_vector = dy.read(i);
#pragma unroll
    for (int k = 0; k < kVec; k += kSub) {
      Acc w[kSub], xhat[kSub], dy_values[kSub], dx_values[kSub];
      widen(dy_values, dy_vector, k);
#pragma unroll
      for (int e = 0; e < kSub; ++e) db[i][k + e] += dy_values[e];
      if (!row.needs_x()) continue;
      row.widen_weight(w, weight, k);
      row.subtract_mean(xhat, x_vector, w, statistics, first_column, k);
#pragma unroll
      for (int e = 0; e < kSub; ++e) {
        xhat[e] = fma(xhat[e], statistics.rstd, -means.xhat);
        dw[i][k + e] = fma(dy_values[e], xhat[e], dw[i][k + e]);
        const Acc g_minus_mean = fuses ? fma(dy_values[e], w[e], -means.g) : dy_values[e] * w[e] - means.g;
        dx_values[e] = means.grad_input(g_minus_mean, xhat[e], statistics);
      }
      if (flags.has(kGradSum)) {
        Acc dsum[kSub];
        widen(dsum, row.grad_sum().read(i), k);
#pragma unroll
        for (int e = 0; e < kSub; ++e) dx_values[e] += dsum[e];
      }
      reinterpret_cast<Vector<X, kSub>&>(dx_vector.values[k]) = round_to<X>(dx_values);
    }
    if (flags.has(kGradInput)) dx.store(i, dx_vector);
  });
  if (flags.has(kGradInput)) dx.end_of_store();
}

// Adds up a gradient's sums over the rows of the block. Stores them from the block's first column on: in the workspace,
// whose sums of earlier rounds are added, or in the gradient if its group has one segment.
template <class Types, class Tile, int kVec, class Acc>
__device__ __forceinline__ void store_sums(const Acc (&sums)[kTileVectors][kVec], const Round<Types, Tile>& row,
                                           const View& gradient, Flag per_group, int64_t first_partial) {
  using W = typename Types::W;
  const Tile& tile = row.tile;
  const int rows = tile.rows_per_block(), cols = row.block_cols;
  const int step = tile.threads() * kVec;  // columns that the threads of a row hold in one vector each
  const bool is_gradient = row.plan.stores_gradient(per_group) && row.flags.has(per_group);
  const int64_t partial = first_partial + row.segment;
  Acc* const to_workspace = static_cast<Acc*>(row.plan.workspace) + partial * row.plan.pitch + row.begin;
  W* const to_gradient = address<W>(gradient, {row.segment, 0}) + row.begin;
  const auto store = [&](int column, Acc sum) {
    if (is_gradient) {
      to_gradient[column] = W(sum);
    } else {
      to_workspace[column] = row.round_in_segment < kRoundsPerSum ? sum : to_workspace[column] + sum;
    }
  };
  __shared__ Acc thread_sums[kThreads][kVec];
#pragma unroll
  for (int i = 0; i < kTileVectors; ++i) {
    if (i * step >= cols) break;
    if (!Tile::kIsBlock || rows > 1) {
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kVec; ++e) thread_sums[threadIdx.x][e] = sums[i][e];
      __syncthreads();
    }
    if constexpr (Tile::kIsBlock) {  // the threads of the first row add those of the others
      if (tile.row() > 0) continue;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const int column = tile.vector_index(i) * kVec + e;
        Acc total = sums[i][e];
#pragma unroll 1
        for (int r = 1; r < rows; ++r) total += thread_sums[r * tile.threads() + tile.thread()][e];
        if (column < cols) store(column, total);
      }
    } else {  // many short rows
#pragma unroll 1
      for (int c = threadIdx.x; c < step && i * step + c < cols; c += blockDim.x) {
        Acc total = 0;
#pragma unroll 4
        for (int r = 0; r < rows; ++r) total += (&thread_sums[0][0])[r * step + c];
        store(i * step + c, total);
      }
    }
  }
}

template <bool kIsFastPath, class Types, class Tile>
__device__ __forceinline__ void process_rows(const BackwardParams& p, const BackwardPlan& plan) {
  using Acc = AccOf<typename Types::X>;
  constexpr int kVec = kVectorSize<typename Types::X>;
  // Only rows of block tiles have chunks. Warp tiles would spill if they tested these flags.
  const unsigned bits = Tile::kIsBlock ? plan.flags.bits : plan.flags.bits & ~(kInCluster | kStoresSums | kLoadsSums);
  const Flags flags = {kIsFastPath ? kFastPathFlags | (bits & kFastPathOptions) : bits};
  const bool needs_sums = flags.has(kGradInput) || (flags.has(kGradWeight) && !flags.has(kRms));
  const bool in_cluster = flags.has(kInCluster);
  extern __shared__ __align__(16) unsigned char shared[];
  // The shuffle tells the compiler that a warp has one row, whose addresses then need no registers of each thread.
  const int tile_row =
      Tile::kIsBlock ? __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) >> plan.log2_threads, 0) : 0;
  const auto row_of = [&](int round) { return Round<Types, Tile>(p, plan, flags, shared, round, tile_row); };
  const auto fetch = [&](int round) {
    if (has_round(plan, flags, round)) row_of(round).fetch();
    async_commit();
  };
#pragma unroll 1
  for (int round = 0; round < plan.stages; ++round) fetch(round);
  __shared__ ClusterExchange<RowSums<Acc>> exchange;
  if (in_cluster) {
    if (threadIdx.x == 0) exchange.init();
    cluster_arrive(), cluster_wait();
  }
  if (flags.has(kLoadsSums)) wait_for_previous_grid();

  Acc dw[kTileVectors][kVec], db[kTileVectors][kVec];
#pragma unroll 1
  for (int round = 0; has_round(plan, flags, round); ++round) {
    const auto row = row_of(round);
    if (row.round_in_segment % kRoundsPerSum == 0) {
#pragma unroll
      for (int i = 0; i < kTileVectors; ++i) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) dw[i][e] = db[i][e] = 0;
      }
      keep_branch();
    }
    const Statistics<Acc> statistics = row.statistics();
    if (plan.stages == 1) {
      async_wait<0>();
    } else {
      async_wait<kMaxStages - 1>();
    }
    row.sync_unaligned();

    RowSums<Acc> sums = {};
    if (flags.has(kLoadsSums)) {
      if (needs_sums && row.cols > 0) reduce_chunks(sums, row.chunk_sums(), plan.num_chunks);
    } else if (needs_sums) {
      add_to_sums(sums, row, statistics);
      sum_tile(sums, row.tile, round % 2);
      if (in_cluster) reduce_chunks(sums, exchange.gather(sums, plan.num_chunks, round), plan.num_chunks);
    }
    if (flags.has(kStoresSums)) {
      if (row.cols > 0 && row.tile.thread() == 0) {
#pragma unroll
        for (int k = 0; k < 3; ++k) row.chunk_sums()[blockIdx.x][k] = sums[k];
      }
    } else {
      RowMeans<Acc> means = {};
      if (needs_sums) means = compute_means(sums, p, plan, flags.has(kRms), statistics.rstd);
      store_grad_input(dw, db, row, statistics, means);
    }
    row.sync_unaligned();
    fetch(round + plan.stages);

    const int rounds = row.round_in_segment + 1;
    if (flags.has(kStoresSums) || (rounds != plan.rounds.divisor() && rounds % kRoundsPerSum != 0)) continue;
    if (flags.has(kGradWeight)) store_sums(dw, row, p.grad_weight, kWeightPerGroup, 0);
    if (flags.has(kGradBias)) store_sums(db, row, p.grad_bias, kBiasPerGroup, plan.weight_partials);
  }
  async_wait<0>();  // before the block returns
  let_next_grid_start();
}

template <class Types, class Tile>
__global__ void __launch_bounds__(Tile::kIsBlock ? kMaxBlockThreads : kThreads, Tile::kIsBlock ? 1 : 2)
    backward_rows(const BackwardParams p, const BackwardPlan plan) {
  if ((plan.flags.bits & ~kFastPathOptions) == kFastPathFlags) return process_rows<true, Types, Tile>(p, plan);
  process_rows<false, Types, Tile>(p, plan);
}

// ---- host code ------------------------------------------------------------------------------------------------------

// The most vectors of a chunk: few, so that two blocks fit on a multiprocessor, or more if the row then needs no second
// launch.
int64_t max_chunk_vectors(int64_t vectors, const LaunchConfig& config, bool has_clusters) {
  constexpr size_t kEnoughForLargeChunks = 144 * 1024;  // dy, x, grad_sum and dx of a large chunk
  const int64_t most = max_shared_memory(config) >= kEnoughForLargeChunks ? kMaxLargeChunkVectors : kMaxChunkVectors;
  const int64_t blocks = has_clusters ? kMaxClusterSize : 1;
  return vectors <= blocks * most ? std::max(kMaxChunkVectors, ceil_div(vectors, blocks)) : kMaxChunkVectors;
}

template <class Types, class Tile>
void launch_backward(const BackwardParams& p, const RowLayout& layout, LaunchConfig config) {
  using X = typename Types::X;
  using Acc = AccOf<X>;
  const auto kernel = backward_rows<Types, Tile>;
  BackwardPlan plan(layout);
  plan.flags = make_flags<typename Types::T, X, typename Types::W>(p);
  plan.pitch = round_up(p.cols, kVectorSize<X>);
  plan.reciprocal_cols = 1.0 / static_cast<double>(p.cols);
  const bool in_cluster = plan.num_chunks > 1 && plan.num_chunks <= kMaxClusterSize &&
                          has_clusters(config, backward_rows<Types, BlockTile>);
  plan.flags.set(kInCluster, in_cluster);
  const bool reads_twice = plan.num_chunks > 1 && !in_cluster;

  // A row of more than half as many threads takes a whole block. Rows of groups with few rows and gradients of their
  // own have blocks of few threads.
  const bool per_group = plan.flags.has(kWeightPerGroup | kBiasPerGroup);
  const int64_t vectors = ceil_div(plan.chunk_cols, kVectorSize<X>);
  int64_t threads = kThreads;
  if (plan.num_chunks > 1 || 2 << plan.log2_threads > kThreads) {
    threads = std::min<int64_t>(round_up(vectors, kWarpSize), 1 << plan.log2_threads);
  } else if (per_group) {
    threads = std::min(threads, round_up(p.rows << plan.log2_threads, kWarpSize));
  }
  const int rows_per_block = plan.rows_per_block(threads);
  plan.tile_threads = static_cast<int>(threads) / rows_per_block;
  const auto bytes = [&](int arrays, int stages, bool aligned) {
    return Round<Types, Tile>::shared_bytes(plan.tile_threads, rows_per_block, arrays, stages, aligned);
  };
  // The number of blocks determines the order of summation of dweight and dbias. It depends neither on the alignment
  // nor on which gradients are wanted. Rows that are not aligned also need memory for dx, and have a second stage only
  // if that leaves as many blocks resident.
  constexpr size_t kMaxStaticShared = 12 * 1024;
  const int most_arrays = p.grad_sum.data ? 3 : 2;
  plan.stages = bytes(most_arrays, kMaxStages, false) + kMaxStaticShared <= max_shared_memory(config) ? kMaxStages : 1;
  config.block = static_cast<unsigned>(threads);
  config.cluster = in_cluster ? static_cast<unsigned>(plan.num_chunks) : 1;
  const auto resident_rows = [&](size_t shared_bytes) {
    config.shared_bytes = shared_bytes;
    return std::max(resident_blocks(config, kernel) / plan.num_chunks, 1);
  };
  const int resident = resident_rows(std::max(bytes(most_arrays, plan.stages, true), bytes(most_arrays, 1, false)));
  const int arrays = 1 + plan.flags.has(kGradInput | kGradWeight) + plan.flags.has(kGradSum);
  const bool aligned = plan.flags.has(kAligned);
  if (!aligned && resident_rows(bytes(arrays, plan.stages, false)) < resident) plan.stages = 1;
  config.shared_bytes = bytes(arrays, plan.stages, aligned);

  plan.set_segments(p, rows_per_block, resident, plan.num_chunks > 1 ? 4 : 16);  // long rows keep the GPU busy
  const int64_t blocks = std::min({plan.num_segments, int64_t{resident}, kMaxGridY});
  config.grid = dim3(static_cast<unsigned>(plan.num_chunks), static_cast<unsigned>(blocks));

  const int64_t chunk_sums = reads_twice ? 3 * p.groups * p.rows * plan.num_chunks : 0;
  const int64_t elements = (plan.weight_partials + plan.bias_partials) * plan.pitch + chunk_sums;
  if (elements > 0) plan.workspace = p.allocator->allocate(elements * static_cast<int64_t>(sizeof(Acc)));
  if (reads_twice) {
    plan.flags.set(kStoresSums, true);
    launch(config, kernel, p, plan);
    plan.flags.set(kStoresSums, false);
    plan.flags.set(kLoadsSums, true);
    config.overlaps_previous = true;
  }
  launch(config, kernel, p, plan);
  launch_add_partials<Acc, typename Types::W>(p, plan, plan.pitch, config);
}

}  // namespace

void backward(const BackwardParams& p) {
  if (p.channels_first) return channels_first_backward(p);
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using Types = decltype(types);
    constexpr int64_t kVec = kVectorSize<typename Types::X>;
    LaunchConfig config;
    config.stream = static_cast<Stream>(p.stream);
    const bool clusters = has_clusters(config, backward_rows<Types, BlockTile>);
    const RowLayout layout(p.cols, kVec, max_chunk_vectors(ceil_div(p.cols, kVec), config, clusters));
    layout.is_warp_tile ? launch_backward<Types, WarpTile>(p, layout, config)
                        : launch_backward<Types, BlockTile>(p, layout, config);
  });
}

}  // namespace layernorm::cuda
