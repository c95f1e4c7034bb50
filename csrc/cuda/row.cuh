// Device functions that several kernels share: shuffle reductions, and the arithmetic of statistics and gradients.
#pragma once

#include "launch_plan.h"
#include "vec.cuh"

namespace layernorm::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxBlockThreads = 512, kMaxBlockWarps = kMaxBlockThreads / kWarpSize;
constexpr int kThreadsOfShortRows = 128;  // of a forward block whose rows have a warp or less each

struct DoNothing {  // the default of callbacks
  __device__ __forceinline__ void operator()() const {}
};

// Butterfly reduction: each lane gets the sum over its group of kLanes neighbouring lanes. The whole warp must call it.
template <int kLanes, class Number>
__device__ __forceinline__ Number sum_over_lanes(Number value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// The same reduction of kCount sums over groups of `lanes` lanes, a power of two that is known at run time.
template <int kCount>
__device__ __forceinline__ void sum_over_row_lanes(Acc (&sums)[kCount], int lanes) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    if (offset >= lanes) continue;
    for (Acc& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  }
}

// Calls f(W()), where W is the type of the weight, the bias, the input_scale and their gradients: T or float.
template <class T, class F>
__device__ __forceinline__ auto with_weight_type(Flags flags, const F& f) {
  if (std::is_same_v<T, Acc> || !flags.has(kFloatWeights)) return f(T());
  return f(Acc());
}
// Loads one element of a sample's weight, bias or input_scale, and converts it to Acc.
template <class T>
__device__ __forceinline__ Acc load_weight_element(const View& weight, int64_t sample, int64_t column, Flags flags) {
  return with_weight_type<T>(flags, [&](auto element) {
    return static_cast<Acc>(address<const decltype(element)>(weight, {sample, 0})[column]);
  });
}

// ---- rows whose sums overflow ---------------------------------------------------------------------------------------

// If the sums of a row overflow, forward repeats them with x * kRowScale. A power of two rounds nothing. Other rows
// have a row_scale of 1, which costs no instruction, because a fused multiply-add has a factor anyway.
constexpr Acc kRowScale = 0x1p-96f;
constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();

__device__ __forceinline__ double reciprocal_sqrt(double x) { return 1 / sqrt(x); }
__device__ __forceinline__ float reciprocal_sqrt(float x) { return __frsqrt_rn(x); }

// The rstd of x * row_scale, 1 / sqrt(variance + eps * row_scale^2), from the variance of x * row_scale. hypot() avoids
// eps * row_scale^2, which may underflow. The rstd of a constant row, whose variance is 0, may overflow: the largest
// finite number replaces it, so that 0 * rstd is 0.
template <class Number>
__device__ __forceinline__ Number rescaled_rstd(Number variance, Number eps, Number row_scale) {
  if (row_scale == 1) return reciprocal_sqrt(variance + eps);
  const Number rstd = 1 / hypot(sqrt(variance), sqrt(eps) * row_scale);
  return eps > 0 && rstd == std::numeric_limits<Number>::infinity() ? std::numeric_limits<Number>::max() : rstd;
}

// The rstd of x from the result of rescaled_rstd(), whose largest finite number marks a constant row.
template <class Eps>
__device__ __forceinline__ Acc undo_row_scale(Acc rstd, Eps eps, Acc row_scale) {
  return rstd == std::numeric_limits<Acc>::max() ? static_cast<Acc>(reciprocal_sqrt(eps)) : rstd * row_scale;
}

// Divides floating-point numbers by a number of columns that the host knows, with its reciprocal.
template <class Number>
struct FloatDivisor {
  Number value, reciprocal;

  FloatDivisor() = default;
  explicit FloatDivisor(int64_t count)
      : value(static_cast<Number>(count)), reciprocal(1 / static_cast<Number>(count)) {}

  // x / value rounded to nearest, so that the mean of equal numbers is that number; NaN if x is infinite. The first
  // fma() is the exact remainder of x * reciprocal (Markstein, Computation of elementary functions on the IBM RISC
  // System/6000 processor, 1990). A division would be a function call that needs more registers.
  __device__ __forceinline__ Number divide(Number x) const {
    const Number quotient = x * reciprocal;
    return fma(fma(-quotient, value, x), reciprocal, quotient);
  }
};

