// With xhat = (x - mean) * rstd and g = dy * weight, computes for every row of x and dy [rows, cols]
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
//   dweight = sum over rows of dy * xhat
//   dbias = sum over rows of dy
//
// RMSNorm has a mean of 0 and dx = rstd * (g - xhat * mean(g * xhat)). The gradient of the sum that forward returns
// with a residual is added to dx. If the sum is gate * input + residual, the gradients of the input and of the gate are
//
//   dinput = dx * gate
//   dgate = sum over rows of dx * input
//
// Rows are divided into segments. A thread takes a segment and handles a few rows at a time. Its sums loop computes the
// sums of each row; its gradients loop computes dx, and adds the rows to the segment's partial sums of dweight and
// dbias, which are in the workspace. A last loop adds the partial sums of all segments. x and dy come from memory once,
// so 3 * rows * cols * sizeof(T) bytes are moved. If there are fewer segments than threads, the sums of all rows are
// computed first, and then the threads share the columns. The order of every sum stays the same.
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
#include "gated.h"

namespace layernorm::cpu::CPU_CAPABILITY {
namespace {

// The coefficients of rows, which the sums loop computes for the gradients loop. Each is an array of one value per row:
//   d    = x * scale - mean, or xhat itself if it is computed from the output
//   xhat = d * rstd_scaled + minus_mean_xhat
//   dx   = rstd_scaled * scale * ((g + minus_mean_g) + xhat * minus_mean_g_xhat)
// g + minus_mean_g is exactly 0 if g is constant in the row, as for the gradient of a sum of outputs, or for one
// column.
template <class Acc>
struct Coefficients {
  Acc* values;
  int64_t stride;

  Coefficients from(int64_t row) const { return {values + row, stride}; }
  Acc* scale() const { return values; }                           // 1, or that of a special row (Backward::scale)
  Acc* mean() const { return values + stride; }                   // mean * scale
  Acc* rstd_scaled() const { return values + 2 * stride; }        // rstd / scale
  Acc* minus_mean_xhat() const { return values + 3 * stride; }    // minus the average of d * rstd_scaled
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

  // Special rows need instructions that the loops for other rows omit. In backward from the output, all rows are
  // special. Otherwise a row is special if its standard deviation is so large or so small that x - mean, or its product
  // with g, might overflow or underflow; its x is multiplied by a power of two near rstd. Rows whose rstd is subnormal
  // are special even if the processor reads it as zero.
  bool is_special(Acc rstd) const { return p.from_output || rstd < Acc(0x1p-20) || rstd > Acc(0x1p20); }
  // The scale of a special row. In backward from the output it is rstd, because d is xhat.
  Acc scale(Acc mean, Acc rstd) const {
    if (p.from_output) return rstd;
    // Numbers around so large a mean are too far apart for a product to underflow; the scaled mean might overflow.
    if (rstd > 1 && std::fabs(mean) > Acc(0x1p20)) return 1;
    return std::ldexp(Acc(1), std::ilogb(std::fmax(rstd, std::numeric_limits<Acc>::min())));
  }
  // The partial sums of a buffer. The loop for dbias computes dweight, too.
  Acc* sums(int64_t buffer) const { return partials + buffer * pitch; }
  Acc* dweight(int64_t buffer) const { return p.grad_weight.data || p.grad_bias.data ? sums(buffer) : nullptr; }
  Acc* dbias(int64_t buffer) const { return p.grad_bias.data ? sums(buffer) + padded_cols : nullptr; }
  Acc* dgate(int64_t buffer) const { return p.grad_gate.data ? sums(buffer) + 2 * padded_cols : nullptr; }

