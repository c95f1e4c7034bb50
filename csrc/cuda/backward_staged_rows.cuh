// BackwardStagedRows: a thread's work on the rows of a block in backward. The kernel in backward_kernel.cuh calls
// fetch(), which copies rows to shared memory, sum_row(), and store_gradients(), which stores dx and adds to the sums
// of the columns. backward.cu has the formulas and the mapping of threads.
#pragma once

#include <algorithm>

#include "block_exchange.cuh"

namespace layernorm::cuda {

// The values that the host computes from BackwardParams for backward_staged.
struct BackwardPlan : GradientPlan, RowDivision {
  int rows_per_iteration;    // per block
  int stages;                // per warp
  int cluster_segments;      // segments whose sums one cluster adds (ClusterColumnSums), one per block; else 1
  int log2_owned_cols;       // each block of such a cluster adds the sums of 1 << log2_owned_cols columns
  int ring_bytes;            // dynamic shared memory for the rings of all warps, which use their stages in turn; the
                             // sums of ClusterColumnSums follow
  int64_t pitch;             // elements from row to row of the partial sums in the workspace
  void* exchange_workspace;  // of BlockExchange
  ByteStride x_stride, dy_stride, dx_stride, grad_sum_stride, statistics_stride;
  FloatDivisor<Acc> cols;

  // Sets the members that depend on `p` alone. Returns whether ByteStride and ints can address all rows, with one
  // stride for mean and rstd. Otherwise the host chooses the variant GeneralRows or GatedRows, which has 64-bit
  // addresses.
  template <class T, class X>
  bool initialize(const BackwardParams& p) {
    flags = make_flags(p);
    pitch = round_up(p.cols, kVectorSize<X>);
    cols = FloatDivisor<Acc>(p.cols);
    const bool strides_fit = x_stride.set(p.input, sizeof(X)) && dy_stride.set(p.grad_output, sizeof(T)) &&
                             dx_stride.set(p.grad_input, sizeof(X)) && grad_sum_stride.set(p.grad_sum, sizeof(X)) &&
                             statistics_stride.set(p.rstd, sizeof(Acc));
    const bool same_strides = !p.mean.data || p.mean.row_stride == p.rstd.row_stride;
    return strides_fit && same_strides && p.samples * p.rows <= kMaxRowNumber;
  }
};

namespace {

// The sums over a row, or over a block's columns of it, of d (see ScaledStatistics), g (backward.cu) and g * d.
using RowSums = PartialResult;
enum RowSum { kSumOfD, kSumOfG, kSumOfGD };

// The arrays whose rows are staged. Only gated norms have a gate.
enum StagedArray { kX, kDy, kGate };

// A stage holds this beside the elements of a row: the statistics, and addresses of arrays that are not staged.
template <class T, class X, int kArrays>
struct alignas(16) BackwardRowHeader {
  Acc mean, rstd;
  X* dx;  // the block's columns; null if dx is not computed or the row does not exist
  union {
    const X* grad_sum;
    T* grad_gate;  // of a gated norm, which has no grad_sum; null if it is not computed or the row does not exist
  };
  short misalignments[kArrays];  // by StagedArray: see ThreadColumns::misalignment()
};

// A thread's work on its columns of the staged rows. `stage_offset` is the offset in bytes of a stage in the warp's
// ring. A stage has
//
//   [ x, of type X | dy, of T | headers of the warp's rows | for a gated norm the gate, of T ]
template <class T, class X, class Variant>
struct BackwardStagedRows {
  using Columns = ThreadColumns<X, Variant::kMapping, Variant::kLanes>;
  using Index = typename Variant::Index;
  using Header = BackwardRowHeader<T, X, Variant::kIsGeneral ? 3 : 2>;
  static constexpr int kElements = Columns::kElements, kVec = Columns::kVec;
  // Elements that a thread processes in one step of a loop: a vector, or less if that would take too many registers.
  static constexpr int kMaxStep = Variant::kIsGeneral ? 2 : Variant::kMapping == Mapping::kElements ? 4 : 8;
  static constexpr int kStep = std::min(kVec, kMaxStep);
  // Whether a thread loads its elements of grad_sum before it computes dx, so that it waits for memory once.
  static constexpr bool kLoadsGradSumFirst = Variant::kMapping == Mapping::kVectors && Variant::kRowSpansWarps;
  static constexpr int kMaxStages = Variant::kIsGeneral ? 2 : 3;  // plan_stages() chooses this number, or one less
  static constexpr int kMaxRows = Variant::kRowSpansWarps ? 1 : kWarpSize / kMinLanes;  // per warp
  // Bytes from the begin of a stage to each of its parts, and bytes of a whole stage.
  static constexpr int kDyBegin = Columns::template staged_bytes<X>(kMaxRows);
  static constexpr int kHeaderBegin = kDyBegin + Columns::template staged_bytes<T>(kMaxRows);
  static constexpr int kGateBegin = kHeaderBegin + kMaxRows * static_cast<int>(sizeof(Header));
  static constexpr int kStageBytes = kGateBegin + (Variant::kIsGated ? Columns::template staged_bytes<T>(kMaxRows) : 0);

