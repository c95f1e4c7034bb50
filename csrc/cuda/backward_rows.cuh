// The rows of a block in backward: the segment to which they belong, their staging in shared memory, their sums, and
// their gradients. backward.cu has the formulas and the mapping of threads, and docs/design.md the terms: part, stage,
// round, segment.
#pragma once

#include <algorithm>

#include "parts.cuh"

namespace layernorm::cuda {

struct BackwardPlan : GradientPlan, RowDivision {
  int rows_per_round, stages;
  int joined;            // blocks of a cluster that add their sums of dweight and dbias, or 1
  int log2_joined_cols;  // columns that each of them adds
  int ring_bytes;        // of dynamic shared memory; then come the sums that the joined blocks send
  int64_t pitch;         // elements from row to row of the workspace
  void* part_values;     // of PartExchange
  ByteStride x_stride, dy_stride, dx_stride, grad_sum_stride, statistics_stride;
  Divisor<Acc> cols;

  // Returns whether the number of a row gives its addresses: see ByteStride.
  template <class T, class X>
  bool set(const BackwardParams& p) {
    flags = make_flags(p);
    pitch = round_up(p.cols, kVectorSize<X>);
    cols = Divisor<Acc>(p.cols);
    const bool strides_fit = x_stride.set(p.input, sizeof(X)) && dy_stride.set(p.grad_output, sizeof(T)) &&
                             dx_stride.set(p.grad_input, sizeof(X)) && grad_sum_stride.set(p.grad_sum, sizeof(X)) &&
                             statistics_stride.set(p.rstd, sizeof(Acc));
    const bool same_strides = !p.mean.data || p.mean.row_stride == p.rstd.row_stride;
    return strides_fit && same_strides && p.samples * p.rows <= kMaxRowNumber;
  }
};

namespace {

// The sums over a row of d (see Statistics), g and g * d.
using RowSums = PartValue;

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

// A thread's work on the rows of its block.
template <class T, class X, class Path>
struct Rows {
  using SliceOf = Slice<X, Path::kMapping, Path::kLanes>;
  using Index = typename Path::Index;
  using Header = RowHeader<T, X, Path::kIsGeneral ? 3 : 2>;
  static constexpr int kElements = SliceOf::kElements, kVec = SliceOf::kVec;
  // Elements that are processed together.
  static constexpr int kStep = Path::kIsGeneral ? 2 : Path::kMapping == Mapping::kElements ? std::min(kVec, 4) : kVec;
  static constexpr bool kLoadsAhead = Path::kMapping == Mapping::kVectors && Path::kIsBlock;  // all of grad_sum
  static constexpr int kMaxStages = Path::kIsGeneral ? 2 : 3;                                 // or one less
  // The shared memory of a warp, for one stage: x, dy, the headers of its rows, and the gate of a gated norm.
  static constexpr int kMaxRows = Path::kIsBlock ? 1 : kWarpSize / kMinLanes;  // of a warp
  static constexpr int kDyBegin = SliceOf::template staged_bytes<X>(kMaxRows);
  static constexpr int kHeaderBegin = kDyBegin + SliceOf::template staged_bytes<T>(kMaxRows);
  static constexpr int kGateBegin = kHeaderBegin + kMaxRows * static_cast<int>(sizeof(Header));
  static constexpr int kStageBytes = kGateBegin + (Path::kIsGated ? SliceOf::template staged_bytes<T>(kMaxRows) : 0);

  const BackwardParams& p;
  const BackwardPlan& plan;
  const Flags flags;
  const SliceOf slice;
  const int row_in_round;
  const Index begin;  // the first column of the block's part
  const int part_cols;
  unsigned char* const shared;  // of the warp

  // The number of a row in a round of a segment; -1 if it does not exist.
  __device__ __forceinline__ int row_of(const Segment<Index>& segment, int round) const {
    const int row = round * plan.rows_per_round + row_in_round;
    return row < segment.rows ? row : -1;
  }
  __device__ __forceinline__ Header& header(int stage) const {
    Header* const headers = reinterpret_cast<Header*>(shared + stage + kHeaderBegin);
    return headers[Path::kIsBlock ? 0 : slice.row];
  }

