// With xhat = (x - mean) * rstd and g = dy * weight, for every row of x and dy [groups, rows, cols] on a GPU:
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat))      dweight = sum of dy * xhat over rows      dbias = sum of dy
//
// and dx = rstd * (g - xhat * mean(g * xhat)) for RMSNorm, whose mean is 0. If forward also returned x as a sum, the
// gradient of that sum is added to dx.
//
// Blocks are persistent: they take rows in turn and fetch the next rows to shared memory while they work. A thread
// reads its vectors of a row twice, for the row's sums and for dx. It keeps the sums of dweight and dbias for its
// columns in registers over its rows, and then writes them to the workspace. A second kernel adds the rows of the
// workspace in order, so that no atomic operation makes the result random: 3 * groups * rows * cols * sizeof(T) bytes
// are moved.
//
// If each group has gradients of its own, its rows are divided into segments, and blocks take segments in turn. Many
// rows of short segments are shared by a block; else each row of a block has a segment to itself. The sums of a segment
// go to the workspace, or straight to the gradient if the group has no other segment.
//
// Longer rows are divided into chunks, one for each block. From compute capability 9.0 on, a cluster of up to 8
// blocks exchanges its sums once per row. Still longer rows, and those on older GPUs, are read twice, first by a kernel
// that computes the sums. This happens in ranges of rows that stay in the L2 cache until the second read.
//
// The numerical method is that of the CPU kernels (cpu/backward.cpp): the saved mean is rounded, so that the mean of
// xhat is not 0. A third sum finds it, and it is subtracted before xhat is used. The division of a row depends only on
// the device, the dtypes and the number of columns, and so does dx.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include <algorithm>
#include <cstdint>

#include "../dtypes.h"
#include "channels_first.h"
#include "partials.cuh"
#include "pipeline.cuh"

namespace layernorm::cuda {

// The division of the work among blocks and launches. The host fills the plan, and the kernels read it.
//
// Rows are numbered by group. If weight or bias is per group, the rows of a group are divided into segments of the same
// length, and rows at the end of a group's last segment may not exist.
struct LaunchPlan {
  int64_t first_row, end_row;  // of this launch
  int64_t num_slots;           // a slot is a block, or all blocks that share a row
  int64_t pitch;               // elements from row to row of the workspace
  // In round turn * rounds_per_turn + k, a block's row r has the number
  //   first_row + slot * slot_step + turn * turn_step + k * round_step + r * row_step.
  // A turn is a segment, or a round without segments.
  int64_t slot_step, turn_step, round_step, row_step;
  FastDivisor<int> rounds_per_turn;
  FastDivisor<int64_t> rows;  // of a group, including those that do not exist
  FastDivisor<int64_t> segment_rows;
  int64_t weight_partials, bias_partials;  // rows of the workspace
  double reciprocal_cols;
  unsigned num_chunks;  // of a row; each has a block
  int chunk_cols;
  unsigned num_parts;  // of a row in backward_sums; each has a block
  int chunks_per_part;
  int log2_lanes;  // the number of lanes that share a row of a WarpTile, as a logarithm
  int rows_per_block;
  int stages;
  bool has_groups;
  bool has_segments;
  bool shares_segments;   // the rows of a block share a segment, else each has one
  bool writes_gradients;  // a group has one segment, whose sums are its gradients
  bool weight_is_per_group, bias_is_per_group;
  bool in_cluster;
  bool separate_sums;  // backward_sums computes the row sums before backward_rows
  bool accumulates;    // dweight and dbias are added to the workspace instead of overwriting it
  bool aligned;        // every row starts at a multiple of 16 bytes, and consists of whole vectors
  bool aligned_parameters, aligned_gradients;
  bool fast_path;  // all gradients of an aligned LayerNorm with a weight, one group and without options
};

namespace {

// Sums in Acc over this many rows are added to the workspace, which limits their rounding errors.
constexpr int kRowsPerSum = 256;

// The sums over a row of xhat, g and g * xhat.
template <class Acc>
using RowSums = Acc[3];

// The workspace has partial sums of dweight [weight_partials, pitch] and dbias [bias_partials, pitch], and then the row
// sums [rows of a launch, num_parts].
template <class Acc>
__host__ __device__ Acc* row_sums_in_workspace(const BackwardParams& p, const LaunchPlan& plan) {
  return static_cast<Acc*>(p.workspace) + (plan.weight_partials + plan.bias_partials) * plan.pitch;
}

// A vector is processed in sub-vectors whose parameters are 16 bytes. More would not fit into registers beside the
// sums.
template <class X, class W>
constexpr int kSubVectorSize = std::min(kVectorSize<X>, kVectorSize<W>);

// ---- the rows of a block --------------------------------------------------------------------------------------------

// A row of a block in a round. The index of a row that does not exist is that of row 0.
struct BlockRow {
  RowIndex index;
  int64_t number;
  bool exists;
};

// The rows that a block takes in turn.
template <bool kFastPath>
struct Rounds {
  const LaunchPlan& plan;

  __device__ __forceinline__ int64_t row_number(int round, int row_in_block) const {
    const int64_t first = plan.first_row + blockIdx.y * plan.slot_step;
    if (kFastPath) return first + round * plan.turn_step + row_in_block;
    const auto [turn, k] = plan.rounds_per_turn.divide(round);
    return first + turn * plan.turn_step + k * plan.round_step + row_in_block * plan.row_step;
  }
  // Whether the block has work in this round.
  __device__ __forceinline__ bool has(int round) const { return row_number(round, 0) < plan.end_row; }

