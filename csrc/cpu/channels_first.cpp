// Normalization over the channels of images x [images, channels, pixels], and its gradients. The formulas are those of
// forward.cpp and backward.cpp; a row is a pixel.
//
// A thread handles blocks of adjacent pixels (PixelBlocks). The lanes of a pack hold pixels, so only the weight
// gradients are summed across lanes. Forward reads a block twice (statistics, output), and so does backward (sums,
// gradients), a few channels at a time, each along its pixels, which is the fastest way to read the memory. The block
// stays in the second-level cache, so memory traffic is the same as for rows.
//
// Order of summation over channels: the channels of a chunk in order, in Acc, then the chunks in order, in double. It
// depends only on the number of channels. Order of summation of weight gradients: the packs of a block, then their
// lanes, the blocks of a segment, and the segments in order and in double.
//
// Precision is that of rows. In forward the average of the first chunk of channels estimates a pixel's mean; a block
// with a pixel whose estimate is too far off is read again. Backward corrects xhat by its average.
//
// Source: Ba et al. 2016, arXiv:1607.06450.
#include <cmath>

#include "../dtypes.h"
#include "row.h"

namespace layernorm::cpu::CPU_CAPABILITY {
namespace {

// One value for each pixel of a block, in the lane order of T.
template <class Number>
using PerPixel = Number[kMaxBlockPixels];

// A block of an array of images; the pointers are null for an absent array.
template <class T>
struct Block {
  T* data;         // [channels, pixels]
  T* next;         // the following block, or past the end
  int64_t stride;  // from channel to channel
  T* channel(int64_t c) const { return data + c * stride; }
};

// The position of a block among the images, and of the block that follows.
struct BlockPosition {
  BlockPosition(const Params& p, const PixelBlocks& blocks, int64_t block)
      : image(block / blocks.per_image),
        begin(block % blocks.per_image * blocks.pixels),
        next_image((block + 1) / blocks.per_image),
        next_begin((block + 1) % blocks.per_image * blocks.pixels),
        pixels(min(blocks.pixels, p.rows - begin)) {}

  template <class T>
  Block<T> block(const View& images) const {
    return {images.row<T>(image, begin), images.row<T>(next_image, next_begin), images.col_stride};
  }

