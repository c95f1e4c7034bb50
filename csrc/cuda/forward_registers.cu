// Forward for rows of whole vectors (16 bytes) that fit into registers; forward.cu has the formulas.
//
// A row belongs to a group of row_threads threads: 1 to 32 lanes of a warp, or the whole block, whose warps then need
// a barrier. Each group has kRows rows, so a block of G groups has kRows * G rows:
//
//   group g of block b     rows (b * kRows + r) * G + g, for r < kRows
//   thread t of a group    kVectors vectors of each of these rows, t, t + row_threads, t + 2 * row_threads, ..., in
//                          registers, and the same vectors of weight and bias
//
//   bfloat16 columns   vectors   kVectors x kRows   row_threads   groups per block
//   64                 8         2 x 4              4             32
//   768                96        4 x 2              32            4
//   8192               1024      8 x 1              128           1
//
// A thread requests all of its vectors of x at once, and prefetches weight and bias at the same time, so that it waits
// for memory once. Loads of x bypass the L1 cache, which keeps weight and bias. The kernel moves 2 * samples * rows *
// cols * sizeof(T) bytes of input and output; with a residual also the bytes of the residual and the sum.
#include "../dtypes.h"
#include "moments.cuh"

namespace layernorm::cuda {

// The values that the host computes from ForwardParams for forward_registers.
struct RegistersPlan : ForwardPlan {
  unsigned vectors;  // per row
  int row_threads, log2_row_threads;
  // For each array, the bytes from the end of a sample, where one more row of it would start, to the next sample.
  int64_t x_gap, input_gap, output_gap, sum_gap;
};

namespace {

// The log2_row_threads of a row that spans the block. With a number n this large, threadIdx.x >> n is 0, the index of
// the only group, and threadIdx.x & ((1 << n) - 1) is threadIdx.x, the thread's index in the group.
constexpr int kLog2OfWholeBlock = 30;

// A thread's work: kVectors vectors of each of its kRows rows.
template <class T, class X, int kVectors, int kRows>
struct ThreadRows {
  static constexpr int kVec = kVectorSize<X>;
  template <class E>
  using Vec = Vector<E, kVec>;

  const ForwardParams& p;
  const RegistersPlan& plan;
  const unsigned row_threads, thread_in_row;

  __device__ __forceinline__ bool has(unsigned flag) const { return plan.flags.has(flag); }
  __device__ __forceinline__ bool row_spans_block() const {
    return kRows == 1 && plan.log2_row_threads == kLog2OfWholeBlock;
  }
  // Whether the thread's vector i is before the end of the row.
  __device__ __forceinline__ bool has_vector(int i) const { return i * row_threads + thread_in_row < plan.vectors; }
  // A copy for another phase of the kernel, from which the compiler computes has_vector() again: see recompute_from().
  __device__ __forceinline__ ThreadRows recomputed() const {
    return {p, plan, row_threads, kRows == 1 ? recompute_from(thread_in_row) : thread_in_row};
  }

  // The number of groups (see above) of a block, unless a row spans the block.
  __device__ __forceinline__ unsigned groups_per_block() const { return blockDim.x >> plan.log2_row_threads; }
  // The number of the thread's row r (r < kRows) among all samples * rows. In the last block, it may not exist.
  __device__ __forceinline__ unsigned row_number(int r) const {
    if (row_spans_block()) return blockIdx.x;
    return (recompute_from(blockIdx.x) * kRows + r) * groups_per_block() + (threadIdx.x >> plan.log2_row_threads);
  }
  __device__ __forceinline__ bool row_exists(unsigned row) const {
    return row < static_cast<unsigned>(p.samples) * static_cast<unsigned>(p.rows);
  }
  // Finds the samples of the thread's rows. Rows that do not exist get the sample of the last row.
  __device__ __forceinline__ void find_samples(unsigned (&samples)[kRows]) const {
    for (unsigned& sample : samples) sample = 0;
    if (!has(kSeveralSamples)) return;
    const unsigned first = row_number(0), last = static_cast<unsigned>(p.samples) * static_cast<unsigned>(p.rows) - 1;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      samples[r] = plan.rows_per_sample.divide_short(min(first + r * groups_per_block(), last));
  }
  // The address of row number `row` among all samples * rows, which is in sample `sample`: row * stride as if there
  // were one sample, plus the gap for each sample before. This needs no branch for several samples.
  template <class E>
  __device__ __forceinline__ E* address_of(const View& view, const ByteStride& stride, int64_t gap, unsigned row,
                                           unsigned sample) const {
    return reinterpret_cast<E*>(stride.address<char>(view, row) + sample * gap);
  }