  __device__ __forceinline__ BlockRow row(int round, int row_in_block, int64_t rows_of_group) const {
    const int64_t number = row_number(round, row_in_block);
    RowIndex index = {0, number};
    bool exists = number < plan.end_row;
    if (!kFastPath && plan.has_groups) {
      index = find_group(number, true, plan.rows);
      exists = exists && index.row < rows_of_group;
    }
    if (!exists) index = {0, 0};
    return {index, number, exists};
  }
  // The sums of dweight and dbias are stored after so many rounds.
  __device__ __forceinline__ int per_sum() const {
    return kFastPath || !plan.has_segments ? kRowsPerSum : plan.rounds_per_turn.divisor();
  }
  __device__ __forceinline__ bool ends_sum(int round) const {
    if (kFastPath || !plan.has_segments) return (round + 1) % kRowsPerSum == 0;
    return plan.rounds_per_turn.divide(round + 1).remainder == 0;
  }
};

// ---- vectors --------------------------------------------------------------------------------------------------------

// The weight or the bias of a group from a column on, or null.
template <class W>
__device__ __forceinline__ const W* parameter(const View& view, int64_t group, int64_t begin) {
  return view.data ? address<const W>(view, {group, 0}) + begin : nullptr;
}

// Loads the weight from `column` on if it is needed, with zeros after the remaining columns.
template <bool kFastPath, class W, int kSub>
__device__ __forceinline__ void load_weight(Vector<W, kSub>& w, const W* weight, const BackwardParams& p,
                                            const LaunchPlan& plan, int column, int remaining) {
  if (kFastPath) {
    w = {};
    if (remaining > 0) w = *reinterpret_cast<const Vector<W, kSub>*>(weight + column);
  } else if (p.grad_input.data || p.from_output) {
    load_or(w, weight, column, remaining, plan.aligned_parameters, W(1.0f));
  }
}

// Computes xhat - correction from columns of x, or of the output if p.from_output; bias() returns the bias. After the
// remaining columns x is 0, and so is the result if kPartial is true or if no column remains.
template <bool kFastPath, bool kPartial, class X, class W, int kSub, class Acc, class F>
__device__ __forceinline__ void normalize(Acc (&xhat)[kSub], const Vector<X, kSub>& x, const Vector<W, kSub>& w,
                                          const F& bias, const BackwardParams& p, const LaunchPlan& plan,
                                          const Statistics<Acc>& row, Acc correction, int column, int remaining) {
  if (!kFastPath && p.from_output) {
    Vector<W, kSub> b;
    load_or(b, bias(), column, remaining, plan.aligned_parameters, W(0.0f));
    const Acc weight_offset = p.zero_centered_weight ? 1 : 0;
#pragma unroll
    for (int e = 0; e < kSub; ++e) {
      xhat[e] = e < remaining ? recover_xhat(static_cast<Acc>(x.values[e]), static_cast<Acc>(w.values[e]),
                                             static_cast<Acc>(b.values[e]), weight_offset, correction)
                              : 0;
    }
    return;
  }
  widen(xhat, x);
  Statistics<Acc> statistics = row;
  if (remaining <= 0) statistics.mean = 0;
#pragma unroll
  for (int e = 0; e < kSub; ++e) {
    if (kPartial && e >= remaining) statistics.mean = 0;
    xhat[e] = statistics.xhat(xhat[e], correction);
  }
}

// g = dy * weight.
template <class W, int kSub, class Acc>
__device__ __forceinline__ void multiply(Acc (&g)[kSub], const Acc (&dy)[kSub], const Vector<W, kSub>& weight,
                                         bool zero_centered) {
  Acc w[kSub];
  widen(w, weight);
  if (zero_centered) {
#pragma unroll
    for (int e = 0; e < kSub; ++e) g[e] = dy[e] * (w[e] + 1);
  } else {
#pragma unroll
    for (int e = 0; e < kSub; ++e) g[e] = dy[e] * w[e];
  }
}

// ---- sums of a row --------------------------------------------------------------------------------------------------

// Adds this thread's part of `cols` columns of a row to the sums; those of g only if dx is wanted.
template <bool kFastPath, class T, class X, class W, class Tile, class F>
__device__ __forceinline__ void add_to_sums(RowSums<AccOf<X>>& sums, const BackwardParams& p, const LaunchPlan& plan,
                                            const W* weight, const F& bias, const RowPipeline<T, X, Tile>& pipeline,
                                            const Statistics<AccOf<X>>& statistics, const Position<Tile>& position,
                                            int cols) {
  using Acc = AccOf<X>;
  constexpr int kVec = kVectorSize<X>, kSub = kSubVectorSize<X, W>;
  const auto dy = pipeline.dy(position);
  const auto x = pipeline.x(position);
  with_constant(kFastPath || plan.aligned, [&](auto aligned) {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (!position.template warp_has_vector<kVec>(i, cols)) continue;
#pragma unroll
      for (int k = 0; k < kVec; k += kSub) {
        const int column = position.vector_index(i) * kVec + k, remaining = cols - column;
        Vector<W, kSub> w;
        load_weight<kFastPath>(w, weight, p, plan, column, remaining);
        Acc xhat[kSub];
        normalize<kFastPath, !aligned>(xhat, sub_vector<kSub>(x.read(i), k), w, bias, p, plan, statistics, Acc(0),
                                       column, remaining);
#pragma unroll
        for (int e = 0; e < kSub; ++e) sums[0] += xhat[e];
        if (!kFastPath && !p.grad_input.data) continue;
        Acc g[kSub];
        widen(g, sub_vector<kSub>(dy.read(i), k));
        multiply(g, g, w, !kFastPath && p.zero_centered_weight);
#pragma unroll
        for (int e = 0; e < kSub; ++e) {
          sums[1] += g[e];
          sums[2] = fma(g[e], xhat[e], sums[2]);
        }
      }
    }
  });
}

// Reduces the sums over the threads of a tile. Two buffers take turns by `round`, so that one barrier per row suffices.
template <class Tile, class Acc>
__device__ __forceinline__ void reduce_tile(RowSums<Acc>& sums, const Position<Tile>& position, int round) {
  if constexpr (Tile::kWarps == 1) {
    for (int offset = position.threads_per_row() / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (Acc& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, offset);
    }
    __syncwarp();  // only for the compiler: it reads the row again instead of keeping it in registers
  } else {
#pragma unroll
    for (Acc& sum : sums) sum = sum_lanes<kWarpSize>(sum);
    __shared__ RowSums<Acc> warp_sums[2][Tile::kWarps];
    if (position.lane == 0) {
#pragma unroll
      for (int k = 0; k < 3; ++k) warp_sums[round % 2][position.warp][k] = sums[k];
    }
    __syncthreads();
    const int warp = position.lane % Tile::kWarps;  // may be beyond the block
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      sums[k] =
          sum_lanes<Tile::kWarps>(warp * kWarpSize < position.threads_per_row() ? warp_sums[round % 2][warp][k] : 0);
    }
  }
}

