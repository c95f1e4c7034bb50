// The operators: schema, checks, geometry, host code, meta functions, registrations.
#include "ops.h"

#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/empty_strided_cpu_dispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "dtypes.h"
#include "launch_scope.h"
#include "layer_norm.h"

namespace layernorm {

// ---- checks ---------------------------------------------------------------------------------------------------------

namespace {

// Whether sizes are equal. While torch.compile traces, a size may be known only at run time, for example one from a
// numpy integer; then the compiled program checks it.
bool are_equal(SymIntArrayRef a, SymIntArrayRef b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].sym_eq(b[i]).expect_true(__FILE__, __LINE__)) return false;
  }
  return true;
}

// Whether a size is 1, or equal to another. A size that is known only at run time counts as such only if it is the same
// symbol, so that tracing needs no guard.
bool is_one(const c10::SymInt& size) { return TORCH_GUARD_OR_FALSE(size.sym_eq(1)); }
bool is_same(const c10::SymInt& a, const c10::SymInt& b) { return TORCH_GUARD_OR_FALSE(a.sym_eq(b)); }

// Whether a batch size of a parameter is 1 or the input's.
bool broadcasts_to(const c10::SymInt& size, const c10::SymInt& input_size) {
  return is_one(size) || is_same(size, input_size) || size.sym_eq(input_size).expect_true(__FILE__, __LINE__);
}

bool all_one(SymIntArrayRef sizes) { return std::all_of(sizes.begin(), sizes.end(), is_one); }

// Whether a parameter has the dimensions of the input, so that it may differ between rows.
bool has_all_dims(const optional<Tensor>& parameter, const Tensor& input) {
  return present(parameter) && parameter->dim() == input.dim();
}

void check_parameter_shape(const char* name, const Tensor& input, SymIntArrayRef normalized_shape,
                           const optional<Tensor>& parameter) {
  if (!present(parameter) || are_equal(parameter->sym_sizes(), normalized_shape)) return;
  const bool may_have_batch_dims = parameter->dim() > static_cast<int64_t>(normalized_shape.size());
  TORCH_CHECK(may_have_batch_dims && has_all_dims(parameter, input), "Expected ", name,
              " to be of same shape as normalized_shape, but got ", name, " of shape ", parameter->sym_sizes(),
              " and normalized_shape = ", normalized_shape,
              may_have_batch_dims ? c10::str("; or to have the dimensions of input of shape ", input.sym_sizes()) : "");
}

void check_batch_sizes(const char* name, const Tensor& input, SymIntArrayRef normalized_shape,
                       const Tensor& parameter) {
  const auto sizes = parameter.sym_sizes();
  const size_t batch_dims = sizes.size() - normalized_shape.size();
  bool fits = are_equal(sizes.slice(batch_dims), normalized_shape);
  for (size_t d = 0; d < batch_dims; ++d) fits = fits && broadcasts_to(sizes[d], input.sym_size(d));
  TORCH_CHECK(fits, "Expected ", name, " to be of the shape of input, with each batch size equal to the input's or 1, ",
              "but got ", name, " of shape ", sizes, ", input of shape ", input.sym_sizes(),
              " and normalized_shape = ", normalized_shape);
}

// The names of weight and bias in error messages.
using Names = std::pair<const char*, const char*>;
constexpr Names kNames = {"weight", "bias"};

// Weight and bias must have the same sizes in the batch dimensions, or one of them must be shared by all rows.
template <class F>
void check_groups(const Tensor& input, const Tensor& weight, const Tensor& bias, const F& is_batch_dim,
                  const Names& names = kNames) {
  const auto batch_sizes = [&](const Tensor& t) {
    c10::SymDimVector sizes;
    for (int64_t d = 0; d < std::max(weight.dim(), bias.dim()); ++d) {
      if (is_batch_dim(d)) sizes.push_back(d < t.dim() ? t.sym_size(d) : c10::SymInt(1));
    }
    return sizes;
  };
  const auto weight_sizes = batch_sizes(weight), bias_sizes = batch_sizes(bias);
  TORCH_CHECK(all_one(weight_sizes) || all_one(bias_sizes) || are_equal(weight_sizes, bias_sizes), "Expected ",
              names.first, " and ", names.second, " to have the same batch sizes, but got ", names.first, " of shape ",
              weight.sym_sizes(), ", ", names.second, " of shape ", bias.sym_sizes(), " and input of shape ",
              input.sym_sizes());
}

