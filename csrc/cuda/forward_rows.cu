// y = (x - mean) * rstd * weight + bias for the rows of x [groups, rows, cols] on a GPU, in registers. RMSNorm's mean
// is 0. A residual is added first, to the input or to its product with a gate, and the sum is stored.
//
// The rows are whole vectors. Some lanes of a warp hold a row, or a whole block does. Neighbouring threads hold
// neighbouring vectors, and each thread holds four or eight. Only rows of a block need barriers.
//
// A block requests all of its rows of x at once, past the L1 cache, which keeps weight and bias, and prefetches weight
// and bias at the same time, so that it waits for memory once. The kernel moves 2 * groups * rows * cols * sizeof(T)
// bytes; with a residual also those of the residual and the sum. Rows that are not aligned are loaded and stored by
// elements.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include "../dtypes.h"
#include "moments.cuh"

namespace layernorm::cuda {

template <class Acc>
struct RowsPlan {
  Flags flags;
  unsigned vectors;  // of a row
  int row_threads, log2_row_threads;
  FastDivisor rows;  // of a group
  Acc eps;
  Divisor<Acc> cols;
};

namespace {

constexpr int kWholeBlock = 30;           // the log2_row_threads of a row that takes a block
constexpr int kThreadsOfShortRows = 128;  // of a block whose rows take some lanes each

// Threads hold four vectors of rows of at most so many vectors, and eight of longer rows. With eight, a thread executes
// 23 instead of 27 instructions per 16-bit element; at the speed of a copy, an H200 has time for 31.
template <class X>
constexpr int64_t kMaxOfFour = sizeof(X) == 2 ? 128 : 1024;

// ---- the part of a row that a thread holds --------------------------------------------------------------------------

template <class Types, int kVectors>
struct ThreadPart {
  using T = typename Types::T;
  using X = typename Types::X;
  using W = typename Types::W;
  using Acc = AccOf<X>;
  static constexpr int kVec = kVectorSize<X>;
  template <class E>
  using Vec = Vector<E, kVec>;

  const ForwardParams& p;
  const RowsPlan<Acc>& plan;
  const unsigned threads, thread;  // of the row

  struct Row : RowIndex {
    bool exists;
  };
  __device__ __forceinline__ bool has(unsigned flag) const { return plan.flags.has(flag); }
  __device__ __forceinline__ bool is_block() const { return plan.log2_row_threads == kWholeBlock; }
  // The row is located twice, because addresses that are kept during the sums would take registers.
  __device__ __forceinline__ Row locate() const {
    const int rows_of_block = is_block() ? 1 : static_cast<int>(blockDim.x) >> plan.log2_row_threads;
    const int row_in_block = static_cast<int>(threadIdx.x) >> plan.log2_row_threads;
    const int64_t row = compute_again(int64_t{blockIdx.x} * rows_of_block + row_in_block);
    const bool exists = row < p.groups * p.rows;
    return {find_group(exists ? row : 0, has(kHasGroups), plan.rows), exists};
  }
  __device__ __forceinline__ unsigned vector_index(int i) const { return i * threads + thread; }
  __device__ __forceinline__ bool holds(int i) const { return vector_index(i) < plan.vectors; }

  // Loads `count` vectors from this thread's vector `begin` on, with default values where there are none.
  template <bool kConstant, class E, int kCount>
  __device__ __forceinline__ void load(Vec<E> (&v)[kCount], bool exists, const E* row, int begin, bool aligned,
                                       E default_value) const {
#pragma unroll
    for (Vec<E>& vector : v) fill(vector, default_value);
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        load_vector_if<kConstant>(exists && holds(begin + i), v[i], row + vector_index(begin + i) * kVec);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const E* const from = row + vector_index(begin + i) * kVec;
        if (exists && holds(begin + i)) set_elements(v[i], [&](int e) { return from[e]; });
      }
    }
  }
  template <class E>
  __device__ __forceinline__ void store(bool exists, E* row, const Vec<E>& v, int i) const {
    if (!exists || !holds(i)) return;
    E* const to = row + vector_index(i) * kVec;
    if (has(kAligned)) {
      *reinterpret_cast<Vec<E>*>(to) = v;
    } else {
#pragma unroll
      for (int e = 0; e < kVec; ++e) to[e] = v.values[e];
    }
  }

