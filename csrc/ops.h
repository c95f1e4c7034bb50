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
using BackwardOutputs = std::tuple<Tensor, Tensor, Tensor>;  // grad_input, grad_weight, grad_bias

// Call the operators through the dispatcher.
ForwardOutputs call_forward(const ForwardArgs& args);
BackwardOutputs call_backward(const BackwardArgs& args);
// The same for images [N, C, *] and normalized_shape {C}, without the cost of moving the channels by views.
ForwardOutputs forward_images(const ForwardArgs& args);

using Forward = ForwardOutputs (*)(const ForwardArgs&);
using Backward = BackwardOutputs (*)(const BackwardArgs&);

// The function of `forward` for a dispatch key; of forward.residual if Residual is a tensor; or of forward_.residual.
template <Forward kForward, bool kInPlace, class... Residual>
struct ForwardOperator {
  static constexpr bool kReturnsSum = sizeof...(Residual) == 1 && !kInPlace;
  using Outputs =
      std::conditional_t<kReturnsSum, std::tuple<Tensor, Tensor, Tensor, Tensor>, std::tuple<Tensor, Tensor, Tensor>>;

  static Outputs call(const Tensor& input, Residual... residual, SymIntArrayRef normalized_shape,
                      const optional<Tensor>& weight, const optional<Tensor>& bias, double eps, bool rms,
                      bool zero_centered_weight, bool memory_efficient, bool preserve_layout) {
    const Options options = {rms, zero_centered_weight, memory_efficient, preserve_layout};
    auto [output, sum, mean, rstd] =
        kForward({input, optional<Tensor>(residual...), normalized_shape, weight, bias, eps, options, kInPlace});
    if constexpr (kReturnsSum) {
      return {std::move(output), std::move(sum), std::move(mean), std::move(rstd)};
    } else {
      return {std::move(output), std::move(mean), std::move(rstd)};
    }
  }
};

// The function of `backward` for a dispatch key.
template <Backward kBackward>
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
template <Forward kForward, Backward kBackward>
void implement(torch::Library& m) {
  using Norm = ForwardOperator<kForward, false>;
  using AddNorm = ForwardOperator<kForward, false, const Tensor&>;
  using AddNormInPlace = ForwardOperator<kForward, true, const Tensor&>;
  m.impl("forward", TORCH_FN(Norm::call));
  m.impl("forward.residual", TORCH_FN(AddNorm::call));
  m.impl("forward_.residual", TORCH_FN(AddNormInPlace::call));
  m.impl("backward", TORCH_FN(BackwardOperator<kBackward>::call));
}

// Each function fills the library of one dispatch key; registration.cpp calls them all.
struct Operators {
  static void define(torch::Library& m);
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

inline bool present(const optional<Tensor>& t) { return t && t->defined(); }

// Whether backward needs the means of the rows.
inline bool needs_mean(const Options& options) { return !options.rms && !options.memory_efficient; }

}  // namespace layernorm