bool is_supported(at::ScalarType type) {
  return type == at::kDouble || type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

void check_input_type(const Tensor& input) {
  if (is_supported(input.scalar_type())) return;
  const auto message =
      c10::str("Expected input of dtype Double, Float, Half or BFloat16, but got input of dtype ", input.scalar_type());
  // A NotImplementedError would tell a fake tensor that the operator has no meta function.
  TORCH_CHECK(!input.is_meta(), message);
  TORCH_CHECK_NOT_IMPLEMENTED(false, message);
}

void check_device(const char* name, const Tensor& tensor, const Tensor& input) {
  TORCH_CHECK(tensor.device() == input.device(), "Expected ", name, " to be on the device of input, but got ", name,
              " on ", tensor.device(), " and input on ", input.device());
}

void check_parameter_type(const char* name, const Tensor& input, const optional<Tensor>& parameter) {
  if (!present(parameter)) return;
  TORCH_CHECK(is_supported(parameter->scalar_type()), "Expected ", name,
              " of dtype Double, Float, Half or BFloat16, but got ", name, " of dtype ", parameter->scalar_type());
  check_device(name, *parameter, input);
}

void check_types(const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias,
                 const Names& names = kNames) {
  check_input_type(input);
  check_parameter_type(names.first, input, weight);
  check_parameter_type(names.second, input, bias);
}

c10::SymDimVector statistics_shape(const Tensor& input, SymIntArrayRef normalized_shape) {
  const auto sizes = input.sym_sizes();
  c10::SymDimVector shape(sizes.begin(), sizes.end() - normalized_shape.size());
  shape.resize(sizes.size(), 1);
  return shape;
}

bool is_16_bit(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// Requires the shape, dtype and device of the input. `other_type` is allowed as well.
void check_like(const char* name, const Tensor& tensor, const Tensor& input, bool other_type = false) {
  TORCH_CHECK(are_equal(tensor.sym_sizes(), input.sym_sizes()), "Expected ", name,
              " to be of the shape of input, but got ", name, " of shape ", tensor.sym_sizes(), " and input of shape ",
              input.sym_sizes());
  TORCH_CHECK(tensor.scalar_type() == input.scalar_type() || other_type, "Expected ", name,
              " to be of the dtype of input, but got ", name, " of dtype ", tensor.scalar_type(),
              " and input of dtype ", input.scalar_type());
  check_device(name, tensor, input);
}

void check_residual(const optional<Tensor>& residual, const Tensor& input) {
  if (!present(residual)) return;
  check_like("residual", *residual, input, is_16_bit(input.scalar_type()) && residual->scalar_type() == at::kFloat);
}

void check_statistic(const char* name, const Tensor& statistic, const Tensor& input, SymIntArrayRef shape) {
  TORCH_CHECK(are_equal(statistic.sym_sizes(), shape), "Expected ", name, " of shape ", shape, ", but got ", name,
              " of shape ", statistic.sym_sizes());
  TORCH_CHECK(statistic.scalar_type() == accumulate_type(input), "Expected ", name, " of dtype ",
              accumulate_type(input), " for input of dtype ", input.scalar_type(), ", but got ", name, " of dtype ",
              statistic.scalar_type());
  check_device(name, statistic, input);
}

}  // namespace

void check_forward(const Tensor& input, const optional<Tensor>& residual, SymIntArrayRef normalized_shape,
                   const optional<Tensor>& weight, const optional<Tensor>& bias) {
  TORCH_CHECK(!normalized_shape.empty(),
              "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element, but got "
              "normalized_shape = ",
              normalized_shape);
  check_parameter_shape("weight", input, normalized_shape, weight);
  check_parameter_shape("bias", input, normalized_shape, bias);
  const auto sizes = input.sym_sizes();
  const size_t count = normalized_shape.size();
  TORCH_CHECK(sizes.size() >= count && are_equal(sizes.slice(sizes.size() - count), normalized_shape),
              "Given normalized_shape=", normalized_shape, ", expected input with shape [*, ",
              c10::Join(", ", normalized_shape), "], but got input of size", sizes);
  const bool own_weight = has_all_dims(weight, input), own_bias = has_all_dims(bias, input);
  if (own_weight) check_batch_sizes("weight", input, normalized_shape, *weight);
  if (own_bias) check_batch_sizes("bias", input, normalized_shape, *bias);
  if (own_weight && own_bias) {
    check_groups(input, *weight, *bias, [&](int64_t d) { return d < static_cast<int64_t>(sizes.size() - count); });
  }
  check_types(input, weight, bias);
  check_residual(residual, input);
}

void check_backward(const BackwardArgs& args) {
  const Tensor& input = args.input;
  check_forward(input, {}, args.normalized_shape, args.weight, args.bias);
  check_like("grad_output", args.grad_output, input,
             input.scalar_type() == at::kFloat && is_16_bit(args.grad_output.scalar_type()));
  if (present(args.grad_sum)) check_like("grad_sum", *args.grad_sum, input);
  const auto shape = statistics_shape(input, args.normalized_shape);
  if (needs_mean(args.options)) {
    TORCH_CHECK(present(args.mean),
                "Expected mean to be a tensor, but got None; only RMSNorm has none, and a backward from "
                "the output");
    check_statistic("mean", *args.mean, input, shape);
  }
  check_statistic("rstd", args.rstd, input, shape);
}

void check_images(const Tensor& input, const optional<Tensor>& residual, const optional<Tensor>& weight,
                  const optional<Tensor>& bias, bool adaptive) {
  const auto sizes = input.sym_sizes();
  TORCH_CHECK(sizes.size() >= 2, "Expected input of shape [N, C, *], but got input of size", sizes);
  const Names names = adaptive ? Names("scale", "shift") : kNames;
  for (const auto& [name, parameter] : {std::pair(names.first, &weight), std::pair(names.second, &bias)}) {
    if (!present(*parameter)) continue;
    const auto shape = (*parameter)->sym_sizes();
    bool fits = shape.size() == 1 || shape.size() == 2 || shape.size() == sizes.size();
    for (size_t d = 0; fits && d < shape.size(); ++d) {
      const bool is_channels = d == 1 || shape.size() == 1;
      fits = is_channels ? are_equal({shape[d]}, {sizes[1]}) : broadcasts_to(shape[d], sizes[d]);
    }
    TORCH_CHECK(fits, "Expected ", name, " of shape [C], [N, C] or [N, C, *], with C = ", sizes[1],
                " and each other size equal to the input's or 1, but got ", name, " of shape ", shape,
                " and input of shape ", sizes);
  }
  if (present(weight) && present(bias) && weight->dim() > 1 && bias->dim() > 1) {
    check_groups(input, *weight, *bias, [](int64_t d) { return d != 1; }, names);
  }
  check_types(input, weight, bias, names);
  check_residual(residual, input);
}

void check_modulation(const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& scale,
                      const optional<Tensor>& shift) {
  check_forward(input, {}, normalized_shape, {}, {});
  const auto batch_dims = input.dim() - static_cast<int64_t>(normalized_shape.size());
  SymIntArrayRef groups;  // the batch sizes of the scale, without ones at the end
  for (const auto& [name, parameter] : {std::pair("scale", &scale), std::pair("shift", &shift)}) {
    if (!present(*parameter)) continue;
    const auto sizes = (*parameter)->sym_sizes();
    const auto own_dims = static_cast<int64_t>(sizes.size()) - static_cast<int64_t>(normalized_shape.size());
    bool fits = own_dims >= 0 && own_dims <= batch_dims && are_equal(sizes.slice(own_dims), normalized_shape);
    for (int64_t d = 0; fits && d < own_dims; ++d) fits = broadcasts_to(sizes[d], input.sym_size(d));
    TORCH_CHECK(fits, "Expected ", name, " of shape [*batch, ", c10::Join(", ", normalized_shape),
                "], where batch are the input's ", "first batch sizes or 1, but got ", name, " of shape ", sizes,
                " and input of shape ", input.sym_sizes());
    check_parameter_type(name, input, *parameter);
    auto own = sizes.slice(0, own_dims);
    while (!own.empty() && is_one(own.back())) own = own.slice(0, own.size() - 1);
    TORCH_CHECK(groups.empty() || own.empty() || are_equal(groups, own),
                "Expected scale and shift to have the same batch sizes, but got scale of shape ", scale->sym_sizes(),
                ", shift of shape ", sizes, " and input of shape ", input.sym_sizes());
    groups = own;
  }
}

optional<Tensor> insert_batch_dims(const optional<Tensor>& parameter, const Tensor& input,
                                   SymIntArrayRef normalized_shape) {
  const auto count = static_cast<int64_t>(normalized_shape.size());
  if (!present(parameter) || parameter->dim() == count) return parameter;
  Tensor result = *parameter;
  while (result.dim() < input.dim()) result = result.unsqueeze(-1 - count);
  return result;
}

namespace {

// Whether a tensor has memory that its sizes and strides describe; wrappers of torch.func and symbolic sizes do not.
bool has_memory(const Tensor& t) {
  return t.has_storage() && !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         !t.key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
}

void check_allocated(const char* name, const Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet without_data({DispatchKey::Meta, DispatchKey::Python, DispatchKey::Functionalize});
  if (!has_memory(tensor) || tensor.key_set().has_any(without_data)) return;
  TORCH_CHECK(tensor.unsafeGetTensorImpl()->storage_initialized(),
              "The tensor has a non-zero number of elements, but its data is not allocated yet: ", name, " of shape ",
              tensor.sizes(), " has a freed storage");
}
void check_allocated(const char* name, const optional<Tensor>& tensor) {
  if (present(tensor)) check_allocated(name, *tensor);
}

}  // namespace

void check_in_place(const ForwardArgs& args) {
  const Tensor& residual = *args.residual;
  TORCH_CHECK(!residual.is_inference() || c10::InferenceMode::is_enabled(),
              "Inplace update to inference tensor outside InferenceMode is not allowed: residual of shape ",
              residual.sym_sizes(), " is an inference tensor. Clone it to get a normal tensor");
  if (!has_memory(residual)) return;
  at::assert_no_internal_overlap(residual);
  const auto check = [&](const Tensor& t) {
    if (has_memory(t)) at::assert_no_overlap(residual, t);
  };
  check(args.input);
  if (present(args.weight)) check(*args.weight);
  if (present(args.bias)) check(*args.bias);
}

void check_allocated(const ForwardArgs& args) {
  check_allocated("input", args.input);
  check_allocated("residual", args.residual);
  check_allocated("weight", args.weight);
  check_allocated("bias", args.bias);
}

void check_allocated(const BackwardArgs& args) {
  check_allocated("grad_output", args.grad_output);
  check_allocated("input", args.input);
  check_allocated("mean", args.mean);
  check_allocated("rstd", args.rstd);
  check_allocated("weight", args.weight);
  if (args.options.memory_efficient) check_allocated("bias", args.bias);  // else only its shape and dtype count
  check_allocated("grad_sum", args.grad_sum);
}

Dtype dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return Dtype::kFloat64;
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kHalf:
      return Dtype::kFloat16;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    default:
      TORCH_INTERNAL_ASSERT(false, "the checks have let through ", type);
  }
}

