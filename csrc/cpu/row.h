// Loops over packs and chunks, the order of summation, rescaled rows, and partial sums, for the kernels of rows.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "policy.h"

namespace layernorm::cpu {
namespace {

// The element types of the CPU kernels, for dispatch_dtypes().
struct Elements {
  using Float64 = double;
  using Float32 = float;
  using Float16 = Half;
  using BFloat16 = cpu::BFloat16;
};

// Calls f(sample, first row, rows) for the parts of rows [begin, end) of [samples * rows] that belong to one sample.
template <class F>
void for_each_sample(int64_t rows, int64_t begin, int64_t end, const F& f) {
  while (begin < end) {
    const int64_t sample = begin / rows, row = begin % rows, count = min(end - begin, rows - row);
    f(sample, row, count);
    begin += count;
  }
}

// Calls f with each of the flags as a std::bool_constant.
template <class F>
void dispatch_flags(const F& f) {
  f();
}
template <class F, class... Flags>
void dispatch_flags(const F& f, bool flag, Flags... flags) {
  const auto rest = [&](auto constant) { dispatch_flags([&](auto... others) { f(constant, others...); }, flags...); };
  flag ? rest(std::true_type{}) : rest(std::false_type{});
}

// ---- the order of summation -----------------------------------------------------------------------------------------
//
// The order depends only on the instruction set, the dtype and the columns, not on the threads or the rows of a loop:
//   1. within a chunk, each lane of kPacks packs, which take turns, adds its elements in order;
//   2. the packs of the chunk, then their lanes;
//   3. the chunks of a run in order, in double;
//   4. the runs in order, in double. Rows of up to 256 chunks have one chunk in each run.

// One value for each of kCount rows.
template <class Number, int kCount>
using PerRow = typename VectorOf<Number, kCount * sizeof(Number)>::type;

// Sums of kKinds kinds over each of kCount rows.
template <int kCount, int kKinds>
struct Sums {
  Sums() = default;
  // The kinds that `other` lacks are zero.
  template <int kFewer>
  explicit Sums(const Sums<kCount, kFewer>& other) {
    for (int kind = 0; kind < kFewer; ++kind) values[kind] = other.values[kind];
  }
  PerRow<double, kCount> values[kKinds] = {};
  void operator+=(const Sums& other) {
    for (int kind = 0; kind < kKinds; ++kind) values[kind] += other.values[kind];
  }
};

// Sums of kKinds kinds over kCount rows, in the lanes of kPacks packs. The pragmas and the attribute make GCC keep
// these arrays in registers, which it otherwise does for some dtypes only.
template <class Acc, int kCount, int kKinds, int kPacks>
struct Accumulators {
  Pack<Acc> values[kKinds][kCount][kPacks] = {};
  [[gnu::always_inline]] Sums<kCount, kKinds> total() const {
    Sums<kCount, kKinds> sums;
#pragma GCC unroll 4
    for (int kind = 0; kind < kKinds; ++kind) {
      Vec<Acc> vectors[kCount];
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        Pack<Acc> p = values[kind][r][0];
        for (int pack = 1; pack < kPacks; ++pack) p = p + values[kind][r][pack];
        vectors[r] = p.a + p.b;
      }
      sums.values[kind] = sum_each(vectors);
    }
    return sums;
  }
};

// Calls f(pack, j, lanes) for the packs that cover columns [begin, begin + n).
template <class Acc, int kPacks, class F>
inline void for_each_pack(int64_t begin, int64_t n, const F& f) {
  constexpr int64_t kStep = kPackSize<Acc>;
  const int64_t end = begin + n;
  int64_t j = begin;
  for (; j + kPacks * kStep <= end; j += kPacks * kStep) {
    for (int pack = 0; pack < kPacks; ++pack) f(pack, j + pack * kStep, AllLanes{});
  }
  if (kPacks > 1 && j + kStep <= end) {
    f(0, j, AllLanes{});
    j += kStep;
  }
  if (j < end) f(kPacks - 1, j, FirstLanes{static_cast<int>(end - j)});
}
static_assert(kNarrowPacks <= 2 && kWidePacks <= 2, "for_each_pack handles one whole pack at the end");

// Calls f(j, lanes) for the packs that cover columns [begin, begin + n) of a loop that adds nothing up and stores to a
// row. If aligned, the first pack ends where the row's stores are aligned, which streaming stores of single rows need.
// Other short rows do without, because the additional pack takes as long as it saves.
template <class Acc, bool aligned, bool streaming, class T, class F>
inline void for_each_stored_pack(const T* row, int64_t begin, int64_t n, const F& f) {
  if constexpr (!aligned) {
    for_each_pack<Acc, 1>(begin, n, [&](int, int64_t j, auto lanes) __attribute__((always_inline)) { f(j, lanes); });
  } else {
    constexpr int64_t kStep = kPackSize<Acc>;
    const int64_t end = begin + n;
    int64_t j = begin, lanes = 0;
    if (streaming || n >= kMinAlignedCols) lanes = min(n, elements_to_boundary(row + begin));
    do {  // the first pack, whole packs, and the last pack, without a second copy of f for the first lanes
      if (lanes) {
        f(j, FirstLanes{static_cast<int>(lanes)});
        j += lanes;
      }
      for (; j + kStep <= end; j += kStep) f(j, AllLanes{});
      lanes = end - j;
    } while (lanes);
  }
}

// The chunks of a row, in up to kMaxRuns runs of adjacent chunks.
struct Chunks {
  Chunks(int64_t cols, int64_t chunk)
      : cols(cols),
        chunk(chunk),
        run_length(chunk * ceil_div(ceil_div(cols, chunk), kMaxRuns)),
        runs(ceil_div(cols, run_length)) {}

