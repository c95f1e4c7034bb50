// Normalization over the channels of images x [images, channels, pixels], and its gradients. The formulas are those of
// forward.cpp and backward.cpp; a row is a pixel.
//
// A thread takes blocks of neighbouring pixels (kernels.h), whose numbers stand in the lanes of a pack: no sum goes
// across lanes but those of the weight's gradients. Forward sweeps a block three times (mean; variance; output),
// backward twice (sums; gradients), a few channels at a time, each along its pixels, which is how memory is read
// fastest; the block then stays in the second-level cache. As of rows, 2 * images * channels * pixels * sizeof(T) bytes
// are moved in forward, and 3 times as many as one in backward.
//
// Order of summation: over the channels in order, kRun at a time in Acc and the runs in double; so it depends on
// nothing but the number of channels. Gradients of the weight: lanes and packs of a block; blocks of a slot; slots in
// order, in double.
//
// Exactness is that of the rows: the mean is corrected in forward by the average of x - mean, in backward by that of
// xhat.
//
// Source: Ba et al. 2016, arXiv:1607.06450.
#include <cmath>

#include "../dtypes.h"
#include "row.h"

namespace layernorm::cpu::CPU_CAPABILITY {
namespace {

// Of one outlier and thousands of equal numbers, four times as many in Acc put the output off by more than is promised.
constexpr int64_t kRun = 16;

// A number for each pixel of a block, packs in the order of T.
template <class Number>
using OfPixels = Number[kMaxBlockPixels];

// One block, of an array of images; at null, if there is no such array.
template <class T>
struct Block {
  T* at;    // [channels, pixels]
  T* next;  // the block that comes after it, if it is not the last
  int64_t stride, pixels;
  T* channel(int64_t c) const { return at + c * stride; }
};

template <class T>
Block<T> block_of(T* images, int64_t image_stride, int64_t stride, int64_t image_pixels, const Blocks& blocks,
                  int64_t block) {
  const auto begin = [&](int64_t b) { return b % blocks.per_image * blocks.pixels; };
  const auto at = [&](int64_t b) { return images ? images + b / blocks.per_image * image_stride + begin(b) : nullptr; };
  return {at(block), at(block + 1), stride, min(blocks.pixels, image_pixels - begin(block))};
}

// Asks for a pack of the next block while this one is swept for the last time: no prefetcher of the processor's follows
// as many lines as there are channels. Forward takes 0.9 of the time with it (32x192x28x28, Intel Xeon with AVX-512).
template <class T>
void fetch_next(const Block<const T>& block, int64_t c, int64_t j) {
  fetch_to_read(block.next + c * block.stride + j);
}

// Calls f(first channel, channels) for the runs.
template <class F>
void for_each_run(int64_t channels, const F& f) {
  for (int64_t c = 0; c < channels; c += kRun) f(c, min(kRun, channels - c));
}

// Parameters of a run of channels; `otherwise` where there are none.
template <class T>
struct OfRun {
  using Acc = AccOf<T>;
  template <class W>
  OfRun(const W* parameters, int64_t c, int64_t n, Acc otherwise) {
    if (!parameters) {
      for (Acc& number : of) number = otherwise;
      return;
    }
    for_each_pack<Acc, 1>(
        0, n, [&](int, int64_t j, auto lanes) { store<T, false>(of + j, load<T>(parameters + c + j, lanes), All{}); });
  }
  Acc operator[](int64_t k) const { return of[k]; }
  Acc of[kRun + kMaxPackSize];
};

// Sums of runs. If Acc is double itself, the sums lose as much as it does, and what they lose is kept beside them
// (Knuth, The Art of Computer Programming, volume 2, section 4.2.2, theorem B).
template <class Acc>
struct SumOfRuns {
  void add(int64_t j, const Pack<Acc>& pack) {
    Doubles<Acc> sum, rounded;
    std::memcpy(&sum, sums + j, sizeof(sum));
    rounded = sum;
    cpu::add(rounded, pack);
    std::memcpy(sums + j, &rounded, sizeof(sum));
    if constexpr (sizeof(Acc) == 8) {
      const auto keep = [](auto sum, auto x, auto rounded, auto* lost) {
        const auto added = rounded - sum;
        const auto error = (sum - (rounded - added)) + (x - added);
        for (size_t i = 0; i < sizeof(error) / sizeof(double); ++i) lost[i] += error[i];
      };
      keep(sum.a, pack.a, rounded.a, lost + j);
      keep(sum.b, pack.b, rounded.b, lost + j + kPackSize<Acc> / 2);
    }
  }
  double operator[](int64_t j) const { return sizeof(Acc) == 8 ? sums[j] + lost[j] : sums[j]; }

