// Computes y = (x - mean) * rstd * weight + bias for every row of x [rows, cols]. RMSNorm has a mean of 0.
//
// If there are fewer rows than threads, the threads share each long row. Otherwise each thread handles a range of rows:
//
//   forward_on_thread                 for each batch of rows:
//    -> forward_rows                  calls add_residual(), if there is a residual, and then
//      -> compute_statistics          the statistics of a few rows (statistics_around), if necessary twice
//      -> store_rows                  chooses the variant of the output, and rescales rows that are out of range
//        -> normalize                 stores the output
//
// With gate_first, gate_first_forward() takes the same steps for batches of rows that gate_rows() has multiplied.
//
// The code reads a row twice (statistics, output), but only once from memory: it moves 2 * rows * cols * sizeof(T)
// bytes.
//
// The average c of a row's first pack estimates the mean. One loop sums d = x - c and d^2, and then
//
//   mean = c + mean(d)      var = mean(d^2) - mean(d)^2      xhat = (x - c) * rstd - mean(d) * rstd
//
// This is precise if mean(d)^2 <= var. Then |d| <= (|xhat| + 1) / rstd, so rounding d changes xhat by no more than
// 2^-24 * (|xhat| + 1), and mean(d^2) <= 2 * var, so the relative error of var is at most twice that of a sum of
// squares.
//
// Otherwise the row is read again with c + mean(d) as the second c. The first c is the average of m elements, so that
// |c - mean| <= sqrt(cols / m) standard deviations. Each d is rounded by 2^-24 of itself, so that the second c is off
// by 2^-24 * sqrt(cols / m) standard deviations, and by its own rounding to Acc (up to 0.03 for values near 1e6). The
// second mean(d) corrects both. The output is within a few roundings of the exact result at any offset, and a constant
// row gives exactly the bias.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include <cmath>
#include <limits>

#include "../dtypes.h"
#include "gated.h"
#include "rescaling.h"
#include "summation.h"

namespace layernorm::cpu::CPU_CAPABILITY {
namespace {

// The statistics of kCount rows, which load_row() may have rescaled. The mean is center + correction.
template <class Acc, int kCount>
struct Statistics {
  PerRow<Acc, kCount> center, correction, rstd;
  bool in_range;           // whether in all rows no sum overflowed and no squares underflowed
  const Acc* differences;  // x - center [packs of a row, kCount, kPackSize]; null if they are not kept

