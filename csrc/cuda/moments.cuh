// The moments of rows: their mean, and the sum of the squared differences from it. The numerical method is that of
// cpu/forward.cpp: one sweep sums the differences from an estimate of the mean and their squares.
#pragma once

#include "row.cuh"

namespace layernorm::cuda {

// The moments of `count` numbers x * scale. Their mean is pivot + correction; for RMSNorm it is 0. m2 is the sum of the
// squares of their differences from the mean.
template <class Acc>
struct Moments {
  Acc pivot, correction, m2, count, scale;

  // d = x * scale - mean. The correction is subtracted before any multiplication, so that d is exactly 0 for a constant
  // row.
  __device__ __forceinline__ Acc difference(Acc x) const { return fma(x, scale, -pivot) - correction; }
  // The mean of x.
  __device__ __forceinline__ Acc mean() const { return (pivot + correction) * (scale == 1 ? 1 : 1 / kScale<Acc>); }

  // Completes the moments from the sums of x * scale - pivot and of its square. Returns whether the sums must be
  // computed again, with another pivot or scale: a pivot that is too far from the mean is replaced by the mean, and if
  // the sums overflow, the numbers are scaled. Numbers that include NaN or infinity still give NaN.
  __device__ __forceinline__ bool complete(const Acc (&sums)[2], const Divisor<Acc>& divisor, bool rms,
                                           bool& is_estimate) {
    correction = rms ? 0 : divisor.divide(sums[0]);
    const Acc correction_squared = count * correction * correction;
    m2 = sums[1] - correction_squared;
    if (m2 < 0) m2 = 0;  // this comparison keeps NaN
    const bool overflows = !(m2 < kInfinity<Acc>) && scale == 1;
    const bool is_far = is_estimate && correction_squared > m2;
    if (overflows) {
      scale = kScale<Acc>;
      pivot *= kScale<Acc>;
    } else if (is_far) {
      pivot += correction;
      is_estimate = false;
    }
    return overflows || is_far;
  }
};

// Returns to all threads of a row the sums over them: over some lanes of a warp, a power of two, or over the block.
// Successive calls for rows of blocks alternate `buffer` between 0 and 1, so that one barrier per call suffices.
template <int kCount, class Acc>
__device__ __forceinline__ void sum_row(Acc (&sums)[kCount], int row_threads, int buffer) {
  sum_row_lanes(sums, row_threads);
  if (row_threads != static_cast<int>(blockDim.x)) return;
  constexpr int kMaxWarps = kMaxBlockThreads / kWarpSize;
  __shared__ Acc warp_sums[2][kCount][kMaxWarps];
  const int lane = threadIdx.x % kWarpSize, other = lane % kMaxWarps;
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) warp_sums[buffer][k][threadIdx.x / kWarpSize] = sums[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    sums[k] = sum_lanes<kMaxWarps>(other * kWarpSize < row_threads ? warp_sums[buffer][k][other] : 0);
  }
}

// The moments of a row, or of a block's part of one. add_to_sums(sums, moments) adds the thread's part of the sums. If
// a row of the warp must be summed again, so are the others, with the same result. `buffer` is that of sum_row().
template <class Acc, class F>
__device__ __forceinline__ Moments<Acc> reduce_moments(Acc pivot, int row_threads, const Divisor<Acc>& cols, bool rms,
                                                       int& buffer, const F& add_to_sums) {
  Moments<Acc> moments = {pivot, 0, 0, cols.value, 1};
  bool is_estimate = !rms;
#pragma unroll 1
  for (bool again = true; again; buffer ^= 1) {
    Acc sums[2] = {};
    add_to_sums(sums, moments);
    sum_row(sums, row_threads, buffer);
    again = __any_sync(kAllLanes, moments.complete(sums, cols, rms, is_estimate));
  }
  return moments;
}

// The moments multiplied by `scale`. Moments that are scaled already are not finite without their scale.
template <class Acc>
__device__ __forceinline__ Moments<Acc> rescale(Moments<Acc> m, Acc scale) {
  if (m.scale == scale) return m;
  if (scale == 1) return {0, 0, kInfinity<Acc>, m.count, 1};
  return {m.pivot * scale, m.correction * scale, m.m2 * scale * scale, m.count, scale};
}

// Merges the moments of two disjoint sets of numbers of the same scale. Either set may be empty.
template <class Acc>
__device__ __forceinline__ Moments<Acc> merge(const Moments<Acc>& a, const Moments<Acc>& b) {
  if (a.count == 0) return b;
  if (b.count == 0) return a;
  const Acc count = a.count + b.count, weight = b.count / count;
  const Acc mean_diff = ((b.pivot - a.pivot) + b.correction) - a.correction;
  return {a.pivot, fma(mean_diff, weight, a.correction), fma(mean_diff * mean_diff, a.count * weight, a.m2 + b.m2),
          count, a.scale};
}

// The moments of a part as three numbers, besides their count. m2 is negative, or -0, if the numbers are scaled.
template <class Acc>
__device__ __forceinline__ void pack(Acc (&packed)[3], const Moments<Acc>& m) {
  packed[0] = m.pivot;
  packed[1] = m.correction;
  packed[2] = copysign(m.m2, m.scale == 1 ? Acc(1) : Acc(-1));
}
template <class Acc>
__device__ __forceinline__ Moments<Acc> unpack(const Acc (&packed)[3], Acc count) {
  return {packed[0], packed[1], abs(packed[2]), count, signbit(packed[2]) ? kScale<Acc> : Acc(1)};
}

// Merges the moments of a row's parts, in an order that depends only on their number. The parts are packed; each has
// `count` numbers, and the last one `last_count`. All lanes get the result.
template <class Acc>
__device__ __forceinline__ Moments<Acc> merge_parts(const Acc (*parts)[3], int num_parts, Acc count, Acc last_count) {
  for (Acc scale = 1;; scale = kScale<Acc>) {
    Moments<Acc> own = {0, 0, 0, 0, scale};
    for (int i = threadIdx.x % kWarpSize; i < num_parts; i += kWarpSize) {
      own = merge(own, rescale(unpack(parts[i], i + 1 == num_parts ? last_count : count), scale));
    }
    for (int offset = 1; offset < kWarpSize; offset *= 2) {  // only lane 0 gets the sum of all lanes
      const int other = threadIdx.x % kWarpSize + offset;
      const auto get = [&](Acc value) { return __shfl_sync(kAllLanes, value, other % kWarpSize); };
      own = merge(own, Moments<Acc>{get(own.pivot), get(own.correction), get(own.m2), get(own.count), scale});
    }
    const auto first = [](Acc value) { return __shfl_sync(kAllLanes, value, 0); };
    own = {first(own.pivot), first(own.correction), first(own.m2), first(own.count), scale};
    if (own.m2 < kInfinity<Acc> || scale != 1) return own;
  }
}

}  // namespace layernorm::cuda