// Adds the sums of kLanes lanes. Further lanes with zeros would not change the result.
template <int kLanes, class Acc>
__device__ __forceinline__ void reduce_lanes(RowSums<Acc>& sums, const RowSums<double>& lane_sums) {
#pragma unroll
  for (int k = 0; k < 3; ++k) sums[k] = static_cast<Acc>(sum_lanes<kLanes>(lane_sums[k]));
}

// Reduces the sums over the blocks of a cluster, all of which must have started. Two buffers take turns, so that one
// barrier per row suffices: a block that is ahead writes to a buffer that no block reads.
template <class Acc>
__device__ __forceinline__ void reduce_cluster(RowSums<Acc>& sums, unsigned blocks, int round) {
  __shared__ RowSums<Acc> block_sums[2][kMaxClusterSize];
  if (threadIdx.x < blocks) {
    auto& dst = *cluster_peer(&block_sums[round % 2][cluster_rank()], threadIdx.x);
#pragma unroll
    for (int k = 0; k < 3; ++k) dst[k] = sums[k];
  }
  cluster_arrive();
  cluster_wait();
  const unsigned block = threadIdx.x % kMaxClusterSize;
  RowSums<double> lane_sums = {};
#pragma unroll
  for (int k = 0; k < 3; ++k) lane_sums[k] = block < blocks ? block_sums[round % 2][block][k] : 0;
  reduce_lanes<kMaxClusterSize>(sums, lane_sums);
}

// Reduces the sums of a row's parts, which backward_sums has written.
template <class Acc>
__device__ __forceinline__ void reduce_parts(RowSums<Acc>& sums, const Acc* part_sums, unsigned num_parts) {
  RowSums<double> lane_sums = {};
#pragma unroll 1
  for (unsigned i = threadIdx.x % kWarpSize; i < num_parts; i += kWarpSize) {
#pragma unroll
    for (int k = 0; k < 3; ++k) lane_sums[k] += part_sums[3 * i + k];
  }
  reduce_lanes<kWarpSize>(sums, lane_sums);
}

template <class Acc>
__device__ __forceinline__ RowMeans<Acc> compute_means(const RowSums<Acc>& sums, const BackwardParams& p,
                                                       const LaunchPlan& plan) {
  const auto mean = [&](Acc sum) {
    return divide_by_count(sum, static_cast<Acc>(p.cols), static_cast<Acc>(plan.reciprocal_cols));
  };
  RowMeans<Acc> means = {};
  if (!p.rms) means.xhat = mean(sums[0]), means.g = mean(sums[1]);
  means.g_xhat = mean(sums[2]) - means.xhat * means.g;
  return means;
}

// ---- dweight and dbias ----------------------------------------------------------------------------------------------

// Where the sums of a gradient go, from a column on: to a row of the workspace, or straight to the gradient (of W).
template <class Acc, class W>
struct SumsTarget {
  void* data;
  bool is_gradient;
  bool aligned;  // the gradient
  bool adds;     // to what the workspace holds

