// Sweeps over one row, shared by forward and backward.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace layernorm::cpu {
namespace {

// The element types of the CPU kernels for dtypes.h.
struct Elements {
  using Float64 = double;
  using Float32 = float;
  using Float16 = Half;
  using BFloat16 = cpu::BFloat16;
};

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Sums keep four vectors in flight to hide the latency of the addition.
constexpr int kAccumulators = 4;

template <class Acc>
struct Accumulator {
  Vec<Acc> parts[kAccumulators] = {};
  double total() const { return sum_lanes((parts[0] + parts[1]) + (parts[2] + parts[3])); }
};

template <int kIndex>
struct Index {
  static constexpr int value = kIndex;
};

// Calls f(Index<k>, j, lanes) for the vectors that cover columns [0, n), where k says which accumulator to
// use.
template <class Acc, class F>
inline void for_each_vector(int64_t n, const F& f) {
  constexpr int64_t kStep = kLanes<Acc>;
  int64_t j = 0;
  for (; j + kAccumulators * kStep <= n; j += kAccumulators * kStep) {
    f(Index<0>{}, j, All{});
    f(Index<1>{}, j + kStep, All{});
    f(Index<2>{}, j + 2 * kStep, All{});
    f(Index<3>{}, j + 3 * kStep, All{});
  }
  for (; j + kStep <= n; j += kStep) f(Index<0>{}, j, All{});
  if (j < n) f(Index<1>{}, j, First{static_cast<int>(n - j)});
}

// A row is summed in chunks: lanes and four accumulators within a chunk, then the chunks in order and in
// double, then, for rows of more than a million columns, groups of chunks likewise. The order depends on the
// number of columns alone, whether one thread sweeps the row or all of them share it.
constexpr int64_t kChunk = 4096;
constexpr int64_t kMaxGroups = 256;

struct Groups {
  explicit Groups(int64_t cols)
      : cols(cols),
        length(kChunk * ceil_div(ceil_div(cols, kChunk), kMaxGroups)),
        count(ceil_div(cols, length)) {}

  // The sum of f(begin, columns) over the chunks of one group.
  template <class Sums, class F>
  Sums sum(int64_t group, const F& f) const {
    Sums total{};
    const int64_t end = min(cols, (group + 1) * length);
    for (int64_t begin = group * length; begin < end; begin += kChunk)
      total += f(begin, min(kChunk, end - begin));
    return total;
  }

  int64_t cols, length, count;
};

struct OneThread {
  template <class Sums, class F>
  static Sums sum(const Groups& groups, const F& f) {
    Sums total{};
    for (int64_t g = 0; g < groups.count; ++g) total += groups.sum<Sums>(g, f);
    return total;
  }
};

struct AllThreads {
  template <class Sums, class F>
  static Sums sum(const Groups& groups, const F& f) {
    Sums sums[kMaxGroups];
    parallel_for(groups.count, ceil_div(kGrain, groups.length), [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) sums[g] = groups.sum<Sums>(g, f);
    });
    Sums total{};
    for (int64_t g = 0; g < groups.count; ++g) total += sums[g];
    return total;
  }
};

// Rows whose numbers are so large that sums of squares, or differences, overflow are scaled by a power of two
// first, which rounds nothing. kScale^2 times the largest square is still finite, and so is 1 / kScale.
template <class Acc>
constexpr Acc kScale = sizeof(Acc) == 4 ? Acc(0x1p-96) : Acc(0x1p-768);

template <class T, bool kScaled>
struct Row {
  using Acc = AccOf<T>;
  const T* x;  // [cols]

  template <class Lanes>
  Vec<Acc> load(int64_t j, Lanes lanes) const {
    const Vec<Acc> v = cpu::load(x + j, lanes);
    return kScaled ? v * kScale<Acc> : v;
  }
};

}  // namespace
}  // namespace layernorm::cpu