  // Loads kCount vectors of a row from this thread's vector `begin` on. Vectors after the end of the row, or all if
  // `exists` is false, get the default value. kConstant is explained at load_vector_if().
  template <bool kConstant, class E, int kCount>
  __device__ __forceinline__ void load(Vec<E> (&v)[kCount], bool exists, const E* row, int begin,
                                       E default_value) const {
    const E* const from = row + thread_in_row * kVec;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      fill(v[i], default_value);
      load_vector_if<kConstant>(exists && has_vector(begin + i), v[i], from + (begin + i) * row_threads * kVec);
    }
  }
  // Stores the thread's vector i of a row, if both exist.
  template <class E>
  __device__ __forceinline__ void store(bool exists, E* row, const Vec<E>& v, int i) const {
    if (exists && has_vector(i)) *reinterpret_cast<Vec<E>*>(row + thread_in_row * kVec + i * row_threads * kVec) = v;
  }

  // Loads the thread's first kCount vectors of x of a row: input, residual + input, or residual + input_scale * input.
  // With a residual, `x` is first the residual, to which the input is added. `row` is the number among all samples *
  // rows.
  template <int kCount>
  __device__ __forceinline__ void load_x(Vec<X> (&x)[kCount], unsigned row, unsigned sample) const {
    const bool exists = row_exists(row);
    load<false>(x, exists,
                address_of<const X>(has(kResidual) ? p.residual : p.input, plan.x_stride, plan.x_gap, row, sample), 0,
                X(0.0f));
    if (!has(kResidual)) return;
    const T* const from = address_of<const T>(p.input, plan.input_stride, plan.input_gap, row, sample);
    constexpr int kInFlight = std::min(kCount, 2);  // vectors of the input for which there are registers beside x
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kInFlight) {
      Vec<T> input[kInFlight];
      load<false>(input, exists, from, begin, T(0.0f));
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        Acc a[kVec], b[kVec];
        widen(a, x[begin + i]);
        widen(b, input[i]);
        if (has(kInputScale)) {
          Acc input_scale[kVec];
          with_weight_type<T>(plan.flags, [&](auto element) {
            load_weight_vector<decltype(element)>(input_scale, p.input_scale, exists, sample, begin + i, 0);
          });
          for (int e = 0; e < kVec; ++e) a[e] = fma(input_scale[e], b[e], a[e]);
        } else {
          for (int e = 0; e < kVec; ++e) a[e] += b[e];
        }
        x[begin + i] = recompute_from(round_to<X>(a));
      }
    }
  }
  // Loads the thread's vector i of a sample's weight, bias or input_scale, whose elements have type W. If `exists` is
  // false, gives default values.
  template <class W>
  __device__ __forceinline__ void load_weight_vector(Acc (&v)[kVec], const View& view, bool exists, int64_t sample,
                                                     int i, float default_value) const {
    Vec<W> vector[1];
    load<true>(vector, exists, address<const W>(view, {sample, 0}), i, W(default_value));
    widen(v, vector[0]);
  }
  // Loads the thread's vector i of weight and bias. with_weight_type() is called for each vector, because its branch
  // keeps the compiler from loading the next vectors early, which would take registers.
  __device__ __forceinline__ void load_weight_and_bias(Acc (&weight)[kVec], Acc (&bias)[kVec], int64_t sample,
                                                       int i) const {
    with_weight_type<T>(plan.flags, [&](auto element) {
      using W = decltype(element);
      load_weight_vector<W>(weight, p.weight, has(kWeight), sample, i, 1);
      load_weight_vector<W>(bias, p.bias, has(kBias), sample, i, 0);
    });
    const Acc weight_offset = has(kZeroCentered) ? Acc(1) : -Acc(0);  // -0 changes no number
    for (int e = 0; e < kVec; ++e) weight[e] += weight_offset;
  }
  // Prefetches a sample's weight (kWeight) or bias (kBias): the threads of the row request different cache lines.
  __device__ __forceinline__ void prefetch_parameter(Flag parameter, const View& view, int64_t sample) const {
    if (!has(parameter)) return;
    with_weight_type<T>(plan.flags, [&](auto element) {
      const auto* const from = address<const decltype(element)>(view, {sample, 0});
      constexpr int kLine = 128 / sizeof(element);
      for (unsigned i = thread_in_row * kLine; i < plan.vectors * kVec; i += row_threads * kLine) prefetch(from + i);
    });
  }

  // Estimates the mean of a row by the average of its first vector. If the row spans the block, all threads have loaded
  // that vector. Otherwise only the row's first lane has loaded it, and broadcasts the average to the other lanes.
  __device__ __forceinline__ Acc estimate_mean(const Vec<X>& first_vector) const {
    Acc v[kVec];
    widen(v, first_vector);
    return row_spans_block() ? average(v) : __shfl_sync(kAllLanes, average(v), threadIdx.x % kWarpSize - thread_in_row);
  }

  // Sets sums[0] and sums[1] to the thread's sums of d = x * row_scale - center and d^2 in a row. Converting x to float
  // again in each phase takes fewer registers than keeping the floats.
  __device__ __forceinline__ void sum_moments(Acc* sums, Vec<X> (&x)[kVectors], const Moments& moments) const {
    MomentSums thread_sums;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      x[i] = recompute_from(x[i]);
      const Acc center = has_vector(i) ? moments.center : 0;  // zeros after the end stay zeros
      Acc v[kVec];
      widen(v, x[i]);
      for (int e = 0; e < kVec; ++e) thread_sums.add(e, fma(v[e], moments.row_scale, -center));
    }
    thread_sums.store(sums);
  }

  // Forward of the thread's rows: loads x, computes the moments, and stores the results.
  __device__ __forceinline__ void normalize() const {
    Vec<X> x[kRows][kVectors];
    Acc centers[kRows];
    unsigned samples[kRows];
    find_samples(samples);
    // If a row spans the block, every thread loads its first vector, as thread 0 does, to estimate the mean from it.
    Vec<X> first_of_row[1];
    fill(first_of_row[0], X(0.0f));
    if (row_spans_block() && !has(kRms)) {
      ThreadRows{p, plan, row_threads, /*thread_in_row=*/0}.load_x(first_of_row, row_number(0), samples[0]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) load_x(x[r], row_number(r), samples[r]);
    const Vec<X> first_vector = row_spans_block() ? first_of_row[0] : x[0][0];
    prefetch_parameter(kWeight, p.weight, samples[0]);
    prefetch_parameter(kBias, p.bias, samples[0]);

#pragma unroll
    for (int r = 0; r < kRows; ++r) centers[r] = has(kRms) ? 0 : estimate_mean(r == 0 ? first_vector : x[r][0]);
    int buffer = 0;
    Moments moments[kRows];
    reduce_moments(moments, centers, plan.row_threads, plan.cols, has(kRms), buffer, [&](Acc(&sums)[2 * kRows]) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) recomputed().sum_moments(&sums[2 * r], x[r], moments[r]);
    });
    recomputed().store_results(x, moments, samples);
  }

  // Stores the statistics, with a residual the sum x, and the output of the thread's rows.
  __device__ __forceinline__ void store_results(Vec<X> (&x)[kRows][kVectors], const Moments (&moments)[kRows],
                                                const unsigned (&samples)[kRows]) const {
    Normalizer normalizers[kRows];
    T* outputs[kRows];
    bool exist[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const unsigned row = row_number(r);
      exist[r] = row_exists(row);
      outputs[r] = address_of<T>(p.output, plan.output_stride, plan.output_gap, row, samples[r]);
      normalizers[r] = Normalizer(moments[r], plan);
      if (thread_in_row == 0 && exist[r]) {
        normalizers[r].store_statistics(p, plan, {samples[r], row - samples[r] * static_cast<unsigned>(p.rows)});
      }
      if (has(kResidual)) {
        // The sum may overwrite the residual in memory: the barrier in reduce_moments() is after all threads' loads of
        // the row's first vector, and no other thread reads this thread's vectors.
        X* const sum = address_of<X>(p.sum, plan.sum_stride, plan.sum_gap, row, samples[r]);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) store(exist[r], sum, x[r][i], i);
      }
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Acc weight[kVec], bias[kVec];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r == 0 || samples[r] != samples[r - 1]) load_weight_and_bias(weight, bias, samples[r], i);
        Acc v[kVec];
        x[r][i] = recompute_from(x[r][i]);
        widen(v, x[r][i]);
        for (int e = 0; e < kVec; ++e) v[e] = fma(normalizers[r].xhat(v[e]), weight[e], bias[e]);
        store(exist[r], outputs[r], round_to<T>(v), i);
      }
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// The resident blocks per multiprocessor that __launch_bounds__ asks for, which limits the registers of a thread.
// Blocks have 128 threads, or up to 256 with kRows = 1. With three blocks of 256 or six of 128, a thread has 80
// registers; with two of 256 or four of 128, it has 128. With 80, a float32 row with kRows = 1 would spill to local
// memory in code for compute capability 8.0, and for 10.0 and later.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ / 100 == 9
template <class X>
constexpr int kMinBlocksOfOneRow = 3;
#else
template <class X>
constexpr int kMinBlocksOfOneRow = sizeof(X) == 4 ? 2 : 3;
#endif
template <class T, class X, int kRows>
constexpr int kMinBlocksPerSM = kRows == 1                     ? kMinBlocksOfOneRow<X>
                                : kRows == 2 && sizeof(T) == 4 ? 6
                                                               : 4;
