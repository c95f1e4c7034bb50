// The rows of a block in backward: the segment to which they belong, their staging in shared memory, their sums, and
// their gradients. backward.cu has the formulas and the mapping of threads.
#pragma once

#include <algorithm>

#include "activation.cuh"
#include "parts.cuh"

namespace layernorm::cuda {

struct BackwardPlan : GradientPlan, RowDivision {
  int rows_per_round, stages;
  int joined;            // blocks of a cluster that add their sums of dweight and dbias, or 1
  int log2_joined_cols;  // columns that each of them adds
  int ring_bytes;        // of dynamic shared memory; then come the sums that the joined blocks send
  int64_t pitch;         // elements from row to row of the workspace
  void* part_values;     // of PartExchange
  // GeneralRows does not read them.
  ByteStride x_stride, dy_stride, dx_stride, grad_sum_stride, statistics_stride;
  Divisor<Acc> cols;
};

namespace {

// The sums over a row of d (see Statistics), g and g * d.
using RowSums = PartValue;

// The flags of calls that an instance for rows of a warp, or of blocks, does not take.
constexpr unsigned kNotWarp = kHasParts | kFromOutput, kNotBlock = kFromOutput, kNotGated = kFromOutput | kGradSum;

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
      group = static_cast<Index>(divided.quotient);
      in_group = static_cast<Index>(divided.remainder);
    }
    const Index group_rows = static_cast<Index>(plan.gradient_group_rows);
    const Index row = in_group * static_cast<Index>(plan.segment_rows);
    first = group * group_rows + row;
    rows = static_cast<int>(max(min(static_cast<Index>(plan.segment_rows), group_rows - row), Index{0}));
  }
};

// The arrays of a stage. Only gated norms have a gate.
enum StagedArray { kX, kDy, kGateArray };

// The header of a row, which a warp reads from shared memory besides the row's arrays.
template <class T, class X, int kArrays>
struct alignas(16) RowHeader {
  Acc mean, rstd;
  X* dx;  // the block's part; null if it is not wanted, or the row does not exist
  union {
    const X* grad_sum;
    T* grad_gate;  // of a gated norm, which has no grad_sum; null like dx
  };
  short offsets[kArrays];  // see Slice::staged()
};

// The rows of a block, as one of its threads sees them.
template <class T, class X, class Traits_>
struct Rows {
  using Traits = Traits_;
  using SliceOf = Slice<X, Traits::kMapping, Traits::kLanes>;
  using Index = typename Traits::Index;
  using Header = RowHeader<T, X, Traits::kIsGeneral ? 3 : 2>;
  static constexpr int kElements = SliceOf::kElements, kVec = SliceOf::kVec;
  // Elements that are processed together.
  static constexpr int kStep = Traits::kIsGeneral                       ? 2
                               : Traits::kMapping == Mapping::kElements ? std::min(kVec, 4)
                                                                        : kVec;
  static constexpr int kMaxStages = Traits::kIsGeneral ? 2 : 3;  // or one less
  // The shared memory of a warp, for one stage: x, dy, the headers of its rows, and the gate of a gated norm.
  static constexpr int kHeaders = Traits::kIsBlock ? 1 : kWarpSize / kMinLanes;
  static constexpr int kDyBegin = SliceOf::template kBytes<X>;
  static constexpr int kHeaderBegin = kDyBegin + SliceOf::template kBytes<T>;
  static constexpr int kGateBegin = kHeaderBegin + kHeaders * static_cast<int>(sizeof(Header));

  const BackwardParams& p;
  const BackwardPlan& plan;
  const Flags flags;
  const SliceOf slice;
  const int row_in_round;
  const Index begin;  // the first column of the block's part
  const int part_cols;
  unsigned char* const shared;  // of the warp