void no_kernel_for(const Params& p) {
  TORCH_INTERNAL_ASSERT(false, "no kernel for dtypes ", static_cast<int>(p.dtype), ", ", static_cast<int>(p.sum_dtype),
                        ", ", static_cast<int>(p.param_dtype));
}

// ---- geometry -------------------------------------------------------------------------------------------------------

namespace {

// The stride of dimensions [begin, end) for which `selected` holds, seen as one dimension; nothing if there is no such
// stride. Dimensions of size 1 do not count; without others, the stride is `otherwise`.
template <class F>
optional<int64_t> joint_stride(const Tensor& t, int64_t begin, int64_t end, int64_t otherwise, const F& selected) {
  int64_t stride = otherwise, expected = -1;
  for (int64_t d = end - 1; d >= begin; --d) {
    if (!selected(d) || t.size(d) == 1) continue;
    if (expected < 0) {
      stride = t.stride(d);
    } else if (t.stride(d) != expected) {
      return std::nullopt;
    }
    expected = t.stride(d) * t.size(d);
  }
  return stride;
}

// A tensor of the caller or a copy. Borrowing takes a small call less time than counting a reference.
using MaybeOwned = c10::MaybeOwned<Tensor>;

// How the tensors of a call are seen as [groups, rows, cols].
//
// The batch dimensions in which a parameter has the input's size are groups, the others are rows. If all rows share the
// parameters, groups and rows are outer and inner batch dimensions, divided so that the input need not be copied.
class Geometry {
 public:
  // `output` has the layout of all outputs.
  Geometry(const Tensor& output, const Tensor& input, int64_t normalized_dims, const optional<Tensor>& weight,
           const optional<Tensor>& bias)
      : output_(output), batch_dims_(input.dim() - normalized_dims), is_group_(batch_dims_, false) {
    const auto sizes = input.sizes();
    for (int64_t d = batch_dims_; d < input.dim(); ++d) cols *= sizes[d];
    const bool has_groups = has_all_dims(weight, input) || has_all_dims(bias, input);
    is_plain_ = !has_groups && input.is_contiguous() && output.is_contiguous();
    if (is_plain_) {
      for (int64_t d = 0; d < batch_dims_; ++d) rows *= sizes[d];
      return;
    }
    for (const auto* parameter : {&weight, &bias}) {
      if (!has_all_dims(*parameter, input)) continue;
      for (int64_t d = 0; d < batch_dims_; ++d) is_group_[d] = is_group_[d] || (*parameter)->size(d) != 1;
    }
    const bool grouped = std::find(is_group_.begin(), is_group_.end(), true) != is_group_.end();
    channels_first = joint_stride(output, batch_dims_, output.dim(), 1, [](int64_t) { return true; }) != 1;
    if (!grouped && !divide([&] { return fits(output) && fits(input); })) divide([&] { return fits(output); });
    for (int64_t d = 0; d < batch_dims_; ++d) (is_group_[d] ? groups : rows) *= sizes[d];
  }

