// Sweeps over rows, shared by forward and backward.
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

// Calls f with each of the flags as a std::bool_constant.
template <class F>
void with_constants(const F& f) {
  f();
}
template <class F, class... Flags>
void with_constants(const F& f, bool flag, Flags... flags) {
  const auto rest = [&](auto constant) { with_constants([&](auto... others) { f(constant, others...); }, flags...); };
  flag ? rest(std::true_type{}) : rest(std::false_type{});
}

// ---- the order of summation -----------------------------------------------------------------------------------------
//
// A function of the dtype and the number of columns alone, whichever threads and however many rows at a time do the
// work: elements of a chunk in the lanes of kParts packs in turn; lanes and packs; chunks in order, in double; and for
// rows of more than 256 chunks, groups of chunks likewise, so that threads can share a row.

// So short that a lane adds up 16 floats at most: small equal numbers that are added to a large one all err in
// the same direction. Of one outlier and 8191 equal numbers, four times as many put the output off by more than is
// promised. Doubles err in the sum of the chunks as well, which had better be fewer.
template <class Acc>
constexpr int64_t kChunk = (sizeof(Acc) == 4 ? 8 : 16) * kVectorBytes;
constexpr int64_t kMaxGroups = 256;

// Narrow rows are swept kRows at a time, which keeps the adders busy, overlaps the ends of their sums and shares the
// loads of the parameters: rows of 768 floats take 0.7 of the time. Longer rows are swept one by one, with two packs in
// flight: in several streams the memory would be read more slowly.
constexpr int kRows = 4;
template <class T>
inline bool is_narrow(int64_t cols) {
  return cols * static_cast<int64_t>(sizeof(T)) <= 4096;
}
constexpr int kNarrowParts = 1, kWideParts = 2;

// Whether forward sweeps narrow rows several at a time; the sums are the same either way. Longer rows of floats from
// beyond the second-level cache are read faster one by one: 4097 x 771 in 0.6 of the time, 8192 x 1024 in 0.8 (Intel
// Xeon with AVX-512). Of 16-bit numbers several are faster wherever they lie.
template <class T>
inline bool sweeps_several(int64_t rows, int64_t cols) {
  const int64_t row_bytes = cols * static_cast<int64_t>(sizeof(T));
  return sizeof(T) == 2 || row_bytes <= 1024 || rows * row_bytes <= int64_t{1} << 21;
}

// A number for each of kCount rows.
template <class Number, int kCount>
using Rows = typename VectorOf<Number, kCount * sizeof(Number)>::type;

// Sums of kKinds kinds over each of kCount rows.
template <int kCount, int kKinds>
struct Sums {
  Sums() = default;
  // With zeros for further kinds.
  template <int kFewer>
  explicit Sums(const Sums<kCount, kFewer>& other) {
    for (int kind = 0; kind < kFewer; ++kind) of[kind] = other.of[kind];
  }
  Rows<double, kCount> of[kKinds] = {};
  void operator+=(const Sums& other) {
    for (int kind = 0; kind < kKinds; ++kind) of[kind] += other.of[kind];
  }
};

// Registers, if GCC sees through every loop and call in which they stand before it decides where an array lies. It does
// so of itself for some dtypes and not for others; hence the pragmas, here and there, and the attribute. In memory,
// they took backward of 32 columns in fp16 a fifth of its time.
template <class Acc, int kCount, int kKinds, int kParts>
struct Accumulators {
  Pack<Acc> of[kKinds][kCount][kParts] = {};
  [[gnu::always_inline]] Sums<kCount, kKinds> total() const {
    Sums<kCount, kKinds> sums;
#pragma GCC unroll 4
    for (int kind = 0; kind < kKinds; ++kind) {
      Vec<Acc> vectors[kCount];
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        Pack<Acc> p = of[kind][r][0];
        for (int part = 1; part < kParts; ++part) p = p + of[kind][r][part];
        vectors[r] = p.a + p.b;
      }
      sums.of[kind] = sum_each(vectors);
    }
    return sums;
  }
};

// Calls f(part, j, lanes) for the packs that cover columns [begin, begin + n).
template <class Acc, int kParts, class F>
inline void for_each_pack(int64_t begin, int64_t n, const F& f) {
  constexpr int64_t kStep = kPackSize<Acc>;
  const int64_t end = begin + n;
  int64_t j = begin;
  for (; j + kParts * kStep <= end; j += kParts * kStep) {
    for (int part = 0; part < kParts; ++part) f(part, j + part * kStep, All{});
  }
  if (kParts > 1 && j + kStep <= end) {
    f(0, j, All{});
    j += kStep;
  }
  if (j < end) f(kParts - 1, j, First{static_cast<int>(end - j)});
}
static_assert(kNarrowParts <= 2 && kWideParts <= 2, "for_each_pack handles one whole pack at the end");

struct Groups {
  Groups(int64_t cols, int64_t chunk)
      : cols(cols),
        chunk(chunk),
        length(chunk * ceil_div(ceil_div(cols, chunk), kMaxGroups)),
        count(ceil_div(cols, length)) {}

  // Adds f(begin, columns) over the chunks of one group.
  template <class Sum, class F>
  Sum sum(int64_t group, const F& f) const {
    const int64_t begin = group * length, end = min(cols, begin + length);
    Sum total = f(begin, min(chunk, end - begin));
    for (int64_t j = begin + chunk; j < end; j += chunk) total += f(j, min(chunk, end - j));
    return total;
  }