  // The flags without those that the instance does not take.
  __device__ __forceinline__ static Flags flags_of(Flags flags) {
    if constexpr (!Traits::kIsGeneral) flags.bits &= ~(Traits::kIsWarp ? kNotWarp : kNotBlock);
    if constexpr (Traits::kIsGated) flags.bits = (flags.bits & ~kNotGated) | kGatedNorm;
    return {flags.bits & ~kNotSupported};
  }
  static constexpr int kStageBytes = kGateBegin + (Traits::kIsGated ? SliceOf::template kBytes<T> : 0);

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
      const T* const gate = address_in(p.gate, T(), ByteStride()) + begin;
      if (Traits::kIsGated) slice.fetch(shared + stage + kGateBegin, gate, cols);
      if (slice.lane > 0) return;
      Header& to = header(stage);
      const Acc* const rstd = address_in(p.rstd, Acc(), plan.statistics_stride);
      const bool has_mean = exists && !flags.has(kRms | kFromOutput);
      async_copy<sizeof(Acc)>(&to.rstd, rstd, exists ? sizeof(Acc) : 0);
      async_copy<sizeof(Acc)>(&to.mean, has_mean ? address_in(p.mean, Acc(), plan.statistics_stride) : rstd,
                              has_mean ? sizeof(Acc) : 0);
      to.dx = exists && flags.has(kGradInput) ? address_in(p.grad_input, X(), plan.dx_stride) + begin : nullptr;
      to.grad_sum = grad_sum;
      if constexpr (Traits::kMapping != Mapping::kVectors) {
        to.offsets[kX] = static_cast<short>(slice.offset_of(x + slice.begin));
        to.offsets[kDy] = static_cast<short>(slice.offset_of(dy + slice.begin));
      }
      if constexpr (Traits::kIsGated) {
        to.grad_gate = exists && p.grad_gate.data ? address_in(p.grad_gate, T(), ByteStride()) + begin : nullptr;
        to.offsets[kGateArray] = static_cast<short>(slice.offset_of(gate + slice.begin));
      }
    };
    if (Traits::kIsGeneral || flags.has(kHasGroups)) {
      const RowIndex index = exists ? index_of(segment, row) : RowIndex{0, 0};
      fetch_from(
          [&](const View& view, auto element, const ByteStride&) { return address<decltype(element)>(view, index); });
    } else {
      const unsigned number = exists ? static_cast<unsigned>(segment.first) + static_cast<unsigned>(row) : 0;
      fetch_from([&](const View& view, auto element, const ByteStride& stride) {
        return stride.template address<decltype(element)>(view, number);
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
                                         const Statistics& statistics, Acc mean, const Acc (&weight)[kElements],
                                         int64_t group) const {
    slice.read(d, x, j);
    if (flags.has(kFromOutput)) {
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        d[e] = recover_xhat(d[e], weight[j + e], load_bias(slice.column(j + e), group));
        keep_order();
      }
    } else {
#pragma unroll
      for (int e = 0; e < kStep; ++e) d[e] = fma(d[e], statistics.scale, -mean);
    }
  }

  // Adds this thread's part of a row to the sums. Elements after the end are zeros, and so must be their d.
  __device__ __forceinline__ void add_to_sums(RowSums& sums, int stage, const Statistics& statistics,
                                              const Acc (&weight)[kElements], int64_t group) const {
    const auto slice = Traits::kMapping == Mapping::kVectors ? this->slice : this->slice.rebuilt();
    const X* const x = staged<kX>(stage);
    const T* const dy = staged<kDy>(stage);
    const auto add = [&](auto has_end) {
#pragma unroll
      for (int j = 0; j < kElements; j += kStep) {
        Acc d[kStep], dy_values[kStep];
        if constexpr (Traits::kIsGated) {
          read_gated(d, dy_values, slice, stage, j, statistics);
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
        (!Traits::kIsGeneral && slice.begin + slice.lanes() * kElements <= part_cols)) {
      add(std::false_type());
    } else {
      add(std::true_type());
    }
  }

  // Computes d and the gradient of the norm's output of elements [j, j + kStep) of a gated norm.
  __device__ __forceinline__ void read_gated(Acc (&d)[kStep], Acc (&dn)[kStep], const SliceOf& slice, int stage, int j,
                                             const Statistics& statistics) const {
    Acc gate[kStep];
    slice.read(d, staged<kX>(stage), j);
    slice.read(dn, staged<kDy>(stage), j);
    slice.read(gate, staged<kGateArray>(stage), j);
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      const Acc activated = Activated(gate[e], flags).value;
      flags.has(kGateFirst) ? d[e] *= activated : dn[e] *= activated;
      d[e] = fma(d[e], statistics.scale, -statistics.mean);
    }
  }

  // store_grad_input() of a gated norm, which also stores this thread's part of the gate's gradient.
  __device__ __forceinline__ void store_gated(Acc (&dw)[kElements], Acc (&db)[kElements], int stage,
                                              const Statistics& statistics, const RowMeans& means,
                                              const Acc (&weight)[kElements], int64_t group) const {
    const auto slice = this->slice.rebuilt();
    const bool gate_first = flags.has(kGateFirst);
#pragma unroll
    for (int j = 0; j < kElements; j += kStep) {
      Acc x[kStep], dy[kStep], gate[kStep];
      slice.read(x, staged<kX>(stage), j);
      slice.read(dy, staged<kDy>(stage), j);
      slice.read(gate, staged<kGateArray>(stage), j);
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        const Activated activated(gate[e], flags);
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
      const auto store = [&](auto* to, const Acc(&v)[kStep]) { slice.store(to, j, v, to == nullptr ? 0 : part_cols); };
      store(header(stage).dx, x);
      store(header(stage).grad_gate, gate);
    }
  }

  __device__ __forceinline__ RowMeans compute_means(const RowSums& sums, Acc rstd) const {
    const Divisor<Acc>& cols = plan.cols;
    const Acc xhat = cols.divide(sums[0]) * rstd, g = cols.divide(sums[1]), g_xhat = cols.divide(sums[2]) * rstd;
    if (flags.has(kRms)) return {0, 0, g_xhat};
    return {xhat, g, g_xhat - xhat * g};
  }

  // Stores this thread's part of dx, and adds to its sums of dweight and dbias, whether they are wanted or not. Sums of
  // columns after the end are not stored.
  template <class HasGradSum>
  __device__ __forceinline__ void store_grad_input(HasGradSum has_grad_sum, Acc (&dw)[kElements], Acc (&db)[kElements],
                                                   int stage, const Statistics& statistics, const RowMeans& means,
                                                   const Acc (&weight)[kElements], int64_t group) const {
    const auto slice = Traits::kMapping == Mapping::kVectors ? this->slice : this->slice.rebuilt();
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

}  // namespace
}  // namespace layernorm::cuda
