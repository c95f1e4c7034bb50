// With xhat = (x - mean) * rstd and g = dy * weight, for every row of x and dy [rows, cols]:
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat))      dweight = sum over rows of dy * xhat      dbias =
//   sum of dy
//
// Rows are cut into slots. A thread takes a slot and, for a few rows at a time, sweeps each row for its sums
// and then all of them together, column by column, for dx and the slot's partial sums of dweight and dbias
// [slots, 2, cols]; a last pass adds the slots. x and dy come from memory once: 3 * rows * cols * sizeof(T)
// bytes are moved. When there are fewer slots than threads, all rows' sums come first and the columns are
// shared out instead; every sum keeps its order.
//
// Exactness: the mean is given rounded, so that xhat is off by a constant within a row. That constant is the
// average of xhat as first computed; it is summed with the other two and taken off before xhat is used.
//
// Source: Ba et al. 2016, arXiv:1607.06450.
#include <cmath>

#include "../dtypes.h"
#include "row.h"

namespace layernorm::cpu::CPU_CAPABILITY {
namespace {

// Rows of one sweep over the columns: 4 share the loads of weight and the loads and stores of the partial
// sums.
constexpr int kRows = 4;
// Columns of one task where the columns are shared out.
constexpr int64_t kTile = 1024;

// What the second sweep needs to know of a row.
template <class Acc>
struct Coefficients {
  Acc scale;        // 1, or kScale where x - mean might overflow
  Acc mean;         // times scale
  Acc rstd_scaled;  // rstd / scale: xhat = (x * scale - mean) * rstd_scaled - shift
  Acc shift;        // average of xhat before it is corrected
  Acc c1, c2;       // mean(g * xhat), mean(g); zero unless dx is wanted
};
static_assert(sizeof(Coefficients<float>) == kCoefficients * sizeof(float),
              "backward_workspace counts on it");

template <class T, class W>
struct Backward {
  using Acc = AccOf<T>;

  explicit Backward(const BackwardParams& p)
      : p(p),
        groups(p.cols),
        slots(num_slots(p.rows)),
        coefficients(static_cast<Coefficients<Acc>*>(p.workspace)),
        partials(static_cast<Acc*>(p.workspace) + kCoefficients * p.rows) {}

  const T* dy(int64_t r) const { return static_cast<const T*>(p.grad_output) + r * p.grad_output_stride; }
  const T* x(int64_t r) const { return static_cast<const T*>(p.input) + r * p.input_stride; }
  const W* weight() const { return static_cast<const W*>(p.weight); }
  T* dx(int64_t r) const { return p.grad_input ? static_cast<T*>(p.grad_input) + r * p.cols : nullptr; }
  Acc* dweight(int64_t slot) const { return p.grad_weight ? partials + (2 * slot) * p.cols : nullptr; }
  Acc* dbias(int64_t slot) const { return p.grad_bias ? partials + (2 * slot + 1) * p.cols : nullptr; }

