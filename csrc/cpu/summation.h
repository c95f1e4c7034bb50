// Sums over a row. A row is divided into chunks (kChunk columns), and the chunks into runs (up to kMaxRuns). The order
// of summation depends only on the instruction set, the dtype and the number of columns, not on the threads or the
// number of rows that a loop handles together:
//   1. within a chunk, each lane of kPacks accumulators, which take turns, adds its elements in order;
//   2. the accumulators of the chunk are added, then their lanes;
//   3. the chunks of a run are added in order, in double;
//   4. the runs are added in order, in double. Rows of up to kMaxRuns chunks have one chunk in each run.
#pragma once

#include "loops.h"

namespace layernorm::cpu {
namespace {

// One value for each of kCount rows.
template <class Number, int kCount>
using PerRow = typename VectorOf<Number, kCount * sizeof(Number)>::type;

// Several sums over each of kCount rows, for example of x and of x^2: kKinds is 2.
template <int kCount, int kKinds>
struct Sums {
  Sums() = default;
  // The sums that `other` lacks are zero.
  template <int kFewer>
  explicit Sums(const Sums<kCount, kFewer>& other) {
    for (int kind = 0; kind < kFewer; ++kind) values[kind] = other.values[kind];
  }
  PerRow<double, kCount> values[kKinds] = {};
  void operator+=(const Sums& other) {
    for (int kind = 0; kind < kKinds; ++kind) values[kind] += other.values[kind];
  }
};

// The accumulators of such sums over a chunk: packs, to which loops add. The pragmas and the attribute make GCC keep
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

// The chunks of a row, and the runs of adjacent chunks.
struct Chunks {
  Chunks(int64_t cols, int64_t chunk_cols)
      : cols(cols),
        chunk_cols(chunk_cols),
        run_cols(chunk_cols * ceil_div(ceil_div(cols, chunk_cols), kMaxRuns)),
        runs(ceil_div(cols, run_cols)) {}

  // The total of f(Columns) over the chunks of one run.
  template <class Sum, class F>
  Sum sum(int64_t run, const F& f) const {
    const int64_t begin = run * run_cols, end = min(cols, begin + run_cols);
    Sum total = f(Columns{begin, min(chunk_cols, end - begin)});
    for (int64_t j = begin + chunk_cols; j < end; j += chunk_cols) total += f(Columns{j, min(chunk_cols, end - j)});
    return total;
  }

  // sum / cols in double. Rounded to float, the product with the reciprocal equals the quotient, so that a constant row
  // has exactly its constant as mean. Divisions would slow down short rows.
  template <class Acc, class Sum>
  Sum mean(Sum sum) const {
    return sizeof(Acc) == 4 ? sum * inverse_cols : sum / static_cast<double>(cols);
  }

  int64_t cols, chunk_cols, run_cols;  // columns of the row, of a chunk and of a run; the last ones may have fewer
  int64_t runs;                        // the number of runs
  double inverse_cols = 1.0 / static_cast<double>(cols);
};

// The template parameter Threads, three ways to handle a row: sum() returns the total of f(Columns) over the chunks of
// the row, and for_each() calls f(Columns) for all of its columns.

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
struct OneThreadNarrow : OneThread {
  template <class Sum, class F>
  static Sum sum(const Chunks& chunks, const F& f) {
    Sum total;
    for (auto& value : total.values) value = -value;  // -0, to which adding x gives x, even for -0
    for (int64_t j = 0; j < chunks.cols; j += chunks.chunk_cols) {
      total += f(Columns{j, min(chunks.chunk_cols, chunks.cols - j)});
    }
    return total;
  }
};

// All threads share the runs of the row.
struct AllThreads {
  template <class Sum, class F>
  static Sum sum(const Chunks& chunks, const F& f) {
    Sum sums[kMaxRuns];
    parallel_for(chunks.runs, grain(chunks.run_cols), [&](int64_t begin, int64_t end) {
      for (int64_t run = begin; run < end; ++run) sums[run] = chunks.sum<Sum>(run, f);
    });
    Sum total = sums[0];
    for (int64_t run = 1; run < chunks.runs; ++run) total += sums[run];
    return total;
  }
  template <class F>
  static void for_each(const Chunks& chunks, const F& f) {
    parallel_for(chunks.runs, grain(chunks.run_cols), [&](int64_t begin, int64_t end) {
      const int64_t first_column = begin * chunks.run_cols;
      f(Columns{first_column, min(chunks.cols, end * chunks.run_cols) - first_column});
    });
  }
};

}  // namespace
}  // namespace layernorm::cpu