  // Whether the kernels can use the strides of a tensor.
  bool fits(const Tensor& t) const {
    if (is_plain_ && t.is_contiguous()) return true;
    const View strides = view(t, nullptr);
    return strides.group_stride >= 0 && strides.row_stride >= 0 &&
           (channels_first ? strides.col_stride >= 0 && strides.row_stride == 1 : strides.col_stride == 1);
  }

  // A tensor that fits: the given one, or a copy in the layout of the output.
  MaybeOwned fit(const Tensor& t) const {
    if (!t.defined() || fits(t)) return MaybeOwned::borrowed(t);
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
            joint_stride(t, batch_dims_, t.dim(), 1, [](int64_t) { return true; }).value_or(-1)};
  }

  // The view [groups, rows, 1] of a statistic.
  View statistic_view(const Tensor& t, const void* data) const {
    if (is_plain_ && t.is_contiguous()) return {const_cast<void*>(data), 0, 1, 1};
    return view(t, data);
  }

  // The view [groups, 1, cols] of a parameter.
  View parameter_view(const Tensor& t, const void* data) const {
    if (!t.defined() || t.dim() != output_.dim()) return {const_cast<void*>(data), 0, 0, 1};
    return view(t, data);
  }
  bool fits_parameter(const Tensor& t) const {
    if (t.is_contiguous()) return true;
    const View strides = parameter_view(t, nullptr);
    return t.dim() == output_.dim() && strides.group_stride >= 0 && strides.col_stride == 1;
  }
  // The view of a contiguous gradient of a parameter.
  View gradient_view(const optional<Tensor>& parameter, void* data) const {
    const bool own = present(parameter) && parameter->dim() == output_.dim() && parameter->numel() > cols;
    return {data, own ? cols : 0, 0, 1};
  }

  int64_t groups = 1, rows = 1, cols = 1;
  bool channels_first = false;

 private:
  // Makes the first batch dimensions groups, as few as done() asks for; returns whether it ever holds.
  template <class F>
  bool divide(const F& done) {
    std::fill(is_group_.begin(), is_group_.end(), false);
    for (int64_t d = 0; d < batch_dims_ && !done(); ++d) is_group_[d] = true;
    return done();
  }

  const Tensor& output_;
  int64_t batch_dims_;
  bool is_plain_;  // one group of contiguous rows, as in nearly every call
  c10::SmallVector<bool, 5> is_group_;
};

