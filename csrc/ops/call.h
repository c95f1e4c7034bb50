// A call as the kernels see it: its rows, the views of its tensors, and copies of tensors that they cannot read in
// place.
#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/empty_strided_cpu_dispatch.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <iterator>

#include "../kernel_params.h"
#include "shapes.h"

namespace layernorm {

// Allocates CPU tensors without the dispatcher, which costs a small call one percent of its time per tensor.
inline Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return options.device().is_cpu() ? at::cpu::empty(sizes, options) : at::empty(sizes, options);
}

// The strides of at::empty_like(images).
inline at::DimVector strides_like(const Tensor& images) {
  if (images.is_non_overlapping_and_dense()) return at::DimVector(images.strides());
  return at::DimVector(at::infer_dense_strides(images.sizes(), images.strides()));
}

// Every tensor of a call is viewed as [samples, rows, cols], where the rows of a sample share the weight, the bias and
// the input_scale. To make this view, each batch dimension is assigned to the samples or to the rows:
//  - The batch dimensions in which a parameter has the input's size are samples, and so is the dimension of num_groups.
//    The others are rows.
//  - If all rows share the parameters, the first batch dimensions are samples and the others rows, so that an input
//    whose batch dimensions need two strides, such as the queries in a fused projection, is read in place. With
//    channels_first (images whose pixels are adjacent in memory), only the dimension of the images may be samples.
//
// The constructor allocates nothing. Results, and copies of tensors, have the layout of the output: contiguous or, for
// images, the strides of at::empty_like().
class Call {
 public:
  // Only the dtype of `x` is used, which is that of the normalized tensor: `x` is the residual if there is one, else
  // the input. With needs_alignment, tensors whose rows are not aligned, see is_aligned(), are copied.
  template <class Args>
  Call(const Tensor& x, const Args& args, bool needs_alignment)
      : types(x, args),
        input_(args.input),
        options_(args.options),
        num_groups_(args.options.groups().expect_int()),
        normalized_dims_(static_cast<int64_t>(args.normalized_shape.size())),
        batch_dims_(args.input->dim() - normalized_dims_ + (num_groups_ > 1)),
        dims_(args.input->dim() + (num_groups_ > 1)),
        needs_alignment_(needs_alignment) {
    // A gate with other strides may be read in place, which divide_rows() finds out; other tensors are copied.
    is_plain_ =
        num_groups_ == 1 && !options_.images && input_.is_contiguous() && (!args.gate || args.gate->is_contiguous());
    for_each_parameter(args, [&](const char*, const auto& p) { is_plain_ &= !p || p->dim() <= normalized_dims_; });
    if (is_plain_) {
      for (int64_t d = 0; d < dims_; ++d) (d < batch_dims_ ? rows : cols) *= input_.size(d);
      return;
    }
    divide_rows(args);
  }
  Call(const Call&) = delete;

  bool is_empty() const { return input_.numel() == 0; }

  // Whether the kernels can take the call. Then only the read functions below copy tensors.
  bool has_kernel() const { return is_plain_ || has_kernel_ || is_empty(); }

  // A new tensor with the layout of the output.
  Tensor allocate_like_input(at::ScalarType type) const {
    const auto options = input_.options().dtype(type);
    if (!options_.images) return allocate(input_.sizes(), options.memory_format(at::MemoryFormat::Contiguous));
    const auto strides = strides_like(input_);
    return input_.is_cpu() ? at::cpu::empty_strided(input_.sizes(), strides, options)
                           : at::empty_strided(input_.sizes(), strides, options);
  }
  Tensor allocate_statistic() const {
    const auto options = input_.options().dtype(accumulate_type(input_));
    return allocate(statistics_shape<at::DimVector>(input_.sizes(), normalized_dims_, options_),
                    options.memory_format(at::MemoryFormat::Contiguous));
  }