  __device__ __forceinline__ void store(int column, Acc sum) const {
    if (is_gradient) {
      static_cast<W*>(data)[column] = W(sum);
    } else {
      Acc& total = static_cast<Acc*>(data)[column];
      total = adds ? total + sum : sum;
    }
  }
  // Stores a vector, of which `remaining` elements are columns. The workspace has room for whole vectors.
  template <int kVec>
  __device__ __forceinline__ void store(int column, const Acc (&sums)[kVec], int remaining) const {
    if (is_gradient) {
      W* const dst = static_cast<W*>(data) + column;
      if (aligned && remaining >= kVec) {
        *reinterpret_cast<Vector<W, kVec>*>(dst) = round_to<W>(sums);
        return;
      }
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        if (e < remaining) dst[e] = W(sums[e]);
      }
      return;
    }
    auto& dst = *reinterpret_cast<Vector<Acc, kVec>*>(static_cast<Acc*>(data) + column);
    Vector<Acc, kVec> total = {};
    if (adds) total = dst;
#pragma unroll
    for (int e = 0; e < kVec; ++e) total.values[e] += sums[e];
    dst = total;
  }
};

// Stores the sums of each thread's columns.
template <class Tile, int kVec, class Acc, class W>
__device__ __forceinline__ void store_sums(const SumsTarget<Acc, W>& target, const Acc (&sums)[Tile::kVectors][kVec],
                                           const Position<Tile>& position, int cols) {
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) {
    const int column = position.vector_index(i) * kVec;
    if (column >= cols) break;
    target.store(column, sums[i], cols - column);
  }
}

// Stores the sums over all rows of the block.
template <class Tile, int kVec, class Acc, class W>
__device__ __forceinline__ void store_block_sums(const SumsTarget<Acc, W>& target,
                                                 const Acc (&sums)[Tile::kVectors][kVec],
                                                 const Position<Tile>& position, int cols) {
  if constexpr (Tile::kWarps > 1) {
    store_sums<Tile>(target, sums, position, cols);
  } else {
    __shared__ Acc thread_sums[Tile::kBlockThreads][kVec];
    const Acc* const row_sums = &thread_sums[0][0];
    const int step = position.threads_per_row() * kVec;  // columns that the threads of a row hold in one vector each
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (i * step >= cols) break;
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kVec; ++e) thread_sums[threadIdx.x][e] = sums[i][e];
      __syncthreads();
#pragma unroll 1
      for (int c = threadIdx.x; c < step && i * step + c < cols; c += Tile::kBlockThreads) {
        Acc total = 0;
#pragma unroll 4
        for (int r = 0; r < position.rows_per_block(); ++r) total += row_sums[r * step + c];
        target.store(i * step + c, total);
      }
    }
  }
}

// ---- kernels --------------------------------------------------------------------------------------------------------

// The addresses of a row of each array, from column `begin` on.
template <bool kFastPath, class T, class X, class Tile>
__device__ __forceinline__ typename RowPipeline<T, X, Tile>::Rows row_addresses(const BackwardParams& p, bool needs_x,
                                                                                const RowIndex& row, int64_t begin) {
  return {kFastPath || p.grad_output.data ? address<const T>(p.grad_output, row) + begin : nullptr,
          kFastPath || needs_x ? address<const X>(p.input, row) + begin : nullptr,
          !kFastPath && p.grad_sum.data ? address<const X>(p.grad_sum, row) + begin : nullptr};
}