  const BackwardParams& p;
  const BackwardPlan& plan;
  const Flags flags;
  const Columns columns;
  const int row_in_iteration;   // which of the rows_per_iteration rows of the block this thread has
  const Index block_begin;      // the block's first column of a row
  const int block_cols;         // the block's columns; fewer in the last block of a row
  unsigned char* const shared;  // the warp's ring

  // The index in a segment of the row that this thread has in an iteration; -1 if the row does not exist.
  __device__ __forceinline__ int row_in_segment(const Segment<Index>& segment, int iteration) const {
    const int row = iteration * plan.rows_per_iteration + row_in_iteration;
    return row < segment.rows ? row : -1;
  }
  // The header of this thread's row.
  __device__ __forceinline__ Header& header(int stage_offset) const {
    Header* const headers = reinterpret_cast<Header*>(shared + stage_offset + kHeaderBegin);
    return headers[Variant::kRowSpansWarps ? 0 : columns.row_in_warp];
  }

  // Starts to copy the warp's columns of a row to a stage, and writes the header of the row. `row` is the index in the
  // segment; if it is -1, the copies are zeros.
  __device__ __forceinline__ void fetch(const Segment<Index>& segment, int row, int stage_offset) const {
    const bool exists = row >= 0;
    const int cols = exists ? block_cols : 0;
    const Index row_number = exists ? segment.first_row + row : 0;
    const bool several_samples = flags.has(kSeveralSamples);
    with_row_addresses<Variant::kIsGeneral>(
        row_number, several_samples, plan.rows_per_sample, [&](const auto& address_in) {
          const X* const x = address_in(p.input, X(), plan.x_stride) + block_begin;
          const T* const dy = address_in(p.grad_output, T(), plan.dy_stride) + block_begin;
          columns.fetch(shared + stage_offset, x, cols);
          columns.fetch(shared + stage_offset + kDyBegin, dy, cols);
          const X* const grad_sum = address_in(p.grad_sum, X(), plan.grad_sum_stride) + block_begin;
          if (flags.has(kGradSum)) {
#pragma unroll
            for (int j = 0; j < kElements; j += kVec) {
              if (columns.column(j) < cols) prefetch_to_l2(grad_sum + columns.column(j));
            }
          }
          const T* const gate = address_in(p.gate, T(), ByteStride()) + block_begin;
          if (Variant::kIsGated) columns.fetch(shared + stage_offset + kGateBegin, gate, cols);
          if (columns.lane_in_row > 0) return;
          Header& to = header(stage_offset);
          const Acc* const rstd = address_in(p.rstd, Acc(), plan.statistics_stride);
          const bool has_mean = exists && !flags.has(kRms | kMemoryEfficient);
          async_copy<sizeof(Acc)>(&to.rstd, rstd, exists ? sizeof(Acc) : 0);
          async_copy<sizeof(Acc)>(&to.mean, has_mean ? address_in(p.mean, Acc(), plan.statistics_stride) : rstd,
                                  has_mean ? sizeof(Acc) : 0);
          to.dx =
              exists && flags.has(kGradInput) ? address_in(p.grad_input, X(), plan.dx_stride) + block_begin : nullptr;
          to.grad_sum = grad_sum;
          if constexpr (Variant::kMapping != Mapping::kVectors) {
            to.misalignments[kX] = static_cast<short>(columns.misalignment(x + columns.warp_begin));
            to.misalignments[kDy] = static_cast<short>(columns.misalignment(dy + columns.warp_begin));
          }
          if constexpr (Variant::kIsGated) {
            to.grad_gate =
                exists && p.grad_gate.data ? address_in(p.grad_gate, T(), ByteStride()) + block_begin : nullptr;
            to.misalignments[kGate] = static_cast<short>(columns.misalignment(gate + columns.warp_begin));
          }
        });
  }

