// With xhat = (x - mean) * rstd and g = dy * weight, for every row of x and dy [groups, rows, cols] on a GPU:
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat))      dweight = sum of dy * xhat over rows      dbias = sum of dy
//
// and dx = rstd * (g - xhat * mean(g * xhat)) for RMSNorm, whose mean is 0. If forward also returned x as a sum, the
// gradient of that sum is added to dx.
//
// The workspace has partial sums of dweight [weight_partials, pitch] and dbias [bias_partials, pitch], and then, if two
// launches read the rows, the sums of their parts [rows, num_parts].
//
// A thread owns 16 columns (8 of float64), and keeps their weights and sums of dweight and dbias in registers. Some
// lanes of a warp share a short row, up to 16 warps of a block a longer one, and the blocks of a cluster one of more
// than 8192 columns. Blocks are persistent: a block takes the rows of a segment in turn, which asynchronous copies
// bring to shared memory, and reads a row twice from there, for the row's sums and for dx. The warps of a block
// exchange their sums once per row, while they work on the next row. A second kernel adds the sums of the segments in
// order, without atomic operations; if few rows make a cluster or a block, it adds its sums itself. 3 * groups * rows *
// cols * sizeof(T) bytes are moved.
//
// Still longer rows, and those on older GPUs, take two launches, the first of which stores the sums of each part.
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
#include "activation.cuh"
#include "slice.cuh"

namespace layernorm::cuda {

template <class Acc>
struct BackwardPlan : GradientPlan, RowDivision {
  int rows_per_round, stages;
  int joined;            // blocks of a cluster that add their sums of dweight and dbias, or 1
  int log2_joined_cols;  // columns that each of them adds
  int ring_bytes;        // of dynamic shared memory; then come the sums that the joined blocks send
  int64_t pitch;         // elements from row to row of the workspace
  // Bytes from row to row, if there are no groups; AnyRows does not read them.
  unsigned x_stride, dy_stride, dx_stride, grad_sum_stride, statistics_stride;
  Divisor<Acc> cols;
};

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

// The sums over a row of d (see Statistics), g and g * d.
template <class Acc>
using RowSums = Acc[3];

// The flags of calls that an instance for rows of a warp, or of blocks, does not take.
constexpr unsigned kNotWarp = kInCluster | kStoresSums | kLoadsSums | kFromOutput, kNotBlock = kFromOutput,
                   kNotGated = kFromOutput | kGradSum;

// ---- the rows of a block --------------------------------------------------------------------------------------------

// Successive rows of a gradient group.
template <class Index>
struct Segment {
  Index group = 0;  // if groups have gradients of their own
  Index first;      // among all rows
  int rows;

  __device__ __forceinline__ Segment(const GradientPlan& plan, Flags flags, Index segment) {
    Index in_group = segment;
    if (flags.has(kWeightPerGroup | kBiasPerGroup)) {
      const auto divided = plan.segments_per_group.divide(segment);
      group = static_cast<Index>(divided.quotient), in_group = static_cast<Index>(divided.remainder);
    }
    const Index group_rows = static_cast<Index>(plan.gradient_group_rows);
    const Index row = in_group * static_cast<Index>(plan.segment_rows);
    first = group * group_rows + row;
    rows = static_cast<int>(max(min(static_cast<Index>(plan.segment_rows), group_rows - row), Index{0}));
  }
};

// The arrays of a stage. Only gated norms have a gate.
enum StagedArray { kX, kDy, kGateArray };

// What a warp reads from shared memory besides the arrays of a row.
template <class T, class X, class Acc, class Index, int kArrays>
struct alignas(16) RowHeader {
  Acc mean, rstd;
  X* dx;  // the block's part; null if it is not wanted, or the row does not exist
  union {
    const X* grad_sum;
    T* grad_gate;  // of a gated norm, which has no grad_sum; null like dx
  };
  Index number;            // of the row among all rows; -1 if it does not exist
  short offsets[kArrays];  // see Slice::staged()
};

// The rows of a block, as one of its threads sees them.
template <class T, class X, class Traits_>
struct Rows {
  using Traits = Traits_;
  using SliceOf = Slice<X, Traits::kMapping, Traits::kLanes>;
  using Acc = AccOf<X>;
  using Index = typename Traits::Index;
  using Header = RowHeader<T, X, Acc, Index, Traits::kIsAny ? 3 : 2>;
  static constexpr int kElements = SliceOf::kElements, kVec = SliceOf::kVec;
  // Elements that are processed together.
  static constexpr int kStep = Traits::kIsGated ? 2 : Traits::kIsAny ? std::min(kVec, 4) : kVec;
  static constexpr int kMaxStages = Traits::kIsAny ? 2 : 3;  // or one less
  // The shared memory of a warp, for one stage: x, dy, the headers of its rows, and the gate of a gated norm.
  static constexpr int kHeaders = Traits::kIsBlock ? 1 : kWarpSize / kMinLanes;
  static constexpr int kDyBegin = SliceOf::template kBytes<X>;
  static constexpr int kHeaderBegin = kDyBegin + SliceOf::template kBytes<T>;
  static constexpr int kGateBegin = kHeaderBegin + kHeaders * static_cast<int>(sizeof(Header));