  // The statistics of kSome rows from row k on.
  template <int kSome>
  decltype(auto) rows(int k) const {
    if constexpr (kSome == kCount) {
      return *this;
    } else {
      Statistics<Acc, kSome> some = {};
      some.in_range = in_range;
      for (int i = 0; i < kSome; ++i) {
        some.center[i] = center[k + i];
        some.correction[i] = correction[k + i];
        some.rstd[i] = rstd[k + i];
      }
      return some;
    }
  }
};

// sum = input_scale * input + residual for kCount rows. Without an input_scale the product with 1 changes no bit.
template <class Threads, int kCount, bool may_have_nan, class T, class X, class W>
void add_residual(const ForwardParams& p, RowIndex first, const Chunks& chunks) {
  const T* const input = row_of<const T>(p.input, first);
  const X* const residual = row_of<const X>(p.residual, first);
  const W* const input_scale = parameter_of<const W>(p.input_scale, first);
  X* const sum = row_of<X>(p.sum, first);
  Threads::for_each(chunks, [&](Columns columns) {
    for_each_stored_pack<AccOf<X>, kCount == 1, false>(sum, columns, [&](int64_t j, auto lanes) {
      const auto factor = load_weight<X>(input_scale, 0, j, lanes);
      for (int k = 0; k < kCount; ++k) {
        const auto v = load<X>(input + k * p.input.row_stride + j, lanes);
        const auto addend = load<X>(residual + k * p.residual.row_stride + j, lanes);
        store<X, may_have_nan>(sum + k * p.sum.row_stride + j, fma(v, factor, addend), lanes);
      }
    });
  });
}

// The statistics of kCount rows, the first at x, from the sums of x - center and of its square. If `center` is an
// estimate of the mean (center_is_estimate), a row whose mean is more than a standard deviation away from it is read
// again with a better center; the top of this file has the error bound. So is a rescaled row of equal elements, because
// the square of its center's rounding error may overflow or underflow. `differences` is where to keep x - center, an
// Acc*, or nullptr.
template <class Threads, int kCount, int kPacks, bool rescaled, class X, class Differences = std::nullptr_t>
Statistics<AccOf<X>, kCount> statistics_around(const ForwardParams& p, const X* x, int64_t stride, const Chunks& chunks,
                                               AccOf<X> row_scale, const PerRow<AccOf<X>, kCount>& center,
                                               bool center_is_estimate, Differences differences = nullptr) {
  using Acc = AccOf<X>;
  using Doubles = PerRow<double, kCount>;
  Acc centers[kCount];
  for (int r = 0; r < kCount; ++r) centers[r] = center[r];
  enum { kDifferences, kSquares, kKinds };
  const auto sums = Threads::template sum<Sums<kCount, kKinds>>(chunks, [&](Columns columns) {
    Accumulators<Acc, kCount, kKinds, kPacks> s;
    for_each_pack<Acc, kPacks>(columns, [&](int turn, int64_t j, auto lanes) {
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        const auto d =
            zero_outside<kEvenOdd<X>>(load_row<X, rescaled>(x + r * stride + j, row_scale, lanes) - centers[r], lanes);
        if constexpr (!std::is_null_pointer_v<Differences>)
          write(differences + j * kCount + r * kPackSize<Acc>, d, AllLanes{});
        s.values[kDifferences][r][turn] = s.values[kDifferences][r][turn] + d;
        s.values[kSquares][r][turn] = fma(d, d, s.values[kSquares][r][turn]);
      }
    });
    return s.total();
  });
  const Doubles correction = p.rms ? Doubles{} : chunks.mean<Acc>(sums.values[kDifferences]);
  Doubles variance = chunks.mean<Acc>(sums.values[kSquares]) - correction * correction, rstd;
  variance = variance < 0 ? Doubles{} : variance;  // written so that NaN stays NaN
  if constexpr (rescaled) {
    for (int r = 0; r < kCount; ++r) rstd[r] = rescaled_rstd(variance[r], p.eps, row_scale);
  } else {
    for (int r = 0; r < kCount; ++r) rstd[r] = std::sqrt(variance[r] + p.eps);
    rstd = 1 / rstd;
  }
  // All rows are tested at once, because tests of single rows would slow down short rows.
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  bool in_range = all(variance < kInfinity);
  // With a larger eps, squares that underflow change no digit of rstd.
  if (p.eps < kSmallestVariance<Acc>) in_range &= all(variance > kSmallestVariance<Acc>);
  // Whether the center is more than a standard deviation off. In a rescaled row, overflow and underflow count as far
  // off.
  auto is_far = correction * correction > variance;
  if constexpr (rescaled) is_far = ~((correction * correction < variance) & (variance < kInfinity));
  const auto rounded = [](const Doubles& v) { return __builtin_convertvector(v, PerRow<Acc, kCount>); };
  Statistics<Acc, kCount> stats = {center, rounded(correction), rounded(rstd), in_range, differences};
  if (all(~is_far) || !center_is_estimate) return stats;
  stats.differences = nullptr;  // the kept differences of a row that is read again are from its first center
  for (int r = 0; r < kCount; ++r) {
    if (!is_far[r]) continue;
    const PerRow<Acc, 1> mean = {static_cast<Acc>(center[r] + correction[r])};
    const auto row = statistics_around<Threads, 1, kPacks, rescaled>(p, x + r * stride, stride, chunks, row_scale, mean,
                                                                     /*center_is_estimate=*/false);
    stats.center[r] = row.center[0];
    stats.correction[r] = row.correction[0];
    stats.rstd[r] = row.rstd[0];
  }
  return stats;
}

// The statistics of kCount rows, the first at x. The average of a row's first pack estimates its mean.
template <class Threads, int kCount, int kPacks, bool rescaled, class X, class Differences = std::nullptr_t>
Statistics<AccOf<X>, kCount> compute_statistics(const ForwardParams& p, const X* x, int64_t stride,
                                                const Chunks& chunks, AccOf<X> row_scale,
                                                Differences differences = nullptr) {
  using Acc = AccOf<X>;
  PerRow<Acc, kCount> center = {};
  if (!p.rms) {
    const int64_t n = min(chunks.cols, kPackSize<Acc>);
    Accumulators<Acc, kCount, 1, 1> first_packs;
    for_each_pack<Acc, 1>({0, n}, [&](int, int64_t j, auto lanes) {
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r)
        first_packs.values[0][r][0] = load_row<X, rescaled>(x + r * stride + j, row_scale, lanes);
    });
    center =
        __builtin_convertvector(first_packs.total().values[0] * (1.0 / static_cast<double>(n)), PerRow<Acc, kCount>);
  }
  return statistics_around<Threads, kCount, kPacks, rescaled>(p, x, stride, chunks, row_scale, center,
                                                              /*center_is_estimate=*/!p.rms, differences);
}