  // The bias of one of the block's columns; zero without a bias or after the end.
  __device__ __forceinline__ Acc load_bias(int column, int64_t sample) const {
    const bool exists = flags.has(kBias) && column < block_cols;
    return exists ? load_weight_element<T>(p.bias, sample, block_begin + column, flags) : 0;
  }

  // The addresses of this thread's element 0 in the arrays of a stage.
  struct Arrays {
    const X* x;
    const T *dy, *gate;
  };
  __device__ __forceinline__ Arrays arrays_at(int stage_offset) const {
    if constexpr (Variant::kIsGated)
      return {staged<kX>(stage_offset), staged<kDy>(stage_offset), staged<kGate>(stage_offset)};
    return {staged<kX>(stage_offset), staged<kDy>(stage_offset), nullptr};
  }
  // Reads elements [j, j + kStep) of a row, and computes d (see ScaledStatistics) and dn, which is dy except in a gated
  // norm (backward.cu). scaled_mean is statistics.scaled_mean, or 0 for elements after the end, so that their d is 0.
  __device__ __forceinline__ void read(Acc (&d)[kStep], Acc (&dn)[kStep], const Columns& columns, const Arrays& from,
                                       int j, const ScaledStatistics& statistics, Acc scaled_mean,
                                       const Acc (&weight)[kElements], int64_t sample) const {
    columns.read_shared(d, from.x, j);
    columns.read_shared(dn, from.dy, j);
    if constexpr (Variant::kIsGated) {
      Acc gate[kStep];
      columns.read_shared(gate, from.gate, j);
      for (int e = 0; e < kStep; ++e) {
        const Acc activated = Activated(gate[e], flags).value;
        flags.has(kGateFirst) ? d[e] *= activated : dn[e] *= activated;
      }
    }
    for (int e = 0; e < kStep; ++e) {
      if (flags.has(kMemoryEfficient)) {
        d[e] = recover_xhat(d[e], weight[j + e], load_bias(columns.column(j + e), sample));
        compiler_fence();  // loads the bias of one element at a time, which takes fewer registers
      } else {
        d[e] = fma(d[e], statistics.row_scale, -scaled_mean);
      }
    }
  }

  // Adds this thread's elements of a row to `sums`, except in a second launch, which loads the sums of the first. After
  // the end of the row, x and dy are 0, and d must be 0, too: with kVectors, such vectors get a scaled_mean of 0, and
  // other mappings replace d.
  __device__ __forceinline__ void sum_row(RowSums& sums, int stage_offset, const ScaledStatistics& statistics,
                                          const Acc (&weight)[kElements], int64_t sample) const {
    if (flags.has(kSecondLaunch)) return;
    const auto columns = this->columns.recomputed();
    const Arrays from = arrays_at(stage_offset);
    const auto add = [&](auto has_end) {  // has_end: whether d after the end must be replaced
#pragma unroll
      for (int j = 0; j < kElements; j += kStep) {
        Acc d[kStep], dn[kStep];
        const bool vector_exists = Variant::kMapping != Mapping::kVectors || columns.column(j) < block_cols;
        read(d, dn, columns, from, j, statistics, vector_exists ? statistics.scaled_mean : 0, weight, sample);
        for (int e = 0; e < kStep; ++e) {
          if (has_end.value && columns.column(j + e) >= block_cols) d[e] = 0;
          const Acc g = dn[e] * weight[j + e];
          sums[kSumOfD] += d[e];
          sums[kSumOfG] += g;
          sums[kSumOfGD] = fma(g, d[e], sums[kSumOfGD]);
        }
      }
    };
    if (Variant::kMapping == Mapping::kVectors ||
        (!Variant::kIsGeneral && columns.warp_begin + columns.row_lanes() * kElements <= block_cols)) {
      add(std::false_type());
    } else {
      add(std::true_type());
    }
  }

  // The means of a row from its sums over all columns.
  __device__ __forceinline__ RowMeans compute_means(const RowSums& sums, Acc scaled_rstd) const {
    const auto mean_of = [&](RowSum which) { return plan.cols.divide(sums[which]); };
    const Acc xhat = mean_of(kSumOfD) * scaled_rstd, g = mean_of(kSumOfG), g_xhat = mean_of(kSumOfGD) * scaled_rstd;
    if (flags.has(kRms)) return {0, 0, g_xhat};
    return {xhat, g, g_xhat - xhat * g};
  }

