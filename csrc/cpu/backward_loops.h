// The loops over rows of backward.cpp, which has the formulas: the sums loop, the gradients loop and the input_scale
// loop.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "rescaling.h"
#include "summation.h"

namespace layernorm::cpu::CPU_CAPABILITY {
namespace {

// The coefficients of rows, which the sums loop computes for the gradients loop. Each is an array of one value per row:
//   d    = x * row_scale - scaled_mean, or xhat itself if it is computed from the output
//   xhat = d * scaled_rstd + minus_mean_xhat
//   dx   = scaled_rstd * row_scale * ((g + minus_mean_g) + xhat * minus_mean_g_xhat)
// g + minus_mean_g is exactly 0 if g is constant in the row, as for the gradient of a sum of outputs, or for one
// column.
template <class Acc>
struct Coefficients {
  Acc* values;
  int64_t stride;

  Coefficients from(int64_t row) const { return {values + row, stride}; }
  Acc* row_scale() const { return values; }                 // 1, or that of a rescaled row (BackwardCall::row_scale)
  Acc* scaled_mean() const { return values + stride; }      // mean * row_scale
  Acc* scaled_rstd() const { return values + 2 * stride; }  // rstd / row_scale
  Acc* minus_mean_xhat() const { return values + 3 * stride; }    // minus the average of d * scaled_rstd
  Acc* minus_mean_g_xhat() const { return values + 4 * stride; }  // -mean(g * xhat)
  Acc* minus_mean_g() const { return values + 5 * stride; }       // -mean(g)
};
constexpr int64_t kCoefficients = 6;  // arrays in Coefficients
// A tile of columns has whole packs, of any type.
static_assert(kMaxPackSize % kPackSize<float> == 0 && kTileCols % kMaxPackSize == 0);

// A backward call: its arguments, its policy, and the memory for partial sums and coefficients.
template <class T_, class X_, class W_>
struct BackwardCall {
  using T = T_;
  using X = X_;
  using W = W_;
  using Acc = AccOf<X>;
  static constexpr bool kTogether = kHandlesRowsTogether<T, X>;
  static constexpr bool kMayHaveNan = !std::is_same_v<T, W> || !std::is_same_v<T, X>;

  BackwardCall(const BackwardParams& p, const BackwardPolicy& policy, Acc* partials)
      : p(p), policy(policy), partials(partials) {}

  // Rescaled rows need instructions that the loops for other rows omit. In backward from the output, all rows are
  // rescaled. Otherwise a row is rescaled if its standard deviation is so large or so small that x - mean, or its
  // product with g, might overflow or underflow; its x is multiplied by a power of two near rstd. Rows whose rstd is
  // subnormal are rescaled even if the processor reads it as zero.
  bool needs_row_scale(Acc rstd) const { return p.memory_efficient || rstd < Acc(0x1p-20) || rstd > Acc(0x1p20); }
  // The row_scale of a rescaled row. In backward from the output, d is xhat, so that scaled_rstd is 1 and row_scale
  // rstd.
  Acc row_scale(Acc mean, Acc rstd) const {
    if (p.memory_efficient) return rstd;
    // Numbers near so large a mean are too far apart for a product to underflow, but the rescaled mean might overflow.
    if (rstd > 1 && std::fabs(mean) > Acc(0x1p20)) return 1;
    return std::ldexp(Acc(1), std::ilogb(std::fmax(rstd, std::numeric_limits<Acc>::min())));
  }
  // A buffer, which holds the partial sums of one segment at a time (BackwardPolicy::buffers).
  Acc* buffer(int64_t index) const { return partials + index * pitch; }