// Takes rows, or chunks of rows, in turn. kFastPath is LaunchPlan::fast_path, which saves the tests of what is wanted.
template <bool kFastPath, class T, class X, class W, class Tile>
__device__ __forceinline__ void process_rows(const BackwardParams& p, const LaunchPlan& plan) {
  using Acc = AccOf<X>;
  // Without the fast path, a block's tile of 16-bit elements has no registers left for whole sub-vectors.
  constexpr bool kHalvesSubVectors = !kFastPath && Tile::kWarps > 1 && sizeof(X) == 2;
  constexpr int kVec = kVectorSize<X>, kSub = kSubVectorSize<X, W> / (kHalvesSubVectors ? 2 : 1);
  const bool grad_input = kFastPath || p.grad_input.data, grad_weight = kFastPath || p.grad_weight.data;
  const bool grad_bias = kFastPath || p.grad_bias.data, has_grad_sum = !kFastPath && p.grad_sum.data;
  const bool needs_x = grad_input || grad_weight, needs_sums = grad_input || (grad_weight && !p.rms);
  const int64_t begin = int64_t{plan.chunk_cols} * blockIdx.x;
  const int block_cols = static_cast<int>(min(p.cols - begin, int64_t{plan.chunk_cols}));

  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ MBarrier full_barriers[kMaxStages];
  RowPipeline<T, X, Tile> pipeline(shared, full_barriers, 1 + needs_x + has_grad_sum, plan.stages,
                                   kFastPath || plan.aligned, true, block_cols,
                                   Position<Tile>(threadIdx.x, plan.log2_lanes));
  // Rows that do not exist have no columns.
  const Rounds<kFastPath> rounds{plan};
  const auto row_of = [&](int round, const Position<Tile>& position) {
    return rounds.row(round, position.row, p.rows);
  };
  const auto addresses = [&](const BlockRow& row) {
    return row_addresses<kFastPath, T, X, Tile>(p, needs_x, row.index, begin);
  };
  const auto cols_of = [&](const BlockRow& row) { return row.exists ? block_cols : 0; };
  const auto fetch = [&](int round, const Position<Tile>& position) {
    const BlockRow row = row_of(round, position);
    pipeline.fetch(addresses(row), cols_of(row), position);
  };
  constexpr bool kMayUseCluster = Tile::kWarps > 1 && sizeof(X) < 8;
#pragma unroll 1
  for (int stage = 0; stage < plan.stages; ++stage) fetch(stage, Position<Tile>(threadIdx.x, plan.log2_lanes));
  if constexpr (kMayUseCluster) {
    if (plan.in_cluster) cluster_arrive(), cluster_wait();
  }
  if (plan.separate_sums) wait_for_previous_grid();

  // Recompute the thread's position for each row and each read of it; keeping it in registers causes spills.
  const auto reload_position = [&] { return Position<Tile>(reload_thread_index(), plan.log2_lanes); };
  Acc dw[Tile::kVectors][kVec] = {}, db[Tile::kVectors][kVec] = {};
  for (int round = 0; rounds.has(round); ++round) {
    // The same goes for the place of the row in memory.
    const auto current_row = [&] { return row_of(reload(round), reload_position()); };
    const auto bias = [&] { return parameter<W>(p.bias, current_row().index.group, begin); };
    const int cols = cols_of(current_row());
    const Statistics<Acc> statistics(p, current_row().index, needs_x && cols > 0);
    // Loading the next statistics into registers would cause spills.
    const BlockRow next_row = row_of(reload(round) + 1, reload_position());
    if (needs_x && next_row.exists) Statistics<Acc>::prefetch(p, next_row.index);
    RowMeans<Acc> means = {};
    {
      pipeline.wait([&] { return addresses(current_row()); }, cols, reload_position());
      const auto position = reload_position();
      RowSums<Acc> sums = {};
      if (needs_sums && !plan.separate_sums) {
        const W* const weight = parameter<W>(p.weight, current_row().index.group, begin);
        add_to_sums<kFastPath>(sums, p, plan, weight, bias, pipeline, statistics, position, cols);
        reduce_tile(sums, position, round);
        if constexpr (kMayUseCluster) {
          if (plan.in_cluster) reduce_cluster(sums, plan.num_chunks, round);
        }
      } else if (Tile::kWarps > 1 && needs_sums && cols > 0) {
        const int64_t row = current_row().number - plan.first_row;
        reduce_parts(sums, row_sums_in_workspace<Acc>(p, plan) + 3 * row * plan.num_parts, plan.num_parts);
      }
      if (needs_sums) means = compute_means(sums, p, plan);
    }

    const auto position = reload_position();
    const auto staged_dy = pipeline.dy(position);
    const auto staged_x = pipeline.x(position);
    const RowIndex index = current_row().index;
    X* const dx_row = address<X>(p.grad_input, index) + begin;
    const W* const weight = parameter<W>(p.weight, index.group, begin);
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (!position.template warp_has_vector<kVec>(i, cols)) continue;
      Vector<X, kVec> dx;
#pragma unroll
      for (int k = 0; k < kVec; k += kSub) {
        const int column = position.vector_index(i) * kVec + k, remaining = cols - column;
        Vector<W, kSub> w;
        load_weight<kFastPath>(w, weight, p, plan, column, remaining);
        Acc xhat[kSub], g[kSub];
        if (needs_x) {
          normalize<kFastPath, false>(xhat, sub_vector<kSub>(staged_x.read(i), k), w, bias, p, plan, statistics,
                                      means.xhat, column, remaining);
        }
        widen(g, sub_vector<kSub>(staged_dy.read(i), k));
        if (grad_weight) {
#pragma unroll
          for (int e = 0; e < kSub; ++e) dw[i][k + e] = fma(g[e], xhat[e], dw[i][k + e]);
        }
        if (grad_bias) {
#pragma unroll
          for (int e = 0; e < kSub; ++e) db[i][k + e] += g[e];
        }
        if (!grad_input) continue;
        multiply(g, g, w, !kFastPath && p.zero_centered_weight);
#pragma unroll
        for (int e = 0; e < kSub; ++e) g[e] = means.grad_input(g[e], xhat[e], statistics);
        if (has_grad_sum) {
          Acc dsum[kSub];
          widen(dsum, sub_vector<kSub>(pipeline.dsum(position).read(i), k));
#pragma unroll
          for (int e = 0; e < kSub; ++e) g[e] += dsum[e];
        }
        const auto rounded = round_to<X>(g);
#pragma unroll
        for (int e = 0; e < kSub; ++e) dx.values[k + e] = rounded.values[e];
      }
      if (grad_input) pipeline.dx(position).store(dx_row, i, dx, cols);
    }
    if (grad_input) pipeline.dx(position).end_of_store(dx_row, cols);
    pipeline.release();
    fetch(reload(round) + plan.stages, reload_position());

    const bool is_last = !rounds.has(round + 1);
    if (is_last) let_next_grid_start();
    if (!is_last && !rounds.ends_sum(round)) continue;
    const auto store = [&](const auto& sums, const View& gradient, bool is_per_group, int64_t first_partial) {
      SumsTarget<Acc, W> target = {nullptr, false, plan.aligned_gradients,
                                   round >= rounds.per_sum() || plan.accumulates};
      // Recompute the target for each sum; keeping it in registers causes spills.
      int64_t number = 0, partial = reload(static_cast<int>(blockIdx.y));
      if (is_per_group) {
        number = current_row().number;
        partial = plan.segment_rows.divide(number).quotient;
        target.is_gradient = plan.writes_gradients;
        target.adds = false;
      }
      if (target.is_gradient) {
        target.data = address<W>(gradient, {plan.rows.divide(number).quotient, 0}) + begin;
      } else {
        target.data = static_cast<Acc*>(p.workspace) + (first_partial + partial) * plan.pitch + begin;
      }
      if (Tile::kWarps > 1 || !is_per_group || plan.shares_segments) {
        store_block_sums<Tile>(target, sums, reload_position(), block_cols);
      } else if (number < plan.end_row) {
        store_sums<Tile>(target, sums, reload_position(), block_cols);
      }
    };
    if (grad_weight) store(dw, p.grad_weight, !kFastPath && plan.weight_is_per_group, 0);
    if (grad_bias) store(db, p.grad_bias, !kFastPath && plan.bias_is_per_group, plan.weight_partials);
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) dw[i][e] = db[i][e] = 0;
    }
  }
  pipeline.drain();
}

