// Rows and columns, loops over them, and what these loops load, store and prefetch.
#pragma once

#include <cmath>
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

// Calls f with each of the flags as a std::bool_constant, from which f makes template arguments.
template <class F>
void dispatch_flags(const F& f) {
  f();
}
template <class F, class... Flags>
void dispatch_flags(const F& f, bool flag, Flags... flags) {
  const auto rest = [&](auto constant) { dispatch_flags([&](auto... others) { f(constant, others...); }, flags...); };
  flag ? rest(std::true_type{}) : rest(std::false_type{});
}

// ---- rows and columns -----------------------------------------------------------------------------------------------

// The index of a row of a view [samples, rows, cols] (kernel_params.h). A sample's rows share its parameters.
struct RowIndex {
  int64_t sample, row;

  RowIndex operator+(int64_t rows) const { return {sample, row + rows}; }
};

// Adjacent rows of one sample.
struct Rows {
  int64_t sample, first, count;

  // The k-th of these rows.
  RowIndex operator[](int64_t k) const { return {sample, first + k}; }
  // `n` of these rows, from the k-th on.
  Rows part(int64_t k, int64_t n) const { return {sample, first + k, n}; }
};

// Adjacent columns of a row.
struct Columns {
  int64_t begin, count;

  int64_t end() const { return begin + count; }
};

// A row of an array; null if the array is absent.
template <class T>
T* row_of(const View& array, RowIndex index) {
  return array.row<T>(index.sample, index.row);
}

// The parameter of a row's sample; null if the parameter is absent.
template <class T>
T* parameter_of(const View& parameter, RowIndex index) {
  return parameter.row<T>(index.sample, 0);
}

// Calls f(Rows) for the parts of rows [begin, end) of [samples * rows] that belong to one sample.
template <class F>
void for_each_sample(int64_t rows, int64_t begin, int64_t end, const F& f) {
  while (begin < end) {
    const int64_t first = begin % rows;
    const Rows rows_of_sample = {begin / rows, first, min(end - begin, rows - first)};
    f(rows_of_sample);
    begin += rows_of_sample.count;
  }
}

// Calls f(turn, j, lanes) for the packs that cover the columns; j is the first column of a pack. Loops that sum have
// kPacks accumulators: `turn` is the index of the one that a pack is added to, 0 to kPacks - 1 in turn, and kPacks - 1
// for a partial pack at the end.
template <class Acc, int kPacks, class F>
inline void for_each_pack(Columns columns, const F& f) {
  constexpr int64_t kStep = kPackSize<Acc>;
  const int64_t end = columns.end();
  int64_t j = columns.begin;
  for (; j + kPacks * kStep <= end; j += kPacks * kStep) {
    for (int turn = 0; turn < kPacks; ++turn) f(turn, j + turn * kStep, AllLanes{});
  }
  if (kPacks > 1 && j + kStep <= end) {
    f(0, j, AllLanes{});
    j += kStep;
  }
  if (j < end) f(kPacks - 1, j, FirstLanes{static_cast<int>(end - j)});
}
static_assert(kNarrowPacks <= 2 && kWidePacks <= 2, "for_each_pack handles one whole pack at the end");

// Calls f(j, lanes) for the packs that cover the columns of a row that the loop stores. The loop must sum nothing,
// because the packs differ from those of for_each_pack() if `aligned`: the first one ends where the row's stores are
// aligned, which streaming stores of single rows need. Short rows that are not streamed have the packs of
// for_each_pack(), because the additional pack takes as long as it saves.
template <class Acc, bool aligned, bool streaming, class T, class F>
inline void for_each_stored_pack(const T* row, Columns columns, const F& f) {
  if constexpr (!aligned) {
    for_each_pack<Acc, 1>(columns, [&](int, int64_t j, auto lanes) __attribute__((always_inline)) { f(j, lanes); });
  } else {
    constexpr int64_t kStep = kPackSize<Acc>;
    const int64_t end = columns.end();
    int64_t j = columns.begin, lanes = 0;
    if (streaming || columns.count >= kMinAlignedCols) lanes = min(columns.count, elements_to_boundary(row + j));
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

// A pack of the weight or the input_scale from column j on; ones if it is absent. weight_offset is 1 for a
// zero-centered weight, else 0.
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

// ---- stores and prefetches ------------------------------------------------------------------------------------------

constexpr int kCacheLineBytes = 64;

// The lanes for store(), which streams whole packs if `streaming`.
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

}  // namespace
}  // namespace layernorm::cpu
