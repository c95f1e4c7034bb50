#include "checks.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>

#include "types.h"

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

void check_parameter_shape(const char* name, const Tensor& input, SymIntArrayRef normalized_shape,
                           const Tensor& parameter) {
  if (are_equal(parameter.sym_sizes(), normalized_shape)) return;
  const bool may_have_batch_dims = parameter.dim() > static_cast<int64_t>(normalized_shape.size());
  TORCH_CHECK(may_have_batch_dims && parameter.dim() == input.dim(), "Expected ", name,
              " to be of same shape as normalized_shape, but got ", name, " of shape ", parameter.sym_sizes(),
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

// The parameters of a call with their names in error messages; null if absent.
struct NamedParameter {
  const char* name;
  const Tensor* tensor;
};
using NamedParameters = std::array<NamedParameter, 3>;
NamedParameters parameters(const optional<Tensor>& weight, const optional<Tensor>& bias, const optional<Tensor>& gate,
                           bool adaptive = false) {
  const auto get = [](const optional<Tensor>& t) { return present(t) ? &*t : nullptr; };
  return {
      {{adaptive ? "scale" : "weight", get(weight)}, {adaptive ? "shift" : "bias", get(bias)}, {"gate", get(gate)}}};
}

// Two parameters must have the same sizes in the batch dimensions, or one of them must be shared by all rows.
template <class F>
void check_groups(const Tensor& input, const NamedParameter& first, const NamedParameter& second,
                  const F& is_batch_dim) {
  const Tensor &weight = *first.tensor, &bias = *second.tensor;
  const auto size = [](const Tensor& t, int64_t d) { return d < t.dim() ? t.sym_size(d) : c10::SymInt(1); };
  c10::SymBool equal = true, weight_is_shared = true, bias_is_shared = true;
  for (int64_t d = 0; d < std::max(weight.dim(), bias.dim()); ++d) {
    if (!is_batch_dim(d)) continue;
    equal = equal.sym_and(size(weight, d).sym_eq(size(bias, d)));
    weight_is_shared = weight_is_shared.sym_and(size(weight, d).sym_eq(1));
    bias_is_shared = bias_is_shared.sym_and(size(bias, d).sym_eq(1));
  }
  TORCH_CHECK(equal.sym_or(weight_is_shared).sym_or(bias_is_shared).expect_true(__FILE__, __LINE__), "Expected ",
              first.name, " and ", second.name, " to have the same batch sizes, but got ", first.name, " of shape ",
              weight.sym_sizes(), ", ", second.name, " of shape ", bias.sym_sizes(), " and input of shape ",
              input.sym_sizes());
}
// The same for each pair of parameters for which may_have_groups(tensor) holds.
template <class F, class G>
void check_groups(const Tensor& input, const NamedParameters& parameters, const F& may_have_groups,
                  const G& is_batch_dim) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (size_t k = i + 1; k < parameters.size(); ++k) {
      const auto &first = parameters[i], &second = parameters[k];
      if (!first.tensor || !second.tensor) continue;
      if (may_have_groups(*first.tensor) && may_have_groups(*second.tensor)) {
        check_groups(input, first, second, is_batch_dim);
      }
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
  // A NotImplementedError would tell a fake tensor that the operator has no meta function.
  TORCH_CHECK(!input.is_meta(), message);
  TORCH_CHECK_NOT_IMPLEMENTED(false, message);
}

void check_device(const char* name, const Tensor& tensor, const Tensor& input) {
  TORCH_CHECK(tensor.device() == input.device(), "Expected ", name, " to be on the device of input, but got ", name,
              " on ", tensor.device(), " and input on ", input.device());
}

void check_parameter_type(const char* name, const Tensor& input, const Tensor& parameter) {
  TORCH_CHECK(is_supported(parameter.scalar_type()), "Expected ", name,
              " of dtype Double, Float, Half or BFloat16, but got ", name, " of dtype ", parameter.scalar_type());
  check_device(name, parameter, input);
}

void check_types(const Tensor& input, const NamedParameters& parameters) {
  check_input_type(input);
  for (const auto& [name, tensor] : parameters) {
    if (tensor) check_parameter_type(name, input, *tensor);
  }
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

// The gate of a gated norm.
void check_gate(const Tensor& input, const optional<Tensor>& gate, const Options& options) {
  const auto name = [&] { return activation_name(options.activation).value_or(""); };
  TORCH_CHECK(present(gate), "Expected gate to be a tensor with activation = \"", name(),
              "\", but got None for input of shape ", input.sym_sizes());
  check_parameter_type("gate", input, *gate);
  check_like("gate", *gate, input, /*other_type=*/true);
  TORCH_CHECK(!options.memory_efficient,
              "Expected memory_efficient=False with a gate, but got True with a gate of shape ", gate->sym_sizes(),
              " and input of shape ", input.sym_sizes());
}

void check_statistic(const char* name, const Tensor& statistic, const Tensor& input, SymIntArrayRef shape) {
  TORCH_CHECK(are_equal(statistic.sym_sizes(), shape), "Expected ", name, " of shape ", shape, ", but got ", name,
              " of shape ", statistic.sym_sizes());
  TORCH_CHECK(statistic.scalar_type() == accumulate_type(input), "Expected ", name, " of dtype ",
              accumulate_type(input), " for input of dtype ", input.scalar_type(), ", but got ", name, " of dtype ",
              statistic.scalar_type());
  check_device(name, statistic, input);
}

// Calls f(name, tensor) for each tensor of a call.
template <class F>
void for_each_tensor(const ForwardArgs& args, const F& f) {
  f("input", args.input);
  if (present(args.residual)) f("residual", *args.residual);
  if (present(args.weight)) f("weight", *args.weight);
  if (present(args.bias)) f("bias", *args.bias);
  if (present(args.gate)) f("gate", *args.gate);
}
template <class F>
void for_each_tensor(const BackwardArgs& args, const F& f) {
  f("grad_output", args.grad_output);
  f("input", args.input);
  if (present(args.mean)) f("mean", *args.mean);
  f("rstd", args.rstd);
  if (present(args.weight)) f("weight", *args.weight);
  if (present(args.bias)) f("bias", *args.bias);
  if (present(args.grad_sum)) f("grad_sum", *args.grad_sum);
  if (present(args.gate)) f("gate", *args.gate);
  if (present(args.gated_input)) f("gated_input", *args.gated_input);
}

void check_layouts(const Tensor& input, const NamedParameters& parameters) {
  check_layout("input", input);
  for (const auto& [name, tensor] : parameters) {
    if (tensor) check_layout(name, *tensor);
  }
}

}  // namespace

void check_layout(const char* name, const Tensor& tensor) {
  const bool nested = tensor.is_nested(), quantized = tensor.is_quantized();  // and of layout Strided or Jagged
  if (!nested && !quantized && tensor.layout() == at::kStrided) return;
  TORCH_CHECK_NOT_IMPLEMENTED(false, "Expected ", name, " to be a strided tensor, but got ",
                              nested      ? "a nested tensor"
                              : quantized ? "a quantized tensor"
                                          : c10::str(name, " of layout ", tensor.layout()));
}

void check_layouts(const ForwardArgs& args) { for_each_tensor(args, check_layout); }
void check_layouts(const BackwardArgs& args) { for_each_tensor(args, check_layout); }

namespace {

// Checks what forward and backward share. A gate is a parameter unless the norm is gated.
void check_norm(const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& weight,
                const optional<Tensor>& bias, const optional<Tensor>& gate, const Options& options) {
  TORCH_CHECK(!normalized_shape.empty(),
              "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element, but got "
              "normalized_shape = ",
              normalized_shape);
  const auto named = parameters(weight, bias, options.is_gated_norm() ? kAbsent : gate);
  for (const auto& [name, tensor] : named) {
    if (tensor) check_parameter_shape(name, input, normalized_shape, *tensor);
  }
  const auto sizes = input.sym_sizes();
  const size_t count = normalized_shape.size();
  TORCH_CHECK(sizes.size() >= count && are_equal(sizes.slice(sizes.size() - count), normalized_shape),
              "Given normalized_shape=", normalized_shape, ", expected input with shape [*, ",
              c10::Join(", ", normalized_shape), "], but got input of size", sizes);
  const auto may_have_groups = [&](const Tensor& t) { return t.dim() == input.dim(); };
  for (const auto& [name, tensor] : named) {
    if (tensor && may_have_groups(*tensor)) check_batch_sizes(name, input, normalized_shape, *tensor);
  }
  check_groups(input, named, may_have_groups,
               [&](int64_t d) { return d < static_cast<int64_t>(sizes.size() - count); });
  check_types(input, named);
  if (options.is_gated_norm()) check_gate(input, gate, options);
  TORCH_CHECK(options.is_gated_norm() || !options.gate_first,
              "Expected gate_first to be False without an activation, but got True with activation = None and input of "
              "shape ",
              sizes);
}

}  // namespace

void check_forward(const ForwardArgs& args) {
  const auto& [input, normalized_shape, weight, bias, eps, options, residual, gate, in_place] = args;
  check_norm(input, normalized_shape, weight, bias, gate, options);
  check_residual(residual, input);
  TORCH_CHECK(!options.memory_efficient || !present(residual) || residual->scalar_type() == input.scalar_type(),
              "Expected residual to be of the dtype of input with memory_efficient=True, but got residual of dtype ",
              residual->scalar_type(), " and input of dtype ", input.scalar_type());
  if (!present(gate)) return;
  TORCH_CHECK(present(residual) != options.is_gated_norm(), "Expected ",
              options.is_gated_norm() ? "residual to be None with an activation, but got a tensor"
                                      : "residual to be a tensor beside a gate, but got None",
              " with gate of shape ", gate->sym_sizes(), " and input of shape ", input.sym_sizes());
}

void check_arguments(const Tensor& input, const optional<Tensor>& residual, SymIntArrayRef normalized_shape,
                     const optional<Tensor>& weight, const optional<Tensor>& bias, const optional<Tensor>& gate,
                     const ActivationName& activation) {
  ForwardArgs args = {input, normalized_shape, weight, bias, /*eps=*/0, {}, residual, gate};
  check_layouts(args);
  args.options.activation = parse_activation(activation, input);
  check_forward(args);
}

namespace {

// Refuses what only a norm with a residual has, beside an activation.
void check_belongs_to_residual(const char* name, const optional<Tensor>& tensor, const BackwardArgs& args) {
  if (!args.options.is_gated_norm() || !present(tensor)) return;
  TORCH_CHECK(false, "Expected ", name, " to be None with an activation, but got ", name, " of shape ",
              tensor->sym_sizes(), " with activation = \"", *activation_name(args.options.activation),
              "\" and input of shape ", args.input.sym_sizes());
}

}  // namespace

void check_backward(const BackwardArgs& args) {
  const Tensor& input = args.input;
  check_norm(input, args.normalized_shape, args.weight, args.bias, args.gate, args.options);
  check_like(
      "grad_output", args.grad_output, input,
      !args.options.is_gated_norm() && input.scalar_type() == at::kFloat && is_16_bit(args.grad_output.scalar_type()));
  check_belongs_to_residual("grad_sum", args.grad_sum, args);
  check_belongs_to_residual("gated_input", args.gated_input, args);
  TORCH_CHECK(!present(args.gated_input) || present(args.gate),
              "Expected gated_input to be None without a gate, but got gated_input of shape ",
              args.gated_input->sym_sizes(), " with gate = None and input of shape ", input.sym_sizes());
  if (present(args.grad_sum)) check_like("grad_sum", *args.grad_sum, input);
  if (present(args.gate) && !args.options.is_gated_norm()) {
    TORCH_CHECK(present(args.gated_input) || !args.output_mask[4],
                "Expected gated_input to be a tensor where the gradient of a gate is wanted, but got None with gate of "
                "shape ",
                args.gate->sym_sizes(), " and input of shape ", input.sym_sizes());
    if (present(args.gated_input)) check_like("gated_input", *args.gated_input, args.grad_output);
  }
  const auto shape = statistics_shape(input, args.normalized_shape);
  TORCH_CHECK(present(args.mean) || !needs_mean(args.options),
              "Expected mean to be a tensor, but got None; only RMSNorm has none, and a backward from "
              "the output");
  if (present(args.mean)) check_statistic("mean", *args.mean, input, shape);
  check_statistic("rstd", args.rstd, input, shape);
}

void check_images(const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias) {
  const auto named = parameters(weight, bias, /*gate=*/kAbsent);
  check_layouts(input, named);
  const auto sizes = input.sym_sizes();
  TORCH_CHECK(sizes.size() >= 2, "Expected input of shape [N, C, *], but got input of size", sizes);
  for (const auto& [name, tensor] : named) {
    if (!tensor) continue;
    const auto shape = tensor->sym_sizes();
    bool fits = shape.size() == 1 || shape.size() == 2 || shape.size() == sizes.size();
    for (size_t d = 0; fits && d < shape.size(); ++d) {
      const bool is_channels = d == 1 || shape.size() == 1;
      fits = is_channels ? are_equal(shape[d], sizes[1]) : broadcasts_to(shape[d], sizes[d]);
    }
    TORCH_CHECK(fits, "Expected ", name, " of shape [C], [N, C] or [N, C, *], with C = ", sizes[1],
                " and each other size equal to the input's or 1, but got ", name, " of shape ", shape,
                " and input of shape ", sizes);
  }
  check_groups(input, named, [](const Tensor& t) { return t.dim() > 1; }, [](int64_t d) { return d != 1; });
  check_types(input, named);
}

void check_modulation(const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& scale,
                      const optional<Tensor>& shift, const optional<Tensor>& gate) {
  const auto named = parameters(scale, shift, gate, /*adaptive=*/true);
  check_layouts(input, named);
  check_norm(input, normalized_shape, {}, {}, {}, {});
  const auto batch_dims = input.dim() - static_cast<int64_t>(normalized_shape.size());
  SymIntArrayRef groups;  // the batch sizes of `first`, without ones at the end
  NamedParameter first = {};
  for (const auto& parameter : named) {
    const auto& [name, tensor] = parameter;
    if (!tensor) continue;
    const auto sizes = tensor->sym_sizes();
    const auto own_dims = static_cast<int64_t>(sizes.size()) - static_cast<int64_t>(normalized_shape.size());
    bool fits = own_dims >= 0 && own_dims <= batch_dims && are_equal(sizes.slice(own_dims), normalized_shape);
    for (int64_t d = 0; fits && d < own_dims; ++d) fits = broadcasts_to(sizes[d], input.sym_size(d));
    TORCH_CHECK(fits, "Expected ", name, " of shape [*batch, ", c10::Join(", ", normalized_shape),
                "], where batch are the input's ", "first batch sizes or 1, but got ", name, " of shape ", sizes,
                " and input of shape ", input.sym_sizes());
    check_parameter_type(name, input, *tensor);
    auto own = sizes.slice(0, own_dims);
    while (!own.empty() && TORCH_GUARD_OR_FALSE(own.back().sym_eq(1))) own = own.slice(0, own.size() - 1);
    if (own.empty()) continue;
    TORCH_CHECK(groups.empty() || are_equal(groups, own), "Expected ", first.name, " and ", name,
                " to have the same batch sizes, but got ", first.name, " of shape ",
                first.tensor ? first.tensor->sym_sizes() : sizes, ", ", name, " of shape ", sizes,
                " and input of shape ", input.sym_sizes());
    if (groups.empty()) first = parameter;
    groups = own;
  }
}

namespace {

// Whether a tensor has memory that its sizes and strides describe, which symbolic sizes do not.
bool has_memory(const Tensor& t) {
  return t.has_storage() && !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         !t.key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
}

}  // namespace

void check_allocated(const Tensor& tensor, std::string_view name) {
  using c10::DispatchKey;
  const auto keys = tensor.key_set();
  if (keys.has(DispatchKey::FuncTorchGradWrapper) || keys.has(DispatchKey::FuncTorchBatched)) {
    return call_check_allocated(tensor, name);
  }
  if (!has_memory(tensor) || tensor.is_meta() || keys.has(DispatchKey::Python) ||
      keys.has(DispatchKey::Functionalize) || keys.has(DispatchKey::ZeroTensor)) {
    return;  // it has no data
  }
  TORCH_CHECK(tensor.unsafeGetTensorImpl()->storage_initialized(),
              "The tensor has a non-zero number of elements, but its data is not allocated yet: ", name, " of shape ",
              tensor.sizes(), " has a freed storage");
}

void check_in_place(const ForwardArgs& args) {
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
  for_each_tensor(args, [](const char* name, const Tensor& t) { check_allocated(t, name); });
}

void check_allocated(const BackwardArgs& args) {
  // Only the shape and the dtype of other biases count.
  const Tensor* const unread = present(args.bias) && !needs_bias(args.options) ? &*args.bias : nullptr;
  for_each_tensor(args, [&](const char* name, const Tensor& t) {
    if (&t != unread) check_allocated(t, name);
  });
}

}  // namespace layernorm