template <class Types, class Tile>
__global__ void __launch_bounds__(Tile::kBlockThreads, Tile::kWarps == 1 ? 3 : 1)
    backward_rows(const BackwardParams p, const LaunchPlan plan) {
  using T = typename Types::T;
  using X = typename Types::X;
  using W = typename Types::W;
  if constexpr (std::is_same_v<T, X>) {
    if (plan.fast_path) return process_rows<true, T, X, W, Tile>(p, plan);
  }
  process_rows<false, T, X, W, Tile>(p, plan);
}

// Each block computes the sums of a part of a row, chunk by chunk.
template <class Types>
__global__ void __launch_bounds__(BlockTile::kBlockThreads, 1)
    backward_sums(const BackwardParams p, const LaunchPlan plan) {
  using T = typename Types::T;
  using X = typename Types::X;
  using W = typename Types::W;
  using Acc = AccOf<X>;
  const Position<BlockTile> position;
  RowIndex row = find_group(plan.first_row + blockIdx.y, plan.has_groups, plan.rows);
  const bool exists = row.row < p.rows || !plan.has_groups;
  if (!exists) row = {0, 0};
  const int64_t part_cols = int64_t{plan.chunk_cols} * plan.chunks_per_part;
  const int64_t begin = part_cols * blockIdx.x, end = exists ? min(p.cols, begin + part_cols) : begin;

  extern __shared__ __align__(16) unsigned char shared[];
  RowPipeline<T, X, BlockTile> pipeline(shared, nullptr, 2, plan.stages, plan.aligned, false, plan.chunk_cols,
                                        position);
  const auto cols_of = [&](int64_t chunk_begin) {
    return static_cast<int>(max(min(end - chunk_begin, int64_t{plan.chunk_cols}), int64_t{0}));
  };
  const auto addresses = [&](int64_t chunk_begin) {
    return row_addresses<false, T, X, BlockTile>(p, true, row, chunk_begin);
  };
  const auto fetch = [&](int64_t chunk_begin) {
    pipeline.fetch(addresses(chunk_begin), cols_of(chunk_begin), position);
  };
#pragma unroll 1
  for (int stage = 0; stage < plan.stages; ++stage) fetch(begin + stage * plan.chunk_cols);
  const Statistics<Acc> statistics(p, row);
  RowSums<double> total = {};
  int round = 0;
  for (int64_t chunk_begin = begin; chunk_begin < end; chunk_begin += plan.chunk_cols) {
    pipeline.wait([&] { return addresses(chunk_begin); }, cols_of(chunk_begin), position);
    RowSums<Acc> sums = {};
    const W* const weight = parameter<W>(p.weight, row.group, chunk_begin);
    const auto bias = [&] { return parameter<W>(p.bias, row.group, chunk_begin); };
    const auto add = [&](auto fast_path) {
      add_to_sums<fast_path>(sums, p, plan, weight, bias, pipeline, statistics, position, cols_of(chunk_begin));
    };
    if constexpr (std::is_same_v<T, X>) {
      with_constant(plan.fast_path, add);
    } else {
      add(std::false_type{});
    }
    reduce_tile(sums, position, round++);  // contains the barrier that releases the chunk
#pragma unroll
    for (int k = 0; k < 3; ++k) total[k] += sums[k];
    fetch(chunk_begin + plan.stages * plan.chunk_cols);
  }
  pipeline.drain();
  let_next_grid_start();
  wait_for_previous_grid();
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    row_sums_in_workspace<Acc>(p, plan)[3 * (blockIdx.y * int64_t{plan.num_parts} + blockIdx.x) + k] =
        static_cast<Acc>(total[k]);
  }
}

// ---- host code ------------------------------------------------------------------------------------------------------

constexpr size_t kMaxStaticShared = 16 * 1024;

// The most vectors of a row or chunk that fit into a block's shared memory, with a residual and not aligned.
template <class T, class X>
int64_t max_vectors() {
  using Pipeline = RowPipeline<T, X, BlockTile>;
  const bool fits = Pipeline::bytes(BlockTile::kThreads, 1, 3, 1, false) + kMaxStaticShared <= max_shared_memory();
  const int64_t most = BlockTile::kThreads * BlockTile::kVectors / (fits ? 1 : 2);
  return std::min(most, kMaxClusterChunkVectors);
}