  const BackwardParams& p;
  const Chunks chunks = {p.cols, kChunk<Acc>};
  const BackwardPolicy& policy;
  const Segments& segments = policy.segments;
  const int64_t padded_cols = cpu::padded_cols(p);
  const int64_t pitch = ParameterGradients(p).count * padded_cols;  // elements from buffer to buffer
  const Acc weight_offset = p.zero_centered_weight;
  const bool has_input_scale_gradients = cpu::has_input_scale_gradients(p);
  // The workspace. It begins with the buffers, whose packs have the lane order of X.
  Acc* const partials;  // [buffers + second_buffers, ParameterGradients::count, padded_cols]
  // If the threads share the columns (policy.shares_columns), the coefficients of all rows follow.
  const Coefficients<Acc> coefficients = {buffer(policy.buffers + policy.second_buffers), p.samples * p.rows};
};

// d (see Coefficients) for the pack of the row x that begins at column j. `weight` and `bias` are those of its sample.
template <bool rescaled, class Call, class Mean, class Lanes>
Pack<typename Call::Acc> deviation(const Call& call, const typename Call::X* x, typename Call::Acc row_scale,
                                   const Mean& scaled_mean, const typename Call::W* weight,
                                   const typename Call::W* bias, int64_t j, Lanes lanes) {
  using X = typename Call::X;
  if constexpr (!rescaled) return load<X>(x + j, lanes) - scaled_mean;
  if (!call.p.memory_efficient) return load<X>(x + j, lanes) * row_scale - scaled_mean;
  auto v = load<X>(x + j, lanes);
  if (bias) v = v - load<X>(bias + j, lanes);
  return v / divisor(load_weight<X>(weight, call.weight_offset, j, lanes));
}

// v * w + c in two operations, so that g + minus_mean_g is exactly 0 if g is constant: see Coefficients. The product of
// two 16-bit numbers is exact in float, so fusing changes nothing there, except that a zero-centered weight, which is
// weight + 1 here, rounds once less.
template <class T, class W, class Acc>
Pack<Acc> multiply_add(const Pack<Acc>& v, const Pack<Acc>& w, const Pack<Acc>& c) {
  if constexpr (sizeof(T) == 2 && sizeof(W) == 2) return fma(v, w, c);
  return v * w + c;
}

// Computes the sums of kCount rows, and stores their coefficients. Only dx needs the sums of g and of g * xhat
// (with_g). The operands are local variables, which a store cannot alias.
template <class Threads, int kCount, int kPacks, bool rescaled, bool with_g, class Call>
void sums_loop(const Call& call, RowIndex first, const Coefficients<typename Call::Acc>& c) {
  using T = typename Call::T;
  using X = typename Call::X;
  using W = typename Call::W;
  using Acc = typename Call::Acc;
  enum { kD, kG, kGD, kKinds };
  const Acc* const means = row_of<const Acc>(call.p.mean, first);  // RMSNorm has none
  const Acc* const rstds = row_of<const Acc>(call.p.rstd, first);
  const int64_t mean_stride = call.p.mean.row_stride, rstd_stride = call.p.rstd.row_stride;
  const Acc row_scale = rescaled ? call.row_scale(means ? *means : Acc(0), *rstds) : Acc(1);
  const X* const x = row_of<const X>(call.p.input, first);
  const T* const dy = row_of<const T>(call.p.grad_output, first);
  const W* const weight = parameter_of<const W>(call.p.weight, first);
  const W* const bias = parameter_of<const W>(call.p.bias, first);
  const Acc weight_offset = call.weight_offset;
  const int64_t x_stride = call.p.input.row_stride, dy_stride = call.p.grad_output.row_stride;
  Acc scaled_mean[kCount];
  PerRow<Acc, kCount> rstd;
  for (int k = 0; k < kCount; ++k) {
    scaled_mean[k] = means ? means[k * mean_stride] * row_scale : Acc(0);
    if (rescaled) {
      rstd[k] = call.p.memory_efficient ? Acc(1) : divide_rstd(rstds + k * rstd_stride, row_scale);
    } else {
      rstd[k] = rstds[k * rstd_stride];
    }
  }
  const auto scaled_rstd = to_doubles(rstd);
  const auto sums = Threads::template sum<Sums<kCount, kKinds>>(call.chunks, [&](Columns columns) {
    Accumulators<Acc, kCount, with_g ? kKinds : 1, kPacks> s;
    for_each_pack<Acc, kPacks>(columns, [&](int turn, int64_t j, auto lanes) {
      Pack<Acc> w;
      if (with_g) w = load_weight<X>(weight, weight_offset, j, lanes);
#pragma GCC unroll 4
      for (int k = 0; k < kCount; ++k) {
        const auto d = zero_outside<kEvenOdd<X>>(
            deviation<rescaled>(call, x + k * x_stride, row_scale, scaled_mean[k], weight, bias, j, lanes), lanes);
        s.values[kD][k][turn] = s.values[kD][k][turn] + d;
        if constexpr (with_g) {
          const auto v = load<X>(dy + k * dy_stride + j, lanes);
          s.values[kG][k][turn] = multiply_add<T, W>(v, w, s.values[kG][k][turn]);
          s.values[kGD][k][turn] = fma(v * w, d, s.values[kGD][k][turn]);
        }
      }
    });
    return Sums<kCount, kKinds>(s.total());
  });
  PerRow<double, kCount> mean_xhat = {}, mean_g = {};
  if (!call.p.rms) {
    mean_xhat = call.chunks.template mean<Acc>(sums.values[kD]) * scaled_rstd;
    mean_g = call.chunks.template mean<Acc>(sums.values[kG]);
  }
  const auto mean_g_xhat = call.chunks.template mean<Acc>(sums.values[kGD]) * scaled_rstd - mean_xhat * mean_g;
  const auto store = [](Acc* to, const auto& values) {
    const auto rounded = __builtin_convertvector(values, PerRow<Acc, kCount>);
    std::memcpy(to, &rounded, sizeof(rounded));
  };
  for (int k = 0; k < kCount; ++k) {
    c.row_scale()[k] = row_scale;
    c.scaled_mean()[k] = scaled_mean[k];
  }
  store(c.scaled_rstd(), scaled_rstd);
  store(c.minus_mean_xhat(), -mean_xhat);
  store(c.minus_mean_g_xhat(), -mean_g_xhat);
  store(c.minus_mean_g(), -mean_g);
}

// Computes the coefficients of kCount rows. Returns whether one of the rows is rescaled.
template <class Threads, int kCount, int kPacks, class Call>
bool compute_coefficients_together(const Call& call, RowIndex first, const Coefficients<typename Call::Acc>& c) {
  const auto* const rstds = row_of<const typename Call::Acc>(call.p.rstd, first);
  bool any_rescaled = false;
  for (int k = 0; k < kCount; ++k) any_rescaled |= call.needs_row_scale(rstds[k * call.p.rstd.row_stride]);
  if constexpr (kCount > 1) {
    if (any_rescaled) {
      for (int k = 0; k < kCount; ++k) {
        compute_coefficients_together<Threads, 1, kPacks>(call, first + k, c.from(k));
      }
      return true;
    }
  } else if (any_rescaled) {
    sums_loop<Threads, 1, kPacks, /*rescaled=*/true, /*with_g=*/true>(call, first, c);
    return true;
  }
  call.p.grad_input.data ? sums_loop<Threads, kCount, kPacks, /*rescaled=*/false, /*with_g=*/true>(call, first, c)
                         : sums_loop<Threads, kCount, kPacks, /*rescaled=*/false, /*with_g=*/false>(call, first, c);
  return false;
}

// Computes the coefficients of rows, four or two at a time (Call::kTogether), and of the remaining rows one by one.
// Returns whether one of the rows is rescaled.
template <class Call>
bool compute_coefficients(const Call& call, const Rows& rows, const Coefficients<typename Call::Acc>& c) {
  const bool narrow = call.policy.is_narrow;
  bool rescaled = false;
  int64_t k = 0;
  const auto compute = [&](auto together, auto packs) {
    using Threads = std::conditional_t<packs == kNarrowPacks, OneThreadNarrow, OneThread>;
    for (; k + together <= rows.count; k += together) {
      rescaled |= compute_coefficients_together<Threads, together, packs>(call, rows[k], c.from(k));
    }
  };
  if constexpr (Call::kTogether) {
    if (narrow && call.policy.rows_together == kFourRows) compute(Constant<kFourRows>{}, Constant<kNarrowPacks>{});
    narrow ? compute(Constant<kTwoRows>{}, Constant<kNarrowPacks>{})
           : compute(Constant<kTwoRows>{}, Constant<kWidePacks>{});
  }
  narrow ? compute(Constant<1>{}, Constant<kNarrowPacks>{}) : compute(Constant<1>{}, Constant<kWidePacks>{});
  return rescaled;
}

// The partial sums of some columns, to which the loops add rows: each is an array over all columns, or null. The loop
// that computes dbias also computes dweight, so a call for dbias alone has an array for dweight, too.
template <class Acc>
struct ColumnSums {
  template <class Call>
  ColumnSums(const Call& call, int64_t buffer, Columns columns)
      : dweight(call.p.grad_weight.data || call.p.grad_bias.data ? call.buffer(buffer) : nullptr),
        dbias(call.p.grad_bias.data ? call.buffer(buffer) + call.padded_cols : nullptr),
        dinput_scale(call.p.grad_input_scale.data ? call.buffer(buffer) + 2 * call.padded_cols : nullptr),
        columns(columns) {}

