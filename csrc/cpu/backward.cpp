// With xhat = (x - mean) * rstd and g = dy * weight, computes for every row of x and dy [rows, cols]
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
//   dweight = sum over rows of dy * xhat
//   dbias = sum over rows of dy
//
// RMSNorm has a mean of 0 and dx = rstd * (g - xhat * mean(g * xhat)). The gradient of the sum that forward returns
// with a residual is added to dx.
//
// Rows are divided into segments. A thread takes a segment and handles a few rows at a time: it first computes the sums
// of each row (sums_loop), then, column by column for all of them (gradients_loop), dx and the segment's partial sums
// of dweight and dbias [segments, 2, cols]. A last loop adds the partial sums. x and dy come from memory once, so 3 *
// rows * cols * sizeof(T) bytes are moved. If there are fewer segments than threads, the sums of all rows are computed
// first, and then the threads share the columns. The order of every sum stays the same.
//
// Precision: the saved mean is rounded, so xhat is off by a constant within a row. This constant is the average of xhat
// and is subtracted from it.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "../dtypes.h"
#include "row.h"

namespace layernorm::cpu::CPU_CAPABILITY {
namespace {

constexpr int kByColumns = 0;  // in place of a number of rows

// The coefficients of rows for the gradients loop, of which each is an array: with d = x * scale - mean,
//   rstd = rstd_scaled * scale
//   xhat = d * rstd_scaled + minus_mean_xhat
//   dx = rstd * ((g + minus_mean_g) + xhat * minus_mean_g_xhat)
// g + minus_mean_g is exactly 0 if g is constant in the row, as for the gradient of a sum of outputs, or for one
// column.
template <class Acc>
struct Coefficients {
  Acc* values;
  int64_t stride;

  Coefficients from(int64_t row) const { return {values + row, stride}; }
  Acc* scale() const { return values; }                           // 1; a power of two near rstd; or rstd, with d = xhat
  Acc* mean() const { return values + stride; }                   // times scale
  Acc* rstd_scaled() const { return values + 2 * stride; }        // rstd / scale
  Acc* minus_mean_xhat() const { return values + 3 * stride; }    // minus the average of xhat before this correction
  Acc* minus_mean_g_xhat() const { return values + 4 * stride; }  // -mean(g * xhat)
  Acc* minus_mean_g() const { return values + 5 * stride; }       // -mean(g)
};
constexpr int64_t kCoefficients = 6;  // arrays in Coefficients
static_assert(kMaxPackSize % kPackSize<float> == 0 && kTileCols % kMaxPackSize == 0);

template <class T_, class X_, class W_>
struct Backward {
  using T = T_;
  using X = X_;
  using W = W_;
  using Acc = AccOf<X>;
  static constexpr bool kTogether = kHandlesRowsTogether<T, X>;
  static constexpr bool kMayHaveNan = !std::is_same_v<T, W> || !std::is_same_v<T, X>;

  Backward(const BackwardParams& p, const BackwardPolicy& policy, Acc* partials)
      : p(p), policy(policy), partials(partials) {}

  // Special rows are scaled, because x - mean or its product with g might overflow or underflow, or have xhat computed
  // from the output. A subnormal rstd may be read as zero, see divide_rstd().
  bool is_special(Acc rstd) const { return p.from_output || rstd < Acc(0x1p-20) || rstd > Acc(0x1p20); }
  Acc scale(Acc mean, Acc rstd) const {
    if (p.from_output) return rstd;
    // Numbers around so large a mean are too far apart for a product to underflow; the scaled mean might overflow.
    if (rstd > 1 && std::fabs(mean) > Acc(0x1p20)) return 1;
    return std::ldexp(Acc(1), std::ilogb(std::fmax(rstd, std::numeric_limits<Acc>::min())));
  }
  Acc* dweight(int64_t buffer) const { return wants_parameters(p) ? partials + 2 * buffer * padded_cols : nullptr; }
  Acc* dbias(int64_t buffer) const { return p.grad_bias.data ? partials + (2 * buffer + 1) * padded_cols : nullptr; }