// Prefetches the lines of a pack that will be stored.
template <class T>
void prefetch_for_write(T* p) {
  constexpr int64_t kLine = kCacheLineBytes / sizeof(T);
  __builtin_prefetch(p, 1);
  if (kPackSize<AccOf<T>> > kLine) __builtin_prefetch(p + kLine, 1);
}

// The variants of the output loop. They are template parameters, because tests in the loop would slow it down.
struct PlainOutput {
  static constexpr bool kRescaled = false;        // multiplies x by the row_scale
  static constexpr bool kStreaming = false;       // streaming stores
  static constexpr bool kHasDifferences = false;  // reads x - center, which the statistics loop has kept, instead of x
  static constexpr bool kGated = false;           // multiplies by the activated gate
};
struct OutputFromDifferences : PlainOutput {
  static constexpr bool kHasDifferences = true;
};
struct RescaledOutput : PlainOutput {
  static constexpr bool kRescaled = true;
};
struct GatedOutput : RescaledOutput {  // the row_scale may be 1, which changes no bit
  static constexpr bool kGated = true;
};
template <class Variant>
struct WithStreaming : Variant {
  static constexpr bool kStreaming = true;
};

// Stores the output of kCount rows of `values`, which is the input or its sum with the residual.
template <class Variant, class Threads, int kCount, class T, class X, class W>
void normalize(const ForwardParams& p, RowIndex first, const View& values, const Chunks& chunks,
               const Statistics<AccOf<X>, kCount>& stats, AccOf<X> row_scale, const Prefetch& prefetch) {
  using Acc = AccOf<X>;
  const X* const x = row_of<const X>(values, first);
  T* const y = row_of<T>(p.output, first);
  const W* const weight = parameter_of<const W>(p.weight, first);
  const W* const bias = parameter_of<const W>(p.bias, first);
  const Acc weight_offset = p.zero_centered_weight;
  const int64_t x_stride = values.row_stride, y_stride = p.output.row_stride;
  constexpr bool kStreaming = Variant::kStreaming;
  constexpr bool kMayHaveNan = !std::is_same_v<T, W> || !std::is_same_v<T, X>;
  // The differences are packs that begin at column 0, so that stores cannot begin elsewhere.
  constexpr bool kAligned = kCount == 1 && !Variant::kHasDifferences;
  constexpr int64_t kWriteAhead = kWriteAheadBytes / sizeof(T);
  const Activation activation = p.activation;
  const T* const z = Variant::kGated ? row_of<const T>(p.gate, first) : nullptr;
  const int64_t z_stride = p.gate.row_stride;
  const T* const next_z = Variant::kGated && prefetch.rows_ahead ? z + prefetch.rows_ahead * z_stride : nullptr;
  const X* const next_x = prefetch.rows_ahead ? x + prefetch.rows_ahead * x_stride : nullptr;
  const bool prefetches_y = prefetch.rows_ahead && prefetch.output && !kStreaming;
  const T* const next_y = prefetches_y ? y + prefetch.rows_ahead * y_stride : nullptr;
  // Local variables, which a store cannot alias.
  const auto center = stats.center, rstd = stats.rstd, minus_correction = -stats.correction * rstd;
  Threads::for_each(chunks, [&](Columns columns) {
    for_each_stored_pack<Acc, kAligned, kStreaming>(y, columns, [&](int64_t j, auto lanes) {
      Pack<Acc> w, b;
      if (weight) w = load_weight<X>(weight, weight_offset, j, lanes);
      if (bias) b = load<X>(bias + j, lanes);
      const auto output_of_row = [&](int k) __attribute__((always_inline)) {
        Pack<Acc> d;
        if constexpr (Variant::kHasDifferences) {
          d = read(stats.differences + j * kCount + k * kPackSize<Acc>, AllLanes{});
        } else {
          d = load_row<X, Variant::kRescaled>(x + k * x_stride + j, row_scale, lanes) - center[k];
        }
        auto v = fma(d, rstd[k], minus_correction[k]);  // xhat
        if (weight && bias) {
          v = fma(v, w, b);
        } else if (weight) {
          v = v * w;
        } else if (bias) {
          v = v + b;
        }
        if constexpr (Variant::kGated) v = v * activate(load<X>(z + k * z_stride + j, lanes), activation);
        return v;
      };
      const auto store_row = [&](int k, const Pack<Acc>& v) __attribute__((always_inline)) {
        store<X, kMayHaveNan>(y + k * y_stride + j, v, store_lanes<kStreaming>(lanes));
        if (kCount == 1 && !kStreaming) prefetch_for_write(y + j + kWriteAhead);
      };
      if constexpr (kStoresLast<kCount>) {
        Pack<Acc> results[kCount];
#pragma GCC unroll 4
        for (int k = 0; k < kCount; ++k) results[k] = output_of_row(k);
#pragma GCC unroll 4
        for (int k = 0; k < kCount; ++k) store_row(k, results[k]);
      } else {
        for (int k = 0; k < kCount; ++k) store_row(k, output_of_row(k));
      }
      for (int k = 0; next_x && k < kCount; ++k) prefetch_to_l2(next_x + k * x_stride + j);
      for (int k = 0; next_y && k < kCount; ++k) prefetch_to_l2(next_y + k * y_stride + j);
      for (int k = 0; next_z && k < kCount; ++k) prefetch_to_l2(next_z + k * z_stride + j);
    });
    if (kStreaming) streaming_fence();
  });
}