  Acc *dweight, *dbias, *dinput_scale;
  Columns columns;
  bool are_unset = true;  // whether no row has been added, so that the arrays hold no numbers yet
};

// Prefetches kCount packs.
template <int kCount, class T>
void prefetch_packs(const T* p) {
  constexpr int kBytes = kCount * kPackSize<AccOf<T>> * static_cast<int>(sizeof(T));
  for (int i = 0; i < kBytes; i += kCacheLineBytes) __builtin_prefetch(reinterpret_cast<const char*>(p) + i);
}

// The variants of the gradients loop. They are template parameters, because tests in the loop would slow it down.
template <bool with_dx, bool streaming, bool with_dweight, bool with_dbias>
struct PlainGradients {
  static constexpr bool kDx = with_dx, kDweight = with_dweight, kDbias = with_dbias;  // the gradients to compute
  static constexpr bool kStreaming = streaming;                                       // streaming stores of dx
  static constexpr bool kRescaled = false;                                            // multiplies by the row_scale
};
template <class Gradients>
struct RescaledGradients : Gradients {
  static constexpr bool kRescaled = true;
};

// The coefficients of a row as packs. GCC needs one more instruction to load and broadcast a scalar.
template <class Acc>
struct RowCoefficients {
  Pack<Acc> scaled_mean, scaled_rstd, minus_mean_xhat, minus_mean_g_xhat, minus_mean_g;