  const BackwardParams& p;
  const BackwardPlan<Acc>& plan;
  const Flags flags;
  const SliceOf slice;
  const int row_in_round;
  const Index begin;  // the first column of the block's part
  const int part_cols;
  unsigned char* const shared;  // of the warp

  // The flags without those that the instance does not take. The one for gated norms takes all calls of float64.
  __device__ __forceinline__ static Flags flags_of(Flags flags) {
    if constexpr (!Traits::kIsAny) return {flags.bits & ~(Traits::kIsWarp ? kNotWarp : kNotBlock)};
    if constexpr (Traits::kIsGated && !std::is_same_v<X, double>) return {(flags.bits & ~kNotGated) | kGatedNorm};
    return flags;
  }
  __host__ __device__ static bool is_gated(Flags flags) { return Traits::kIsGated && flags.has(kGatedNorm); }
  __host__ __device__ static int stage_bytes(Flags flags) {
    return kGateBegin + (is_gated(flags) ? SliceOf::template kBytes<T> : 0);
  }

  // The number of a row in a round of a segment; -1 if it does not exist.
  __device__ __forceinline__ int row_of(const Segment<Index>& segment, int round) const {
    const int row = round * plan.rows_per_round + row_in_round;
    return row < segment.rows ? row : -1;
  }
  __device__ __forceinline__ RowIndex index_of(const Segment<Index>& segment, int row) const {
    return find_group(segment.first + row, flags.has(kHasGroups), plan.rows);
  }
  __device__ __forceinline__ Header& header(int stage) const {
    Header* const headers = reinterpret_cast<Header*>(shared + stage + kHeaderBegin);
    return headers[Traits::kIsBlock ? 0 : slice.row];
  }

  // Starts to copy a row, which may not exist, to the shared memory of a stage.
  __device__ __forceinline__ void fetch(const Segment<Index>& segment, int row, int stage) const {
    const bool exists = row >= 0;
    const int cols = exists ? part_cols : 0;
    const auto fetch_from = [&](const auto& address_in) {
      const X* const x = address_in(p.input, X(), plan.x_stride) + begin;
      const T* const dy = address_in(p.grad_output, T(), plan.dy_stride) + begin;
      slice.fetch(shared + stage, x, cols);
      slice.fetch(shared + stage + kDyBegin, dy, cols);
      const X* const grad_sum = address_in(p.grad_sum, X(), plan.grad_sum_stride) + begin;
      if (flags.has(kGradSum)) {
#pragma unroll
        for (int j = 0; j < kElements; j += kVec) {
          if (slice.column(j) < cols) prefetch_to_l2(grad_sum + slice.column(j));
        }
      }
      const T* const gate = address_in(p.gate, T(), 0) + begin;
      if (is_gated(flags)) slice.fetch(shared + stage + kGateBegin, gate, cols);
      if (slice.lane > 0) return;
      Header& to = header(stage);
      const Acc* const rstd = address_in(p.rstd, Acc(), plan.statistics_stride);
      const bool has_mean = exists && !flags.has(kRms | kFromOutput);
      async_copy<sizeof(Acc)>(&to.rstd, rstd, exists ? sizeof(Acc) : 0);
      async_copy<sizeof(Acc)>(&to.mean, has_mean ? address_in(p.mean, Acc(), plan.statistics_stride) : rstd,
                              has_mean ? sizeof(Acc) : 0);
      to.dx = exists && flags.has(kGradInput) ? address_in(p.grad_input, X(), plan.dx_stride) + begin : nullptr;
      to.grad_sum = grad_sum;
      to.number = exists ? segment.first + row : -1;
      if constexpr (Traits::kMapping != Mapping::kVectors) {
        to.offsets[kX] = static_cast<short>(slice.offset_of(x + slice.begin));
        to.offsets[kDy] = static_cast<short>(slice.offset_of(dy + slice.begin));
      }
      if constexpr (Traits::kIsGated) {
        if (!is_gated(flags)) return;
        to.grad_gate = exists && p.grad_gate.data ? address_in(p.grad_gate, T(), 0) + begin : nullptr;
        to.offsets[kGateArray] = static_cast<short>(slice.offset_of(gate + slice.begin));
      }
    };
    if (Traits::kIsAny || flags.has(kHasGroups)) {
      const RowIndex index = exists ? index_of(segment, row) : RowIndex{0, 0};
      fetch_from([&](const View& view, auto element, unsigned) { return address<decltype(element)>(view, index); });
    } else {
      const unsigned number = exists ? static_cast<unsigned>(segment.first) + static_cast<unsigned>(row) : 0;
      fetch_from([&](const View& view, auto element, unsigned stride) {
        return reinterpret_cast<decltype(element)*>(static_cast<char*>(view.data) + uint64_t{number} * stride);
      });
    }
  }

