// Computes y = (x - mean) * rstd * weight + bias for every row of x [rows, cols]. RMSNorm has a mean of 0.
//
// Each thread handles a range of rows; if there are fewer rows than threads, the threads share each row. The code reads
// a row three times (mean, variance, output), but only once from memory: it moves 2 * rows * cols * sizeof(T) bytes. A
// residual is added in a loop of its own before the others.
//
// Precision: rounding the mean is an error of up to 0.03 for values near 1e6. The second loop also sums x - mean, whose
// average is this error to full precision, and corrects the mean, the variance and the output with it. The output is
// within a few roundings of the exact result at any offset, and a constant row gives exactly the bias.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include <cmath>

#include "../dtypes.h"
#include "row.h"

namespace layernorm::cpu::CPU_CAPABILITY {
namespace {

template <class Acc, int kCount>
struct Statistics {
  Acc mean[kCount];        // rounded; of the row as load_row() returns it
  Acc correction[kCount];  // mean of (x - mean)
  Acc rstd[kCount];
  bool finite[kCount];
};

// sum = x + residual, for kCount rows.
template <class Threads, int kCount, class T>
void add_residual(const T* x, int64_t stride, const T* residual, int64_t residual_stride, const ChunkGroups& groups,
                  T* sum) {
  Threads::for_each(groups, [&](int64_t begin, int64_t n) {
    for_each_pack<AccOf<T>, 1>(begin, n, [&](int, int64_t j, auto lanes) {
      for (int r = 0; r < kCount; ++r) {
        const auto v = load<T>(x + r * stride + j, lanes) + load<T>(residual + r * residual_stride + j, lanes);
        store<T, false>(sum + r * groups.cols + j, v, lanes);
      }
    });
  });
}

// The statistics of kCount rows, the first at x.
template <class Threads, int kCount, int kPacks, bool scaled, class T>
Statistics<AccOf<T>, kCount> statistics(const T* x, int64_t stride, const ChunkGroups& groups, double eps, bool rms) {
  using Acc = AccOf<T>;
  Statistics<Acc, kCount> stats;
  Acc mean[kCount] = {};
  if (!rms) {
    const auto sums = Threads::template sum<Sums<kCount, 1>>(groups, [&](int64_t begin, int64_t n) {
      Accumulators<Acc, kCount, 1, kPacks> s;
      for_each_pack<Acc, kPacks>(begin, n, [&](int pack, int64_t j, auto lanes) {
#pragma GCC unroll 4
        for (int r = 0; r < kCount; ++r) {
          s.values[0][r][pack] = s.values[0][r][pack] + load_row<T, scaled>(x + r * stride + j, lanes);
        }
      });
      return s.total();
    });
    for (int r = 0; r < kCount; ++r) mean[r] = groups.mean<Acc>(sums.values[0][r]);
  }
  const auto deviations = Threads::template sum<Sums<kCount, 2>>(groups, [&](int64_t begin, int64_t n) {
    Accumulators<Acc, kCount, 2, kPacks> s;
    for_each_pack<Acc, kPacks>(begin, n, [&](int pack, int64_t j, auto lanes) {
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        const auto d = zero_outside<kEvenOdd<T>>(load_row<T, scaled>(x + r * stride + j, lanes) - mean[r], lanes);
        s.values[0][r][pack] = s.values[0][r][pack] + d;
        s.values[1][r][pack] = fma(d, d, s.values[1][r][pack]);
      }
    });
    return s.total();
  });
  for (int r = 0; r < kCount; ++r) {
    const double correction = rms ? 0 : groups.mean<Acc>(deviations.values[0][r]);
    double variance = groups.mean<Acc>(deviations.values[1][r]) - correction * correction;
    variance = variance < 0 ? 0 : variance;  // written so that NaN stays NaN
    // eps * kScale^2 may underflow; its root does not.
    const double deviation =
        scaled ? ::hypot(std::sqrt(variance), std::sqrt(eps) * kScale<Acc>) : std::sqrt(variance + eps);
    stats.mean[r] = mean[r];
    stats.correction[r] = static_cast<Acc>(correction);
    stats.rstd[r] = static_cast<Acc>(1 / deviation);
    stats.finite[r] = std::isfinite(variance);
  }
  return stats;
}

template <class Threads, int kCount, bool scaled, bool streaming, class T, class W>
void normalize(const T* x, int64_t stride, const ChunkGroups& groups, const Statistics<AccOf<T>, kCount>& stats,
               bool prefetch, const W* weight, AccOf<T> weight_offset, const W* bias, T* y) {
  using Acc = AccOf<T>;
  Threads::for_each(groups, [&](int64_t begin, int64_t n) {
    for_each_pack<Acc, 1>(begin, n, [&](int, int64_t j, auto lanes) {
      Pack<Acc> w, b;
      if (weight) w = load_weight<T>(weight, weight_offset, j, lanes);
      if (bias) b = load<T>(bias + j, lanes);
      for (int r = 0; r < kCount; ++r) {
        const auto d = load_row<T, scaled>(x + r * stride + j, lanes) - stats.mean[r] - stats.correction[r];
        auto v = d * stats.rstd[r];  // xhat
        if (weight && bias) {
          v = fma(v, w, b);
        } else if (weight) {
          v = v * w;
        } else if (bias) {
          v = v + b;
        }
        store<T, !std::is_same_v<T, W>>(y + r * groups.cols + j, v, store_lanes<streaming>(lanes));
        if (prefetch) prefetch_for_read(x + (r + kCount) * stride + j);
        if (kCount == 1 && !streaming) prefetch_for_write(y + j);
      }
    });
    if (streaming) streaming_fence();
  });
}

// Handles rows r to r + kCount - 1, whose values (the input, or its sum with the residual) start at x.
template <class Threads, int kCount, int kPacks, class T, class W>
void forward_rows(const ForwardParams& p, const ChunkGroups& groups, int64_t r, const T* x, int64_t stride) {
  using Acc = AccOf<T>;
  const W* weight = static_cast<const W*>(p.weight);
  const Acc weight_offset = p.zero_centered_weight;
  const W* bias = static_cast<const W*>(p.bias);
  T* y = static_cast<T*>(p.output) + r * p.cols;
  Acc* mean = p.mean ? static_cast<Acc*>(p.mean) + r : nullptr;
  Acc* rstd = static_cast<Acc*>(p.rstd) + r;

  const bool prefetch = !p.residual && should_prefetch<T>(p.rows, p.cols, kCount);
  const bool streaming = kCount == 1 && should_stream(static_cast<const T*>(p.output), p.rows, p.cols);
  const auto stats = statistics<Threads, kCount, kPacks, false>(x, stride, groups, p.eps, p.rms);
  bool finite = true;
  for (int k = 0; k < kCount; ++k) finite &= stats.finite[k];
  if (finite) {
    if (streaming) {
      normalize<Threads, kCount, false, kCount == 1>(x, stride, groups, stats, prefetch, weight, weight_offset, bias,
                                                     y);
    } else {
      normalize<Threads, kCount, false, false>(x, stride, groups, stats, prefetch, weight, weight_offset, bias, y);
    }
    for (int k = 0; k < kCount; ++k) {
      if (mean) mean[k] = static_cast<Acc>(double(stats.mean[k]) + stats.correction[k]);
      rstd[k] = stats.rstd[k];
    }
  } else if constexpr (kCount > 1) {
    for (int k = 0; k < kCount; ++k) forward_rows<Threads, 1, kPacks, T, W>(p, groups, r + k, x + k * stride, stride);
  } else {  // a sum overflowed, or the row holds NaN or infinity and will give NaN again
    constexpr Acc s = kScale<Acc>;
    const auto scaled = statistics<Threads, 1, kPacks, true>(x, stride, groups, p.eps, p.rms);
    normalize<Threads, 1, true, false>(x, stride, groups, scaled, prefetch, weight, weight_offset, bias, y);
    if (mean) *mean = static_cast<Acc>((double(*scaled.mean) + *scaled.correction) / s);
    *rstd = *scaled.rstd * s;
  }
}

// Adds the residual, if there is one, and handles rows r to r + kCount - 1.
template <class Threads, int kCount, int kPacks, class T, class W>
void forward_rows(const ForwardParams& p, const ChunkGroups& groups, int64_t r) {
  const T* x = static_cast<const T*>(p.input) + r * p.input_stride;
  if (p.residual) {
    T* sum = static_cast<T*>(p.sum) + r * p.cols;
    const T* residual = static_cast<const T*>(p.residual) + r * p.residual_stride;
    add_residual<Threads, kCount>(x, p.input_stride, residual, p.residual_stride, groups, sum);
    forward_rows<Threads, kCount, kPacks, T, W>(p, groups, r, sum, p.cols);
  } else {
    forward_rows<Threads, kCount, kPacks, T, W>(p, groups, r, x, p.input_stride);
  }
}

}  // namespace

void forward(const ForwardParams& p) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    const ChunkGroups groups(p.cols, kChunk<AccOf<T>>);
    if (is_narrow<T>(p.cols)) {
      const bool several = interleaves_rows<T>(p.rows, p.cols);
      parallel_for(p.rows, ceil_div(kGrain, p.cols), [&](int64_t r, int64_t end) {
        for (; several && r + kRows <= end; r += kRows)
          forward_rows<OneThread, kRows, kNarrowPacks, T, W>(p, groups, r);
        for (; r < end; ++r) forward_rows<OneThread, 1, kNarrowPacks, T, W>(p, groups, r);
      });
    } else if (p.rows < num_threads() && groups.count > 1) {
      for (int64_t r = 0; r < p.rows; ++r) forward_rows<AllThreads, 1, kWidePacks, T, W>(p, groups, r);
    } else {
      parallel_for(p.rows, ceil_div(kGrain, p.cols), [&](int64_t r, int64_t end) {
        for (; r < end; ++r) forward_rows<OneThread, 1, kWidePacks, T, W>(p, groups, r);
      });
    }
  });
}

}  // namespace layernorm::cpu::CPU_CAPABILITY
