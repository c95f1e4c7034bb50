// The operators as C++ functions: their arguments, results, calls and registration.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/bit_cast.h>
#include <torch/library.h>

#include <array>
#include <deque>
#include <optional>
#include <tuple>
#include <utility>

#include "../kernel_params.h"

namespace layernorm {

using at::Tensor;
using c10::SymIntArrayRef;
using std::optional;

inline bool present(const optional<Tensor>& t) { return t && t->defined(); }
inline optional<Tensor> as_optional(Tensor t) { return t.defined() ? optional<Tensor>(std::move(t)) : std::nullopt; }

// The names of the options, in the order in which the schemas and the registered functions have them.
#define LAYERNORM_EACH_OPTION(F) \
  F(rms), F(zero_centered_weight), F(memory_efficient), F(images), F(num_groups), F(sigmoid), F(gate_first)
#define LAYERNORM_NAME(name) name

// The options of all operators. Those that a call leaves out are false or absent.
struct Options {
  bool rms = false;                   // RMSNorm
  bool zero_centered_weight = false;  // xhat is multiplied by weight + 1
  bool memory_efficient = false;      // backward gets forward's output instead of its input
  bool images = false;                // the tensors are [N, C, *] and normalized_shape is {C}, see shapes.h
  optional<c10::SymInt> num_groups;   // of the normalized elements; each group is normalized by itself
  bool sigmoid = false;               // the activation of the gate is the sigmoid instead of SiLU
  bool gate_first = false;            // the gate multiplies the input instead of the output

  c10::SymInt groups() const { return num_groups.value_or(1); }
  bool has_groups() const { return groups() != 1; }

  auto fields() { return std::tie(LAYERNORM_EACH_OPTION(LAYERNORM_NAME)); }
};

// The options as parameters of a function, and the Options made of these parameters.
#define LAYERNORM_OPTION_PARAMETER(name) decltype(Options::name) name
#define LAYERNORM_OPTION_PARAMETERS LAYERNORM_EACH_OPTION(LAYERNORM_OPTION_PARAMETER)
#define LAYERNORM_OPTIONS options_from(LAYERNORM_EACH_OPTION(LAYERNORM_NAME))
template <class... Values>
Options options_from(Values&&... values) {
  Options options;
  options.fields() = std::forward_as_tuple(std::move(values)...);
  return options;
}

inline const optional<Tensor> kAbsent;

// References to a tensor, and to one that may be absent, as members of structs that are copied and assigned.
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
  OptionalTensorRef(const Tensor&) = delete;  // would refer to a temporary optional<Tensor>
  explicit operator bool() const { return present(*t_); }
  operator const optional<Tensor>&() const { return *t_; }  // NOLINT(google-explicit-constructor)
  const Tensor& operator*() const { return **t_; }
  const Tensor* operator->() const { return &**t_; }
  void refer_to(const optional<Tensor>& t) { t_ = &t; }

 private:
  const optional<Tensor>* t_;
};

// Calls f(name, parameter) for each parameter of a call, also for absent ones. Parameters are the tensors that several
// rows share; the gate and the residual have values for each row.
template <class Args, class F>
void for_each_parameter(Args& args, const F& f) {
  f("weight", args.weight);
  f("bias", args.bias);
  f("input_scale", args.input_scale);
}

// The arguments of all overloads of forward.
struct ForwardArgs {
  TensorRef input;
  SymIntArrayRef normalized_shape;
  OptionalTensorRef weight, bias;
  double eps;
  Options options;
  OptionalTensorRef residual = kAbsent;
  OptionalTensorRef gate = kAbsent;         // of a gated norm; has the shape of the input
  OptionalTensorRef input_scale = kAbsent;  // a parameter that multiplies the input before a residual is added
  bool inplace = false;                     // whether the sum overwrites the residual

  // Calls f with the name and the reference of each tensor.
  template <class Args, class F>  // Args may be const
  static void for_each(Args& args, const F& f) {
    f("input", args.input);
    f("residual", args.residual);
    for_each_parameter(args, f);
    f("gate", args.gate);
  }
};
// `sum` is residual + input or residual + input_scale * input. It is undefined without a residual, and the residual
// itself if inplace. RMSNorm leaves the mean undefined.
struct ForwardOutputs {
  Tensor output, sum, mean, rstd;
};

// Which gradients backward computes, in the order of BackwardOutputs: the bool[6] output_mask of the schema.
struct OutputMask {
  bool input, weight, bias, gate, scaled_input, input_scale;
};

// The arguments of backward. With memory_efficient, `input` is the output of forward. With a residual, it is the sum
// that forward returned, grad_sum is the upstream gradient of this sum, and scaled_input is the input of forward, which
// input_scale multiplied.
struct BackwardArgs {
  TensorRef grad_output, input;
  SymIntArrayRef normalized_shape;
  OptionalTensorRef mean;
  TensorRef rstd;
  OptionalTensorRef weight, bias;
  OutputMask output_mask;
  OptionalTensorRef grad_sum, gate, input_scale, scaled_input;
  Options options;

  template <class Args, class F>
  static void for_each(Args& args, const F& f) {
    f("grad_output", args.grad_output);
    f("input", args.input);
    f("mean", args.mean);
    f("rstd", args.rstd);
    for_each_parameter(args, f);
    f("grad_sum", args.grad_sum);
    f("gate", args.gate);
    f("scaled_input", args.scaled_input);
  }
};
// Gradients whose entry of output_mask is false are undefined.
struct BackwardOutputs {
  Tensor grad_input, grad_weight, grad_bias, grad_gate, grad_scaled_input, grad_input_scale;