  // The bias of a column of the part; zero without a bias or after the end.
  __device__ __forceinline__ Acc load_bias(int column, int64_t group) const {
    if (!flags.has(kBias) || column >= part_cols) return 0;
    return with_parameter_type<T>(flags, [&](auto element) {
      return static_cast<Acc>(address<const decltype(element)>(p.bias, {group, 0})[begin + column]);
    });
  }

  // Computes d (see Statistics) of elements [j, j + kStep).
  __device__ __forceinline__ void read_d(Acc (&d)[kStep], const SliceOf& slice, const X* x, int j,
                                         const Statistics<Acc>& statistics, Acc mean, const Acc (&weight)[kElements],
                                         int64_t group) const {
    slice.read(d, x, j);
    if (flags.has(kFromOutput)) {
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        d[e] = recover_xhat(d[e], weight[j + e], load_bias(slice.column(j + e), group));
        keep_order();  // takes fewer registers
      }
    } else {
#pragma unroll
      for (int e = 0; e < kStep; ++e) d[e] = fma(d[e], statistics.scale, -mean);
    }
  }

  // Adds this thread's part of a row to the sums. Elements after the end are zeros, and so must be their d.
  __device__ __forceinline__ void add_to_sums(RowSums<Acc>& sums, int stage, const Statistics<Acc>& statistics,
                                              const Acc (&weight)[kElements], int64_t group) const {
    const auto slice = Traits::kMapping == Mapping::kVectors ? this->slice : this->slice.again();
    const X* const x = staged<kX>(stage);
    const T* const dy = staged<kDy>(stage);
    const auto add = [&](auto has_end) {
#pragma unroll
      for (int j = 0; j < kElements; j += kStep) {
        Acc d[kStep], dy_values[kStep];
        if (is_gated(flags)) {
          if constexpr (Traits::kIsGated) read_gated(d, dy_values, slice, stage, j, statistics);
        } else {
          const bool vector_exists = Traits::kMapping != Mapping::kVectors || slice.column(j) < part_cols;
          read_d(d, slice, x, j, statistics, vector_exists ? statistics.mean : 0, weight, group);
          slice.read(dy_values, dy, j);
        }
#pragma unroll
        for (int e = 0; e < kStep; ++e) {
          if (has_end.value && slice.column(j + e) >= part_cols) d[e] = 0;
          const Acc g = dy_values[e] * weight[j + e];
          sums[0] += d[e];
          sums[1] += g;
          sums[2] = fma(g, d[e], sums[2]);
        }
      }
    };
    if (Traits::kMapping == Mapping::kVectors ||
        (!Traits::kIsAny && slice.begin + slice.lanes() * kElements <= part_cols)) {
      add(std::false_type());
    } else {
      add(std::true_type());
    }
  }

