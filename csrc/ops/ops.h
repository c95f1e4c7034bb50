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

#include "../kernel_params.h"

namespace layernorm {

using at::Tensor;
using c10::SymIntArrayRef;
using std::optional;

inline bool present(const optional<Tensor>& t) { return t && t->defined(); }

// The names of activations, as the operators spell them; none for kNone.
using ActivationName = optional<std::string_view>;
ActivationName activation_name(int64_t activation);
// Throws an error that names the argument if there is no such activation.
int64_t parse_activation(const ActivationName& name, const Tensor& input);

// The options of all operators, in the order of their schemas.
struct Options {
  bool rms = false;                   // RMSNorm
  bool zero_centered_weight = false;  // the weight is `weight` + 1
  bool memory_efficient = false;      // backward gets forward's output instead of its input
  bool images = false;                // the tensors are [N, C, *] and normalized_shape is {C}, see geometry.h
  c10::SymInt num_groups = 1;         // the groups of elements of a row that are normalized apart
  int64_t activation = 0;             // an Activation
  bool gate_first = false;            // see Params

  bool has_groups() const { return num_groups != 1; }

  auto fields() {
    return std::tie(rms, zero_centered_weight, memory_efficient, images, num_groups, activation, gate_first);
  }
};

// A list of types. The operators take these values for the fields of Options; the first overloads of forward and
// backward have the first fields only, because parsing each option takes 1 % of the time of a small call.
template <class... Ts>
struct TypeList {};
using FirstOptions = TypeList<bool, bool, bool, bool>;
using AllOptions = TypeList<bool, bool, bool, bool, optional<c10::SymInt>, const ActivationName&, bool>;

inline Options make_options(const Tensor& input, bool rms, bool zero_centered_weight, bool memory_efficient,
                            bool images, const optional<c10::SymInt>& num_groups = std::nullopt,
                            const ActivationName& activation = std::nullopt, bool gate_first = false) {
  const int64_t kind = activation ? parse_activation(activation, input) : 0;
  return {rms, zero_centered_weight, memory_efficient, images, num_groups.value_or(1), kind, gate_first};
}

inline const optional<Tensor> kAbsent;

// A reference to a tensor, or to one that may be absent. Assignment makes it refer to another tensor.
class TensorRef {
 public:
  TensorRef(const Tensor& t) : t_(&t) {}  // NOLINT(google-explicit-constructor)
  TensorRef(Tensor&&) = delete;
  explicit operator bool() const { return true; }
  operator const Tensor&() const { return *t_; }  // NOLINT(google-explicit-constructor)
  const Tensor& operator*() const { return *t_; }
  const Tensor* operator->() const { return t_; }
  void refer_to(const optional<Tensor>& t) { t_ = &*t; }

 private:
  const Tensor* t_;
};
class OptionalTensorRef {
 public:
  OptionalTensorRef(const optional<Tensor>& t = kAbsent) : t_(&t) {}  // NOLINT(google-explicit-constructor)
  OptionalTensorRef(optional<Tensor>&&) = delete;
  OptionalTensorRef(const Tensor&) = delete;  // a temporary would hold it
  explicit operator bool() const { return present(*t_); }
  operator const optional<Tensor>&() const { return *t_; }  // NOLINT(google-explicit-constructor)
  const Tensor& operator*() const { return **t_; }
  const Tensor* operator->() const { return &**t_; }
  void refer_to(const optional<Tensor>& t) { t_ = &t; }

 private:
  const optional<Tensor>* t_;
};

// The arguments of all overloads of forward.
struct ForwardArgs {
  TensorRef input;
  SymIntArrayRef normalized_shape;
  OptionalTensorRef weight, bias;
  double eps;
  Options options;
  OptionalTensorRef residual = kAbsent;
  OptionalTensorRef gate = kAbsent;         // of a gated norm: like the input
  OptionalTensorRef input_scale = kAbsent;  // beside a residual: a parameter that multiplies the input
  bool inplace = false;                     // the sum overwrites the residual

