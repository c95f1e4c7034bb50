// Forward for the rows that forward_rows.cu does not take: long rows, rows that are not whole vectors, and gated norms.
// forward.cu has the formulas and tells which threads share a row.
//
//   copies -> staged row -> sum_round(): add the input, moments -> [exchange, merge] -> finish_round(): y
//
// A thread owns 16 columns of all rows of its block, and keeps their weights and biases in registers. Blocks are
// persistent: asynchronous copies bring the next rows to shared memory, from where a row is read twice.
// 2 * samples * rows * cols * sizeof(T) bytes are moved; with a residual also those of the residual and the sum, which
// replaces it in shared memory. The input_scale is read from the caches for each row.
//
// A block has one barrier per row, and a cluster one exchange of moments. A cluster finishes a row after it has summed
// the next one (`lag`), so that the exchange does not delay it: its first warp merges the moments of the last row
// before the barrier that the sums of this row need.
//
// The gate z of a gated norm is staged like the input beside a residual: 3 * samples * rows * cols * sizeof(T) bytes
// are moved. The elements that are normalized wait in registers for the sums.
//
// Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
#include "../dtypes.h"
#include "moments.cuh"
#include "parts.cuh"

namespace layernorm::cuda {

struct SlicesPlan : ForwardPlan, RowDivision {
  int stages, stage_bytes;     // of the shared memory of a warp
  int rows_per_round, rounds;  // of a block
  int lag;                     // rounds from a row's sums to its output
  void* workspace;             // of PartExchange
  Divisor<Acc> part, last_part;
};

namespace {

constexpr int kMaxStages = 3;  // rows of a warp that are fetched or in use; a lag needs all of them

// Warps of a block that shares a row with others, up to the blocks of a cluster. A multiprocessor runs three such
// blocks of code for 9.0, or two of other code, and the others go on while one waits at its barrier. It runs one of 16
// warps.
constexpr int64_t kPreferredWarps = 8;

// The addresses of the results of a row, and the first vector of the block's part of it, from which a warp estimates
// the mean. A vector that is not aligned is in two pieces of 16 aligned bytes.
template <class T, class X>
struct alignas(16) RowHeader {
  unsigned char x[32], second[32];
  int64_t number;  // of the row among all rows; -1 if it does not exist
  T* output;
  X* sum;
  short x_offset, second_offset;  // see Slice::staged()
};

// ---- rows in shared memory ------------------------------------------------------------------------------------------

// A thread's work on the rows of its block. x is first the input and, with a residual, then the sum.
template <class T, class X, class Path>
struct Rows {
  using SliceOf = Slice<X, Path::kMapping, Path::kLanes>;
  using Header = RowHeader<T, X>;
  static constexpr int kElements = SliceOf::kElements, kVec = SliceOf::kVec;
  static constexpr int kStep = Path::kIsGeneral ? std::min(kVec, 4) : kVec;  // elements that are processed together

  const ForwardParams& p;
  const SlicesPlan& plan;
  const Flags flags;
  const SliceOf slice;
  const int64_t begin;  // the first column of the block's part
  const int part_cols;
  unsigned char* const shared;  // of the warp

  // A stage has the headers of the warp's rows, x, and a second array: the input beside a residual, or the gate.
  __host__ __device__ static int x_begin(int rows) { return rows * static_cast<int>(sizeof(Header)); }
  __host__ static int stage_bytes(int rows, Flags flags) {
    const bool has_second_array = flags.has(kResidual | kGatedNorm);
    return x_begin(rows) + SliceOf::template staged_bytes<X>(rows) +
           (has_second_array ? SliceOf::template staged_bytes<T>(rows) : 0);
  }
  __device__ __forceinline__ int rows_of_warp() const { return Path::kIsBlock ? 1 : kWarpSize / slice.lanes(); }
  __device__ __forceinline__ Header& header(int stage) const {
    return reinterpret_cast<Header*>(shared + stage)[Path::kIsBlock ? 0 : slice.row];
  }
  __device__ __forceinline__ unsigned char* x_at(int stage) const { return shared + stage + x_begin(rows_of_warp()); }
  __device__ __forceinline__ unsigned char* second_at(int stage) const {
    return x_at(stage) + SliceOf::template staged_bytes<X>(rows_of_warp());
  }

