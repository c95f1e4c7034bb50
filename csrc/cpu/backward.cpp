// With xhat = (x - mean) * rstd and g = dy * weight, computes for every row of x and dy [rows, cols]
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
//   dweight = sum over rows of dy * xhat
//   dbias = sum over rows of dy
//
// RMSNorm has a mean of 0 and dx = rstd * (g - xhat * mean(g * xhat)). The gradient of the sum that forward returns
// with a residual is added to dx.
//
// Rows are divided into slots. A thread takes a slot and handles a few rows at a time: it first computes the sums of
// each row, then, column by column for all of them, dx and the slot's partial sums of dweight and dbias [slots, 2,
// cols]. A last loop adds the slots. x and dy come from memory once, so 3 * rows * cols * sizeof(T) bytes are moved. If
// there are fewer slots than threads, the sums of all rows are computed first, and then the threads share the columns.
// The order of every sum stays the same.
//
// Precision: the saved mean is rounded, so xhat is off by a constant within a row. This constant is the average of xhat
// and is subtracted from it.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include <cmath>
#include <limits>

#include "../dtypes.h"
#include "row.h"

namespace layernorm::cpu::CPU_CAPABILITY {
namespace {

// Columns of one task if the threads share the columns.
constexpr int64_t kTile = 1024;

// Short rows take less time than the work that is done once per row. Their sums are computed for four rows together,
// those of longer narrow rows for two, so that all sums stay in registers.
template <class T>
bool is_short(int64_t cols) {
  return cols * static_cast<int64_t>(sizeof(T)) <= 512;
}
constexpr int kFewRows = 2;

// The number of rows whose second loop shares the loads of the weight and the loads and stores of the partial sums:
// several for narrow rows, as in forward, and for very long rows, whose weight and partial sums do not stay in the
// first-level cache. Two streams of 768 floats are read 1.1 times as fast as four (Intel Xeon with AVX-512).
template <class T>
int64_t rows_together(int64_t cols) {
  if (is_short<T>(cols) || (sizeof(T) == 2 && cols <= 1024)) return kRows;
  return is_narrow<T>(cols) || is_long<T>(cols) ? kFewRows : 1;
}

// The number of rows whose sums are computed before the second loop starts. Short rows have several iterations of the
// second loop, which then do not wait for each other's coefficients: 16384 rows of 32 take 0.9 of the time.
constexpr int64_t kMaxBlockRows = 16;
template <class T>
int64_t block_rows(int64_t cols) {
  if (!is_short<T>(cols)) return rows_together<T>(cols);
  return min(kMaxBlockRows, 2048 / (cols * static_cast<int64_t>(sizeof(T))) / kRows * kRows);
}

// The coefficients of a row for the second loop: with d = x * scale - mean,
//   rstd = rstd_scaled * scale
//   xhat = d * rstd_scaled + minus_shift
//   dx = rstd * ((g + minus_c2) + xhat * minus_c1)
// g + minus_c2 is exactly 0 if g is constant in the row, as for the gradient of a sum of outputs, or for one column.
template <class Acc>
struct Coefficients {
  Acc scale;        // 1; kScale if x - mean might overflow; rstd if d is xhat, computed from the output
  Acc mean;         // times scale
  Acc rstd_scaled;  // rstd / scale
  Acc minus_shift;  // minus the average of xhat before this correction
  Acc minus_c1;     // -mean(g * xhat)
  Acc minus_c2;     // -mean(g)
};
static_assert(sizeof(Coefficients<float>) == kCoefficients * sizeof(float));
static_assert(kMaxPackSize % kPackSize<float> == 0 && kTile % kMaxPackSize == 0);

template <class T, class W>
struct Backward {
  using Acc = AccOf<T>;

  Backward(const BackwardParams& p, void* workspace)
      : p(p),
        groups(p.cols, kChunk<Acc>),
        slots(num_slots(p.rows)),
        padded_cols(kMaxPackSize * ceil_div(p.cols, kMaxPackSize)),
        partials(static_cast<Acc*>(workspace)),
        coefficients(reinterpret_cast<Coefficients<Acc>*>(partials + 2 * slots * padded_cols)) {}

