// The kernel for backward of rows, and the choice of its instance and launch. backward.cu has the formulas. A file for
// each dtype compiles the instances.
#pragma once

#include <algorithm>

#include "backward_rows.cuh"

namespace layernorm::cuda {
namespace {

// Sums in Acc over this many rounds are added to the workspace, which limits their rounding errors.
constexpr int kRoundsPerSum = 256;

// Threads of a block: many, so that few blocks store partial sums. Two blocks fit on a multiprocessor. A row of more
// warps has a block of its own, with up to kMaxBlockThreads.
constexpr int kThreads = 256;
constexpr int64_t kMaxJoined = 8;

// Vectors of a part of a row of a gated norm. A block of more vectors of x, dy and the gate needs more than 99 KiB.
constexpr int64_t kMaxGatedPartVectors = 1024;

// Rounds from a row's sums to its dx. The warps of a block then do not wait for each other's sums.
template <class Path>
constexpr int kLagOf = Path::kIsBlock ? 1 : 0;

// ---- sums of the parts of a row -------------------------------------------------------------------------------------

// Adds the sums of a row's parts, in an order that depends only on their number. A warp calls this.
__device__ __forceinline__ void add_parts(RowSums& sums, const RowSums* parts, int num_parts) {
  const int lane = threadIdx.x % kWarpSize;
  if (num_parts <= kMaxClusterSize) {
    for (int k = 0; k < 3; ++k) sums[k] = lane % kMaxClusterSize < num_parts ? parts[lane % kMaxClusterSize][k] : 0;
    sum_row_lanes(sums, kMaxClusterSize);
    return;
  }
  double lane_sums[3] = {};
#pragma unroll 1
  for (int i = lane; i < num_parts; i += kWarpSize) {
    for (int k = 0; k < 3; ++k) lane_sums[k] += parts[i][k];
  }
  for (int k = 0; k < 3; ++k) sums[k] = static_cast<Acc>(sum_lanes<kWarpSize>(lane_sums[k]));
}

// ---- sums of the columns --------------------------------------------------------------------------------------------

// Adds up a gradient's sums over the rows of the block, and calls store(j, sums) for the elements from j on, a vector
// at a time.
template <class T, class X, class Path, int kElements, class F>
__device__ __forceinline__ void add_rows_of_block(Acc (&sums)[kElements], const Rows<T, X, Path>& rows,
                                                  const F& store) {
  constexpr int kVec = kVectorSize<X>;
  // First over the rows of a warp.
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    if (offset < rows.slice.lanes()) break;
    for (Acc& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  }
  __shared__ Vector<Acc, kVec> thread_sums[kThreads];
  const int row_threads = max(rows.plan.row_threads, kWarpSize);
  const int count = rows.plan.is_warp ? static_cast<int>(blockDim.x) / kWarpSize : rows.plan.rows_per_round;
#pragma unroll
  for (int j = 0; j < kElements; j += kVec) {
    Acc v[kVec];
    for (int e = 0; e < kVec; ++e) v[e] = sums[j + e];
    if (count > 1) {
      __syncthreads();
      for (int e = 0; e < kVec; ++e) thread_sums[threadIdx.x].values[e] = v[e];
      __syncthreads();
    }
    if (static_cast<int>(threadIdx.x) >= row_threads || rows.slice.row > 0) continue;
#pragma unroll 1
    for (int r = 1; r < count; ++r) {
      const Vector<Acc, kVec> other = thread_sums[r * row_threads + threadIdx.x];
      for (int e = 0; e < kVec; ++e) v[e] += other.values[e];
    }
    store(j, v);
  }
}

// The sums of the columns that the blocks of a cluster send to the block that adds them: dweight, then dbias, of
// [joined, 1 << log2_joined_cols].
struct JoinedSums {
  Acc* const sums;
  TransactionBarrier& barrier;
  const BackwardPlan& plan;