  [[gnu::always_inline]] void load(const Coefficients<Acc>& c, int64_t row) {
    scaled_mean = broadcast(c.scaled_mean()[row]);
    scaled_rstd = broadcast(c.scaled_rstd()[row]);
    minus_mean_xhat = broadcast(c.minus_mean_xhat()[row]);
    minus_mean_g_xhat = broadcast(c.minus_mean_g_xhat()[row]);
    minus_mean_g = broadcast(c.minus_mean_g()[row]);
  }
};

// The weight and the partial sums of a pack of columns, in registers.
template <class Acc>
struct PackOfColumns {
  Pack<Acc> weight, dweight, dbias;
};

// The operands of a gradients loop over rows, and its steps. It is a local variable of the loops, so that no store
// aliases the operands. Without the attributes, GCC calls the steps in the loop, which slows down short rows.
template <class Gradients, class Call>
struct GradientOperands {
  using T = typename Call::T;
  using X = typename Call::X;
  using W = typename Call::W;
  using Acc = typename Call::Acc;

  [[gnu::always_inline]] GradientOperands(const Call& call, const ColumnSums<Acc>& sums, RowIndex first, Acc row_scale)
      : call(call),
        x(row_of<const X>(call.p.input, first)),
        dy(row_of<const T>(call.p.grad_output, first)),
        dsum(row_of<const X>(call.p.grad_sum, first)),
        dx(row_of<X>(call.p.grad_input, first)),
        weight(parameter_of<const W>(call.p.weight, first)),
        bias(parameter_of<const W>(call.p.bias, first)),
        dweight(sums.dweight),
        dbias(sums.dbias),
        x_stride(call.p.input.row_stride),
        dy_stride(call.p.grad_output.row_stride),
        dsum_stride(call.p.grad_sum.row_stride),
        dx_stride(call.p.grad_input.row_stride),
        row_scale(row_scale),
        weight_offset(call.weight_offset),
        sums_are_unset(sums.are_unset) {}