  // Stores this thread's columns of dx and of the gate's gradient, and adds the row's terms of dweight and dbias to
  // `dw` and `db`. It adds them even if the call does not need these gradients, because a branch costs more. It also
  // adds to columns after the end of the row, which the kernel does not store.
  template <class HasGradSum>
  __device__ __forceinline__ void store_gradients(HasGradSum has_grad_sum, Acc (&dw)[kElements], Acc (&db)[kElements],
                                                  int stage_offset, const ScaledStatistics& statistics,
                                                  const RowMeans& means, const Acc (&weight)[kElements],
                                                  int64_t sample) const {
    const auto columns = this->columns.recomputed();
    const Arrays from = arrays_at(stage_offset);
    X* const dx = keep_in_register(header(stage_offset).dx);
    const int stored_cols = dx == nullptr ? 0 : block_cols;
    Vector<X, kStep> grad_sum[kElements / kStep];
    const auto load_grad_sum = [&](int j) {
      grad_sum[j / kStep] = columns.template load_global<kStep>(header(stage_offset).grad_sum, j, stored_cols);
    };
    if (kLoadsGradSumFirst && has_grad_sum) {
#pragma unroll
      for (int j = 0; j < kElements; j += kStep) load_grad_sum(j);
    }
#pragma unroll
    for (int j = 0; j < kElements; j += kStep) {
      Acc xhat[kStep], dn[kStep], dx_values[kStep];
      read(xhat, dn, columns, from, j, statistics, statistics.scaled_mean, weight, sample);
      for (int e = 0; e < kStep; ++e) {
        xhat[e] = fma(xhat[e], statistics.scaled_rstd, -means.mean_xhat);
        db[j + e] += dn[e];
        dw[j + e] = fma(dn[e], xhat[e], dw[j + e]);
        dx_values[e] = means.dx(dn[e] * weight[j + e] - means.mean_g, xhat[e], statistics);
      }
      if (has_grad_sum) {
        if (!kLoadsGradSumFirst) load_grad_sum(j);
        Acc values[kStep];
        widen(values, grad_sum[j / kStep]);
        for (int e = 0; e < kStep; ++e) dx_values[e] += values[e];
      }
      if constexpr (Variant::kIsGated)
        backward_of_gate(dx_values, xhat, columns, from, stage_offset, j, weight, sample);
      columns.store_global(dx, j, dx_values, stored_cols);
    }
  }

 private:
  // Stores elements [j, j + kStep) of the gate's gradient. With gate_first, multiplies du, the gradient of x * f(z), by
  // f(z), which gives dx.
  __device__ __forceinline__ void backward_of_gate(Acc (&du)[kStep], const Acc (&xhat)[kStep], const Columns& columns,
                                                   const Arrays& from, int stage_offset, int j,
                                                   const Acc (&weight)[kElements], int64_t sample) const {
    Acc x[kStep], dy[kStep], gate[kStep];
    columns.read_shared(x, from.x, j);
    columns.read_shared(dy, from.dy, j);
    columns.read_shared(gate, from.gate, j);
    for (int e = 0; e < kStep; ++e) {
      const Activated activated(gate[e], flags);
      if (flags.has(kGateFirst)) {
        gate[e] = du[e] * x[e] * activated.derivative;
        du[e] *= activated.value;
      } else {
        gate[e] = dy[e] * fma(xhat[e], weight[j + e], load_bias(columns.column(j + e), sample)) * activated.derivative;
      }
    }
    T* const to = header(stage_offset).grad_gate;
    columns.store_global(to, j, gate, to == nullptr ? 0 : block_cols);
  }
  // The address of this thread's element 0 of an array in a stage.
  template <StagedArray kArray>
  __device__ __forceinline__ auto* staged(int stage_offset) const {
    constexpr int kBegin = kArray == kX ? 0 : kArray == kDy ? kDyBegin : kGateBegin;
    int misalignment = 0;
    if constexpr (Variant::kMapping != Mapping::kVectors) misalignment = header(stage_offset).misalignments[kArray];
    return columns.template staged_elements<std::conditional_t<kArray == kX, X, T>>(shared + stage_offset + kBegin,
                                                                                    misalignment);
  }
};

}  // namespace
}  // namespace layernorm::cuda
