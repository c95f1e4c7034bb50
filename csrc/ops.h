// The operators as C++ functions: their arguments, calls and registration.
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

inline bool present(const optional<Tensor>& t) { return t && t->defined(); }

// The options of all operators.
struct Options {
  bool rms = false;                   // RMSNorm
  bool zero_centered_weight = false;  // the weight is `weight` + 1
  bool memory_efficient = false;      // backward gets forward's output instead of its input
  bool preserve_layout = false;  // output and gradients have the strides of a dense input; else they are contiguous
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
  bool in_place = false;  // the sum overwrites the residual
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
using BackwardOutputs = std::tuple<Tensor, Tensor, Tensor>;  // grad_input, grad_weight, grad_bias

// Call the operators through the dispatcher.
ForwardOutputs call_forward(const ForwardArgs& args);
BackwardOutputs call_backward(const BackwardArgs& args);
// The same for images [N, C, *] and normalized_shape {C}, without the cost of moving the channels by views.
ForwardOutputs forward_images(const ForwardArgs& args);

using ForwardFunction = ForwardOutputs (*)(const ForwardArgs&);
using BackwardFunction = BackwardOutputs (*)(const BackwardArgs&);

// Calls `function` with f(t) in place of each tensor t of `args`.
template <class Function, class F>
ForwardOutputs call_with(const Function& function, const ForwardArgs& args, const F& f) {
  const auto replace = [&](const optional<Tensor>& t) { return present(t) ? optional<Tensor>(f(*t)) : std::nullopt; };
  const Tensor input = f(args.input);
  const auto weight = replace(args.weight), bias = replace(args.bias), residual = replace(args.residual);
  return function({input, args.normalized_shape, weight, bias, args.eps, args.options, residual, args.in_place});
}

// The function of `forward` for a dispatch key; of forward.fused if Residual is an optional tensor; or of
// forward_.fused if it is a tensor.
template <ForwardFunction kForward, class... Residual>
struct ForwardOperator {
  static constexpr bool kInPlace = (std::is_same_v<Residual, const Tensor&> || ...);
  using Outputs = std::conditional_t<sizeof...(Residual) == 1 && !kInPlace, std::tuple<Tensor, Tensor, Tensor, Tensor>,
                                     std::tuple<Tensor, Tensor, Tensor>>;

  static Outputs call(const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& weight,
                      const optional<Tensor>& bias, double eps, Residual... residual, bool rms,
                      bool zero_centered_weight, bool memory_efficient, bool preserve_layout) {
    const Options options = {rms, zero_centered_weight, memory_efficient, preserve_layout};
    auto [output, sum, mean, rstd] =
        kForward({input, normalized_shape, weight, bias, eps, options, optional<Tensor>(residual...), kInPlace});
    if constexpr (std::tuple_size_v<Outputs> == 4) {
      return {std::move(output), std::move(sum), std::move(mean), std::move(rstd)};
    } else {
      return {std::move(output), std::move(mean), std::move(rstd)};
    }
  }
};

// The function of `backward` for a dispatch key.
template <BackwardFunction kBackward>
struct BackwardOperator {
  static BackwardOutputs call(const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape,
                              const optional<Tensor>& mean, const Tensor& rstd, const optional<Tensor>& weight,
                              const optional<Tensor>& bias, std::array<bool, 3> output_mask,
                              const optional<Tensor>& grad_sum, bool rms, bool zero_centered_weight,
                              bool memory_efficient, bool preserve_layout) {
    const Options options = {rms, zero_centered_weight, memory_efficient, preserve_layout};
    return kBackward({grad_output, input, normalized_shape, mean, rstd, weight, bias, output_mask, grad_sum, options});
  }
};

// Registers an implementation of all operators for one dispatch key.
template <ForwardFunction kForward, BackwardFunction kBackward>
void implement(torch::Library& m) {
  using Norm = ForwardOperator<kForward>;
  using Fused = ForwardOperator<kForward, const optional<Tensor>&>;
  using FusedInPlace = ForwardOperator<kForward, const Tensor&>;
  m.impl("forward", TORCH_FN(Norm::call));
  m.impl("forward.fused", TORCH_FN(Fused::call));
  m.impl("forward_.fused", TORCH_FN(FusedInPlace::call));
  m.impl("backward", TORCH_FN(BackwardOperator<kBackward>::call));
}

// Each function fills the library of one dispatch key; registration.cpp calls them all.
struct Operators {
  static void define(torch::Library& m);
  static void define_family(torch::Library& m);  // called by define()
  static void implement_cpu(torch::Library& m);
  static void implement_cuda(torch::Library& m);  // only in a build with CUDA
  static void implement_meta(torch::Library& m);
  static void implement_negative(torch::Library& m);
  static void implement_any_backend(torch::Library& m);
  static void implement_batched(torch::Library& m);
  static void implement_autograd(torch::Library& m);
  static void implement_vmap(torch::Library& m);
  static void implement_composite(torch::Library& m);
};

// The namespace under which the operators are registered.
extern const char* const kOperatorNamespace;

// Whether backward needs the means of the rows.
inline bool needs_mean(const Options& options) { return !options.rms && !options.memory_efficient; }

}  // namespace layernorm
