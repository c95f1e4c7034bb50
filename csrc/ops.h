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
  static void implement_autograd(torch::Library& m);
  static void implement_vmap(torch::Library& m);
  static void implement_composite(torch::Library& m);
};

// The namespace under which the operators are registered.
extern const char* const kOperatorNamespace;

// Throw an error that names the argument and both values if the kernels cannot use these arguments.
void check_forward(const Tensor& input, const optional<Tensor>& residual, SymIntArrayRef normalized_shape,
                   const optional<Tensor>& weight, const optional<Tensor>& bias);
void check_backward(const BackwardArgs& args);
// Throws torch's errors if the residual cannot be overwritten.
void check_in_place(const ForwardArgs& args);
// Throw torch's error for a tensor whose storage was freed, as FSDP and offloading do. A kernel would take its null
// pointer for an absent tensor.
void check_allocated(const ForwardArgs& args);
void check_allocated(const BackwardArgs& args);
// The same as check_forward() for a forward pass over the channels of images [N, C, *], before the channels are moved
// last. An adaptive norm calls its parameters scale and shift.
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

// Whether backward needs the means of the rows.
inline bool needs_mean(const Options& options) { return !options.rms && !options.memory_efficient; }

// The dtype of statistics and sums: double for double input, else float.
inline at::ScalarType accumulate_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The shape and dtype of the gradient of a parameter: those of `model`, which is the parameter or, if it is absent, the
// other one. Without parameters they are normalized_shape and the dtype of the input.
struct GradientType {
  GradientType(const Tensor& input, const optional<Tensor>& parameter, const optional<Tensor>& other)
      : model(present(parameter) ? parameter : other), dtype((present(model) ? *model : input).scalar_type()) {}
  SymIntArrayRef sizes(SymIntArrayRef normalized_shape) const {
    return present(model) ? model->sym_sizes() : normalized_shape;
  }

  const optional<Tensor>& model;
  at::ScalarType dtype;
};

// The types of the gradients of the parameters, for the input or, with a residual, its sum. Kernels exist for
// parameters of the input's dtype and of the accumulation type; other parameters, or two of different dtypes, are
// converted to the accumulation type, and their gradients back to their own dtype.
struct ParameterTypes {
  ParameterTypes(const Tensor& input, const optional<Tensor>& weight_, const optional<Tensor>& bias_)
      : weight(input, weight_, bias_),
        bias(input, bias_, weight_),
        kernel(weight.dtype == bias.dtype && weight.dtype == input.scalar_type() ? weight.dtype
                                                                                 : accumulate_type(input)) {}

  GradientType weight, bias;
  at::ScalarType kernel;  // in which the kernels read the parameters and write their gradients
};

}  // namespace layernorm