  const BackwardParams& p;
  const Chunks chunks = {p.cols, kChunk<Acc>};
  const BackwardPolicy& policy;
  const Segments& segments = policy.segments;
  const int64_t padded_cols = cpu::padded_cols(p);
  const int64_t pitch = ParameterGradients(p).count * padded_cols;
  const Acc weight_offset = p.zero_centered_weight;
  const bool has_gate_gradients = cpu::has_gate_gradients(p);
  Acc* const partials;  // [buffers + second_buffers, ParameterGradients::count, padded_cols], packs in the order of X
  const Coefficients<Acc> coefficients = {sums(policy.buffers + policy.second_buffers),
                                          p.groups * p.rows};  // of all rows
};

// d of Coefficients, for a pack of x. `weight` and `bias` are those of the row's group.
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
  for (int i = 0; i < kBytes; i += kCacheLineBytes) __builtin_prefetch(reinterpret_cast<const char*>(p) + i);
}

// The gradients that a gradients loop computes. They are template parameters, because tests in the loop would slow it
// down.
template <bool special, bool with_dx, bool streaming, bool with_dweight, bool with_dbias>
struct Wanted {
  static constexpr bool kSpecial = special, kDx = with_dx, kStreaming = streaming;
  static constexpr bool kDweight = with_dweight, kDbias = with_dbias;
};

// The coefficients of a row as packs. GCC needs one more instruction to load and broadcast a scalar.
template <class Acc>
struct RowCoefficients {
  Pack<Acc> mean, rstd_scaled, minus_mean_xhat, minus_mean_g_xhat, minus_mean_g;

  [[gnu::always_inline]] void load(const Coefficients<Acc>& c, int64_t row) {
    mean = broadcast(c.mean()[row]), rstd_scaled = broadcast(c.rstd_scaled()[row]);
    minus_mean_xhat = broadcast(c.minus_mean_xhat()[row]);
    minus_mean_g_xhat = broadcast(c.minus_mean_g_xhat()[row]);
    minus_mean_g = broadcast(c.minus_mean_g()[row]);
  }
};

// The weight and the partial sums for a pack of columns.
template <class Acc>
struct ColumnSums {
  Pack<Acc> weight, dweight, dbias;
};

// The operands of a gradients loop over rows r, r + 1, ... of a group, and its steps. It is a local variable of the
// loops, so that no store aliases the operands. Without the attributes, GCC calls the steps in the loop, which slows
// down short rows.
template <class Wanted, class B>
struct GradientOperands {
  using T = typename B::T;
  using X = typename B::X;
  using W = typename B::W;
  using Acc = typename B::Acc;

  // `first` says that the rows are the first of a sum, so that the buffer holds no partial sums yet.
  [[gnu::always_inline]] GradientOperands(const B& b, int64_t buffer, int64_t group, int64_t r, bool first, Acc scale)
      : b(b),
        x(b.p.input.template row<const X>(group, r)),
        dy(b.p.grad_output.template row<const T>(group, r)),
        dsum(b.p.grad_sum.template row<const X>(group, r)),
        dx(b.p.grad_input.template row<X>(group, r)),
        weight(b.p.weight.template row<const W>(group, 0)),
        bias(b.p.bias.template row<const W>(group, 0)),
        dweight(b.dweight(buffer)),
        dbias(b.dbias(buffer)),
        x_stride(b.p.input.row_stride),
        dy_stride(b.p.grad_output.row_stride),
        dsum_stride(b.p.grad_sum.row_stride),
        dx_stride(b.p.grad_input.row_stride),
        scale(scale),
        weight_offset(b.weight_offset),
        first(first) {}

  template <class Lanes>
  [[gnu::always_inline]] ColumnSums<Acc> load_columns(int64_t j, Lanes lanes) const {
    ColumnSums<Acc> columns = {};
    if (Wanted::kDx) columns.weight = load_weight<X>(weight, weight_offset, j, lanes);
    if (Wanted::kDweight && !first) columns.dweight = read(dweight + j, AllLanes{});
    if (Wanted::kDbias && !first) columns.dbias = read(dbias + j, AllLanes{});
    return columns;
  }
  [[gnu::always_inline]] void store_sums(int64_t j, const ColumnSums<Acc>& columns) const {
    if (Wanted::kDweight) write(dweight + j, columns.dweight, AllLanes{});
    if (Wanted::kDbias) write(dbias + j, columns.dbias, AllLanes{});
  }

