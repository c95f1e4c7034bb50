// Functions that the kernels share: sums over the lanes of a row, and the arithmetic of statistics and gradients.
#pragma once

#include "geometry.h"
#include "vec.cuh"

namespace layernorm::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxBlockThreads = 512, kMaxBlockWarps = kMaxBlockThreads / kWarpSize;
constexpr int kThreadsOfShortRows = 128;  // of a block of forward whose rows take a warp or less

struct DoNothing {
  __device__ __forceinline__ void operator()() const {}
};

// Returns to all lanes the sum over each kLanes neighbouring lanes. All lanes of the warp must call it.
template <int kLanes, class Number>
__device__ __forceinline__ Number sum_lanes(Number value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// Returns to all lanes of a row the sums over them, for a power of two of lanes.
template <int kCount>
__device__ __forceinline__ void sum_row_lanes(Acc (&sums)[kCount], int lanes) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    if (offset >= lanes) continue;
    for (Acc& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  }
}

// Calls f(E()) with the type of the weight, the bias and the input_scale: T or float.
template <class T, class F>
__device__ __forceinline__ auto with_parameter_type(Flags flags, const F& f) {
  if (std::is_same_v<T, Acc> || !flags.has(kWideParameters)) return f(T());
  return f(Acc());
}
template <class T>
__device__ __forceinline__ Acc load_element(const View& parameter, int64_t sample, int64_t column, Flags flags) {
  return with_parameter_type<T>(flags, [&](auto element) {
    return static_cast<Acc>(address<const decltype(element)>(parameter, {sample, 0})[column]);
  });
}

// ---- large numbers --------------------------------------------------------------------------------------------------

// As on the CPU, a row whose sums of squares or differences overflow is first rescaled by a power of two, which rounds
// nothing. Other rows are multiplied by 1 in an instruction that subtracts or adds anyway.
constexpr Acc kRowScale = 0x1p-96f;
constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();

__device__ __forceinline__ double reciprocal_sqrt(double x) { return 1 / sqrt(x); }
__device__ __forceinline__ float reciprocal_sqrt(float x) { return __frsqrt_rn(x); }

// 1 / sqrt(variance + eps * row_scale^2) for the variance of x * row_scale. eps * row_scale^2 may underflow, its root
// does not. In constant rows of large numbers, whose differences are zero, the largest number replaces an overflow.
template <class Number>
__device__ __forceinline__ Number rescaled_rstd(Number variance, Number eps, Number row_scale) {
  if (row_scale == 1) return reciprocal_sqrt(variance + eps);
  const Number rstd = 1 / hypot(sqrt(variance), sqrt(eps) * row_scale);
  return eps > 0 && rstd == std::numeric_limits<Number>::infinity() ? std::numeric_limits<Number>::max() : rstd;
}

// The rstd of x, from the result of rescaled_rstd(), which marks a constant row by the largest number.
template <class Eps>
__device__ __forceinline__ Acc undo_row_scale(Acc rstd, Eps eps, Acc row_scale) {
  return rstd == std::numeric_limits<Acc>::max() ? static_cast<Acc>(reciprocal_sqrt(eps)) : rstd * row_scale;
}

// A number of columns, and its reciprocal rounded to nearest.
template <class Number>
struct Divisor {
  Number value, reciprocal;

  Divisor() = default;
  explicit Divisor(int64_t count) : value(static_cast<Number>(count)), reciprocal(1 / static_cast<Number>(count)) {}

  // x / value rounded to nearest, so that the mean of equal numbers is that number; NaN if x is infinite (Markstein,
  // Computation of elementary functions on the IBM RISC System/6000 processor, 1990). A division would be a function
  // call that needs more registers.
  __device__ __forceinline__ Number divide(Number x) const {
    const Number quotient = x * reciprocal;
    return fma(fma(-quotient, value, x), reciprocal, quotient);
  }
};

// ---- backward of a row ----------------------------------------------------------------------------------------------

// The largest power of two up to x, for positive normal x, and the reciprocal of a power of two.
__device__ __forceinline__ float power_of_two(float x) { return __uint_as_float(__float_as_uint(x) & 0x7f800000u); }
__device__ __forceinline__ float invert(float power) { return __uint_as_float(0x7f000000u - __float_as_uint(power)); }
// The statistics that forward saved, for x * row_scale: d = x * row_scale - mean and xhat = d * rstd - correction. The
// row_scale is a power of two, which rounds nothing, and brings the deviation of the row near 1, so that products with
// d neither overflow nor underflow. If d is xhat, computed from the output, then rstd is 1 and the row_scale is the
// rstd of x.
struct Statistics {
  Acc row_scale = 0, mean = 0, rstd = 0;

  Statistics() = default;
  __device__ __forceinline__ Statistics(Acc mean_, Acc rstd_, bool memory_efficient) : mean(mean_), rstd(rstd_) {
    if (memory_efficient) {
      row_scale = rstd;
      rstd = 1;
      return;
    }
    // Numbers around so large a mean are too far apart for a product to underflow; the rescaled mean might overflow.
    const bool is_far = rstd > 1 && abs(mean) > Acc(0x1p20);
    row_scale = is_far ? 1 : power_of_two(max(rstd, std::numeric_limits<Acc>::min()));
    mean *= row_scale;
    rstd *= invert(row_scale);
  }
};

// The means over a row from which dx is computed.
struct RowMeans {
  Acc xhat;  // of xhat as computed from the saved mean: the correction
  Acc g;
  Acc g_xhat;  // of g times the corrected xhat

  // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)). The first difference is exactly 0 if g is constant over the row,
  // as for a row of one column or the gradient of the sum of the outputs.
  __device__ __forceinline__ Acc grad_input(Acc g_minus_mean, Acc xhat_, const Statistics& row) const {
    return fma(xhat_, -g_xhat, g_minus_mean) * (row.rstd * row.row_scale);
  }
};

// xhat from the output. A weight that is too small to divide by gives NaN.
__device__ __forceinline__ Acc recover_xhat(Acc y, Acc weight, Acc bias) {
  return abs(weight) < Acc(kSmallestDivisor) ? std::numeric_limits<Acc>::quiet_NaN() : fast_divide(y - bias, weight);
}

// ---- gated norms ----------------------------------------------------------------------------------------------------

// The activation f(z) of a gate, and its derivative.
struct Activated {
  Acc value, derivative;

  // sigmoid(z) and 1 - sigmoid(z) come from the same exponential, which does not overflow, and neither cancels.
  __device__ __forceinline__ Activated(Acc z, Flags flags) {
    const Acc e = exp(-abs(z)), larger = fast_divide(Acc(1), 1 + e), smaller = e * larger;
    const Acc sigmoid = z < 0 ? smaller : larger, rest = z < 0 ? larger : smaller;
    value = flags.has(kSigmoid) ? sigmoid : z * sigmoid;
    derivative = sigmoid * (flags.has(kSigmoid) ? rest : fma(z, rest, Acc(1)));
  }
};

}  // namespace layernorm::cuda
