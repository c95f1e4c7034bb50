// The operators as C++ functions, and what their host code, derivatives and bindings share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

namespace layernorm {

using at::Tensor;
using c10::SymIntArrayRef;
using std::optional;

// The options of all operators.
struct Options {
  bool rms = false;                   // RMSNorm
  bool zero_centered_weight = false;  // the weight is `weight` + 1
  bool memory_efficient = false;      // backward gets forward's output instead of its input
  bool preserve_layout = false;  // output and gradients have the strides of a dense input; else they are contiguous
};

// The arguments of forward, forward.residual (if there is a residual) and forward_.residual (if in_place, too).
struct ForwardArgs {
  const Tensor& input;
  const optional<Tensor>& residual;
  SymIntArrayRef normalized_shape;
  const optional<Tensor>& weight;
  const optional<Tensor>& bias;
  double eps;
  Options options;
  bool in_place = false;
};
// The sum is undefined without a residual, and is the residual if in_place. RMSNorm has no mean.
struct ForwardOutputs {
  Tensor output, sum, mean, rstd;
};

// The arguments of backward. With a residual, `input` is the sum and grad_sum its upstream gradient.
struct BackwardArgs {
  const Tensor& grad_output;
  const Tensor& input;
  SymIntArrayRef normalized_shape;
  const optional<Tensor>& mean;
  const Tensor& rstd;
  const optional<Tensor>& weight;
  const optional<Tensor>& bias;
  std::array<bool, 3> output_mask;
  const optional<Tensor>& grad_sum;
  Options options;
};
struct BackwardOutputs {
  Tensor grad_input, grad_weight, grad_bias;
};

// Call the operators through the dispatcher.
ForwardOutputs call_forward(const ForwardArgs& args);
BackwardOutputs call_backward(const BackwardArgs& args);
// The same for images [N, C, *] and normalized_shape {C}, without the cost of moving the channels by views.
ForwardOutputs forward_images(const ForwardArgs& args);

// Registers an implementation of all operators for one dispatch key.
using Forward = ForwardOutputs (*)(const ForwardArgs&);
using Backward = BackwardOutputs (*)(const BackwardArgs&);
template <Forward kForward, Backward kBackward>
void implement(torch::Library& m) {
  using Outputs = std::tuple<Tensor, Tensor, Tensor>;
  m.impl("forward",
         [](const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& weight,
            const optional<Tensor>& bias, double eps, bool rms, bool zero_centered_weight, bool memory_efficient,
            bool preserve_layout) -> Outputs {
           const Options options = {rms, zero_centered_weight, memory_efficient, preserve_layout};
           auto [output, sum, mean, rstd] = kForward({input, {}, normalized_shape, weight, bias, eps, options});
           return {std::move(output), std::move(mean), std::move(rstd)};
         });
  m.impl(
      "forward.residual",
      [](const Tensor& input, const Tensor& residual, SymIntArrayRef normalized_shape, const optional<Tensor>& weight,
         const optional<Tensor>& bias, double eps, bool rms, bool zero_centered_weight, bool memory_efficient,
         bool preserve_layout) -> std::tuple<Tensor, Tensor, Tensor, Tensor> {
        const Options options = {rms, zero_centered_weight, memory_efficient, preserve_layout};
        auto [output, sum, mean, rstd] = kForward({input, residual, normalized_shape, weight, bias, eps, options});
        return {std::move(output), std::move(sum), std::move(mean), std::move(rstd)};
      });
  m.impl("forward_.residual",
         [](const Tensor& input, const Tensor& residual, SymIntArrayRef normalized_shape,
            const optional<Tensor>& weight, const optional<Tensor>& bias, double eps, bool rms,
            bool zero_centered_weight, bool memory_efficient, bool preserve_layout) -> Outputs {
           const Options options = {rms, zero_centered_weight, memory_efficient, preserve_layout};
           auto [output, sum, mean, rstd] =
               kForward({input, residual, normalized_shape, weight, bias, eps, options, /*in_place=*/true});
           return {std::move(output), std::move(mean), std::move(rstd)};
         });
  m.impl("backward",
         [](const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape,
            const optional<Tensor>& mean, const Tensor& rstd, const optional<Tensor>& weight,
            const optional<Tensor>& bias, std::array<bool, 3> output_mask, const optional<Tensor>& grad_sum, bool rms,
            bool zero_centered_weight, bool memory_efficient, bool preserve_layout) -> Outputs {
           const Options options = {rms, zero_centered_weight, memory_efficient, preserve_layout};
           auto [grad_input, grad_weight, grad_bias] = kBackward(
               {grad_output, input, normalized_shape, mean, rstd, weight, bias, output_mask, grad_sum, options});
           return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
         });
}

// Each function fills the library of one dispatch key; registration.cpp calls them all.
struct Operators {
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

// Throw an error that names the argument and both values if the kernels cannot use these arguments.
void check_forward(const ForwardArgs& args);
void check_backward(const BackwardArgs& args);
// The same for a forward pass over the channels of images [N, C, *], before the channels are moved last. An adaptive
// norm calls its parameters scale and shift.
void check_images(const Tensor& input, const optional<Tensor>& residual, const optional<Tensor>& weight,
                  const optional<Tensor>& bias, bool adaptive);
// The same for scale and shift of ada_layer_norm: [*batch, *normalized_shape], see insert_batch_dims().
void check_modulation(const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& scale,
                      const optional<Tensor>& shift);
// Inserts the batch dimensions that a scale or shift lacks after those that it has: [B, N] becomes [B, 1, N] for an
// input [B, S, N]. One that all rows share stays as it is.
optional<Tensor> insert_batch_dims(const optional<Tensor>& parameter, const Tensor& input,
                                   SymIntArrayRef normalized_shape);

inline bool present(const optional<Tensor>& t) { return t && t->defined(); }

inline bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
inline bool has_tangent(const optional<Tensor>& t) { return t && has_tangent(*t); }
inline bool requires_grad(const Tensor& t) { return t.defined() && t.requires_grad(); }
inline bool requires_grad(const optional<Tensor>& t) { return t && requires_grad(*t); }

// Whether backward needs the means of the rows.
inline bool needs_mean(const Options& options) { return !options.rms && !options.memory_efficient; }

// The dtype of statistics and sums: double for double input, else float.
inline at::ScalarType accumulate_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The parameter whose shape and dtype the gradient of `parameter` has: itself, or the other one if it is absent.
inline const optional<Tensor>& gradient_model(const optional<Tensor>& parameter, const optional<Tensor>& other) {
  return present(parameter) ? parameter : other;
}
inline SymIntArrayRef gradient_sizes(const optional<Tensor>& model, SymIntArrayRef normalized_shape) {
  return present(model) ? model->sym_sizes() : normalized_shape;
}

// The dtypes of the parameters and of their gradients, for the input or, with a residual, its sum. Kernels exist for
// parameters of the input's dtype and of the accumulation type; other parameters, or two of different dtypes, are
// converted to the accumulation type, and their gradients back to their own dtype. An absent parameter takes the dtype
// of the other one, or else of the input.
struct ParameterTypes {
  ParameterTypes(const Tensor& input, const optional<Tensor>& weight_, const optional<Tensor>& bias_)
      : weight(type_of(gradient_model(weight_, bias_), input)),
        bias(type_of(gradient_model(bias_, weight_), input)),
        kernel(weight == bias && weight == input.scalar_type() ? weight : accumulate_type(input)) {}

  at::ScalarType weight, bias;
  at::ScalarType kernel;  // in which the kernels read the parameters and write their gradients

 private:
  static at::ScalarType type_of(const optional<Tensor>& model, const Tensor& input) {
    return (present(model) ? *model : input).scalar_type();
  }
};

}  // namespace layernorm