  // Stores dx of a row, counted from r, for a pack of columns, and adds the row to the partial sums.
  template <class Lanes>
  [[gnu::always_inline]] void add_row(int64_t row, const RowCoefficients<Acc>& c, int64_t j, Lanes lanes,
                                      ColumnSums<Acc>& columns) const {
    auto v = load<X>(dy + row * dy_stride + j, lanes);
    if constexpr (!kEvenOdd<X>) v = in_register(v);  // bfloat16 was loaded once, as words
    if constexpr (Wanted::kDbias) columns.dbias = columns.dbias + v;
    if constexpr (Wanted::kDx || Wanted::kDweight) {
      const auto d = deviation<Wanted::kSpecial>(b, x + row * x_stride, scale, c.mean, weight, bias, j, lanes);
      const auto xhat = fma(d, c.rstd_scaled, c.minus_mean_xhat);
      if constexpr (Wanted::kDweight) columns.dweight = fma(v, xhat, columns.dweight);
      if constexpr (Wanted::kDx) {
        const auto g = multiply_add<T, W>(v, columns.weight, c.minus_mean_g);
        auto result = fma(xhat, c.minus_mean_g_xhat, g) * c.rstd_scaled;
        if constexpr (Wanted::kSpecial) result = result * scale;
        if (dsum) result = result + load<X>(dsum + row * dsum_stride + j, lanes);
        store<X, B::kMayHaveNan>(dx + row * dx_stride + j, result, store_lanes<Wanted::kStreaming>(lanes));
      }
    }
  }

