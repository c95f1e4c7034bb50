// Normalization over the channels of images x [images, channels, pixels], and its gradients. The formulas are those of
// forward.cpp and backward.cpp; a row is a pixel.
//
// A thread handles tiles of adjacent pixels (PixelTiles). The lanes of a pack hold pixels, so only the weight
// gradients are summed across lanes. Forward reads a tile twice (statistics, output), and so does backward (sums,
// gradients), a few channels at a time, each along its pixels, which is the fastest way to read the memory. The tile
// stays in the second-level cache, so memory traffic is the same as for rows.
//
// Order of summation over channels: the channels of a chunk in order, in Acc, then the chunks in order, in double. It
// depends only on the number of channels. Order of summation of weight gradients: the packs of a tile, then their
// lanes, the tiles of a segment, and the segments in order and in double.
//
// Precision is that of rows. In forward the average of the first chunk of channels estimates a pixel's mean; a tile
// with a pixel whose estimate is too far off is read again. Backward corrects xhat by its average.
//
// Source: Ba et al. 2016, arXiv:1607.06450.
#include <cmath>

#include "../dtypes.h"
#include "partial_sums.h"
#include "rescaling.h"
#include "summation.h"

namespace layernorm::cpu::CPU_CAPABILITY {
namespace {

// One value for each pixel of a tile, in the lane order of T (kEvenOdd).
template <class Number>
using PerPixel = Number[kMaxTilePixels];

// A tile of an array of images.
template <class T>
struct Tile {
  T* data;         // [channels, pixels]; null if the array is absent
  T* next;         // the following tile, or past the end
  int64_t stride;  // from channel to channel
  T* channel(int64_t c) const { return data + c * stride; }
};

// The position of a tile among the images, and of the tile that follows.
struct TilePosition {
  TilePosition(const Params& p, const PixelTiles& tiles, int64_t tile)
      : image(tile / tiles.per_image),
        begin(tile % tiles.per_image * tiles.pixels),
        next_image((tile + 1) / tiles.per_image),
        next_begin((tile + 1) % tiles.per_image * tiles.pixels),
        pixels(min(tiles.pixels, p.rows - begin)) {}

  template <class T>
  Tile<T> tile(const View& images) const {
    return {images.row<T>(image, begin), images.row<T>(next_image, next_begin), images.col_stride};
  }