  template <class Lanes>
  [[gnu::always_inline]] PackOfColumns<Acc> load_columns(int64_t j, Lanes lanes) const {
    PackOfColumns<Acc> columns = {};
    if (Gradients::kDx) columns.weight = load_weight<X>(weight, weight_offset, j, lanes);
    if (Gradients::kDweight && !sums_are_unset) columns.dweight = read(dweight + j, AllLanes{});
    if (Gradients::kDbias && !sums_are_unset) columns.dbias = read(dbias + j, AllLanes{});
    return columns;
  }
  [[gnu::always_inline]] void store_sums(int64_t j, const PackOfColumns<Acc>& columns) const {
    if (Gradients::kDweight) write(dweight + j, columns.dweight, AllLanes{});
    if (Gradients::kDbias) write(dbias + j, columns.dbias, AllLanes{});
  }

  // Adds a row, counted from the first one, to the partial sums of a pack of columns, and returns dx.
  template <class Lanes>
  [[gnu::always_inline]] Pack<Acc> add_row(int64_t row, const RowCoefficients<Acc>& c, int64_t j, Lanes lanes,
                                           PackOfColumns<Acc>& columns) const {
    Pack<Acc> result = {};
    auto v = load<X>(dy + row * dy_stride + j, lanes);
    if constexpr (!kEvenOdd<X>) v = in_register(v);  // bfloat16 was loaded once, as words
    if constexpr (Gradients::kDbias) columns.dbias = columns.dbias + v;
    if constexpr (Gradients::kDx || Gradients::kDweight) {
      const auto d =
          deviation<Gradients::kRescaled>(call, x + row * x_stride, row_scale, c.scaled_mean, weight, bias, j, lanes);
      const auto xhat = fma(d, c.scaled_rstd, c.minus_mean_xhat);
      if constexpr (Gradients::kDweight) columns.dweight = fma(v, xhat, columns.dweight);
      if constexpr (Gradients::kDx) {
        const auto g = multiply_add<T, W>(v, columns.weight, c.minus_mean_g);
        result = fma(xhat, c.minus_mean_g_xhat, g) * c.scaled_rstd;
        if constexpr (Gradients::kRescaled) result = result * row_scale;
        if (dsum) result = result + load<X>(dsum + row * dsum_stride + j, lanes);
      }
    }
    return result;
  }
  template <class Lanes>
  [[gnu::always_inline]] void store_dx(int64_t row, int64_t j, Lanes lanes, const Pack<Acc>& result) const {
    if constexpr (Gradients::kDx) {
      store<X, Call::kMayHaveNan>(dx + row * dx_stride + j, result, store_lanes<Gradients::kStreaming>(lanes));
    }
  }

