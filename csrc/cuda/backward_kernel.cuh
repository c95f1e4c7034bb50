// The kernel for backward of rows, its variants and its launch. backward.cu has the formulas.
#pragma once

#include <algorithm>

#include "backward_staged_rows.cuh"

namespace layernorm::cuda {
namespace {

// Threads of a block, unless a row needs more: such a row has a block of up to kMaxBlockThreads to itself. The number
// is large, so that few blocks store partial sums, but so small that two blocks fit on a multiprocessor.
constexpr int kThreads = 256;

// The most vectors of a gated norm's row that a block stages. With more, two stages of x, dy and the gate would take
// more than 99 KiB, the shared memory of a block on some GPUs.
constexpr int64_t kMaxGatedBlockVectors = 1024;

// The lag: iterations from a row's sums to its dx. With 1, the warps of a block exchange their sums of a row while they
// sum the next row.
template <class Variant>
constexpr int kLagOf = Variant::kRowSpansWarps ? 1 : 0;

// ---- sums of a row over its blocks ----------------------------------------------------------------------------------

// Adds the sums of the num_blocks blocks that share a row, in an order that depends only on their number. All lanes of
// a warp call this and get the result.
__device__ __forceinline__ void sum_blocks(RowSums& sums, const RowSums* blocks, int num_blocks) {
  const int lane = threadIdx.x % kWarpSize;
  if (num_blocks <= kMaxClusterSize) {
    const int block = lane % kMaxClusterSize;
    for (int k = 0; k < 3; ++k) sums[k] = block < num_blocks ? blocks[block][k] : 0;
    sum_over_row_lanes(sums, kMaxClusterSize);
    return;
  }
  double lane_sums[3] = {};
#pragma unroll 1
  for (int i = lane; i < num_blocks; i += kWarpSize) {
    for (int k = 0; k < 3; ++k) lane_sums[k] += blocks[i][k];
  }
  for (int k = 0; k < 3; ++k) sums[k] = static_cast<Acc>(sum_over_lanes<kWarpSize>(lane_sums[k]));
}

// ---- sums of the columns: dweight and dbias -------------------------------------------------------------------------

// Adds the column sums of the threads of a block that own the same columns, of different rows of an iteration. For each
// column, one thread gets the result; it calls store(j, v) for each vector v of its 16 columns, where j counts these
// columns as in ThreadColumns.
template <class T, class X, class Variant, int kElements, class F>
__device__ __forceinline__ void sum_columns_over_block(Acc (&sums)[kElements],
                                                       const BackwardStagedRows<T, X, Variant>& rows, const F& store) {
  constexpr int kVec = kVectorSize<X>;
  // First, shuffles add the sums of the rows of a warp. Then the sums of groups of threads are added in shared memory.
  // A group is the warps that share a row, or one warp that has one or more rows.
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    if (offset < rows.columns.row_lanes()) break;
    for (Acc& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  }
  __shared__ Vector<Acc, kVec> thread_sums[kThreads];
  const int group_threads = max(rows.plan.row_threads, kWarpSize);
  const int groups = rows.plan.row_fits_warp ? static_cast<int>(blockDim.x) / kWarpSize : rows.plan.rows_per_iteration;
#pragma unroll
  for (int j = 0; j < kElements; j += kVec) {
    Acc v[kVec];
    for (int e = 0; e < kVec; ++e) v[e] = sums[j + e];
    if (groups > 1) {
      __syncthreads();
      for (int e = 0; e < kVec; ++e) thread_sums[threadIdx.x].values[e] = v[e];
      __syncthreads();
    }
    if (static_cast<int>(threadIdx.x) >= group_threads || rows.columns.row_in_warp > 0) continue;
#pragma unroll 1
    for (int group = 1; group < groups; ++group) {
      const Vector<Acc, kVec> other = thread_sums[group * group_threads + threadIdx.x];
      for (int e = 0; e < kVec; ++e) v[e] += other.values[e];
    }
    store(j, v);
  }
}

// If there are few rows, the blocks of one cluster have a segment each, and add up their column sums without the
// workspace and add_partials. Each block owns 1 << log2_owned_cols columns: all blocks send it their sums of these
// columns, and it adds them and stores the gradients. Its shared memory for the sums is [2 (dweight and dbias),
// cluster_segments, 1 << log2_owned_cols].
struct ClusterColumnSums {
  Acc* const sums;              // in this block's shared memory
  TransactionBarrier& barrier;  // for the sums that arrive there
  const BackwardPlan& plan;