  // Starts to copy a row, which may not exist, to the shared memory of a stage.
  __device__ __forceinline__ void fetch(const Segment<Index>& segment, int row, int stage) const {
    const bool exists = row >= 0;
    const int cols = exists ? part_cols : 0;
    const Index number = exists ? segment.first + row : 0;
    with_addresses_of_row<Path::kIsGeneral>(number, flags.has(kHasSamples), plan.rows, [&](const auto& address_in) {
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
      if (Path::kIsGated) slice.fetch(shared + stage + kGateBegin, gate, cols);
      if (slice.lane > 0) return;
      Header& to = header(stage);
      const Acc* const rstd = address_in(p.rstd, Acc(), plan.statistics_stride);
      const bool has_mean = exists && !flags.has(kRms | kMemoryEfficient);
      async_copy<sizeof(Acc)>(&to.rstd, rstd, exists ? sizeof(Acc) : 0);
      async_copy<sizeof(Acc)>(&to.mean, has_mean ? address_in(p.mean, Acc(), plan.statistics_stride) : rstd,
                              has_mean ? sizeof(Acc) : 0);
      to.dx = exists && flags.has(kGradInput) ? address_in(p.grad_input, X(), plan.dx_stride) + begin : nullptr;
      to.grad_sum = grad_sum;
      if constexpr (Path::kMapping != Mapping::kVectors) {
        to.offsets[kX] = static_cast<short>(slice.offset_of(x + slice.begin));
        to.offsets[kDy] = static_cast<short>(slice.offset_of(dy + slice.begin));
      }
      if constexpr (Path::kIsGated) {
        to.grad_gate = exists && p.grad_gate.data ? address_in(p.grad_gate, T(), ByteStride()) + begin : nullptr;
        to.offsets[kGateArray] = static_cast<short>(slice.offset_of(gate + slice.begin));
      }
    });
  }

  // The bias of a column of the part; zero without a bias or after the end.
  __device__ __forceinline__ Acc load_bias(int column, int64_t sample) const {
    return flags.has(kBias) && column < part_cols ? load_element<T>(p.bias, sample, begin + column, flags) : 0;
  }

  // This thread's first elements of the arrays of a stage.
  struct Arrays {
    const X* x;
    const T *dy, *gate;
  };
  __device__ __forceinline__ Arrays arrays_at(int stage) const {
    if constexpr (Path::kIsGated) return {staged<kX>(stage), staged<kDy>(stage), staged<kGateArray>(stage)};
    return {staged<kX>(stage), staged<kDy>(stage), nullptr};
  }
  // Reads elements [j, j + kStep) of a row: d (see Statistics), and the gradient of the norm's output.
  __device__ __forceinline__ void read(Acc (&d)[kStep], Acc (&dn)[kStep], const SliceOf& slice, const Arrays& from,
                                       int j, const Statistics& statistics, Acc mean, const Acc (&weight)[kElements],
                                       int64_t sample) const {
    slice.read(d, from.x, j);
    slice.read(dn, from.dy, j);
    if constexpr (Path::kIsGated) {
      Acc gate[kStep];
      slice.read(gate, from.gate, j);
      for (int e = 0; e < kStep; ++e) {
        const Acc activated = Activated(gate[e], flags).value;
        flags.has(kGateFirst) ? d[e] *= activated : dn[e] *= activated;
      }
    }
    for (int e = 0; e < kStep; ++e) {
      if (flags.has(kMemoryEfficient)) {
        d[e] = recover_xhat(d[e], weight[j + e], load_bias(slice.column(j + e), sample));
        keep_order();
      } else {
        d[e] = fma(d[e], statistics.row_scale, -mean);
      }
    }
  }