  const BackwardParams& p;
  const Chunks chunks = {p.cols, kChunk<Acc>};
  const BackwardPolicy& policy;
  const Segments& segments = policy.segments;
  const int64_t padded_cols = cpu::padded_cols(p);
  const Acc weight_offset = p.zero_centered_weight;
  Acc* const partials;  // [buffers + second_buffers, 2, padded_cols], packs in the order of X
  const Coefficients<Acc> coefficients = {partials + 2 * (policy.buffers + policy.second_buffers) * padded_cols,
                                          p.groups * p.rows};  // of all rows
};

// d (see Coefficients) for a pack of x. Weight and bias are those of the row's group.
template <bool special, class B, class Mean, class Lanes>
Pack<typename B::Acc> deviation(const B& b, const typename B::X* x, typename B::Acc scale, const Mean& mean,
                                const typename B::W* weight, const typename B::W* bias, int64_t j, Lanes lanes) {
  using X = typename B::X;
  if constexpr (!special) return load<X>(x + j, lanes) - mean;
  if (!b.p.from_output) return load<X>(x + j, lanes) * scale - mean;
  auto v = load<X>(x + j, lanes);
  if (bias) v = v - load<X>(bias + j, lanes);
  return v / divisor(load_weight<X>(weight, b.weight_offset, j, lanes));
}

// v * w + c. The product of two 16-bit numbers is exact in float, so fusing the operations changes nothing, except that
// a zero-centered weight, which is weight + 1 here, rounds once less.
template <class T, class W, class Acc>
Pack<Acc> multiply_add(const Pack<Acc>& v, const Pack<Acc>& w, const Pack<Acc>& c) {
  if constexpr (sizeof(T) == 2 && sizeof(W) == 2) return fma(v, w, c);
  return v * w + c;
}

// The sums of rows r to r + kCount - 1 of a group, from which it stores their coefficients. Its operands are local
// variables, which a store cannot alias.
template <class Threads, int kCount, int kPacks, bool special, bool with_g, class B>
void sums_loop(const B& b, int64_t group, int64_t r, const Coefficients<typename B::Acc>& c) {
  using X = typename B::X;
  using Acc = typename B::Acc;
  enum { kD, kG, kGD, kKinds };
  const Acc* const means = b.p.mean.template row<const Acc>(group, r);  // RMSNorm has none
  const Acc* const rstds = b.p.rstd.template row<const Acc>(group, r);
  const int64_t mean_stride = b.p.mean.row_stride, rstd_stride = b.p.rstd.row_stride;
  const Acc scale = special ? b.scale(means ? *means : Acc(0), *rstds) : Acc(1);
  const auto* const x = b.p.input.template row<const X>(group, r);
  const auto* const dy = b.p.grad_output.template row<const typename B::T>(group, r);
  const auto* const weight = b.p.weight.template row<const typename B::W>(group, 0);
  const auto* const bias = b.p.bias.template row<const typename B::W>(group, 0);
  const Acc weight_offset = b.weight_offset;
  const int64_t x_stride = b.p.input.row_stride, dy_stride = b.p.grad_output.row_stride;
  Acc mean[kCount];
  PerRow<Acc, kCount> rstd;
  for (int k = 0; k < kCount; ++k) {
    mean[k] = means ? means[k * mean_stride] * scale : Acc(0);
    if (special) {
      rstd[k] = b.p.from_output ? Acc(1) : divide_rstd(rstds + k * rstd_stride, scale);
    } else {
      rstd[k] = rstds[k * rstd_stride];
    }
  }
  const auto rstd_scaled = to_doubles(rstd);
  const auto sums = Threads::template sum<Sums<kCount, kKinds>>(b.chunks, [&](int64_t begin, int64_t n) {
    Accumulators<Acc, kCount, with_g ? kKinds : 1, kPacks> s;
    for_each_pack<Acc, kPacks>(begin, n, [&](int pack, int64_t j, auto lanes) {
      Pack<Acc> w;
      if (with_g) w = load_weight<X>(weight, weight_offset, j, lanes);
#pragma GCC unroll 4
      for (int k = 0; k < kCount; ++k) {
        const auto d = zero_outside<kEvenOdd<X>>(
            deviation<special>(b, x + k * x_stride, scale, mean[k], weight, bias, j, lanes), lanes);
        s.values[kD][k][pack] = s.values[kD][k][pack] + d;
        if constexpr (with_g) {
          const auto v = load<X>(dy + k * dy_stride + j, lanes);
          s.values[kG][k][pack] = multiply_add<typename B::T, typename B::W>(v, w, s.values[kG][k][pack]);
          s.values[kGD][k][pack] = fma(v * w, d, s.values[kGD][k][pack]);
        }
      }
    });
    return Sums<kCount, kKinds>(s.total());
  });
  PerRow<double, kCount> mean_xhat = {}, mean_g = {};
  if (!b.p.rms) {
    mean_xhat = b.chunks.template mean<Acc>(sums.values[kD]) * rstd_scaled;
    mean_g = b.chunks.template mean<Acc>(sums.values[kG]);
  }
  const auto mean_g_xhat = b.chunks.template mean<Acc>(sums.values[kGD]) * rstd_scaled - mean_xhat * mean_g;
  const auto store = [](Acc* to, const auto& values) {
    const auto rounded = __builtin_convertvector(values, PerRow<Acc, kCount>);
    std::memcpy(to, &rounded, sizeof(rounded));
  };
  for (int k = 0; k < kCount; ++k) c.scale()[k] = scale, c.mean()[k] = mean[k];
  store(c.rstd_scaled(), rstd_scaled), store(c.minus_mean_xhat(), -mean_xhat);
  store(c.minus_mean_g_xhat(), -mean_g_xhat), store(c.minus_mean_g(), -mean_g);
}

// Returns whether one of the rows is special.
template <class Threads, int kCount, int kPacks, class B>
bool compute_coefficients(const B& b, int64_t group, int64_t r, const Coefficients<typename B::Acc>& c) {
  const auto* const rstds = b.p.rstd.template row<const typename B::Acc>(group, r);
  bool any_special = false;
  for (int k = 0; k < kCount; ++k) any_special |= b.is_special(rstds[k * b.p.rstd.row_stride]);
  if constexpr (kCount > 1) {
    if (any_special) {
      for (int k = 0; k < kCount; ++k) compute_coefficients<Threads, 1, kPacks>(b, group, r + k, c.from(k));
      return true;
    }
  } else if (any_special) {
    sums_loop<Threads, 1, kPacks, true, true>(b, group, r, c);
    return true;
  }
  b.p.grad_input.data ? sums_loop<Threads, kCount, kPacks, false, true>(b, group, r, c)
                      : sums_loop<Threads, kCount, kPacks, false, false>(b, group, r, c);
  return false;
}

// The coefficients of rows r to r + count - 1 of a group. Returns whether one of the rows is special.
template <class B>
bool compute_coefficients(const B& b, int64_t group, int64_t r, int64_t count, const Coefficients<typename B::Acc>& c) {
  const bool narrow = b.policy.is_narrow;
  bool special = false;
  int64_t k = 0;
  const auto find = [&](auto rows, auto packs) {
    using Threads = std::conditional_t<packs == kNarrowPacks, NarrowRow, OneThread>;
    for (; k + rows <= count; k += rows)
      special |= compute_coefficients<Threads, rows, packs>(b, group, r + k, c.from(k));
  };
  if constexpr (B::kTogether) {
    if (narrow && b.policy.together == kRows) find(Constant<kRows>{}, Constant<kNarrowPacks>{});
    narrow ? find(Constant<kFewRows>{}, Constant<kNarrowPacks>{}) : find(Constant<kFewRows>{}, Constant<kWidePacks>{});
  }
  narrow ? find(Constant<1>{}, Constant<kNarrowPacks>{}) : find(Constant<1>{}, Constant<kWidePacks>{});
  return special;
}

// Prefetches kCount packs.
template <int kCount, class T>
void prefetch_packs(const T* p) {
  constexpr int kBytes = kCount * kPackSize<AccOf<T>> * static_cast<int>(sizeof(T));
  for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(reinterpret_cast<const char*>(p) + i);
}

// dx and the partial sums of dweight and dbias, for columns [begin, begin + n) of kCount rows from row r of a group on,
// or of `count` rows column by column. `first` says that they are the first of their segment. The flags for the
// gradients are template parameters because testing them in the loop costs a third of the speed.
template <int kCount, bool special, bool with_dx, bool streaming, bool with_dweight, bool with_dbias, class B>
void gradients_loop(const B& b, int64_t buffer, int64_t group, int64_t r, int64_t count, bool first,
                    const Coefficients<typename B::Acc>& c, int64_t begin, int64_t n) {
  using T = typename B::T;
  using X = typename B::X;
  using W = typename B::W;
  using Acc = typename B::Acc;
  constexpr int kStep = kPackSize<Acc>;
  const BackwardParams& p = b.p;
  const X* const x = p.input.row<const X>(group, r);
  const T* const dy = p.grad_output.row<const T>(group, r);
  const X* const dsum = p.grad_sum.row<const X>(group, r);
  const W* const weight = p.weight.row<const W>(group, 0);
  const W* const bias = p.bias.row<const W>(group, 0);
  const Acc weight_offset = b.weight_offset;
  X* const dx = p.grad_input.row<X>(group, r);
  Acc* const dweight = b.dweight(buffer);
  Acc* const dbias = b.dbias(buffer);
  const int64_t x_stride = p.input.row_stride, dy_stride = p.grad_output.row_stride;
  const int64_t dsum_stride = p.grad_sum.row_stride, dx_stride = p.grad_input.row_stride;
  const Acc scale = *c.scale();  // used for special rows, which are handled one by one

  // Packs instead of scalars, for which GCC needs one more instruction to load and broadcast.
  constexpr int kAtOnce = kCount == kByColumns ? 1 : kCount;
  Pack<Acc> mean[kAtOnce], rstd_scaled[kAtOnce];
  Pack<Acc> minus_mean_xhat[kAtOnce], minus_mean_g_xhat[kAtOnce], minus_mean_g[kAtOnce];
  const auto load_coefficients = [&](int64_t row) {
    for (int k = 0; k < kAtOnce; ++k) {
      mean[k] = broadcast(c.mean()[row + k]), rstd_scaled[k] = broadcast(c.rstd_scaled()[row + k]);
      minus_mean_xhat[k] = broadcast(c.minus_mean_xhat()[row + k]);
      minus_mean_g_xhat[k] = broadcast(c.minus_mean_g_xhat()[row + k]);
      minus_mean_g[k] = broadcast(c.minus_mean_g()[row + k]);
    }
  };
  const auto load_columns = [&](int64_t j, auto lanes, Pack<Acc>& w, Pack<Acc>& dw, Pack<Acc>& db) {
    if (with_dx) w = load_weight<X>(weight, weight_offset, j, lanes);
    dw = Pack<Acc>{}, db = Pack<Acc>{};
    if (with_dweight && !first) dw = read(dweight + j, AllLanes{});
    if (with_dbias && !first) db = read(dbias + j, AllLanes{});
  };
  const auto store_sums = [&](int64_t j, const Pack<Acc>& dw, const Pack<Acc>& db) {
    if (with_dweight) write(dweight + j, dw, AllLanes{});
    if (with_dbias) write(dbias + j, db, AllLanes{});
  };
  // One pack of the rows whose coefficients are loaded. Without the attributes, GCC calls lambdas in the loop, and
  // short rows take up to 1.13 times as long.
  const auto add_rows = [&](int64_t row, int64_t j, auto lanes, const Pack<Acc>& w, Pack<Acc>& dw,
                            Pack<Acc>& db) __attribute__((always_inline)) {
    for (int k = 0; k < kAtOnce; ++k) {
      auto v = load<X>(dy + (row + k) * dy_stride + j, lanes);
      if constexpr (!kEvenOdd<X>) v = in_register(v);  // bfloat16 was loaded once, as words
      if constexpr (with_dbias) db = db + v;
      if constexpr (with_dx || with_dweight) {
        const auto d = deviation<special>(b, x + (row + k) * x_stride, scale, mean[k], weight, bias, j, lanes);
        const auto xhat = fma(d, rstd_scaled[k], minus_mean_xhat[k]);
        if constexpr (with_dweight) dw = fma(v, xhat, dw);
        if constexpr (with_dx) {
          auto result = fma(xhat, minus_mean_g_xhat[k], multiply_add<T, W>(v, w, minus_mean_g[k])) * rstd_scaled[k];
          if constexpr (special) result = result * scale;
          if (dsum) result = result + load<X>(dsum + (row + k) * dsum_stride + j, lanes);
          store<X, B::kMayHaveNan>(dx + (row + k) * dx_stride + j, result, store_lanes<streaming>(lanes));
        }
      }
    }
  };

  if constexpr (kCount == kByColumns) {
    const int64_t ahead_x = b.policy.prefetched * x_stride, ahead_dy = b.policy.prefetched * dy_stride;
    const auto handle_columns = [&](auto packs, int64_t j, auto lanes) __attribute__((always_inline)) {
      Pack<Acc> w[packs], dw[packs], db[packs];
      for (int i = 0; i < packs; ++i) load_columns(j + i * kStep, lanes, w[i], dw[i], db[i]);
      for (int64_t row = 0; row < count; ++row) {
        load_coefficients(row);
        for (int i = 0; i < packs; ++i) add_rows(row, j + i * kStep, lanes, w[i], dw[i], db[i]);
        prefetch_packs<packs>(x + row * x_stride + ahead_x + j);
        prefetch_packs<packs>(dy + row * dy_stride + ahead_dy + j);
      }
      for (int i = 0; i < packs; ++i) store_sums(j + i * kStep, dw[i], db[i]);
    };
    const int64_t end = begin + n;
    int64_t j = begin;
    for (; j + kColumnPacks * kStep <= end; j += kColumnPacks * kStep) {
      handle_columns(Constant<kColumnPacks>{}, j, AllLanes{});
    }
    if (kColumnPacks > 1 && j + kStep <= end) {
      handle_columns(Constant<1>{}, j, AllLanes{});
      j += kStep;
    }
    if (j < end) handle_columns(Constant<1>{}, j, FirstLanes{static_cast<int>(end - j)});
  } else {
    // The next kCount rows are prefetched one after the other, because GCC has no registers for a pointer to each: with
    // those, 1576 x 384 floats take 1.15 times as long. At column row_end, the pointers go on to another row.
    const bool adjacent = x_stride == n && dy_stride == n;
    const bool prefetches = b.policy.prefetched && (adjacent || n >= kCount * kStep);
    const X* next_x = x + b.policy.prefetched * x_stride + begin;
    const T* next_dy = dy + b.policy.prefetched * dy_stride + begin;
    int64_t row_end = adjacent ? std::numeric_limits<int64_t>::max() : begin + n / kCount;
    load_coefficients(0);
    for_each_pack<Acc, 1>(begin, n, [&](int, int64_t j, auto lanes) {
      Pack<Acc> w, dw, db;
      load_columns(j, lanes, w, dw, db);
      add_rows(0, j, lanes, w, dw, db);
      store_sums(j, dw, db);
      if (prefetches) {
        if (kCount > 1 && j >= row_end) {
          row_end += n / kCount;
          next_x += x_stride - n, next_dy += dy_stride - n;
        }
        prefetch_packs<kCount>(next_x), prefetch_packs<kCount>(next_dy);
        next_x += kCount * kStep, next_dy += kCount * kStep;
      }
    });
  }
}

// Whether the gradients loop has to scale the values of a row.
template <class B>
bool is_scaled(const B& b, const Coefficients<typename B::Acc>& c, int64_t row) {
  return b.p.from_output || c.scale()[row] != 1;
}

// gradients_loop() for columns [begin, begin + n) of rows r to r + count - 1 of a group.
template <class B, bool with_dx, bool streaming, bool wants_dweight, bool with_dbias>
void compute_gradients(const B& b, int64_t buffer, int64_t group, int64_t r, int64_t count, bool first,
                       const Coefficients<typename B::Acc>& c, bool any_special, int64_t begin, int64_t n) {
  constexpr bool kWithDweight = wants_dweight || with_dbias;  // dbias alone is rare, and has no loop of its own
  int64_t k = 0;
  const auto loop = [&](auto at_once, auto special) {
    const int64_t rows = at_once == kByColumns ? count : at_once;
    gradients_loop<at_once, special, with_dx, with_dx && streaming, kWithDweight, with_dbias>(
        b, buffer, group, r + k, rows, first && k == 0, c.from(k), begin, n);
    k += rows;
  };
  // For the usual gradients only, because each copy of the loop enlarges the library.
  if constexpr (kHasColumnLoop && B::kTogether && with_dx && kWithDweight) {
    if (b.policy.by_columns && !any_special) return loop(Constant<kByColumns>{}, std::false_type{});
  }
  if constexpr (B::kTogether) {
    const int64_t at_once = any_special ? 1 : min(b.policy.together, kMostRows);
    while (at_once == kMostRows && k + kMostRows <= count) loop(Constant<kMostRows>{}, std::false_type{});
    while (at_once >= kFewRows && k + kFewRows <= count) loop(Constant<kFewRows>{}, std::false_type{});
  }
  while (k < count) {
    const bool scaled = any_special && is_scaled(b, c, k);
    scaled ? loop(Constant<1>{}, std::true_type{}) : loop(Constant<1>{}, std::false_type{});
  }
}

// Returns compute_gradients() for the gradients that are wanted. A segment asks once, because asking for every block of
// rows takes short rows a tenth of the time if GCC does not inline it.
template <class B>
auto choose_gradients(const B& b) {
  auto* chosen = compute_gradients<B, true, true, true, true>;
  dispatch_flags([&](auto... flags) { chosen = compute_gradients<B, flags...>; }, b.p.grad_input.data != nullptr,
                 b.policy.streams, b.p.grad_weight.data != nullptr, b.p.grad_bias.data != nullptr);
  return chosen;
}

template <class T>
void prefetch_row_for_write(T* row, int64_t cols) {
  for (int64_t j = 0; j < cols; j += 64 / sizeof(T)) {
    __builtin_prefetch(row + j, 1);
    asm volatile("");  // GCC removes a loop that only prefetches
  }
}

// Calls f(group, first row, rows) for the rows of a segment, at most `step` at a time. f may write dx.
template <class B, class F>
void for_rows_of_segment(const B& b, int64_t segment, int64_t step, const F& f) {
  for_each_group(b.p.rows, b.segments.begin(segment), b.segments.end(segment),
                 [&](int64_t group, int64_t row, int64_t count) {
                   for (int64_t k = 0; k < count; k += step) f(group, row + k, min(step, count - k));
                 });
  if (b.policy.streams) streaming_fence();
}

// Runs gradients_loop() for columns [begin, begin + n) of the rows of a segment. The partial sums of up to kSumRows
// rows go to a buffer; those of the next ones go to the second buffer and are then added to the first.
template <class B>
class SegmentSums {
 public:
  SegmentSums(const B& b, int64_t buffer, int64_t second_buffer, int64_t begin, int64_t n)
      : b_(b), buffer_(buffer), second_buffer_(b.policy.buffers + second_buffer), begin_(begin), n_(n) {}

