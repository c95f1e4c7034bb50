// The tensors of a call as the kernels see them: [groups, rows, cols].
#pragma once

#include <ATen/ops/empty_strided.h>
#include <c10/util/MaybeOwned.h>

#include <algorithm>

#include "../kernel_params.h"
#include "geometry.h"
#include "types.h"

namespace layernorm {

// A tensor of the caller or a copy. Borrowing takes a small call less time than counting a reference.
using MaybeOwned = c10::MaybeOwned<Tensor>;

// The views [groups, rows, cols] of the tensors of a call. All rows of one of these groups have the same parameters.
//
// The batch dimensions in which a parameter has the input's size are groups, and so are the groups of num_groups; the
// others are rows. If all rows share the parameters, groups and rows are outer and inner batch dimensions, divided so
// that the input need not be copied. With channels_first, only the first dimension, the images, may be a group. If
// pixels were groups, the kernel for one image, and therefore its bits, would differ from that for several images.
class Views {
 public:
  // `output` has the layout of all outputs. With `aligns`, rows and parameters that is_aligned() refuses are copied.
  template <class Args>
  Views(const Tensor& output, const Args& args, bool aligns)
      : output_(output),
        normalized_dims_(static_cast<int64_t>(args.normalized_shape.size())),
        geometry_(args.input, normalized_dims_, args.options),
        batch_dims_(geometry_.batch_dims),
        aligns_(aligns),
        divides_rows_(args.options.has_groups()),
        is_group_(batch_dims_, false) {
    const Tensor& input = args.input;
    const OptionalTensorRef* const parameters[] = {&args.weight, &args.bias, &args.input_scale};
    for (int64_t d = batch_dims_; d < geometry_.dims; ++d) cols *= geometry_.extent(input, d).size;
    const bool has_groups =
        divides_rows_ || std::any_of(std::begin(parameters), std::end(parameters), [&](const auto* parameter) {
          return *parameter && (*parameter)->dim() > normalized_dims_;
        });
    is_plain_ = !has_groups && !args.options.images && input.is_contiguous() && output.is_contiguous() &&
                (!args.gate || args.gate->is_contiguous());
    if (is_plain_) {
      for (int64_t d = 0; d < batch_dims_; ++d) rows *= input.size(d);
      return;
    }
    if (divides_rows_) is_group_[batch_dims_ - 1] = true;
    for (const auto* parameter : parameters) {
      if (!*parameter) continue;
      for (int64_t d = 0; d < batch_dims_; ++d) is_group_[d] |= geometry_.extent(**parameter, d).size != 1;
    }
    const bool grouped = std::find(is_group_.begin(), is_group_.end(), true) != is_group_.end();
    channels_first = joint_stride(output, batch_dims_, geometry_.dims, 1, all_) != 1;
    if (channels_first) {
      const auto pixels = joint_stride(output, 1, batch_dims_, 0, all_);
      has_kernel_ = pixels == 1 && std::find(is_group_.begin() + 1, is_group_.end(), true) == is_group_.end();
    }
    for (const auto* parameter : parameters) has_kernel_ &= !*parameter || has_all_groups_or_none(**parameter);
    const auto gate_fits = [&] { return !args.gate || fits(*args.gate); };
    if (!grouped && !divide([&] { return fits(output) && fits(input) && gate_fits(); }) &&
        !divide([&] { return fits(output) && fits(input); })) {
      divide([&] { return fits(output); });
    }
    for (int64_t d = 0; d < batch_dims_; ++d) (is_group_[d] ? groups : rows) *= geometry_.extent(input, d).size;
  }

  // Whether the kernels can use the strides of a tensor.
  bool fits(const Tensor& t) const {
    if (is_plain_ && t.is_contiguous()) return true;
    if (!has_kernel_) return false;
    const View strides = view(t, nullptr);
    return strides.group_stride >= 0 && strides.row_stride >= 0 &&
           (channels_first ? strides.col_stride >= 0 && strides.row_stride == 1 : strides.col_stride == 1);
  }

  // Whether every row starts at a multiple of the largest power of two, up to 16, that divides its bytes.
  bool is_aligned(const Tensor& t) const { return is_aligned(t, view(t, t.const_data_ptr())); }

  // A tensor that fits and is aligned: the given one, or a copy in the layout of the output.
  MaybeOwned fit(const Tensor& t) const {
    if (!t.defined() || (fits(t) && is_aligned(t))) return MaybeOwned::borrowed(t);
    Tensor copy = at::empty_strided(output_.sizes(), output_.strides(), t.options());
    copy.copy_(t);
    return MaybeOwned::owned(std::move(copy));
  }

