// Forward for rows of whole vectors that fit into registers; forward.cu has the formulas.
//
// A thread holds up to eight vectors: of one row, or fewer of two or four rows, which then share its vectors of weight
// and bias. Neighbouring threads hold neighbouring vectors. Some lanes of a warp hold a row, or a whole block does.
// Only rows of a block need barriers.
//
// A thread requests all of its vectors of x at once, past the L1 cache, which keeps weight and bias, and prefetches
// those at the same time, so that it waits for memory once. The kernel moves 2 * samples * rows * cols * sizeof(T)
// bytes; with a residual also those of the residual and the sum.
#include "../dtypes.h"
#include "moments.cuh"

namespace layernorm::cuda {

struct RowsPlan : ForwardPlan {
  unsigned vectors;  // of a row
  int row_threads, log2_row_threads;
  int64_t x_gap, input_gap, output_gap, sum_gap;  // bytes from the end of a sample to the next one
};

namespace {

constexpr int kWholeBlock = 30;  // the log2_row_threads of a row that takes a block

// ---- the part of its rows that a thread holds -----------------------------------------------------------------------

template <class T, class X, int kVectors, int kRows>
struct ThreadPart {
  static constexpr int kVec = kVectorSize<X>;
  template <class E>
  using Vec = Vector<E, kVec>;

  const ForwardParams& p;
  const RowsPlan& plan;
  const unsigned threads, thread;  // of the row

  __device__ __forceinline__ bool has(unsigned flag) const { return plan.flags.has(flag); }
  __device__ __forceinline__ bool is_block() const { return kRows == 1 && plan.log2_row_threads == kWholeBlock; }
  __device__ __forceinline__ unsigned vector_index(int i) const { return i * threads + thread; }
  __device__ __forceinline__ bool holds(int i) const { return vector_index(i) < plan.vectors; }

  // The same part for another phase of a row: see compute_again(). Predicates would wait in registers.
  __device__ __forceinline__ ThreadPart rebuilt() const {
    return {p, plan, threads, kRows == 1 ? compute_again(thread) : thread};
  }

  // The rows that a block takes of each of its threads' kRows.
  __device__ __forceinline__ unsigned rows_at_once() const { return blockDim.x >> plan.log2_row_threads; }
  // The thread's row r among all rows, which may not exist.
  __device__ __forceinline__ unsigned row_number(int r) const {
    if (is_block()) return blockIdx.x;
    return (compute_again(blockIdx.x) * kRows + r) * rows_at_once() + (threadIdx.x >> plan.log2_row_threads);
  }
  __device__ __forceinline__ bool exists(unsigned row) const {
    return row < static_cast<unsigned>(p.samples) * static_cast<unsigned>(p.rows);
  }
  // The samples of the thread's rows. Rows that do not exist have the sample of the last row.
  __device__ __forceinline__ void find_samples(unsigned (&samples)[kRows]) const {
    for (unsigned& sample : samples) sample = 0;
    if (!has(kHasSamples)) return;
    const unsigned first = row_number(0), last = static_cast<unsigned>(p.samples) * static_cast<unsigned>(p.rows) - 1;
#pragma unroll
    for (int r = 0; r < kRows; ++r) samples[r] = plan.rows.divide_short(min(first + r * rows_at_once(), last));
  }
  // The address of a row among all rows: rows of samples take two instructions more than others, and no branch.
  template <class E>
  __device__ __forceinline__ E* address_of(const View& view, const ByteStride& stride, int64_t gap, unsigned row,
                                           unsigned sample) const {
    return reinterpret_cast<E*>(stride.address<char>(view, row) + sample * gap);
  }

  // Loads `count` vectors from this thread's vector `begin` on, with default values where there are none.
  template <bool kConstant, class E, int kCount>
  __device__ __forceinline__ void load(Vec<E> (&v)[kCount], bool exists, const E* row, int begin,
                                       E default_value) const {
    const E* const from = row + thread * kVec;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      fill(v[i], default_value);
      load_vector_if<kConstant>(exists && holds(begin + i), v[i], from + (begin + i) * threads * kVec);
    }
  }
  template <class E>
  __device__ __forceinline__ void store(bool exists, E* row, const Vec<E>& v, int i) const {
    if (exists && holds(i)) *reinterpret_cast<Vec<E>*>(row + thread * kVec + i * threads * kVec) = v;
  }