  __device__ __forceinline__ Acc* of(int array, int block) const {
    return sums + ((array * plan.joined + block) << plan.log2_joined_cols);
  }
  __device__ __forceinline__ void send(int array, int column, const Acc& sum) const {
    const int owner = column >> plan.log2_joined_cols;
    barrier.store(of(array, cluster_rank())[column - (owner << plan.log2_joined_cols)], sum, owner);
  }
  // Adds the sums of this block's columns, and stores the gradients.
  template <class T>
  __device__ __forceinline__ void add(const BackwardParams& p, Flags flags) const {
    const int first = static_cast<int>(cluster_rank()) << plan.log2_joined_cols;
    const int count = max(min(static_cast<int>(p.cols) - first, 1 << plan.log2_joined_cols), 0);
    const bool has_weight = flags.has(kGradWeight), has_bias = flags.has(kGradBias);
    if (threadIdx.x == 0) barrier.expect(count * plan.joined * (has_weight + has_bias) * sizeof(Acc));
    barrier.wait(0);
    for (int array = has_weight ? 0 : 1; array < 1 + has_bias; ++array) {
      void* const gradient = array == 0 ? p.grad_weight.data : p.grad_bias.data;
      for (int c = threadIdx.x; c < count; c += blockDim.x) {
        double sum = 0;
        for (int block = 0; block < plan.joined; ++block) sum += of(array, block)[c];
        with_parameter_type<T>(flags, [&](auto element) {
          using W = decltype(element);
          static_cast<W*>(gradient)[first + c] = static_cast<W>(static_cast<Acc>(sum));
        });
      }
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// A block takes its segments in turn, and `rounds` rounds of each; a round has rows_per_round rows. Copies run ahead by
// the number of stages, also into the next segment. Warps of different rows meet only at the block's barriers. With a
// lag of one, round r sums row r and then finishes row r - 1; one more round at the end of a segment finishes its last
// row. The time line of a block with a lag, B being the block's barrier:
//
//   round 0:    sum row 0, put its sums
//   round 1: B, get and send the sums of row 0; sum row 1, put its sums; receive parts and finish row 0; fetch
//   round 2: B, get and send the sums of row 1; sum row 2, put its sums; receive parts and finish row 1; fetch
//
// A warp that has passed B in round r may run ahead of the others up to B in round r + 1: it puts the sums of row r
// into one buffer of WarpSums while others still get those of row r - 1 from the other one. Without a lag, put(), B and
// get() belong to the same round. Warps that hold whole rows have no barrier in a round, and run ahead freely until the
// sums of the columns are added (add_rows_of_block()), at the end of a segment or after kRoundsPerSum rounds. The
// blocks of a row in parts run ahead as PartExchange says. Joined blocks have one segment each, send the sums of its
// columns, and wait only at the end.
template <class T, class X, class Path>
__global__ void __launch_bounds__(Path::kIsWarp ? kThreads : kMaxBlockThreads, Path::kIsWarp ? 2 : 1)
    backward_rows(const BackwardParams p, const BackwardPlan plan) {
  using RowsOf = Rows<T, X, Path>;
  using Index = typename Path::Index;
  constexpr int kElements = RowsOf::kElements, kVec = RowsOf::kVec, kLag = kLagOf<Path>;
  constexpr int stage_bytes = RowsOf::kStageBytes;
  const Flags flags = flags_of<Path>(plan.flags);
  const bool is_warp = Path::kIsWarp || (Path::kIsGeneral && plan.is_warp), in_cluster = flags.has(kInCluster);
  const bool has_parts = flags.has(kHasParts), joins = !has_parts && plan.joined > 1;
  const bool finishes = !flags.has(kStoresSums);

  // The shuffle tells the compiler that the lanes of a warp have the same row.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int row_warps = is_warp ? 1 : plan.row_threads / kWarpSize;
  const int block_row = is_warp ? 0 : warp / row_warps, first_warp = is_warp ? warp : block_row * row_warps;
  const typename RowsOf::SliceOf slice(warp - first_warp, is_warp ? plan.row_threads : kWarpSize, plan.deals_vectors);
  extern __shared__ __align__(16) unsigned char shared[];
  const Index begin = has_parts ? Index{plan.part_cols} * static_cast<Index>(blockIdx.x) : 0;
  const RowsOf rows{p,
                    plan,
                    flags,
                    slice,
                    is_warp ? warp * (kWarpSize / plan.row_threads) + slice.row : block_row,
                    begin,
                    static_cast<int>(min(static_cast<Index>(p.cols) - begin, Index{plan.part_cols})),
                    shared + warp * plan.stages * stage_bytes};

  __shared__ WarpSumsMemory warp_sums_memory;
  WarpSums warp_sums(warp_sums_memory, first_warp, row_warps);
  __shared__ PartExchange::Memory exchange_memory;
  const PartExchange exchange(exchange_memory, plan.part_values, plan.num_parts, flags);
  const JoinedSums joined{reinterpret_cast<Acc*>(shared + plan.ring_bytes), exchange_memory.barriers[0], plan};
  // Joined blocks have one segment each.
  const Index first_segment = joins ? blockIdx.x : blockIdx.y, segment_step = joins ? gridDim.x : gridDim.y;
  const Index num_segments = static_cast<Index>(plan.num_segments);
  const int rounds = plan.rounds;

  Index fetched_segment = first_segment;
  int fetched_round = 0;
  const auto fetch_next = [&](int stage) {
    if (fetched_segment < num_segments) {
      const Segment<Index> fetched(plan, compute_again(fetched_segment));
      rows.fetch(fetched, rows.row_of(fetched, fetched_round), stage);
      if (++fetched_round == rounds) {
        fetched_round = 0;
        fetched_segment += segment_step;
      }
    }
    async_commit();
  };
#pragma unroll 1
  for (int stage = 0; stage < plan.stages * stage_bytes; stage += stage_bytes) fetch_next(stage);
  if (in_cluster || joins) PartExchange::start(exchange_memory);
  __syncthreads();

  Acc weight[kElements], dw[kElements], db[kElements];
  int finished = 0, stage = 0;  // rows; the stage of the next row to be summed, in bytes
#pragma unroll 1
  for (Index s = first_segment; s < num_segments; s += segment_step) {
    const Segment<Index> segment(plan, s);
    slice.template load_parameter<T>(weight, p.weight, {segment.gradient, 0}, compute_again(begin), rows.part_cols,
                                     flags, kWeight, 1);
#pragma unroll
    for (int j = 0; j < kElements; ++j) dw[j] = db[j] = 0;
    Statistics statistics, last_statistics;
#pragma unroll 1
    for (int round = 0; round < rounds + kLag; ++round) {
      RowSums totals = {};
      const auto get_totals = [&] {
        __syncthreads();
        warp_sums.get(totals, row_warps);
        if (has_parts) exchange.send(totals, finished);
      };
      last_statistics = statistics;
      if (kLag > 0 && round > 0) get_totals();
      if (round < rounds) {
        wait_for_stage<RowsOf::kMaxStages - kLag>(plan.stages - kLag);
        const auto& header = rows.header(stage);
        statistics = Statistics(header.mean, header.rstd, flags.has(kMemoryEfficient));
        RowSums sums = {};
        rows.add_to_sums(sums, stage, statistics, weight, segment.gradient);
        if (is_warp) {
          sum_row_lanes(sums, slice.lanes());
          for (int k = 0; k < 3; ++k) totals[k] = sums[k];
        } else {
          warp_sums.put(sums, slice.lane_in_warp);
        }
      }
      const int ring_end = (kLag > 0 ? compute_again(plan.stages) : plan.stages) * stage_bytes;
      const int last_stage = kLag == 0 ? stage : (stage == 0 ? ring_end : stage) - stage_bytes;
      if (round < rounds) stage = stage + stage_bytes == ring_end ? 0 : stage + stage_bytes;
      if (round < kLag) continue;
      if (kLag == 0) {
        last_statistics = statistics;
        if (!is_warp) get_totals();
      }
      if (finishes) {
        if (has_parts) add_parts(totals, exchange.receive(finished), plan.num_parts);
        const auto means = rows.compute_means(totals, last_statistics.rstd);
        const auto finish = [&](auto has_grad_sum) {
          rows.store_gradients(has_grad_sum, dw, db, last_stage, last_statistics, means, weight, segment.gradient);
        };
        if constexpr (RowsOf::kLoadsAhead) {
          flags.has(kGradSum) ? finish(std::true_type()) : finish(std::false_type());
        } else {
          finish(flags.has(kGradSum));
        }
      }
      __syncwarp();
      fetch_next(last_stage);
      ++finished;

      const int done = round + 1 - kLag;
      if (!finishes || (done != rounds && static_cast<unsigned>(done) % kRoundsPerSum != 0)) continue;
      if (s + segment_step >= num_segments && done == rounds) let_next_grid_start();
      const auto store = [&](Acc(&column_sums)[kElements], int array, const View& gradient, Flag per_sample,
                             int64_t first) {
        add_rows_of_block(column_sums, rows, [&](int j, Acc(&v)[kVec]) {
          if (joins) {
            const int first_column = compute_again(slice.column(0));
            for (int e = 0; e < kVec; ++e) {
              const int column = first_column + slice.step_to(j + e);
              if (column < rows.part_cols) joined.send(array, column, v[e]);
            }
          } else if (plan.stores_gradient(per_sample)) {
            with_parameter_type<T>(flags, [&](auto element) {
              slice.store(address<decltype(element)>(gradient, {s, 0}) + begin, j, v, rows.part_cols);
            });
          } else {
            Acc* const to = static_cast<Acc*>(plan.workspace) + (first + int64_t{s}) * plan.pitch + begin;
            if (done > kRoundsPerSum) {
              const auto earlier = slice.template load<kVec>(to, j, rows.part_cols);
              for (int e = 0; e < kVec; ++e) v[e] += earlier.values[e];
            }
            slice.store(to, j, v, rows.part_cols);
          }
        });
        for (Acc& sum : column_sums) sum = 0;
      };
      if (flags.has(kGradWeight)) store(dw, 0, p.grad_weight, kWeightPerSample, 0);
      if (flags.has(kGradBias)) store(db, 1, p.grad_bias, kBiasPerSample, plan.weight_partials);
    }
  }
  async_wait<0>();  // before the block returns
  if (joins) joined.template add<T>(p, flags);
}

// ---- host code ------------------------------------------------------------------------------------------------------

// An instance of the kernel, and how its blocks use shared memory.
struct Instance {
  void (*kernel)(BackwardParams, BackwardPlan) = nullptr;
  int stages = 0;
  size_t ring_bytes = 0, joined_bytes = 0;
  int64_t resident = 0;  // blocks, or clusters that share a row
};

// Chooses as many stages as fit into shared memory, or one less if that leaves more blocks resident: on an A100, two
// blocks of float32 rows instead of one that fetches a row further ahead. If none fits, `kernel` is null.
template <class T, class X, class Path>
Instance choose_stages(const BackwardPlan& plan, LaunchConfig config, size_t joined_bytes) {
  using RowsOf = Rows<T, X, Path>;
  const auto kernel = backward_rows<T, X, Path>;
  constexpr size_t kMaxStaticShared = kThreads * sizeof(Vector<Acc, kVectorSize<X>>) + 1792;
  Instance chosen;
  for (int stages = RowsOf::kMaxStages; stages >= RowsOf::kMaxStages - 1; --stages) {
    const size_t ring_bytes = config.block.x / kWarpSize * stages * RowsOf::kStageBytes;
    config.shared_bytes = ring_bytes + joined_bytes;
    if (config.shared_bytes + kMaxStaticShared > max_shared_memory(config)) continue;
    const int64_t resident = std::max(resident_blocks(config, kernel) / plan.num_parts, 1);
    if (resident > chosen.resident) chosen = {kernel, stages, ring_bytes, joined_bytes, resident};
  }
  // Without room for the sums of the other blocks, the blocks do not join.
  return chosen.kernel || joined_bytes == 0 ? chosen : choose_stages<T, X, Path>(plan, config, 0);
}

// Chooses the instance for the rows of a plan. Rows of a float32 residual that are not whole vectors have only the one
// for all rows and options, and so have rows whose own instance needs too much shared memory.
template <class T, class X>
Instance choose_instance(const BackwardPlan& plan, const LaunchConfig& config, bool general, size_t joined_bytes) {
  const auto with = [&](auto path) { return choose_stages<T, X, decltype(path)>(plan, config, joined_bytes); };
  Instance chosen;
  if constexpr (std::is_same_v<T, X>) {
    if (plan.flags.has(kGatedNorm)) return with(GatedRows());
    if (!general && !plan.deals_vectors) chosen = plan.is_warp ? with(WarpElements()) : with(BlockElements());
  }
  if (!general && plan.deals_vectors) chosen = plan.is_warp ? with(WarpVectors()) : with(BlockVectors());
  return chosen.kernel ? chosen : with(GeneralRows());
}

// The launch of a call.
struct Choice {
  void (*kernel)(BackwardParams, BackwardPlan);
  LaunchConfig config;
  BackwardPlan plan;
};

// Chooses the instance of the kernel, and its plan. Segments decide the order of summation, and so the bits, which must
// not depend on the options. So their number follows from the resident blocks of the instance that a call without
// unusual options has, and then the options choose the instance that is launched, its stages and its blocks.
template <class T, class X>
Choice choose(const BackwardParams& p) {
  BackwardPlan plan = {};
  const bool has_addresses = plan.set<T, X>(p);
  plan.divide<X>(p.cols, kMaxBlockWarps, plan.flags.has(kGatedNorm) ? kMaxGatedPartVectors : kMaxPartVectors);
  LaunchConfig config;
  config.stream = static_cast<Stream>(p.stream);
  const bool clusters = has_clusters(config, backward_rows<T, X, GeneralRows>);
  const bool in_cluster = plan.num_parts > 1 && plan.num_parts <= kMaxClusterSize && clusters;
  const bool two_launches = plan.num_parts > 1 && !in_cluster;
  plan.flags.set(kInCluster, in_cluster);

  // Rows of samples with few rows and gradients of their own have blocks of few threads.
  const bool per_sample = plan.has_gradients_per_sample();
  int64_t threads = plan.row_threads;
  if (plan.num_parts == 1) threads *= std::max(kThreads / plan.row_threads, 1);
  if (per_sample) threads = std::min(threads, round_up(p.rows * plan.row_threads, kWarpSize));
  plan.rows_per_round = static_cast<int>(threads) / plan.row_threads;
  config.block = static_cast<unsigned>(threads);
  config.cluster = in_cluster ? static_cast<unsigned>(plan.num_parts) : 1;

  // The number of segments determines the order of summation of dweight and dbias. It depends not on the options, but
  // on the instance for the usual ones. Few rows take one launch: of a block, or of a cluster whose blocks join.
  int64_t segments = choose_instance<T, X>(plan, config, two_launches, 0).resident;
  const int64_t rounds = ceil_div(p.samples * p.rows, plan.rows_per_round);
  const bool can_join = clusters && plan.num_parts == 1;
  const bool joins = can_join && !per_sample && rounds > 1 && rounds <= kMaxJoined * kFewRounds;
  if (joins) segments = kMaxJoined;
  if (!can_join && !per_sample && rounds <= kFewRounds) segments = 1;
  plan.set_segments(p, plan.rows_per_round, segments, plan.num_parts > 1 ? 4 : 16);  // long rows keep the GPU busy
  while (plan.num_segments << plan.log2_joined_cols < p.cols) ++plan.log2_joined_cols;
  const int64_t joined_sums = joins ? 2 * plan.num_segments << plan.log2_joined_cols : 0;

  const bool general = two_launches || plan.flags.has(kMemoryEfficient) || !has_addresses;
  const Instance chosen = choose_instance<T, X>(plan, config, general, static_cast<size_t>(joined_sums) * sizeof(Acc));
  plan.stages = chosen.stages;
  plan.ring_bytes = static_cast<int>(chosen.ring_bytes);
  config.shared_bytes = chosen.ring_bytes + chosen.joined_bytes;
  const int64_t blocks = std::min({plan.num_segments, chosen.resident, kMaxGridY});
  config.grid = dim3(static_cast<unsigned>(plan.num_parts), static_cast<unsigned>(blocks));
  plan.joined = 1;
  if (chosen.joined_bytes > 0) {
    plan.joined = static_cast<int>(plan.num_segments);
    config.grid = dim3(config.cluster = static_cast<unsigned>(plan.joined));
    plan.weight_partials = plan.bias_partials = 0;
  }
  return {chosen.kernel, config, plan};
}

}  // namespace

template <class T, class X>
void launch_backward(const BackwardParams& p) {
  auto [kernel, config, plan] = choose<T, X>(p);
  const int64_t partial_bytes = (plan.weight_partials + plan.bias_partials) * plan.pitch * int64_t{sizeof(Acc)};
  int64_t part_bytes = 0;
  if (plan.num_parts > static_cast<int>(config.cluster)) {
    part_bytes = PartExchange::workspace_bytes(config.grid, ceil_div(plan.num_segments, config.grid.y) * plan.rounds);
  }
  if (partial_bytes + part_bytes > 0) plan.workspace = p.allocator->allocate(partial_bytes + part_bytes);
  plan.part_values = static_cast<char*>(plan.workspace) + partial_bytes;
  launch_parts(config, kernel, p, plan);
  launch_add_partials(p, plan, /*is_double=*/false, plan.pitch, config);
}

}  // namespace layernorm::cuda