// Stores the output and the statistics of kCount rows of `values`. Rows whose sums overflowed or whose squares
// underflowed are first summed again with a row_scale.
template <class Threads, int kCount, int kPacks, class T, class X, class W>
void store_rows(const ForwardParams& p, const ForwardPolicy& policy, RowIndex first, const View& values,
                const Chunks& chunks, const Statistics<AccOf<X>, kCount>& stats) {
  using Acc = AccOf<X>;
  // A variant that these types or this number of packs never need is not compiled: another one takes its place.
  constexpr bool kMayStream = kHasStreamingStores && kPacks == kWidePacks;
  constexpr bool kMayBeGated = std::is_same_v<T, X> && std::is_same_v<W, Acc>;
  constexpr bool kMayKeep = kMayKeepDifferences<kPacks, T, X>;
  using Streamed = std::conditional_t<kMayStream, WithStreaming<PlainOutput>, PlainOutput>;
  using FromDifferences = std::conditional_t<kMayKeep, OutputFromDifferences, PlainOutput>;
  using Gated = std::conditional_t<kMayBeGated, GatedOutput, RescaledOutput>;
  using StreamedGated = std::conditional_t<kMayStream && kMayBeGated, WithStreaming<GatedOutput>, Gated>;
  const X* const x = row_of<const X>(values, first);
  Acc* const mean = row_of<Acc>(p.mean, first);
  Acc* const rstd = row_of<Acc>(p.rstd, first);
  const bool is_gated = kMayBeGated && p.activation != Activation::kNone;
  const bool streams = kMayStream && policy.streams;
  const Prefetch& prefetch = kCount > 1 ? policy.prefetch_together : policy.prefetch_single;
  const Prefetch& single = policy.prefetch_single;
  // The statistics loop has already read the kCount rows, so prefetches for single rows begin after them.
  const Prefetch row_prefetch = {single.rows_ahead ? max(single.rows_ahead, kCount) : 0, single.output};
  // Stores the output of a row that is gated or rescaled.
  const auto store_row = [&](RowIndex row, const Statistics<Acc, 1>& row_stats, Acc row_scale) {
    const auto store_output = [&](auto variant) {
      normalize<decltype(variant), Threads, 1, T, X, W>(p, row, values, chunks, row_stats, row_scale, row_prefetch);
    };
    if (!is_gated) {
      store_output(RescaledOutput{});
    } else if (streams) {
      store_output(StreamedGated{});
    } else {
      store_output(Gated{});
    }
  };
  if (stats.in_range) {
    // Stores the output of `count` rows from row k on.
    const auto store_output = [&](auto variant, auto count, int k) {
      normalize<decltype(variant), Threads, count, T, X, W>(p, first + k, values, chunks, stats.template rows<count>(k),
                                                            /*row_scale=*/1, prefetch);
    };
    constexpr Constant<kCount> kAll;
    constexpr Constant<min(kCount, kTwoRows)> kFew;
    if (is_gated) {
      for (int k = 0; k < kCount; ++k) store_row(first + k, stats.template rows<1>(k), /*row_scale=*/1);
    } else if (streams) {
      if (policy.outputs_together == 1) {
        for (int k = 0; k < kCount; ++k) store_output(Streamed{}, Constant<1>{}, k);
      } else {
        store_output(Streamed{}, kAll, 0);
      }
    } else if (kMayKeep && stats.differences) {
      store_output(FromDifferences{}, kAll, 0);
    } else if (policy.outputs_together < kCount) {
      for (int k = 0; k < kCount; k += kFew) store_output(PlainOutput{}, kFew, k);
    } else {
      store_output(PlainOutput{}, kAll, 0);
    }
    for (int k = 0; k < kCount; ++k) {
      if (mean) mean[k * p.mean.row_stride] = static_cast<Acc>(double(stats.center[k]) + stats.correction[k]);
      rstd[k * p.rstd.row_stride] = stats.rstd[k];
    }
  } else if constexpr (kCount > 1) {  // one of the rows is out of range: handles each alone
    for (int k = 0; k < kCount; ++k) {
      const auto row = compute_statistics<Threads, 1, kPacks, false>(p, x + k * values.row_stride, 0, chunks,
                                                                     /*row_scale=*/1);
      store_rows<Threads, 1, kPacks, T, X, W>(p, policy, first + k, values, chunks, row);
    }
  } else {  // sums overflowed or squares underflowed, or the row holds NaN or infinity and will give NaN again
    const Acc row_scale = row_scale_for(stats.rstd[0], stats.center[0]);
    const auto rescaled = compute_statistics<Threads, 1, kPacks, true>(p, x, values.row_stride, chunks, row_scale);
    store_row(first, rescaled, row_scale);
    if (mean) *mean = static_cast<Acc>((double(rescaled.center[0]) + rescaled.correction[0]) / row_scale);
    store_rstd(rstd, rescaled.rstd[0], row_scale, p.eps);
  }
}