  // Computes d and the gradient of the norm's output of elements [j, j + kStep) of a gated norm.
  __device__ __forceinline__ void read_gated(Acc (&d)[kStep], Acc (&dn)[kStep], const SliceOf& slice, int stage, int j,
                                             const Statistics<Acc>& statistics) const {
    Acc gate[kStep];
    slice.read(d, staged<kX>(stage), j);
    slice.read(dn, staged<kDy>(stage), j);
    slice.read(gate, staged<kGateArray>(stage), j);
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      const Acc activated = Activated<Acc>(gate[e], flags).value;
      flags.has(kGateFirst) ? d[e] *= activated : dn[e] *= activated;
      d[e] = fma(d[e], statistics.scale, -statistics.mean);
    }
  }

  // store_grad_input() of a gated norm, which also stores this thread's part of the gate's gradient.
  __device__ __forceinline__ void store_gated(Acc (&dw)[kElements], Acc (&db)[kElements], int stage,
                                              const Statistics<Acc>& statistics, const RowMeans<Acc>& means,
                                              const Acc (&weight)[kElements], int64_t group) const {
    const auto slice = this->slice.again();
    const bool gate_first = flags.has(kGateFirst);
#pragma unroll
    for (int j = 0; j < kElements; j += kStep) {
      Acc x[kStep], dy[kStep], gate[kStep];
      slice.read(x, staged<kX>(stage), j);
      slice.read(dy, staged<kDy>(stage), j);
      slice.read(gate, staged<kGateArray>(stage), j);
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        const Activated<Acc> activated(gate[e], flags);
        const Acc u = gate_first ? x[e] * activated.value : x[e];
        const Acc dn = gate_first ? dy[e] : dy[e] * activated.value;
        const Acc xhat = fma(fma(u, statistics.scale, -statistics.mean), statistics.rstd, -means.xhat);
        db[j + e] += dn;
        dw[j + e] = fma(dn, xhat, dw[j + e]);
        const Acc du = means.grad_input(dn * weight[j + e] - means.g, xhat, statistics);
        if (gate_first) {
          gate[e] = du * x[e] * activated.derivative;
          x[e] = du * activated.value;
        } else {
          gate[e] = dy[e] * fma(xhat, weight[j + e], load_bias(slice.column(j + e), group)) * activated.derivative;
          x[e] = du;
        }
      }
      // The addresses come from shared memory each time, because they would take registers.
      const auto store = [&](auto* to, const Acc(&v)[kStep]) { slice.store(to, j, v, to == nullptr ? 0 : part_cols); };
      store(header(stage).dx, x);
      store(header(stage).grad_gate, gate);
    }
  }

  __device__ __forceinline__ RowMeans<Acc> compute_means(const RowSums<Acc>& sums, Acc rstd) const {
    const Divisor<Acc>& cols = plan.cols;
    const Acc xhat = cols.divide(sums[0]) * rstd, g = cols.divide(sums[1]), g_xhat = cols.divide(sums[2]) * rstd;
    if (flags.has(kRms)) return {0, 0, g_xhat};
    return {xhat, g, g_xhat - xhat * g};
  }

  // Stores this thread's part of dx, and adds to its sums of dweight and dbias, whether they are wanted or not. Sums of
  // columns after the end are not stored.
  template <class HasGradSum>
  __device__ __forceinline__ void store_grad_input(HasGradSum has_grad_sum, Acc (&dw)[kElements], Acc (&db)[kElements],
                                                   int stage, const Statistics<Acc>& statistics,
                                                   const RowMeans<Acc>& means, const Acc (&weight)[kElements],
                                                   int64_t group) const {
    const auto slice = Traits::kMapping == Mapping::kVectors ? this->slice : this->slice.again();
    const X* const x = staged<kX>(stage);
    const T* const dy = staged<kDy>(stage);
    X* const dx = compute_once(header(stage).dx);
    const int stored_cols = dx == nullptr ? 0 : part_cols;
    Vector<X, kStep> dsum[kElements / kStep];
    constexpr bool kLoadsAhead = Traits::kMapping == Mapping::kVectors && Traits::kIsBlock;
    if (kLoadsAhead && has_grad_sum) {
#pragma unroll
      for (int j = 0; j < kElements; j += kStep) {
        dsum[j / kStep] = slice.template load<kStep>(header(stage).grad_sum, j, stored_cols);
      }
    }
#pragma unroll
    for (int j = 0; j < kElements; j += kStep) {
      Acc xhat[kStep], dy_values[kStep], dx_values[kStep];
      read_d(xhat, slice, x, j, statistics, statistics.mean, weight, group);
      slice.read(dy_values, dy, j);
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        xhat[e] = fma(xhat[e], statistics.rstd, -means.xhat);
        db[j + e] += dy_values[e];
        dw[j + e] = fma(dy_values[e], xhat[e], dw[j + e]);
        dx_values[e] = means.grad_input(dy_values[e] * weight[j + e] - means.g, xhat[e], statistics);
      }
      if (has_grad_sum) {
        if (!kLoadsAhead) {
          dsum[j / kStep] = slice.template load<kStep>(header(stage).grad_sum, j, stored_cols);
        }
        Acc values[kStep];
        widen(values, dsum[j / kStep]);
#pragma unroll
        for (int e = 0; e < kStep; ++e) dx_values[e] += values[e];
      }
      slice.store(dx, j, dx_values, stored_cols);
    }
  }

  // The sums of the row's parts, after all partial sums.
  __device__ __forceinline__ RowSums<Acc>* part_sums(int64_t row) const {
    Acc* const first = static_cast<Acc*>(plan.workspace) + (plan.weight_partials + plan.bias_partials) * plan.pitch;
    return reinterpret_cast<RowSums<Acc>*>(first) + row * plan.num_parts;
  }

 private:
  // This thread's first element of an array.
  template <StagedArray kArray>
  __device__ __forceinline__ auto* staged(int stage) const {
    constexpr int kBegin = kArray == kX ? 0 : kArray == kDy ? kDyBegin : kGateBegin;
    int offset = 0;
    if constexpr (Traits::kMapping != Mapping::kVectors) offset = header(stage).offsets[kArray];
    return slice.template staged<std::conditional_t<kArray == kX, X, T>>(shared + stage + kBegin, offset);
  }
};

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
  const bool joins = !in_cluster && plan.joined > 1;

  // The shuffle tells the compiler that the lanes of a warp have the same row.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int row_warps = is_warp ? 1 : plan.row_threads / kWarpSize;
  const int block_row = is_warp ? 0 : warp / row_warps, first_warp = is_warp ? warp : block_row * row_warps;
  const typename RowsOf::SliceOf slice(warp - first_warp, is_warp ? plan.row_threads : kWarpSize, plan.deals_vectors);
  extern __shared__ __align__(16) unsigned char shared[];
  const int stage_bytes = RowsOf::stage_bytes(flags);
  const Index begin = in_cluster || flags.has(kStoresSums | kLoadsSums) ? Index{plan.part_cols} * Index(blockIdx.x) : 0;
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
  __shared__ ClusterExchange<RowSums<Acc>> exchange;
  const JoinedSums<Acc> joined{reinterpret_cast<Acc*>(shared + plan.ring_bytes), exchange.barriers[0], plan};
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
    if (threadIdx.x == 0) exchange.init();
    cluster_arrive(), cluster_wait();
  }
  __syncthreads();
  if (flags.has(kLoadsSums)) wait_for_previous_grid();

  Acc weight[kElements], dw[kElements], db[kElements];
  int finished = 0, stage = 0;  // rows; the stage of the next row to be summed, in bytes