  static constexpr size_t kTensors = 6;
  template <class Args, class F>  // Args may be const
  static void for_each(Args& args, const F& f) {
    f("input", args.input);
    f("residual", args.residual);
    f("weight", args.weight);
    f("bias", args.bias);
    f("gate", args.gate);
    f("input_scale", args.input_scale);
  }
};
// The sum is undefined without a residual, and is the residual if inplace. RMSNorm has no mean.
struct ForwardOutputs {
  Tensor output, sum, mean, rstd;
};

// The arguments of all overloads of backward. With a residual, `input` is the sum and grad_sum its upstream gradient;
// input_scale multiplied scaled_input.
struct BackwardArgs {
  TensorRef grad_output, input;
  SymIntArrayRef normalized_shape;
  OptionalTensorRef mean;
  TensorRef rstd;
  OptionalTensorRef weight, bias;
  std::array<bool, 6> output_mask;  // in the order of BackwardOutputs
  OptionalTensorRef grad_sum;
  Options options;
  OptionalTensorRef gate = kAbsent, input_scale = kAbsent, scaled_input = kAbsent;

  static constexpr size_t kTensors = 10;
  template <class Args, class F>
  static void for_each(Args& args, const F& f) {
    f("grad_output", args.grad_output);
    f("input", args.input);
    f("mean", args.mean);
    f("rstd", args.rstd);
    f("weight", args.weight);
    f("bias", args.bias);
    f("grad_sum", args.grad_sum);
    f("gate", args.gate);
    f("input_scale", args.input_scale);
    f("scaled_input", args.scaled_input);
  }
};
struct BackwardOutputs {
  Tensor grad_input, grad_weight, grad_bias, grad_gate, grad_scaled_input, grad_input_scale;
};

// Calls f(name, tensor) for each tensor that is present.
template <class Args, class F>
void for_each_tensor(const Args& args, const F& f) {
  Args::for_each(args, [&](const char* name, const auto& t) {
    if (t) f(name, *t);
  });
}

// Calls `function` with f(t) in place of each tensor t of `args`.
template <class Function, class Args, class F>
auto call_with(const Function& function, Args args, const F& f) {
  std::array<optional<Tensor>, Args::kTensors> results;
  size_t count = 0;
  Args::for_each(args, [&](const char*, auto& t) {
    if (!t) return;
    results[count] = f(*t);
    t.refer_to(results[count++]);
  });
  return function(args);
}

// Call the operators through the dispatcher.
ForwardOutputs call_forward(const ForwardArgs& args);
BackwardOutputs call_backward(const BackwardArgs& args);

using ForwardFunction = ForwardOutputs (*)(const ForwardArgs&);
using BackwardFunction = BackwardOutputs (*)(const BackwardArgs&);

// The functions of the overloads of forward for a dispatch key.
template <ForwardFunction kForward, class Values = FirstOptions>
struct ForwardOperator;
template <ForwardFunction kForward, class... Values>
struct ForwardOperator<kForward, TypeList<Values...>> {
  static std::tuple<Tensor, Tensor, Tensor> call(const Tensor& input, SymIntArrayRef normalized_shape,
                                                 const optional<Tensor>& weight, const optional<Tensor>& bias,
                                                 double eps, Values... values) {
    auto [output, sum, mean, rstd] =
        kForward({input, normalized_shape, weight, bias, eps, make_options(input, values...)});
    return {std::move(output), std::move(mean), std::move(rstd)};
  }
};
template <ForwardFunction kForward, class Values = AllOptions>
struct FusedForwardOperator;
template <ForwardFunction kForward, class... Values>
struct FusedForwardOperator<kForward, TypeList<Values...>> {
  static std::tuple<Tensor, Tensor, Tensor, Tensor> call(const Tensor& input, SymIntArrayRef normalized_shape,
                                                         const optional<Tensor>& weight, const optional<Tensor>& bias,
                                                         double eps, const optional<Tensor>& residual,
                                                         const optional<Tensor>& gate,
                                                         const optional<Tensor>& input_scale, Values... values) {
    auto [output, sum, mean, rstd] = kForward(
        {input, normalized_shape, weight, bias, eps, make_options(input, values...), residual, gate, input_scale});
    return {std::move(output), std::move(sum), std::move(mean), std::move(rstd)};
  }
};
template <ForwardFunction kForward, class Values = AllOptions>
struct InPlaceForwardOperator;
template <ForwardFunction kForward, class... Values>
struct InPlaceForwardOperator<kForward, TypeList<Values...>> {
  static std::tuple<Tensor, Tensor, Tensor> call(const Tensor& input, SymIntArrayRef normalized_shape,
                                                 const optional<Tensor>& weight, const optional<Tensor>& bias,
                                                 double eps, const Tensor& residual,
                                                 const optional<Tensor>& input_scale, Values... values) {
    TORCH_CHECK(residual.defined(), "Expected residual to be a tensor, but got None for input of shape ",
                input.sym_sizes());
    const optional<Tensor> added = residual;
    auto [output, sum, mean, rstd] = kForward({input, normalized_shape, weight, bias, eps,
                                               make_options(input, values...), added, kAbsent, input_scale,
                                               /*inplace=*/true});
    return {std::move(output), std::move(mean), std::move(rstd)};
  }
};

// The functions of the overloads of backward for a dispatch key.
template <BackwardFunction kBackward, class Values = FirstOptions>
struct BackwardOperator;
template <BackwardFunction kBackward, class... Values>
struct BackwardOperator<kBackward, TypeList<Values...>> {
  static std::tuple<Tensor, Tensor, Tensor> call(const Tensor& grad_output, const Tensor& input,
                                                 SymIntArrayRef normalized_shape, const optional<Tensor>& mean,
                                                 const Tensor& rstd, const optional<Tensor>& weight,
                                                 const optional<Tensor>& bias, std::array<bool, 3> output_mask,
                                                 const optional<Tensor>& grad_sum, Values... values) {
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
                            make_options(input, values...)});
    return {std::move(grads.grad_input), std::move(grads.grad_weight), std::move(grads.grad_bias)};
  }
};
template <BackwardFunction kBackward, class Values = AllOptions>
struct FusedBackwardOperator;
template <BackwardFunction kBackward, class... Values>
struct FusedBackwardOperator<kBackward, TypeList<Values...>> {
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> call(
      const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& mean,
      const Tensor& rstd, const optional<Tensor>& weight, const optional<Tensor>& bias, std::array<bool, 6> output_mask,
      const optional<Tensor>& grad_sum, const optional<Tensor>& gate, const optional<Tensor>& input_scale,
      const optional<Tensor>& scaled_input, Values... values) {
    auto grads = kBackward({grad_output, input, normalized_shape, mean, rstd, weight, bias, output_mask, grad_sum,
                            make_options(input, values...), gate, input_scale, scaled_input});
    return {std::move(grads.grad_input), std::move(grads.grad_weight),       std::move(grads.grad_bias),
            std::move(grads.grad_gate),  std::move(grads.grad_scaled_input), std::move(grads.grad_input_scale)};
  }
};

// Throws the errors of a call of a public function, which names its parameters otherwise than the operators.
void check_call(const ForwardArgs& args, bool adaptive);

template <class Values = AllOptions>
struct CheckOperator;
template <class... Values>
struct CheckOperator<TypeList<Values...>> {
  static void call(const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& weight,
                   const optional<Tensor>& bias, const optional<Tensor>& residual, const optional<Tensor>& gate,
                   const optional<Tensor>& input_scale, bool adaptive, Values... values) {
    check_call(
        {input, normalized_shape, weight, bias, /*eps=*/0, make_options(input, values...), residual, gate, input_scale},
        adaptive);
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
  return options.memory_efficient || (options.activation != 0 && !options.gate_first);
}

// Whether backward needs the means of the rows.
inline bool needs_mean(const Options& options) { return !options.rms && !options.memory_efficient; }

}  // namespace layernorm
