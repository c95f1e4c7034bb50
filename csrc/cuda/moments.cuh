// The moments of rows: their mean, and the sum of the squared differences from it. The numerical method is that of
// cpu/forward.cpp: one sweep sums the differences from an estimate of the mean and their squares.
#pragma once

#include "row.cuh"

namespace layernorm::cuda {

// The moments of numbers x * row_scale. Their mean is pivot + correction; for RMSNorm it is 0. m2 is the sum of the
// squares of their differences from the mean.
struct Moments {
  Acc pivot, correction, m2, row_scale;

  // Completes the moments from the sums of x * row_scale - pivot and of its square, over as many numbers as `divisor`
  // says. Returns whether the sums must be computed again, with another pivot or row_scale: a pivot that is too far
  // from the mean is replaced by the mean, and if the sums overflow, the numbers are rescaled. Numbers that include NaN
  // or infinity still give NaN.
  __device__ __forceinline__ bool complete(Acc sum, Acc sum_of_squares, const Divisor<Acc>& divisor, bool rms,
                                           bool& is_estimate) {
    correction = rms ? 0 : divisor.divide(sum);
    const Acc correction_squared = divisor.value * correction * correction;
    m2 = sum_of_squares - correction_squared;
    if (m2 < 0) m2 = 0;  // this comparison keeps NaN
    const bool overflows = !(m2 < kInfinity) && row_scale == 1;
    const bool is_far = is_estimate && correction_squared > m2;
    if (overflows) {
      row_scale = kRowScale;
      pivot *= kRowScale;
    } else if (is_far) {
      pivot += correction;
      is_estimate = false;
    }
    return overflows || is_far;
  }
};

// The choices of a forward call that its kernels read beside ForwardParams.
struct ForwardPlan {
  Flags flags;
  ByteStride x_stride, input_stride, output_stride, sum_stride;
  FastDivisor rows;  // of a sample
  Acc eps;
  Divisor<Acc> cols;

  // Returns whether the number of a row gives its addresses: see ByteStride.
  template <class T, class X>
  bool set(const ForwardParams& p) {
    flags = make_flags(p);
    rows = FastDivisor(p.rows);
    eps = static_cast<Acc>(p.eps);
    cols = Divisor<Acc>(p.cols);
    const bool strides_fit = x_stride.set(p.residual.data ? p.residual : p.input, sizeof(X)) &&
                             input_stride.set(p.input, sizeof(T)) && output_stride.set(p.output, sizeof(T)) &&
                             sum_stride.set(p.sum, sizeof(X));
    return strides_fit && p.samples * p.rows <= kMaxRowNumber;
  }
};

// The numbers that normalize a row.
struct alignas(16) Normalizer {
  Acc pivot, correction, row_scale, rstd;  // of x * row_scale

  Normalizer() = default;
  __device__ __forceinline__ Normalizer(const Moments& m, const ForwardPlan& plan)
      : pivot(m.pivot),
        correction(m.correction),
        row_scale(m.row_scale),
        rstd(rescaled_rstd(m.m2 * plan.cols.reciprocal, plan.eps, m.row_scale)) {}

  // The correction is subtracted before any multiplication, so that xhat is exactly 0 for a constant row.
  __device__ __forceinline__ Acc xhat(Acc x) const { return (fma(x, row_scale, -pivot) - correction) * rstd; }

  // Stores the mean and the rstd of x.
  __device__ __forceinline__ void store_statistics(const ForwardParams& p, const ForwardPlan& plan,
                                                   const RowIndex& row) const {
    if (!plan.flags.has(kRms)) *address<Acc>(p.mean, row) = (pivot + correction) * (row_scale == 1 ? 1 : 1 / kRowScale);
    *address<Acc>(p.rstd, row) = undo_row_scale(rstd, plan.eps, row_scale);
  }
};

// The sums of a thread for its part of a row, in two halves so that additions do not wait for each other.
struct MomentSums {
  Acc diffs[2] = {}, squares[2] = {};