  int64_t image, begin, next_image, next_begin, pixels;
};

// Prefetches a pack of the next block in the last loop over this one. Hardware prefetchers do not follow as many
// streams as there are channels.
template <class T>
void prefetch_next(const Block<const T>& block, int64_t c, int64_t j) {
  prefetch_to_l2(block.next + c * block.stride + j);
}

// Calls f(first channel, channels) for each chunk.
template <class F>
void for_each_chunk(int64_t channels, const F& f) {
  for (int64_t c = 0; c < channels; c += kChannelChunk) f(c, min(kChannelChunk, channels - c));
}

// The parameters of a chunk of channels, plus `offset`, or `fallback` without parameters.
template <class T>
struct ChunkParameters {
  using Acc = AccOf<T>;
  template <class W>
  ChunkParameters(const W* parameters, int64_t c, int64_t n, Acc fallback, Acc offset = 0) {
    if (!parameters) {
      for (Acc& value : values) value = fallback;
      return;
    }
    for_each_pack<Acc, 1>(0, n, [&](int, int64_t j, auto lanes) {
      const auto v = load<T>(parameters + c + j, lanes);
      store<T, false>(values + j, offset == 0 ? v : v + offset, AllLanes{});
    });
  }
  Acc operator[](int64_t k) const { return values[k]; }
  Acc values[kChannelChunk + kMaxPackSize];
};

// Sums over chunks, in double. If Acc is double, too, compensated summation keeps the rounding errors (Knuth, The Art
// of Computer Programming, volume 2, section 4.2.2, theorem B).
template <class Acc>
struct ChunkSums {
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

// The mean is (center + correction) / scale.
template <class Acc>
struct PixelStatistics {
  PerPixel<Acc> scale;       // 1, kShrink if a sum would overflow, or kEnlarge if squares would underflow
  PerPixel<Acc> center;      // an estimate of the mean, times scale
  PerPixel<Acc> correction;  // mean of (x * scale - center)
  PerPixel<Acc> rstd;        // over scale
};

// Sets all statistics but, if `scaled`, the scale. The average of the first chunk of channels estimates the mean; if it
// is too far off in a pixel, the block is read again. Returns whether no pixel needs a scale.
template <bool scaled, class T>
bool compute_statistics(const ForwardParams& p, const Block<const T> x, const int64_t block_pixels,
                        PixelStatistics<AccOf<T>>& stats) {
  using Acc = AccOf<T>;
  const Chunks chunks(p.cols, kChannelChunk);
  const int64_t first_chunk = min(p.cols, kChannelChunk);
  for_each_pack<Acc, 1>(0, block_pixels, [&](int, int64_t j, auto lanes) {
    Pack<Acc> sum = {};
    for (int64_t k = 0; k < first_chunk && !p.rms; ++k) {
      sum = sum + load_scaled<scaled>(x.channel(k) + j, stats.scale + j, lanes);
    }
    write(stats.center + j, sum * (Acc(1) / static_cast<Acc>(first_chunk)), AllLanes{});
  });
  for (bool is_estimate = !p.rms;; is_estimate = false) {
    ChunkSums<Acc> deviations, squares;
    for_each_chunk(p.cols, [&](int64_t c, int64_t n) {
      for_each_pack<Acc, 1>(0, block_pixels, [&](int, int64_t j, auto lanes) {
        const auto center = read(stats.center + j, AllLanes{});
        Pack<Acc> deviation = {}, square = {};
        for (int64_t k = 0; k < n; ++k) {
          const auto d = load_scaled<scaled>(x.channel(c + k) + j, stats.scale + j, lanes) - center;
          deviation = deviation + d;
          square = fma(d, d, square);
        }
        deviations.add(j, deviation);
        squares.add(j, square);
      });
    });
    bool in_range = true, is_far = false;
    for (int64_t j = 0; j < padded<Acc>(block_pixels); ++j) {
      const double correction = p.rms ? 0 : chunks.mean<Acc>(deviations[j]);
      double variance = chunks.mean<Acc>(squares[j]) - correction * correction;
      variance = variance < 0 ? 0 : variance;  // written so that NaN stays NaN
      double rstd = 1 / std::sqrt(variance + p.eps);
      if (scaled && stats.scale[j] != 1) rstd = scaled_rstd(variance, p.eps, stats.scale[j]);
      stats.correction[j] = static_cast<Acc>(correction);
      stats.rstd[j] = static_cast<Acc>(rstd);
      const bool is_small = p.eps < kSmallestVariance<Acc> && !(variance > kSmallestVariance<Acc>);
      const bool needs_scale = !std::isfinite(variance) || is_small;
      if (!scaled) stats.scale[j] = needs_scale ? scale_for(stats.rstd[j], stats.center[j]) : Acc(1);
      in_range &= !needs_scale;
      if (!is_estimate) continue;
      const double square = correction * correction;
      const bool is_scaled = scaled && stats.scale[j] != 1;  // its squares may overflow or underflow, as in forward.cpp
      if (is_scaled ? square < variance && std::isfinite(variance) : !(square > variance)) continue;
      stats.center[j] = static_cast<Acc>(stats.center[j] + correction);
      is_far = true;
    }
    if (!is_far) return in_range;
  }
}

template <bool scaled, class W, class T>
void normalize(const ForwardParams& p, const BlockPosition& position, const Block<const T> x,
               const PixelStatistics<AccOf<T>>& stats, const Block<T> y) {
  using Acc = AccOf<T>;
  const W* const weight = p.weight.row<const W>(position.image, 0);
  const W* const bias = p.bias.row<const W>(position.image, 0);
  const Acc weight_offset = p.zero_centered_weight;
  const int64_t pixels = position.pixels;
  for_each_chunk(p.cols, [&](int64_t c, int64_t n) {
    const ChunkParameters<T> w(weight, c, n, 1, weight_offset), b(bias, c, n, 0);
    for_each_pack<Acc, 1>(0, pixels, [&](int, int64_t j, auto lanes) {
      const auto center = read(stats.center + j, AllLanes{}), rstd = read(stats.rstd + j, AllLanes{});
      const auto minus_correction = read(stats.correction + j, AllLanes{}) * rstd * Acc(-1);
      for (int64_t k = 0; k < n; ++k) {
        const auto d = load_scaled<scaled>(x.channel(c + k) + j, stats.scale + j, lanes) - center;
        auto v = fma(d, rstd, minus_correction);  // xhat
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
void forward_block(const ForwardParams& p, const BlockPosition& position) {
  using Acc = AccOf<T>;
  const auto x = position.block<const T>(p.input);
  const auto y = position.block<T>(p.output);
  PixelStatistics<Acc> stats;
  if (compute_statistics<false>(p, x, position.pixels, stats)) {
    normalize<false, W>(p, position, x, stats, y);
  } else {  // a pixel's sums overflowed or its squares underflowed, or it holds NaN or infinity
    compute_statistics<true>(p, x, position.pixels, stats);
    normalize<true, W>(p, position, x, stats, y);
  }
  for (int64_t j = 0; j < padded<Acc>(position.pixels); ++j) {
    stats.center[j] = static_cast<Acc>((double(stats.center[j]) + stats.correction[j]) / stats.scale[j]);
    if (stats.scale[j] != 1) store_rstd(stats.rstd + j, stats.rstd[j], stats.scale[j], p.eps);
  }
  const auto mean = position.block<Acc>(p.mean), rstd = position.block<Acc>(p.rstd);
  for_each_pack<Acc, 1>(0, position.pixels, [&](int, int64_t j, auto lanes) {
    if (mean.data) store<T, true>(mean.data + j, read(stats.center + j, AllLanes{}), lanes);
    store<T, true>(rstd.data + j, read(stats.rstd + j, AllLanes{}), lanes);
  });
}

// ---- backward -------------------------------------------------------------------------------------------------------

// The coefficients of each pixel for the gradients loop; see Coefficients in backward_loops.h.
template <class Acc>
struct PixelCoefficients {
  PerPixel<Acc> scale, mean, rstd_scaled, minus_mean_xhat, minus_mean_g_xhat, mean_g;
};

// The arrays of one block, with the parameters of its image.
template <class T_, class W_>
struct BackwardBlock {
  using T = T_;
  using W = W_;
  using Acc = AccOf<T>;
  static constexpr bool kMayHaveNan = !std::is_same_v<T, W>;

  const BackwardParams& p;
  const BlockPosition position;
  const Block<const T> dy = position.block<const T>(p.grad_output);
  const Block<const T> x = position.block<const T>(p.input);
  const Block<T> dx = position.block<T>(p.grad_input);
  const Acc* const mean = position.block<const Acc>(p.mean).data;
  const Acc* const rstd = position.block<const Acc>(p.rstd).data;
  const W* const weight = p.weight.row<const W>(position.image, 0);
  const W* const bias = p.bias.row<const W>(position.image, 0);
  const Acc weight_offset = p.zero_centered_weight;
  const int64_t pixels = position.pixels;
};

// The state that the loops over one chunk of channels share.
template <bool special, class B>
struct ChannelChunk {
  using T = typename B::T;
  using Acc = AccOf<T>;

  ChannelChunk(const B& b, const PixelCoefficients<Acc>& coef, int64_t c, int64_t n, bool with_weight)
      : b(b),
        coef(coef),
        c(c),
        weight(with_weight ? b.weight : nullptr, c, n, 1, b.weight_offset),
        bias(special ? b.bias : nullptr, c, n, 0) {}

  // d of channel c + k: x * scale - mean, or xhat if it is computed from the output.
  template <class Lanes>
  Pack<Acc> deviation(int64_t k, int64_t j, Lanes lanes) const {
    const T* const x = b.x.channel(c + k) + j;
    if (special && b.p.memory_efficient) return (load<T>(x, lanes) - bias[k]) / divisor(broadcast(weight[k]));
    return load_scaled<special>(x, coef.scale + j, lanes) - read(coef.mean + j, AllLanes{});
  }

  const B& b;
  const PixelCoefficients<Acc>& coef;
  const int64_t c;
  const ChunkParameters<T> weight, bias;
};

template <bool special, bool with_g, class B>
void sums_loop(const B& b, PixelCoefficients<typename B::Acc>& coef) {
  using Acc = typename B::Acc;
  const Chunks chunks(b.p.cols, kChannelChunk);
  ChunkSums<Acc> xhat_sums, g_sums, g_xhat_sums;
  for_each_chunk(b.p.cols, [&](int64_t c, int64_t n) {
    const ChannelChunk<special, B> chunk(b, coef, c, n, with_g || b.p.memory_efficient);
    for_each_pack<Acc, 1>(0, b.pixels, [&](int, int64_t j, auto lanes) {
      const auto rstd_scaled = read(coef.rstd_scaled + j, AllLanes{});
      Pack<Acc> xhat_sum = {}, g_sum = {}, g_xhat_sum = {};
      for (int64_t k = 0; k < n; ++k) {
        const auto xhat = chunk.deviation(k, j, lanes) * rstd_scaled;
        xhat_sum = xhat_sum + xhat;
        if constexpr (with_g) {
          const auto g = load<typename B::T>(b.dy.channel(c + k) + j, lanes) * chunk.weight[k];
          g_sum = g_sum + g;
          g_xhat_sum = fma(g, xhat, g_xhat_sum);
        }
      }
      xhat_sums.add(j, xhat_sum);
      if constexpr (with_g) {
        g_sums.add(j, g_sum);
        g_xhat_sums.add(j, g_xhat_sum);
      }
    });
  });
  for (int64_t j = 0; j < padded<Acc>(b.pixels); ++j) {
    const double mean_xhat = b.p.rms ? 0 : chunks.mean<Acc>(xhat_sums[j]),
                 mean_g = b.p.rms ? 0 : chunks.mean<Acc>(g_sums[j]);
    coef.minus_mean_xhat[j] = static_cast<Acc>(-mean_xhat);
    coef.minus_mean_g_xhat[j] = static_cast<Acc>(-(chunks.mean<Acc>(g_xhat_sums[j]) - mean_xhat * mean_g));
    coef.mean_g[j] = static_cast<Acc>(mean_g);
  }
}

// dx and the partial sums of dweight and dbias. `first` says that the block is the first of its segment.
template <bool special, bool with_dx, bool with_dweight, bool with_dbias, class B>
void gradients_loop(const B& b, const PixelCoefficients<typename B::Acc>& coef, bool first, typename B::Acc* dweight,
                    typename B::Acc* dbias) {
  using T = typename B::T;
  using Acc = typename B::Acc;
  for_each_chunk(b.p.cols, [&](int64_t c, int64_t n) {
    const ChannelChunk<special, B> chunk(b, coef, c, n, true);
    for (int64_t k = 0; k < n; ++k) {
      Pack<Acc> dw = {}, db = {};
      for_each_pack<Acc, 1>(0, b.pixels, [&](int, int64_t j, auto lanes) {
        const auto v = load<T>(b.dy.channel(c + k) + j, lanes);
        prefetch_next(b.dy, c + k, j);
        if constexpr (with_dbias) db = db + v;
        if constexpr (with_dx || with_dweight) {
          const auto d = chunk.deviation(k, j, lanes);
          prefetch_next(b.x, c + k, j);
          const auto xhat = fma(d, read(coef.rstd_scaled + j, AllLanes{}), read(coef.minus_mean_xhat + j, AllLanes{}));
          if constexpr (with_dweight) dw = fma(v, xhat, dw);
          if constexpr (with_dx) {
            const auto g = v * chunk.weight[k] - read(coef.mean_g + j, AllLanes{});
            auto result =
                fma(xhat, read(coef.minus_mean_g_xhat + j, AllLanes{}), g) * read(coef.rstd_scaled + j, AllLanes{});
            if constexpr (special) result = result * read(coef.scale + j, AllLanes{});
            store<T, B::kMayHaveNan>(b.dx.channel(c + k) + j, result, lanes);
          }
        }
      });
      if constexpr (with_dweight) dweight[c + k] = sum_pack(dw) + (first ? 0 : dweight[c + k]);
      if constexpr (with_dbias) dbias[c + k] = sum_pack(db) + (first ? 0 : dbias[c + k]);
    }
  });
}

// Adds the gradients of the parameters to the partial sums [2, pitch].
template <class B>
void backward_block(const B& b, bool first, typename B::Acc* partials, int64_t pitch) {
  using Acc = typename B::Acc;
  const auto& p = b.p;
  PixelCoefficients<Acc> coef;
  bool any_special = p.memory_efficient;
  if (p.grad_input.data || p.grad_weight.data) {  // dbias needs nothing but dy
    const Pack<Acc> ones = broadcast(Acc(1));
    for_each_pack<Acc, 1>(0, b.pixels, [&](int, int64_t j, auto lanes) {
      write(coef.mean + j, b.mean ? load<typename B::T>(b.mean + j, lanes) : Pack<Acc>{}, AllLanes{});
      write(coef.rstd_scaled + j, load<typename B::T>(b.rstd + j, lanes), AllLanes{});
      write(coef.scale + j, zero_outside<kEvenOdd<typename B::T>>(ones, lanes), AllLanes{});
    });
    for (int64_t j = 0; j < padded<Acc>(b.pixels); ++j) {
      // No difference overflows in a pixel whose standard deviation is below 2^60. Others are scaled.
      const bool is_inside = coef.scale[j] != 0, is_huge = is_inside && coef.rstd_scaled[j] < Acc(0x1p-60);
      any_special |= is_huge;
      coef.scale[j] = p.memory_efficient ? coef.rstd_scaled[j] : is_huge ? kShrink<Acc> : Acc(1);
      coef.mean[j] *= coef.scale[j];
      if (p.memory_efficient) coef.rstd_scaled[j] = 1;
      if (!p.memory_efficient && is_huge) coef.rstd_scaled[j] = divide_rstd(coef.rstd_scaled + j, kShrink<Acc>);
    }
  }
  dispatch_flags(
      [&](auto special, auto with_dx, auto with_dweight, auto with_dbias) {
        if (with_dx || with_dweight) sums_loop<special, with_dx>(b, coef);
        gradients_loop<special, with_dx, with_dweight, with_dbias>(b, coef, first, partials, partials + pitch);
      },
      any_special, p.grad_input.data != nullptr, p.grad_weight.data != nullptr, p.grad_bias.data != nullptr);
}

}  // namespace

void channels_first_forward(const ForwardParams& p) {
  dispatch_dtypes_of_images<Elements>(p, [&](auto types) {
    using T = typename decltype(types)::T;
    const PixelBlocks blocks(p, sizeof(T), false);
    const int64_t block_elements = min(blocks.pixels, p.rows) * p.cols;
    parallel_for(blocks.count, grain(block_elements), [&](int64_t block, int64_t end) {
      for (; block < end; ++block) forward_block<T, typename decltype(types)::W>(p, BlockPosition(p, blocks, block));
    });
  });
}

void channels_first_backward(const BackwardParams& p) {
  dispatch_dtypes_of_images<Elements>(p, [&](auto types) {
    using T = typename decltype(types)::T;
    using W = typename decltype(types)::W;
    using Acc = AccOf<T>;
    const ParameterGradients gradients(p);
    const PixelBlocks blocks(p, sizeof(T), gradients.any_per_group());
    const int64_t pitch = padded_cols(p), segment_elements = blocks.per_segment * min(blocks.pixels, p.rows) * p.cols;
    const auto bytes = gradients.count * blocks.segments * pitch * static_cast<int64_t>(sizeof(Acc));
    Acc* const partials = static_cast<Acc*>(gradients.any() ? p.allocator->allocate(bytes) : nullptr);
    parallel_for(blocks.segments, grain(segment_elements), [&](int64_t segment, int64_t end) {
      for (; segment < end; ++segment) {
        const int64_t first = segment * blocks.per_segment;
        for (int64_t block = first; block < min(blocks.count, first + blocks.per_segment); ++block) {
          const BackwardBlock<T, W> b = {p, BlockPosition(p, blocks, block)};
          backward_block(b, block == first, partials + gradients.count * segment * pitch, pitch);
        }
      }
    });
    add_partials<Acc, W>(p, partials, blocks.segments);  // the channels are in memory order
  });
}

}  // namespace layernorm::cpu::CPU_CAPABILITY
