#include "checks.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "shapes.h"

namespace layernorm {

namespace {

// Whether sizes are equal. While torch.compile traces, a size may be known only at run time, for example one from a
// numpy integer; then the compiled program checks it.
bool are_equal(const c10::SymInt& a, const c10::SymInt& b) { return a.sym_eq(b).expect_true(__FILE__, __LINE__); }
bool are_equal(SymIntArrayRef a, SymIntArrayRef b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& size, const auto& other) { return are_equal(size, other); });
}

// Whether a batch size of a parameter is 1 or the input's. One expression, because a size that is known only at run
// time may turn out to be either.
bool broadcasts_to(const c10::SymInt& size, const c10::SymInt& input_size) {
  return size.sym_eq(1).sym_or(size.sym_eq(input_size)).expect_true(__FILE__, __LINE__);
}

// A parameter (weight, bias or input_scale) that is present.
struct NamedParameter {
  std::string_view name;  // in error messages, see public_name()
  const Tensor& tensor;
};
using NamedParameters = c10::SmallVector<NamedParameter, 3>;

// Whether torch's functions have a parameter of this name. Messages about it begin as torch's do. A zero-centered
// weight has another name, see public_name().
bool is_torch_name(std::string_view name) { return name == "weight" || name == "bias"; }

// Requires a parameter to have one of the shapes that shapes.h describes.
void check_parameter_shape(const NamedParameter& parameter, const Tensor& input, SymIntArrayRef normalized_shape,
                           const Options& options) {
  const auto& [name, tensor] = parameter;
  const auto shape = tensor.sym_sizes(), sizes = input.sym_sizes();
  if (options.images) {
    bool fits = shape.size() == 1 || shape.size() == 2 || shape.size() == sizes.size();
    for (size_t d = 0; fits && d < shape.size(); ++d) {
      const bool is_channels = d == 1 || shape.size() == 1;
      fits = is_channels ? are_equal(shape[d], sizes[1])
             : d == 0    ? broadcasts_to(shape[d], sizes[d])
                         : are_equal(shape[d], 1);
    }
    TORCH_CHECK(fits, "Expected ", name, " of shape [C], [N, C] or [N, C, 1, ...], with C = ", sizes[1],
                " and N = ", sizes[0], " or 1, but got ", name, " of shape ", shape, " and input of shape ", sizes);
    return;
  }
  const size_t batch_dims = shape.size() - std::min(normalized_shape.size(), shape.size());
  bool fits = shape.size() <= sizes.size() && are_equal(shape.slice(batch_dims), normalized_shape);
  for (size_t d = 0; fits && d < batch_dims; ++d) fits = broadcasts_to(shape[d], sizes[d]);
  if (fits) return;
  TORCH_CHECK(!is_torch_name(name), "Expected ", name, " to be of same shape as normalized_shape, but got ", name,
              " of shape ", shape, " and normalized_shape = ", normalized_shape, "; or of shape [*batch, ",
              c10::Join(", ", normalized_shape), "], where batch are the first batch sizes or 1 of input of shape ",
              sizes);
  TORCH_CHECK(false, "Expected ", name, " of shape [*batch, ", c10::Join(", ", normalized_shape),
              "], where batch are the input's first batch sizes or 1, but got ", name, " of shape ", shape,
              " and input of shape ", sizes);
}

// Requires any two parameters to have the same batch sizes, unless one of them is shared by all rows.
void check_batch_sizes(const Tensor& input, const NamedParameters& parameters, int64_t normalized_dims,
                       const Options& options) {
  const auto has_batch_dims = [&](const Tensor& t) { return t.dim() > normalized_dims; };
  // The size of a parameter in dimension d of the input, or 1 if the parameter lacks it.
  const auto size = [&](const Tensor& t, int64_t d) {
    return options.images || d < t.dim() - normalized_dims ? t.sym_size(d) : c10::SymInt(1);
  };
  const int64_t end = options.images ? 1 : input.dim() - normalized_dims;
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (size_t k = i + 1; k < parameters.size(); ++k) {
      const auto &first = parameters[i], &second = parameters[k];
      if (!has_batch_dims(first.tensor) || !has_batch_dims(second.tensor)) continue;
      c10::SymBool equal = true, first_is_shared = true, second_is_shared = true;
      for (int64_t d = 0; d < end; ++d) {
        const auto a = size(first.tensor, d), b = size(second.tensor, d);
        equal = equal.sym_and(a.sym_eq(b));
        first_is_shared = first_is_shared.sym_and(a.sym_eq(1));
        second_is_shared = second_is_shared.sym_and(b.sym_eq(1));
      }
      TORCH_CHECK(equal.sym_or(first_is_shared).sym_or(second_is_shared).expect_true(__FILE__, __LINE__), "Expected ",
                  first.name, " and ", second.name, " to have the same batch sizes, but got ", first.name, " of shape ",
                  first.tensor.sym_sizes(), ", ", second.name, " of shape ", second.tensor.sym_sizes(),
                  " and input of shape ", input.sym_sizes());
    }
  }
}

