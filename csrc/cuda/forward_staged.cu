// Forward for the rows that forward_registers.cu does not take: long rows, rows that are not whole vectors (16 bytes),
// and gated norms. forward.cu has the formulas and tells which threads share a row.
//
//   fetch(): global memory -> stage -> compute_moments(): x, moments -> [exchange, merge()] -> store_output(): y
//
// Blocks are persistent: a block takes its rows in a loop, rows_per_iteration of them in each iteration. This number is
// one, or the number of groups of lanes that share a row. The block with blockIdx.x = b has the columns [b *
// block_cols, (b + 1) * block_cols) of its rows. A thread owns the same 16 of these columns in all iterations
// (thread_columns.cuh), and keeps their weights and biases in registers. Each warp has a ring of up to three stages in
// shared memory: the kernel reads one twice, while asynchronous copies (cp.async) fill the others with the rows of the
// next iterations. The kernel moves 2 * samples * rows * cols * sizeof(T) bytes of input and output; with a residual
// also the bytes of the residual and the sum, which overwrites the residual in the stage. The input_scale is read from
// the caches for each row.
//
// A block has one barrier per row, and a cluster also one exchange of moments. A cluster stores the output of a row one
// iteration after it has summed the row (`lag`), so that it need not wait for the exchange: it sums the next row in the
// meantime. The first warp of a block merges the moments of the previous row before the barrier that the sums of the
// next row need anyway.
//
// The gate of a gated norm is staged in the place that the input has beside a residual: 3 * samples * rows * cols *
// sizeof(T) bytes are moved. The input of the norm (norm_input), which is the input of the call or its product with the
// activated gate, stays in registers between the sums and the output.
//
// Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
#include "../dtypes.h"
#include "block_exchange.cuh"
#include "moments.cuh"

namespace layernorm::cuda {

// The values that the host computes from ForwardParams for forward_staged.
struct StagedPlan : ForwardPlan, RowDivision {
  int stages, stage_bytes;                                        // per warp
  int rows_per_iteration, iterations;                             // per block
  int lag;                                                        // iterations from a row's sums to its output: 0 or 1
  void* workspace;                                                // of BlockExchange
  FloatDivisor<Acc> block_cols_divisor, last_block_cols_divisor;  // by the columns of a block, and of a row's last one
};

namespace {

constexpr int kMaxStages = 3;  // with a lag: one whose row is summed, one whose output is stored, one that is filled

// The most warps of a block in a cluster, unless 8 such blocks are too few for a row. A multiprocessor runs three
// blocks of 8 warps in code for 9.0, or two in other code, so that one block works while another waits at a barrier. It
// runs only one block of 16 warps.
constexpr int64_t kPreferredWarps = 8;

// A stage holds this beside the elements of a row: the addresses of its results, and copies of the first vector of the
// block's columns, from which every warp estimates the mean. Copies have 32 bytes, because a vector that is not aligned
// touches two aligned groups of 16 bytes (granules).
template <class T, class X>
struct alignas(16) ForwardRowHeader {
  unsigned char x[32], input_or_gate[32];
  int64_t row_number;  // among all samples * rows; -1 if the row does not exist
  T* output;
  X* sum;
  short x_misalignment, input_or_gate_misalignment;  // see ThreadColumns::misalignment()
};

// ---- rows in shared memory ------------------------------------------------------------------------------------------

// A thread's work on its columns of the staged rows. `stage_offset` is the offset in bytes of a stage in the warp's
// ring. A stage has
//
//   [ headers of the warp's rows | x | with a residual the input, or the gate ]
//
// x, of type X, is the input or, with a residual, first the residual and then the sum. Other arrays are of T.
template <class T, class X, class Variant>
struct ForwardStagedRows {
  using Columns = ThreadColumns<X, Variant::kMapping, Variant::kLanes>;
  using Header = ForwardRowHeader<T, X>;
  static constexpr int kElements = Columns::kElements, kVec = Columns::kVec;
  static constexpr int kStep = Variant::kIsGeneral ? std::min(kVec, 4) : kVec;  // elements of one step of a loop