// Allocates CPU tensors without the dispatcher, which costs a small call one percent of its time per tensor.
Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return options.device().is_cpu() ? at::cpu::empty(sizes, options) : at::empty(sizes, options);
}

// The workspace of a call, on the device of the input. The caching allocator of CUDA reuses its memory only for later
// work on the same stream, so that it may be freed when the call returns.
class Workspace final : public Allocator {
 public:
  Workspace(const Tensor& input, const LaunchScope& on) : input_(input), on_(on) {}

  void* allocate(int64_t bytes) override {
    tensor_ = layernorm::allocate({bytes}, input_.options().dtype(at::kByte));
    return on_.output(tensor_, "workspace");
  }

 private:
  const Tensor& input_;
  const LaunchScope& on_;
  Tensor tensor_;
};

// ---- forward and backward for any backend ---------------------------------------------------------------------------

// A new tensor for an output in the layout of the call, see Options::preserve_layout.
Tensor allocate_like(const Tensor& input, at::ScalarType type, bool preserve_layout) {
  const auto options = input.options().dtype(type);
  if (!preserve_layout) return allocate(input.sizes(), options.memory_format(at::MemoryFormat::Contiguous));
  if (!input.is_non_overlapping_and_dense()) return at::empty_like(input, options);
  return input.is_cpu() ? at::cpu::empty_strided(input.sizes(), input.strides(), options)
                        : at::empty_strided(input.sizes(), input.strides(), options);
}

// RMSNorm keeps the memory format channels_last, as in torch.
Tensor with_format(Tensor output, const ForwardArgs& args) {
  if (!args.options.rms || present(args.residual) || args.options.preserve_layout) return output;
  const auto format = args.input.suggest_memory_format();
  return format == at::MemoryFormat::Contiguous ? output : output.clone(format);
}

Tensor copy_to_layout(const Tensor& result, const Tensor& input) {
  return result.defined() ? at::empty_like(input, result.options()).copy_(result) : result;
}
optional<Tensor> expand_groups(const optional<Tensor>& parameter, const Tensor& input) {
  return has_all_dims(parameter, input) ? parameter->expand(input.sizes()) : parameter;
}

// Forward and backward for tensors that the kernels cannot use in place, see Geometry. Layouts that they do not have
// are made by a copy, and parameters whose groups are not adjacent dimensions are expanded.
template <Forward kForward>
ForwardOutputs forward_by_copies(ForwardArgs args) {
  if (args.options.preserve_layout) {
    args.options.preserve_layout = false;
    auto [output, sum, mean, rstd] = kForward(args);
    if (!args.in_place) sum = copy_to_layout(sum, args.input);
    return {copy_to_layout(output, args.input), sum, mean, rstd};
  }
  const auto weight = expand_groups(args.weight, args.input), bias = expand_groups(args.bias, args.input);
  return kForward(
      {args.input, args.residual, args.normalized_shape, weight, bias, args.eps, args.options, args.in_place});
}

template <Backward kBackward>
BackwardOutputs backward_by_copies(BackwardArgs args) {
  if (args.options.preserve_layout) {
    args.options.preserve_layout = false;
    auto [grad_input, grad_weight, grad_bias] = kBackward(args);
    return {copy_to_layout(grad_input, args.input), grad_weight, grad_bias};
  }
  // The kernel then computes a gradient for each row. They are not rounded before they are summed.
  const auto acc = accumulate_type(args.input);
  const ParameterTypes types(args.input, args.weight, args.bias);
  const auto in_acc = [&](const optional<Tensor>& parameter) {
    const auto expanded = expand_groups(parameter, args.input);
    return present(expanded) ? expanded->to(acc) : expanded;
  };
  auto [grad_input, grad_weight, grad_bias] =
      kBackward({args.grad_output, args.input, args.normalized_shape, args.mean, args.rstd, in_acc(args.weight),
                 in_acc(args.bias), args.output_mask, args.grad_sum, args.options});
  const auto sum_rows = [](const Tensor& gradient, const GradientType& type) {
    return gradient.defined() ? at::sum_to(gradient, type.model->sizes()).to(type.dtype) : gradient;
  };
  return {grad_input, sum_rows(grad_weight, types.weight), sum_rows(grad_bias, types.bias)};
}

// Whether a tensor may share elements with a residual that is overwritten, where torch's check cannot tell.
bool may_overlap(const Tensor& residual, const Tensor& t) {
  return t.is_alias_of(residual) && at::get_overlap_status(residual, t) == at::MemOverlapStatus::TooHard;
}
bool may_overlap(const ForwardArgs& args) {
  const auto overlaps = [&](const optional<Tensor>& t) { return present(t) && may_overlap(*args.residual, *t); };
  return may_overlap(*args.residual, args.input) || overlaps(args.weight) || overlaps(args.bias);
}

// Forward with copies of the tensors that may share elements with a residual that is overwritten.
template <Forward kForward>
ForwardOutputs forward_apart(const ForwardArgs& args) {
  const auto apart = [&](const optional<Tensor>& t) {
    return present(t) && may_overlap(*args.residual, *t) ? t->clone() : t;
  };
  return kForward({*apart(args.input), args.residual, args.normalized_shape, apart(args.weight), apart(args.bias),
                   args.eps, args.options, args.in_place});
}

