// Normalization over the channels of images x [images, channels, pixels], and its gradients. The formulas are those of
// forward.cpp and backward.cpp; a row is a pixel.
//
// A thread handles tiles of adjacent pixels (PixelTiles). The lanes of a pack hold pixels, so only the weight
// gradients are summed across lanes. Forward reads a tile twice (statistics, output), and so does backward (sums,
// gradients), a few channels at a time, each along its pixels, which is the fastest way to read the memory. The tile
// stays in the second-level cache, so memory traffic is the same as for rows.
//
// Sums over channels: the channels of a chunk are added in order, in Acc, then the chunks in order, in double. This
// order depends only on the number of channels. Weight gradients: the packs of a tile are added, then their lanes, then
// the tiles of a segment, and then the segments in order and in double.
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

// One value for each pixel of a tile, in the lane order of T (kEvenOdd in simd.h).
template <class Number>
using PerPixel = Number[kMaxTilePixels];

// A tile of an array of images.
template <class T>
struct Tile {
  T* data;         // [channels, pixels]; null if the array is absent
  T* next;         // the data of the following tile, for prefetches; may be past the end of the array
  int64_t stride;  // from channel to channel
  T* channel(int64_t c) const { return data + c * stride; }
};

// The positions of a tile and of the following tile in the images.
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

// The weight or the bias of channels c to c + n - 1, widened to Acc, plus `offset` (1 for a zero-centered weight); all
// are `fallback` if the parameter is absent.
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
  Acc values[kChannelChunk + kMaxPackSize];  // stores of whole packs may exceed the n values
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

// Loads x. If any pixel of the tile is rescaled (`rescaled`), multiplies each pixel by its row_scale, which may be 1.
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
  PerPixel<Acc> rstd;        // of x * row_scale
};

// Computes the statistics of a tile. The first call, without `rescaled`, chooses the row_scale of each pixel, and
// returns whether no pixel needs one. Otherwise a second call, with `rescaled`, applies them. The average of the first
// chunk of channels estimates the mean; if it is more than a standard deviation off in a pixel (forward.cpp has the
// error bound), the tile is read again.
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
  for (bool center_is_estimate = !p.rms;; center_is_estimate = false) {
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
      if (!center_is_estimate) continue;
      const double square = correction * correction;
      // In a rescaled pixel of equal channels, the square of the center's rounding error may overflow or underflow, so
      // that the tile is read again.
      const bool is_rescaled = rescaled && stats.row_scale[j] != 1;
      if (is_rescaled ? square < variance && std::isfinite(variance) : !(square > variance)) continue;
      stats.center[j] = static_cast<Acc>(stats.center[j] + correction);
      is_far = true;
    }
    if (!is_far) return in_range;
  }
}

// Stores the output of a tile.
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

// The coefficients of each pixel for the gradients loop; see Coefficients in backward_loops.h. mean_g is not negated
// here.
template <class Acc>
struct PixelCoefficients {
  PerPixel<Acc> row_scale, scaled_mean, scaled_rstd, minus_mean_xhat, minus_mean_g_xhat, mean_g;
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

// A chunk of a tile: channels c to c + n - 1, with their weights and biases. GradientTile is a BackwardTile.
template <bool rescaled, class GradientTile>
struct ChannelChunk {
  using T = typename GradientTile::T;
  using Acc = AccOf<T>;

  ChannelChunk(const GradientTile& tile, const PixelCoefficients<Acc>& coefficients, int64_t c, int64_t n,
               bool with_weight)
      : tile(tile),
        coefficients(coefficients),
        c(c),
        weight(with_weight ? tile.weight : nullptr, c, n, 1, tile.weight_offset),
        bias(rescaled ? tile.bias : nullptr, c, n, 0) {}

  // d of channel c + k: x * row_scale - scaled_mean, or xhat itself if it is computed from the output.
  template <class Lanes>
  Pack<Acc> deviation(int64_t k, int64_t j, Lanes lanes) const {
    const T* const x = tile.x.channel(c + k) + j;
    if (rescaled && tile.p.memory_efficient) return (load<T>(x, lanes) - bias[k]) / divisor(broadcast(weight[k]));
    return load_rescaled<rescaled>(x, coefficients.row_scale + j, lanes) -
           read(coefficients.scaled_mean + j, AllLanes{});
  }