bool is_supported(at::ScalarType type) {
  return type == at::kDouble || type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

void check_input_type(const Tensor& input) {
  if (is_supported(input.scalar_type())) return;
  const auto message =
      c10::str("Expected input of dtype Double, Float, Half or BFloat16, but got input of dtype ", input.scalar_type());
  // For a meta tensor, FakeTensorMode would understand a NotImplementedError as the lack of a meta function.
  TORCH_CHECK(!input.is_meta(), message);
  TORCH_CHECK_NOT_IMPLEMENTED(false, message);
}

void check_device(std::string_view name, const Tensor& tensor, const Tensor& input) {
  TORCH_CHECK(tensor.device() == input.device(), "Expected ", name, " to be on the device of input, but got ", name,
              " on ", tensor.device(), " and input on ", input.device());
}

void check_parameter_type(std::string_view name, const Tensor& input, const Tensor& parameter) {
  TORCH_CHECK(is_supported(parameter.scalar_type()), "Expected ", name,
              " of dtype Double, Float, Half or BFloat16, but got ", name, " of dtype ", parameter.scalar_type());
  check_device(name, parameter, input);
}

bool is_16_bit(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// Requires the shape and device of another argument, `like`, and also its dtype unless any_dtype.
void check_like(const char* name, const Tensor& tensor, const Tensor& like, bool any_dtype = false,
                const char* like_name = "input") {
  TORCH_CHECK(are_equal(tensor.sym_sizes(), like.sym_sizes()), "Expected ", name, " to be of the shape of ", like_name,
              ", but got ", name, " of shape ", tensor.sym_sizes(), " and ", like_name, " of shape ", like.sym_sizes());
  TORCH_CHECK(tensor.scalar_type() == like.scalar_type() || any_dtype, "Expected ", name, " to be of the dtype of ",
              like_name, ", but got ", name, " of dtype ", tensor.scalar_type(), " and ", like_name, " of dtype ",
              like.scalar_type());
  check_device(name, tensor, like);
}

void check_residual(const OptionalTensorRef& residual, const Tensor& input) {
  if (!residual) return;
  const bool is_wider = is_16_bit(input.scalar_type()) && residual->scalar_type() == at::kFloat;
  check_like("residual", *residual, input, /*any_dtype=*/is_wider);
}

// Refuses combinations of tensors and options that no kernel has. `residual`, called residual_name, is the residual of
// forward or the grad_sum of backward.
template <class Args>
void check_combination(const Args& args, const char* residual_name, const OptionalTensorRef& residual) {
  const Options& options = args.options;
  const auto refuse = [&](const char* tensor, const OptionalTensorRef& t, const char* option) {
    TORCH_CHECK(!t, "Expected ", tensor, " to be None with ", option, ", but got ", tensor, " of shape ",
                t->sym_sizes(), " and input of shape ", args.input->sym_sizes());
  };
  const auto refuse_residual = [&](const char* option) {
    refuse(residual_name, residual, option);
    refuse("input_scale (gate)", args.input_scale, option);
  };
  if (args.gate) refuse_residual("a gate");
  if (options.has_groups()) refuse_residual("num_groups other than 1");
  for (const auto& [is_set, option] :
       {std::pair(options.images, "images=True"), std::pair(options.memory_efficient, "memory_efficient=True")}) {
    if (!is_set) continue;
    refuse_residual(option);
    refuse("gate", args.gate, option);
  }
  TORCH_CHECK(!options.memory_efficient || !options.rms,
              "Expected memory_efficient=False with rms=True, but got True for input of shape ",
              args.input->sym_sizes());
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

std::string_view public_name(std::string_view name, const Options& options) {
  if (name == "input_scale") return "input_scale (gate)";
  if (options.zero_centered_weight && name == "weight") return "weight (scale)";
  if (options.zero_centered_weight && name == "bias") return "bias (shift)";
  return name;
}

void check_layout(std::string_view name, const Tensor& tensor) {
  const bool nested = tensor.is_nested(), quantized = tensor.is_quantized();  // their layout may be Strided
  if (!nested && !quantized && tensor.layout() == at::kStrided) return;
  TORCH_CHECK_NOT_IMPLEMENTED(false, "Expected ", name, " to be a strided tensor, but got ",
                              nested      ? "a nested tensor"
                              : quantized ? "a quantized tensor"
                                          : c10::str(name, " of layout ", tensor.layout()));
}

namespace {

template <class Args>
void check_all_layouts(const Args& args) {
  for_each_tensor(args, [&](const char* name, const Tensor& t) { check_layout(public_name(name, args.options), t); });
}

}  // namespace

void check_layouts(const ForwardArgs& args) { check_all_layouts(args); }
void check_layouts(const BackwardArgs& args) { check_all_layouts(args); }

namespace {

// Checks the arguments that forward and backward share.
template <class Args>
void check_norm(const Args& args) {
  const Tensor& input = args.input;
  const SymIntArrayRef normalized_shape = args.normalized_shape;
  const Options& options = args.options;
  const auto sizes = input.sym_sizes();
  const size_t count = normalized_shape.size();
  TORCH_CHECK(!options.images || sizes.size() >= 2, "Expected input of shape [N, C, *], but got input of size", sizes);
  TORCH_CHECK(!normalized_shape.empty(),
              "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element, but got "
              "normalized_shape = ",
              normalized_shape);
  NamedParameters parameters;
  for_each_parameter(args, [&](const char* name, const OptionalTensorRef& parameter) {
    if (parameter) parameters.push_back({public_name(name, options), *parameter});
  });
  // Like torch's functions, checks a weight and a bias without batch dimensions before the input, with torch's errors.
  const auto precedes_input = [&](const NamedParameter& parameter) {
    return !options.images && is_torch_name(parameter.name) && parameter.tensor.dim() <= static_cast<int64_t>(count);
  };
  for (const auto& parameter : parameters) {
    TORCH_CHECK(!precedes_input(parameter) || are_equal(parameter.tensor.sym_sizes(), normalized_shape), "Expected ",
                parameter.name, " to be of same shape as normalized_shape, but got ", parameter.name, " of shape ",
                parameter.tensor.sym_sizes(), " and normalized_shape = ", normalized_shape);
  }
  if (options.images) {
    TORCH_CHECK(count == 1 && are_equal(sizes[1], normalized_shape[0]), "Given normalized_shape=", normalized_shape,
                ", expected input with shape [N, ", c10::Join(", ", normalized_shape), ", *], but got input of size",
                sizes);
  } else {
    TORCH_CHECK(sizes.size() >= count && are_equal(sizes.slice(sizes.size() - count), normalized_shape),
                "Given normalized_shape=", normalized_shape, ", expected input with shape [*, ",
                c10::Join(", ", normalized_shape), "], but got input of size", sizes);
  }
  for (const auto& parameter : parameters) {
    if (!precedes_input(parameter)) check_parameter_shape(parameter, input, normalized_shape, options);
  }
  check_batch_sizes(input, parameters, static_cast<int64_t>(count), options);
  check_input_type(input);
  for (const auto& [name, tensor] : parameters) check_parameter_type(name, input, tensor);
  if (args.gate) {
    check_parameter_type("gate", input, *args.gate);
    check_like("gate", *args.gate, input, /*any_dtype=*/true);
  }
  const c10::SymInt groups = options.groups();
  TORCH_CHECK(groups >= 1 && (groups == 1 || (count == 1 && are_equal(normalized_shape[0] % groups, 0))),
              "Expected num_groups to divide the only dimension of normalized_shape, but got num_groups = ", groups,
              ", normalized_shape = ", normalized_shape, " and input of shape ", sizes);
  TORCH_CHECK(groups == 1 || !options.images, "Expected num_groups to be 1 for images, but got num_groups = ", groups,
              " and input of shape ", sizes);
}

}  // namespace

void check_forward(const ForwardArgs& args) {
  const Tensor& input = args.input;
  check_norm(args);
  check_residual(args.residual, input);
  check_combination(args, "residual", args.residual);
  TORCH_CHECK(
      !args.input_scale || args.residual,
      "Expected residual to be a tensor with input_scale (gate), but got None with input_scale (gate) of shape ",
      args.input_scale->sym_sizes(), " and input of shape ", input.sym_sizes());
}

void check_backward(const BackwardArgs& args) {
  const Tensor& input = args.input;
  check_norm(args);
  // If forward added a float32 residual, the input is the sum, and grad_output may have 16 bits.
  const bool may_have_residual = !args.gate && !args.options.images && !args.options.memory_efficient;
  const bool is_narrower = input.scalar_type() == at::kFloat && is_16_bit(args.grad_output->scalar_type());
  check_like("grad_output", args.grad_output, input, /*any_dtype=*/may_have_residual && is_narrower);
  check_combination(args, "grad_sum", args.grad_sum);
  const auto& scaled_input = args.scaled_input;
  TORCH_CHECK(!scaled_input || args.input_scale,
              "Expected scaled_input to be None without an input_scale, but got scaled_input of shape ",
              scaled_input->sym_sizes(), " with input_scale = None and input of shape ", input.sym_sizes());
  if (args.grad_sum) check_like("grad_sum", *args.grad_sum, input);
  TORCH_CHECK(!args.input_scale || scaled_input || !args.output_mask.input_scale,
              "Expected scaled_input to be a tensor where the gradient of input_scale is wanted, but got None with "
              "input_scale of shape ",
              args.input_scale->sym_sizes(), " and input of shape ", input.sym_sizes());
  if (scaled_input) check_like("scaled_input", *scaled_input, args.grad_output, /*any_dtype=*/false, "grad_output");
  const auto normalized_dims = static_cast<int64_t>(args.normalized_shape.size());
  const auto shape = statistics_shape<c10::SymDimVector>(input.sym_sizes(), normalized_dims, args.options);
  TORCH_CHECK(args.mean || !needs_mean(args.options),
              "Expected mean to be a tensor, but got None; only RMSNorm has none, and a backward from "
              "the output");
  if (args.mean) check_statistic("mean", *args.mean, input, shape);
  check_statistic("rstd", args.rstd, input, shape);
}

namespace {

// Whether the sizes and strides of a tensor are integers that describe its memory, so that overlaps can be computed.
bool has_memory(const Tensor& t) {
  return t.has_storage() && !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         !t.key_set().has_any(
             c10::DispatchKeySet({c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched}));
}

}  // namespace

void check_allocated(const Tensor& tensor, std::string_view name) {
  using c10::DispatchKey;
  const auto keys = tensor.key_set();
  if (keys.has(DispatchKey::FuncTorchGradWrapper) || keys.has(DispatchKey::FuncTorchBatched)) {
    return call_check_allocated(tensor, name);  // which calls this function again, with the tensor in the wrapper
  }
  if (!has_memory(tensor) || tensor.is_meta() || keys.has(DispatchKey::Python) ||
      keys.has(DispatchKey::Functionalize) || keys.has(DispatchKey::ZeroTensor)) {
    return;  // such tensors need no storage
  }
  TORCH_CHECK(tensor.unsafeGetTensorImpl()->storage_initialized(),
              "The tensor has a non-zero number of elements, but its data is not allocated yet: ", name, " of shape ",
              tensor.sizes(), " has a freed storage");
}

namespace {

// Whether a tensor must be given to check_allocated(). This test is fast, and false for ordinary tensors.
bool may_lack_data(const Tensor& t) { return !t.has_storage() || !t.unsafeGetTensorImpl()->storage_initialized(); }

}  // namespace

void check_inplace(const ForwardArgs& args) {
  const Tensor& residual = *args.residual;
  TORCH_CHECK(!residual.is_inference() || c10::InferenceMode::is_enabled(),
              "Inplace update to inference tensor outside InferenceMode is not allowed: residual of shape ",
              residual.sym_sizes(), " is an inference tensor. Clone it to get a normal tensor");
  if (!has_memory(residual)) return;
  at::assert_no_internal_overlap(residual);
  for_each_tensor(args, [&](const char*, const Tensor& t) {
    if (&t != &residual && has_memory(t)) at::assert_no_overlap(residual, t);
  });
}

void check_allocated(const ForwardArgs& args) {
  for_each_tensor(args, [&](const char* name, const Tensor& t) {
    if (may_lack_data(t)) check_allocated(t, public_name(name, args.options));
  });
}

void check_allocated(const BackwardArgs& args) {
  // A bias of which only the shape and dtype are needed may have been freed.
  const Tensor* const unread = args.bias && !needs_bias(args) ? &*args.bias : nullptr;
  for_each_tensor(args, [&](const char* name, const Tensor& t) {
    if (&t != unread && may_lack_data(t)) check_allocated(t, public_name(name, args.options));
  });
}

}  // namespace layernorm