  OfPixels<double> sums = {};
  double lost[sizeof(Acc) == 8 ? kMaxBlockPixels : 1] = {};
};

// As Groups::mean, which says why.
template <class Acc>
struct Average {
  explicit Average(int64_t channels) : channels(static_cast<double>(channels)), inverse(1 / this->channels) {}
  double operator()(double sum) const { return sizeof(Acc) == 4 ? sum * inverse : sum / channels; }
  double channels, inverse;
};

// x, times the scales of the pixels where some have one.
template <bool scaled, class T, class Lanes>
Pack<AccOf<T>> load_scaled(const T* x, const AccOf<T>* scale, Lanes lanes) {
  const auto v = load<T>(x, lanes);
  if constexpr (scaled) return v * read(scale, All{});
  return v;
}

// Pixels of a block, with those of the last pack that do not exist.
template <class Acc>
int64_t padded(int64_t pixels) {
  return ceil_div(pixels, kPackSize<Acc>) * kPackSize<Acc>;
}

// ---- forward --------------------------------------------------------------------------------------------------------

template <class Acc>
struct Statistics {
  OfPixels<Acc> scale;       // 1, or kScale where a sum would overflow
  OfPixels<Acc> mean;        // times scale, rounded
  OfPixels<Acc> correction;  // mean of (x * scale - mean)
  OfPixels<Acc> rstd;        // over scale
};

// Returns whether all are finite; where they are not, sets the scale.
template <bool scaled, class T>
bool find_statistics(const Block<const T>& x, int64_t channels, double eps, Statistics<AccOf<T>>& stats) {
  using Acc = AccOf<T>;
  const int64_t pixels = padded<Acc>(x.pixels);
  const Average<Acc> average(channels);
  SumOfRuns<Acc> sums, deviations, squares;
  for_each_run(channels, [&](int64_t c, int64_t n) {
    for_each_pack<Acc, 1>(0, x.pixels, [&](int, int64_t j, auto lanes) {
      Pack<Acc> sum = {};
      for (int64_t k = 0; k < n; ++k) sum = sum + load_scaled<scaled>(x.channel(c + k) + j, stats.scale + j, lanes);
      sums.add(j, sum);
    });
  });
  for (int64_t j = 0; j < pixels; ++j) stats.mean[j] = static_cast<Acc>(average(sums[j]));
  for_each_run(channels, [&](int64_t c, int64_t n) {
    for_each_pack<Acc, 1>(0, x.pixels, [&](int, int64_t j, auto lanes) {
      const auto mean = read(stats.mean + j, All{});
      Pack<Acc> deviation = {}, square = {};
      for (int64_t k = 0; k < n; ++k) {
        const auto d = load_scaled<scaled>(x.channel(c + k) + j, stats.scale + j, lanes) - mean;
        deviation = deviation + d;
        square = fma(d, d, square);
      }
      deviations.add(j, deviation);
      squares.add(j, square);
    });
  });
  bool finite = true;
  for (int64_t j = 0; j < pixels; ++j) {
    const double correction = average(deviations[j]);
    double variance = average(squares[j]) - correction * correction;
    variance = variance < 0 ? 0 : variance;  // written so that NaN stays NaN
    double deviation = std::sqrt(variance + eps);
    // Scaled, eps itself may be too small a number for a double; its root is not.
    if (scaled && stats.scale[j] != 1) deviation = ::hypot(std::sqrt(variance), std::sqrt(eps) * kScale<Acc>);
    stats.correction[j] = static_cast<Acc>(correction);
    stats.rstd[j] = static_cast<Acc>(1 / deviation);
    if (!scaled) stats.scale[j] = std::isfinite(variance) ? Acc(1) : kScale<Acc>;
    finite &= std::isfinite(variance);
  }
  return finite;
}

template <bool scaled, class T, class W>
void normalize(const Block<const T>& x, int64_t channels, const Statistics<AccOf<T>>& stats, const W* weight,
               const W* bias, const Block<T>& y) {
  using Acc = AccOf<T>;
  for_each_run(channels, [&](int64_t c, int64_t n) {
    const OfRun<T> w(weight, c, n, 1), b(bias, c, n, 0);
    for_each_pack<Acc, 1>(0, x.pixels, [&](int, int64_t j, auto lanes) {
      const auto mean = read(stats.mean + j, All{}), correction = read(stats.correction + j, All{});
      const auto rstd = read(stats.rstd + j, All{});
      for (int64_t k = 0; k < n; ++k) {
        const auto d = load_scaled<scaled>(x.channel(c + k) + j, stats.scale + j, lanes) - mean - correction;
        auto v = d * rstd;  // xhat
        if (weight && bias) {
          v = fma(v, w[k], b[k]);
        } else if (weight) {
          v = v * w[k];
        } else if (bias) {
          v = v + b[k];
        }
        store<T, !std::is_same_v<T, W>>(y.channel(c + k) + j, v, lanes);
        fetch_next(x, c + k, j);
      }
    });
  });
}

template <class T, class W>
void forward_block(const ChannelsFirstForwardParams& p, const Blocks& blocks, int64_t block) {
  using Acc = AccOf<T>;
  const auto in_block = [&](auto* images, int64_t image_stride, int64_t stride) {
    return block_of(images, image_stride, stride, p.pixels, blocks, block);
  };
  const auto x = in_block(static_cast<const T*>(p.input), p.input_image_stride, p.input_channel_stride);
  const auto y = in_block(static_cast<T*>(p.output), p.channels * p.pixels, p.pixels);
  Acc* const mean = in_block(static_cast<Acc*>(p.mean), p.pixels, 0).at;
  Acc* const rstd = in_block(static_cast<Acc*>(p.rstd), p.pixels, 0).at;
  const W* const weight = static_cast<const W*>(p.weight);
  const W* const bias = static_cast<const W*>(p.bias);

  Statistics<Acc> stats;
  if (find_statistics<false>(x, p.channels, p.eps, stats)) {
    normalize<false>(x, p.channels, stats, weight, bias, y);
  } else {  // of a pixel, a sum has overflowed, or it holds NaN or infinity and gives NaN again
    find_statistics<true>(x, p.channels, p.eps, stats);
    normalize<true>(x, p.channels, stats, weight, bias, y);
  }
  for (int64_t j = 0; j < padded<Acc>(x.pixels); ++j) {
    stats.mean[j] = static_cast<Acc>((double(stats.mean[j]) + stats.correction[j]) / stats.scale[j]);
    stats.rstd[j] = stats.rstd[j] * stats.scale[j];
  }
  for_each_pack<Acc, 1>(0, x.pixels, [&](int, int64_t j, auto lanes) {
    store<T, true>(mean + j, read(stats.mean + j, All{}), lanes);
    store<T, true>(rstd + j, read(stats.rstd + j, All{}), lanes);
  });
}

// ---- backward -------------------------------------------------------------------------------------------------------

// What the second sweep needs to know of the pixels: as Coefficients of backward.cpp.
template <class Acc>
struct Coefficients {
  OfPixels<Acc> scale, mean, rstd_scaled, minus_shift, minus_c1, c2, rstd;
};

template <bool scaled, bool with_g, class T, class W>
void find_coefficients(const Block<const T>& dy, const Block<const T>& x, int64_t channels, const W* weight,
                       Coefficients<AccOf<T>>& of) {
  using Acc = AccOf<T>;
  const Average<Acc> average(channels);
  SumOfRuns<Acc> xhat_sums, g_sums, g_xhat_sums;
  for_each_run(channels, [&](int64_t c, int64_t n) {
    const OfRun<T> w(with_g ? weight : nullptr, c, n, 1);
    for_each_pack<Acc, 1>(0, x.pixels, [&](int, int64_t j, auto lanes) {
      const auto mean = read(of.mean + j, All{}), rstd_scaled = read(of.rstd_scaled + j, All{});
      Pack<Acc> xhat_sum = {}, g_sum = {}, g_xhat_sum = {};
      for (int64_t k = 0; k < n; ++k) {
        const auto d = load_scaled<scaled>(x.channel(c + k) + j, of.scale + j, lanes) - mean;
        const auto xhat = d * rstd_scaled;
        xhat_sum = xhat_sum + xhat;
        if constexpr (with_g) {
          const auto g = load<T>(dy.channel(c + k) + j, lanes) * w[k];
          g_sum = g_sum + g;
          g_xhat_sum = fma(g, xhat, g_xhat_sum);
        }
      }
      xhat_sums.add(j, xhat_sum);
      if constexpr (with_g) g_sums.add(j, g_sum), g_xhat_sums.add(j, g_xhat_sum);
    });
  });
  for (int64_t j = 0; j < padded<Acc>(x.pixels); ++j) {
    const double shift = average(xhat_sums[j]), mean_g = average(g_sums[j]);
    of.minus_shift[j] = static_cast<Acc>(-shift);
    of.minus_c1[j] = static_cast<Acc>(-(average(g_xhat_sums[j]) - shift * mean_g));
    of.c2[j] = static_cast<Acc>(mean_g);
  }
}

// `first`, if the block is that of its slot. The flags: as in backward.cpp.
template <bool scaled, bool with_dx, bool with_dweight, bool with_dbias, class T, class W>
void sweep_block(const Block<const T>& dy, const Block<const T>& x, int64_t channels, const W* weight,
                 const Coefficients<AccOf<T>>& of, bool first, const Block<T>& dx, AccOf<T>* dweight, AccOf<T>* dbias) {
  using Acc = AccOf<T>;
  for_each_run(channels, [&](int64_t c, int64_t n) {
    const OfRun<T> w(weight, c, n, 1);
    for (int64_t k = 0; k < n; ++k) {
      Pack<Acc> dw = {}, db = {};
      for_each_pack<Acc, 1>(0, x.pixels, [&](int, int64_t j, auto lanes) {
        const auto v = load<T>(dy.channel(c + k) + j, lanes);
        fetch_next(dy, c + k, j);
        if constexpr (with_dbias) db = db + v;
        if constexpr (with_dx || with_dweight) {
          const auto d = load_scaled<scaled>(x.channel(c + k) + j, of.scale + j, lanes) - read(of.mean + j, All{});
          fetch_next(x, c + k, j);
          const auto xhat = fma(d, read(of.rstd_scaled + j, All{}), read(of.minus_shift + j, All{}));
          if constexpr (with_dweight) dw = fma(v, xhat, dw);
          if constexpr (with_dx) {
            const auto g = v * w[k] - read(of.c2 + j, All{});
            const auto result = fma(xhat, read(of.minus_c1 + j, All{}), g) * read(of.rstd + j, All{});
            store<T, !std::is_same_v<T, W>>(dx.channel(c + k) + j, result, lanes);
          }
        }
      });
      if constexpr (with_dweight) dweight[c + k] = sum_pack(dw) + (first ? 0 : dweight[c + k]);
      if constexpr (with_dbias) dbias[c + k] = sum_pack(db) + (first ? 0 : dbias[c + k]);
    }
  });
}

template <class T, class W>
struct Backward {
  using Acc = AccOf<T>;