  // The sums that `block` has sent to this block; `array` is 0 for dweight and 1 for dbias.
  __device__ __forceinline__ Acc* sums_of(int array, int block) const {
    return sums + ((array * plan.cluster_segments + block) << plan.log2_owned_cols);
  }
  // Sends this block's sum of a column to the column's owner.
  __device__ __forceinline__ void send(int array, int column, const Acc& sum) const {
    const int owner = column >> plan.log2_owned_cols;
    barrier.store(sums_of(array, cluster_rank())[column - (owner << plan.log2_owned_cols)], sum, owner);
  }
  // Waits for the sums of the columns that this block owns, adds them and stores the gradients.
  template <class T>
  __device__ __forceinline__ void add_and_store(const BackwardParams& p, Flags flags) const {
    const int first = static_cast<int>(cluster_rank()) << plan.log2_owned_cols;
    const int count = max(min(static_cast<int>(p.cols) - first, 1 << plan.log2_owned_cols), 0);
    const bool has_weight = flags.has(kGradWeight), has_bias = flags.has(kGradBias);
    if (threadIdx.x == 0) barrier.expect(count * plan.cluster_segments * (has_weight + has_bias) * sizeof(Acc));
    barrier.wait(0);
    for (int array = has_weight ? 0 : 1; array < 1 + has_bias; ++array) {
      void* const gradient = array == 0 ? p.grad_weight.data : p.grad_bias.data;
      for (int c = threadIdx.x; c < count; c += blockDim.x) {
        double sum = 0;
        for (int block = 0; block < plan.cluster_segments; ++block) sum += sums_of(array, block)[c];
        with_weight_type<T>(flags, [&](auto element) {
          using W = decltype(element);
          static_cast<W*>(gradient)[first + c] = static_cast<W>(static_cast<Acc>(sum));
        });
      }
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// A block takes its segments in turn: every gridDim.y-th, from blockIdx.y on. A segment has plan.iterations iterations,
// each of rows_per_iteration rows, one for each group of row_threads threads. If blocks share a row, blockIdx.x tells
// which columns the block has. Copies run ahead by the number of stages, also into the next segment.
//
// If a row spans warps (kLag = 1), iteration r sums row r and then stores dx of row r - 1; one more iteration at the
// end of a segment stores dx of its last row. In the diagram, B is the block's barrier, put and get are methods of
// WarpSums, and send and receive, which only blocks that share rows call, are methods of BlockExchange:
//
//   iteration 0:                               sum row 0, put its sums
//   iteration 1:  B, get [and send] row 0's;   sum row 1, put its sums;   [receive and] store dx of row 0, fetch a row
//   iteration 2:  B, get [and send] row 1's;   sum row 2, put its sums;   [receive and] store dx of row 1, fetch a row
//
// A warp that has passed B in iteration r may run ahead of the others up to B in iteration r + 1: it puts the sums of
// row r into one buffer of WarpSums while others still get the sums of row r - 1 from the other buffer. Without a lag,
// put(), B and get() belong to the same iteration. If a row fits a warp, iterations have no barrier, and warps run
// ahead freely until the column sums are added, at the end of a segment or after kIterationsPerSum iterations.
//
// With few rows that blocks do not share, there are at most eight segments, one for each block of a single cluster,
// which then adds their column sums (ClusterColumnSums).
template <class T, class X, class Variant>
__global__ void __launch_bounds__(Variant::kRowFitsWarp ? kThreads : kMaxBlockThreads, Variant::kRowFitsWarp ? 2 : 1)
    backward_staged(const BackwardParams p, const BackwardPlan plan) {
  using StagedRows = BackwardStagedRows<T, X, Variant>;
  using Index = typename Variant::Index;
  constexpr int kElements = StagedRows::kElements, kVec = StagedRows::kVec, kLag = kLagOf<Variant>,
                kStageBytes = StagedRows::kStageBytes;
  const Flags flags = supported_flags<Variant>(plan.flags);
  const bool row_fits_warp = Variant::kRowFitsWarp || (Variant::kIsGeneral && plan.row_fits_warp);
  const bool shares_row = flags.has(kBlocksShareRow), cluster_shares_row = flags.has(kClusterSharesRow);
  const bool sums_in_cluster = !shares_row && plan.cluster_segments > 1;  // ClusterColumnSums
  const bool stores_dx = !flags.has(kFirstLaunch);

  // The shuffle tells the compiler that all lanes of a warp have the same value.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int row_warps = row_fits_warp ? 1 : plan.row_threads / kWarpSize;
  const int group = row_fits_warp ? 0 : warp / row_warps;  // the index of this warp's group of row_warps warps
  const int first_warp = row_fits_warp ? warp : group * row_warps;
  const typename StagedRows::Columns columns(warp - first_warp, row_fits_warp ? plan.row_threads : kWarpSize,
                                             plan.whole_vectors);
  extern __shared__ __align__(16) unsigned char shared[];
  const Index block_begin = shares_row ? Index{plan.block_cols} * static_cast<Index>(blockIdx.x) : 0;
  const StagedRows rows{p,
                        plan,
                        flags,
                        columns,
                        row_fits_warp ? warp * (kWarpSize / plan.row_threads) + columns.row_in_warp : group,
                        block_begin,
                        static_cast<int>(min(static_cast<Index>(p.cols) - block_begin, Index{plan.block_cols})),
                        shared + warp * plan.stages * kStageBytes};

  __shared__ WarpSumsMemory warp_sums_memory;
  WarpSums warp_sums(warp_sums_memory, first_warp, row_warps);
  __shared__ BlockExchange::Memory exchange_memory;
  const BlockExchange exchange(exchange_memory, plan.exchange_workspace, plan.row_blocks, flags);
  const ClusterColumnSums cluster_sums{reinterpret_cast<Acc*>(shared + plan.ring_bytes), exchange_memory.barriers[0],
                                       plan};
  // With ClusterColumnSums, blockIdx.x is the index of the block's only segment.
  const Index first_segment = sums_in_cluster ? blockIdx.x : blockIdx.y;
  const Index segment_step = sums_in_cluster ? gridDim.x : gridDim.y;
  const Index num_segments = static_cast<Index>(plan.num_segments);
  const int iterations = plan.iterations;

  // The segment and the iteration whose rows are fetched next.
  Index fetched_segment = first_segment;
  int fetched_iteration = 0;
  const auto fetch_next = [&](int stage_offset) {
    if (fetched_segment < num_segments) {
      const Segment<Index> fetched(plan, recompute_from(fetched_segment));
      rows.fetch(fetched, rows.row_in_segment(fetched, fetched_iteration), stage_offset);
      if (++fetched_iteration == iterations) {
        fetched_iteration = 0;
        fetched_segment += segment_step;
      }
    }
    async_commit();
  };
#pragma unroll 1
  for (int stage_offset = 0; stage_offset < plan.stages * kStageBytes; stage_offset += kStageBytes)
    fetch_next(stage_offset);
  if (cluster_shares_row || sums_in_cluster) BlockExchange::start(exchange_memory);
  __syncthreads();

  Acc weight[kElements], dw[kElements], db[kElements];  // of this thread's columns: dw and db are sums over rows
  int finished_iterations = 0;  // of the block, in all segments, as BlockExchange counts iterations
  int stage_offset = 0;         // the stage of the next row to be summed
#pragma unroll 1
  for (Index s = first_segment; s < num_segments; s += segment_step) {
    const Segment<Index> segment(plan, s);
    columns.template load_parameter<T>(weight, kWeight, p.weight, segment.sample, recompute_from(block_begin),
                                       rows.block_cols, flags);
#pragma unroll
    for (int j = 0; j < kElements; ++j) dw[j] = db[j] = 0;
    ScaledStatistics statistics, finished_statistics;
#pragma unroll 1
    for (int iteration = 0; iteration < iterations + kLag; ++iteration) {
      RowSums row_sums = {};
      const auto get_row_sums = [&] {  // over the warps of the row
        __syncthreads();
        warp_sums.get(row_sums, row_warps);
        if (shares_row) exchange.send(row_sums, finished_iterations);
      };
      finished_statistics = statistics;
      if (kLag > 0 && iteration > 0) get_row_sums();
      if (iteration < iterations) {
        wait_for_stage<StagedRows::kMaxStages - kLag>(plan.stages - kLag);
        const auto& header = rows.header(stage_offset);
        statistics = ScaledStatistics(header.mean, header.rstd, flags.has(kMemoryEfficient));
        RowSums sums = {};
        rows.sum_row(sums, stage_offset, statistics, weight, segment.sample);
        if (row_fits_warp) {
          sum_over_row_lanes(sums, columns.row_lanes());
          for (int k = 0; k < 3; ++k) row_sums[k] = sums[k];
        } else {
          warp_sums.put(sums, columns.lane_in_warp);
        }
      }
      const int ring_end = (kLag > 0 ? recompute_from(plan.stages) : plan.stages) * kStageBytes;
      const int finished_offset =
          kLag == 0 ? stage_offset : (stage_offset == 0 ? ring_end : stage_offset) - kStageBytes;
      if (iteration < iterations)
        stage_offset = stage_offset + kStageBytes == ring_end ? 0 : stage_offset + kStageBytes;
      if (iteration < kLag) continue;
      if (kLag == 0) {
        finished_statistics = statistics;
        if (!row_fits_warp) get_row_sums();
      }
      if (stores_dx) {
        if (shares_row) sum_blocks(row_sums, exchange.receive(finished_iterations), plan.row_blocks);
        const auto means = rows.compute_means(row_sums, finished_statistics.scaled_rstd);
        const auto store_gradients = [&](auto has_grad_sum) {
          rows.store_gradients(has_grad_sum, dw, db, finished_offset, finished_statistics, means, weight,
                               segment.sample);
        };
        if constexpr (StagedRows::kLoadsGradSumFirst) {
          flags.has(kGradSum) ? store_gradients(std::true_type()) : store_gradients(std::false_type());
        } else {
          store_gradients(flags.has(kGradSum));
        }
      }
      __syncwarp();  // all lanes have read the stage
      fetch_next(finished_offset);
      ++finished_iterations;

      // After the last iteration of the segment, and after every kIterationsPerSum, the block stores its column sums.
      const int iterations_done = iteration + 1 - kLag;
      if (!stores_dx ||
          (iterations_done != iterations && static_cast<unsigned>(iterations_done) % kIterationsPerSum != 0))
        continue;
      if (s + segment_step >= num_segments && iterations_done == iterations) let_next_grid_start();
      // Stores the block's sums of dweight (array 0) or dbias (1), and resets them. Partial sums of segment s go to row
      // first_row + s of the workspace.
      const auto store_column_sums = [&](Acc(&column_sums)[kElements], int array, const View& gradient, Flag per_sample,
                                         int64_t first_row) {
        sum_columns_over_block(column_sums, rows, [&](int j, Acc(&v)[kVec]) {
          if (sums_in_cluster) {
            const int first_column = recompute_from(columns.column(0));
            for (int e = 0; e < kVec; ++e) {
              const int column = first_column + columns.distance_to(j + e);
              if (column < rows.block_cols) cluster_sums.send(array, column, v[e]);
            }
          } else if (plan.stores_gradient_directly(per_sample)) {
            with_weight_type<T>(flags, [&](auto element) {
              columns.store_global(address<decltype(element)>(gradient, {s, 0}) + block_begin, j, v, rows.block_cols);
            });
          } else {
            Acc* const to = static_cast<Acc*>(plan.workspace) + (first_row + int64_t{s}) * plan.pitch + block_begin;
            if (iterations_done > kIterationsPerSum) {
              const auto earlier = columns.template load_global<kVec>(to, j, rows.block_cols);
              for (int e = 0; e < kVec; ++e) v[e] += earlier.values[e];
            }
            columns.store_global(to, j, v, rows.block_cols);
          }
        });
        for (Acc& sum : column_sums) sum = 0;
      };
      if (flags.has(kGradWeight)) store_column_sums(dw, /*array=*/0, p.grad_weight, kWeightPerSample, 0);
      if (flags.has(kGradBias))
        store_column_sums(db, /*array=*/1, p.grad_bias, kBiasPerSample, plan.num_weight_partials);
    }
  }
  async_wait<0>();  // before the block returns
  if (sums_in_cluster) cluster_sums.template add_and_store<T>(p, flags);
}

// ---- host code ------------------------------------------------------------------------------------------------------

// An instance of the kernel, and how its blocks use dynamic shared memory.
struct Instance {
  void (*kernel)(BackwardParams, BackwardPlan) = nullptr;
  int stages = 0;               // per warp
  size_t ring_bytes = 0;        // for the stages of all warps
  size_t column_sum_bytes = 0;  // for ClusterColumnSums; 0 without them
  int64_t resident = 0;         // blocks that the GPU runs at once or, if blocks share rows, groups of such blocks
};

// Chooses the stages of a variant: kMaxStages if they fit into shared memory, or one less if that leaves more blocks
// resident. On an A100, two blocks of float32 rows are faster than one that fetches a row further ahead. If neither
// fits, the result's kernel is null.
template <class T, class X, class Variant>
Instance plan_stages(const BackwardPlan& plan, LaunchConfig config, size_t column_sum_bytes) {
  using StagedRows = BackwardStagedRows<T, X, Variant>;
  const auto kernel = backward_staged<T, X, Variant>;
  constexpr size_t kColumnSums = kThreads * sizeof(Vector<Acc, kVectorSize<X>>);  // of sum_columns_over_block()
  constexpr size_t kMaxStaticShared = kColumnSums + 1792;
  static_assert(kColumnSums + sizeof(WarpSumsMemory) + sizeof(BlockExchange::Memory) <= kMaxStaticShared);
  Instance chosen;
  for (int stages = StagedRows::kMaxStages; stages >= StagedRows::kMaxStages - 1; --stages) {
    const size_t ring_bytes = config.block.x / kWarpSize * stages * StagedRows::kStageBytes;
    config.shared_bytes = ring_bytes + column_sum_bytes;
    if (config.shared_bytes + kMaxStaticShared > max_shared_memory(config)) continue;
    const int64_t resident = std::max(resident_blocks(config, kernel) / plan.row_blocks, 1);
    if (resident > chosen.resident) chosen = {kernel, stages, ring_bytes, column_sum_bytes, resident};
  }
  // Without room for ClusterColumnSums, add_partials adds the segments.
  return chosen.kernel || column_sum_bytes == 0 ? chosen : plan_stages<T, X, Variant>(plan, config, 0);
}

// Chooses the variant and its stages for the rows of a plan. GeneralRows takes the rows if `general` is true, if the
// shared memory does not suffice for another variant, or if x is float32 beside 16-bit dy (a float32 residual) in rows
// that are not whole vectors.
template <class T, class X>
Instance choose_variant(const BackwardPlan& plan, const LaunchConfig& config, bool general, size_t column_sum_bytes) {
  const auto plan_variant = [&](auto variant) {
    return plan_stages<T, X, decltype(variant)>(plan, config, column_sum_bytes);
  };
  Instance chosen;
  if constexpr (std::is_same_v<T, X>) {
    if (plan.flags.has(kGatedNorm)) return plan_variant(GatedRows());
    if (!general && !plan.whole_vectors)
      chosen = plan.row_fits_warp ? plan_variant(WarpElements()) : plan_variant(BlockElements());
  }
  if (!general && plan.whole_vectors)
    chosen = plan.row_fits_warp ? plan_variant(WarpVectors()) : plan_variant(BlockVectors());
  return chosen.kernel ? chosen : plan_variant(GeneralRows());
}

struct Launch {
  void (*kernel)(BackwardParams, BackwardPlan);
  LaunchConfig config;
  BackwardPlan plan;
};

// Chooses the kernel's variant, and plans its launch. The number of segments determines the order of summation, and so
// the bits, which must not depend on the options of a call. So it is computed for the variant of these rows in a call
// without options, and only then a variant is chosen that has the options of this call.
template <class T, class X>
Launch plan_launch(const BackwardParams& p) {
  BackwardPlan plan = {};
  const bool byte_strides_fit = plan.initialize<T, X>(p);
  plan.divide<X>(p.cols, kMaxBlockWarps, plan.flags.has(kGatedNorm) ? kMaxGatedBlockVectors : kMaxBlockVectors);
  LaunchConfig config;
  config.stream = static_cast<Stream>(p.stream);
  const bool supports_clusters = has_clusters(config, backward_staged<T, X, GeneralRows>);
  const bool cluster_shares_row = plan.row_blocks > 1 && plan.row_blocks <= kMaxClusterSize && supports_clusters;
  const bool two_launches = plan.row_blocks > 1 && !cluster_shares_row;
  plan.flags.set(kClusterSharesRow, cluster_shares_row);

  // In an iteration, a block has as many rows as kThreads allow, but no more than the rows of a sample if each sample
  // has a gradient.
  const bool per_sample = plan.has_gradients_per_sample();
  int64_t threads = plan.row_threads;
  if (plan.row_blocks == 1) threads *= std::max(kThreads / plan.row_threads, 1);
  if (per_sample) threads = std::min(threads, round_up(p.rows * plan.row_threads, kWarpSize));
  plan.rows_per_iteration = static_cast<int>(threads) / plan.row_threads;
  config.block = static_cast<unsigned>(threads);
  config.cluster = cluster_shares_row ? static_cast<unsigned>(plan.row_blocks) : 1;

  // Each resident block has a segment. Few rows take one launch, either of one block, or of one cluster that adds up
  // its column sums (ClusterColumnSums).
  int64_t segments = choose_variant<T, X>(plan, config, /*general=*/two_launches, /*column_sum_bytes=*/0).resident;
  const int64_t iterations = ceil_div(p.samples * p.rows, plan.rows_per_iteration);
  const bool clusters_can_sum = supports_clusters && plan.row_blocks == 1;
  const bool sums_in_cluster =
      clusters_can_sum && !per_sample && iterations > 1 && iterations <= kMaxClusterSize * kFewIterations;
  if (sums_in_cluster) segments = kMaxClusterSize;
  if (!clusters_can_sum && !per_sample && iterations <= kFewIterations) segments = 1;
  const int64_t min_iterations = plan.row_blocks > 1 ? 4 : 16;  // few long rows keep the GPU busy in short segments
  plan.set_segments(p, plan.rows_per_iteration, segments, min_iterations);
  size_t column_sum_bytes = 0;
  if (sums_in_cluster) {  // there is a block for each segment, and together the blocks own all columns
    while (plan.num_segments << plan.log2_owned_cols < p.cols) ++plan.log2_owned_cols;
    column_sum_bytes = static_cast<size_t>(2 * plan.num_segments << plan.log2_owned_cols) * sizeof(Acc);
  }

  const bool general = two_launches || plan.flags.has(kMemoryEfficient) || !byte_strides_fit;
  const Instance chosen = choose_variant<T, X>(plan, config, general, column_sum_bytes);
  plan.stages = chosen.stages;
  plan.ring_bytes = static_cast<int>(chosen.ring_bytes);
  config.shared_bytes = chosen.ring_bytes + chosen.column_sum_bytes;
  const int64_t blocks = std::min({plan.num_segments, chosen.resident, kMaxGridY});
  config.grid = dim3(static_cast<unsigned>(plan.row_blocks), static_cast<unsigned>(blocks));
  plan.cluster_segments = 1;
  if (chosen.column_sum_bytes > 0) {
    plan.cluster_segments = static_cast<int>(plan.num_segments);
    config.cluster = static_cast<unsigned>(plan.num_segments);
    config.grid = dim3(config.cluster);
    plan.num_weight_partials = plan.num_bias_partials = 0;
  }
  return {chosen.kernel, config, plan};
}

}  // namespace

// Launches backward for grad_output of T and x of X, and then add_partials.
template <class T, class X>
void launch_backward(const BackwardParams& p) {
  auto [kernel, config, plan] = plan_launch<T, X>(p);
  const int64_t partial_bytes = (plan.num_weight_partials + plan.num_bias_partials) * plan.pitch * int64_t{sizeof(Acc)};
  const bool two_launches = plan.row_blocks > static_cast<int>(config.cluster);
  const int64_t block_iterations = ceil_div(plan.num_segments, config.grid.y) * plan.iterations;
  const int64_t exchange_bytes = two_launches ? BlockExchange::workspace_bytes(config.grid, block_iterations) : 0;
  if (partial_bytes + exchange_bytes > 0) plan.workspace = p.allocator->allocate(partial_bytes + exchange_bytes);
  plan.exchange_workspace = static_cast<char*>(plan.workspace) + partial_bytes;
  launch_once_or_twice(config, kernel, p, plan);
  launch_add_partials(p, plan.workspace, /*is_double=*/false, plan.pitch, plan.weight_sums(p), plan.bias_sums(p),
                      config);
}

}  // namespace layernorm::cuda