  // Adds f(begin, columns) over the chunks of one run.
  template <class Sum, class F>
  Sum sum(int64_t run, const F& f) const {
    const int64_t begin = run * run_length, end = min(cols, begin + run_length);
    Sum total = f(begin, min(chunk, end - begin));
    for (int64_t j = begin + chunk; j < end; j += chunk) total += f(j, min(chunk, end - j));
    return total;
  }

  // sum / cols. For float the product with the reciprocal rounds to the same value as the quotient does, and a
  // constant row has exactly its constant as mean. Divisions would slow down short rows.
  template <class Acc, class Sum>
  Sum mean(Sum sum) const {
    return sizeof(Acc) == 4 ? sum * inverse_cols : sum / static_cast<double>(cols);
  }

  int64_t cols, chunk, run_length, runs;  // columns of the row, of a chunk and of a run; the number of runs
  double inverse_cols = 1.0 / static_cast<double>(cols);
};

// Two ways to process a row: by the calling thread, or by all threads, which share its runs of chunks.
struct OneThread {
  template <class Sum, class F>
  static Sum sum(const Chunks& chunks, const F& f) {
    Sum total = chunks.sum<Sum>(0, f);
    for (int64_t run = 1; run < chunks.runs; ++run) total += chunks.sum<Sum>(run, f);
    return total;
  }
  template <class F>
  static void for_each(const Chunks& chunks, const F& f) {
    f(0, chunks.cols);
  }
};

// For narrow rows, each of whose runs is one chunk. GCC inlines f, because it is called in one place only.
struct NarrowRow : OneThread {
  template <class Sum, class F>
  static Sum sum(const Chunks& chunks, const F& f) {
    Sum total;
    for (auto& value : total.values) value = -value;  // -0, to which adding x gives x, even for -0
    for (int64_t j = 0; j < chunks.cols; j += chunks.chunk) total += f(j, min(chunks.chunk, chunks.cols - j));
    return total;
  }
};

struct AllThreads {
  template <class Sum, class F>
  static Sum sum(const Chunks& chunks, const F& f) {
    Sum sums[kMaxRuns];
    parallel_for(chunks.runs, grain(chunks.run_length), [&](int64_t begin, int64_t end) {
      for (int64_t run = begin; run < end; ++run) sums[run] = chunks.sum<Sum>(run, f);
    });
    Sum total = sums[0];
    for (int64_t run = 1; run < chunks.runs; ++run) total += sums[run];
    return total;
  }
  template <class F>
  static void for_each(const Chunks& chunks, const F& f) {
    parallel_for(chunks.runs, grain(chunks.run_length), [&](int64_t begin, int64_t end) {
      f(begin * chunks.run_length, min(chunks.cols, end * chunks.run_length) - begin * chunks.run_length);
    });
  }
};

// ---- stores and prefetches ------------------------------------------------------------------------------------------

constexpr int kCacheLineBytes = 64;

template <bool streaming>
inline auto store_lanes(AllLanes) {
  return std::conditional_t<streaming && kHasStreamingStores, Streaming, AllLanes>{};
}
template <bool streaming>
inline FirstLanes store_lanes(FirstLanes lanes) {
  return lanes;
}

// Prefetches a pack, which has up to two cache lines, to the second-level cache.
template <class T>
inline void prefetch_to_l2(const T* p) {
  constexpr int64_t kLine = kCacheLineBytes / sizeof(T);
  __builtin_prefetch(p, 0, 2);
  if (kPackSize<AccOf<T>> > kLine) __builtin_prefetch(p + kLine, 0, 2);
}

// ---- large numbers --------------------------------------------------------------------------------------------------

// A row is first multiplied by kShrink if a sum of its squares or a difference would overflow, and by kEnlarge if its
// squares would underflow. The products are exact, because both are powers of two. The largest number times kShrink has
// a finite square.
template <class Acc>
constexpr Acc kShrink = sizeof(Acc) == 4 ? Acc(0x1p-96) : Acc(0x1p-768);
template <class Acc>
constexpr Acc kEnlarge = 1 / kShrink<Acc>;

// Squares whose mean is larger lose no digit to underflow, even if the processor flushes subnormal numbers to zero.
template <class Acc>
constexpr double kSmallestVariance = sizeof(Acc) == 4 ? 0x1p-100 : 0x1p-960;

// The row_scale of a row that needs one. A row whose variance is infinite or NaN gets kShrink. A row whose variance and
// eps are below kSmallestVariance gets kEnlarge if its numbers are small. Otherwise they are all equal, so that kShrink
// is right, too.
template <class Acc>
inline Acc row_scale_for(Acc rstd, Acc center) {
  return rstd > 1 && center > -1 && center < 1 ? kEnlarge<Acc> : kShrink<Acc>;
}

// rstd / row_scale, where the variance is that of the rescaled row. The function returns the largest number if the
// reciprocal overflows, as in rows of equal large numbers, whose differences are zero. It takes the root of eps before
// it rescales eps, because eps * row_scale^2 may underflow.
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

// Stores the rstd of a row, which is rstd * row_scale for the result `rstd` of rescaled_rstd().
template <class Acc>
inline void store_rstd(Acc* to, Acc rstd, Acc row_scale, double eps) {
  using Limits = std::numeric_limits<Acc>;
  if (rstd == Limits::max()) {
    *to = static_cast<Acc>(1 / std::sqrt(eps));
  } else if (row_scale < 1 && rstd * row_scale < Limits::min()) {
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
  if (bits >> (Limits::digits - 1)) return *rstd / row_scale;
  return static_cast<Acc>(bits) * Limits::epsilon() * (Limits::min() / row_scale);
}

template <class X, bool rescaled, class Lanes>
inline Pack<AccOf<X>> load_row(const X* x, AccOf<X> row_scale, Lanes lanes) {
  const auto v = load<X>(x, lanes);
  if constexpr (rescaled) return v * row_scale;
  return v;
}

// A pack of weights, or of an input_scale; ones if it is absent. weight_offset is 1 for a zero-centered weight, else 0.
template <class X, class W, class Lanes>
inline Pack<AccOf<X>> load_weight(const W* weight, AccOf<X> weight_offset, int64_t j, Lanes lanes) {
  if (!weight) return broadcast(AccOf<X>(1));
  return load<X>(weight + j, lanes) + weight_offset;
}

// The divisor in backward from the output: the weight, or NaN if it is too small to divide by.
template <class Acc>
inline Pack<Acc> divisor(const Pack<Acc>& weight) {
  constexpr Acc kLimit = kSmallestDivisor;
  const Vec<Acc> nan = Vec<Acc>{} + std::numeric_limits<Acc>::quiet_NaN();
  const auto checked = [&](Vec<Acc> w) { return ((w > -kLimit) & (w < kLimit)) ? nan : w; };
  return {checked(weight.a), checked(weight.b)};
}

// ---- weight gradients -----------------------------------------------------------------------------------------------

// Stores columns [begin, end) of a parameter's gradient: the total of its partial sums, one row of them for each of
// `count` segments. The packs of the partial sums are in the lane order of X.
template <class X, class W>
void add_partials(const AccOf<X>* partials, int64_t pitch, int64_t count, int64_t begin, int64_t end, W* gradient) {
  using Acc = AccOf<X>;
  for_each_pack<Acc, 1>(begin, end - begin, [&](int, int64_t j, auto lanes) {
    auto sum = read(partials + j, AllLanes{});
    if (count > 1) {
      DoublePack<Acc> total = {};
      for (int64_t segment = 0; segment < count; ++segment)
        add(total, read(partials + segment * pitch + j, AllLanes{}));
      sum = rounded<Acc>(total);
    }
    store<X, true>(gradient + j, sum, lanes);
  });
}

// Stores the gradients of the parameters: the totals over all segments or, for a gradient per sample, over the segments
// of each sample.
template <class X, class W>
void add_partials(const BackwardParams& p, const AccOf<X>* partials, int64_t segments) {
  const ParameterGradients gradients(p);
  if (!gradients.any()) return;
  const int64_t samples = gradients.any_per_sample() ? p.samples : 1;
  const int64_t tiles = ceil_div(p.cols, kMaxPackSize), pitch = gradients.count * padded_cols(p);
  const int64_t tile_elements = gradients.count * segments / samples * kMaxPackSize;
  parallel_for(samples * tiles, grain(tile_elements), [&](int64_t begin, int64_t end) {
    for_each_sample(tiles, begin, end, [&](int64_t sample, int64_t tile, int64_t n) {
      const View* const in_order[] = {&gradients.weight, &gradients.bias, &gradients.input_scale};
      const auto* sums = partials;
      for (const View* gradient : in_order) {
        const int64_t count = gradient->sample_stride ? segments / samples : segments;
        if (gradient->data && sample * count < segments) {
          add_partials<X>(sums + sample * count * pitch, pitch, count, tile * kMaxPackSize,
                          min(p.cols, (tile + n) * kMaxPackSize), gradient->row<W>(sample, 0));
        }
        sums += padded_cols(p);
      }
    });
  });
}

}  // namespace
}  // namespace layernorm::cpu