// Divides a row that is longer than a tile into chunks of 1024 vectors, or of more if the row then fits a cluster.
template <class T, class X>
void set_chunk_layout(LaunchPlan& plan, int64_t cols) {
  const int64_t vectors = ceil_div(cols, kVectorSize<X>);
  const int64_t most = max_vectors<T, X>();
  int64_t num_chunks = ceil_div(vectors, std::min(most, kMaxChunkVectors));
  if (vectors <= kMaxClusterSize * most) num_chunks = std::min(num_chunks, int64_t{kMaxClusterSize});
  const int64_t chunk = ceil_div(ceil_div(vectors, num_chunks), kWarpSize) * kWarpSize;
  num_chunks = ceil_div(vectors, chunk);
  plan.chunk_cols = static_cast<int>(chunk * kVectorSize<X>);
  plan.num_chunks = static_cast<unsigned>(num_chunks);
  plan.chunks_per_part = static_cast<int>(ceil_div(num_chunks, kMaxParts));
  plan.num_parts = static_cast<unsigned>(ceil_div(num_chunks, plan.chunks_per_part));
}

// Divides the rows among slots, and those of each group into segments if that is needed. The rows of a block share a
// segment if a group has enough rows for that.
void set_rows(LaunchPlan& plan, const BackwardParams& p) {
  plan.weight_is_per_group = is_per_group(p, p.grad_weight);
  plan.bias_is_per_group = is_per_group(p, p.grad_bias);
  plan.has_groups = p.groups > 1;
  plan.has_segments = plan.weight_is_per_group || plan.bias_is_per_group;
  int64_t rows_of_group = p.rows, turn_rows = 1;
  plan.shares_segments = true;
  if (plan.has_segments) {
    const int64_t min_rounds = plan.num_chunks > 1 ? 4 : 16;  // long rows keep the GPU busy anyway
    plan.shares_segments = p.rows >= plan.rows_per_block * min_rounds;
    const int64_t rows_at_once = plan.shares_segments ? plan.rows_per_block : 1;
    const Segments segments(ceil_div(p.rows, rows_at_once), min_rounds);
    turn_rows = segments.rounds;
    plan.segment_rows = FastDivisor<int64_t>(segments.rounds * rows_at_once);
    plan.writes_gradients = segments.per_group == 1;
    rows_of_group = segments.per_group * plan.segment_rows.divisor();
  }
  plan.rounds_per_turn = FastDivisor<int>(static_cast<int>(turn_rows));
  plan.slot_step = plan.rows_per_block * turn_rows;
  plan.round_step = plan.shares_segments ? plan.rows_per_block : 1;
  plan.row_step = plan.shares_segments ? 1 : turn_rows;
  plan.rows = FastDivisor<int64_t>(rows_of_group);
  plan.end_row = p.groups * rows_of_group;
}

struct Launches {
  LaunchPlan plan;
  LaunchConfig rows;  // of backward_rows
  size_t sums_bytes;  // dynamic shared memory of backward_sums
  int64_t rows_per_launch;
};

template <class Types, class Tile>
Launches make_launches(const BackwardParams& p, LaunchPlan plan) {
  using T = typename Types::T;
  using X = typename Types::X;
  using W = typename Types::W;
  plan.reciprocal_cols = 1.0 / static_cast<double>(p.cols);
  plan.pitch = ceil_div(p.cols, kVectorSize<X>) * kVectorSize<X>;
  set_rows(plan, p);
  plan.aligned = p.cols * static_cast<int64_t>(sizeof(T)) % 16 == 0 && is_aligned<X>(p.input) &&
                 is_aligned<T>(p.grad_output) && is_aligned<X>(p.grad_input) && is_aligned<X>(p.grad_sum);
  plan.aligned_parameters = is_aligned<W>(p.weight) && is_aligned<W>(p.bias);
  plan.aligned_gradients = is_aligned<W>(p.grad_weight) && is_aligned<W>(p.grad_bias);
  plan.in_cluster = sizeof(X) < 8 && plan.num_chunks > 1 && plan.num_chunks <= unsigned{kMaxClusterSize} &&
                    has_clusters(backward_rows<Types, Tile>);
  const bool reads_twice = plan.num_chunks > 1 && !plan.in_cluster;
  const bool grad_input = p.grad_input.data, grad_weight = p.grad_weight.data, grad_bias = p.grad_bias.data;
  plan.separate_sums = reads_twice && (grad_input || (grad_weight && !p.rms));

  Launches result;
  result.rows.block = block_threads<Tile, X>(plan.chunk_cols);
  result.rows.stream = static_cast<Stream>(p.stream);
  result.rows.cluster = plan.in_cluster ? plan.num_chunks : 1;
  result.rows.overlaps_previous = plan.separate_sums;
  const auto bytes = [&](int arrays, bool aligned, int stages) {
    return RowPipeline<T, X, Tile>::bytes(static_cast<int>(result.rows.block.x) / plan.rows_per_block,
                                          plan.rows_per_block, arrays, stages, aligned);
  };

  result.rows_per_launch = plan.end_row;
  if (reads_twice) {  // input and grad_output take half of the cache; a slot has whole segments
    const int64_t step_bytes = 2 * p.cols * static_cast<int64_t>(sizeof(X)) * plan.slot_step;
    const int64_t most = std::min(plan.end_row, kMaxGridY) / plan.slot_step;
    result.rows_per_launch =
        plan.slot_step * std::clamp(l2_cache_size() / 2 / step_bytes, int64_t{1}, std::max(most, int64_t{1}));
  }
  // The number of slots determines the order of summation of dweight and dbias. It is computed for two unaligned
  // arrays, so that it depends neither on the alignment nor on which gradients are wanted. With grad_sum it is computed
  // for three arrays, because all blocks must be resident.
  const int most_arrays = p.grad_sum.data ? 3 : 2;
  plan.stages = bytes(most_arrays, false, kMaxStages) + kMaxStaticShared <= max_shared_memory() ? kMaxStages : 1;
  result.rows.shared_bytes = bytes(most_arrays, false, plan.stages);
  const int64_t turns = ceil_div(result.rows_per_launch, plan.slot_step);
  const int64_t resident = resident_blocks(result.rows, backward_rows<Types, Tile>) / plan.num_chunks;
  const int64_t turns_per_slot = ceil_div(turns, std::max(resident, int64_t{1}));  // a row may need more blocks
  plan.num_slots = ceil_div(turns, turns_per_slot);
  plan.turn_step = plan.num_slots * plan.slot_step;
  const int arrays = 1 + (grad_input || grad_weight) + (p.grad_sum.data != nullptr);
  result.rows.shared_bytes = bytes(arrays, plan.aligned, plan.stages);
  result.sums_bytes = bytes(2, plan.aligned, plan.stages);
  result.rows.grid = dim3(plan.num_chunks, static_cast<unsigned>(plan.num_slots));

  const auto partials = [&](bool wanted, bool is_per_group) {
    if (!wanted || !is_per_group) return wanted ? plan.num_slots : int64_t{0};
    return plan.writes_gradients ? int64_t{0} : plan.end_row / plan.segment_rows.divisor();
  };
  plan.weight_partials = partials(grad_weight, plan.weight_is_per_group);
  plan.bias_partials = partials(grad_bias, plan.bias_is_per_group);
  plan.fast_path = grad_input && grad_weight && grad_bias && p.weight.data && !p.grad_sum.data &&
                   !p.zero_centered_weight && !p.from_output && !plan.has_groups && plan.aligned &&
                   plan.aligned_parameters;
  result.plan = plan;
  return result;
}