  const ForwardParams& p;
  const StagedPlan& plan;
  const Flags flags;
  const Columns columns;
  const int64_t block_begin;    // the block's first column of a row
  const int block_cols;         // the block's columns; fewer in the last block of a row
  unsigned char* const shared;  // the warp's ring

  // The bytes of a stage before x, and of a whole stage, for a warp that has `rows` rows.
  __host__ __device__ static int x_begin(int rows) { return rows * static_cast<int>(sizeof(Header)); }
  __host__ static int stage_bytes(int rows, Flags flags) {
    const bool has_input_or_gate = flags.has(kResidual | kGatedNorm);
    return x_begin(rows) + Columns::template staged_bytes<X>(rows) +
           (has_input_or_gate ? Columns::template staged_bytes<T>(rows) : 0);
  }
  __device__ __forceinline__ int rows_per_warp() const {
    return Variant::kRowSpansWarps ? 1 : kWarpSize / columns.row_lanes();
  }
  // The parts of a stage: the header of this thread's row, and two arrays with the elements of all rows of the warp.
  __device__ __forceinline__ Header& header(int stage_offset) const {
    return reinterpret_cast<Header*>(shared + stage_offset)[Variant::kRowSpansWarps ? 0 : columns.row_in_warp];
  }
  __device__ __forceinline__ unsigned char* x_at(int stage_offset) const {
    return shared + stage_offset + x_begin(rows_per_warp());
  }
  __device__ __forceinline__ unsigned char* input_or_gate_at(int stage_offset) const {
    return x_at(stage_offset) + Columns::template staged_bytes<X>(rows_per_warp());
  }

  // Starts to copy the warp's columns of a row to a stage, or zeros if the row does not exist, and writes the header of
  // the row. `row_number` counts the rows of all samples.
  __device__ __forceinline__ void fetch(int64_t row_number, bool exists, int stage_offset) const {
    const int cols = exists ? block_cols : 0;
    using Index = typename Variant::Index;
    const Index row = exists ? static_cast<Index>(row_number) : 0;
    const bool several_samples = flags.has(kSeveralSamples);
    with_row_addresses<Variant::kIsGeneral>(row, several_samples, plan.rows_per_sample, [&](const auto& address_in) {
      Header& to = header(stage_offset);
      const X* const x = address_in(flags.has(kResidual) ? p.residual : p.input, X(), plan.x_stride) + block_begin;
      columns.fetch(x_at(stage_offset), x, cols);
      fetch_first_vector(to.x, x, cols);
      const T* const input_or_gate =
          address_in(Variant::kIsGated ? p.gate : p.input, T(), plan.input_stride) + block_begin;
      if (Variant::kIsGated || flags.has(kResidual)) {
        columns.fetch(input_or_gate_at(stage_offset), input_or_gate, cols);
        fetch_first_vector(to.input_or_gate, input_or_gate, cols);
      }
      if (columns.lane_in_row > 0) return;
      to.row_number = exists ? row_number : -1;
      to.output = address_in(p.output, T(), plan.output_stride) + block_begin;
      to.sum = address_in(p.sum, X(), plan.sum_stride) + block_begin;
      to.x_misalignment = static_cast<short>(columns.misalignment(x));
      to.input_or_gate_misalignment = static_cast<short>(columns.misalignment(input_or_gate));
    });
  }
  // Starts to copy the first vector of the block's columns of an array to a member of the header: two lanes copy 16
  // bytes each. `array` points to the block's first column.
  template <class E>
  __device__ __forceinline__ void fetch_first_vector(unsigned char* to, const E* array, int cols) const {
    if (columns.lane_in_row > 1) return;
    const int offset = columns.misalignment(array), granule = columns.lane_in_row * 16;
    const int end = cols > 0 ? offset + min(cols, kVec) * static_cast<int>(sizeof(E)) : 0;
    async_copy<16>(to + granule, reinterpret_cast<const unsigned char*>(array) - offset + granule,
                   min(max(end - granule, 0), 16), granule == 0 ? offset : 0);
  }