  // Loads vectors of x: the input, or its sum with a residual. An input_scale multiplies the input before that.
  template <int kCount>
  __device__ __forceinline__ void load_x(Vec<X> (&x)[kCount], unsigned row, unsigned sample) const {
    const bool exists = this->exists(row);
    load<false>(x, exists,
                address_of<const X>(has(kResidual) ? p.residual : p.input, plan.x_stride, plan.x_gap, row, sample), 0,
                X(0.0f));
    if (!has(kResidual)) return;
    const T* const from = address_of<const T>(p.input, plan.input_stride, plan.input_gap, row, sample);
    constexpr int kBatch = std::min(kCount, 2);  // vectors of the input that fit into registers
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kBatch) {
      Vec<T> input[kBatch];
      load<false>(input, exists, from, begin, T(0.0f));
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        Acc a[kVec], b[kVec];
        widen(a, x[begin + i]);
        widen(b, input[i]);
        if (has(kInputScale)) {
          Acc input_scale[kVec];
          with_parameter_type<T>(plan.flags, [&](auto element) {
            load_parameter<decltype(element)>(input_scale, p.input_scale, exists, sample, begin + i, 0);
          });
          for (int e = 0; e < kVec; ++e) a[e] = fma(input_scale[e], b[e], a[e]);
        } else {
          for (int e = 0; e < kVec; ++e) a[e] += b[e];
        }
        x[begin + i] = compute_again(round_to<X>(a));
      }
    }
  }
  // Loads vector i of a parameter of a sample, or default values if it does not exist.
  template <class W>
  __device__ __forceinline__ void load_parameter(Acc (&v)[kVec], const View& view, bool exists, int64_t sample, int i,
                                                 float default_value) const {
    Vec<W> vector[1];
    load<true>(vector, exists, address<const W>(view, {sample, 0}), i, W(default_value));
    widen(v, vector[0]);
  }
  // The choice of the type for each vector is a branch, across which the compiler does not move the loads of others.
  __device__ __forceinline__ void load_parameters(Acc (&weight)[kVec], Acc (&bias)[kVec], int64_t sample, int i) const {
    with_parameter_type<T>(plan.flags, [&](auto element) {
      using W = decltype(element);
      load_parameter<W>(weight, p.weight, has(kWeight), sample, i, 1);
      load_parameter<W>(bias, p.bias, has(kBias), sample, i, 0);
    });
    const Acc weight_offset = has(kZeroCentered) ? Acc(1) : -Acc(0);  // -0 changes no number
    for (int e = 0; e < kVec; ++e) weight[e] += weight_offset;
  }
  __device__ __forceinline__ void prefetch_parameter(const View& view, Flag exists, int64_t sample) const {
    if (!has(exists)) return;
    with_parameter_type<T>(plan.flags, [&](auto element) {
      const auto* const from = address<const decltype(element)>(view, {sample, 0});
      constexpr int kLine = 128 / sizeof(element);
      for (unsigned i = thread * kLine; i < plan.vectors * kVec; i += threads * kLine) prefetch(from + i);
    });
  }

  // Estimates the mean of a row by the average of its first vector. If the row belongs to a warp, one lane holds that
  // vector; if it belongs to a block, all threads have loaded it.
  __device__ __forceinline__ Acc estimate_mean(const Vec<X>& first_vector) const {
    Acc v[kVec];
    widen(v, first_vector);
    return is_block() ? average(v) : __shfl_sync(kAllLanes, average(v), threadIdx.x % kWarpSize - thread);
  }

  // Adds up d = x * row_scale - pivot and their squares. It takes fewer registers to widen x again than to keep the
  // wide elements.
  __device__ __forceinline__ void sum(Acc* sums, Vec<X> (&x)[kVectors], const Moments& moments) const {
    MomentSums own;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      x[i] = compute_again(x[i]);
      const Acc pivot = holds(i) ? moments.pivot : 0;  // zeros after the end stay zeros
      Acc v[kVec];
      widen(v, x[i]);
      for (int e = 0; e < kVec; ++e) own.add(e, fma(v[e], moments.row_scale, -pivot));
    }
    own.store(sums);
  }

  __device__ __forceinline__ void normalize() const {
    Vec<X> x[kRows][kVectors];
    Acc pivots[kRows];
    unsigned samples[kRows];
    find_samples(samples);
    // The first vector of a block's row is requested first, because the estimate of the mean needs it first.
    Vec<X> first[1];
    fill(first[0], X(0.0f));
    if (is_block() && !has(kRms)) ThreadPart{p, plan, threads, 0}.load_x(first, row_number(0), samples[0]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) load_x(x[r], row_number(r), samples[r]);
    const Vec<X> head = is_block() ? first[0] : x[0][0];
    prefetch_parameter(p.weight, kWeight, samples[0]);
    prefetch_parameter(p.bias, kBias, samples[0]);

#pragma unroll
    for (int r = 0; r < kRows; ++r) pivots[r] = has(kRms) ? 0 : estimate_mean(r == 0 ? head : x[r][0]);
    int buffer = 0;
    Moments moments[kRows];
    reduce_moments(moments, pivots, plan.row_threads, plan.cols, has(kRms), buffer, [&](Acc(&sums)[2 * kRows]) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) rebuilt().sum(&sums[2 * r], x[r], moments[r]);
    });
    rebuilt().finish(x, moments, samples);
  }

  // Stores the results of the rows.
  __device__ __forceinline__ void finish(Vec<X> (&x)[kRows][kVectors], const Moments (&moments)[kRows],
                                         const unsigned (&samples)[kRows]) const {
    Normalizer normalizers[kRows];
    T* outputs[kRows];
    bool exist[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const unsigned row = row_number(r);
      exist[r] = exists(row);
      outputs[r] = address_of<T>(p.output, plan.output_stride, plan.output_gap, row, samples[r]);
      normalizers[r] = Normalizer(moments[r], plan);
      if (thread == 0 && exist[r]) {
        normalizers[r].store_statistics(p, plan, {samples[r], row - samples[r] * static_cast<unsigned>(p.rows)});
      }
      if (has(kResidual)) {
        // The sum may replace the residual, whose first vector all threads have read before the sums.
        X* const sums = address_of<X>(p.sum, plan.sum_stride, plan.sum_gap, row, samples[r]);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) store(exist[r], sums, x[r][i], i);
      }
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Acc weight[kVec], bias[kVec];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r == 0 || samples[r] != samples[r - 1]) load_parameters(weight, bias, samples[r], i);
        Acc v[kVec];
        x[r][i] = compute_again(x[r][i]);
        widen(v, x[r][i]);
        for (int e = 0; e < kVec; ++e) v[e] = fma(normalizers[r].xhat(v[e]), weight[e], bias[e]);
        store(exist[r], outputs[r], round_to<T>(v), i);
      }
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// The blocks that fit on a multiprocessor. A block of several rows has 128 threads, and one of a row up to 256. Three
// blocks of one row, or six of two float32 rows, leave a thread 80 registers. In code for 8.0, and for 10.0 and later,
// a float32 row would then spill.
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
    forward_rows(const ForwardParams p, const RowsPlan plan) {
  const unsigned thread = threadIdx.x & ((1u << plan.log2_row_threads) - 1);
  ThreadPart<T, X, kVectors, kRows>{p, plan, static_cast<unsigned>(plan.row_threads), thread}.normalize();
}