  const BackwardParams& p;
  const Groups groups;
  const int64_t slots;
  Coefficients<Acc>* coefficients;  // [rows]
  Acc* partials;                    // [slots, 2, cols]
};

struct RowSums {
  double g_xhat, g, xhat;
  void operator+=(const RowSums& other) {
    g_xhat += other.g_xhat;
    g += other.g;
    xhat += other.xhat;
  }
};

// First sweep over row r.
template <class Threads, bool kScaled, class T, class W>
Coefficients<AccOf<T>> row_coefficients(const Backward<T, W>& b, int64_t r) {
  using Acc = AccOf<T>;
  const Acc scale = kScaled ? kScale<Acc> : Acc(1);
  const Acc mean = static_cast<const Acc*>(b.p.mean)[r] * scale;
  const Acc rstd = static_cast<const Acc*>(b.p.rstd)[r] / scale;
  const Row<T, kScaled> row{b.x(r)};
  const T* dy = b.dy(r);
  const W* weight = b.weight();
  const bool with_g = b.p.grad_input;
  const auto sums = Threads::template sum<RowSums>(b.groups, [&](int64_t begin, int64_t n) {
    Accumulator<Acc> g_xhat, g, xhat;
    const auto m = broadcast(mean), s = broadcast(rstd);
    for_each_vector<Acc>(n, [&](auto k, int64_t j, auto lanes) {
      j += begin;
      const auto h = keep((row.load(j, lanes) - m) * s, lanes);
      xhat.parts[k.value] += h;
      if (with_g) {
        auto v = load(dy + j, lanes);
        if (weight) v = v * load(weight + j, lanes);
        g.parts[k.value] += v;
        g_xhat.parts[k.value] = fma(v, h, g_xhat.parts[k.value]);
      }
    });
    return RowSums{g_xhat.total(), g.total(), xhat.total()};
  });
  const double cols = b.p.cols, shift = sums.xhat / cols, c2 = sums.g / cols;
  const double c1 = sums.g_xhat / cols - shift * c2;
  return {scale, mean, rstd, static_cast<Acc>(shift), static_cast<Acc>(c1), static_cast<Acc>(c2)};
}

template <class Threads, class T, class W>
Coefficients<AccOf<T>> row_coefficients(const Backward<T, W>& b, int64_t r) {
  using Acc = AccOf<T>;
  if (!b.p.grad_input && !b.p.grad_weight) return {};  // dbias alone needs nothing but dy
  // A row whose standard deviation is below 2^60 cannot hold a difference that overflows, however long it is.
  const Acc rstd = static_cast<const Acc*>(b.p.rstd)[r];
  return rstd < Acc(0x1p-60) ? row_coefficients<Threads, true>(b, r) : row_coefficients<Threads, false>(b, r);
}

// Second sweep over the columns [begin, begin + n) of kCount rows from row r on. The partial sums of a slot
// start at its first row.
template <int kCount, bool kScaled, class T, class W>
void sweep_columns(const Backward<T, W>& b, int64_t slot, int64_t r, bool first,
                   const Coefficients<AccOf<T>>* c, int64_t begin, int64_t n) {
  using Acc = AccOf<T>;
  const W* weight = b.weight();
  Acc* dweight = b.dweight(slot);
  Acc* dbias = b.dbias(slot);
  const bool with_xhat = b.p.grad_input || dweight;
  for_each_vector<Acc>(n, [&](auto, int64_t j, auto lanes) {
    j += begin;
    Vec<Acc> w = broadcast(Acc(1)), dw{}, db{};
    if (weight) w = load(weight + j, lanes);
    if (dweight && !first) dw = load(dweight + j, lanes);
    if (dbias && !first) db = load(dbias + j, lanes);
    for (int k = 0; k < kCount; ++k) {
      const auto v = load(b.dy(r + k) + j, lanes);
      db += v;
      if (with_xhat) {
        const auto x = Row<T, kScaled>{b.x(r + k)}.load(j, lanes);
        const auto xhat = (x - c[k].mean) * c[k].rstd_scaled - c[k].shift;
        dw = fma(v, xhat, dw);
        if (T* dx = b.dx(r + k)) {
          const auto rest = fma(-xhat, broadcast(c[k].c1), v * w - c[k].c2);
          store(dx + j, rest * (c[k].rstd_scaled * c[k].scale), lanes);
        }
      }
    }
    if (dweight) store(dweight + j, dw, lanes);
    if (dbias) store(dbias + j, db, lanes);
  });
}

template <class T, class W>
void sweep_rows(const Backward<T, W>& b, int64_t slot, int64_t r, int64_t count, bool first,
                const Coefficients<AccOf<T>>* c, int64_t begin, int64_t n) {
  bool scaled = false;
  for (int64_t k = 0; k < count; ++k) scaled |= c[k].scale != 1;
  if (count == kRows && !scaled) {
    sweep_columns<kRows, false>(b, slot, r, first, c, begin, n);
    return;
  }
  for (int64_t k = 0; k < count; ++k) {
    if (c[k].scale != 1) {
      sweep_columns<1, true>(b, slot, r + k, first && k == 0, c + k, begin, n);
    } else {
      sweep_columns<1, false>(b, slot, r + k, first && k == 0, c + k, begin, n);
    }
  }
}

// Calls f(first row, rows) for the rows of a slot, kRows at a time.
template <class F>
void for_rows_of_slot(int64_t rows, int64_t slot, const F& f) {
  const int64_t end = min(rows, (slot + 1) * rows_per_slot(rows));
  for (int64_t r = slot * rows_per_slot(rows); r < end; r += kRows) f(r, min(kRows, end - r));
}

// Adds the slots' partial sums of one parameter's gradient over columns [begin, end).
template <class Acc, class W>
void add_slots(const Acc* partials, int64_t slots, int64_t cols, int64_t begin, int64_t end, W* gradient) {
  for_each_vector<Acc>(end - begin, [&](auto, int64_t j, auto lanes) {
    j += begin;
    Doubles<Acc> total{};
    for (int64_t s = 0; s < slots; ++s) total += to_double<Acc>(load(partials + 2 * s * cols + j, lanes));
    store(gradient + j, from_double<Acc>(total), lanes);
  });
}

template <class T, class W>
void backward(const Backward<T, W>& b) {
  using Acc = AccOf<T>;
  const BackwardParams& p = b.p;
  const int64_t slot_rows = rows_per_slot(p.rows);

  if (b.slots >= num_threads() || p.cols <= kTile) {
    parallel_for(b.slots, ceil_div(kGrain, slot_rows * p.cols), [&](int64_t slot, int64_t end) {
      for (; slot < end; ++slot) {
        for_rows_of_slot(p.rows, slot, [&](int64_t r, int64_t count) {
          Coefficients<Acc> c[kRows];
          for (int64_t k = 0; k < count; ++k) c[k] = row_coefficients<OneThread>(b, r + k);
          sweep_rows(b, slot, r, count, r == slot * slot_rows, c, 0, p.cols);
        });
      }
    });
  } else {
    if (p.rows < num_threads()) {
      for (int64_t r = 0; r < p.rows; ++r) b.coefficients[r] = row_coefficients<AllThreads>(b, r);
    } else {
      parallel_for(p.rows, ceil_div(kGrain, p.cols), [&](int64_t r, int64_t end) {
        for (; r < end; ++r) b.coefficients[r] = row_coefficients<OneThread>(b, r);
      });
    }
    const int64_t tiles = ceil_div(p.cols, kTile);
    parallel_for(b.slots * tiles, ceil_div(kGrain, slot_rows * kTile), [&](int64_t task, int64_t end) {
      for (; task < end; ++task) {
        const int64_t slot = task / tiles, begin = task % tiles * kTile;
        for_rows_of_slot(p.rows, slot, [&](int64_t r, int64_t count) {
          sweep_rows(b, slot, r, count, r == slot * slot_rows, b.coefficients + r, begin,
                     min(kTile, p.cols - begin));
        });
      }
    });
  }

  if (!p.grad_weight && !p.grad_bias) return;
  const int64_t tile = kVectorBytes;  // a multiple of the lanes, so that only the row's end is masked
  parallel_for(ceil_div(p.cols, tile), ceil_div(kGrain, b.slots * tile), [&](int64_t begin, int64_t end) {
    begin *= tile;
    end = min(p.cols, end * tile);
    if (p.grad_weight) add_slots(b.dweight(0), b.slots, p.cols, begin, end, static_cast<W*>(p.grad_weight));
    if (p.grad_bias) add_slots(b.dbias(0), b.slots, p.cols, begin, end, static_cast<W*>(p.grad_bias));
  });
}

}  // namespace

void backward(const BackwardParams& p) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using Types = decltype(pair);
    backward(Backward<typename Types::T, typename Types::W>(p));
  });
}

}  // namespace layernorm::cpu::CPU_CAPABILITY