  // The addresses of this thread's element 0 in x and in the second array of a stage.
  __device__ __forceinline__ X* staged_x(int stage_offset) const {
    return columns.template staged_elements<X>(x_at(stage_offset), header(stage_offset).x_misalignment);
  }
  __device__ __forceinline__ T* staged_input_or_gate(const Columns& columns, int stage_offset) const {
    return columns.template staged_elements<T>(input_or_gate_at(stage_offset),
                                               header(stage_offset).input_or_gate_misalignment);
  }
  // The input_scale of one of the block's columns; zero after the end.
  __device__ __forceinline__ Acc load_input_scale(int64_t sample, int column) const {
    return column < block_cols ? load_weight_element<T>(p.input_scale, sample, block_begin + column, flags) : 0;
  }
  __device__ __forceinline__ bool row_exists(int stage_offset) const { return header(stage_offset).row_number >= 0; }
  // The index of the staged row. A row that does not exist has the index of row 0, and its results are not stored.
  __device__ __forceinline__ RowIndex row_index(int stage_offset) const {
    return split_row_number(max(header(stage_offset).row_number, int64_t{0}), flags.has(kSeveralSamples),
                            plan.rows_per_sample);
  }
  // Replaces the staged residual by the sum x: residual + input, or residual + input_scale * input.
  __device__ __forceinline__ void add_input_to_residual(int stage_offset) const {
    const auto columns = this->columns.recomputed();
    X* const x = staged_x(stage_offset);
    const T* const input = staged_input_or_gate(columns, stage_offset);
#pragma unroll
    for (int j = 0; j < kElements; j += kStep) {
      Acc a[kStep], b[kStep];
      columns.read_shared(a, x, j);
      columns.read_shared(b, input, j);
      if (flags.has(kInputScale)) {
        const int64_t sample = row_index(stage_offset).sample;
        for (int e = 0; e < kStep; ++e) a[e] = fma(load_input_scale(sample, columns.column(j + e)), b[e], a[e]);
      } else {
        for (int e = 0; e < kStep; ++e) a[e] += b[e];
      }
      columns.write_shared(x, j, round_to<X>(a));
    }
  }
  // Reads the values that a gated norm normalizes: the input, or with gate_first input * f(gate), not rounded to T.
  __device__ __forceinline__ void read_norm_input(Acc (&v)[kElements], int stage_offset) const {
    const auto columns = this->columns.recomputed();
    const X* const x = staged_x(stage_offset);
#pragma unroll
    for (int j = 0; j < kElements; j += kStep) {
      Acc a[kStep];
      columns.read_shared(a, x, j);
      if (flags.has(kGateFirst)) apply_gate(a, columns, stage_offset, j);
      for (int e = 0; e < kStep; ++e) v[j + e] = a[e];
    }
  }
  // Multiplies elements [j, j + kStep) by the activated gate.
  __device__ __forceinline__ void apply_gate(Acc (&v)[kStep], const Columns& columns, int stage_offset, int j) const {
    Acc gate[kStep];
    columns.read_shared(gate, staged_input_or_gate(columns, stage_offset), j);
    for (int e = 0; e < kStep; ++e) v[e] *= Activated(gate[e], flags).value;
  }
  // Estimates the mean of a row by the average of the block's first vector. Elements after the end are zeros.
  __device__ __forceinline__ Acc estimate_mean(int stage_offset) const {
    const Header& from = header(stage_offset);
    Acc v[kVec];
    read_first_vector<X>(v, from.x, from.x_misalignment);
    if (Variant::kIsGated && flags.has(kGateFirst)) {
      Acc gate[kVec];
      read_first_vector<T>(gate, from.input_or_gate, from.input_or_gate_misalignment);
      for (int e = 0; e < kVec; ++e) v[e] *= Activated(gate[e], flags).value;
    }
    if (flags.has(kResidual)) {
      Acc input[kVec];
      read_first_vector<T>(input, from.input_or_gate, from.input_or_gate_misalignment);
      if (flags.has(kInputScale)) {
        const int64_t sample = row_index(stage_offset).sample;
        for (int e = 0; e < kVec; ++e) input[e] *= load_input_scale(sample, e);
      }
      for (int e = 0; e < kVec; ++e) v[e] = static_cast<Acc>(static_cast<X>(v[e] + input[e]));
    }
    const bool is_whole_vector = Variant::kMapping == Mapping::kVectors || block_cols >= kVec;
    return is_whole_vector ? average(v) : average(v) * (Acc(kVec) / static_cast<Acc>(block_cols));
  }
  // Reads a vector that fetch_first_vector() has copied.
  template <class E>
  __device__ __forceinline__ static void read_first_vector(Acc (&v)[kVec], const unsigned char* from,
                                                           int misalignment) {
    if constexpr (Variant::kMapping == Mapping::kVectors) {
      widen(v, *reinterpret_cast<const Vector<E, kVec>*>(from));
    } else {
      for (int e = 0; e < kVec; ++e) v[e] = static_cast<Acc>(reinterpret_cast<const E*>(from + misalignment)[e]);
    }
  }

