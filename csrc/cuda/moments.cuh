// The moments of rows in forward: the mean, and the sum m2 of the squared differences from it. A sweep over a row sums
// d = x - center and d^2, where center is an estimate of the mean, the average of a few elements. Then mean = center +
// sum(d) / cols, and m2 = sum(d^2) - sum(d)^2 / cols. The sweep is repeated if the estimate is more than a standard
// deviation off, or if a sum overflows. Both are rare. cpu/forward.cpp has the error bound.
#pragma once

#include "row.cuh"

namespace layernorm::cuda {

// The moments of x * row_scale over a row or some of its columns. The mean is center + correction; both are 0 for
// RMSNorm.
struct Moments {
  Acc center, correction, m2, row_scale;

  // Sets correction and m2 from the sums of d and d^2 over `cols` columns, with d = x * row_scale - center. Returns
  // whether the sums must be repeated, with another row_scale because a sum has overflowed, or with another center
  // because the estimate is too far off. Sums of a row with NaN or infinity are NaN, and are also repeated once.
  __device__ __forceinline__ bool set_from_sums(Acc sum, Acc sum_of_squares, const FloatDivisor<Acc>& cols, bool rms,
                                                bool& center_is_estimate) {
    correction = rms ? 0 : cols.divide(sum);
    const Acc sum_of_squared_corrections = cols.value * correction * correction;
    m2 = sum_of_squares - sum_of_squared_corrections;
    if (m2 < 0) m2 = 0;  // this comparison keeps NaN
    const bool overflows = !(m2 < kInfinity) && row_scale == 1;
    const bool is_far = center_is_estimate && sum_of_squared_corrections > m2;
    if (overflows) {
      row_scale = kRowScale;
      center *= kRowScale;
    } else if (is_far) {
      center += correction;
      center_is_estimate = false;
    }
    return overflows || is_far;
  }
};

// The values that the host computes from ForwardParams for the kernels of rows.
struct ForwardPlan {
  Flags flags;
  ByteStride x_stride, input_stride, output_stride, sum_stride;  // x_stride: that of the residual, or else of the input
  IntegerDivisor rows_per_sample;
  Acc eps;
  FloatDivisor<Acc> cols;

  // Sets the members. Returns whether ByteStride and ints can address all rows. Otherwise the host chooses the variant
  // GeneralRows or GatedRows, which has 64-bit addresses.
  template <class T, class X>
  bool initialize(const ForwardParams& p) {
    flags = make_flags(p);
    rows_per_sample = IntegerDivisor(p.rows);
    eps = static_cast<Acc>(p.eps);
    cols = FloatDivisor<Acc>(p.cols);
    const bool strides_fit = x_stride.set(p.residual.data ? p.residual : p.input, sizeof(X)) &&
                             input_stride.set(p.input, sizeof(T)) && output_stride.set(p.output, sizeof(T)) &&
                             sum_stride.set(p.sum, sizeof(X));
    return strides_fit && p.samples * p.rows <= kMaxRowNumber;
  }
};

// Normalizes the elements of a row: xhat = (x * row_scale - center - correction) * rstd.
struct alignas(16) Normalizer {
  Acc center, correction, row_scale, rstd;  // of x * row_scale

  Normalizer() = default;
  __device__ __forceinline__ Normalizer(const Moments& m, const ForwardPlan& plan)
      : center(m.center),
        correction(m.correction),
        row_scale(m.row_scale),
        rstd(rescaled_rstd(m.m2 * plan.cols.reciprocal, plan.eps, m.row_scale)) {}

  // The correction is subtracted before the multiplication by rstd, so that xhat is exactly 0 for a constant row.
  __device__ __forceinline__ Acc xhat(Acc x) const { return (fma(x, row_scale, -center) - correction) * rstd; }

  // Stores the mean and the rstd of x, from those of x * row_scale. One thread of the row calls this.
  __device__ __forceinline__ void store_statistics(const ForwardParams& p, const ForwardPlan& plan,
                                                   const RowIndex& row) const {
    if (!plan.flags.has(kRms))
      *address<Acc>(p.mean, row) = (center + correction) * (row_scale == 1 ? 1 : 1 / kRowScale);
    *address<Acc>(p.rstd, row) = undo_row_scale(rstd, plan.eps, row_scale);
  }
};

// A thread's sums of d and d^2 in a row. Even and odd elements have sums of their own, so that successive additions do
// not wait for each other.
struct MomentSums {
  Acc d_sums[2] = {}, squares[2] = {};