  // Whether the kernels can write to a tensor of the caller as to one of allocate_like_input().
  bool has_layout_of_output(const Tensor& t) const {
    const bool same = options_.images ? t.strides() == at::IntArrayRef(strides_like(input_)) : t.is_contiguous();
    return same && is_aligned(view(t), t.element_size());
  }

  // Each read function returns the view of a tensor that the kernels read: of the tensor itself or, if they cannot use
  // its strides or address, of a copy that this object owns.
  View read(const Tensor& t) {
    const View own = view(t);
    if (fits(own) && is_aligned(own, t.element_size())) return own;
    return view(keep(allocate_like_input(t.scalar_type()).copy_(t)));
  }
  View read(const OptionalTensorRef& t) { return t ? read(*t) : View(); }
  View read_statistic(const Tensor& t) {
    const View own = statistic_view(t);
    return fits(own) ? own : statistic_view(keep(t.contiguous()));
  }
  // A parameter is also converted to the dtype of the kernel.
  View read_parameter(const OptionalTensorRef& t) {
    if (!t) return {nullptr, 0, 0, 1};
    if (t->scalar_type() == types.kernel_dtype && fits_parameter(*t)) return parameter_view(*t);
    const Tensor converted = t->to(types.kernel_dtype).contiguous();
    return parameter_view(keep(fits_parameter(converted) ? converted : converted.clone()));  // clone() aligns it
  }

  // Each write function returns the view of a tensor that the kernels write; an undefined tensor has no data.
  View write(const Tensor& t) const { return t.defined() ? writable(view(t), t) : View(); }
  View write_statistic(const Tensor& t) const { return t.defined() ? writable(statistic_view(t), t) : View(); }
  // The sample stride of a parameter's gradient is not 0 if each sample has its own values of the parameter. It is set
  // also if the gradient is not computed, because the order in which kernels sum the other gradients depends on it.
  View write_gradient(const GradientType& type, const Tensor& t) const {
    const bool is_per_sample = present(type.like) ? type.like->numel() > cols : num_groups_ > 1;
    return {t.defined() ? t.mutable_data_ptr() : nullptr, is_per_sample ? cols : 0, 0, 1};
  }

  const ParameterTypes types;
  int64_t samples = 1, rows = 1, cols = 1;
  bool channels_first = false;

 private:
  struct Layout {  // of a tensor
    at::IntArrayRef sizes, strides;
  };
  struct Extent {  // of one dimension
    int64_t size, stride;
  };

  // Assigns the batch dimensions to samples and rows, and decides whether kernels can take the call.
  template <class Args>
  void divide_rows(const Args& args) {
    for (int64_t d = batch_dims_; d < dims_; ++d) cols *= extent(layout(input_), d).size;
    is_sample_.assign(batch_dims_, false);
    if (num_groups_ > 1) is_sample_[batch_dims_ - 1] = true;
    for_each_parameter(args, [&](const char*, const auto& p) {
      for (int64_t d = 0; p && d < batch_dims_; ++d) is_sample_[d] |= extent(layout(*p), d).size != 1;
    });
    const auto& sizes = input_.sizes();
    const auto strides = options_.images ? strides_like(input_) : c10::contiguous_strides(sizes);
    const Layout output = {sizes, strides};
    // The output's normalized dimensions have a joint stride of 1, unless they are the channels of images. Then the
    // kernels require that the pixels of an image have a joint stride of 1.
    channels_first = joint_stride(output, batch_dims_, dims_, 1, every_dim_) != 1;
    bool has_kernel = !channels_first || joint_stride(output, 1, batch_dims_, 0, every_dim_) == 1;
    for_each_parameter(args, [&](const char*, const auto& p) { has_kernel &= !p || has_all_samples_or_none(*p); });
    const bool rows_share_parameters = std::find(is_sample_.begin(), is_sample_.end(), true) == is_sample_.end();
    if (rows_share_parameters && has_kernel) {
      // Prefers a division into samples and rows with which both input and gate are read in place, then one with which
      // only the input is. With any of them, the output must be written in place.
      const auto input_fits = [&] { return fits(output) && fits(layout(input_)); };
      const auto all_fit = [&] { return input_fits() && (!args.gate || fits(layout(*args.gate))); };
      if (!make_samples_until(all_fit) && !make_samples_until(input_fits)) {
        make_samples_until([&] { return fits(output); });
      }
    }
    for (int64_t d = 0; d < batch_dims_; ++d) (is_sample_[d] ? samples : rows) *= extent(layout(input_), d).size;
    const auto statistics = statistics_shape<at::DimVector>(sizes, normalized_dims_, options_);
    has_kernel_ = has_kernel && fits(output) && fits({statistics, c10::contiguous_strides(statistics)});
  }