  const Call& call;
  const X* const x;
  const T* const dy;
  const X* const dsum;
  X* const dx;
  const W* const weight;
  const W* const bias;
  Acc* const dweight;
  Acc* const dbias;
  const int64_t x_stride, dy_stride, dsum_stride, dx_stride;
  const Acc row_scale, weight_offset;  // the row_scale is for rescaled rows, which are handled one by one
  const bool sums_are_unset;
};

// The gradients loop over kCount rows: takes a pack of columns at a time, for all of these rows.
template <int kCount, class Gradients, class Call>
void gradients_loop_by_rows(const Call& call, const ColumnSums<typename Call::Acc>& sums, RowIndex first,
                            const Coefficients<typename Call::Acc>& c) {
  using Acc = typename Call::Acc;
  constexpr int kStep = kPackSize<Acc>;
  const GradientOperands<Gradients, Call> operands(call, sums, first, *c.row_scale());
  RowCoefficients<Acc> coefficients[kCount];
  for (int k = 0; k < kCount; ++k) coefficients[k].load(c, k);

  // While these rows are handled, the next kCount rows are prefetched one after the other, because GCC has no registers
  // for a pointer to each. At column row_end, the pointers go on to another row.
  const int64_t x_stride = operands.x_stride, dy_stride = operands.dy_stride, prefetched = call.policy.rows_ahead;
  const int64_t n = sums.columns.count;
  const bool adjacent = x_stride == n && dy_stride == n;
  const bool prefetches = prefetched && (adjacent || n >= kCount * kStep);
  const auto* next_x = operands.x + prefetched * x_stride + sums.columns.begin;
  const auto* next_dy = operands.dy + prefetched * dy_stride + sums.columns.begin;
  int64_t row_end = adjacent ? std::numeric_limits<int64_t>::max() : sums.columns.begin + n / kCount;
  for_each_pack<Acc, 1>(sums.columns, [&](int, int64_t j, auto lanes) {
    auto columns = operands.load_columns(j, lanes);
    if constexpr (kStoresLast<kCount>) {
      Pack<Acc> dx[kCount];
#pragma GCC unroll 4
      for (int k = 0; k < kCount; ++k) dx[k] = operands.add_row(k, coefficients[k], j, lanes, columns);
#pragma GCC unroll 4
      for (int k = 0; k < kCount; ++k) operands.store_dx(k, j, lanes, dx[k]);
    } else {
      for (int k = 0; k < kCount; ++k) {
        operands.store_dx(k, j, lanes, operands.add_row(k, coefficients[k], j, lanes, columns));
      }
    }
    operands.store_sums(j, columns);
    if (prefetches) {
      if (kCount > 1 && j >= row_end) {
        row_end += n / kCount;
        next_x += x_stride - n;
        next_dy += dy_stride - n;
      }
      prefetch_packs<kCount>(next_x);
      prefetch_packs<kCount>(next_dy);
      next_x += kCount * kStep;
      next_dy += kCount * kStep;
    }
  });
}

// The gradients loop over any number of rows: takes kColumnPacks packs of columns at a time, for all rows, so that the
// partial sums stay in registers.
template <class Gradients, class Call>
void gradients_loop_by_columns(const Call& call, const ColumnSums<typename Call::Acc>& sums, const Rows& rows,
                               const Coefficients<typename Call::Acc>& c) {
  using Acc = typename Call::Acc;
  constexpr int kStep = kPackSize<Acc>;
  const GradientOperands<Gradients, Call> operands(call, sums, rows[0], /*row_scale=*/1);
  const auto* const next_x = operands.x + call.policy.rows_ahead * operands.x_stride;
  const auto* const next_dy = operands.dy + call.policy.rows_ahead * operands.dy_stride;
  const auto handle_columns = [&](auto packs, int64_t j, auto lanes) __attribute__((always_inline)) {
    PackOfColumns<Acc> columns[packs];
    for (int i = 0; i < packs; ++i) columns[i] = operands.load_columns(j + i * kStep, lanes);
    for (int64_t row = 0; row < rows.count; ++row) {
      RowCoefficients<Acc> coefficients;
      coefficients.load(c, row);
      for (int i = 0; i < packs; ++i) {
        operands.store_dx(row, j + i * kStep, lanes,
                          operands.add_row(row, coefficients, j + i * kStep, lanes, columns[i]));
      }
      prefetch_packs<packs>(next_x + row * operands.x_stride + j);
      prefetch_packs<packs>(next_dy + row * operands.dy_stride + j);
    }
    for (int i = 0; i < packs; ++i) operands.store_sums(j + i * kStep, columns[i]);
  };
  const int64_t end = sums.columns.end();
  int64_t j = sums.columns.begin;
  for (; j + kColumnPacks * kStep <= end; j += kColumnPacks * kStep) {
    handle_columns(Constant<kColumnPacks>{}, j, AllLanes{});
  }
  if (kColumnPacks > 1 && j + kStep <= end) {
    handle_columns(Constant<1>{}, j, AllLanes{});
    j += kStep;
  }
  if (j < end) handle_columns(Constant<1>{}, j, FirstLanes{static_cast<int>(end - j)});
}

// Whether the gradients loop has to rescale the values of a row, see Coefficients::row_scale().
template <class Call>
bool has_row_scale(const Call& call, const Coefficients<typename Call::Acc>& c, int64_t row) {
  return call.p.memory_efficient || c.row_scale()[row] != 1;
}

// Stores dx of rows, and adds the rows to the partial sums of dweight and dbias, for the columns of `sums`.
template <class Gradients, class Call>
void compute_gradients(const Call& call, ColumnSums<typename Call::Acc> sums, const Rows& rows,
                       const Coefficients<typename Call::Acc>& c, bool any_rescaled) {
  // Only the usual gradients have this loop, because each copy of it enlarges the library.
  if constexpr (kHasColumnLoop && Call::kTogether && Gradients::kDx && Gradients::kDweight) {
    if (call.policy.by_columns && !any_rescaled) return gradients_loop_by_columns<Gradients>(call, sums, rows, c);
  }
  int64_t k = 0;
  const auto loop = [&](auto together, auto gradients) {
    gradients_loop_by_rows<together, decltype(gradients)>(call, sums, rows[k], c.from(k));
    sums.are_unset = false;
    k += together;
  };
  if constexpr (Call::kTogether) {
    const int64_t together = any_rescaled ? 1 : min(call.policy.rows_together, kMostGradientRows);
    while (together == kMostGradientRows && k + kMostGradientRows <= rows.count)
      loop(Constant<kMostGradientRows>{}, Gradients{});
    while (together >= kTwoRows && k + kTwoRows <= rows.count) loop(Constant<kTwoRows>{}, Gradients{});
  }
  while (k < rows.count) {
    const bool rescaled = any_rescaled && has_row_scale(call, c, k);
    rescaled ? loop(Constant<1>{}, RescaledGradients<Gradients>{}) : loop(Constant<1>{}, Gradients{});
  }
}

template <class Call>
using ComputeGradients = void (*)(const Call& call, ColumnSums<typename Call::Acc> sums, const Rows& rows,
                                  const Coefficients<typename Call::Acc>& c, bool any_rescaled);

// Returns the compute_gradients() for the gradients that the call needs. Each segment calls this once, because a choice
// for every batch of rows would slow down short rows.
template <class Call>
ComputeGradients<Call> choose_gradients(const Call& call) {
  ComputeGradients<Call> chosen = nullptr;
  dispatch_flags(
      [&](auto with_dx, auto streaming, auto with_dweight, auto with_dbias) {
        constexpr bool kStreaming = with_dx && streaming && kHasStreamingStores;
        constexpr bool kWithDweight = with_dweight || with_dbias;  // dbias alone is rare and has no loop of its own
        chosen = compute_gradients<PlainGradients<with_dx, kStreaming, kWithDweight, with_dbias>, Call>;
      },
      call.p.grad_input.data != nullptr, call.policy.streams, call.p.grad_weight.data != nullptr,
      call.p.grad_bias.data != nullptr);
  return chosen;
}

// The gradients of input_scale, and of the input that it multiplies, from dx, which the gradients loop has stored. This
// is a loop of its own, so that the gradients loop of calls without an input_scale has no instruction for it.
template <class Call>
void input_scale_loop(const Call& call, const ColumnSums<typename Call::Acc>& sums, const Rows& rows) {
  using T = typename Call::T;
  using X = typename Call::X;
  const auto* const input_scale = parameter_of<const typename Call::W>(call.p.input_scale, rows[0]);
  const X* const dx = row_of<const X>(call.p.grad_input, rows[0]);
  const T* const input = row_of<const T>(call.p.scaled_input, rows[0]);
  T* const dinput = row_of<T>(call.p.grad_scaled_input, rows[0]);
  auto* const dinput_scale = sums.dinput_scale;
  const bool sums_are_unset = sums.are_unset;
  const int64_t dx_stride = call.p.grad_input.row_stride, input_stride = call.p.scaled_input.row_stride,
                dinput_stride = call.p.grad_scaled_input.row_stride;
  for_each_pack<typename Call::Acc, 1>(sums.columns, [&](int, int64_t j, auto lanes) {
    const auto factor = load<X>(input_scale + j, lanes);
    Pack<typename Call::Acc> sum = {};
    if (dinput_scale && !sums_are_unset) sum = read(dinput_scale + j, AllLanes{});
    for (int64_t k = 0; k < rows.count; ++k) {
      const auto v = load<X>(dx + k * dx_stride + j, lanes);
      if (dinput_scale) sum = fma(v, load<X>(input + k * input_stride + j, lanes), sum);
      if (dinput) {
        store<X, Call::kMayHaveNan>(dinput + k * dinput_stride + j, v * factor, lanes);
      }
    }
    if (dinput_scale) write(dinput_scale + j, sum, AllLanes{});
  });
}

}  // namespace
}  // namespace layernorm::cpu::CPU_CAPABILITY