  // Adds d = x * row_scale - center of element e of a vector.
  __device__ __forceinline__ void add(int e, Acc d) {
    d_sums[e % 2] += d;
    squares[e % 2] = fma(d, d, squares[e % 2]);
  }
  // Sets sums[0] to the sum of d, and sums[1] to that of d^2.
  __device__ __forceinline__ void store(Acc* sums) const {
    sums[0] = d_sums[0] + d_sums[1];
    sums[1] = squares[0] + squares[1];
  }
};

// The average of a vector: the estimate of a row's mean.
template <int kSize>
__device__ __forceinline__ Acc average(const Acc (&v)[kSize]) {
  Acc mean = 0;
  for (int e = 0; e < kSize; ++e) mean += v[e] * (Acc(1) / kSize);  // a sum before the product might overflow
  return mean;
}

// A row's sums by warp in shared memory, for sum_over_row().
template <int kCount>
using WarpSumsOfRow = Acc[2][kCount][kMaxBlockWarps];  // [buffer][sum][warp]

// Replaces each thread's sums by the totals over the row_threads threads that share its row. These are 1, 2, 4, ... or
// 32 lanes of a warp, or the whole block. A block stores the sums of its warps in shared memory; after a barrier, each
// warp adds them: lane w loads the sums of warp w. Successive calls alternate `buffer` between 0 and 1, so that no
// second barrier is needed before the next call overwrites sums. All warps of the block call before_barrier(), work of
// the caller that must be done before the barrier.
template <int kCount, class F>
__device__ __forceinline__ void sum_over_row(Acc (&sums)[kCount], int row_threads, int buffer,
                                             const F& before_barrier) {
  sum_over_row_lanes(sums, row_threads);
  if (row_threads != static_cast<int>(blockDim.x)) return;
  __shared__ WarpSumsOfRow<kCount> warp_sums;
  const int lane = threadIdx.x % kWarpSize, added_warp = lane % kMaxBlockWarps;
  if (lane == 0) {
    for (int k = 0; k < kCount; ++k) warp_sums[buffer][k][threadIdx.x / kWarpSize] = sums[k];
  }
  before_barrier();
  __syncthreads();
  for (int k = 0; k < kCount; ++k) {
    sums[k] =
        sum_over_lanes<kMaxBlockWarps>(added_warp * kWarpSize < row_threads ? warp_sums[buffer][k][added_warp] : 0);
  }
}

// Computes the moments of a thread's kRows rows (or of its block's columns of a row). `centers` are estimates of the
// means. add_to_sums(sums) adds the thread's elements of row r to sums[2 * r] (d) and sums[2 * r + 1] (d^2), with the
// center and the row_scale of moments[r]. If one row of a warp must be summed again, all rows of the warp are, and the
// others get the same result once more. sum_over_row() explains `buffer` and before_barrier().
template <int kRows, class F, class G = DoNothing>
__device__ __forceinline__ void reduce_moments(Moments (&moments)[kRows], const Acc (&centers)[kRows], int row_threads,
                                               const FloatDivisor<Acc>& cols, bool rms, int& buffer,
                                               const F& add_to_sums, const G& before_barrier = {}) {
  bool center_is_estimate[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    moments[r] = {centers[r], 0, 0, 1};
    center_is_estimate[r] = !rms;
  }
#pragma unroll 1
  for (bool again = true; again; buffer ^= 1) {
    Acc sums[2 * kRows] = {};
    add_to_sums(sums);
    sum_over_row(sums, row_threads, buffer, before_barrier);
    again = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      again |= moments[r].set_from_sums(sums[2 * r], sums[2 * r + 1], cols, rms, center_is_estimate[r]);
    }
    again = __any_sync(kAllLanes, again);
  }
}

// ---- rows that several blocks share ---------------------------------------------------------------------------------

// Encodes the moments of a block's columns as three numbers, which the blocks of a row exchange. m2 is never negative,
// so that its sign bit can tell that row_scale is kRowScale.
__device__ __forceinline__ void encode(Acc (&encoded)[3], const Moments& m) {
  encoded[0] = m.center;
  encoded[1] = m.correction;
  encoded[2] = copysign(m.m2, m.row_scale == 1 ? Acc(1) : Acc(-1));
}
// Decodes moments, and converts them to this row_scale, 1 or kRowScale. With 1, the m2 of a block that had to rescale
// becomes infinity, which makes merge_blocks() repeat the merge with kRowScale.
__device__ __forceinline__ Moments decode(const Acc (&encoded)[3], Acc row_scale) {
  const bool is_rescaled = signbit(encoded[2]);
  const Acc m2 = abs(encoded[2]);
  if (row_scale == 1) return {encoded[0], encoded[1], is_rescaled ? kInfinity : m2, 1};
  const Acc factor = is_rescaled ? 1 : row_scale;
  return {encoded[0] * factor, encoded[1] * factor, m2 * factor * factor, row_scale};
}

// Merges the encoded moments of the blocks that share a row (Chan, Golub and LeVeque, 1979): first the mean of the row,
// then m2, the sum over the blocks of m2 + columns * (mean of the block - mean of the row)^2. Each block has block_cols
// columns, and the last one last_block_cols. A warp calls this, and each lane adds every 32nd block, so that the order
// depends only on the number of blocks. If m2 overflows, the merge is repeated with kRowScale.
__device__ __forceinline__ Moments merge_blocks(const Acc (*blocks)[3], int num_blocks, Acc block_cols,
                                                Acc last_block_cols, const FloatDivisor<Acc>& cols) {
  const int lane = threadIdx.x % kWarpSize;
  for (Acc row_scale = 1;; row_scale = kRowScale) {
    const Acc center = decode(blocks[0], row_scale).center;
    const auto sum_over_blocks = [&](const auto& term) {  // term(columns, mean - center, m2) of each block
      Acc sum = 0;
#pragma unroll 1
      for (int i = lane; i < num_blocks; i += kWarpSize) {
        const Moments m = decode(blocks[i], row_scale);
        sum += term(i + 1 == num_blocks ? last_block_cols : block_cols, (m.center - center) + m.correction, m.m2);
      }
      return sum_over_lanes<kWarpSize>(sum);
    };
    const Acc correction = cols.divide(sum_over_blocks([](Acc count, Acc d, Acc) { return count * d; }));
    const Acc m2 =
        sum_over_blocks([&](Acc count, Acc d, Acc m2) { return fma(count * (d - correction), d - correction, m2); });
    if (m2 < kInfinity || row_scale != 1) return {center, correction, m2, row_scale};
  }
}

}  // namespace layernorm::cuda
