// Rescaled rows: a row whose sums would overflow or whose squares would underflow is first multiplied by a power of
// two, its row_scale.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "loops.h"

namespace layernorm::cpu {
namespace {

// The row_scale in forward if a sum of squares or a difference would overflow, and if squares would underflow. The
// products with the row are exact. The largest number times kShrink has a finite square.
template <class Acc>
constexpr Acc kShrink = sizeof(Acc) == 4 ? Acc(0x1p-96) : Acc(0x1p-768);
template <class Acc>
constexpr Acc kEnlarge = 1 / kShrink<Acc>;

// Squares whose mean is larger than this lose no digit to underflow, even if the processor flushes subnormal numbers to
// zero.
template <class Acc>
constexpr double kSmallestVariance = sizeof(Acc) == 4 ? 0x1p-100 : 0x1p-960;

// The row_scale of a row that needs one, from its statistics without a row_scale. A row whose variance is infinite or
// NaN gets kShrink. A row whose variance and eps are below kSmallestVariance gets kEnlarge if its numbers are small.
// Otherwise they are large and all equal: kShrink cannot make them overflow, and keeps them equal.
template <class Acc>
inline Acc row_scale_for(Acc rstd, Acc center) {
  return rstd > 1 && center > -1 && center < 1 ? kEnlarge<Acc> : kShrink<Acc>;
}

// The rstd of a rescaled row: 1 / sqrt(variance + eps * row_scale^2), where the variance is that of the rescaled row.
// The row's own rstd is the product with row_scale. The function returns the largest number if the reciprocal
// overflows, as in rows of equal large numbers, whose differences are zero. It takes the root of eps before it rescales
// eps, because eps * row_scale^2 may underflow.
template <class Acc>
inline double rescaled_rstd(double variance, double eps, Acc row_scale) {
  const double rstd = 1 / ::hypot(std::sqrt(variance), std::sqrt(eps) * row_scale);
  constexpr double kMax = std::numeric_limits<Acc>::max();
  return eps > 0 && rstd > kMax ? kMax : rstd;
}

// rstd is subnormal in rows of the largest numbers. After torch.set_flush_denormal(True) the processor reads and writes
// subnormal numbers as zero, so store_rstd() and divide_rstd() write and read the bits of rstd as an integer.
template <class Acc>
using BitsOf = std::conditional_t<sizeof(Acc) == 4, uint32_t, uint64_t>;

// Stores a row's own rstd, where `rstd` is the result of rescaled_rstd().
template <class Acc>
inline void store_rstd(Acc* to, Acc rstd, Acc row_scale, double eps) {
  using Limits = std::numeric_limits<Acc>;
  if (rstd == Limits::max()) {  // the variance is zero
    *to = static_cast<Acc>(1 / std::sqrt(eps));
  } else if (row_scale < 1 && rstd * row_scale < Limits::min()) {
    // The bits of a subnormal number count multiples of the smallest one, min() * epsilon().
    const auto bits = static_cast<BitsOf<Acc>>(std::nearbyint(rstd * (row_scale / Limits::min()) / Limits::epsilon()));
    std::memcpy(to, &bits, sizeof(bits));
  } else {
    *to = rstd * row_scale;
  }
}

// rstd / row_scale, for a row_scale of at least the smallest normal number.
template <class Acc>
inline Acc divide_rstd(const Acc* rstd, Acc row_scale) {
  using Limits = std::numeric_limits<Acc>;
  BitsOf<Acc> bits;
  std::memcpy(&bits, rstd, sizeof(bits));
  if (bits >> (Limits::digits - 1)) return *rstd / row_scale;  // a normal number: its exponent bits are not 0
  return static_cast<Acc>(bits) * Limits::epsilon() * (Limits::min() / row_scale);
}

// Loads a pack of a row, which is multiplied by row_scale if `rescaled`.
template <class X, bool rescaled, class Lanes>
inline Pack<AccOf<X>> load_row(const X* x, AccOf<X> row_scale, Lanes lanes) {
  const auto v = load<X>(x, lanes);
  if constexpr (rescaled) return v * row_scale;
  return v;
}

}  // namespace
}  // namespace layernorm::cpu