  // Adds this thread's part of a row to the sums, unless they are loaded. Elements after the end are zeros, and so must
  // be their d.
  __device__ __forceinline__ void add_to_sums(RowSums& sums, int stage, const Statistics& statistics,
                                              const Acc (&weight)[kElements], int64_t sample) const {
    if (flags.has(kLoadsSums)) return;
    const auto slice = this->slice.rebuilt();
    const Arrays from = arrays_at(stage);
    const auto add = [&](auto has_end) {
#pragma unroll
      for (int j = 0; j < kElements; j += kStep) {
        Acc d[kStep], dn[kStep];
        const bool vector_exists = Path::kMapping != Mapping::kVectors || slice.column(j) < part_cols;
        read(d, dn, slice, from, j, statistics, vector_exists ? statistics.mean : 0, weight, sample);
        for (int e = 0; e < kStep; ++e) {
          if (has_end.value && slice.column(j + e) >= part_cols) d[e] = 0;
          const Acc g = dn[e] * weight[j + e];
          sums[0] += d[e];
          sums[1] += g;
          sums[2] = fma(g, d[e], sums[2]);
        }
      }
    };
    if (Path::kMapping == Mapping::kVectors ||
        (!Path::kIsGeneral && slice.begin + slice.lanes() * kElements <= part_cols)) {
      add(std::false_type());
    } else {
      add(std::true_type());
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
  __device__ __forceinline__ void store_gradients(HasGradSum has_grad_sum, Acc (&dw)[kElements], Acc (&db)[kElements],
                                                  int stage, const Statistics& statistics, const RowMeans& means,
                                                  const Acc (&weight)[kElements], int64_t sample) const {
    const auto slice = this->slice.rebuilt();
    const Arrays from = arrays_at(stage);
    X* const dx = compute_once(header(stage).dx);
    const int stored_cols = dx == nullptr ? 0 : part_cols;
    Vector<X, kStep> dsum[kElements / kStep];
    const auto load_dsum = [&](int j) {
      dsum[j / kStep] = slice.template load<kStep>(header(stage).grad_sum, j, stored_cols);
    };
    if (kLoadsAhead && has_grad_sum) {
#pragma unroll
      for (int j = 0; j < kElements; j += kStep) load_dsum(j);
    }
#pragma unroll
    for (int j = 0; j < kElements; j += kStep) {
      Acc xhat[kStep], dn[kStep], dx_values[kStep];
      read(xhat, dn, slice, from, j, statistics, statistics.mean, weight, sample);
      for (int e = 0; e < kStep; ++e) {
        xhat[e] = fma(xhat[e], statistics.rstd, -means.xhat);
        db[j + e] += dn[e];
        dw[j + e] = fma(dn[e], xhat[e], dw[j + e]);
        dx_values[e] = means.grad_input(dn[e] * weight[j + e] - means.g, xhat[e], statistics);
      }
      if (has_grad_sum) {
        if (!kLoadsAhead) load_dsum(j);
        Acc values[kStep];
        widen(values, dsum[j / kStep]);
        for (int e = 0; e < kStep; ++e) dx_values[e] += values[e];
      }
      if constexpr (Path::kIsGated) apply_gate(dx_values, xhat, slice, from, stage, j, weight, sample);
      slice.store(dx, j, dx_values, stored_cols);
    }
  }

 private:
  // Turns elements [j, j + kStep) of a gated norm's du into dx, and stores this thread's part of the gate's gradient.
  __device__ __forceinline__ void apply_gate(Acc (&du)[kStep], const Acc (&xhat)[kStep], const SliceOf& slice,
                                             const Arrays& from, int stage, int j, const Acc (&weight)[kElements],
                                             int64_t sample) const {
    Acc x[kStep], dy[kStep], gate[kStep];
    slice.read(x, from.x, j);
    slice.read(dy, from.dy, j);
    slice.read(gate, from.gate, j);
    for (int e = 0; e < kStep; ++e) {
      const Activated activated(gate[e], flags);
      if (flags.has(kGateFirst)) {
        gate[e] = du[e] * x[e] * activated.derivative;
        du[e] *= activated.value;
      } else {
        gate[e] = dy[e] * fma(xhat[e], weight[j + e], load_bias(slice.column(j + e), sample)) * activated.derivative;
      }
    }
    T* const to = header(stage).grad_gate;
    slice.store(to, j, gate, to == nullptr ? 0 : part_cols);
  }
  // This thread's first element of an array.
  template <StagedArray kArray>
  __device__ __forceinline__ auto* staged(int stage) const {
    constexpr int kBegin = kArray == kX ? 0 : kArray == kDy ? kDyBegin : kGateBegin;
    int offset = 0;
    if constexpr (Path::kMapping != Mapping::kVectors) offset = header(stage).offsets[kArray];
    return slice.template staged<std::conditional_t<kArray == kX, X, T>>(shared + stage + kBegin, offset);
  }
};

}  // namespace
}  // namespace layernorm::cuda