  // Loads vectors of x: the input, or its sum with a residual. A gate multiplies the input before that.
  template <int kCount>
  __device__ __forceinline__ void load_x(Vec<X> (&x)[kCount], const Row& row, bool exists) const {
    load<false>(x, exists, address<const X>(has(kResidual) ? p.residual : p.input, row), 0, has(kAligned), X(0.0f));
    if (!has(kResidual)) return;
    const T* const from = address<const T>(p.input, row);
    constexpr int kBatch = std::min(kCount, 4);  // vectors of the input that fit into registers
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kBatch) {
      Vec<T> input[kBatch];
      load<false>(input, exists, from, begin, has(kAligned), T(0.0f));
      const auto add = [&](auto has_gate) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          Acc a[kVec], b[kVec];
          widen(a, x[begin + i]);
          widen(b, input[i]);
          if constexpr (has_gate) {
            Vec<W> gate[1];
            Acc g[kVec];
            load<true>(gate, exists, address<const W>(p.gate, {row.group, 0}), begin + i, has(kAlignedParameters),
                       W(0.0f));
            widen(g, gate[0]);
#pragma unroll
            for (int e = 0; e < kVec; ++e) a[e] = fma(g[e], b[e], a[e]);
          } else {
#pragma unroll
            for (int e = 0; e < kVec; ++e) a[e] += b[e];
          }
          x[begin + i] = compute_again(round_to<X>(a));
        }
      };
      if (has(kGate)) {
        add(std::true_type());
      } else {
        add(std::false_type());
      }
    }
  }
  // Loads vector i of the weight and the bias of a group.
  __device__ __forceinline__ void load_parameters(Vec<W> (&weight)[1], Vec<W> (&bias)[1], int64_t group, int i) const {
    const bool aligned = has(kAlignedParameters);
    load<true>(weight, has(kWeight), address<const W>(p.weight, {group, 0}), i, aligned, W(1.0f));
    load<true>(bias, has(kBias), address<const W>(p.bias, {group, 0}), i, aligned, W(0.0f));
  }
  __device__ __forceinline__ void prefetch_parameter(const View& view, Flag exists, int64_t group) const {
    if (!has(exists)) return;
    const W* const from = address<const W>(view, {group, 0});
    constexpr int kLine = 128 / sizeof(W);
    for (unsigned i = thread * kLine; i < plan.vectors * kVec; i += threads * kLine) prefetch(from + i);
  }

  // Estimates the mean of the row by the average of its first vector. If the row belongs to a warp, one lane holds that
  // vector; if it belongs to a block, all threads have loaded it.
  __device__ __forceinline__ Acc estimate_mean(const Vec<X>& first_vector) const {
    Acc v[kVec], mean = 0;
    widen(v, first_vector);
#pragma unroll
    for (int e = 0; e < kVec; ++e) mean += v[e] * (Acc(1) / kVec);  // a sum of large numbers would overflow
    if (is_block()) return mean;
    return __shfl_sync(kAllLanes, mean, static_cast<int>(threadIdx.x % kWarpSize - thread));
  }

  // Adds up d = x * scale - pivot and their squares.
  __device__ __forceinline__ void sum(Acc (&sums)[2], Vec<X> (&x)[kVectors], const Moments<Acc>& moments) const {
    Acc diffs[2] = {}, squares[2] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      x[i] = compute_again(x[i]);  // it takes fewer registers to widen x again than to keep the wide elements
      const Acc pivot = holds(i) ? moments.pivot : 0;  // zeros after the end stay zeros
      Acc v[kVec];
      widen(v, x[i]);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const Acc d = fma(v[e], moments.scale, -pivot);
        diffs[e % 2] += d;
        squares[e % 2] = fma(d, d, squares[e % 2]);
      }
    }
    sums[0] = diffs[0] + diffs[1];
    sums[1] = squares[0] + squares[1];
  }

  __device__ __forceinline__ void normalize() const {
    Vec<X> x[kVectors], head[1];
    Vec<W> weight[kVectors][1], bias[kVectors][1];
    {
      const Row row = locate();
      load_x(x, row, row.exists);
      head[0] = x[0];
      if (is_block() && !has(kRms)) ThreadPart{p, plan, threads, 0}.load_x(head, row, true);
      prefetch_parameter(p.weight, kWeight, row.group);
      prefetch_parameter(p.bias, kBias, row.group);
    }
    int buffer = 0;
    const Moments<Acc> moments =
        reduce_moments(has(kRms) ? 0 : estimate_mean(head[0]), plan.row_threads, plan.cols, has(kRms), buffer,
                       [&](Acc(&sums)[2], const Moments<Acc>& from) { sum(sums, x, from); });

    const Row row = locate();
    const Acc rstd = scaled_rstd(moments.m2 * plan.cols.reciprocal, plan.eps, moments.scale);
    if (thread == 0 && row.exists) {
      if (!has(kRms)) *address<Acc>(p.mean, row) = moments.mean();
      *address<Acc>(p.rstd, row) = unscaled_rstd(rstd, plan.eps, moments.scale);
    }
    if (has(kResidual)) {
      // The sum may replace the residual, whose first vector all threads have read before the sums.
      X* const sums = address<X>(p.sum, row);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) store(row.exists, sums, x[i], i);
    }
    T* const output = address<T>(p.output, row);
    load_parameters(weight[0], bias[0], row.group, 0);
    const Acc weight_offset = has(kZeroCentered) ? Acc(1) : -Acc(0);  // -0 changes no number
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i + 1 < kVectors) load_parameters(weight[i + 1], bias[i + 1], row.group, i + 1);
      Acc v[kVec], w[kVec], b[kVec];
      widen(w, weight[i][0]);
      widen(b, bias[i][0]);
      x[i] = compute_again(x[i]);
      widen(v, x[i]);
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[e] = fma(moments.difference(v[e]) * rstd, w[e] + weight_offset, b[e]);
      store(row.exists, output, round_to<T>(v), i);
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// The blocks that fit on a multiprocessor. With four vectors per thread, 32 warps of 64 registers per thread fit (with
// 16-bit elements, 24 warps of 80). With eight, 20 warps of 96 registers fit (with float32, 24 warps of 80, with which
// code for 10.0 would spill).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kMaxFloatThreads = 320;
#else
constexpr int kMaxFloatThreads = 384;
#endif
template <class X, int kVectors>
constexpr int kMaxThreads = kVectors == 4    ? 256
                            : sizeof(X) == 4 ? kMaxFloatThreads
                                             : 320;