#pragma unroll 1
  for (Index s = first_segment; s < num_segments; s += segment_step) {
    const Segment<Index> segment(plan, flags, s);
    slice.template load_parameter<T>(weight, p.weight, {segment.group, 0}, begin, rows.part_cols, flags, kWeight, 1);
#pragma unroll
    for (int j = 0; j < kElements; ++j) dw[j] = db[j] = 0;
    Statistics<Acc> statistics, last_statistics;
#pragma unroll 1
    for (int round = 0; round < rounds + kLag; ++round) {
      RowSums<Acc> totals = {};
      const auto get_totals = [&] {
        if (flags.has(kLoadsSums)) return;
        __syncthreads();
        warp_sums.get(totals, row_warps);
        if (in_cluster && warp == 0) exchange.send(totals, plan.num_parts, finished);
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
        if (!flags.has(kLoadsSums)) {
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
      }
      const int ring_end = (kLag > 0 ? compute_again(plan.stages) : plan.stages) * stage_bytes;
      const int last_stage = kLag == 0 ? stage : (stage == 0 ? ring_end : stage) - stage_bytes;
      if (round < rounds) stage = stage + stage_bytes == ring_end ? 0 : stage + stage_bytes;
      if (round < kLag) continue;
      if (kLag == 0) {
        last_statistics = statistics;
        if (!is_warp) get_totals();
      }
      if (in_cluster) add_parts(totals, exchange.receive(finished), plan.num_parts);
      const Index row = flags.has(kStoresSums | kLoadsSums) ? rows.header(last_stage).number : -1;
      if (flags.has(kLoadsSums) && row >= 0) add_parts(totals, rows.part_sums(row), plan.num_parts);
      if (flags.has(kStoresSums)) {
        if (row >= 0 && threadIdx.x == 0) {
#pragma unroll
          for (int k = 0; k < 3; ++k) rows.part_sums(row)[blockIdx.x][k] = totals[k];
        }
      } else {
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
      if (flags.has(kStoresSums) || (done != rounds && static_cast<unsigned>(done) % kRoundsPerSum != 0)) continue;
      if (s + segment_step >= num_segments && done == rounds) let_next_grid_start();
      const auto store = [&](Acc(&column_sums)[kElements], int array, const View& gradient, Flag per_group,
                             int64_t first) {
        add_rows_of_block(column_sums, rows, [&](int j, Acc(&v)[kVec]) {
          if (joins) {
#pragma unroll
            for (int e = 0; e < kVec; ++e) {
              const int column = slice.column(j + e);
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
// blocks resident and the next row is still fetched ahead. Returns how many rows are resident; 0 if no block fits.
template <class T, class X>
int choose_stages(BackwardPlan<AccOf<X>>& plan, LaunchConfig& config, bool any, size_t other_bytes) {
  constexpr size_t kMaxStaticShared = kThreads * sizeof(Vector<AccOf<X>, kVectorSize<X>>) + 1280;
  return with_path<T, X>(plan, any, [&](auto path) {
    using RowsOf = Rows<T, X, decltype(path)>;
    int most = 0;
    for (int stages = RowsOf::kMaxStages; stages >= RowsOf::kMaxStages - 1; --stages) {
      const size_t bytes = config.block.x / kWarpSize * stages * RowsOf::stage_bytes(plan.flags);
      if (bytes + other_bytes + kMaxStaticShared > max_shared_memory(config)) continue;
      if (most > 0 && stages == kLagOf<decltype(path)> + 1) break;
      config.shared_bytes = bytes + other_bytes;
      const int resident = std::max(resident_blocks(config, backward_rows<T, X, decltype(path)>) / plan.num_parts, 1);
      if (resident > most) most = resident, plan.stages = stages, plan.ring_bytes = static_cast<int>(bytes);
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
  const bool reads_twice = plan.num_parts > 1 && !in_cluster;
  plan.flags.set(kInCluster, in_cluster);

  // Rows of groups with few rows and gradients of their own have blocks of few threads.
  const bool per_group = flags.has(kWeightPerGroup | kBiasPerGroup);
  int64_t threads = std::max<int64_t>(kThreads / plan.row_threads, 1) * plan.row_threads;
  if (plan.num_parts > 1) threads = plan.row_threads;
  if (per_group) threads = std::min(threads, round_up(p.rows * plan.row_threads, kWarpSize));
  plan.rows_per_round = static_cast<int>(threads) / plan.row_threads;
  config.block = static_cast<unsigned>(threads);
  config.cluster = in_cluster ? static_cast<unsigned>(plan.num_parts) : 1;

  // The number of blocks determines the order of summation of dweight and dbias. It depends neither on the alignment
  // nor on the options, but on the instance for the usual ones.
  bool any = false;
  int64_t segments = choose_stages<T, X>(plan, config, any, 0);
  if (segments == 0) any = true, segments = choose_stages<T, X>(plan, config, any, 0);
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
  int64_t resident = choose_stages<T, X>(plan, config, any, joined_bytes);
  if (resident == 0) joined_bytes = 0, resident = choose_stages<T, X>(plan, config, any, 0);
  const int64_t blocks = std::min({plan.num_segments, resident, kMaxGridY});
  config.grid = dim3(static_cast<unsigned>(plan.num_parts), static_cast<unsigned>(blocks));
  if (joined_bytes > 0) {
    plan.joined = static_cast<int>(plan.num_segments);
    config.cluster = static_cast<unsigned>(plan.joined);
    config.grid = dim3(config.cluster);
    plan.weight_partials = plan.bias_partials = 0;
  }

  const int64_t part_sums = reads_twice ? 3 * p.groups * p.rows * plan.num_parts : 0;
  const int64_t elements = (plan.weight_partials + plan.bias_partials) * plan.pitch + part_sums;
  if (elements > 0) plan.workspace = p.allocator->allocate(elements * static_cast<int64_t>(sizeof(Acc)));
  with_path<T, X>(plan, any, [&](auto path) {
    const auto kernel = backward_rows<T, X, decltype(path)>;
    if (reads_twice) {
      plan.flags.set(kStoresSums, true);
      launch(config, kernel, p, plan);
      plan.flags.set(kStoresSums, false);
      plan.flags.set(kLoadsSums, true);
      config.overlaps_previous = true;
    }
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