// A parameter as the kernels read it; undefined if absent.
MaybeOwned kernel_parameter(const optional<Tensor>& t, at::ScalarType type, const Geometry& geometry) {
  if (!present(t)) return MaybeOwned();
  if (t->scalar_type() == type && geometry.fits_parameter(*t)) return MaybeOwned::borrowed(*t);
  return MaybeOwned::owned(t->to(type).contiguous());
}

void set_common(Params& params, const Geometry& geometry, const Options& options, const Tensor& weight,
                const Tensor& bias, const LaunchScope& on, Allocator& allocator) {
  params.groups = geometry.groups;
  params.rows = geometry.rows;
  params.cols = geometry.cols;
  params.channels_first = geometry.channels_first;
  params.weight = geometry.parameter_view(weight, on.input(weight, "weight"));
  params.bias = geometry.parameter_view(bias, on.input(bias, "bias"));
  params.rms = options.rms;
  params.zero_centered_weight = weight.defined() && options.zero_centered_weight;
  params.allocator = &allocator;
  params.stream = on.stream();
}

template <void (*kernel)(const ForwardParams&)>
ForwardOutputs forward(const ForwardArgs& args) {
  check_forward(args.input, args.residual, args.normalized_shape, args.weight, args.bias);
  const Tensor& input = args.input;
  const auto& residual = args.residual;
  check_allocated(args);
  if (args.in_place) {
    check_in_place(args);
    if (may_overlap(args)) return forward_apart<forward<kernel>>(args);
  }
  const LaunchScope on(input);
  const auto normalized_dims = static_cast<int64_t>(args.normalized_shape.size());
  Tensor output = allocate_like(input, input.scalar_type(), args.options.preserve_layout), sum, mean;
  at::DimVector shape(input.sizes().slice(0, input.dim() - normalized_dims));
  shape.resize(input.dim(), 1);
  const auto statistics_options =
      input.options().dtype(accumulate_type(input)).memory_format(at::MemoryFormat::Contiguous);
  if (!args.options.rms) mean = allocate(shape, statistics_options);
  Tensor rstd = allocate(shape, statistics_options);
  const Geometry geometry(output, input, normalized_dims, args.weight, args.bias);
  const bool empty = input.numel() == 0;  // its strides mean nothing
  if (!empty && !(geometry.fits(output) && geometry.fits(rstd))) {
    return forward_by_copies<forward<kernel>>(args);
  }
  if (present(residual)) {
    const bool reuse = args.in_place && residual->strides() == output.strides();
    sum = reuse ? *residual : allocate_like(input, residual->scalar_type(), args.options.preserve_layout);
  }
  if (empty) {
    if (mean.defined()) mean.zero_();
    return {with_format(output, args), sum, mean, rstd.zero_()};
  }

  const auto parameter_type = ParameterTypes(present(residual) ? *residual : input, args.weight, args.bias).kernel;
  const auto x = geometry.fit(input), weight = kernel_parameter(args.weight, parameter_type, geometry);
  const auto bias = kernel_parameter(args.bias, parameter_type, geometry);
  Workspace workspace(input, on);
  ForwardParams params;
  set_common(params, geometry, args.options, *weight, *bias, on, workspace);
  params.input = geometry.view(*x, on.input(*x, "input"));
  MaybeOwned added;
  if (present(residual)) {
    added = geometry.fit(*residual);
    params.sum = geometry.view(sum, sum.is_same(*added) ? on.in_out(sum, "residual") : on.output(sum, "sum"));
    params.residual = sum.is_same(*added) ? params.sum : geometry.view(*added, on.input(*added, "residual"));
  }
  params.eps = args.eps;
  params.output = geometry.view(output, on.output(output, "output"));
  params.mean = geometry.statistic_view(mean, on.output(mean, "mean"));
  params.rstd = geometry.statistic_view(rstd, on.output(rstd, "rstd"));
  params.dtype = dtype_of(input.scalar_type());
  params.sum_dtype = present(residual) ? dtype_of(residual->scalar_type()) : params.dtype;
  params.param_dtype = dtype_of(parameter_type);
  kernel(params);
  if (args.in_place && !sum.is_same(*residual)) sum = residual->copy_(sum);
  return {with_format(std::move(output), args), std::move(sum), std::move(mean), std::move(rstd)};
}