  // Adds rows r to r + count - 1 of a group.
  void add(int64_t group, int64_t r, int64_t count, const Coefficients<typename B::Acc>& c, bool any_special) {
    if (rows_ + count > kSumRows) next_sum();
    finish_(b_, is_first_ ? buffer_ : second_buffer_, group, r, count, rows_ == 0, c, any_special, begin_, n_);
    rows_ += count;
  }

  // Adds the last rows to the buffer. The caller has added at least one row.
  void end() {
    if (!is_first_) next_sum();
  }

 private:
  void next_sum() {
    if (!is_first_) {
      add_buffer(b_.dweight(buffer_), b_.dweight(second_buffer_));
      add_buffer(b_.dbias(buffer_), b_.dbias(second_buffer_));
    }
    is_first_ = false;
    rows_ = 0;
  }
  void add_buffer(typename B::Acc* sums, const typename B::Acc* more) const {
    if (!sums) return;
    for_each_pack<typename B::Acc, 1>(begin_, n_, [&](int, int64_t j, auto) {
      write(sums + j, read(sums + j, AllLanes{}) + read(more + j, AllLanes{}), AllLanes{});
    });
  }

  const B& b_;
  decltype(choose_gradients(std::declval<const B&>())) finish_ = choose_gradients(b_);
  const int64_t buffer_, second_buffer_, begin_, n_;
  int64_t rows_ = 0;  // in the current sum
  bool is_first_ = true;
};

// Handles all rows of a segment; its partial sums go to a buffer of the workspace.
template <class B>
void backward_segment(const B& b, int64_t segment, int64_t buffer, int64_t second_buffer) {
  SegmentSums<B> sums(b, buffer, second_buffer, 0, b.p.cols);
  for_rows_of_segment(b, segment, b.policy.block, [&](int64_t group, int64_t r, int64_t count) {
    typename B::Acc values[kCoefficients * kMaxBlockRows];
    const Coefficients<typename B::Acc> c = {values, kMaxBlockRows};
    for (int64_t k = 0; b.policy.prefetches_dx && k < count; ++k) {
      prefetch_row_for_write(b.p.grad_input.template row<typename B::X>(group, r + k), b.p.cols);
    }
    sums.add(group, r, count, c, compute_coefficients(b, group, r, count, c));
  });
  sums.end();
}

// Stores the sums in a buffer, for columns [begin, end), as the gradients of a group.
template <class B>
void store_gradients(const B& b, int64_t group, int64_t buffer, int64_t begin, int64_t end) {
  const auto store = [&](const typename B::Acc* sums, const View& gradient) {
    if (gradient.data) add_partials<typename B::X>(b.p, sums, 1, begin, end, gradient.row<typename B::W>(group, 0));
  };
  store(b.dweight(buffer), b.p.grad_weight);
  store(b.dbias(buffer), b.p.grad_bias);
}

// Handles few long rows: first the coefficients of all rows, then the threads share the columns.
template <class B>
void backward_sharing_columns(const B& b) {
  const BackwardParams& p = b.p;
  const int64_t rows = p.groups * p.rows;
  if (b.policy.shares_rows) {
    for (int64_t r = 0; r < rows; ++r) {
      compute_coefficients<AllThreads, 1, kWidePacks>(b, r / p.rows, r % p.rows, b.coefficients.from(r));
    }
  } else {
    parallel_for(rows, grain(p.cols), [&](int64_t begin, int64_t end) {
      for_each_group(p.rows, begin, end, [&](int64_t group, int64_t r, int64_t count) {
        compute_coefficients(b, group, r, count, b.coefficients.from(group * p.rows + r));
      });
    });
  }
  const int64_t tiles = ceil_div(p.cols, kTileCols), step = b.policy.block;
  parallel_for(b.segments.count * tiles, grain(b.segments.rows * kTileCols), [&](int64_t task, int64_t end) {
    for (; task < end; ++task) {
      const int64_t segment = task / tiles, begin = task % tiles * kTileCols;
      SegmentSums<B> sums(b, segment, segment, begin, min(kTileCols, p.cols - begin));
      for_rows_of_segment(b, segment, step, [&](int64_t group, int64_t r, int64_t count) {
        const auto c = b.coefficients.from(group * p.rows + r);
        bool any_special = false;
        for (int64_t k = 0; k < count; ++k) any_special |= is_scaled(b, c, k);
        sums.add(group, r, count, c, any_special);
      });
      sums.end();
      if (b.segments.are_gradients) store_gradients(b, segment, segment, begin, min(begin + kTileCols, p.cols));
    }
  });
}

template <class B>
void backward(const B& b) {
  using X = typename B::X;
  using W = typename B::W;
  const BackwardParams& p = b.p;
  const BackwardPolicy& policy = b.policy;
  const Segments& segments = b.segments;
  if (policy.shares_columns) {
    backward_sharing_columns(b);
  } else if (segments.are_gradients) {
    parallel_for(policy.buffers, 1, [&](int64_t buffer, int64_t end) {
      for (; buffer < end; ++buffer) {
        for (int64_t segment = buffer * segments.count / policy.buffers;
             segment < (buffer + 1) * segments.count / policy.buffers; ++segment) {
          backward_segment(b, segment, buffer, buffer);
          store_gradients(b, segment, buffer, 0, p.cols);
        }
      }
    });
  } else {
    parallel_for(segments.count, segment_grain(segments, p.cols), [&](int64_t first, int64_t end) {
      for (int64_t segment = first; segment < end; ++segment) {
        // Another core may have read these partial sums in the last call, so that stores would wait for it: 3136 x 192
        // bf16 take 0.93 of the time if two cores share no cache (AMD EPYC).
        if (wants_parameters(p)) prefetch_row_for_write(b.dweight(segment), 2 * b.padded_cols);
        backward_segment(b, segment, segment, first);
      }
    });
  }
  if (!segments.are_gradients) add_partials<X, W>(p, b.partials, segments.count);
}

}  // namespace

void backward(const BackwardParams& p) {
  if (p.channels_first) return channels_first_backward(p);
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using T = typename decltype(types)::T;
    using X = typename decltype(types)::X;
    using W = typename decltype(types)::W;
    using Acc = AccOf<X>;
    const BackwardPolicy policy(p, sizeof(X));
    // The partial sums, and the coefficients of all rows if the threads share the columns.
    const int64_t buffers = policy.buffers + policy.second_buffers;
    const int64_t elements = 2 * buffers * padded_cols(p) + kCoefficients * p.groups * p.rows;
    alignas(kVectorBytes) Acc stack[4 * kMaxStackCols];
    void* const workspace =
        policy.uses_stack ? stack : p.allocator->allocate(elements * static_cast<int64_t>(sizeof(Acc)));
    backward(Backward<T, X, W>(p, policy, static_cast<Acc*>(workspace)));
  });
}

}  // namespace layernorm::cpu::CPU_CAPABILITY