// ---- backward of a row ----------------------------------------------------------------------------------------------

// The largest power of two <= x, for positive normal x: x with all bits of the mantissa cleared.
__device__ __forceinline__ float power_of_two_below(float x) {
  return __uint_as_float(__float_as_uint(x) & 0x7f800000u);
}
// The reciprocal of a power of two: exponent e becomes -e.
__device__ __forceinline__ float invert_power_of_two(float power) {
  return __uint_as_float(0x7f000000u - __float_as_uint(power));
}

// The statistics of x that forward saved, converted to those of x * row_scale:
//
//   d = x * row_scale - scaled_mean      xhat = d * scaled_rstd - mean_xhat, see RowMeans
//
// row_scale is a power of two near rstd, so that d is of the order of 1 and products with it neither overflow nor
// underflow. With memory_efficient, d is xhat itself, recovered from the output, and no x is multiplied by row_scale.
// Then scaled_rstd is 1 and row_scale is rstd, so that RowMeans::dx() finds rstd = scaled_rstd * row_scale in both
// cases.
struct ScaledStatistics {
  Acc row_scale = 0, scaled_mean = 0, scaled_rstd = 0;

  ScaledStatistics() = default;
  __device__ __forceinline__ ScaledStatistics(Acc mean, Acc rstd, bool memory_efficient)
      : scaled_mean(mean), scaled_rstd(rstd) {
    if (memory_efficient) {
      row_scale = rstd;
      scaled_rstd = 1;
      return;
    }
    // mean * row_scale might overflow if both are large. With a row_scale of 1 instead, no product with d underflows:
    // floats beyond 2^20 are at least 1/8 apart, and so is a nonzero d from 0.
    const bool is_far = rstd > 1 && abs(mean) > Acc(0x1p20);
    row_scale = is_far ? 1 : power_of_two_below(max(rstd, std::numeric_limits<Acc>::min()));
    scaled_mean *= row_scale;
    scaled_rstd *= invert_power_of_two(row_scale);
  }
};

// The means over a row from which dx is computed, with g = dy * weight.
struct RowMeans {
  Acc mean_xhat;    // mean of d * scaled_rstd: the rounding error of the saved mean, which is subtracted from xhat
  Acc mean_g;       // 0 for RMSNorm, like mean_xhat
  Acc mean_g_xhat;  // mean of g times the corrected xhat

  // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)). The caller subtracts mean(g) first, which gives exactly 0 if g
  // is constant over the row, as for a row of one column or the gradient of the sum of the outputs.
  __device__ __forceinline__ Acc dx(Acc g_minus_mean, Acc xhat, const ScaledStatistics& statistics) const {
    return fma(xhat, -mean_g_xhat, g_minus_mean) * (statistics.scaled_rstd * statistics.row_scale);
  }
};

// xhat from the output y, for memory_efficient. A weight that is too small to divide by (kSmallestDivisor) gives NaN.
__device__ __forceinline__ Acc recover_xhat(Acc y, Acc weight, Acc bias) {
  return abs(weight) < Acc(kSmallestDivisor) ? std::numeric_limits<Acc>::quiet_NaN() : fast_divide(y - bias, weight);
}

// ---- gated norms ----------------------------------------------------------------------------------------------------

// The activation f(z) of a gate, and its derivative.
struct Activated {
  Acc value, derivative;

  // Computes sigmoid(z) and 1 - sigmoid(z) from exp(-|z|), which does not overflow, and without a difference of nearly
  // equal numbers, which would lose digits.
  __device__ __forceinline__ Activated(Acc z, Flags flags) {
    const Acc e = exp(-abs(z)), larger = fast_divide(Acc(1), 1 + e), smaller = e * larger;
    const Acc sigmoid = z < 0 ? smaller : larger, complement = z < 0 ? larger : smaller;
    value = flags.has(kSigmoid) ? sigmoid : z * sigmoid;
    derivative = sigmoid * (flags.has(kSigmoid) ? complement : fma(z, complement, Acc(1)));
  }
};

}  // namespace layernorm::cuda