// Handles a batch of kBatch rows: adds the residual, if there is one, and computes the statistics, both for kCount rows
// at a time. Then stores the output. `first` is a reference: GCC stores a RowIndex that is passed by value as two words
// and loads it as one vector, which waits for all earlier streaming stores. With AVX-512 (AMD EPYC, Zen 4), float32
// rows of 4096 columns took 7 % longer.
template <class Threads, int kBatch, int kCount, int kPacks, class T, class X, class W>
void forward_rows(const ForwardParams& p, const ForwardPolicy& policy, const RowIndex& first, const Chunks& chunks) {
  using Acc = AccOf<X>;
  constexpr bool kMayKeep = kMayKeepDifferences<kPacks, T, X>;
  const View& values = p.residual.data ? p.sum : p.input;
  const bool keeps_differences = kMayKeep && kBatch <= policy.kept_rows;  // between the statistics and the output
  alignas(kVectorBytes) Acc differences[kMayKeep ? kMaxDifferences : 1];
  Statistics<Acc, kCount> stats[kBatch / kCount];
  for (int k = 0; k < kBatch; k += kCount) {
    if (p.residual.data) {
      // The NaN of an operand of another type than the sum may need the slower narrow(), see store().
      constexpr bool kDiffers = !std::is_same_v<T, X>, kInputScaleDiffers = kDiffers || !std::is_same_v<T, W>;
      const auto add = [&](auto count, RowIndex row) {
        p.input_scale.data ? add_residual<Threads, count, kInputScaleDiffers, T, X, W>(p, row, chunks)
                           : add_residual<Threads, count, kDiffers, T, X, W>(p, row, chunks);
      };
      if (kCount > 1 && policy.residuals_together == 1) {
        for (int i = 0; i < kCount; ++i) add(Constant<1>{}, first + (k + i));
      } else {
        add(Constant<kCount>{}, first + k);
      }
    }
    const X* const x = row_of<const X>(values, first + k);
    const auto compute = [&](auto... to) {
      stats[k / kCount] = compute_statistics<Threads, kCount, kPacks, false>(p, x, values.row_stride, chunks,
                                                                             /*row_scale=*/1, to...);
    };
    keeps_differences ? compute(differences + k * padded_cols(p)) : compute();
  }
  for (int k = 0; k < kBatch; k += kCount) {
    store_rows<Threads, kCount, kPacks, T, X, W>(p, policy, first + k, values, chunks, stats[k / kCount]);
  }
}