template <class X, int kVectors>
constexpr int kMinBlocksPerSM = kVectors == 8    ? 2
                                : sizeof(X) == 4 ? 4
                                                 : 3;

template <class Types, int kVectors>
__global__ void __launch_bounds__(kMaxThreads<typename Types::X, kVectors>,
                                  kMinBlocksPerSM<typename Types::X, kVectors>)
    forward_rows(const ForwardParams p, const RowsPlan<AccOf<typename Types::X>> plan) {
  const unsigned thread = threadIdx.x & ((1u << plan.log2_row_threads) - 1);
  ThreadPart<Types, kVectors>{p, plan, static_cast<unsigned>(plan.row_threads), thread}.normalize();
}

// ---- host code ------------------------------------------------------------------------------------------------------

template <class Types>
void launch_rows(const ForwardParams& p) {
  using X = typename Types::X;
  using Acc = AccOf<X>;
  const int64_t vectors = p.cols / kVectorSize<X>;
  RowsPlan<Acc> plan;
  plan.flags = make_flags(p);
  plan.vectors = static_cast<unsigned>(vectors);
  plan.rows = FastDivisor(p.rows);
  plan.eps = static_cast<Acc>(p.eps);
  plan.cols = Divisor<Acc>(p.cols);
  const int vectors_of_thread = vectors <= kMaxOfFour<X> ? 4 : 8;
  const int64_t needed = ceil_div(vectors, vectors_of_thread);
  plan.row_threads = static_cast<int>(round_up(needed, kWarpSize));
  plan.log2_row_threads = kWholeBlock;
  if (needed <= kWarpSize) {
    plan.log2_row_threads = 0;
    while (1 << plan.log2_row_threads < needed) ++plan.log2_row_threads;
    plan.row_threads = 1 << plan.log2_row_threads;
  }
  const int block = needed <= kWarpSize ? kThreadsOfShortRows : plan.row_threads;
  LaunchConfig config;
  config.grid = static_cast<unsigned>(ceil_div(p.groups * p.rows, block / plan.row_threads));
  config.block = static_cast<unsigned>(block);
  config.stream = static_cast<Stream>(p.stream);
  launch(config, vectors_of_thread == 4 ? forward_rows<Types, 4> : forward_rows<Types, 8>, p, plan);
}

}  // namespace

void forward_rows(const ForwardParams& p) {
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using Types = decltype(types);
    if constexpr (std::is_same_v<typename Types::X, double>) {
      no_kernel_for(p);
    } else {
      launch_rows<Types>(p);
    }
  });
}

}  // namespace layernorm::cuda
