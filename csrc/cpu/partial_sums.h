// The gradients of parameters as totals of the partial sums of segments (policy.h).
#pragma once

#include "loops.h"

namespace layernorm::cpu {
namespace {

// The partial sums of one parameter's gradient: for each of `segments` an array over the columns, whose packs are in
// the lane order of X (kEvenOdd).
template <class X>
struct PartialSums {
  const AccOf<X>* first;  // the array of the first segment
  int64_t pitch;          // elements from segment to segment
  int64_t segments;
};

// Stores the totals over the segments as the gradient of a parameter, for some columns.
template <class X, class W>
void store_totals(const PartialSums<X>& partials, Columns columns, W* gradient) {
  using Acc = AccOf<X>;
  for_each_pack<Acc, 1>(columns, [&](int, int64_t j, auto lanes) {
    auto sum = read(partials.first + j, AllLanes{});
    if (partials.segments > 1) {
      DoublePack<Acc> total = {};
      for (int64_t segment = 0; segment < partials.segments; ++segment)
        add(total, read(partials.first + segment * partials.pitch + j, AllLanes{}));
      sum = rounded<Acc>(total);
    }
    store<X, true>(gradient + j, sum, lanes);
  });
}

// Stores the gradients of all parameters: the totals over all segments or, for a gradient per sample, over the segments
// of each sample. `partials` is [segments, ParameterGradients::count, padded_cols]. The threads share the samples and
// tiles of kMaxPackSize columns.
template <class X, class W>
void store_parameter_gradients(const BackwardParams& p, const AccOf<X>* partials, int64_t segments) {
  const ParameterGradients gradients(p);
  if (!gradients.any()) return;
  const int64_t samples = gradients.any_per_sample() ? p.samples : 1;
  const int64_t tiles = ceil_div(p.cols, kMaxPackSize), pitch = gradients.count * padded_cols(p);
  const int64_t tile_elements = gradients.count * segments / samples * kMaxPackSize;
  parallel_for(samples * tiles, grain(tile_elements), [&](int64_t begin, int64_t end) {
    for_each_sample(tiles, begin, end, [&](const Rows& rows) {  // a tile counts as a row: [samples, tiles]
      const int64_t first_column = rows.first * kMaxPackSize;
      const Columns columns = {first_column, min(p.cols - first_column, rows.count * kMaxPackSize)};
      const View* const in_order[] = {&gradients.weight, &gradients.bias, &gradients.input_scale};
      const auto* sums = partials;
      for (const View* gradient : in_order) {
        // A gradient that all samples share is the total of all segments, and is stored with those of sample 0.
        const bool is_per_sample = gradient->sample_stride != 0;
        const int64_t count = is_per_sample ? segments / samples : segments;
        if (gradient->data && (is_per_sample || rows.sample == 0)) {
          store_totals(PartialSums<X>{sums + rows.sample * count * pitch, pitch, count}, columns,
                       gradient->row<W>(rows.sample, 0));
        }
        sums += padded_cols(p);
      }
    });
  });
}

}  // namespace
}  // namespace layernorm::cpu