// Handles rows [begin, end) of [samples * rows].
template <class T, class X, class W>
[[gnu::noinline]] void forward_on_thread(const ForwardParams& p, const ForwardPolicy& policy, const Chunks& chunks,
                                         int64_t begin, int64_t end) {
  for_each_sample(p.rows, begin, end, [&](const Rows& rows) {
    int64_t done = 0;
    // Handles batches, `together` rows of them at a time, until fewer rows are left than a batch has.
    const auto handle = [&](auto batch, auto together, auto packs) {
      for (; done + batch <= rows.count; done += batch) {
        forward_rows<OneThread, batch, together, packs, T, X, W>(p, policy, rows[done], chunks);
      }
    };
    constexpr Constant<1> kOne;
    if constexpr (kHandlesRowsTogether<T, X>) {
      if (policy.batch_rows == kForwardBatchRows)
        handle(Constant<kForwardBatchRows>{}, Constant<kFourRows>{}, Constant<kNarrowPacks>{});
      if (policy.rows_together == kFourRows)
        handle(Constant<kFourRows>{}, Constant<kFourRows>{}, Constant<kNarrowPacks>{});
      if (policy.rows_together == kTwoRows) handle(Constant<kTwoRows>{}, Constant<kTwoRows>{}, Constant<kWidePacks>{});
    }
    policy.is_narrow ? handle(kOne, kOne, Constant<kNarrowPacks>{}) : handle(kOne, kOne, Constant<kWidePacks>{});
  });
}

// Computes the products of the input and the activated gate, for the plain norm of a batch of rows.
template <class T>
void gate_rows(const ForwardParams& p, const Rows& rows, const View& products, const Prefetch& prefetch) {
  using Acc = AccOf<T>;
  const Activation activation = p.activation;
  for (int64_t k = 0; k < rows.count; ++k) {
    const RowIndex row = rows[k];
    const T* const x = row_of<const T>(p.input, row);
    const T* const z = row_of<const T>(p.gate, row);
    Acc* const to = products.row<Acc>(0, k);
    const T* const next_x = x + prefetch.rows_ahead * p.input.row_stride;
    const T* const next_z = z + prefetch.rows_ahead * p.gate.row_stride;
    const T* const next_y = row_of<const T>(p.output, row + prefetch.rows_ahead);
    for_each_pack<Acc, 1>({0, p.cols}, [&](int, int64_t j, auto lanes) {
      store<T, false>(to + j, load<T>(x + j, lanes) * activate(load<T>(z + j, lanes), activation), AllLanes{});
      if (!prefetch.rows_ahead) return;
      prefetch_to_l2(next_x + j);
      prefetch_to_l2(next_z + j);
      if (prefetch.output) prefetch_to_l2(next_y + j);
    });
  }
}