template <void (*kernel)(const BackwardParams&)>
BackwardOutputs backward(const BackwardArgs& args) {
  check_backward(args);
  check_allocated(args);
  const Tensor& input = args.input;
  const LaunchScope on(input);
  const auto [wants_input, wants_weight, wants_bias] = args.output_mask;
  const auto normalized_dims = static_cast<int64_t>(args.normalized_shape.size());
  const auto options = input.options().memory_format(at::MemoryFormat::Contiguous);
  const ParameterTypes types(args.input, args.weight, args.bias);
  // Has the layout of grad_input; the input itself may serve if that is not wanted. Elements of the input may share
  // memory, but copies with this layout are written.
  const bool allocates =
      wants_input || !(args.options.preserve_layout ? input.is_non_overlapping_and_dense() : input.is_contiguous());
  const Tensor grad = allocates ? allocate_like(input, input.scalar_type(), args.options.preserve_layout) : input;
  const Geometry geometry(grad, input, normalized_dims, args.weight, args.bias);
  const bool empty = input.numel() == 0;
  if (!empty && !(geometry.fits(grad) && geometry.fits(args.rstd.contiguous()))) {
    return backward_by_copies<backward<kernel>>(args);
  }
  const auto parameter_gradient = [&](const GradientType& type) {
    const auto sizes = present(type.model) ? type.model->sizes() : input.sizes().slice(input.dim() - normalized_dims);
    return empty ? at::zeros(sizes, options.dtype(type.dtype)) : allocate(sizes, options.dtype(types.kernel));
  };
  Tensor grad_input, grad_weight, grad_bias;
  if (wants_input) grad_input = grad;
  if (wants_weight) grad_weight = parameter_gradient(types.weight);
  if (wants_bias) grad_bias = parameter_gradient(types.bias);
  if (empty || !(wants_input || wants_weight || wants_bias)) return {grad_input, grad_weight, grad_bias};

  const auto statistic = [&](const Tensor& t) {
    return geometry.fits(t) ? MaybeOwned::borrowed(t) : MaybeOwned::owned(t.contiguous());
  };
  const auto dy = geometry.fit(args.grad_output), x = geometry.fit(input);
  const auto dsum = wants_input && present(args.grad_sum) ? geometry.fit(*args.grad_sum) : MaybeOwned();
  const auto weight = kernel_parameter(args.weight, types.kernel, geometry);
  const auto bias = args.options.memory_efficient ? kernel_parameter(args.bias, types.kernel, geometry) : MaybeOwned();
  const auto mean = needs_mean(args.options) ? statistic(*args.mean) : MaybeOwned(), rstd = statistic(args.rstd);
  Workspace workspace(input, on);
  BackwardParams params;
  set_common(params, geometry, args.options, *weight, *bias, on, workspace);
  params.grad_output = geometry.view(*dy, on.input(*dy, "grad_output"));
  params.input = geometry.view(*x, on.input(*x, "input"));
  params.grad_sum = geometry.view(*dsum, on.input(*dsum, "grad_sum"));
  params.mean = geometry.statistic_view(*mean, on.input(*mean, "mean"));
  params.rstd = geometry.statistic_view(*rstd, on.input(*rstd, "rstd"));
  params.grad_input = geometry.view(grad_input, on.output(grad_input, "grad_input"));
  params.grad_weight = geometry.gradient_view(types.weight.model, on.output(grad_weight, "grad_weight"));
  params.grad_bias = geometry.gradient_view(types.bias.model, on.output(grad_bias, "grad_bias"));
  params.from_output = args.options.memory_efficient;
  params.dtype = dtype_of(args.grad_output.scalar_type());
  params.sum_dtype = dtype_of(input.scalar_type());
  params.param_dtype = dtype_of(types.kernel);
  kernel(params);
  const auto cast = [](const Tensor& t, const GradientType& type) {
    return t.defined() && t.scalar_type() != type.dtype ? t.to(type.dtype) : t;  // to() costs a small call 0.2 us
  };
  return {grad_input, cast(grad_weight, types.weight), cast(grad_bias, types.bias)};
}

// ---- meta functions -------------------------------------------------------------------------------------------------

Tensor empty_like(const Tensor& input, at::ScalarType type, bool preserve_layout) {
  const auto options = input.options().dtype(type);
  return preserve_layout ? at::empty_like(input, options) : at::empty_symint(input.sym_sizes(), options);
}

ForwardOutputs forward_meta(const ForwardArgs& args) {
  check_forward(args.input, args.residual, args.normalized_shape, args.weight, args.bias);
  if (args.in_place) check_in_place(args);
  const Tensor& input = args.input;
  const auto options = input.options().dtype(accumulate_type(input));
  const auto shape = statistics_shape(input, args.normalized_shape);
  const bool preserve_layout = args.options.preserve_layout;
  ForwardOutputs outputs;
  outputs.output = with_format(empty_like(input, input.scalar_type(), preserve_layout), args);
  if (present(args.residual)) {
    outputs.sum = args.in_place ? *args.residual : empty_like(input, args.residual->scalar_type(), preserve_layout);
  }
  if (!args.options.rms) outputs.mean = at::empty_symint(shape, options);
  outputs.rstd = at::empty_symint(shape, options);
  return outputs;
}

BackwardOutputs backward_meta(const BackwardArgs& args) {
  check_backward(args);
  const Tensor& input = args.input;
  const ParameterTypes types(args.input, args.weight, args.bias);
  const auto gradient = [&](const GradientType& type) {
    return at::empty_symint(type.sizes(args.normalized_shape), input.options().dtype(type.dtype));
  };
  const auto [wants_input, wants_weight, wants_bias] = args.output_mask;
  return {wants_input ? empty_like(input, input.scalar_type(), args.options.preserve_layout) : Tensor(),
          wants_weight ? gradient(types.weight) : Tensor(), wants_bias ? gradient(types.bias) : Tensor()};
}

// ---- tensors with the negative bit ----------------------------------------------------------------------------------