  const T* dy(int64_t r) const { return static_cast<const T*>(p.grad_output) + r * p.grad_output_stride; }
  const T* x(int64_t r) const { return static_cast<const T*>(p.input) + r * p.input_stride; }
  const T* dsum(int64_t r) const {
    return p.grad_sum ? static_cast<const T*>(p.grad_sum) + r * p.grad_sum_stride : nullptr;
  }
  Acc mean(int64_t r) const { return p.mean ? static_cast<const Acc*>(p.mean)[r] : Acc(0); }
  Acc rstd(int64_t r) const { return static_cast<const Acc*>(p.rstd)[r]; }
  const W* weight() const { return static_cast<const W*>(p.weight); }
  const W* bias() const { return static_cast<const W*>(p.bias); }
  Acc weight_offset() const { return p.zero_centered_weight; }
  // Special rows need scaling, or have xhat computed from the output. No difference overflows in a row whose standard
  // deviation is below 2^60, whatever its length.
  bool is_special(int64_t r) const { return p.from_output || rstd(r) < Acc(0x1p-60); }
  T* dx(int64_t r) const { return p.grad_input ? static_cast<T*>(p.grad_input) + r * p.cols : nullptr; }
  Acc* dweight(int64_t slot) const { return p.grad_weight ? partials + 2 * slot * padded_cols : nullptr; }
  Acc* dbias(int64_t slot) const { return p.grad_bias ? partials + (2 * slot + 1) * padded_cols : nullptr; }