  // Adds the input to a staged residual, and returns the moments of the block's columns. A second launch gets zeros,
  // because it loads the moments that the first launch has stored. Gated norms set norm_input to the values that they
  // normalize; other norms do not use it. The two buffers for sums alternate, so that one barrier per sum suffices;
  // before_barrier() is other work that precedes the barrier (sum_over_row() in moments.cuh).
  template <class F>
  __device__ __forceinline__ Moments compute_moments(Acc (&norm_input)[kElements], int stage_offset,
                                                     const FloatDivisor<Acc>& block_cols_divisor, int& buffer,
                                                     const F& before_barrier) const {
    if (flags.has(kResidual)) add_input_to_residual(stage_offset);
    if constexpr (Variant::kIsGated) read_norm_input(norm_input, stage_offset);
    Moments moments[1] = {};
    if (flags.has(kSecondLaunch)) return moments[0];
    const bool rms = flags.has(kRms);
    const Acc centers[1] = {rms ? 0 : estimate_mean(stage_offset)};
    const X* const x = staged_x(stage_offset);
    reduce_moments(
        moments, centers, plan.row_threads, block_cols_divisor, rms, buffer,
        [&](Acc(&sums)[2]) { sum_moments(sums, x, norm_input, moments[0]); }, before_barrier);
    return moments[0];
  }
  // Sets `sums` to the thread's sums of d = x * row_scale - center and of d^2.
  __device__ __forceinline__ void sum_moments(Acc (&sums)[2], const X* x, const Acc (&norm_input)[kElements],
                                              const Moments& moments) const {
    const auto columns = this->columns.recomputed();
    MomentSums thread_sums;
    const auto add = [&](auto has_end) {  // has_end: whether some of the warp's columns are after the block's last one
#pragma unroll
      for (int j = 0; j < kElements; j += kStep) {
        Acc v[kStep];
        read(v, columns, x, norm_input, j);
        for (int e = 0; e < kStep; ++e) {
          // Elements after the end are zeros, and stay zeros without the center. No vector spans the end.
          const int column = columns.column(Variant::kMapping == Mapping::kVectors ? j : j + e);
          const bool exists = !has_end.value || column < block_cols;
          thread_sums.add(e, fma(v[e], moments.row_scale, exists ? -moments.center : 0));
        }
      }
    };
    if (columns.warp_begin + columns.row_lanes() * kElements <= block_cols) {
      add(std::false_type());
    } else {
      add(std::true_type());
    }
    thread_sums.store(sums);
  }
  // Stores this thread's columns of the output and, with a residual, of the sum, unless the row does not exist.
  __device__ __forceinline__ void store_output(const Normalizer& normalizer, const Acc (&norm_input)[kElements],
                                               const Acc (&weight)[kElements], const Acc (&bias)[kElements],
                                               int stage_offset) const {
    const auto columns = this->columns.recomputed();
    const int cols = row_exists(stage_offset) ? block_cols : 0;
    const X* const x = staged_x(stage_offset);
    T* const output = keep_in_register(header(stage_offset).output);
    X* const sum = keep_in_register(header(stage_offset).sum);
#pragma unroll
    for (int j = 0; j < kElements; j += kStep) {
      Acc v[kStep];
      read(v, columns, x, norm_input, j);
      // The sum may overwrite the residual in global memory. All warps of the block have read the residual's first
      // vector, because there has been a barrier since they estimated the mean.
      if (flags.has(kResidual)) columns.store_global(sum, j, v, cols);
      for (int e = 0; e < kStep; ++e) v[e] = fma(normalizer.xhat(v[e]), weight[j + e], bias[j + e]);
      if (Variant::kIsGated && !flags.has(kGateFirst)) apply_gate(v, columns, stage_offset, j);
      columns.store_global(output, j, v, cols);
    }
  }
  // Reads elements [j, j + kStep) of the normalized array: x, or norm_input of a gated norm.
  __device__ __forceinline__ static void read(Acc (&v)[kStep], const Columns& columns, const X* x,
                                              const Acc (&norm_input)[kElements], int j) {
    if constexpr (Variant::kIsGated) {
      for (int e = 0; e < kStep; ++e) v[e] = norm_input[j + e];
    } else {
      columns.read_shared(v, x, j);
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// The block size that __launch_bounds__ promises for BlockVectors and BlockElements. Their blocks are smaller; the
// number limits the registers of a thread to 80 in code for 9.0, 96 for 8.0, and 128 for 10.0 and later, where fewer
// would spill. So many threads of smaller blocks are then resident on a multiprocessor. GeneralRows and GatedRows
// promise the largest block, and ask for at least one resident block; other variants ask for none (0).
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 1000
constexpr int kResidentThreads = 512;
#elif __CUDA_ARCH__ >= 900
constexpr int kResidentThreads = 768;
#else
constexpr int kResidentThreads = 640;
#endif

template <class T, class X, class Variant>
__global__ void __launch_bounds__(Variant::kIsGeneral ? kMaxBlockThreads : kResidentThreads, Variant::kIsGeneral)
    forward_staged(const ForwardParams p, const StagedPlan plan) {
  using StagedRows = ForwardStagedRows<T, X, Variant>;
  constexpr int kElements = StagedRows::kElements;
  const Flags flags = supported_flags<Variant>(plan.flags);
  // The shuffle tells the compiler that all lanes of a warp have the same value.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const bool row_fits_warp = Variant::kIsGeneral && plan.row_fits_warp, shares_row = flags.has(kBlocksShareRow);
  const int64_t block_begin = int64_t{plan.block_cols} * blockIdx.x;
  const int block_cols = static_cast<int>(min(p.cols - block_begin, int64_t{plan.block_cols}));
  const typename StagedRows::Columns columns(row_fits_warp ? 0 : warp, row_fits_warp ? plan.row_threads : kWarpSize,
                                             plan.whole_vectors);
  extern __shared__ __align__(16) unsigned char shared[];
  const StagedRows rows{
      p, plan, flags, columns, block_begin, block_cols, shared + warp * plan.stages * plan.stage_bytes};

  // The block's rows are [first_row, end_row). Copies run ahead by as many rows as there are stages.
  const int64_t rows_per_block = int64_t{plan.iterations} * plan.rows_per_iteration;
  const int64_t first_row = blockIdx.y * rows_per_block;
  const int64_t end_row = min(first_row + rows_per_block, p.samples * p.rows);
  int64_t fetched_row = first_row + (row_fits_warp ? warp * (kWarpSize / plan.row_threads) + columns.row_in_warp : 0);
  const auto fetch_next = [&](int stage_offset) {
    rows.fetch(fetched_row, fetched_row < end_row, stage_offset);
    fetched_row += plan.rows_per_iteration;
    async_commit();
  };
  const int ring_end = plan.stages * plan.stage_bytes;
#pragma unroll 1
  for (int stage_offset = 0; stage_offset < ring_end; stage_offset += plan.stage_bytes) fetch_next(stage_offset);
  __shared__ BlockExchange::Memory exchange_memory;
  const BlockExchange exchange(exchange_memory, plan.workspace, plan.row_blocks, flags);
  if (flags.has(kClusterSharesRow)) {
    BlockExchange::start(exchange_memory);
    __syncthreads();
  }

  // The first warp of each block merges the moments of the row's blocks. Two buffers take turns: between two barriers,
  // all warps read one of them, while the first warp may write the other one for the next row.
  __shared__ Normalizer merged_normalizers[2];
  const auto merge = [&](int iteration, int stage_offset) {
    if (warp != 0) return;
    const Moments moments = merge_blocks(exchange.receive(iteration), plan.row_blocks, plan.block_cols_divisor.value,
                                         plan.last_block_cols_divisor.value, plan.cols);
    const Normalizer normalizer(moments, plan);
    if (columns.lane_in_warp > 0) return;
    merged_normalizers[iteration % 2] = normalizer;
    if (blockIdx.x == 0 && rows.row_exists(stage_offset))
      normalizer.store_statistics(p, plan, rows.row_index(stage_offset));
  };

  const FloatDivisor<Acc> block_cols_divisor =
      static_cast<int>(blockIdx.x) + 1 == plan.row_blocks ? plan.last_block_cols_divisor : plan.block_cols_divisor;
  Acc weight[kElements], bias[kElements];
  int64_t sample = -1;  // of weight and bias
  const int lag = Variant::kIsGated ? 0 : plan.lag;
  int buffer = 0, stage_offset = 0;
#pragma unroll 1
  for (int iteration = 0; iteration < plan.iterations + lag; ++iteration) {
    // An iteration sums the row at stage_offset and stores the output of the row at finished_offset. Both are the same
    // row or, with a lag, the second is the row of the iteration before: then the first iteration stores nothing, and
    // one more iteration at the end sums nothing.
    wait_for_stage<kMaxStages>(plan.stages - lag);
    const int finished_offset =
        lag == 0 || iteration == 0 ? stage_offset : (stage_offset == 0 ? ring_end : stage_offset) - plan.stage_bytes;
    const bool sums_row = iteration < plan.iterations, stores_row = iteration >= lag && !flags.has(kFirstLaunch);
    Acc norm_input[kElements];
    Moments moments = {};
    if (sums_row) {
      moments = rows.compute_moments(norm_input, stage_offset, block_cols_divisor, buffer, [&] {
        if (lag > 0 && iteration > 0) merge(iteration - 1, finished_offset);
      });
      if (shares_row) {
        PartialResult encoded;
        encode(encoded, moments);
        exchange.send(encoded, iteration);
      }
    }
    if (stores_row) {
      if (const int64_t next_sample = rows.row_index(finished_offset).sample; next_sample != sample) {
        sample = next_sample;
        columns.template load_parameter<T>(weight, kWeight, p.weight, sample, block_begin, block_cols, flags);
        columns.template load_parameter<T>(bias, kBias, p.bias, sample, block_begin, block_cols, flags);
      }
      if (shares_row) {
        if (lag == 0 || !sums_row) {  // compute_moments() has not called merge()
          merge(iteration - lag, finished_offset);
          __syncthreads();
        }
        rows.store_output(merged_normalizers[(iteration - lag) % 2], norm_input, weight, bias, finished_offset);
      } else {
        const Normalizer normalizer(moments, plan);
        if (columns.lane_in_row == 0 && (row_fits_warp || warp == 0) && rows.row_exists(finished_offset)) {
          normalizer.store_statistics(p, plan, rows.row_index(finished_offset));
        }
        rows.store_output(normalizer, norm_input, weight, bias, finished_offset);
      }
    }
    if (iteration >= lag) {
      __syncwarp();  // all lanes have read the stage
      fetch_next(finished_offset);
    }
    stage_offset = stage_offset + plan.stage_bytes == ring_end ? 0 : stage_offset + plan.stage_bytes;
  }
  async_wait<0>();  // before the block returns
}

// ---- host code ------------------------------------------------------------------------------------------------------

struct Launch {
  void (*kernel)(ForwardParams, StagedPlan);
  LaunchConfig config;
  StagedPlan plan;
};

// Plans the launch of a variant: as many stages as fit into shared memory, up to kMaxStages, and at most as many blocks
// as the GPU can run at once.
template <class T, class X, class Variant>
Launch plan_stages(const ForwardParams& p, StagedPlan plan) {
  const auto kernel = forward_staged<T, X, Variant>;
  LaunchConfig config;
  config.stream = static_cast<Stream>(p.stream);
  config.cluster = plan.flags.has(kClusterSharesRow) ? static_cast<unsigned>(plan.row_blocks) : 1;
  config.block = static_cast<unsigned>(plan.row_fits_warp ? kThreadsOfShortRows : plan.row_threads);
  plan.rows_per_iteration = static_cast<int>(config.block.x) / plan.row_threads;
  plan.stage_bytes =
      ForwardStagedRows<T, X, Variant>::stage_bytes(plan.row_fits_warp ? kWarpSize / plan.row_threads : 1, plan.flags);
  constexpr size_t kMaxStaticShared = 1536;  // of forward_staged
  static_assert(sizeof(BlockExchange::Memory) + sizeof(Normalizer[2]) + sizeof(WarpSumsOfRow<2>) <= kMaxStaticShared);
  const size_t bytes_per_stage = config.block.x / kWarpSize * static_cast<size_t>(plan.stage_bytes);
  const size_t max_stages = (max_shared_memory(config) - kMaxStaticShared) / bytes_per_stage;
  plan.stages = static_cast<int>(std::clamp<size_t>(max_stages, 1, kMaxStages));
  config.shared_bytes = plan.stages * bytes_per_stage;
  plan.lag = config.cluster > 1 && plan.stages == kMaxStages && !Variant::kIsGated ? 1 : 0;

  const int64_t resident = std::max(resident_blocks(config, kernel) / plan.row_blocks, 1);
  const int64_t iterations = ceil_div(p.samples * p.rows, plan.rows_per_iteration);
  plan.iterations = static_cast<int>(ceil_div(iterations, std::min({iterations, resident, kMaxGridY})));
  config.grid =
      dim3(static_cast<unsigned>(plan.row_blocks), static_cast<unsigned>(ceil_div(iterations, plan.iterations)));
  return {kernel, config, plan};
}

// Chooses the kernel's variant, and plans its launch. GeneralRows takes the calls that no other variant supports: rows
// that fit a warp, rows of two launches, a float32 residual beside 16-bit input, an input_scale, and large strides.
template <class T, class X>
Launch plan_launch(const ForwardParams& p) {
  StagedPlan plan = {};
  const bool byte_strides_fit = plan.initialize<T, X>(p);
  plan.divide<X>(p.cols, kPreferredWarps);
  plan.block_cols_divisor = FloatDivisor<Acc>(plan.block_cols);
  plan.last_block_cols_divisor = FloatDivisor<Acc>(p.cols - int64_t{plan.block_cols} * (plan.row_blocks - 1));
  plan.flags.set(kClusterSharesRow, plan.row_blocks > 1 && plan.row_blocks <= kMaxClusterSize &&
                                        has_clusters(LaunchConfig(), forward_staged<T, X, GeneralRows>));
  if constexpr (std::is_same_v<T, X>) {
    if (plan.flags.has(kGatedNorm)) return plan_stages<T, X, GatedRows>(p, plan);
    const bool one_launch = plan.row_blocks == 1 || plan.flags.has(kClusterSharesRow);
    if (byte_strides_fit && !plan.row_fits_warp && !plan.flags.has(kInputScale) && one_launch) {
      return plan.whole_vectors ? plan_stages<T, X, BlockVectors>(p, plan) : plan_stages<T, X, BlockElements>(p, plan);
    }
  }
  return plan_stages<T, X, GeneralRows>(p, plan);
}

}  // namespace

void forward_staged(const ForwardParams& p) {
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using Types = decltype(types);
    auto [kernel, config, plan] = plan_launch<typename Types::T, typename Types::X>(p);
    if (plan.row_blocks > static_cast<int>(config.cluster)) {
      plan.workspace = p.allocator->allocate(BlockExchange::workspace_bytes(config.grid, plan.iterations));
    }
    launch_once_or_twice(config, kernel, p, plan);
  });
}

}  // namespace layernorm::cuda
