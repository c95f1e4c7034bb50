// The operators as C++ functions, and the helpers that their host code, derivatives and bindings share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

namespace layernorm {

using at::Tensor;
using Outputs = std::tuple<Tensor, Tensor, Tensor>;
using NormOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Mask = std::array<bool, 3>;

// The options of the family of norms, besides a residual.
struct Variant {
  bool rms = false;                   // RMSNorm
  bool zero_centered_weight = false;  // the weight is `weight` + 1
  bool memory_efficient = false;      // backward is given forward's output instead of its input
};

// Calls an operator through the dispatcher: `forward` and `backward` if they suffice, else norm_forward, norm_forward_
// and norm_backward. Forward returns (output, sum, mean, rstd): the sum is undefined without a residual and is the
// residual if in_place; RMSNorm has no mean. Backward returns (grad_input, grad_weight, grad_bias).
NormOutputs call_norm_forward(const Tensor& input, const std::optional<Tensor>& residual,
                              c10::SymIntArrayRef normalized_shape, const std::optional<Tensor>& weight,
                              const std::optional<Tensor>& bias, double eps, Variant variant, bool in_place);
Outputs call_norm_backward(const Tensor& grad_output, const std::optional<Tensor>& grad_sum, const Tensor& input,
                           c10::SymIntArrayRef normalized_shape, const std::optional<Tensor>& mean, const Tensor& rstd,
                           const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, Mask output_mask,
                           Variant variant);

// Calls channels_first_forward through the dispatcher and returns (output, mean, rstd) of images [N, C, *].
Outputs call_forward_of_images(const Tensor& input, const std::optional<Tensor>& weight,
                               const std::optional<Tensor>& bias, double eps);

// The operators for one dispatch key, implemented by two functions with the signatures of call_norm_forward and
// call_norm_backward.
template <decltype(call_norm_forward) kForward, decltype(call_norm_backward) kBackward>
struct Family {
  using OptionalTensor = std::optional<Tensor>;

  static Outputs without_sum(NormOutputs outputs) {
    auto& [output, sum, mean, rstd] = outputs;
    return {std::move(output), std::move(mean), std::move(rstd)};
  }

  static Outputs forward(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                         const OptionalTensor& bias, double eps) {
    return without_sum(kForward(input, {}, normalized_shape, weight, bias, eps, {}, false));
  }
  static NormOutputs norm_forward(const Tensor& input, const OptionalTensor& residual,
                                  c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                  const OptionalTensor& bias, double eps, bool rms, bool zero_centered_weight,
                                  bool memory_efficient) {
    return kForward(input, residual, normalized_shape, weight, bias, eps, {rms, zero_centered_weight, memory_efficient},
                    false);
  }
  static Outputs norm_forward_in_place(const Tensor& input, const Tensor& residual,
                                       c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                       const OptionalTensor& bias, double eps, bool rms, bool zero_centered_weight) {
    return without_sum(
        kForward(input, residual, normalized_shape, weight, bias, eps, {rms, zero_centered_weight, false}, true));
  }
  static Outputs backward(const Tensor& grad_output, const Tensor& input, c10::SymIntArrayRef normalized_shape,
                          const Tensor& mean, const Tensor& rstd, const OptionalTensor& weight,
                          const OptionalTensor& bias, Mask output_mask) {
    return kBackward(grad_output, {}, input, normalized_shape, mean, rstd, weight, bias, output_mask, {});
  }
  static Outputs norm_backward(const Tensor& grad_output, const OptionalTensor& grad_sum, const Tensor& input,
                               c10::SymIntArrayRef normalized_shape, const OptionalTensor& mean, const Tensor& rstd,
                               const OptionalTensor& weight, const OptionalTensor& bias, Mask output_mask, bool rms,
                               bool zero_centered_weight, bool memory_efficient) {
    return kBackward(grad_output, grad_sum, input, normalized_shape, mean, rstd, weight, bias, output_mask,
                     {rms, zero_centered_weight, memory_efficient});
  }