template <int kRows>
constexpr int kMaxThreads = kRows == 1 ? 256 : kThreadsOfShortRows;

template <class T, class X, int kVectors, int kRows>
__global__ void __launch_bounds__(kMaxThreads<kRows>, kMinBlocksPerSM<T, X, kRows>)
    forward_registers(const ForwardParams p, const RegistersPlan plan) {
  const unsigned thread_in_row = threadIdx.x & ((1u << plan.log2_row_threads) - 1);
  ThreadRows<T, X, kVectors, kRows>{p, plan, static_cast<unsigned>(plan.row_threads), thread_in_row}.normalize();
}

// ---- host code ------------------------------------------------------------------------------------------------------

// An instance of the kernel, with its kVectors and kRows.
struct Instance {
  void (*kernel)(ForwardParams, RegistersPlan);
  int thread_vectors, thread_rows;
};

template <class T, class X, int kVectors, int kRows>
Instance instance() {
  return {forward_registers<T, X, kVectors, kRows>, kVectors, kRows};
}

// Chooses the instance for rows of so many vectors. A thread has eight vectors: of one long row, or of two or four
// short rows, which share the instructions for addresses and weights.
template <class T, class X>
Instance choose_instance(int64_t vectors) {
  if constexpr (std::is_same_v<T, X>) {
    if (vectors < 32) return instance<T, X, 2, 4>();
  }
  return vectors <= 128 ? instance<T, X, 4, 2>() : instance<T, X, 8, 1>();
}