  const GradientTile& tile;
  const PixelCoefficients<Acc>& coefficients;
  const int64_t c;
  const ChunkParameters<T> weight, bias;
};

template <bool rescaled, bool with_g, class GradientTile>
void sums_loop(const GradientTile& tile, PixelCoefficients<typename GradientTile::Acc>& coefficients) {
  using Acc = typename GradientTile::Acc;
  const Chunks chunks(tile.p.cols, kChannelChunk);
  ChunkSums<Acc> xhat_sums, g_sums, g_xhat_sums;
  for_each_chunk(tile.p.cols, [&](int64_t c, int64_t n) {
    const ChannelChunk<rescaled, GradientTile> chunk(tile, coefficients, c, n, with_g || tile.p.memory_efficient);
    for_each_pack<Acc, 1>({0, tile.pixels}, [&](int, int64_t j, auto lanes) {
      const auto scaled_rstd = read(coefficients.scaled_rstd + j, AllLanes{});
      Pack<Acc> xhat_sum = {}, g_sum = {}, g_xhat_sum = {};
      for (int64_t k = 0; k < n; ++k) {
        const auto xhat = chunk.deviation(k, j, lanes) * scaled_rstd;
        xhat_sum = xhat_sum + xhat;
        if constexpr (with_g) {
          const auto g = load<typename GradientTile::T>(tile.dy.channel(c + k) + j, lanes) * chunk.weight[k];
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
  for (int64_t j = 0; j < padded<Acc>(tile.pixels); ++j) {
    const double mean_xhat = tile.p.rms ? 0 : chunks.mean<Acc>(xhat_sums[j]),
                 mean_g = tile.p.rms ? 0 : chunks.mean<Acc>(g_sums[j]);
    coefficients.minus_mean_xhat[j] = static_cast<Acc>(-mean_xhat);
    coefficients.minus_mean_g_xhat[j] = static_cast<Acc>(-(chunks.mean<Acc>(g_xhat_sums[j]) - mean_xhat * mean_g));
    coefficients.mean_g[j] = static_cast<Acc>(mean_g);
  }
}

// Stores dx of a tile, and adds the tile to the segment's partial sums of dweight and dbias, which the first tile
// initializes.
template <bool rescaled, bool with_dx, bool with_dweight, bool with_dbias, class GradientTile>
void gradients_loop(const GradientTile& tile, const PixelCoefficients<typename GradientTile::Acc>& coefficients,
                    bool is_first_tile, typename GradientTile::Acc* dweight, typename GradientTile::Acc* dbias) {
  using T = typename GradientTile::T;
  using Acc = typename GradientTile::Acc;
  for_each_chunk(tile.p.cols, [&](int64_t c, int64_t n) {
    const ChannelChunk<rescaled, GradientTile> chunk(tile, coefficients, c, n, true);
    for (int64_t k = 0; k < n; ++k) {
      Pack<Acc> dw = {}, db = {};
      for_each_pack<Acc, 1>({0, tile.pixels}, [&](int, int64_t j, auto lanes) {
        const auto v = load<T>(tile.dy.channel(c + k) + j, lanes);
        prefetch_next(tile.dy, c + k, j);
        if constexpr (with_dbias) db = db + v;
        if constexpr (with_dx || with_dweight) {
          const auto d = chunk.deviation(k, j, lanes);
          prefetch_next(tile.x, c + k, j);
          const auto xhat = fma(d, read(coefficients.scaled_rstd + j, AllLanes{}),
                                read(coefficients.minus_mean_xhat + j, AllLanes{}));
          if constexpr (with_dweight) dw = fma(v, xhat, dw);
          if constexpr (with_dx) {
            const auto g = v * chunk.weight[k] - read(coefficients.mean_g + j, AllLanes{});
            auto result = fma(xhat, read(coefficients.minus_mean_g_xhat + j, AllLanes{}), g) *
                          read(coefficients.scaled_rstd + j, AllLanes{});
            if constexpr (rescaled) result = result * read(coefficients.row_scale + j, AllLanes{});
            store<T, GradientTile::kMayHaveNan>(tile.dx.channel(c + k) + j, result, lanes);
          }
        }
      });
      if constexpr (with_dweight) dweight[c + k] = sum_pack(dw) + (is_first_tile ? 0 : dweight[c + k]);
      if constexpr (with_dbias) dbias[c + k] = sum_pack(db) + (is_first_tile ? 0 : dbias[c + k]);
    }
  });
}

// Handles a tile, and adds its gradients of the parameters to the segment's partial sums [2, pitch].
template <class GradientTile>
void backward_tile(const GradientTile& tile, bool is_first_tile, typename GradientTile::Acc* partials, int64_t pitch) {
  using Acc = typename GradientTile::Acc;
  const auto& p = tile.p;
  PixelCoefficients<Acc> coefficients;
  bool any_rescaled = p.memory_efficient;
  if (p.grad_input.data || p.grad_weight.data) {  // dbias needs nothing but dy
    const Pack<Acc> ones = broadcast(Acc(1));
    for_each_pack<Acc, 1>({0, tile.pixels}, [&](int, int64_t j, auto lanes) {
      write(coefficients.scaled_mean + j,
            tile.mean ? load<typename GradientTile::T>(tile.mean + j, lanes) : Pack<Acc>{}, AllLanes{});
      write(coefficients.scaled_rstd + j, load<typename GradientTile::T>(tile.rstd + j, lanes), AllLanes{});
      write(coefficients.row_scale + j, zero_outside<kEvenOdd<typename GradientTile::T>>(ones, lanes), AllLanes{});
    });
    for (int64_t j = 0; j < padded<Acc>(tile.pixels); ++j) {
      // No x - mean overflows in a pixel whose standard deviation is below 2^60. Others are rescaled.
      const bool is_inside = coefficients.row_scale[j] != 0,
                 needs_row_scale = is_inside && coefficients.scaled_rstd[j] < Acc(0x1p-60);
      any_rescaled |= needs_row_scale;
      coefficients.row_scale[j] = p.memory_efficient ? coefficients.scaled_rstd[j]
                                  : needs_row_scale  ? kShrink<Acc>
                                                     : Acc(1);
      coefficients.scaled_mean[j] *= coefficients.row_scale[j];
      if (p.memory_efficient) coefficients.scaled_rstd[j] = 1;
      if (!p.memory_efficient && needs_row_scale)
        coefficients.scaled_rstd[j] = divide_rstd(coefficients.scaled_rstd + j, kShrink<Acc>);
    }
  }
  dispatch_flags(
      [&](auto rescaled, auto with_dx, auto with_dweight, auto with_dbias) {
        if (with_dx || with_dweight) sums_loop<rescaled, with_dx>(tile, coefficients);
        Acc* const dbias = with_dbias ? partials + pitch : nullptr;
        gradients_loop<rescaled, with_dx, with_dweight, with_dbias>(tile, coefficients, is_first_tile, partials, dbias);
      },
      any_rescaled, p.grad_input.data != nullptr, p.grad_weight.data != nullptr, p.grad_bias.data != nullptr);
}

}  // namespace

void channels_first_forward(const ForwardParams& p) {
  dispatch_dtypes_of_images<Elements>(p, [&](auto types) {
    using T = typename decltype(types)::T;
    const PixelTiles tiles(p, sizeof(T), /*sums_each_image=*/false);
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
    const PixelTiles tiles(p, sizeof(T), /*sums_each_image=*/gradients.any_per_sample());
    const int64_t pitch = padded_cols(p), segment_elements = tiles.per_segment * min(tiles.pixels, p.rows) * p.cols;
    const auto bytes = gradients.count * tiles.segments * pitch * static_cast<int64_t>(sizeof(Acc));
    Acc* const partials = static_cast<Acc*>(gradients.any() ? p.allocator->allocate(bytes) : nullptr);
    parallel_for(tiles.segments, grain(segment_elements), [&](int64_t segment, int64_t end) {
      for (; segment < end; ++segment) {
        Acc* const sums = partials ? partials + gradients.count * segment * pitch : nullptr;
        const int64_t first = segment * tiles.per_segment;
        for (int64_t tile = first; tile < min(tiles.count, first + tiles.per_segment); ++tile) {
          const BackwardTile<T, W> arrays = {p, TilePosition(p, tiles, tile)};
          backward_tile(arrays, /*is_first_tile=*/tile == first, sums, pitch);
        }
      }
    });
    store_parameter_gradients<Acc, W>(p, partials, tiles.segments);  // the channels are in memory order
  });
}

}  // namespace layernorm::cpu::CPU_CAPABILITY
