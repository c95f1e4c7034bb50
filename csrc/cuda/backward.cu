// With xhat = (x - mean) * rstd and g = dy * weight, for every row of x and dy [groups, rows, cols] on a GPU:
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat))      dweight = sum of dy * xhat over rows      dbias = sum of dy
//
// and dx = rstd * (g - xhat * mean(g * xhat)) for RMSNorm, whose mean is 0. If forward also returned x as a sum, the
// gradient of that sum is added to dx.
//
// The workspace has partial sums of dweight [weight_partials, pitch] and dbias [bias_partials, pitch], and then the
// messages of the blocks that share rows without a cluster.
//
// A thread owns 16 columns (8 of float64), and keeps their weights and sums of dweight and dbias in registers. Some
// lanes of a warp share a short row, up to 16 warps of a block a longer one, and the blocks of a cluster one of more
// than 8192 columns. Blocks are persistent: a block takes the rows of a segment in turn, which asynchronous copies
// bring to shared memory, and reads a row twice from there, for the row's sums and for dx. The warps of a block
// exchange their sums once per row, while they work on the next row. A second kernel adds the sums of the segments in
// order, without atomic operations; if few rows make a cluster or a block, it adds its sums itself. 3 * groups * rows *
// cols * sizeof(T) bytes are moved.
//
// Still longer rows, and those on older GPUs, are shared by blocks that are resident at once and exchange their sums
// through global memory (PartExchange): each block stores 16 bytes per row, and reads those of all. Rows of more blocks
// than are resident take two launches, which read them twice.
//
// A gated norm has y = n * f(z) with n = xhat * weight + bias: dy * f(z) takes the place of dy, and dz = dy * n *
// f'(z). If the gate is first, x * f(z) takes the place of x, and with du its gradient, dx = du * f(z) and dz = du * x
// * f'(z). The gate z is staged too, and f(z) is computed in both passes: 5 * groups * rows * cols * sizeof(T) bytes
// are moved.
//
// The numerical method is that of the CPU kernels (cpu/backward.cpp): the mean of xhat as computed from the saved mean
// is subtracted.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include <algorithm>

#include "../dtypes.h"
#include "backward_rows.cuh"

namespace layernorm::cuda {
namespace {

// Sums in Acc over this many rounds are added to the workspace, which limits their rounding errors.
constexpr int kRoundsPerSum = 256;

// Threads of a block: many, so that few blocks store partial sums. Two blocks fit on a multiprocessor. Rows of more
// warps have a block of their own, with up to kMaxBlockThreads.
constexpr int kThreads = 256;
constexpr int64_t kMaxJoined = 8;

// Vectors of a part of a row of a gated norm. A block of more vectors of x, dy and the gate needs more than 99 KiB.
constexpr int64_t kMaxGatedPartVectors = 1024;

// Rounds from a row's sums to its dx. The warps of a block then do not wait for each other's sums.
template <class Traits>
constexpr int kLagOf = Traits::kIsBlock ? 1 : 0;

// ---- sums of the parts of a row -------------------------------------------------------------------------------------

// Adds the sums of a row's parts, in an order that depends only on their number.
template <class Acc>
__device__ __forceinline__ void add_parts(RowSums<Acc>& sums, const RowSums<Acc>* parts, int num_parts) {
  const int lane = threadIdx.x % kWarpSize;
  if (num_parts <= kMaxClusterSize) {
#pragma unroll
    for (int k = 0; k < 3; ++k) sums[k] = lane % kMaxClusterSize < num_parts ? parts[lane % kMaxClusterSize][k] : 0;
    sum_row_lanes(sums, kMaxClusterSize);
    return;
  }
  RowSums<double> lane_sums = {};
#pragma unroll 1
  for (int i = lane; i < num_parts; i += kWarpSize) {
#pragma unroll
    for (int k = 0; k < 3; ++k) lane_sums[k] += parts[i][k];
  }
#pragma unroll
  for (int k = 0; k < 3; ++k) sums[k] = static_cast<Acc>(sum_lanes<kWarpSize>(lane_sums[k]));
}

// ---- sums of the columns --------------------------------------------------------------------------------------------

// Adds up a gradient's sums over the rows of the block, and calls store(j, sums) for the elements from j on, a vector
// at a time.
template <class T, class X, class Traits, class Acc, int kElements, class F>
__device__ __forceinline__ void add_rows_of_block(Acc (&sums)[kElements], const Rows<T, X, Traits>& rows,
                                                  const F& store) {
  constexpr int kVec = kVectorSize<X>;
  // First over the rows of a warp.
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    if (offset < rows.slice.lanes()) break;
#pragma unroll
    for (Acc& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  }
  __shared__ Vector<Acc, kVec> thread_sums[kThreads];
  const int row_threads = max(rows.plan.row_threads, kWarpSize);
  const int count = rows.plan.is_warp ? static_cast<int>(blockDim.x) / kWarpSize : rows.plan.rows_per_round;
#pragma unroll
  for (int j = 0; j < kElements; j += kVec) {
    Acc v[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) v[e] = sums[j + e];
    if (count > 1) {
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kVec; ++e) thread_sums[threadIdx.x].values[e] = v[e];
      __syncthreads();
    }
    if (static_cast<int>(threadIdx.x) >= row_threads || rows.slice.row > 0) continue;
#pragma unroll 1
    for (int r = 1; r < count; ++r) {
      const Vector<Acc, kVec> other = thread_sums[r * row_threads + threadIdx.x];
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[e] += other.values[e];
    }
    store(j, v);
  }
}

// The sums of the columns that the blocks of a cluster send to the block that adds them: dweight, then dbias, of
// [joined, 1 << log2_joined_cols].
template <class Acc>
struct JoinedSums {
  Acc* const sums;
  TransactionBarrier& barrier;
  const BackwardPlan<Acc>& plan;

