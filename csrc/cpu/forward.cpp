// y = (x - mean) * rstd * weight + bias for every row of x [rows, cols].
//
// Each thread takes a range of rows; rows too few to go round are shared, chunk by chunk. A row is swept
// three times (mean; variance; output) but comes from memory once: 2 * rows * cols * sizeof(T) bytes are
// moved.
//
// Exactness: the mean as first computed is off by its rounding, up to 0.03 for numbers near 1e6. The second
// sweep also sums x - mean, whose average is that error to full precision; it corrects the mean, the variance
// and the output. So the output is within a few roundings of the exact one at any offset, and a constant row
// gives exactly the bias.
//
// Source: Ba et al. 2016, arXiv:1607.06450.
#include <cmath>

#include "../dtypes.h"
#include "row.h"

namespace layernorm::cpu::CPU_CAPABILITY {
namespace {

template <class Acc>
struct Statistics {
  Acc mean;        // of the row as loaded, rounded
  Acc correction;  // mean of (x - mean)
  double variance;
  Acc rstd;
};

struct Deviations {
  double sum, sum_of_squares;
  void operator+=(const Deviations& other) {
    sum += other.sum;
    sum_of_squares += other.sum_of_squares;
  }
};

template <class Threads, class T, bool kScaled>
Statistics<AccOf<T>> statistics(Row<T, kScaled> row, const Groups& groups, double eps) {
  using Acc = AccOf<T>;
  const double cols = groups.cols;
  const double sum = Threads::template sum<double>(groups, [&](int64_t begin, int64_t n) {
    Accumulator<Acc> s;
    for_each_vector<Acc>(
        n, [&](auto k, int64_t j, auto lanes) { s.parts[k.value] += row.load(begin + j, lanes); });
    return s.total();
  });
  const Acc mean = sum / cols;
  const auto deviations = Threads::template sum<Deviations>(groups, [&](int64_t begin, int64_t n) {
    Accumulator<Acc> s, q;
    const auto m = broadcast(mean);
    for_each_vector<Acc>(n, [&](auto k, int64_t j, auto lanes) {
      const auto d = keep(row.load(begin + j, lanes) - m, lanes);
      s.parts[k.value] += d;
      q.parts[k.value] = fma(d, d, q.parts[k.value]);
    });
    return Deviations{s.total(), q.total()};
  });
  const double correction = deviations.sum / cols;
  double variance = deviations.sum_of_squares / cols - correction * correction;
  if (variance < 0) variance = 0;  // written so that NaN stays NaN
  return {mean, static_cast<Acc>(correction), variance, static_cast<Acc>(1 / std::sqrt(variance + eps))};
}

template <class Threads, class T, class W, bool kScaled>
void normalize(Row<T, kScaled> row, const Groups& groups, const Statistics<AccOf<T>>& stats, const W* weight,
               const W* bias, T* y) {
  using Acc = AccOf<T>;
  struct Nothing {
    void operator+=(Nothing) {}
  };
  Threads::template sum<Nothing>(groups, [&](int64_t begin, int64_t n) {
    const auto m = broadcast(stats.mean), c = broadcast(stats.correction), r = broadcast(stats.rstd);
    for_each_vector<Acc>(n, [&](auto, int64_t j, auto lanes) {
      j += begin;
      auto v = (row.load(j, lanes) - m - c) * r;  // xhat
      if (weight && bias) {
        v = fma(v, load(weight + j, lanes), load(bias + j, lanes));
      } else if (weight) {
        v = v * load(weight + j, lanes);
      } else if (bias) {
        v = v + load(bias + j, lanes);
      }
      store(y + j, v, lanes);
    });
    return Nothing{};
  });
}

template <class Threads, class T, class W>
void forward_row(const ForwardParams& p, const Groups& groups, int64_t r) {
  using Acc = AccOf<T>;
  const T* x = static_cast<const T*>(p.input) + r * p.input_stride;
  const W* weight = static_cast<const W*>(p.weight);
  const W* bias = static_cast<const W*>(p.bias);
  T* y = static_cast<T*>(p.output) + r * p.cols;
  Acc* mean = static_cast<Acc*>(p.mean) + r;
  Acc* rstd = static_cast<Acc*>(p.rstd) + r;

  auto stats = statistics<Threads>(Row<T, false>{x}, groups, p.eps);
  if (std::isfinite(stats.variance)) {
    normalize<Threads>(Row<T, false>{x}, groups, stats, weight, bias, y);
    *mean = static_cast<Acc>(double(stats.mean) + stats.correction);
    *rstd = stats.rstd;
  } else {  // a sum has overflowed, or the row holds NaN or infinity and gives NaN again
    constexpr Acc s = kScale<Acc>;
    stats = statistics<Threads>(Row<T, true>{x}, groups, p.eps * s * s);
    normalize<Threads>(Row<T, true>{x}, groups, stats, weight, bias, y);
    *mean = static_cast<Acc>((double(stats.mean) + stats.correction) / s);
    *rstd = stats.rstd * s;
  }
}

}  // namespace

void forward(const ForwardParams& p) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    const Groups groups(p.cols);
    if (p.rows < num_threads() && groups.count > 1) {
      for (int64_t r = 0; r < p.rows; ++r) forward_row<AllThreads, T, W>(p, groups, r);
    } else {
      parallel_for(p.rows, ceil_div(kGrain, p.cols), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) forward_row<OneThread, T, W>(p, groups, r);
      });
    }
  });
}

}  // namespace layernorm::cpu::CPU_CAPABILITY
