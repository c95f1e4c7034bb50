// Sums over a row. Their order depends only on the instruction set, the dtype and the columns, not on the threads or
// the number of rows that a loop handles together:
//   1. within a chunk, each lane of kPacks packs, which take turns, adds its elements in order;
//   2. the packs of the chunk, then their lanes;
//   3. the chunks of a run in order, in double;
//   4. the runs in order, in double. Rows of up to 256 chunks have one chunk in each run.
#pragma once

#include "loops.h"

namespace layernorm::cpu {
namespace {

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

// The chunks of a row, in up to kMaxRuns runs of adjacent chunks.
struct Chunks {
  Chunks(int64_t cols, int64_t chunk)
      : cols(cols),
        chunk(chunk),
        run_length(chunk * ceil_div(ceil_div(cols, chunk), kMaxRuns)),
        runs(ceil_div(cols, run_length)) {}

  // The total of f(Columns) over the chunks of one run.
  template <class Sum, class F>
  Sum sum(int64_t run, const F& f) const {
    const int64_t begin = run * run_length, end = min(cols, begin + run_length);
    Sum total = f(Columns{begin, min(chunk, end - begin)});
    for (int64_t j = begin + chunk; j < end; j += chunk) total += f(Columns{j, min(chunk, end - j)});
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

// Three ways to handle a row: sum() returns the total of f(Columns) over the chunks of the row, and for_each() calls
// f(Columns) for all of its columns.

// The calling thread handles the row.
struct OneThread {
  template <class Sum, class F>
  static Sum sum(const Chunks& chunks, const F& f) {
    Sum total = chunks.sum<Sum>(0, f);
    for (int64_t run = 1; run < chunks.runs; ++run) total += chunks.sum<Sum>(run, f);
    return total;
  }
  template <class F>
  static void for_each(const Chunks& chunks, const F& f) {
    f(Columns{0, chunks.cols});
  }
};

// The calling thread handles a narrow row, each of whose runs is one chunk. GCC inlines f, because it is called in one
// place only.
struct NarrowRow : OneThread {
  template <class Sum, class F>
  static Sum sum(const Chunks& chunks, const F& f) {
    Sum total;
    for (auto& value : total.values) value = -value;  // -0, to which adding x gives x, even for -0
    for (int64_t j = 0; j < chunks.cols; j += chunks.chunk) {
      total += f(Columns{j, min(chunks.chunk, chunks.cols - j)});
    }
    return total;
  }
};

// All threads share the runs of the row.
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
      const int64_t first_column = begin * chunks.run_length;
      f(Columns{first_column, min(chunks.cols, end * chunks.run_length) - first_column});
    });
  }
};

}  // namespace
}  // namespace layernorm::cpu