  int64_t image, begin, next_image, next_begin, pixels;
};

// Prefetches a pack of the next tile, for pixel j of channel c. The last loop over a tile calls this, because hardware
// prefetchers do not follow as many streams as there are channels.
template <class T>
void prefetch_next(const Tile<const T>& tile, int64_t c, int64_t j) {
  prefetch_to_l2(tile.next + c * tile.stride + j);
}

// Calls f(c, n) for each chunk of the channels: n channels from channel c on.
template <class F>
void for_each_chunk(int64_t channels, const F& f) {
  for (int64_t c = 0; c < channels; c += kChannelChunk) f(c, min(kChannelChunk, channels - c));
}

// The parameters of channels c to c + n - 1, plus `offset`, or `fallback` without parameters.
template <class T>
struct ChunkParameters {
  using Acc = AccOf<T>;
  template <class W>
  ChunkParameters(const W* parameters, int64_t c, int64_t n, Acc fallback, Acc offset = 0) {
    if (!parameters) {
      for (Acc& value : values) value = fallback;
      return;
    }
    for_each_pack<Acc, 1>({0, n}, [&](int, int64_t j, auto lanes) {
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
  double lost[sizeof(Acc) == 8 ? kMaxTilePixels : 1] = {};
};

// Loads x, which is multiplied by the row_scale of each pixel if `rescaled`: if any pixel of the tile is rescaled.
template <bool rescaled, class T, class Lanes>
Pack<AccOf<T>> load_rescaled(const T* x, const AccOf<T>* row_scale, Lanes lanes) {
  const auto v = load<T>(x, lanes);
  if constexpr (rescaled) return v * read(row_scale, AllLanes{});
  return v;
}

// The number of pixels rounded up to whole packs.
template <class Acc>
int64_t padded(int64_t pixels) {
  return ceil_div(pixels, kPackSize<Acc>) * kPackSize<Acc>;
}

// ---- forward --------------------------------------------------------------------------------------------------------

// The statistics of the pixels of a tile. The mean is (center + correction) / row_scale.
template <class Acc>
struct PixelStatistics {
  PerPixel<Acc> row_scale;   // 1, kShrink if a sum would overflow, or kEnlarge if squares would underflow
  PerPixel<Acc> center;      // an estimate of the mean, times row_scale
  PerPixel<Acc> correction;  // mean of (x * row_scale - center)
  PerPixel<Acc> rstd;        // over row_scale
};

// Computes the statistics of a tile; a call with `rescaled` keeps the row_scale that a call without it has set. The
// average of the first chunk of channels estimates the mean; if it is too far off in a pixel (forward.cpp has the
// bound), the tile is read again. Returns whether no pixel needs a row_scale.
template <bool rescaled, class T>
bool compute_statistics(const ForwardParams& p, const Tile<const T> x, const int64_t tile_pixels,
                        PixelStatistics<AccOf<T>>& stats) {
  using Acc = AccOf<T>;
  const Chunks chunks(p.cols, kChannelChunk);
  const int64_t first_chunk = min(p.cols, kChannelChunk);
  for_each_pack<Acc, 1>({0, tile_pixels}, [&](int, int64_t j, auto lanes) {
    Pack<Acc> sum = {};
    for (int64_t k = 0; k < first_chunk && !p.rms; ++k) {
      sum = sum + load_rescaled<rescaled>(x.channel(k) + j, stats.row_scale + j, lanes);
    }
    write(stats.center + j, sum * (Acc(1) / static_cast<Acc>(first_chunk)), AllLanes{});
  });
  for (bool is_estimate = !p.rms;; is_estimate = false) {
    ChunkSums<Acc> deviations, squares;
    for_each_chunk(p.cols, [&](int64_t c, int64_t n) {
      for_each_pack<Acc, 1>({0, tile_pixels}, [&](int, int64_t j, auto lanes) {
        const auto center = read(stats.center + j, AllLanes{});
        Pack<Acc> deviation = {}, square = {};
        for (int64_t k = 0; k < n; ++k) {
          const auto d = load_rescaled<rescaled>(x.channel(c + k) + j, stats.row_scale + j, lanes) - center;
          deviation = deviation + d;
          square = fma(d, d, square);
        }
        deviations.add(j, deviation);
        squares.add(j, square);
      });
    });
    bool in_range = true, is_far = false;
    for (int64_t j = 0; j < padded<Acc>(tile_pixels); ++j) {
      const double correction = p.rms ? 0 : chunks.mean<Acc>(deviations[j]);
      double variance = chunks.mean<Acc>(squares[j]) - correction * correction;
      variance = variance < 0 ? 0 : variance;  // written so that NaN stays NaN
      double rstd = 1 / std::sqrt(variance + p.eps);
      if (rescaled && stats.row_scale[j] != 1) rstd = rescaled_rstd(variance, p.eps, stats.row_scale[j]);
      stats.correction[j] = static_cast<Acc>(correction);
      stats.rstd[j] = static_cast<Acc>(rstd);
      const bool is_small = p.eps < kSmallestVariance<Acc> && !(variance > kSmallestVariance<Acc>);
      const bool needs_row_scale = !std::isfinite(variance) || is_small;
      if (!rescaled) stats.row_scale[j] = needs_row_scale ? row_scale_for(stats.rstd[j], stats.center[j]) : Acc(1);
      in_range &= !needs_row_scale;
      if (!is_estimate) continue;
      const double square = correction * correction;
      const bool is_rescaled =
          rescaled && stats.row_scale[j] != 1;  // its squares may overflow or underflow, as in forward.cpp
      if (is_rescaled ? square < variance && std::isfinite(variance) : !(square > variance)) continue;
      stats.center[j] = static_cast<Acc>(stats.center[j] + correction);
      is_far = true;
    }
    if (!is_far) return in_range;
  }
}

template <bool rescaled, class W, class T>
void normalize(const ForwardParams& p, const TilePosition& position, const Tile<const T> x,
               const PixelStatistics<AccOf<T>>& stats, const Tile<T> y) {
  using Acc = AccOf<T>;
  const W* const weight = p.weight.row<const W>(position.image, 0);
  const W* const bias = p.bias.row<const W>(position.image, 0);
  const Acc weight_offset = p.zero_centered_weight;
  const int64_t pixels = position.pixels;
  for_each_chunk(p.cols, [&](int64_t c, int64_t n) {
    const ChunkParameters<T> w(weight, c, n, 1, weight_offset), b(bias, c, n, 0);
    for_each_pack<Acc, 1>({0, pixels}, [&](int, int64_t j, auto lanes) {
      const auto center = read(stats.center + j, AllLanes{}), rstd = read(stats.rstd + j, AllLanes{});
      const auto minus_correction = read(stats.correction + j, AllLanes{}) * rstd * Acc(-1);
      for (int64_t k = 0; k < n; ++k) {
        const auto d = load_rescaled<rescaled>(x.channel(c + k) + j, stats.row_scale + j, lanes) - center;
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
void forward_tile(const ForwardParams& p, const TilePosition& position) {
  using Acc = AccOf<T>;
  const auto x = position.tile<const T>(p.input);
  const auto y = position.tile<T>(p.output);
  PixelStatistics<Acc> stats;
  if (compute_statistics<false>(p, x, position.pixels, stats)) {
    normalize<false, W>(p, position, x, stats, y);
  } else {  // a pixel's sums overflowed or its squares underflowed, or it holds NaN or infinity
    compute_statistics<true>(p, x, position.pixels, stats);
    normalize<true, W>(p, position, x, stats, y);
  }
  for (int64_t j = 0; j < padded<Acc>(position.pixels); ++j) {
    stats.center[j] = static_cast<Acc>((double(stats.center[j]) + stats.correction[j]) / stats.row_scale[j]);
    if (stats.row_scale[j] != 1) store_rstd(stats.rstd + j, stats.rstd[j], stats.row_scale[j], p.eps);
  }
  const auto mean = position.tile<Acc>(p.mean), rstd = position.tile<Acc>(p.rstd);
  for_each_pack<Acc, 1>({0, position.pixels}, [&](int, int64_t j, auto lanes) {
    if (mean.data) store<T, true>(mean.data + j, read(stats.center + j, AllLanes{}), lanes);
    store<T, true>(rstd.data + j, read(stats.rstd + j, AllLanes{}), lanes);
  });
}

// ---- backward -------------------------------------------------------------------------------------------------------

// The coefficients of each pixel for the gradients loop; see Coefficients in backward_loops.h.
template <class Acc>
struct PixelCoefficients {
  PerPixel<Acc> row_scale, mean, rescaled_rstd, minus_mean_xhat, minus_mean_g_xhat, mean_g;
};

// The arrays of one tile, with the parameters of its image.
template <class T_, class W_>
struct BackwardTile {
  using T = T_;
  using W = W_;
  using Acc = AccOf<T>;
  static constexpr bool kMayHaveNan = !std::is_same_v<T, W>;

  const BackwardParams& p;
  const TilePosition position;
  const Tile<const T> dy = position.tile<const T>(p.grad_output);
  const Tile<const T> x = position.tile<const T>(p.input);
  const Tile<T> dx = position.tile<T>(p.grad_input);
  const Acc* const mean = position.tile<const Acc>(p.mean).data;
  const Acc* const rstd = position.tile<const Acc>(p.rstd).data;
  const W* const weight = p.weight.row<const W>(position.image, 0);
  const W* const bias = p.bias.row<const W>(position.image, 0);
  const Acc weight_offset = p.zero_centered_weight;
  const int64_t pixels = position.pixels;
};

// A chunk of a tile: channels c to c + n - 1, with their weights and biases.
template <bool rescaled, class B>
struct ChannelChunk {
  using T = typename B::T;
  using Acc = AccOf<T>;

  ChannelChunk(const B& b, const PixelCoefficients<Acc>& coef, int64_t c, int64_t n, bool with_weight)
      : b(b),
        coef(coef),
        c(c),
        weight(with_weight ? b.weight : nullptr, c, n, 1, b.weight_offset),
        bias(rescaled ? b.bias : nullptr, c, n, 0) {}

  // d of channel c + k: x * row_scale - mean, or xhat if it is computed from the output.
  template <class Lanes>
  Pack<Acc> deviation(int64_t k, int64_t j, Lanes lanes) const {
    const T* const x = b.x.channel(c + k) + j;
    if (rescaled && b.p.memory_efficient) return (load<T>(x, lanes) - bias[k]) / divisor(broadcast(weight[k]));
    return load_rescaled<rescaled>(x, coef.row_scale + j, lanes) - read(coef.mean + j, AllLanes{});
  }

  const B& b;
  const PixelCoefficients<Acc>& coef;
  const int64_t c;
  const ChunkParameters<T> weight, bias;
};

template <bool rescaled, bool with_g, class B>
void sums_loop(const B& b, PixelCoefficients<typename B::Acc>& coef) {
  using Acc = typename B::Acc;
  const Chunks chunks(b.p.cols, kChannelChunk);
  ChunkSums<Acc> xhat_sums, g_sums, g_xhat_sums;
  for_each_chunk(b.p.cols, [&](int64_t c, int64_t n) {
    const ChannelChunk<rescaled, B> chunk(b, coef, c, n, with_g || b.p.memory_efficient);
    for_each_pack<Acc, 1>({0, b.pixels}, [&](int, int64_t j, auto lanes) {
      const auto rescaled_rstd = read(coef.rescaled_rstd + j, AllLanes{});
      Pack<Acc> xhat_sum = {}, g_sum = {}, g_xhat_sum = {};
      for (int64_t k = 0; k < n; ++k) {
        const auto xhat = chunk.deviation(k, j, lanes) * rescaled_rstd;
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

// Stores dx of a tile, and adds the tile to the partial sums of dweight and dbias. The first tile of a segment
// (`first`) finds no numbers in them yet.
template <bool rescaled, bool with_dx, bool with_dweight, bool with_dbias, class B>
void gradients_loop(const B& b, const PixelCoefficients<typename B::Acc>& coef, bool first, typename B::Acc* dweight,
                    typename B::Acc* dbias) {
  using T = typename B::T;
  using Acc = typename B::Acc;
  for_each_chunk(b.p.cols, [&](int64_t c, int64_t n) {
    const ChannelChunk<rescaled, B> chunk(b, coef, c, n, true);
    for (int64_t k = 0; k < n; ++k) {
      Pack<Acc> dw = {}, db = {};
      for_each_pack<Acc, 1>({0, b.pixels}, [&](int, int64_t j, auto lanes) {
        const auto v = load<T>(b.dy.channel(c + k) + j, lanes);
        prefetch_next(b.dy, c + k, j);
        if constexpr (with_dbias) db = db + v;
        if constexpr (with_dx || with_dweight) {
          const auto d = chunk.deviation(k, j, lanes);
          prefetch_next(b.x, c + k, j);
          const auto xhat =
              fma(d, read(coef.rescaled_rstd + j, AllLanes{}), read(coef.minus_mean_xhat + j, AllLanes{}));
          if constexpr (with_dweight) dw = fma(v, xhat, dw);
          if constexpr (with_dx) {
            const auto g = v * chunk.weight[k] - read(coef.mean_g + j, AllLanes{});
            auto result =
                fma(xhat, read(coef.minus_mean_g_xhat + j, AllLanes{}), g) * read(coef.rescaled_rstd + j, AllLanes{});
            if constexpr (rescaled) result = result * read(coef.row_scale + j, AllLanes{});
            store<T, B::kMayHaveNan>(b.dx.channel(c + k) + j, result, lanes);
          }
        }
      });
      if constexpr (with_dweight) dweight[c + k] = sum_pack(dw) + (first ? 0 : dweight[c + k]);
      if constexpr (with_dbias) dbias[c + k] = sum_pack(db) + (first ? 0 : dbias[c + k]);
    }
  });
}

// Handles a tile, and adds its gradients of the parameters to the segment's partial sums [2, pitch].
template <class B>
void backward_tile(const B& b, bool first, typename B::Acc* partials, int64_t pitch) {
  using Acc = typename B::Acc;
  const auto& p = b.p;
  PixelCoefficients<Acc> coef;
  bool any_rescaled = p.memory_efficient;
  if (p.grad_input.data || p.grad_weight.data) {  // dbias needs nothing but dy
    const Pack<Acc> ones = broadcast(Acc(1));
    for_each_pack<Acc, 1>({0, b.pixels}, [&](int, int64_t j, auto lanes) {
      write(coef.mean + j, b.mean ? load<typename B::T>(b.mean + j, lanes) : Pack<Acc>{}, AllLanes{});
      write(coef.rescaled_rstd + j, load<typename B::T>(b.rstd + j, lanes), AllLanes{});
      write(coef.row_scale + j, zero_outside<kEvenOdd<typename B::T>>(ones, lanes), AllLanes{});
    });
    for (int64_t j = 0; j < padded<Acc>(b.pixels); ++j) {
      // No difference overflows in a pixel whose standard deviation is below 2^60. Others are rescaled.
      const bool is_inside = coef.row_scale[j] != 0,
                 needs_row_scale = is_inside && coef.rescaled_rstd[j] < Acc(0x1p-60);
      any_rescaled |= needs_row_scale;
      coef.row_scale[j] = p.memory_efficient ? coef.rescaled_rstd[j] : needs_row_scale ? kShrink<Acc> : Acc(1);
      coef.mean[j] *= coef.row_scale[j];
      if (p.memory_efficient) coef.rescaled_rstd[j] = 1;
      if (!p.memory_efficient && needs_row_scale)
        coef.rescaled_rstd[j] = divide_rstd(coef.rescaled_rstd + j, kShrink<Acc>);
    }
  }
  dispatch_flags(
      [&](auto rescaled, auto with_dx, auto with_dweight, auto with_dbias) {
        if (with_dx || with_dweight) sums_loop<rescaled, with_dx>(b, coef);
        Acc* const dbias = with_dbias ? partials + pitch : nullptr;
        gradients_loop<rescaled, with_dx, with_dweight, with_dbias>(b, coef, first, partials, dbias);
      },
      any_rescaled, p.grad_input.data != nullptr, p.grad_weight.data != nullptr, p.grad_bias.data != nullptr);
}

}  // namespace

void channels_first_forward(const ForwardParams& p) {
  dispatch_dtypes_of_images<Elements>(p, [&](auto types) {
    using T = typename decltype(types)::T;
    const PixelTiles tiles(p, sizeof(T), false);
    const int64_t tile_elements = min(tiles.pixels, p.rows) * p.cols;
    parallel_for(tiles.count, grain(tile_elements), [&](int64_t tile, int64_t end) {
      for (; tile < end; ++tile) forward_tile<T, typename decltype(types)::W>(p, TilePosition(p, tiles, tile));
    });
  });
}

void channels_first_backward(const BackwardParams& p) {
  dispatch_dtypes_of_images<Elements>(p, [&](auto types) {
    using T = typename decltype(types)::T;
    using W = typename decltype(types)::W;
    using Acc = AccOf<T>;
    const ParameterGradients gradients(p);
    const PixelTiles tiles(p, sizeof(T), gradients.any_per_sample());
    const int64_t pitch = padded_cols(p), segment_elements = tiles.per_segment * min(tiles.pixels, p.rows) * p.cols;
    const auto bytes = gradients.count * tiles.segments * pitch * static_cast<int64_t>(sizeof(Acc));
    Acc* const partials = static_cast<Acc*>(gradients.any() ? p.allocator->allocate(bytes) : nullptr);
    parallel_for(tiles.segments, grain(segment_elements), [&](int64_t segment, int64_t end) {
      for (; segment < end; ++segment) {
        Acc* const sums = partials ? partials + gradients.count * segment * pitch : nullptr;
        const int64_t first = segment * tiles.per_segment;
        for (int64_t tile = first; tile < min(tiles.count, first + tiles.per_segment); ++tile) {
          const BackwardTile<T, W> b = {p, TilePosition(p, tiles, tile)};
          backward_tile(b, tile == first, sums, pitch);
        }
      }
    });
    store_parameter_gradients<Acc, W>(p, partials, tiles.segments);  // the channels are in memory order
  });
}

}  // namespace layernorm::cpu::CPU_CAPABILITY
