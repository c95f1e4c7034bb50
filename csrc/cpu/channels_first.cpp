// Normalization over the channels of images x [images, channels, pixels], and its gradients. The formulas are those of
// forward.cpp and backward.cpp; a row is a pixel.
//
// A thread handles blocks of adjacent pixels (kernels.h). The lanes of a pack hold pixels, so only the weight gradients
// are summed across lanes. Forward reads a block three times (mean, variance, output) and backward twice (sums,
// gradients), a few channels at a time, each along its pixels, which is the fastest way to read the memory. The block
// stays in the second-level cache, so memory traffic is the same as for rows.
//
// Order of summation: the channels in order, in runs of kRun in Acc; the runs in double. It depends only on the number
// of channels. Weight gradients: lanes and packs of a block, blocks of a slot, then slots in order and in double.
//
// Precision is that of rows: forward corrects the mean by the average of x - mean, backward by that of xhat.
//
// Source: Ba et al. 2016, arXiv:1607.06450.
#include <cmath>

#include "../dtypes.h"
#include "row.h"

namespace layernorm::cpu::CPU_CAPABILITY {
namespace {

// Channels that are added in Acc before the sum goes to a double; see kChunk.
constexpr int64_t kRun = 16;

// One value for each pixel of a block, in the lane order of T.
template <class Number>
using PerPixel = Number[kMaxBlockPixels];

// A block of an array of images; null if the array is.
template <class T>
struct Block {
  T* data;  // [channels, pixels]
  T* next;  // the following block, or past the end
  int64_t stride, pixels;
  T* channel(int64_t c) const { return data + c * stride; }
};

template <class T>
Block<T> block_of(T* images, int64_t image_stride, int64_t stride, int64_t image_pixels, const Blocks& blocks,
                  int64_t block) {
  const auto begin = [&](int64_t b) { return b % blocks.per_image * blocks.pixels; };
  const auto data = [&](int64_t b) {
    return images ? images + b / blocks.per_image * image_stride + begin(b) : nullptr;
  };
  return {data(block), data(block + 1), stride, min(blocks.pixels, image_pixels - begin(block))};
}

// Prefetches a pack of the next block in the last loop over this one. Hardware prefetchers do not follow as many
// streams as there are channels: forward takes 0.9 of the time (32x192x28x28, Intel Xeon with AVX-512).
template <class T>
void prefetch_next(const Block<const T>& block, int64_t c, int64_t j) {
  prefetch_for_read(block.next + c * block.stride + j);
}

// Calls f(first channel, channels) for each run.
template <class F>
void for_each_run(int64_t channels, const F& f) {
  for (int64_t c = 0; c < channels; c += kRun) f(c, min(kRun, channels - c));
}

// The parameters of a run of channels, or `fallback` without parameters.
template <class T>
struct RunParameters {
  using Acc = AccOf<T>;
  template <class W>
  RunParameters(const W* parameters, int64_t c, int64_t n, Acc fallback) {
    if (!parameters) {
      for (Acc& value : values) value = fallback;
      return;
    }
    for_each_pack<Acc, 1>(0, n, [&](int, int64_t j, auto lanes) {
      store<T, false>(values + j, load<T>(parameters + c + j, lanes), AllLanes{});
    });
  }
  Acc operator[](int64_t k) const { return values[k]; }
  Acc values[kRun + kMaxPackSize];
};

// Sums over runs, in double. If Acc is double, too, compensated summation keeps the rounding errors (Knuth, The Art of
// Computer Programming, volume 2, section 4.2.2, theorem B).
template <class Acc>
struct RunSums {
  void add(int64_t j, const Pack<Acc>& pack) {
    DoublePack<Acc> sum, rounded;
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

  PerPixel<double> sums = {};
  double lost[sizeof(Acc) == 8 ? kMaxBlockPixels : 1] = {};
};

// The average over channels; see ChunkGroups::mean.
template <class Acc>
struct Average {
  explicit Average(int64_t channels) : channels(static_cast<double>(channels)), inverse(1 / this->channels) {}
  double operator()(double sum) const { return sizeof(Acc) == 4 ? sum * inverse : sum / channels; }
  double channels, inverse;
};

// Loads x and, if any pixel is scaled, multiplies it by the scales.
template <bool scaled, class T, class Lanes>
Pack<AccOf<T>> load_scaled(const T* x, const AccOf<T>* scale, Lanes lanes) {
  const auto v = load<T>(x, lanes);
  if constexpr (scaled) return v * read(scale, AllLanes{});
  return v;
}

// The number of pixels rounded up to whole packs.
template <class Acc>
int64_t padded(int64_t pixels) {
  return ceil_div(pixels, kPackSize<Acc>) * kPackSize<Acc>;
}

// ---- forward --------------------------------------------------------------------------------------------------------

template <class Acc>
struct Statistics {
  PerPixel<Acc> scale;       // 1, or kScale if a sum would overflow
  PerPixel<Acc> mean;        // times scale, rounded
  PerPixel<Acc> correction;  // mean of (x * scale - mean)
  PerPixel<Acc> rstd;        // over scale
};

// Returns whether all variances are finite, and sets the scale of the pixels.
template <bool scaled, class T>
bool find_statistics(const Block<const T>& x, int64_t channels, double eps, Statistics<AccOf<T>>& stats) {
  using Acc = AccOf<T>;
  const int64_t pixels = padded<Acc>(x.pixels);
  const Average<Acc> average(channels);
  RunSums<Acc> sums, deviations, squares;
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
      const auto mean = read(stats.mean + j, AllLanes{});
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
    // eps * kScale^2 may underflow; its root does not.
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
    const RunParameters<T> w(weight, c, n, 1), b(bias, c, n, 0);
    for_each_pack<Acc, 1>(0, x.pixels, [&](int, int64_t j, auto lanes) {
      const auto mean = read(stats.mean + j, AllLanes{}), correction = read(stats.correction + j, AllLanes{});
      const auto rstd = read(stats.rstd + j, AllLanes{});
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
        prefetch_next(x, c + k, j);
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
  Acc* const mean = in_block(static_cast<Acc*>(p.mean), p.pixels, 0).data;
  Acc* const rstd = in_block(static_cast<Acc*>(p.rstd), p.pixels, 0).data;
  const W* const weight = static_cast<const W*>(p.weight);
  const W* const bias = static_cast<const W*>(p.bias);

  Statistics<Acc> stats;
  if (find_statistics<false>(x, p.channels, p.eps, stats)) {
    normalize<false>(x, p.channels, stats, weight, bias, y);
  } else {  // a pixel's sum overflowed, or it holds NaN or infinity and will give NaN again
    find_statistics<true>(x, p.channels, p.eps, stats);
    normalize<true>(x, p.channels, stats, weight, bias, y);
  }
  for (int64_t j = 0; j < padded<Acc>(x.pixels); ++j) {
    stats.mean[j] = static_cast<Acc>((double(stats.mean[j]) + stats.correction[j]) / stats.scale[j]);
    stats.rstd[j] = stats.rstd[j] * stats.scale[j];
  }
  for_each_pack<Acc, 1>(0, x.pixels, [&](int, int64_t j, auto lanes) {
    store<T, true>(mean + j, read(stats.mean + j, AllLanes{}), lanes);
    store<T, true>(rstd + j, read(stats.rstd + j, AllLanes{}), lanes);
  });
}

// ---- backward -------------------------------------------------------------------------------------------------------

// The coefficients of each pixel for the second loop; see Coefficients in backward.cpp.
template <class Acc>
struct Coefficients {
  PerPixel<Acc> scale, mean, rstd_scaled, minus_shift, minus_c1, c2, rstd;
};

template <bool scaled, bool with_g, class T, class W>
void first_loop(const Block<const T>& dy, const Block<const T>& x, int64_t channels, const W* weight,
                Coefficients<AccOf<T>>& coef) {
  using Acc = AccOf<T>;
  const Average<Acc> average(channels);
  RunSums<Acc> xhat_sums, g_sums, g_xhat_sums;
  for_each_run(channels, [&](int64_t c, int64_t n) {
    const RunParameters<T> w(with_g ? weight : nullptr, c, n, 1);
    for_each_pack<Acc, 1>(0, x.pixels, [&](int, int64_t j, auto lanes) {
      const auto mean = read(coef.mean + j, AllLanes{}), rstd_scaled = read(coef.rstd_scaled + j, AllLanes{});
      Pack<Acc> xhat_sum = {}, g_sum = {}, g_xhat_sum = {};
      for (int64_t k = 0; k < n; ++k) {
        const auto d = load_scaled<scaled>(x.channel(c + k) + j, coef.scale + j, lanes) - mean;
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
    coef.minus_shift[j] = static_cast<Acc>(-shift);
    coef.minus_c1[j] = static_cast<Acc>(-(average(g_xhat_sums[j]) - shift * mean_g));
    coef.c2[j] = static_cast<Acc>(mean_g);
  }
}

// The second loop. `first` says that the block is the first of its slot.
template <bool scaled, bool with_dx, bool with_dweight, bool with_dbias, class T, class W>
void second_loop(const Block<const T>& dy, const Block<const T>& x, int64_t channels, const W* weight,
                 const Coefficients<AccOf<T>>& coef, bool first, const Block<T>& dx, AccOf<T>* dweight,
                 AccOf<T>* dbias) {
  using Acc = AccOf<T>;
  for_each_run(channels, [&](int64_t c, int64_t n) {
    const RunParameters<T> w(weight, c, n, 1);
    for (int64_t k = 0; k < n; ++k) {
      Pack<Acc> dw = {}, db = {};
      for_each_pack<Acc, 1>(0, x.pixels, [&](int, int64_t j, auto lanes) {
        const auto v = load<T>(dy.channel(c + k) + j, lanes);
        prefetch_next(dy, c + k, j);
        if constexpr (with_dbias) db = db + v;
        if constexpr (with_dx || with_dweight) {
          const auto d =
              load_scaled<scaled>(x.channel(c + k) + j, coef.scale + j, lanes) - read(coef.mean + j, AllLanes{});
          prefetch_next(x, c + k, j);
          const auto xhat = fma(d, read(coef.rstd_scaled + j, AllLanes{}), read(coef.minus_shift + j, AllLanes{}));
          if constexpr (with_dweight) dw = fma(v, xhat, dw);
          if constexpr (with_dx) {
            const auto g = v * w[k] - read(coef.c2 + j, AllLanes{});
            const auto result = fma(xhat, read(coef.minus_c1 + j, AllLanes{}), g) * read(coef.rstd + j, AllLanes{});
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
  const Acc* const mean = in_block(static_cast<const Acc*>(p.mean), p.pixels, 0).data;
  const Acc* const rstd = in_block(static_cast<const Acc*>(p.rstd), p.pixels, 0).data;
  const W* const weight = static_cast<const W*>(p.weight);

  Coefficients<Acc> coef;
  bool any_scaled = false;
  if (p.grad_input || p.grad_weight) {  // dbias needs nothing but dy
    for_each_pack<Acc, 1>(0, x.pixels, [&](int, int64_t j, auto lanes) {
      write(coef.mean + j, load<T>(mean + j, lanes), AllLanes{});
      write(coef.rstd + j, load<T>(rstd + j, lanes), AllLanes{});
    });
    for (int64_t j = 0; j < padded<Acc>(x.pixels); ++j) {
      // No difference overflows in a pixel whose standard deviation is below 2^60. Pixels outside the block have an
      // rstd of 0.
      const bool is_huge = coef.rstd[j] < Acc(0x1p-60) && coef.rstd[j] != 0;
      any_scaled |= is_huge;
      coef.scale[j] = is_huge ? kScale<Acc> : Acc(1);
      coef.mean[j] *= coef.scale[j];
      coef.rstd_scaled[j] = coef.rstd[j] / coef.scale[j];
    }
  }
  dispatch_flags(
      [&](auto scaled, auto with_dx, auto with_dweight, auto with_dbias) {
        if (with_dx || with_dweight) first_loop<scaled, with_dx>(dy, x, p.channels, weight, coef);
        second_loop<scaled, with_dx, with_dweight, with_dbias>(
            dy, x, p.channels, weight, coef, block == slot * b.blocks.per_slot, dx, b.dweight(slot), b.dbias(slot));
      },
      any_scaled, p.grad_input != nullptr, p.grad_weight != nullptr, p.grad_bias != nullptr);
}

// Adds the slots' partial sums of channels [begin, end).
template <class T, class W>
void reduce_slots(const Backward<T, W>& b, const AccOf<T>* partials, int64_t begin, int64_t end, W* gradient) {
  using Acc = AccOf<T>;
  for_each_pack<Acc, 1>(begin, end - begin, [&](int, int64_t c, auto lanes) {
    DoublePack<Acc> total = {};
    for (int64_t slot = 0; slot < b.blocks.slots; ++slot) {
      add(total, read(partials + 2 * slot * b.padded_channels + c, AllLanes{}));
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
                 if (p.grad_weight) reduce_slots(b, b.dweight(0), begin, end, static_cast<W*>(p.grad_weight));
                 if (p.grad_bias) reduce_slots(b, b.dbias(0), begin, end, static_cast<W*>(p.grad_bias));
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