  auto fields() { return std::tie(grad_input, grad_weight, grad_bias, grad_gate, grad_scaled_input, grad_input_scale); }
};

// Calls f(name, tensor) for each tensor that is present.
template <class Args, class F>
void for_each_tensor(const Args& args, const F& f) {
  Args::for_each(args, [&](const char* name, const auto& t) {
    if (t) f(name, *t);
  });
}

// Calls `function` with the arguments `args`, but with f(t) in place of each tensor t.
template <class Function, class Args, class F>
auto call_with(const Function& function, Args args, const F& f) {
  std::deque<optional<Tensor>> replacements;  // a deque does not move its elements, to which `args` refers
  Args::for_each(args, [&](const char*, auto& t) {
    if (t) t.refer_to(replacements.emplace_back(f(*t)));
  });
  return function(args);
}

// Call the operators through the dispatcher.
ForwardOutputs call_forward(const ForwardArgs& args);
BackwardOutputs call_backward(const BackwardArgs& args);

// Each of the next four templates turns a function of ForwardArgs or BackwardArgs into a function with the signature of
// an operator's overload, which can be registered for a dispatch key.
using ForwardFunction = ForwardOutputs (*)(const ForwardArgs&);
using BackwardFunction = BackwardOutputs (*)(const BackwardArgs&);

template <ForwardFunction kForward>
std::tuple<Tensor, optional<Tensor>, Tensor> forward_operator(const Tensor& input, SymIntArrayRef normalized_shape,
                                                              const optional<Tensor>& weight,
                                                              const optional<Tensor>& bias, double eps,
                                                              LAYERNORM_OPTION_PARAMETERS) {
  auto [output, sum, mean, rstd] = kForward({input, normalized_shape, weight, bias, eps, LAYERNORM_OPTIONS});
  return {std::move(output), as_optional(std::move(mean)), std::move(rstd)};
}

// For forward.fused, and for the operator check, for which kForward returns nothing.
template <auto kForward>
auto fused_forward_operator(const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& weight,
                            const optional<Tensor>& bias, double eps, const optional<Tensor>& residual,
                            const optional<Tensor>& gate, const optional<Tensor>& input_scale,
                            LAYERNORM_OPTION_PARAMETERS) {
  const ForwardArgs args = {input, normalized_shape, weight, bias, eps, LAYERNORM_OPTIONS, residual, gate, input_scale};
  if constexpr (std::is_void_v<decltype(kForward(args))>) {
    kForward(args);
  } else {
    auto [output, sum, mean, rstd] = kForward(args);
    return std::tuple(std::move(output), as_optional(std::move(sum)), as_optional(std::move(mean)), std::move(rstd));
  }
}

template <ForwardFunction kForward>
std::tuple<Tensor, optional<Tensor>, Tensor> inplace_forward_operator(
    const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& weight, const optional<Tensor>& bias,
    double eps, const Tensor& residual, const optional<Tensor>& input_scale, LAYERNORM_OPTION_PARAMETERS) {
  TORCH_CHECK(residual.defined(), "Expected residual to be a tensor, but got None for input of shape ",
              input.sym_sizes());
  const auto given = as_optional(residual);
  auto [output, sum, mean, rstd] = kForward({input, normalized_shape, weight, bias, eps, LAYERNORM_OPTIONS, given,
                                             /*gate=*/kAbsent, input_scale, /*inplace=*/true});
  return {std::move(output), as_optional(std::move(mean)), std::move(rstd)};
}

template <BackwardFunction kBackward>
auto backward_operator(const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape,
                       const optional<Tensor>& mean, const Tensor& rstd, const optional<Tensor>& weight,
                       const optional<Tensor>& bias, std::array<bool, 6> output_mask, const optional<Tensor>& grad_sum,
                       const optional<Tensor>& gate, const optional<Tensor>& input_scale,
                       const optional<Tensor>& scaled_input, LAYERNORM_OPTION_PARAMETERS) {
  BackwardOutputs outputs =
      kBackward({grad_output, input, normalized_shape, mean, rstd, weight, bias, c10::bit_cast<OutputMask>(output_mask),
                 grad_sum, gate, input_scale, scaled_input, LAYERNORM_OPTIONS});
  const auto to_results = [](Tensor& grad_input, auto&... others) {
    return std::tuple(std::move(grad_input), as_optional(std::move(others))...);
  };
  return std::apply(to_results, outputs.fields());
}

// Registers an implementation of all operators for one dispatch key.
template <ForwardFunction kForward, BackwardFunction kBackward>
void implement(torch::Library& m) {
  m.impl("forward", TORCH_FN(forward_operator<kForward>));
  m.impl("forward.fused", TORCH_FN(fused_forward_operator<kForward>));
  m.impl("forward_.fused", TORCH_FN(inplace_forward_operator<kForward>));
  m.impl("backward", TORCH_FN(backward_operator<kBackward>));
}

// Throws the error of forward if forward would refuse these arguments. Where graphs get aten's operators instead of
// forward, tracing.py calls it, as an operator or as a function of the Python module.
void check(const ForwardArgs& args);

// Whether backward reads the values of the bias: to recover xhat from the output, or for the gradient of a gate that
// multiplies the output. Otherwise it needs only the shape and dtype of the bias.
template <class Args>
bool needs_bias(const Args& args) {
  return args.options.memory_efficient || (args.gate && !args.options.gate_first);
}

// Whether backward reads the means of the rows.
inline bool needs_mean(const Options& options) { return !options.rms && !options.memory_efficient; }

}  // namespace layernorm