// Calls f(Types{}, Tile{}, launches).
template <class F>
void dispatch(const BackwardParams& p, const F& f) {
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using Types = decltype(types);
    using X = typename Types::X;
    const auto call = [&](auto tile, const LaunchPlan& plan) {
      f(types, tile, make_launches<Types, decltype(tile)>(p, plan));
    };
    LaunchPlan plan = {};
    plan.num_chunks = 1;
    plan.chunk_cols = static_cast<int>(std::min(p.cols, int64_t{INT32_MAX}));
    plan.rows_per_block = 1;
    const int64_t vectors = ceil_div(p.cols, kVectorSize<X>);
    if constexpr (std::is_same_v<typename Types::T, X>) {  // residual streams in float32 have long rows
      if (vectors <= kMaxWarpRowVectors) {
        plan.log2_lanes = log2_lanes_for(vectors);
        plan.rows_per_block = WarpTile::kBlockThreads >> plan.log2_lanes;
        return call(WarpTile{}, plan);
      }
    }
    const int64_t most = std::min(kMaxTileVectors, max_vectors<typename Types::T, X>());
    if (vectors > most) set_chunk_layout<typename Types::T, X>(plan, p.cols);
    call(BlockTile{}, plan);
  });
}

}  // namespace

int64_t backward_workspace(const BackwardParams& p) {
  if (p.channels_first) return channels_first_backward_workspace(p);
  int64_t bytes = 0;
  dispatch(p, [&](auto types, auto, const Launches& launches) {
    const LaunchPlan& plan = launches.plan;
    const int64_t row_sums = plan.separate_sums ? 3 * launches.rows_per_launch * plan.num_parts : 0;
    bytes = ((plan.weight_partials + plan.bias_partials) * plan.pitch + row_sums) *
            static_cast<int64_t>(sizeof(AccOf<typename decltype(types)::X>));
  });
  return bytes;
}

void backward(const BackwardParams& p) {
  if (p.channels_first) return channels_first_backward(p);
  dispatch(p, [&](auto types, auto tile, const Launches& launches) {
    using Types = decltype(types);
    LaunchPlan plan = launches.plan;
    const int64_t end = plan.end_row;
    for (plan.first_row = 0; plan.first_row < end; plan.first_row = plan.end_row) {
      plan.end_row = std::min(end, plan.first_row + launches.rows_per_launch);
      plan.accumulates = plan.first_row > 0;
      if (plan.separate_sums) {
        BackwardParams sums_params = p;
        sums_params.grad_sum = {};
        if (!p.grad_input.data) sums_params.grad_output = {};
        LaunchConfig config = launches.rows;
        config.grid = dim3(plan.num_parts, static_cast<unsigned>(plan.end_row - plan.first_row));
        config.shared_bytes = launches.sums_bytes;
        config.overlaps_previous = plan.accumulates;
        launch(config, backward_sums<Types>, sums_params, plan);
      }
      launch(launches.rows, backward_rows<Types, decltype(tile)>, p, plan);
    }
    launch_add_partials<AccOf<typename Types::X>, typename Types::W>(p, plan, plan.pitch);
  });
}

}  // namespace layernorm::cuda