  // Adds d = x * row_scale - pivot of the thread's element e.
  __device__ __forceinline__ void add(int e, Acc d) {
    diffs[e % 2] += d;
    squares[e % 2] = fma(d, d, squares[e % 2]);
  }
  __device__ __forceinline__ void store(Acc* sums) const {
    sums[0] = diffs[0] + diffs[1];
    sums[1] = squares[0] + squares[1];
  }
};

// The average of a vector, by which the mean of a row is estimated.
template <int kSize>
__device__ __forceinline__ Acc average(const Acc (&v)[kSize]) {
  Acc mean = 0;
  for (int e = 0; e < kSize; ++e) mean += v[e] * (Acc(1) / kSize);  // a sum of large numbers would overflow
  return mean;
}

// Returns to all threads of a row the sums over them: over some lanes of a warp, a power of two, or over the block.
// Successive calls for rows of blocks alternate `buffer` between 0 and 1, so that one barrier per call suffices. Each
// warp of a block calls before_barrier().
template <int kCount, class F>
__device__ __forceinline__ void sum_row(Acc (&sums)[kCount], int row_threads, int buffer, const F& before_barrier) {
  sum_row_lanes(sums, row_threads);
  if (row_threads != static_cast<int>(blockDim.x)) return;
  __shared__ Acc warp_sums[2][kCount][kMaxBlockWarps];
  const int lane = threadIdx.x % kWarpSize, other = lane % kMaxBlockWarps;
  if (lane == 0) {
    for (int k = 0; k < kCount; ++k) warp_sums[buffer][k][threadIdx.x / kWarpSize] = sums[k];
  }
  before_barrier();
  __syncthreads();
  for (int k = 0; k < kCount; ++k) {
    sums[k] = sum_lanes<kMaxBlockWarps>(other * kWarpSize < row_threads ? warp_sums[buffer][k][other] : 0);
  }
}

// Computes the moments of kRows rows, or of a block's part of a row, from estimates of their means. add_to_sums(sums)
// adds the thread's part of the sums of each row: 2 * kRows numbers. If one row of the warp must be summed again, so
// are the others, with the same result. `buffer` and before_barrier() are those of sum_row().
template <int kRows, class F, class G = DoNothing>
__device__ __forceinline__ void reduce_moments(Moments (&moments)[kRows], const Acc (&pivots)[kRows], int row_threads,
                                               const Divisor<Acc>& cols, bool rms, int& buffer, const F& add_to_sums,
                                               const G& before_barrier = {}) {
  bool is_estimate[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    moments[r] = {pivots[r], 0, 0, 1};
    is_estimate[r] = !rms;
  }
#pragma unroll 1
  for (bool again = true; again; buffer ^= 1) {
    Acc sums[2 * kRows] = {};
    add_to_sums(sums);
    sum_row(sums, row_threads, buffer, before_barrier);
    again = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      again |= moments[r].complete(sums[2 * r], sums[2 * r + 1], cols, rms, is_estimate[r]);
    }
    again = __any_sync(kAllLanes, again);
  }
}

// ---- the parts of a row ---------------------------------------------------------------------------------------------

// The moments of a part of a row as three numbers. m2 is negative, or -0, if the numbers are rescaled.
__device__ __forceinline__ void pack(Acc (&packed)[3], const Moments& m) {
  packed[0] = m.pivot;
  packed[1] = m.correction;
  packed[2] = copysign(m.m2, m.row_scale == 1 ? Acc(1) : Acc(-1));
}
// Unpacks the moments of x * row_scale. If they were packed rescaled, those of x itself overflow: m2 is infinity.
__device__ __forceinline__ Moments unpack(const Acc (&packed)[3], Acc row_scale) {
  const bool is_rescaled = signbit(packed[2]);
  const Acc m2 = abs(packed[2]);
  if (row_scale == 1) return {packed[0], packed[1], is_rescaled ? kInfinity : m2, 1};
  const Acc factor = is_rescaled ? 1 : row_scale;
  return {packed[0] * factor, packed[1] * factor, m2 * factor * factor, row_scale};
}

// Merges the moments of a row's parts, which are packed, in an order that depends only on their number. Each part has
// `part_cols` columns, and the last one `last_part_cols`. One warp calls this.
__device__ __forceinline__ Moments merge_parts(const Acc (*parts)[3], int num_parts, Acc part_cols, Acc last_part_cols,
                                               const Divisor<Acc>& cols) {
  const int lane = threadIdx.x % kWarpSize;
  for (Acc row_scale = 1;; row_scale = kRowScale) {
    const Acc pivot = unpack(parts[0], row_scale).pivot;
    const auto add_parts = [&](const auto& term) {  // the sum of term(count, mean - pivot, m2) over the parts
      Acc sum = 0;
#pragma unroll 1
      for (int i = lane; i < num_parts; i += kWarpSize) {
        const Moments m = unpack(parts[i], row_scale);
        sum += term(i + 1 == num_parts ? last_part_cols : part_cols, (m.pivot - pivot) + m.correction, m.m2);
      }
      return sum_lanes<kWarpSize>(sum);
    };
    const Acc correction = cols.divide(add_parts([](Acc count, Acc d, Acc) { return count * d; }));
    const Acc m2 =
        add_parts([&](Acc count, Acc d, Acc m2) { return fma(count * (d - correction), d - correction, m2); });
    if (m2 < kInfinity || row_scale != 1) return {pivot, correction, m2, row_scale};
  }
}

}  // namespace layernorm::cuda
