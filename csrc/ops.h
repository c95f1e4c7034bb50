// The operators as C++ functions: their arguments, calls and registration.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "layer_norm.h"

namespace layernorm {

using at::Tensor;
using c10::SymIntArrayRef;
using std::optional;

inline bool present(const optional<Tensor>& t) { return t && t->defined(); }

// The options of all operators.
struct Options {
  bool rms = false;                   // RMSNorm
  bool zero_centered_weight = false;  // the weight is `weight` + 1
  bool memory_efficient = false;      // backward gets forward's output instead of its input
  bool preserve_layout = false;  // output and gradients have the strides of a dense input; else they are contiguous
  int64_t activation = 0;        // an Activation
  bool gate_first = false;       // see Params

  bool is_gated_norm() const { return activation != 0; }
};

inline const optional<Tensor> kAbsent;

// The arguments of all overloads of forward.
struct ForwardArgs {
  const Tensor& input;
  SymIntArrayRef normalized_shape;
  const optional<Tensor>& weight;
  const optional<Tensor>& bias;
  double eps;
  Options options;
  const optional<Tensor>& residual = kAbsent;
  const optional<Tensor>& gate = kAbsent;
  bool in_place = false;  // the sum overwrites the residual
};
// The sum is undefined without a residual, and is the residual if in_place. RMSNorm has no mean.
struct ForwardOutputs {
  Tensor output, sum, mean, rstd;
};

// The arguments of all overloads of backward. With a residual, `input` is the sum and grad_sum its upstream gradient. A
// gate beside the residual multiplied gated_input.
struct BackwardArgs {
  const Tensor& grad_output;
  const Tensor& input;
  SymIntArrayRef normalized_shape;
  const optional<Tensor>& mean;
  const Tensor& rstd;
  const optional<Tensor>& weight;
  const optional<Tensor>& bias;
  std::array<bool, 5> output_mask;  // in the order of BackwardOutputs
  const optional<Tensor>& grad_sum;
  Options options;
  const optional<Tensor>& gate = kAbsent;
  const optional<Tensor>& gated_input = kAbsent;
};
struct BackwardOutputs {
  Tensor grad_input, grad_weight, grad_bias, grad_gated_input, grad_gate;
};

// Call the operators through the dispatcher.
ForwardOutputs call_forward(const ForwardArgs& args);
BackwardOutputs call_backward(const BackwardArgs& args);
// The same for images [N, C, *] and normalized_shape {C}, without a residual, and without the cost of moving the
// channels by views.
ForwardOutputs forward_images(const ForwardArgs& args);

using ForwardFunction = ForwardOutputs (*)(const ForwardArgs&);
using BackwardFunction = BackwardOutputs (*)(const BackwardArgs&);

// Calls `function` with f(t) in place of each tensor t of `args`.
template <class Function, class F>
ForwardOutputs call_with(const Function& function, const ForwardArgs& args, const F& f) {
  const auto replace = [&](const optional<Tensor>& t) { return present(t) ? optional<Tensor>(f(*t)) : std::nullopt; };
  const Tensor input = f(args.input);
  const auto weight = replace(args.weight), bias = replace(args.bias);
  const auto residual = replace(args.residual), gate = replace(args.gate);
  return function({input, args.normalized_shape, weight, bias, args.eps, args.options, residual, gate, args.in_place});
}

// The names of activations, as the operators spell them; none for kNone.
using ActivationName = optional<std::string_view>;
ActivationName activation_name(int64_t activation);
// Throws an error that names the argument if there is no such activation.
int64_t parse_activation(const ActivationName& name, const Tensor& input);

// The functions of the overloads of forward for a dispatch key.
template <ForwardFunction kForward>
struct ForwardOperator {
  static std::tuple<Tensor, Tensor, Tensor> call(const Tensor& input, SymIntArrayRef normalized_shape,
                                                 const optional<Tensor>& weight, const optional<Tensor>& bias,
                                                 double eps, bool rms, bool zero_centered_weight, bool memory_efficient,
                                                 bool preserve_layout) {
    const Options options = {rms, zero_centered_weight, memory_efficient, preserve_layout};
    auto [output, sum, mean, rstd] = kForward({input, normalized_shape, weight, bias, eps, options});
    return {std::move(output), std::move(mean), std::move(rstd)};
  }
};
template <ForwardFunction kForward>
struct FusedForwardOperator {
  static std::tuple<Tensor, Tensor, Tensor, Tensor> call(const Tensor& input, SymIntArrayRef normalized_shape,
                                                         const optional<Tensor>& weight, const optional<Tensor>& bias,
                                                         double eps, const optional<Tensor>& residual,
                                                         const optional<Tensor>& gate, bool rms,
                                                         bool zero_centered_weight, bool memory_efficient,
                                                         bool preserve_layout, const ActivationName& activation,
                                                         bool gate_first) {
    const Options options = {
        rms, zero_centered_weight, memory_efficient, preserve_layout, parse_activation(activation, input), gate_first};
    auto [output, sum, mean, rstd] = kForward({input, normalized_shape, weight, bias, eps, options, residual, gate});
    return {std::move(output), std::move(sum), std::move(mean), std::move(rstd)};
  }
};
template <ForwardFunction kForward>
struct InPlaceForwardOperator {
  static std::tuple<Tensor, Tensor, Tensor> call(const Tensor& input, SymIntArrayRef normalized_shape,
                                                 const optional<Tensor>& weight, const optional<Tensor>& bias,
                                                 double eps, const Tensor& residual, const optional<Tensor>& gate,
                                                 bool rms, bool zero_centered_weight, bool memory_efficient,
                                                 bool preserve_layout) {
    TORCH_CHECK(residual.defined(), "Expected residual to be a tensor, but got None for input of shape ",
                input.sym_sizes());
    const Options options = {rms, zero_centered_weight, memory_efficient, preserve_layout};
    auto [output, sum, mean, rstd] =
        kForward({input, normalized_shape, weight, bias, eps, options, residual, gate, /*in_place=*/true});
    return {std::move(output), std::move(mean), std::move(rstd)};
  }
};

// The functions of the overloads of backward for a dispatch key.
template <BackwardFunction kBackward>
struct BackwardOperator {
  static std::tuple<Tensor, Tensor, Tensor> call(const Tensor& grad_output, const Tensor& input,
                                                 SymIntArrayRef normalized_shape, const optional<Tensor>& mean,
                                                 const Tensor& rstd, const optional<Tensor>& weight,
                                                 const optional<Tensor>& bias, std::array<bool, 3> output_mask,
                                                 const optional<Tensor>& grad_sum, bool rms, bool zero_centered_weight,
                                                 bool memory_efficient, bool preserve_layout) {
    const Options options = {rms, zero_centered_weight, memory_efficient, preserve_layout};
    const auto [input_wanted, weight_wanted, bias_wanted] = output_mask;
    auto grads = kBackward({grad_output,
                            input,
                            normalized_shape,
                            mean,
                            rstd,
                            weight,
                            bias,
                            {input_wanted, weight_wanted, bias_wanted},
                            grad_sum,
                            options});
    return {std::move(grads.grad_input), std::move(grads.grad_weight), std::move(grads.grad_bias)};
  }
};
template <BackwardFunction kBackward>
struct FusedBackwardOperator {
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> call(
      const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& mean,
      const Tensor& rstd, const optional<Tensor>& weight, const optional<Tensor>& bias, std::array<bool, 5> output_mask,
      const optional<Tensor>& grad_sum, const optional<Tensor>& gate, const optional<Tensor>& gated_input, bool rms,
      bool zero_centered_weight, bool memory_efficient, bool preserve_layout, const ActivationName& activation,
      bool gate_first) {
    const Options options = {
        rms, zero_centered_weight, memory_efficient, preserve_layout, parse_activation(activation, input), gate_first};
    auto grads = kBackward({grad_output, input, normalized_shape, mean, rstd, weight, bias, output_mask, grad_sum,
                            options, gate, gated_input});
    return {std::move(grads.grad_input), std::move(grads.grad_weight), std::move(grads.grad_bias),
            std::move(grads.grad_gated_input), std::move(grads.grad_gate)};
  }
};

// Registers an implementation of all operators for one dispatch key.
template <ForwardFunction kForward, BackwardFunction kBackward>
void implement(torch::Library& m) {
  m.impl("forward", TORCH_FN(ForwardOperator<kForward>::call));
  m.impl("forward.fused", TORCH_FN(FusedForwardOperator<kForward>::call));
  m.impl("forward_.fused", TORCH_FN(InPlaceForwardOperator<kForward>::call));
  m.impl("backward", TORCH_FN(BackwardOperator<kBackward>::call));
  m.impl("backward.fused", TORCH_FN(FusedBackwardOperator<kBackward>::call));
}

// Each function fills the library of one dispatch key; registration.cpp calls them all.
struct Operators {
  static void define(torch::Library& m);
  static void implement_cpu(torch::Library& m);
  static void implement_cuda(torch::Library& m);  // only in a build with CUDA
  static void implement_meta(torch::Library& m);
  static void implement_negative(torch::Library& m);
  static void implement_functionalize(torch::Library& m);
  static void implement_any_backend(torch::Library& m);
  static void implement_batched(torch::Library& m);
  static void implement_autograd(torch::Library& m);
  static void implement_vmap(torch::Library& m);
  static void implement_composite(torch::Library& m);
};

// The namespace under which the operators are registered.
extern const char* const kOperatorNamespace;

// Whether backward needs the values of the bias: for xhat, or for the gradient of a gate that multiplies the output.
inline bool needs_bias(const Options& options) {
  return options.memory_efficient || (options.is_gated_norm() && !options.gate_first);
}

// Whether backward needs the means of the rows.
inline bool needs_mean(const Options& options) { return !options.rms && !options.memory_efficient; }

}  // namespace layernorm