  // Starts to copy a row, or zeros if it does not exist, to the shared memory of a stage.
  __device__ __forceinline__ void fetch(int64_t number, bool exists, int stage) const {
    const int cols = exists ? part_cols : 0;
    using Index = typename Path::Index;
    const Index row = exists ? static_cast<Index>(number) : 0;
    with_addresses_of_row<Path::kIsGeneral>(row, flags.has(kHasSamples), plan.rows, [&](const auto& address_in) {
      Header& to = header(stage);
      const X* const x = address_in(flags.has(kResidual) ? p.residual : p.input, X(), plan.x_stride) + begin;
      slice.fetch(x_at(stage), x, cols);
      fetch_first_vector(to.x, x, cols);
      const T* const second = address_in(Path::kIsGated ? p.gate : p.input, T(), plan.input_stride) + begin;
      if (Path::kIsGated || flags.has(kResidual)) {
        slice.fetch(second_at(stage), second, cols);
        fetch_first_vector(to.second, second, cols);
      }
      if (slice.lane > 0) return;
      to.number = exists ? number : -1;
      to.output = address_in(p.output, T(), plan.output_stride) + begin;
      to.sum = address_in(p.sum, X(), plan.sum_stride) + begin;
      to.x_offset = static_cast<short>(slice.offset_of(x));
      to.second_offset = static_cast<short>(slice.offset_of(second));
    });
  }
  template <class E>
  __device__ __forceinline__ void fetch_first_vector(unsigned char* to, const E* array, int cols) const {
    if (slice.lane > 1) return;
    const int offset = slice.offset_of(array), granule = slice.lane * 16;
    const int end = cols > 0 ? offset + min(cols, kVec) * static_cast<int>(sizeof(E)) : 0;
    async_copy<16>(to + granule, reinterpret_cast<const unsigned char*>(array) - offset + granule,
                   min(max(end - granule, 0), 16), granule == 0 ? offset : 0);
  }