// ---- host code ------------------------------------------------------------------------------------------------------

struct Choice {
  void (*kernel)(ForwardParams, RowsPlan);
  int vectors, rows;  // of a thread
};

// A thread has eight vectors: of one long row, or of two or four short rows, which share instructions. Eight lanes or
// more fetch whole lines of 128 bytes.
template <class T, class X>
Choice choose_kernel(int64_t vectors) {
  if constexpr (std::is_same_v<T, X>) {
    if (vectors < 32) return {forward_rows<T, X, 2, 4>, 2, 4};
  }
  if (vectors <= 128) return {forward_rows<T, X, 4, 2>, 4, 2};
  return {forward_rows<T, X, 8, 1>, 8, 1};
}

// Launches the kernel, unless the strides do not fit into its addresses (ForwardPlan::set); returns whether it has.
template <class T, class X>
bool launch_rows(const ForwardParams& p) {
  const int64_t vectors = p.cols / kVectorSize<X>, num_rows = p.samples * p.rows;
  RowsPlan plan;
  if (!plan.set<T, X>(p)) return false;
  plan.vectors = static_cast<unsigned>(vectors);
  const auto gap_of = [&](const View& view, size_t element_size) {
    return (view.sample_stride - p.rows * view.row_stride) * static_cast<int64_t>(element_size);
  };
  plan.x_gap = gap_of(p.residual.data ? p.residual : p.input, sizeof(X));
  plan.input_gap = gap_of(p.input, sizeof(T));
  plan.output_gap = gap_of(p.output, sizeof(T));
  plan.sum_gap = gap_of(p.sum, sizeof(X));
  const Choice choice = choose_kernel<T, X>(vectors);
  const int64_t needed = ceil_div(vectors, choice.vectors);
  plan.row_threads = static_cast<int>(round_up(needed, kWarpSize));
  plan.log2_row_threads = kWholeBlock;
  if (needed <= kWarpSize) {
    plan.log2_row_threads = 0;
    while (1 << plan.log2_row_threads < needed) ++plan.log2_row_threads;
    plan.row_threads = 1 << plan.log2_row_threads;
  }
  const int block = needed <= kWarpSize ? kThreadsOfShortRows : plan.row_threads;
  LaunchConfig config;
  config.grid = static_cast<unsigned>(ceil_div(num_rows, block / plan.row_threads * choice.rows));
  config.block = static_cast<unsigned>(block);
  config.stream = static_cast<Stream>(p.stream);
  launch(config, choice.kernel, p, plan);
  return true;
}

}  // namespace

bool forward_rows(const ForwardParams& p) {
  bool done = false;
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using Types = decltype(types);
    done = launch_rows<typename Types::T, typename Types::X>(p);
  });
  return done;
}

}  // namespace layernorm::cuda