  explicit Backward(const ChannelsFirstBackwardParams& p)
      : p(p),
        blocks(p.images, p.channels, p.pixels, sizeof(T)),
        padded_channels(kMaxPackSize * ceil_div(p.channels, kMaxPackSize)),
        partials(static_cast<Acc*>(p.workspace)) {}

  Acc* dweight(int64_t slot) const { return p.grad_weight ? partials + 2 * slot * padded_channels : nullptr; }
  Acc* dbias(int64_t slot) const { return p.grad_bias ? partials + (2 * slot + 1) * padded_channels : nullptr; }

  const ChannelsFirstBackwardParams& p;
  const Blocks blocks;
  const int64_t padded_channels;
  Acc* const partials;  // [slots, 2, padded_channels]
};

template <class T, class W>
void backward_block(const Backward<T, W>& b, int64_t slot, int64_t block) {
  using Acc = AccOf<T>;
  const auto& p = b.p;
  const auto in_block = [&](auto* images, int64_t image_stride, int64_t stride) {
    return block_of(images, image_stride, stride, p.pixels, b.blocks, block);
  };
  const auto dy =
      in_block(static_cast<const T*>(p.grad_output), p.grad_output_image_stride, p.grad_output_channel_stride);
  const auto x = in_block(static_cast<const T*>(p.input), p.input_image_stride, p.input_channel_stride);
  const auto dx = in_block(static_cast<T*>(p.grad_input), p.channels * p.pixels, p.pixels);
  const Acc* const mean = in_block(static_cast<const Acc*>(p.mean), p.pixels, 0).at;
  const Acc* const rstd = in_block(static_cast<const Acc*>(p.rstd), p.pixels, 0).at;
  const W* const weight = static_cast<const W*>(p.weight);

  Coefficients<Acc> of;
  bool any_scaled = false;
  if (p.grad_input || p.grad_weight) {  // dbias needs nothing but dy
    for_each_pack<Acc, 1>(0, x.pixels, [&](int, int64_t j, auto lanes) {
      write(of.mean + j, load<T>(mean + j, lanes), All{});
      write(of.rstd + j, load<T>(rstd + j, lanes), All{});
    });
    for (int64_t j = 0; j < padded<Acc>(x.pixels); ++j) {
      // A pixel whose standard deviation is below 2^60 holds no difference that overflows, however many its channels.
      // Pixels that do not exist have an rstd of 0.
      const bool is_huge = of.rstd[j] < Acc(0x1p-60) && of.rstd[j] != 0;
      any_scaled |= is_huge;
      of.scale[j] = is_huge ? kScale<Acc> : Acc(1);
      of.mean[j] *= of.scale[j];
      of.rstd_scaled[j] = of.rstd[j] / of.scale[j];
    }
  }
  with_constants(
      [&](auto scaled, auto with_dx, auto with_dweight, auto with_dbias) {
        if (with_dx || with_dweight) find_coefficients<scaled, with_dx>(dy, x, p.channels, weight, of);
        sweep_block<scaled, with_dx, with_dweight, with_dbias>(
            dy, x, p.channels, weight, of, block == slot * b.blocks.per_slot, dx, b.dweight(slot), b.dbias(slot));
      },
      any_scaled, p.grad_input != nullptr, p.grad_weight != nullptr, p.grad_bias != nullptr);
}

// Adds the slots' partial sums of channels [begin, end), the first of them at `partials`.
template <class T, class W>
void add_slots(const Backward<T, W>& b, const AccOf<T>* partials, int64_t begin, int64_t end, W* gradient) {
  using Acc = AccOf<T>;
  for_each_pack<Acc, 1>(begin, end - begin, [&](int, int64_t c, auto lanes) {
    Doubles<Acc> total = {};
    for (int64_t slot = 0; slot < b.blocks.slots; ++slot) {
      add(total, read(partials + 2 * slot * b.padded_channels + c, All{}));
    }
    auto sum = rounded<Acc>(total);
    if constexpr (kEvenOdd<T>) sum = to_even_odd(sum);
    store<T, true>(gradient + c, sum, lanes);
  });
}

template <class T, class W>
void backward(const Backward<T, W>& b) {
  const auto& p = b.p;
  const int64_t slot_elements = b.blocks.per_slot * min(b.blocks.pixels, p.pixels) * p.channels;
  parallel_for(b.blocks.slots, ceil_div(kGrain, slot_elements), [&](int64_t slot, int64_t end) {
    for (; slot < end; ++slot) {
      const int64_t first = slot * b.blocks.per_slot;
      for (int64_t block = first; block < min(b.blocks.count, first + b.blocks.per_slot); ++block) {
        backward_block(b, slot, block);
      }
    }
  });
  if (!p.grad_weight && !p.grad_bias) return;
  parallel_for(ceil_div(p.channels, kMaxPackSize), ceil_div(kGrain, b.blocks.slots * kMaxPackSize),
               [&](int64_t begin, int64_t end) {
                 begin *= kMaxPackSize;
                 end = min(p.channels, end * kMaxPackSize);
                 if (p.grad_weight) add_slots(b, b.dweight(0), begin, end, static_cast<W*>(p.grad_weight));
                 if (p.grad_bias) add_slots(b, b.dbias(0), begin, end, static_cast<W*>(p.grad_bias));
               });
}

}  // namespace

void channels_first_forward(const ChannelsFirstForwardParams& p) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    const Blocks blocks(p.images, p.channels, p.pixels, sizeof(T));
    const int64_t block_elements = min(blocks.pixels, p.pixels) * p.channels;
    parallel_for(blocks.count, ceil_div(kGrain, block_elements), [&](int64_t block, int64_t end) {
      for (; block < end; ++block) forward_block<T, W>(p, blocks, block);
    });
  });
}

void channels_first_backward(const ChannelsFirstBackwardParams& p) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    backward(Backward<typename decltype(pair)::T, typename decltype(pair)::W>(p));
  });
}

}  // namespace layernorm::cpu::CPU_CAPABILITY