// Forward of a norm whose gate is first: the plain norm of the products. A task stores the products of a batch of rows
// in its scratch rows (policy.h).
template <class T>
void gate_first_forward(const ForwardParams& p) {
  using Acc = AccOf<T>;
  const Chunks chunks(p.cols, kChunk<Acc>);
  const int64_t all_rows = p.samples * p.rows;
  const GatedPolicy policy(p, all_rows, gated_forward_batch_rows(ArraySize(p, sizeof(Acc))), /*arrays=*/1);
  ForwardParams plain = p;  // the plain norm of a batch
  plain.samples = 1;
  plain.rows = policy.batch_rows;
  plain.activation = Activation::kNone;
  ForwardPolicy plain_policy(plain, sizeof(Acc), sizeof(T));
  // The scratch rows are in the caches, but the arrays of the call may not be.
  const ForwardPolicy call_policy(p, sizeof(T), sizeof(T));
  plain_policy.streams = call_policy.streams;
  const Prefetch prefetch = {call_policy.prefetch_single.rows_ahead,
                             call_policy.prefetch_single.output && !call_policy.streams};
  Acc* const scratch = static_cast<Acc*>(p.allocator->allocate(policy.elements * static_cast<int64_t>(sizeof(Acc))));
  parallel_for(policy.tasks, 1, [&](int64_t task, int64_t end_task) {
    ForwardParams batch = plain;
    batch.input = {scratch + task * policy.task_elements, 0, policy.pitch, 1};
    const auto handle_batch = [&](const Rows& rows) {
      const RowIndex parameter = {rows.sample, 0};
      batch.rows = rows.count;
      batch.output = rows_from<T>(p.output, rows[0]);
      batch.weight = rows_from<Acc>(p.weight, parameter);
      batch.bias = rows_from<Acc>(p.bias, parameter);
      batch.mean = rows_from<Acc>(p.mean, rows[0]);
      batch.rstd = rows_from<Acc>(p.rstd, rows[0]);
      gate_rows<T>(p, rows, batch.input, prefetch);
      forward_on_thread<T, Acc, Acc>(batch, plain_policy, chunks, 0, batch.rows);
    };
    const int64_t begin = task * all_rows / policy.tasks, end = end_task * all_rows / policy.tasks;
    for_each_sample(p.rows, begin, end, [&](const Rows& rows) {
      for (int64_t k = 0; k < rows.count; k += policy.batch_rows) {
        handle_batch(rows.part(k, min(policy.batch_rows, rows.count - k)));
      }
    });
  });
}

}  // namespace

void forward(const ForwardParams& p) {
  if (p.channels_first) return channels_first_forward(p);
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using T = typename decltype(types)::T;
    using X = typename decltype(types)::X;
    using W = typename decltype(types)::W;
    if (p.gate_first) return gate_first_forward<T>(p);
    const Chunks chunks(p.cols, kChunk<AccOf<X>>);
    const ForwardPolicy policy(p, sizeof(X), sizeof(T));
    const int64_t rows = p.samples * p.rows;
    if (policy.shares_rows) {
      for (int64_t r = 0; r < rows; ++r) {
        forward_rows<AllThreads, 1, 1, kWidePacks, T, X, W>(p, policy, {r / p.rows, r % p.rows}, chunks);
      }
      return;
    }
    parallel_for(rows, grain(p.cols),
                 [&](int64_t begin, int64_t end) { forward_on_thread<T, X, W>(p, policy, chunks, begin, end); });
  });
}

}  // namespace layernorm::cpu::CPU_CAPABILITY