// Launches the kernel for x of X and input of T, or returns false if ByteStride cannot address all rows.
template <class T, class X>
bool launch_rows(const ForwardParams& p) {
  const int64_t vectors = p.cols / kVectorSize<X>, num_rows = p.samples * p.rows;
  RegistersPlan plan;
  if (!plan.initialize<T, X>(p)) return false;
  plan.vectors = static_cast<unsigned>(vectors);
  const auto gap_of = [&](const View& view, size_t element_size) {
    return (view.sample_stride - p.rows * view.row_stride) * static_cast<int64_t>(element_size);
  };
  plan.x_gap = gap_of(p.residual.data ? p.residual : p.input, sizeof(X));
  plan.input_gap = gap_of(p.input, sizeof(T));
  plan.output_gap = gap_of(p.output, sizeof(T));
  plan.sum_gap = gap_of(p.sum, sizeof(X));
  const Instance chosen = choose_instance<T, X>(vectors);
  const int64_t needed_threads = ceil_div(vectors, chosen.thread_vectors);  // per row
  int block_threads = kThreadsOfShortRows;
  if (needed_threads <= kWarpSize) {
    plan.log2_row_threads = 0;
    while (1 << plan.log2_row_threads < needed_threads) ++plan.log2_row_threads;
    plan.row_threads = 1 << plan.log2_row_threads;
  } else {
    plan.log2_row_threads = kLog2OfWholeBlock;
    plan.row_threads = block_threads = static_cast<int>(round_up(needed_threads, kWarpSize));
  }
  LaunchConfig config;
  config.grid = static_cast<unsigned>(ceil_div(num_rows, block_threads / plan.row_threads * chosen.thread_rows));
  config.block = static_cast<unsigned>(block_threads);
  config.stream = static_cast<Stream>(p.stream);
  launch(config, chosen.kernel, p, plan);
  return true;
}

}  // namespace

bool forward_registers(const ForwardParams& p) {
  bool done = false;
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using Types = decltype(types);
    done = launch_rows<typename Types::T, typename Types::X>(p);
  });
  return done;
}

}  // namespace layernorm::cuda