  // Assigns the first batch dimensions to the samples, one after the other until done() holds; returns whether it does.
  template <class F>
  bool make_samples_until(const F& done) {
    std::fill(is_sample_.begin(), is_sample_.end(), false);
    // The dimensions of pixels stay rows. If a dimension of a single image became samples, the image would be summed in
    // another order than in a larger batch.
    const int64_t end = channels_first ? std::min<int64_t>(batch_dims_, 1) : batch_dims_;
    for (int64_t d = 0; d < end && !done(); ++d) is_sample_[d] = true;
    return done();
  }

  static Layout layout(const Tensor& t) { return {t.sizes(), t.strides()}; }

  // The size and the stride of a tensor in dimension d of the call. The dimensions of a call are [*batch, *normalized]
  // or, with num_groups, [*batch, num_groups, elements of a group]; the last two are one dimension of a tensor.
  Extent extent(const Layout& t, int64_t d) const {
    const bool is_group = num_groups_ > 1 && d == batch_dims_ - 1, is_in_group = num_groups_ > 1 && d == batch_dims_;
    const int64_t source = source_of(t, is_in_group ? d - 1 : d);
    if (source < 0) return {1, 0};
    const int64_t size = t.sizes[source], stride = t.strides[source];
    if (is_group) return {num_groups_, stride * (size / num_groups_)};
    return {is_in_group ? size / num_groups_ : size, stride};
  }

  // The dimension of the input, a statistic or a parameter that is dimension d of [*batch, *normalized], or -1 if the
  // tensor lacks it: a parameter may lack batch dimensions. In images, the normalized dimension is the second one.
  int64_t source_of(const Layout& t, int64_t d) const {
    const auto own_dims = static_cast<int64_t>(t.sizes.size());
    const int64_t missing_dims = input_.dim() - own_dims;
    if (options_.images && own_dims > 1) {
      if (d == input_.dim() - 1) return 1;
      return d == 0 ? 0 : d + 1 < own_dims ? d + 1 : -1;
    }
    const int64_t first_normalized = batch_dims_ - (num_groups_ > 1);
    if (d >= first_normalized) return d - missing_dims;
    return d < first_normalized - missing_dims ? d : -1;
  }

  // The stride of the dimension into which the selected dimensions of [begin, end) can be merged without a copy, or
  // nullopt if they cannot. Dimensions of size 1 do not matter; if all have size 1, returns stride_of_one.
  template <class F>
  optional<int64_t> joint_stride(const Layout& t, int64_t begin, int64_t end, int64_t stride_of_one,
                                 const F& selected) const {
    int64_t stride = stride_of_one;
    int64_t expected = -1;  // the stride that the next dimension must have; -1 before the first one
    for (int64_t d = end - 1; d >= begin; --d) {
      if (!selected(d)) continue;
      const Extent own = extent(t, d);
      if (own.size == 1) continue;
      if (expected < 0) {
        stride = own.stride;
      } else if (own.stride != expected) {
        return std::nullopt;
      }
      expected = own.stride * own.size;
    }
    return stride;
  }
  static constexpr auto every_dim_ = [](int64_t) { return true; };