  const B& b;
  const X* const x;
  const T* const dy;
  const X* const dsum;
  X* const dx;
  const W* const weight;
  const W* const bias;
  Acc* const dweight;
  Acc* const dbias;
  const int64_t x_stride, dy_stride, dsum_stride, dx_stride;
  const Acc scale, weight_offset;  // the scale is for special rows, which are handled one by one
  const bool first;
};

// Handles columns [begin, begin + n) of kCount rows from row r of a group on, pack by pack.
template <int kCount, class Wanted, class B>
void gradients_loop_by_rows(const B& b, int64_t buffer, int64_t group, int64_t r, bool first,
                            const Coefficients<typename B::Acc>& c, int64_t begin, int64_t n) {
  using Acc = typename B::Acc;
  constexpr int kStep = kPackSize<Acc>;
  const GradientOperands<Wanted, B> operands(b, buffer, group, r, first, *c.scale());
  RowCoefficients<Acc> rows[kCount];
  for (int k = 0; k < kCount; ++k) rows[k].load(c, k);

  // The next kCount rows are prefetched one after the other, because GCC has no registers for a pointer to each. At
  // column row_end, the pointers go on to another row.
  const int64_t x_stride = operands.x_stride, dy_stride = operands.dy_stride, prefetched = b.policy.prefetched;
  const bool adjacent = x_stride == n && dy_stride == n;
  const bool prefetches = prefetched && (adjacent || n >= kCount * kStep);
  const auto* next_x = operands.x + prefetched * x_stride + begin;
  const auto* next_dy = operands.dy + prefetched * dy_stride + begin;
  int64_t row_end = adjacent ? std::numeric_limits<int64_t>::max() : begin + n / kCount;
  for_each_pack<Acc, 1>(begin, n, [&](int, int64_t j, auto lanes) {
    auto columns = operands.load_columns(j, lanes);
    for (int k = 0; k < kCount; ++k) operands.add_row(k, rows[k], j, lanes, columns);
    operands.store_sums(j, columns);
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

// Handles columns [begin, begin + n) of `count` rows from row r of a group on: kColumnPacks packs of columns at a time,
// for all rows, so that their partial sums stay in registers.
template <class Wanted, class B>
void gradients_loop_by_columns(const B& b, int64_t buffer, int64_t group, int64_t r, int64_t count, bool first,
                               const Coefficients<typename B::Acc>& c, int64_t begin, int64_t n) {
  using Acc = typename B::Acc;
  constexpr int kStep = kPackSize<Acc>;
  const GradientOperands<Wanted, B> operands(b, buffer, group, r, first, /*scale=*/1);
  const auto* const next_x = operands.x + b.policy.prefetched * operands.x_stride;
  const auto* const next_dy = operands.dy + b.policy.prefetched * operands.dy_stride;
  const auto handle_columns = [&](auto packs, int64_t j, auto lanes) __attribute__((always_inline)) {
    ColumnSums<Acc> columns[packs];
    for (int i = 0; i < packs; ++i) columns[i] = operands.load_columns(j + i * kStep, lanes);
    for (int64_t row = 0; row < count; ++row) {
      RowCoefficients<Acc> coefficients;
      coefficients.load(c, row);
      for (int i = 0; i < packs; ++i) operands.add_row(row, coefficients, j + i * kStep, lanes, columns[i]);
      prefetch_packs<packs>(next_x + row * operands.x_stride + j);
      prefetch_packs<packs>(next_dy + row * operands.dy_stride + j);
    }
    for (int i = 0; i < packs; ++i) operands.store_sums(j + i * kStep, columns[i]);
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
}

// Whether the gradients loop has to scale the values of a row, see Coefficients::scale().
template <class B>
bool is_scaled(const B& b, const Coefficients<typename B::Acc>& c, int64_t row) {
  return b.p.from_output || c.scale()[row] != 1;
}

// Stores dx and the partial sums of dweight and dbias, for columns [begin, begin + n) of rows r to r + count - 1 of a
// group.
template <class B, bool with_dx, bool streaming, bool with_dweight, bool with_dbias>
void compute_gradients(const B& b, int64_t buffer, int64_t group, int64_t r, int64_t count, bool first,
                       const Coefficients<typename B::Acc>& c, bool any_special, int64_t begin, int64_t n) {
  // For the usual gradients only, because each copy of the loop enlarges the library.
  if constexpr (kHasColumnLoop && B::kTogether && with_dx && with_dweight) {
    if (b.policy.by_columns && !any_special) {
      return gradients_loop_by_columns<Wanted<false, with_dx, streaming, with_dweight, with_dbias>>(
          b, buffer, group, r, count, first, c, begin, n);
    }
  }
  int64_t k = 0;
  const auto loop = [&](auto rows, auto special) {
    gradients_loop_by_rows<rows, Wanted<special, with_dx, streaming, with_dweight, with_dbias>>(
        b, buffer, group, r + k, first && k == 0, c.from(k), begin, n);
    k += rows;
  };
  if constexpr (B::kTogether) {
    const int64_t together = any_special ? 1 : min(b.policy.together, kMostRows);
    while (together == kMostRows && k + kMostRows <= count) loop(Constant<kMostRows>{}, std::false_type{});
    while (together >= kFewRows && k + kFewRows <= count) loop(Constant<kFewRows>{}, std::false_type{});
  }
  while (k < count) {
    const bool scaled = any_special && is_scaled(b, c, k);
    scaled ? loop(Constant<1>{}, std::true_type{}) : loop(Constant<1>{}, std::false_type{});
  }
}

// Returns compute_gradients() for the gradients that are wanted. A segment calls this once, because a call for every
// block of rows would slow down short rows.
template <class B>
auto choose_gradients(const B& b) {
  auto* chosen = compute_gradients<B, true, false, true, true>;
  dispatch_flags(
      [&](auto with_dx, auto streaming, auto wants_dweight, auto with_dbias) {
        constexpr bool kStreaming = with_dx && streaming && kHasStreamingStores;
        // dbias alone is rare, and has no loop of its own.
        chosen = compute_gradients < B, with_dx, kStreaming, wants_dweight || with_dbias, with_dbias > ;
      },
      b.p.grad_input.data != nullptr, b.policy.streams, b.p.grad_weight.data != nullptr, b.p.grad_bias.data != nullptr);
  return chosen;
}

// The gradients of a gate beside a residual and of the input that it multiplies, from dx, which the gradients loop has
// stored. The loop is apart, so that other calls have no instruction for it.
template <class B>
void gate_loop(const B& b, int64_t buffer, int64_t group, int64_t r, int64_t count, bool first, int64_t begin,
               int64_t n) {
  using T = typename B::T;
  using X = typename B::X;
  const auto* const gate = b.p.gate.template row<const typename B::W>(group, 0);
  const X* const dx = b.p.grad_input.template row<const X>(group, r);
  const T* const gated_input = b.p.gated_input.template row<const T>(group, r);
  T* const grad_gated_input = b.p.grad_gated_input.template row<T>(group, r);
  auto* const dgate = b.dgate(buffer);
  const int64_t dx_stride = b.p.grad_input.row_stride, gated_stride = b.p.gated_input.row_stride,
                grad_gated_stride = b.p.grad_gated_input.row_stride;
  for_each_pack<typename B::Acc, 1>(begin, n, [&](int, int64_t j, auto lanes) {
    const auto factor = load<X>(gate + j, lanes);
    Pack<typename B::Acc> sum = {};
    if (dgate && !first) sum = read(dgate + j, AllLanes{});
    for (int64_t k = 0; k < count; ++k) {
      const auto v = load<X>(dx + k * dx_stride + j, lanes);
      if (dgate) sum = fma(v, load<X>(gated_input + k * gated_stride + j, lanes), sum);
      if (grad_gated_input) {
        store<X, B::kMayHaveNan>(grad_gated_input + k * grad_gated_stride + j, v * factor, lanes);
      }
    }
    if (dgate) write(dgate + j, sum, AllLanes{});
  });
}

template <class T>
void prefetch_row_for_write(T* row, int64_t cols) {
  for (int64_t j = 0; j < cols; j += kCacheLineBytes / sizeof(T)) {
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

// The partial sums of a segment for columns [begin, begin + n). Those of the first kSumRows rows or less go to a
// buffer. Those of the rows that follow go to the second buffer and are then added to the first, kSumRows rows at a
// time.
template <class B>
class SegmentSums {
 public:
  SegmentSums(const B& b, int64_t buffer, int64_t second_buffer, int64_t begin, int64_t n)
      : b_(b), buffer_(buffer), second_buffer_(b.policy.buffers + second_buffer), begin_(begin), n_(n) {}

  // Adds rows r to r + count - 1 of a group.
  void add(int64_t group, int64_t r, int64_t count, const Coefficients<typename B::Acc>& c, bool any_special) {
    if (rows_ + count > kSumRows) next_sum();
    const int64_t buffer = is_first_ ? buffer_ : second_buffer_;
    finish_(b_, buffer, group, r, count, rows_ == 0, c, any_special, begin_, n_);
    if (b_.has_gate_gradients) gate_loop(b_, buffer, group, r, count, rows_ == 0, begin_, n_);
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
      add_buffer(b_.dgate(buffer_), b_.dgate(second_buffer_));
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
    if (!gradient.data) return;
    add_partials<typename B::X>(sums, b.pitch, 1, begin, end, gradient.row<typename B::W>(group, 0));
  };
  store(b.dweight(buffer), b.p.grad_weight);
  store(b.dbias(buffer), b.p.grad_bias);
  store(b.dgate(buffer), b.p.grad_gate);
}

// Handles few long rows: computes the coefficients of all rows first, then the threads share the columns.
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
        // Another core may have read these partial sums in the last call, so that stores would wait for its cache.
        if (ParameterGradients(p).any()) prefetch_row_for_write(b.sums(segment), b.pitch);
        backward_segment(b, segment, segment, first);
      }
    });
  }
  if (!segments.are_gradients) add_partials<X, W>(p, b.partials, segments.count);
}

// A thread's part of the backward pass of a gated norm: that of the plain norm for blocks of rows, some of whose arrays
// are scratch rows. An array without scratch rows is read or written in place.
template <class Acc>
class GatedTask {
 public:
  GatedTask(const BackwardParams& p, const GatedLoops<Coefficients<Acc>>& loops, const GatedPolicy& gated_policy,
            const BackwardParams& norm, const BackwardPolicy& policy, Acc* partials, Acc* scratch)
      : p_(p), loops_(loops), norm_(norm), b_(norm_, policy, partials) {
    const bool converts = p.dtype != p.param_dtype;
    const auto rows = [&](int64_t array) {
      return View{scratch + array * gated_policy.array, 0, gated_policy.pitch, 1};
    };
    if (p.gate_first || converts) scratch_.x = rows(0);
    if (!p.gate_first || converts) scratch_.dy = rows(1);
    if (p.grad_gate.data) scratch_.gate_factor = rows(2);
    if (p.gate_first && p.grad_input.data) scratch_.input_factor = rows(3);
    // The gradients loop has read a pack of x and dy when it overwrites that pack.
    if (p.gate_first && (p.grad_input.data || p.grad_gate.data)) scratch_.dx = scratch_.x;
    if (!p.gate_first && p.grad_input.data && converts) scratch_.dx = scratch_.dy;
    norm_.grad_input = scratch_.dx.data ? scratch_.dx : p.grad_input;
  }

  void handle_segment(int64_t segment, int64_t buffer, int64_t second_buffer) {
    SegmentSums<B> sums(b_, buffer, second_buffer, 0, p_.cols);
    for_rows_of_segment(b_, segment, b_.policy.block, [&](int64_t group, int64_t r, int64_t count) {
      Acc values[kCoefficients * kMaxBlockRows];
      const Coefficients<Acc> c = {values, kMaxBlockRows};
      const GatedBlock block = set_rows(group, r);
      loops_.load(p_, group, r, count, block);
      sums.add(0, 0, count, c, compute_coefficients(b_, 0, 0, count, c));
      if (p_.grad_input.data || p_.grad_gate.data) loops_.store(p_, group, r, count, block, c);
    });
    sums.end();
  }
  void store_gradients(int64_t segment, int64_t buffer) {
    CPU_CAPABILITY::store_gradients(b_, segment, buffer, 0, p_.cols);
  }

 private:
  using B = Backward<Acc, Acc, Acc>;

  // Makes the rows from r of a group on those of group 0 of the plain norm.
  GatedBlock set_rows(int64_t group, int64_t r) {
    GatedBlock block = scratch_;
    if (!block.x.data) block.x = rows_from<Acc>(p_.input, group, r);
    if (!block.dy.data) block.dy = rows_from<Acc>(p_.grad_output, group, r);
    if (!block.dx.data) block.dx = rows_from<Acc>(p_.grad_input, group, r);
    norm_.input = block.x, norm_.grad_output = block.dy, norm_.grad_input = block.dx;
    norm_.weight = rows_from<Acc>(p_.weight, group, 0), norm_.bias = rows_from<Acc>(p_.bias, group, 0);
    norm_.mean = rows_from<Acc>(p_.mean, group, r), norm_.rstd = rows_from<Acc>(p_.rstd, group, r);
    return block;
  }

  const BackwardParams& p_;
  const GatedLoops<Coefficients<Acc>>& loops_;
  BackwardParams norm_;
  const B b_;
  GatedBlock scratch_;
};

template <class Acc>
void gated_backward(const BackwardParams& p, const GatedLoops<Coefficients<Acc>>& loops) {
  BackwardParams norm = p;
  norm.gate = norm.grad_gate = View();
  BackwardPolicy norm_policy(norm, ArraySize(p, sizeof(Acc), /*rows=*/1));
  norm_policy.prefetched = 0;
  const Segments& segments = norm_policy.segments;
  const GatedPolicy policy(p, segments.count, norm_policy.block, kGatedArrays);
  const int64_t buffers = norm_policy.buffers + norm_policy.second_buffers;
  const int64_t sums = ParameterGradients(norm).count * buffers * padded_cols(p);
  Acc* const partials =
      static_cast<Acc*>(p.allocator->allocate((sums + policy.scratch) * static_cast<int64_t>(sizeof(Acc))));
  parallel_for(policy.tasks, 1, [&](int64_t task, int64_t end) {
    GatedTask<Acc> rows(p, loops, policy, norm, norm_policy, partials, partials + sums + task * policy.task_scratch);
    for (int64_t segment = task * segments.count / policy.tasks; segment < end * segments.count / policy.tasks;
         ++segment) {
      rows.handle_segment(segment, segments.are_gradients ? task : segment, task);
      if (segments.are_gradients) rows.store_gradients(segment, task);
    }
  });
  if (!segments.are_gradients) add_partials<Acc, Acc>(norm, partials, segments.count);
}

}  // namespace

void backward(const BackwardParams& p) {
  if (p.channels_first) return channels_first_backward(p);
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using T = typename decltype(types)::T;
    using X = typename decltype(types)::X;
    using W = typename decltype(types)::W;
    using Acc = AccOf<X>;
    if (p.activation != Activation::kNone) {
      return gated_backward<Acc>(p, choose_gated_loops<T, Coefficients<Acc>>(p));
    }
    const BackwardPolicy policy(p, ArraySize(p, sizeof(X)));
    // The partial sums, and the coefficients of all rows, which are used if the threads share the columns.
    const int64_t sums = ParameterGradients(p).count * (policy.buffers + policy.second_buffers);
    const int64_t elements = sums * padded_cols(p) + kCoefficients * p.groups * p.rows;
    alignas(kVectorBytes) Acc stack[2 * 3 * kMaxStackCols];  // two buffers
    void* const workspace =
        policy.uses_stack ? stack : p.allocator->allocate(elements * static_cast<int64_t>(sizeof(Acc)));
    backward(Backward<T, X, W>(p, policy, static_cast<Acc*>(workspace)));
  });
}

}  // namespace layernorm::cpu::CPU_CAPABILITY