  static void implement(torch::Library& m) {
    m.impl("forward", &forward);
    m.impl("norm_forward", &norm_forward);
    m.impl("norm_forward_", &norm_forward_in_place);
    m.impl("backward", &backward);
    m.impl("norm_backward", &norm_backward);
  }
};

// Throw an error that names the argument and both values if the kernels cannot use these arguments.
void check_forward(const Tensor& input, const std::optional<Tensor>& residual, c10::SymIntArrayRef normalized_shape,
                   const std::optional<Tensor>& weight, const std::optional<Tensor>& bias);
void check_backward(const Tensor& grad_output, const std::optional<Tensor>& grad_sum, const Tensor& input,
                    c10::SymIntArrayRef normalized_shape, const std::optional<Tensor>& mean, const Tensor& rstd,
                    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, Variant variant);

// The same for images [N, C, *].
void check_images(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias);

// Parts of these checks. check_like() requires the shape, dtype and device of the input.
void check_types(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias);
void check_like(const char* name, const Tensor& tensor, const Tensor& input);
void check_statistic(const char* name, const Tensor& statistic, const Tensor& input, c10::SymIntArrayRef shape);

// The kernels' name of a dtype that has passed the checks.
enum class Dtype;
Dtype dtype_of(at::ScalarType type);

// Each function fills the library of one dispatch key; registration.cpp calls them all.
struct RowOperators {
  static void define(torch::Library& m);
  static void implement_cpu(torch::Library& m);
  static void implement_cuda(torch::Library& m);  // only in a build with CUDA
  static void implement_meta(torch::Library& m);
  static void implement_autograd(torch::Library& m);
  static void implement_vmap(torch::Library& m);
  static void implement_composite(torch::Library& m);
};
struct ImageOperators {
  static void define(torch::Library& m);
  static void implement_cpu(torch::Library& m);
  static void implement_cuda(torch::Library& m);  // only in a build with CUDA
  static void implement_meta(torch::Library& m);
  static void implement_autograd(torch::Library& m);
  static void implement_vmap(torch::Library& m);
  static void implement_composite(torch::Library& m);
};

// The namespace under which the operators are registered.
extern const char* const kOperatorNamespace;

// Looks up an operator of that namespace by its plain name, such as "forward".
template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  const auto full_name = std::string(kOperatorNamespace) + "::" + name;
  return c10::Dispatcher::singleton().findSchemaOrThrow(full_name.c_str(), "").typed<Signature>();
}

inline bool present(const std::optional<Tensor>& t) { return t && t->defined(); }

// A parameter as the kernels read it: contiguous and of ParameterTypes::kernel; undefined if absent.
inline Tensor parameter(const std::optional<Tensor>& t, at::ScalarType type) {
  if (!present(t)) return Tensor();
  return t->scalar_type() == type ? t->contiguous() : t->to(type).contiguous();
}

// A parameter's gradient in the dtype of the parameter; undefined if not wanted.
inline Tensor cast(Tensor gradient, at::ScalarType type) {
  if (gradient.defined() && gradient.scalar_type() != type) gradient = gradient.to(type);
  return gradient;
}

inline bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
inline bool has_tangent(const std::optional<Tensor>& t) { return t && has_tangent(*t); }
inline bool requires_grad(const Tensor& t) { return t.defined() && t.requires_grad(); }
inline bool requires_grad(const std::optional<Tensor>& t) { return t && requires_grad(*t); }

// Whether a call is part of forward-mode AD or of a torch.func transform (grad, vjp, jvp), whose tensors a C++ node
// cannot save.
template <class... Tensors>
bool is_transformed(const Tensors&... tensors) {
  return (has_tangent(tensors) || ...) ||
         c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}
// Whether a call is recorded in the autograd graph.
template <class... Tensors>
bool wants_graph(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (requires_grad(tensors) || ...);
}

// Whether backward needs the means of the rows.
inline bool needs_mean(Variant variant) { return !variant.rms && !variant.memory_efficient; }

// The dtype of statistics and sums: double for double input, else float.
inline at::ScalarType accumulate_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The dtypes of the parameters and of their gradients. Kernels exist for parameters of the input's dtype and of the
// accumulation type; other parameters, or two of different dtypes, are converted to the accumulation type, and their
// gradients back to their own dtype. An absent parameter takes the dtype of the other one, or else of the input.
struct ParameterTypes {
  ParameterTypes(const Tensor& input, const std::optional<Tensor>& weight_, const std::optional<Tensor>& bias_)
      : weight(first_type(weight_, bias_, input)),
        bias(first_type(bias_, weight_, input)),
        kernel(weight == bias && weight == input.scalar_type() ? weight : accumulate_type(input)) {}

  at::ScalarType weight, bias;
  at::ScalarType kernel;  // in which the kernels read the parameters and write their gradients

 private:
  static at::ScalarType first_type(const std::optional<Tensor>& parameter, const std::optional<Tensor>& other,
                                   const Tensor& input) {
    return (present(parameter) ? *parameter : present(other) ? *other : input).scalar_type();
  }
};

// Whether backward needs the bias to know the dtype of its gradient.
inline bool has_own_type(const Tensor& bias, const Tensor& weight) {
  return bias.defined() && !(weight.defined() && weight.scalar_type() == bias.scalar_type());
}

}  // namespace layernorm