  // A view of a tensor that fits. A stride of -1 says that there is none.
  View view(const Tensor& t, const void* data) const {
    if (!t.defined()) return {};
    if (is_plain_ && t.is_contiguous()) return {const_cast<void*>(data), 0, cols, 1};
    const auto is_group = [&](int64_t d) { return is_group_[d]; };
    const auto is_row = [&](int64_t d) { return !is_group_[d]; };
    return {const_cast<void*>(data), joint_stride(t, 0, batch_dims_, 0, is_group).value_or(-1),
            joint_stride(t, 0, batch_dims_, channels_first ? 1 : cols, is_row).value_or(-1),
            joint_stride(t, batch_dims_, geometry_.dims, 1, all_).value_or(-1)};
  }

  // The view [groups, rows, 1] of a statistic.
  View statistic_view(const Tensor& t, const void* data) const {
    if (is_plain_ && t.is_contiguous()) return {const_cast<void*>(data), 0, 1, 1};
    return view(t, data);
  }

  // The view [groups, 1, cols] of a parameter.
  View parameter_view(const Tensor& t, const void* data) const {
    if (!t.defined() || is_shared(t)) return {const_cast<void*>(data), 0, 0, 1};
    return view(t, data);
  }
  bool fits_parameter(const Tensor& t) const {
    const View own = parameter_view(t, t.const_data_ptr());
    if (!is_aligned(t, own)) return false;
    return is_shared(t) ? t.is_contiguous() : own.group_stride >= 0 && own.col_stride == 1;
  }
  // The view of the contiguous gradient of a parameter. A gradient that is not wanted has no data, but its group stride
  // also says whether each group has a gradient of its own: the order in which kernels sum other gradients depends on
  // it.
  View gradient_view(const optional<Tensor>& model, void* data) const {
    const bool is_own = present(model) ? model->numel() > cols : divides_rows_;
    return {data, is_own ? cols : 0, 0, 1};
  }

  int64_t groups = 1, rows = 1, cols = 1;
  bool channels_first = false;

 private:
  bool is_aligned(const Tensor& t, const View& view) const {
    if (!aligns_ || channels_first || cols == 0) return true;
    const int64_t size = t.element_size(), row_bytes = cols * size;
    const int64_t address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data));
    const int64_t starts = address | view.group_stride * size | view.row_stride * size;
    return starts % std::min<int64_t>(row_bytes & -row_bytes, 16) == 0;
  }

  // Makes the first batch dimensions groups, one after the other until done() holds; returns whether it does.
  template <class F>
  bool divide(const F& done) {
    std::fill(is_group_.begin(), is_group_.end(), false);
    const int64_t end = channels_first ? std::min<int64_t>(batch_dims_, 1) : batch_dims_;
    for (int64_t d = 0; d < end && !done(); ++d) is_group_[d] = true;
    return done();
  }

  // The stride of the dimension into which the selected dimensions of [begin, end) can be merged without a copy, or
  // nullopt if they cannot. Dimensions of size 1 do not matter; if there is no other, returns `otherwise`.
  template <class F>
  optional<int64_t> joint_stride(const Tensor& t, int64_t begin, int64_t end, int64_t otherwise,
                                 const F& selected) const {
    int64_t stride = otherwise, expected = -1;
    for (int64_t d = end - 1; d >= begin; --d) {
      if (!selected(d)) continue;
      const Extent extent = geometry_.extent(t, d);
      if (extent.size == 1) continue;
      if (expected < 0) {
        stride = extent.stride;
      } else if (extent.stride != expected) {
        return std::nullopt;
      }
      expected = extent.stride * extent.size;
    }
    return stride;
  }
  static constexpr auto all_ = [](int64_t) { return true; };

  // Whether all groups share a parameter.
  bool is_shared(const Tensor& parameter) const { return parameter.dim() == normalized_dims_ && !divides_rows_; }

  // Whether a parameter has values for each group, or one for all groups. The kernels cannot read parameters that are
  // shared by some groups.
  bool has_all_groups_or_none(const Tensor& parameter) const {
    bool all = true, none = true;
    for (int64_t d = 0; d < batch_dims_; ++d) {
      if (is_group_[d]) (geometry_.extent(parameter, d).size == 1 ? all : none) = false;
    }
    return all || none;
  }

  const Tensor& output_;
  const int64_t normalized_dims_;
  const Geometry geometry_;
  const int64_t batch_dims_;
  const bool aligns_, divides_rows_;
  bool is_plain_;  // one group of contiguous rows, as in nearly every call
  // False for images whose pixels are apart or have parameters of their own, and for parameters of some groups only.
  bool has_kernel_ = true;
  c10::SmallVector<bool, 5> is_group_;
};

}  // namespace layernorm