  const BackwardParams& p;
  const ChunkGroups groups;
  const int64_t slots, padded_cols;
  Acc* partials;                    // [slots, 2, padded_cols], packs in the order of T
  Coefficients<Acc>* coefficients;  // [rows]
};

// The weight, with NaN for values too small to divide by.
template <class Acc>
Pack<Acc> divisor(const Pack<Acc>& weight) {
  constexpr Acc kLimit = kSmallestDivisor;
  const Vec<Acc> nan = Vec<Acc>{} + std::numeric_limits<Acc>::quiet_NaN();
  const auto checked = [&](Vec<Acc> w) { return (w > -kLimit) & (w < kLimit) ? nan : w; };
  return {checked(weight.a), checked(weight.b)};
}

// d (see Coefficients) for a pack of x.
template <bool special, class T, class W, class Mean, class Lanes>
Pack<AccOf<T>> deviation(const Backward<T, W>& b, const T* x, const Mean& mean, int64_t j, Lanes lanes) {
  if constexpr (!special) return load<T>(x + j, lanes) - mean;
  if (!b.p.from_output) return load_row<T, true>(x + j, lanes) - mean;
  auto v = load<T>(x + j, lanes);
  if (b.bias()) v = v - load<T>(b.bias() + j, lanes);
  return v / divisor(load_weight<T>(b.weight(), b.weight_offset(), j, lanes));
}

// The first loop, for rows r to r + kCount - 1. Its operands are local variables, which a store cannot alias.
template <class Threads, int kCount, int kPacks, bool special, bool with_g, class T, class W>
void first_loop(const Backward<T, W>& b, int64_t r, Coefficients<AccOf<T>>* c) {
  using Acc = AccOf<T>;
  enum { kXhat, kG, kGXhat, kKinds };
  const Acc scale = !special ? Acc(1) : b.p.from_output ? b.rstd(r) : kScale<Acc>;
  const T* const x = b.x(r);
  const T* const dy = b.dy(r);
  const W* const weight = b.weight();
  const Acc weight_offset = b.weight_offset();
  const int64_t x_stride = b.p.input_stride, dy_stride = b.p.grad_output_stride;
  Acc mean[kCount], rstd_scaled[kCount];
  for (int k = 0; k < kCount; ++k) {
    mean[k] = b.mean(r + k) * scale;
    rstd_scaled[k] = special && b.p.from_output ? Acc(1) : b.rstd(r + k) / scale;
  }
  const auto sums = Threads::template sum<Sums<kCount, kKinds>>(b.groups, [&](int64_t begin, int64_t n) {
    Accumulators<Acc, kCount, with_g ? kKinds : 1, kPacks> s;
    for_each_pack<Acc, kPacks>(begin, n, [&](int pack, int64_t j, auto lanes) {
      Pack<Acc> w;
      if (with_g) w = load_weight<T>(weight, weight_offset, j, lanes);
#pragma GCC unroll 4
      for (int k = 0; k < kCount; ++k) {
        const auto d = deviation<special>(b, x + k * x_stride, mean[k], j, lanes);
        const auto xhat = zero_outside<kEvenOdd<T>>(d * rstd_scaled[k], lanes);
        s.values[kXhat][k][pack] = s.values[kXhat][k][pack] + xhat;
        if constexpr (with_g) {
          const auto g = load<T>(dy + k * dy_stride + j, lanes) * w;
          s.values[kG][k][pack] = s.values[kG][k][pack] + g;
          s.values[kGXhat][k][pack] = fma(g, xhat, s.values[kGXhat][k][pack]);
        }
      }
    });
    return Sums<kCount, kKinds>(s.total());
  });
  PerRow<double, kCount> shift = {}, mean_g = {};
  if (!b.p.rms)
    shift = b.groups.template mean<Acc>(sums.values[kXhat]), mean_g = b.groups.template mean<Acc>(sums.values[kG]);
  const auto mean_g_xhat = b.groups.template mean<Acc>(sums.values[kGXhat]) - shift * mean_g;
  const auto minus_shift = __builtin_convertvector(-shift, PerRow<Acc, kCount>);
  const auto minus_c1 = __builtin_convertvector(-mean_g_xhat, PerRow<Acc, kCount>);
  const auto minus_c2 = __builtin_convertvector(-mean_g, PerRow<Acc, kCount>);
  for (int k = 0; k < kCount; ++k) c[k] = {scale, mean[k], rstd_scaled[k], minus_shift[k], minus_c1[k], minus_c2[k]};
}

template <class Threads, int kCount, int kPacks, class T, class W>
void coefficients(const Backward<T, W>& b, int64_t r, Coefficients<AccOf<T>>* c) {
  if (!b.p.grad_input && !b.p.grad_weight) {  // dbias needs nothing but dy
    for (int k = 0; k < kCount; ++k) c[k] = {1, 0, 0, 0, 0, 0};
    return;
  }
  bool any_special = false;
  for (int k = 0; k < kCount; ++k) any_special |= b.is_special(r + k);
  if constexpr (kCount > 1) {
    if (any_special) {
      for (int k = 0; k < kCount; ++k) coefficients<Threads, 1, kPacks>(b, r + k, c + k);
      return;
    }
  } else if (any_special) {
    first_loop<Threads, 1, kPacks, true, true>(b, r, c);
    return;
  }
  if (b.p.grad_input) {
    first_loop<Threads, kCount, kPacks, false, true>(b, r, c);
  } else {
    first_loop<Threads, kCount, kPacks, false, false>(b, r, c);
  }
}

// v * w + c. The product of two 16-bit numbers is exact in float, so fusing the operations changes nothing.
template <class T, class W, class Acc>
Pack<Acc> multiply_add(const Pack<Acc>& v, const Pack<Acc>& w, const Pack<Acc>& c) {
  if constexpr (sizeof(T) == 2 && sizeof(W) == 2) return fma(v, w, c);
  return v * w + c;
}

// The second loop, for columns [begin, begin + n) of rows r to r + kCount - 1. `first` says that they are the first of
// their slot. The flags for the gradients are template parameters because testing them in the loop costs a third of the
// speed.
template <int kCount, bool special, bool with_dx, bool with_dweight, bool with_dbias, class T, class W>
void second_loop(const Backward<T, W>& b, int64_t slot, int64_t r, bool first, const Coefficients<AccOf<T>>* c,
                 int64_t begin, int64_t n) {
  using Acc = AccOf<T>;
  const T* const x = b.x(r);
  const T* const dy = b.dy(r);
  const T* const dsum = b.dsum(r);
  const W* const weight = b.weight();
  const Acc weight_offset = b.weight_offset();
  T* const dx = b.dx(r);
  Acc* const dweight = b.dweight(slot);
  Acc* const dbias = b.dbias(slot);
  const int64_t x_stride = b.p.input_stride, dy_stride = b.p.grad_output_stride, dsum_stride = b.p.grad_sum_stride;
  const int64_t cols = b.p.cols;
  // Packs instead of scalars, for which GCC needs one more instruction to load and broadcast.
  Pack<Acc> mean[kCount], rstd_scaled[kCount], rstd[kCount], minus_shift[kCount], minus_c1[kCount], minus_c2[kCount];
  for (int k = 0; k < kCount; ++k) {
    mean[k] = broadcast(c[k].mean), rstd_scaled[k] = broadcast(c[k].rstd_scaled);
    rstd[k] = special ? rstd_scaled[k] * c[k].scale : rstd_scaled[k];
    minus_shift[k] = broadcast(c[k].minus_shift), minus_c1[k] = broadcast(c[k].minus_c1);
    minus_c2[k] = broadcast(c[k].minus_c2);
  }
  for_each_pack<Acc, 1>(begin, n, [&](int, int64_t j, auto lanes) {
    Pack<Acc> w, dw = {}, db = {};
    if (with_dx) w = load_weight<T>(weight, weight_offset, j, lanes);
    if (with_dweight && !first) dw = read(dweight + j, AllLanes{});
    if (with_dbias && !first) db = read(dbias + j, AllLanes{});
    for (int k = 0; k < kCount; ++k) {
      const auto v = load<T>(dy + k * dy_stride + j, lanes);
      if constexpr (with_dbias) db = db + v;
      if constexpr (with_dx || with_dweight) {
        const auto d = deviation<special>(b, x + k * x_stride, mean[k], j, lanes);
        const auto xhat = fma(d, rstd_scaled[k], minus_shift[k]);
        if constexpr (with_dweight) dw = fma(v, xhat, dw);
        if constexpr (with_dx) {
          auto result = fma(xhat, minus_c1[k], multiply_add<T, W>(v, w, minus_c2[k])) * rstd[k];
          if (dsum) result = result + load<T>(dsum + k * dsum_stride + j, lanes);
          store<T, !std::is_same_v<T, W>>(dx + k * cols + j, result, lanes);
          prefetch_for_write(dx + k * cols + j);
        }
      }
    }
    if (with_dweight) write(dweight + j, dw, AllLanes{});
    if (with_dbias) write(dbias + j, db, AllLanes{});
  });
}

template <class T, class W>
void second_loop(const Backward<T, W>& b, int64_t slot, int64_t r, int64_t count, bool first,
                 const Coefficients<AccOf<T>>* c, int64_t begin, int64_t n) {
  bool any_special = false;
  for (int64_t k = 0; k < count; ++k) any_special |= b.is_special(r + k);
  const int64_t at_once = any_special ? 1 : rows_together<T>(b.p.cols);
  dispatch_flags(
      [&](auto with_dx, auto with_dweight, auto with_dbias) {
        int64_t k = 0;
        for (; at_once == kRows && k + kRows <= count; k += kRows) {
          second_loop<kRows, false, with_dx, with_dweight, with_dbias>(b, slot, r + k, first && k == 0, c + k, begin,
                                                                       n);
        }
        for (; at_once >= kFewRows && k + kFewRows <= count; k += kFewRows) {
          second_loop<kFewRows, false, with_dx, with_dweight, with_dbias>(b, slot, r + k, first && k == 0, c + k, begin,
                                                                          n);
        }
        for (; k < count; ++k) {
          const bool first_row = first && k == 0;
          if (!b.is_special(r + k)) {
            second_loop<1, false, with_dx, with_dweight, with_dbias>(b, slot, r + k, first_row, c + k, begin, n);
          } else {
            second_loop<1, true, with_dx, with_dweight, with_dbias>(b, slot, r + k, first_row, c + k, begin, n);
          }
        }
      },
      b.p.grad_input != nullptr, b.p.grad_weight != nullptr, b.p.grad_bias != nullptr);
}

// Calls f(first row, rows) for the rows of a slot, at most `step` at a time.
template <class F>
void for_rows_of_slot(int64_t rows, int64_t slot, int64_t step, const F& f) {
  const int64_t end = min(rows, (slot + 1) * rows_per_slot(rows));
  for (int64_t r = slot * rows_per_slot(rows); r < end; r += step) f(r, min(step, end - r));
}

// Adds the slots' partial sums of one parameter's gradient over columns [begin, end).
template <class T, class W>
void reduce_slots(const Backward<T, W>& b, const AccOf<T>* partials, int64_t begin, int64_t end, W* gradient) {
  for_each_pack<AccOf<T>, 1>(begin, end - begin, [&](int, int64_t j, auto lanes) {
    auto sum = read(partials + j, AllLanes{});
    if (b.slots > 1) {
      DoublePack<AccOf<T>> total = {};
      for (int64_t slot = 0; slot < b.slots; ++slot)
        add(total, read(partials + 2 * slot * b.padded_cols + j, AllLanes{}));
      sum = rounded<AccOf<T>>(total);
    }
    store<T, true>(gradient + j, sum, lanes);
  });
}

template <class T, class W>
void backward(const Backward<T, W>& b) {
  using Acc = AccOf<T>;
  const BackwardParams& p = b.p;
  const int64_t slot_rows = rows_per_slot(p.rows), step = block_rows<T>(p.cols);

  if (b.slots >= num_threads() || p.cols <= kTile) {
    const bool narrow = is_narrow<T>(p.cols);
    parallel_for(b.slots, ceil_div(kGrain, slot_rows * p.cols), [&](int64_t slot, int64_t end) {
      for (; slot < end; ++slot) {
        for_rows_of_slot(p.rows, slot, step, [&](int64_t r, int64_t count) {
          Coefficients<Acc> c[kMaxBlockRows];
          int64_t k = 0;
          if (narrow) {
            for (; is_short<T>(p.cols) && k + kRows <= count; k += kRows)
              coefficients<OneThread, kRows, kNarrowPacks>(b, r + k, c + k);
            for (; k + kFewRows <= count; k += kFewRows)
              coefficients<OneThread, kFewRows, kNarrowPacks>(b, r + k, c + k);
            for (; k < count; ++k) coefficients<OneThread, 1, kNarrowPacks>(b, r + k, c + k);
          } else {
            for (; k < count; ++k) coefficients<OneThread, 1, kWidePacks>(b, r + k, c + k);
          }
          second_loop(b, slot, r, count, r == slot * slot_rows, c, 0, p.cols);
        });
      }
    });
  } else {
    if (p.rows < num_threads()) {
      for (int64_t r = 0; r < p.rows; ++r) coefficients<AllThreads, 1, kWidePacks>(b, r, b.coefficients + r);
    } else {
      parallel_for(p.rows, ceil_div(kGrain, p.cols), [&](int64_t r, int64_t end) {
        for (; r < end; ++r) coefficients<OneThread, 1, kWidePacks>(b, r, b.coefficients + r);
      });
    }
    const int64_t tiles = ceil_div(p.cols, kTile);
    parallel_for(b.slots * tiles, ceil_div(kGrain, slot_rows * kTile), [&](int64_t task, int64_t end) {
      for (; task < end; ++task) {
        const int64_t slot = task / tiles, begin = task % tiles * kTile;
        for_rows_of_slot(p.rows, slot, step, [&](int64_t r, int64_t count) {
          second_loop(b, slot, r, count, r == slot * slot_rows, b.coefficients + r, begin, min(kTile, p.cols - begin));
        });
      }
    });
  }

  if (!p.grad_weight && !p.grad_bias) return;
  parallel_for(ceil_div(p.cols, kMaxPackSize), ceil_div(kGrain, b.slots * kMaxPackSize),
               [&](int64_t begin, int64_t end) {
                 begin *= kMaxPackSize;
                 end = min(p.cols, end * kMaxPackSize);
                 if (p.grad_weight) reduce_slots(b, b.dweight(0), begin, end, static_cast<W*>(p.grad_weight));
                 if (p.grad_bias) reduce_slots(b, b.dbias(0), begin, end, static_cast<W*>(p.grad_bias));
               });
}

}  // namespace

void backward(const BackwardParams& p) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    if (fits_stack(p.rows, p.cols)) {
      alignas(kVectorBytes) AccOf<T> workspace[2 * kStackCols];
      backward(Backward<T, W>(p, workspace));
    } else {
      backward(Backward<T, W>(p, p.workspace));
    }
  });
}

}  // namespace layernorm::cpu::CPU_CAPABILITY