  // This thread's first element of x.
  __device__ __forceinline__ X* staged_x(int stage) const {
    return slice.template staged<X>(x_at(stage), header(stage).x_offset);
  }
  // The input_scale of a column of the part; zero after the end.
  __device__ __forceinline__ Acc load_input_scale(int64_t sample, int column) const {
    return column < part_cols ? load_element<T>(p.input_scale, sample, begin + column, flags) : 0;
  }
  __device__ __forceinline__ bool exists(int stage) const { return header(stage).number >= 0; }
  __device__ __forceinline__ RowIndex find_row(int stage) const {
    return find_sample(max(header(stage).number, int64_t{0}), flags.has(kHasSamples), plan.rows);
  }
  // Adds the input, or its product with the input_scale of the row's sample, to the residual.
  __device__ __forceinline__ void add_input(int stage) const {
    const auto slice = this->slice.rebuilt();
    X* const x = staged_x(stage);
    const T* const input = slice.template staged<T>(second_at(stage), header(stage).second_offset);
#pragma unroll
    for (int j = 0; j < kElements; j += kStep) {
      Acc a[kStep], b[kStep];
      slice.read(a, x, j);
      slice.read(b, input, j);
      if (flags.has(kInputScale)) {
        const int64_t sample = find_row(stage).sample;
        for (int e = 0; e < kStep; ++e) a[e] = fma(load_input_scale(sample, slice.column(j + e)), b[e], a[e]);
      } else {
        for (int e = 0; e < kStep; ++e) a[e] += b[e];
      }
      slice.write(x, j, round_to<X>(a));
    }
  }
  // Reads the input of a gated norm, or its product with the activated gate, which is not rounded.
  __device__ __forceinline__ void read_all(Acc (&v)[kElements], int stage) const {
    const auto slice = this->slice.rebuilt();
    const X* const x = staged_x(stage);
#pragma unroll
    for (int j = 0; j < kElements; j += kStep) {
      Acc a[kStep];
      slice.read(a, x, j);
      if (flags.has(kGateFirst)) apply_gate(a, slice, stage, j);
      for (int e = 0; e < kStep; ++e) v[j + e] = a[e];
    }
  }
  // Multiplies elements [j, j + kStep) by the activated gate.
  __device__ __forceinline__ void apply_gate(Acc (&v)[kStep], const SliceOf& slice, int stage, int j) const {
    Acc gate[kStep];
    slice.read(gate, slice.template staged<T>(second_at(stage), header(stage).second_offset), j);
    for (int e = 0; e < kStep; ++e) v[e] *= Activated(gate[e], flags).value;
  }
  // The average of the part's first vector, an estimate of the mean. Its elements after the end are zeros.
  __device__ __forceinline__ Acc estimate_mean(int stage) const {
    const Header& from = header(stage);
    Acc v[kVec];
    read_first_vector<X>(v, from.x, from.x_offset);
    if (Path::kIsGated && flags.has(kGateFirst)) {
      Acc gate[kVec];
      read_first_vector<T>(gate, from.second, from.second_offset);
      for (int e = 0; e < kVec; ++e) v[e] *= Activated(gate[e], flags).value;
    }
    if (flags.has(kResidual)) {
      Acc input[kVec];
      read_first_vector<T>(input, from.second, from.second_offset);
      if (flags.has(kInputScale)) {
        const int64_t sample = find_row(stage).sample;
        for (int e = 0; e < kVec; ++e) input[e] *= load_input_scale(sample, e);
      }
      for (int e = 0; e < kVec; ++e) v[e] = static_cast<Acc>(static_cast<X>(v[e] + input[e]));
    }
    const bool is_whole = Path::kMapping == Mapping::kVectors || part_cols >= kVec;
    return is_whole ? average(v) : average(v) * (Acc(kVec) / static_cast<Acc>(part_cols));
  }
  template <class E>
  __device__ __forceinline__ static void read_first_vector(Acc (&v)[kVec], const unsigned char* from, int offset) {
    if constexpr (Path::kMapping == Mapping::kVectors) {
      widen(v, *reinterpret_cast<const Vector<E, kVec>*>(from));
    } else {
      for (int e = 0; e < kVec; ++e) v[e] = static_cast<Acc>(reinterpret_cast<const E*>(from + offset)[e]);
    }
  }