  // The view of a tensor of this layout. Its strides are -1 where dimensions cannot be merged.
  View view(const Layout& t, const void* data) const {
    const auto is_sample = [&](int64_t d) { return !is_sample_.empty() && is_sample_[d]; };
    const auto is_row = [&](int64_t d) { return !is_sample(d); };
    return {const_cast<void*>(data), joint_stride(t, 0, batch_dims_, 0, is_sample).value_or(-1),
            joint_stride(t, 0, batch_dims_, channels_first ? 1 : cols, is_row).value_or(-1),
            joint_stride(t, batch_dims_, dims_, 1, every_dim_).value_or(-1)};
  }
  View view(const Tensor& t) const {
    if (is_plain_ && t.is_contiguous()) return {const_cast<void*>(t.const_data_ptr()), 0, cols, 1};
    return view(layout(t), t.const_data_ptr());
  }
  View statistic_view(const Tensor& t) const {
    if (is_plain_ && t.is_contiguous()) return {const_cast<void*>(t.const_data_ptr()), 0, 1, 1};
    return view(t);
  }
  View parameter_view(const Tensor& t) const {
    if (is_shared(t)) return {const_cast<void*>(t.const_data_ptr()), 0, 0, 1};
    return view(t);
  }
  // mutable_data_ptr() gives a copy-on-write tensor its own memory, which const_data_ptr() above does not.
  static View writable(View view, const Tensor& t) {
    view.data = t.mutable_data_ptr();
    return view;
  }

  // Whether the kernels can use the strides of the input or of a tensor of its shape.
  bool fits(const View& v) const {
    return v.sample_stride >= 0 && v.row_stride >= 0 &&
           (channels_first ? v.col_stride >= 0 && v.row_stride == 1 : v.col_stride == 1);
  }
  bool fits(const Layout& t) const { return fits(view(t, nullptr)); }

  // Whether the kernels can use the strides and the address of a parameter.
  bool fits_parameter(const Tensor& t) const {
    const View own = parameter_view(t);
    if (!is_aligned(own, t.element_size())) return false;
    return is_shared(t) ? t.is_contiguous() : own.sample_stride >= 0 && own.col_stride == 1;
  }

  // Whether every row starts at a multiple of the largest power of two, up to 16, that divides the bytes of a row.
  bool is_aligned(const View& view, int64_t size) const {
    if (!needs_alignment_ || channels_first || cols == 0) return true;
    const int64_t row_bytes = cols * size, address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data));
    // A power of two divides the addresses of all rows if it divides this number.
    const int64_t joined = address | view.sample_stride * size | view.row_stride * size;
    return joined % std::min<int64_t>(row_bytes & -row_bytes, 16) == 0;
  }

  // Whether all rows share a parameter, because it has neither batch dimensions nor groups.
  bool is_shared(const Tensor& parameter) const { return parameter.dim() == normalized_dims_ && num_groups_ == 1; }

  // Whether a parameter has values for each sample or the same ones for all. The kernels have one sample stride, so
  // they cannot read a parameter that only some samples share.
  bool has_all_samples_or_none(const Tensor& parameter) const {
    bool all = true, none = true;
    for (int64_t d = 0; d < batch_dims_; ++d) {
      if (is_sample_[d]) (extent(layout(parameter), d).size == 1 ? all : none) = false;
    }
    return all || none;
  }

  const Tensor& keep(Tensor copy) { return copies_.emplace_back(std::move(copy)); }

  const Tensor& input_;
  const Options& options_;
  const int64_t num_groups_, normalized_dims_;
  const int64_t batch_dims_, dims_;  // dims_ of a call, see extent(); the first batch_dims_ are samples or rows
  const bool needs_alignment_;
  bool is_plain_;                        // one sample of contiguous rows, as in nearly every call
  bool has_kernel_ = true;               // used if not is_plain_
  c10::SmallVector<bool, 5> is_sample_;  // for each batch dimension; empty if is_plain_
  c10::SmallVector<Tensor, 2> copies_;
};

}  // namespace layernorm