  // Sum / cols. Rounded to float, the product is as exact as the quotient, and that of a constant row is the constant;
  // divisions cost rows of 64 a tenth of their time.
  template <class Acc, class Sum>
  Sum mean(Sum sum) const {
    return sizeof(Acc) == 4 ? sum * inverse_cols : sum / static_cast<double>(cols);
  }

  int64_t cols, chunk, length, count;
  double inverse_cols = 1.0 / static_cast<double>(cols);
};

// Who sweeps a row: the calling thread, or all threads, group by group.
struct OneThread {
  template <class Sum, class F>
  static Sum sum(const Groups& groups, const F& f) {
    Sum total = groups.sum<Sum>(0, f);
    for (int64_t g = 1; g < groups.count; ++g) total += groups.sum<Sum>(g, f);
    return total;
  }
  template <class F>
  static void for_each(const Groups& groups, const F& f) {
    f(0, groups.cols);
  }
};

struct AllThreads {
  template <class Sum, class F>
  static Sum sum(const Groups& groups, const F& f) {
    Sum sums[kMaxGroups];
    parallel_for(groups.count, ceil_div(kGrain, groups.length), [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) sums[g] = groups.sum<Sum>(g, f);
    });
    Sum total = sums[0];
    for (int64_t g = 1; g < groups.count; ++g) total += sums[g];
    return total;
  }
  template <class F>
  static void for_each(const Groups& groups, const F& f) {
    parallel_for(groups.count, ceil_div(kGrain, groups.length), [&](int64_t begin, int64_t end) {
      f(begin * groups.length, min(groups.cols, end * groups.length) - begin * groups.length);
    });
  }
};

// ---- long rows ------------------------------------------------------------------------------------------------------

template <class T>
inline bool is_long(int64_t cols) {
  return cols * static_cast<int64_t>(sizeof(T)) >= 8192;
}

// Asks for a pack's cache lines that will be written a kilobyte further on: the stores of long rows would else stall
// the sweep. Forward takes 0.74 of the time (bf16, 1024 x 16384, Intel Xeon with AVX-512) that it takes when all lines
// of a row are asked for at first, which drives the input out of the first-level cache.
template <class T>
inline void fetch_to_write(T* p) {
  constexpr int64_t kAhead = 1024 / sizeof(T);
  __builtin_prefetch(p + kAhead, 1);
  if (sizeof(T) * kPackSize<AccOf<T>> > 64) __builtin_prefetch(p + kAhead + 64 / sizeof(T), 1);
}

// Of an output so large that no cache will hold it, the lines are not worth reading before they are overwritten: past
// the caches, forward is 1.25 times as fast (2048 x 16384, Sapphire Rapids), as is a copy 1.5 times. From 16 MB to 32
// MB a copy gains nothing, and whoever reads the output next would lose. Nor do short rows, swept several at a time.
template <class T>
inline bool belongs_past_caches(const T* p, int64_t rows, int64_t cols) {
  constexpr int64_t kBytes = int64_t{1} << 26;
  const int64_t row_bytes = cols * static_cast<int64_t>(sizeof(T));
  return is_long<T>(cols) && rows * row_bytes >= kBytes && row_bytes % kVectorBytes == 0 &&
         reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0;
}
template <bool past>
inline auto where_to_write(All) {
  return std::conditional_t<past, Past, All>{};
}
template <bool past>
inline First where_to_write(First lanes) {
  return lanes;
}

// Whether to ask for the rows that a thread takes next while it still computes, because they come from beyond the
// second-level cache and fit into the first: forward is 1.1 (fp32) and 1.2 (bf16) times as fast with it (4096 x 768,
// Sapphire Rapids). From the second level, it would be slower.
template <class T>
inline bool is_worth_fetching(int64_t rows, int64_t cols, int count) {
  const int64_t row_bytes = cols * static_cast<int64_t>(sizeof(T));
  return rows * row_bytes > 1 << 21 && count * row_bytes <= 1 << 15;
}

// Asks for a pack of them.
template <class T>
inline void fetch_to_read(const T* p) {
  __builtin_prefetch(p);
  if (sizeof(T) * kPackSize<AccOf<T>> > 64) __builtin_prefetch(p + 64 / sizeof(T));
}

// ---- large numbers --------------------------------------------------------------------------------------------------

// Rows whose numbers are so large that sums of squares, or differences, overflow are scaled by a power of two
// first, which rounds nothing. kScale^2 times the largest square is still finite, and so is 1 / kScale.
template <class Acc>
constexpr Acc kScale = sizeof(Acc) == 4 ? Acc(0x1p-96) : Acc(0x1p-768);

template <class T, bool scaled, class Lanes>
inline Pack<AccOf<T>> load_row(const T* x, Lanes lanes) {
  const auto v = load<T>(x, lanes);
  if constexpr (scaled) return v * kScale<AccOf<T>>;
  return v;
}

// Ones where there is no weight. A zero-centred one is kept less 1, its centre.
template <class T, class W, class Lanes>
inline Pack<AccOf<T>> load_weight(const W* weight, AccOf<T> centre, int64_t j, Lanes lanes) {
  if (!weight) return broadcast(AccOf<T>(1));
  return load<T>(weight + j, lanes) + centre;
}

}  // namespace
}  // namespace layernorm::cpu