// torch's own fallback requires that an operator returns the tensor that it changes.
ForwardOutputs forward_negative(const ForwardArgs& args) {
  const auto resolve = [](const optional<Tensor>& t) { return present(t) ? t->resolve_neg() : t; };
  const auto residual = resolve(args.residual);
  ForwardOutputs outputs =
      call_forward({args.input.resolve_neg(), residual, args.normalized_shape, resolve(args.weight), resolve(args.bias),
                    args.eps, args.options, args.in_place});
  if (args.in_place && !residual->is_same(*args.residual)) outputs.sum = args.residual->copy_(outputs.sum);
  return outputs;
}

// ---- the dispatcher -------------------------------------------------------------------------------------------------

// The handle of an operator, whose signature is that of Operator::call.
template <class Operator>
auto find(const char* name, const char* overload) {
  const auto full_name = std::string(kOperatorNamespace) + "::" + name;
  return c10::Dispatcher::singleton().findSchemaOrThrow(full_name.c_str(), overload).typed<decltype(Operator::call)>();
}

}  // namespace

ForwardOutputs call_forward(const ForwardArgs& args) {
  const auto call = [&](const auto& op, const auto&... residual) {
    const auto& [rms, zero_centered_weight, memory_efficient, preserve_layout] = args.options;
    return op.call(args.input, residual..., args.normalized_shape, args.weight, args.bias, args.eps, rms,
                   zero_centered_weight, memory_efficient, preserve_layout);
  };
  if (args.in_place) {
    static const auto op = find<ForwardOperator<nullptr, true, const Tensor&>>("forward_", "residual");
    auto [output, mean, rstd] = call(op, *args.residual);
    return {std::move(output), *args.residual, std::move(mean), std::move(rstd)};
  }
  if (present(args.residual)) {
    static const auto op = find<ForwardOperator<nullptr, false, const Tensor&>>("forward", "residual");
    auto [output, sum, mean, rstd] = call(op, *args.residual);
    return {std::move(output), std::move(sum), std::move(mean), std::move(rstd)};
  }
  static const auto op = find<ForwardOperator<nullptr, false>>("forward", "");
  auto [output, mean, rstd] = call(op);
  return {std::move(output), Tensor(), std::move(mean), std::move(rstd)};
}

BackwardOutputs call_backward(const BackwardArgs& args) {
  static const auto op = find<BackwardOperator<nullptr>>("backward", "");
  const auto& [rms, zero_centered_weight, memory_efficient, preserve_layout] = args.options;
  return op.call(args.grad_output, args.input, args.normalized_shape, args.mean, args.rstd, args.weight, args.bias,
                 args.output_mask, args.grad_sum, rms, zero_centered_weight, memory_efficient, preserve_layout);
}

// ---- registration ---------------------------------------------------------------------------------------------------

#define OPTIONS \
  "bool rms=False, bool zero_centered_weight=False, bool memory_efficient=False, bool preserve_layout=False"

// The first positional arguments are aten's. All tensors are positional because DTensor does not redistribute others.
void Operators::define(torch::Library& m) {
  const auto define = [&](const char* schema) { m.def(schema, {at::Tag::pt2_compliant_tag}); };
  define(
      "forward(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
      "*, " OPTIONS ") -> (Tensor output, Tensor mean, Tensor rstd)");
  define(
      "forward.residual(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05, *, " OPTIONS ") -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)");
  define(
      "forward_.residual(Tensor input, Tensor(a!) residual, SymInt[] normalized_shape, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05, *, " OPTIONS ") -> (Tensor output, Tensor mean, Tensor rstd)");
  define(
      "backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? mean, Tensor rstd, "
      "Tensor? weight, Tensor? bias, bool[3] output_mask, Tensor? grad_sum=None, *, " OPTIONS
      ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  // The checks of forward, for graphs of aten operators. Compilers decompose them into nothing.
  define(
      "check_forward(Tensor input, Tensor? residual, SymInt[] normalized_shape, Tensor? weight, Tensor? bias) -> ()");
  // It returns the input, because TorchScript removes calls without results.
  define(
      "check_images(Tensor(a) input, Tensor? residual, Tensor? weight, Tensor? bias, bool adaptive=False) -> "
      "Tensor(a)");
  define("check_modulation(Tensor(a) input, SymInt[] normalized_shape, Tensor? scale, Tensor? shift) -> Tensor(a)");
}

void Operators::implement_cpu(torch::Library& m) { implement<forward<cpu::forward>, backward<cpu::backward>>(m); }

#if defined(WITH_CUDA)
void Operators::implement_cuda(torch::Library& m) { implement<forward<cuda::forward>, backward<cuda::backward>>(m); }
#endif

void Operators::implement_meta(torch::Library& m) { implement<forward_meta, backward_meta>(m); }

// The other operators have torch's fallback.
void Operators::implement_negative(torch::Library& m) {
  using Operator = ForwardOperator<forward_negative, true, const Tensor&>;
  m.impl("forward_.residual", TORCH_FN(Operator::call));
}

void Operators::implement_composite(torch::Library& m) {
  m.impl("check_forward", TORCH_FN(check_forward));
  m.impl("check_images", [](const Tensor& input, const optional<Tensor>& residual, const optional<Tensor>& weight,
                            const optional<Tensor>& bias, bool adaptive) {
    check_images(input, residual, weight, bias, adaptive);
    return input;
  });
  m.impl("check_modulation", [](const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& scale,
                                const optional<Tensor>& shift) {
    check_modulation(input, normalized_shape, scale, shift);
    return input;
  });
}

}  // namespace layernorm
