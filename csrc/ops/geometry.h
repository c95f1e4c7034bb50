// How the dimensions of a call's tensors form rows.
//
// Tensors are [*batch, *normalized]. Parameters are [*first batch dimensions, *normalized], where each batch size is
// the input's or 1; batch dimensions that a parameter lacks have size 1. With `images`, tensors are [N, C, *] and
// parameters [C], [N, C] or [N, C, *]: the normalized dimension C comes second. With num_groups, the only normalized
// dimension is [groups, elements], and each group is a row of its own. Statistics have the dimensions of the input,
// with num_groups in place of the last normalized size and 1 in place of the others.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "ops.h"

namespace layernorm {

// The shape of the statistics, as a vector of integers or symbolic integers.
template <class Shape, class Sizes>
Shape statistics_shape(const Sizes& input_sizes, int64_t normalized_dims, const Options& options) {
  Shape shape(input_sizes.begin(), input_sizes.end());
  const auto end = shape.begin() + (options.images ? 2 : static_cast<int64_t>(shape.size()));
  std::fill(end - normalized_dims, end, 1);
  if constexpr (std::is_same_v<typename Shape::value_type, c10::SymInt>) {
    *(end - 1) = options.num_groups;
  } else {
    *(end - 1) = options.num_groups.expect_int();
  }
  return shape;
}

// Whether the output has the memory format channels_last of the input, which RMSNorm keeps as in torch.
inline bool keeps_channels_last(const ForwardArgs& args) {
  const Options& options = args.options;
  return options.rms && !options.images && !args.residual &&
         args.input->suggest_memory_format() != at::MemoryFormat::Contiguous;
}

// A parameter with all dimensions of the input.
inline Tensor with_all_dims(Tensor parameter, int64_t dims, int64_t normalized_dims, const Options& options) {
  const bool at_end = options.images && parameter.dim() > 1;
  if (options.images && !at_end) parameter = parameter.unsqueeze(0);
  while (parameter.dim() < dims) parameter = parameter.unsqueeze(options.images ? -1 : -1 - normalized_dims);
  return parameter;
}

// Whether a parameter of images varies between pixels, so that its channels are not adjacent in a contiguous tensor.
inline bool has_pixels(const Tensor& parameter, const Options& options) {
  return options.images && parameter.dim() > 2 && parameter.numel() != parameter.size(0) * parameter.size(1);
}

// The size and the stride of a dimension.
struct Extent {
  int64_t size, stride;
};

// The dimensions of the tensors of a call in the order [*batch, groups, *normalized]; groups only with num_groups > 1.
class Geometry {
 public:
  Geometry(const Tensor& input, int64_t normalized_dims, const Options& options)
      : groups_(options.num_groups.expect_int()),
        images_(options.images),
        input_dims_(input.dim()),
        batch_dims(input.dim() - normalized_dims + (groups_ > 1)),
        dims(input.dim() + (groups_ > 1)) {}

  // The size and the stride of dimension d. The tensor has the shape of the input or is a statistic or a parameter.
  Extent extent(const Tensor& t, int64_t d) const {
    const bool is_group = groups_ > 1 && d == batch_dims - 1, is_element = groups_ > 1 && d == batch_dims;
    const int64_t source = source_of(t, d - is_element);
    if (source < 0) return {1, 0};
    const int64_t size = t.size(source), stride = t.stride(source);
    if (is_group) return {groups_, stride * (size / groups_)};
    return {is_element ? size / groups_ : size, stride};
  }

 private:
  // The dimension of a tensor that is dimension d of the rows, or -1 if the tensor lacks it.
  int64_t source_of(const Tensor& t, int64_t d) const {
    const int64_t lacking = input_dims_ - t.dim();
    if (images_ && t.dim() > 1) {
      if (d == input_dims_ - 1) return 1;
      return d == 0 ? 0 : d + 1 < t.dim() ? d + 1 : -1;
    }
    const int64_t first_normalized = batch_dims - (groups_ > 1);
    if (d >= first_normalized) return d - lacking;
    return d < first_normalized - lacking ? d : -1;
  }

  const int64_t groups_;
  const bool images_;
  const int64_t input_dims_;

 public:
  const int64_t batch_dims, dims;  // including the dimension of the groups
};

}  // namespace layernorm