  __device__ __forceinline__ Acc* of(int array, int block) const {
    return sums + ((array * plan.joined + block) << plan.log2_joined_cols);
  }
  __device__ __forceinline__ void send(int array, int column, const Acc& sum) const {
    const int owner = column >> plan.log2_joined_cols;
    barrier.store(of(array, cluster_rank())[column - (owner << plan.log2_joined_cols)], sum, owner);
  }
  // Adds the sums of this block's columns, and calls store(array, column, sum).
  template <class F>
  __device__ __forceinline__ void add(int cols, bool has_weight, bool has_bias, const F& store) const {
    const int first = static_cast<int>(cluster_rank()) << plan.log2_joined_cols;
    const int count = max(min(cols - first, 1 << plan.log2_joined_cols), 0);
    if (threadIdx.x == 0) barrier.expect(count * plan.joined * (has_weight + has_bias) * sizeof(Acc));
    barrier.wait(0);
    for (int array = has_weight ? 0 : 1; array < 1 + has_bias; ++array) {
      for (int c = threadIdx.x; c < count; c += blockDim.x) {
        double sum = 0;
        for (int block = 0; block < plan.joined; ++block) sum += of(array, block)[c];
        store(array, first + c, static_cast<Acc>(sum));
      }
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class T, class X, class Traits>
__global__ void __launch_bounds__(Traits::kIsWarp ? kThreads : kMaxRowThreads<X>, Traits::kIsWarp ? 2 : 1)
    backward_rows(const BackwardParams p, const BackwardPlan<AccOf<X>> plan) {
  using RowsOf = Rows<T, X, Traits>;
  using Acc = typename RowsOf::Acc;
  using Index = typename Traits::Index;
  constexpr int kElements = RowsOf::kElements, kVec = RowsOf::kVec, kLag = kLagOf<Traits>;
  const Flags flags = RowsOf::flags_of(plan.flags);
  const bool is_warp = Traits::kIsWarp || (Traits::kIsAny && plan.is_warp), in_cluster = flags.has(kInCluster);
  const bool has_parts = flags.has(kHasParts), joins = !has_parts && plan.joined > 1;
  const bool finishes = !Traits::kIsAny || !flags.has(kSendsSums) || flags.has(kReceivesSums);

  // The shuffle tells the compiler that the lanes of a warp have the same row.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int row_warps = is_warp ? 1 : plan.row_threads / kWarpSize;
  const int block_row = is_warp ? 0 : warp / row_warps, first_warp = is_warp ? warp : block_row * row_warps;
  const typename RowsOf::SliceOf slice(warp - first_warp, is_warp ? plan.row_threads : kWarpSize, plan.deals_vectors);
  extern __shared__ __align__(16) unsigned char shared[];
  const int stage_bytes = RowsOf::stage_bytes(flags);
  const Index begin = has_parts ? Index{plan.part_cols} * static_cast<Index>(blockIdx.x) : 0;
  const RowsOf rows{p,
                    plan,
                    flags,
                    slice,
                    is_warp ? warp * (kWarpSize / plan.row_threads) + slice.row : block_row,
                    begin,
                    static_cast<int>(min(static_cast<Index>(p.cols) - begin, Index{plan.part_cols})),
                    shared + warp * plan.stages * stage_bytes};

  __shared__ WarpSumsMemory<Acc> warp_sums_memory;
  WarpSums<Acc> warp_sums(warp_sums_memory, first_warp, row_warps);
  using Exchange = PartExchange<Acc, Traits::kIsAny>;
  __shared__ typename Exchange::Memory exchange_memory;
  const Exchange exchange(exchange_memory, shared + plan.ring_bytes, plan, flags);
  const JoinedSums<Acc> joined{reinterpret_cast<Acc*>(shared + plan.ring_bytes), exchange_memory.barriers[0], plan};
  // Joined blocks have one segment each.
  const Index first_segment = joins ? blockIdx.x : blockIdx.y, segment_step = joins ? gridDim.x : gridDim.y;
  const Index num_segments = static_cast<Index>(plan.num_segments);
  const int rounds = static_cast<int>(plan.rounds.divisor());

  Index fetched_segment = first_segment;
  int fetched_round = 0;
  const auto fetch_next = [&](int stage) {
    if (fetched_segment < num_segments) {
      // Keeping the segment from one row to the next would cause spills.
      const Segment<Index> fetched(plan, flags, compute_again(fetched_segment));
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
  if (in_cluster || joins) {
    if (threadIdx.x == 0) Exchange::init(exchange_memory);
    cluster_arrive();
    cluster_wait();
  }
  __syncthreads();

  Acc weight[kElements], dw[kElements], db[kElements];
  int finished = 0, stage = 0;  // rows; the stage of the next row to be summed, in bytes
#pragma unroll 1
  for (Index s = first_segment; s < num_segments; s += segment_step) {
    const Segment<Index> segment(plan, flags, s);
    // The column of the first element among all columns would wait in registers for the next segment.
    slice.template load_parameter<T>(weight, p.weight, {segment.group, 0}, compute_again(begin), rows.part_cols, flags,
                                     kWeight, 1);
#pragma unroll
    for (int j = 0; j < kElements; ++j) dw[j] = db[j] = 0;
    Statistics<Acc> statistics, last_statistics;
#pragma unroll 1
    for (int round = 0; round < rounds + kLag; ++round) {
      RowSums<Acc> totals = {};
      const auto get_totals = [&] {
        __syncthreads();
        warp_sums.get(totals, row_warps);
        if (has_parts) exchange.send(totals, finished);
      };
      last_statistics = statistics;
      if (kLag > 0 && round > 0) get_totals();
      if (round < rounds) {
        if (plan.stages == RowsOf::kMaxStages) {
          async_wait<RowsOf::kMaxStages - 1 - kLag>();
        } else {
          async_wait<RowsOf::kMaxStages - 2 - kLag>();
        }
        __syncwarp();
        const auto& header = rows.header(stage);
        statistics = Statistics<Acc>(header.mean, header.rstd, flags.has(kFromOutput));
        RowSums<Acc> sums = {};
        rows.add_to_sums(sums, stage, statistics, weight, segment.group);
        if (is_warp) {
          sum_row_lanes(sums, slice.lanes());
#pragma unroll
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
          rows.store_grad_input(has_grad_sum, dw, db, last_stage, last_statistics, means, weight, segment.group);
        };
        if (RowsOf::is_gated(flags)) {
          if constexpr (Traits::kIsGated) {
            rows.store_gated(dw, db, last_stage, last_statistics, means, weight, segment.group);
          }
        } else if constexpr (Traits::kIsAny) {
          finish(flags.has(kGradSum));
        } else {  // loads all of grad_sum first
          flags.has(kGradSum) ? finish(std::true_type()) : finish(std::false_type());
        }
      }
      __syncwarp();
      fetch_next(last_stage);
      ++finished;

      const int done = round + 1 - kLag;
      if (!finishes || (done != rounds && static_cast<unsigned>(done) % kRoundsPerSum != 0)) continue;
      if (s + segment_step >= num_segments && done == rounds) let_next_grid_start();
      const auto store = [&](Acc(&column_sums)[kElements], int array, const View& gradient, Flag per_group,
                             int64_t first) {
        add_rows_of_block(column_sums, rows, [&](int j, Acc(&v)[kVec]) {
          if (joins) {
            const int first_column = compute_again(slice.column(0));  // the columns would wait in registers
#pragma unroll
            for (int e = 0; e < kVec; ++e) {
              const int column = first_column + slice.step_to(j + e);
              if (column < rows.part_cols) joined.send(array, column, v[e]);
            }
          } else if (plan.stores_gradient(per_group)) {
            with_parameter_type<T>(flags, [&](auto element) {
              slice.store(address<decltype(element)>(gradient, {s, 0}) + begin, j, v, rows.part_cols);
            });
          } else {
            Acc* const to = static_cast<Acc*>(plan.workspace) + (first + int64_t{s}) * plan.pitch + begin;
            if (done > kRoundsPerSum) {
              const auto earlier = slice.template load<kVec>(to, j, rows.part_cols);
#pragma unroll
              for (int e = 0; e < kVec; ++e) v[e] += earlier.values[e];
            }
            slice.store(to, j, v, rows.part_cols);
          }
        });
#pragma unroll
        for (Acc& sum : column_sums) sum = 0;
      };
      if (flags.has(kGradWeight)) store(dw, 0, p.grad_weight, kWeightPerGroup, 0);
      if (flags.has(kGradBias)) store(db, 1, p.grad_bias, kBiasPerGroup, plan.weight_partials);
    }
  }
  async_wait<0>();  // before the block returns
  if (!joins) return;
  joined.add(static_cast<int>(p.cols), flags.has(kGradWeight), flags.has(kGradBias),
             [&](int array, int column, Acc sum) {
               void* const gradient = array == 0 ? p.grad_weight.data : p.grad_bias.data;
               with_parameter_type<T>(flags, [&](auto element) {
                 using W = decltype(element);
                 static_cast<W*>(gradient)[column] = static_cast<W>(sum);
               });
             });
}

// ---- host code ------------------------------------------------------------------------------------------------------

// Sets the strides in bytes; returns false if the number of a row and its stride exceed 32 bits.
template <class T, class X>
bool set_strides(BackwardPlan<AccOf<X>>& plan, const BackwardParams& p) {
  constexpr int64_t kMax = std::numeric_limits<int>::max();
  bool fit = p.groups * p.rows <= kMax / 2;  // also those of segments that do not exist
  const auto set = [&](unsigned& stride, const View& view, size_t element) {
    const int64_t bytes = view.row_stride * static_cast<int64_t>(element);
    fit = fit && bytes <= kMax;
    stride = static_cast<unsigned>(bytes);
  };
  set(plan.x_stride, p.input, sizeof(X));
  set(plan.dy_stride, p.grad_output, sizeof(T));
  set(plan.dx_stride, p.grad_input, sizeof(X));
  set(plan.grad_sum_stride, p.grad_sum, sizeof(X));
  set(plan.statistics_stride, p.rstd, sizeof(AccOf<X>));
  return fit && (!p.mean.data || p.mean.row_stride == p.rstd.row_stride);
}

// Calls f with the instance of the kernel for the rows of a plan; with the one for all rows and options if `any`. Gated
// norms have one instance, which takes all calls of float64. Rows of a float32 residual that are not whole vectors have
// none of their own.
template <class T, class X, class F>
auto with_path(const BackwardPlan<AccOf<X>>& plan, bool any, const F& f) {
  if constexpr (std::is_same_v<X, double>) {
    return f(GatedRows());
  } else {
    if constexpr (std::is_same_v<T, X>) {
      if (plan.flags.has(kGatedNorm)) return f(GatedRows());
    }
    if (!any && plan.deals_vectors) return plan.is_warp ? f(WarpVectors()) : f(BlockVectors());
    if constexpr (std::is_same_v<T, X>) {
      if (!any) return plan.is_warp ? f(WarpElements()) : f(BlockElements());
    }
    return f(AnyRows());
  }
}

// Chooses the number of stages: as many as fit into shared memory beside `other_bytes`, or one less if that leaves more
// blocks resident and the next row is still fetched ahead. Returns how many rows are resident; 0 if the instance cannot
// take them.
template <class T, class X>
int choose_stages(BackwardPlan<AccOf<X>>& plan, LaunchConfig& config, bool any, size_t other_bytes) {
  constexpr size_t kMaxStaticShared = kThreads * sizeof(Vector<AccOf<X>, kVectorSize<X>>) + 1792;
  return with_path<T, X>(plan, any, [&](auto path) {
    using RowsOf = Rows<T, X, decltype(path)>;
    int most = 0;
    for (int stages = RowsOf::kMaxStages; stages >= RowsOf::kMaxStages - 1; --stages) {
      const size_t bytes = config.block.x / kWarpSize * stages * RowsOf::stage_bytes(plan.flags);
      if (bytes + other_bytes + kMaxStaticShared > max_shared_memory(config)) continue;
      if (most > 0 && stages == kLagOf<decltype(path)> + 1) break;
      config.shared_bytes = bytes + other_bytes;
      int resident = resident_rows(config, backward_rows<T, X, decltype(path)>, plan);
      if (decltype(path)::kIsAny) resident = std::max(resident, 1);
      if (resident > most) {
        most = resident;
        plan.stages = stages;
        plan.ring_bytes = static_cast<int>(bytes);
      }
    }
    config.shared_bytes = static_cast<size_t>(plan.ring_bytes) + other_bytes;
    return most;
  });
}

template <class T, class X>
void launch_backward(const BackwardParams& p) {
  using Acc = AccOf<X>;
  BackwardPlan<Acc> plan = {};
  plan.flags = make_flags(p);
  plan.pitch = round_up(p.cols, kVectorSize<X>);
  plan.cols = Divisor<Acc>(static_cast<Acc>(p.cols), static_cast<Acc>(1.0 / static_cast<double>(p.cols)));
  plan.joined = 1;
  const Flags flags = plan.flags;
  LaunchConfig config;
  config.stream = static_cast<Stream>(p.stream);
  plan.template divide<X>(p.cols, flags.has(kGatedNorm) ? kMaxGatedPartVectors : kMaxPartVectors);
  const bool clusters =
      with_path<T, X>(plan, true, [&](auto path) { return has_clusters(config, backward_rows<T, X, decltype(path)>); });
  const bool in_cluster = plan.num_parts > 1 && plan.num_parts <= kMaxClusterSize && clusters;
  const bool in_grid = plan.num_parts > 1 && !in_cluster;
  plan.flags.set(kInCluster, in_cluster);

  // Rows of groups with few rows and gradients of their own have blocks of few threads.
  const bool per_group = flags.has(kWeightPerGroup | kBiasPerGroup);
  int64_t threads = std::max<int64_t>(kThreads / plan.row_threads, 1) * plan.row_threads;
  if (plan.num_parts > 1) threads = plan.row_threads;
  if (per_group) threads = std::min(threads, round_up(p.rows * plan.row_threads, kWarpSize));
  plan.rows_per_round = static_cast<int>(threads) / plan.row_threads;
  config.block = static_cast<unsigned>(threads);
  config.cluster = in_cluster ? static_cast<unsigned>(plan.num_parts) : 1;
  using Exchange = PartExchange<Acc, true>;
  const size_t staged_bytes = in_grid ? Exchange::staged_bytes(plan, threads) : 0;

  // The number of blocks determines the order of summation of dweight and dbias. It depends neither on the alignment
  // nor on the options, but on the instance for the usual ones.
  bool any = false;
  int64_t segments = choose_stages<T, X>(plan, config, any, staged_bytes);
  if (segments == 0) {
    any = true;
    segments = choose_stages<T, X>(plan, config, any, staged_bytes);
  }
  // Few rows take one launch: of a block, or of a cluster whose blocks add their sums.
  const int64_t total_rounds = ceil_div(p.groups * p.rows, plan.rows_per_round);
  const bool can_join = clusters && plan.num_parts == 1;
  const bool joins = can_join && !per_group && total_rounds > 1 && total_rounds <= kMaxJoined * kFewRounds;
  if (joins) segments = kMaxJoined;
  if (!can_join && !per_group && total_rounds <= kFewRounds) segments = 1;
  plan.set_segments(p, plan.rows_per_round, segments, plan.num_parts > 1 ? 4 : 16);  // long rows keep the GPU busy

  any = any || flags.has(kFromOutput) || (plan.deals_vectors && !flags.has(kAligned)) || !set_strides<T, X>(plan, p);
  size_t joined_bytes = 0;
  if (joins) {
    while (plan.num_segments << plan.log2_joined_cols < p.cols) ++plan.log2_joined_cols;
    joined_bytes = static_cast<size_t>(2 * plan.num_segments << plan.log2_joined_cols) * sizeof(Acc);
  }
  int64_t resident = choose_stages<T, X>(plan, config, any, staged_bytes + joined_bytes);
  if (resident == 0) {
    joined_bytes = 0;
    resident = choose_stages<T, X>(plan, config, any, staged_bytes);
  }
  const int64_t blocks = std::min({plan.num_segments, resident, kMaxGridY});
  config.grid = dim3(static_cast<unsigned>(plan.num_parts), static_cast<unsigned>(blocks));
  if (joined_bytes > 0) {
    plan.joined = static_cast<int>(plan.num_segments);
    config.cluster = static_cast<unsigned>(plan.joined);
    config.grid = dim3(config.cluster);
    plan.weight_partials = plan.bias_partials = 0;
  }

  const int64_t partial_bytes = (plan.weight_partials + plan.bias_partials) * plan.pitch * int64_t{sizeof(Acc)};
  const int64_t rounds = ceil_div(plan.num_segments, blocks) * plan.rounds.divisor();
  const int64_t message_bytes = in_grid ? Exchange::message_bytes(config.grid, rounds) : 0;
  if (partial_bytes + message_bytes > 0) plan.workspace = p.allocator->allocate(partial_bytes + message_bytes);
  plan.messages = reinterpret_cast<Message*>(static_cast<char*>(plan.workspace) + partial_bytes);
  with_path<T, X>(plan, any, [&](auto path) {
    const auto kernel = backward_rows<T, X, decltype(path)>;
    if (in_grid) return launch_grid(config, kernel, p, plan, message_bytes);
    launch(config, kernel, p, plan);
  });
  launch_add_partials(p, plan, sizeof(Acc) == 8 ? Dtype::kFloat64 : Dtype::kFloat32, plan.pitch, config);
}

}  // namespace

void backward(const BackwardParams& p) {
  const bool has_gate_gradients = p.grad_gate.data || p.grad_gated_input.data;
  if (has_gate_gradients && p.activation == Activation::kNone) return backward_with_gate(p);
  if (p.channels_first) return channels_first_backward(p);
  dispatch_dtypes<Elements>(
      p, [&](auto types) { launch_backward<typename decltype(types)::T, typename decltype(types)::X>(p); });
}

}  // namespace layernorm::cuda