  // Computes the moments of this block's part of a row, after it has added the input to the staged residual. Gated
  // norms put what is normalized into `values`. before_barrier() is that of sum_row().
  template <class F>
  __device__ __forceinline__ Moments sum_round(Acc (&values)[kElements], int stage, const Divisor<Acc>& part_divisor,
                                               int& buffer, const F& before_barrier) const {
    if (flags.has(kResidual)) add_input(stage);
    if constexpr (Path::kIsGated) read_all(values, stage);
    Moments moments[1] = {};
    if (flags.has(kLoadsSums)) return moments[0];
    const bool rms = flags.has(kRms);
    const Acc pivots[1] = {rms ? 0 : estimate_mean(stage)};
    const X* const x = staged_x(stage);
    reduce_moments(
        moments, pivots, plan.row_threads, part_divisor, rms, buffer,
        [&](Acc(&sums)[2]) { sum(sums, x, values, moments[0]); }, before_barrier);
    return moments[0];
  }
  // Adds up d = x * row_scale - pivot and their squares.
  __device__ __forceinline__ void sum(Acc (&sums)[2], const X* x, const Acc (&values)[kElements],
                                      const Moments& moments) const {
    const auto slice = this->slice.rebuilt();
    MomentSums own;
    const auto add = [&](auto has_end) {
#pragma unroll
      for (int j = 0; j < kElements; j += kStep) {
        Acc v[kStep];
        read(v, slice, x, values, j);
        for (int e = 0; e < kStep; ++e) {  // the zeros after the end stay zeros
          // Vectors end at the end of the row.
          const int column = slice.column(Path::kMapping == Mapping::kVectors ? j : j + e);
          const bool exists = !has_end.value || column < part_cols;
          own.add(e, fma(v[e], moments.row_scale, exists ? -moments.pivot : 0));
        }
      }
    };
    if (slice.begin + slice.lanes() * kElements <= part_cols) {
      add(std::false_type());
    } else {
      add(std::true_type());
    }
    own.store(sums);
  }
  // Stores this thread's part of a row, unless it does not exist.
  __device__ __forceinline__ void finish_round(const Normalizer& normalizer, const Acc (&values)[kElements],
                                               const Acc (&weight)[kElements], const Acc (&bias)[kElements],
                                               int stage) const {
    const auto slice = this->slice.rebuilt();
    const int cols = exists(stage) ? part_cols : 0;
    const X* const x = staged_x(stage);
    T* const output = compute_once(header(stage).output);
    X* const sum = compute_once(header(stage).sum);
#pragma unroll
    for (int j = 0; j < kElements; j += kStep) {
      Acc v[kStep];
      read(v, slice, x, values, j);
      // The sum may replace the residual, whose first vector all warps of the block have read before the sums.
      if (flags.has(kResidual)) slice.store(sum, j, v, cols);
      for (int e = 0; e < kStep; ++e) v[e] = fma(normalizer.xhat(v[e]), weight[j + e], bias[j + e]);
      if (Path::kIsGated && !flags.has(kGateFirst)) apply_gate(v, slice, stage, j);
      slice.store(output, j, v, cols);
    }
  }
  __device__ __forceinline__ static void read(Acc (&v)[kStep], const SliceOf& slice, const X* x,
                                              const Acc (&values)[kElements], int j) {
    if constexpr (Path::kIsGated) {
      for (int e = 0; e < kStep; ++e) v[e] = values[j + e];
    } else {
      slice.read(v, x, j);
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// A multiprocessor has registers for so many threads of rows of blocks: 80 each in code for 9.0, 96 for 8.0, and 128
// for 10.0 and later, which would spill with fewer.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 1000
constexpr int kResidentThreads = 512;
#elif __CUDA_ARCH__ >= 900
constexpr int kResidentThreads = 768;
#else
constexpr int kResidentThreads = 640;
#endif

template <class T, class X, class Path>
__global__ void __launch_bounds__(Path::kIsGeneral ? kMaxBlockThreads : kResidentThreads, Path::kIsGeneral)
    forward_slices(const ForwardParams p, const SlicesPlan plan) {
  using RowsOf = Rows<T, X, Path>;
  constexpr int kElements = RowsOf::kElements;
  const Flags flags = flags_of<Path>(plan.flags);
  // The shuffle tells the compiler that the lanes of a warp have the same row.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const bool is_warp = Path::kIsGeneral && plan.is_warp, has_parts = flags.has(kHasParts);
  const int64_t begin = int64_t{plan.part_cols} * blockIdx.x;
  const int part_cols = static_cast<int>(min(p.cols - begin, int64_t{plan.part_cols}));
  const typename RowsOf::SliceOf slice(is_warp ? 0 : warp, is_warp ? plan.row_threads : kWarpSize, plan.deals_vectors);
  extern __shared__ __align__(16) unsigned char shared[];
  const RowsOf rows{p, plan, flags, slice, begin, part_cols, shared + warp * plan.stages * plan.stage_bytes};

  const int64_t block_rows = int64_t{plan.rounds} * plan.rows_per_round, first = blockIdx.y * block_rows;
  const int64_t end = min(first + block_rows, p.samples * p.rows);
  int64_t fetched = first + (is_warp ? warp * (kWarpSize / plan.row_threads) + slice.row : 0);
  const auto fetch_next = [&](int stage) {
    rows.fetch(fetched, fetched < end, stage);
    fetched += plan.rows_per_round;
    async_commit();
  };
  const int ring_end = plan.stages * plan.stage_bytes;
#pragma unroll 1
  for (int stage = 0; stage < ring_end; stage += plan.stage_bytes) fetch_next(stage);
  __shared__ PartExchange::Memory exchange_memory;
  const PartExchange exchange(exchange_memory, plan.workspace, plan.num_parts, flags);
  if (flags.has(kInCluster)) {
    PartExchange::start(exchange_memory);
    __syncthreads();
  }

  // The first warp merges the moments of a row's parts for the block. Two buffers take turns: a warp reads one of them
  // after the barrier of a row, and before that of the next row.
  __shared__ Normalizer merged[2];
  const auto merge = [&](int round, int stage) {
    if (warp != 0) return;
    const Moments moments =
        merge_parts(exchange.receive(round), plan.num_parts, plan.part.value, plan.last_part.value, plan.cols);
    const Normalizer normalizer(moments, plan);
    if (slice.lane_in_warp > 0) return;
    merged[round % 2] = normalizer;
    if (blockIdx.x == 0 && rows.exists(stage)) normalizer.store_statistics(p, plan, rows.find_row(stage));
  };

  const Divisor<Acc> part_divisor = static_cast<int>(blockIdx.x) + 1 == plan.num_parts ? plan.last_part : plan.part;
  Acc weight[kElements], bias[kElements];
  int64_t sample = -1;  // of the parameters
  const int lag = Path::kIsGated ? 0 : plan.lag;
  int buffer = 0, stage = 0;
#pragma unroll 1
  for (int round = 0; round < plan.rounds + lag; ++round) {
    // A round sums the row in `stage` and finishes the one in `last_stage`, except at the beginning and the end.
    wait_for_stage<kMaxStages>(plan.stages - lag);
    const int last_stage = lag == 0 || round == 0 ? stage : (stage == 0 ? ring_end : stage) - plan.stage_bytes;
    const bool sums = round < plan.rounds, finishes = round >= lag && !flags.has(kStoresSums);
    Acc values[kElements];
    Moments moments = {};
    if (sums) {
      moments = rows.sum_round(values, stage, part_divisor, buffer, [&] {
        if (lag > 0 && round > 0) merge(round - 1, last_stage);
      });
      if (has_parts) {
        PartValue packed;
        pack(packed, moments);
        exchange.send(packed, round);
      }
    }
    if (finishes) {
      if (const int64_t next_sample = rows.find_row(last_stage).sample; next_sample != sample) {
        sample = next_sample;
        slice.template load_parameter<T>(weight, p.weight, {sample, 0}, begin, part_cols, flags, kWeight, 1);
        slice.template load_parameter<T>(bias, p.bias, {sample, 0}, begin, part_cols, flags, kBias, 0);
      }
      if (has_parts) {
        if (lag == 0 || !sums) {
          merge(round - lag, last_stage);
          __syncthreads();
        }
        rows.finish_round(merged[(round - lag) % 2], values, weight, bias, last_stage);
      } else {
        const Normalizer normalizer(moments, plan);
        if (slice.lane == 0 && (is_warp || warp == 0) && rows.exists(last_stage)) {
          normalizer.store_statistics(p, plan, rows.find_row(last_stage));
        }
        rows.finish_round(normalizer, values, weight, bias, last_stage);
      }
    }
    if (round >= lag) {
      __syncwarp();
      fetch_next(last_stage);
    }
    stage = stage + plan.stage_bytes == ring_end ? 0 : stage + plan.stage_bytes;
  }
  async_wait<0>();  // before the block returns
}

// ---- host code ------------------------------------------------------------------------------------------------------

// The launch of a call.
struct Choice {
  void (*kernel)(ForwardParams, SlicesPlan);
  LaunchConfig config;
  SlicesPlan plan;
};

// Completes the plan with what depends on the path: stages as they fit into shared memory, and the rows of a block.
template <class T, class X, class Path>
Choice choose_stages(const ForwardParams& p, SlicesPlan plan) {
  const auto kernel = forward_slices<T, X, Path>;
  LaunchConfig config;
  config.stream = static_cast<Stream>(p.stream);
  config.cluster = plan.flags.has(kInCluster) ? static_cast<unsigned>(plan.num_parts) : 1;
  config.block = static_cast<unsigned>(plan.is_warp ? kThreadsOfShortRows : plan.row_threads);
  plan.rows_per_round = static_cast<int>(config.block.x) / plan.row_threads;
  plan.stage_bytes = Rows<T, X, Path>::stage_bytes(plan.is_warp ? kWarpSize / plan.row_threads : 1, plan.flags);
  constexpr size_t kMaxStaticShared = 1536;
  plan.stages = kMaxStages + 1;
  do {
    config.shared_bytes = static_cast<size_t>(config.block.x) / kWarpSize * --plan.stages * plan.stage_bytes;
  } while (plan.stages > 1 && config.shared_bytes + kMaxStaticShared > max_shared_memory(config));
  plan.lag = config.cluster > 1 && plan.stages == kMaxStages && !Path::kIsGated ? 1 : 0;

  const int64_t resident = std::max(resident_blocks(config, kernel) / plan.num_parts, 1);
  const int64_t rounds = ceil_div(p.samples * p.rows, plan.rows_per_round);
  plan.rounds = static_cast<int>(ceil_div(rounds, std::min({rounds, resident, kMaxGridY})));
  config.grid = dim3(static_cast<unsigned>(plan.num_parts), static_cast<unsigned>(ceil_div(rounds, plan.rounds)));
  return {kernel, config, plan};
}

// Chooses the instance of the kernel, and its plan.
template <class T, class X>
Choice choose(const ForwardParams& p) {
  SlicesPlan plan = {};
  const bool has_addresses = plan.set<T, X>(p);
  plan.divide<X>(p.cols, kPreferredWarps);
  plan.part = Divisor<Acc>(plan.part_cols);
  plan.last_part = Divisor<Acc>(p.cols - int64_t{plan.part_cols} * (plan.num_parts - 1));
  plan.flags.set(kInCluster, plan.num_parts > 1 && plan.num_parts <= kMaxClusterSize &&
                                 has_clusters(LaunchConfig(), forward_slices<T, X, GeneralRows>));
  if constexpr (std::is_same_v<T, X>) {
    if (plan.flags.has(kGatedNorm)) return choose_stages<T, X, GatedRows>(p, plan);
    const bool one_launch = plan.num_parts == 1 || plan.flags.has(kInCluster);
    if (has_addresses && !plan.is_warp && !plan.flags.has(kInputScale) && one_launch) {
      return plan.deals_vectors ? choose_stages<T, X, BlockVectors>(p, plan)
                                : choose_stages<T, X, BlockElements>(p, plan);
    }
  }
  return choose_stages<T, X, GeneralRows>(p, plan);
}

}  // namespace

void forward_slices(const ForwardParams& p) {
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using Types = decltype(types);
    auto [kernel, config, plan] = choose<typename Types::T, typename Types::X>(p);
    if (plan.num_parts > static_cast<int>(config.cluster)) {
      plan.workspace = p.allocator->allocate(PartExchange::workspace_bytes(config.grid, plan.rounds));
    }
    launch_parts(config, kernel, p, plan);
  });
}

}  // namespace layernorm::cuda
