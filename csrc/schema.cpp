// The schemas of the operators, their calls through the dispatcher, and the registrations that no backend owns.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/functorch/BatchedTensorImpl.h>

#include "checks.h"
#include "ops.h"

namespace layernorm {

#define OPTIONS \
  "bool rms=False, bool zero_centered_weight=False, bool memory_efficient=False, bool preserve_layout=False"
#define GATED_NORM "str? activation=None, bool gate_first=False"

// The first positional arguments are aten's. All tensors are positional because DTensor does not redistribute others.
void Operators::define(torch::Library& m) {
  // Compiled code passes tensors in the order of strides that the tracer saw. With the default tag, which fixes the
  // strides themselves, Inductor also spells out all options, and parsing them takes 2 us a call (AMD EPYC Zen 4).
  const auto define = [&](const char* schema) {
    m.def(schema, {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
  };
  define(
      "forward(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
      "*, " OPTIONS ") -> (Tensor output, Tensor mean, Tensor rstd)");
  define(
      "forward.fused(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
      "Tensor? residual=None, Tensor? gate=None, *, " OPTIONS ", " GATED_NORM
      ") -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)");
  define(
      "forward_.fused(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
      "Tensor(a!) residual, Tensor? gate=None, *, " OPTIONS ") -> (Tensor output, Tensor mean, Tensor rstd)");
  define(
      "backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? mean, Tensor rstd, "
      "Tensor? weight, Tensor? bias, bool[3] output_mask, Tensor? grad_sum=None, *, " OPTIONS
      ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  define(
      "backward.fused(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? mean, Tensor rstd, "
      "Tensor? weight, Tensor? bias, bool[5] output_mask, Tensor? grad_sum, Tensor? gate, Tensor? gated_input=None, "
      "*, " OPTIONS ", " GATED_NORM
      ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_gated_input, Tensor grad_gate)");
  // The checks of forward, for graphs of aten operators. Compilers remove them from a graph, because they return
  // nothing.
  define(
      "check_forward(Tensor input, Tensor? residual, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
      "Tensor? gate=None, str? activation=None) -> ()");
  define("check_allocated(Tensor tensor, str name) -> ()");
  define("check_images(Tensor input, Tensor? weight, Tensor? bias) -> ()");
  define(
      "check_modulation(Tensor input, SymInt[] normalized_shape, Tensor? scale, Tensor? shift, Tensor? gate=None) "
      "-> ()");
}

// ---- the dispatcher -------------------------------------------------------------------------------------------------

namespace {

// The handle of an operator, whose signature is that of Operator::call.
template <class Operator>
auto find(const char* name, const char* overload) {
  const auto full_name = std::string(kOperatorNamespace) + "::" + name;
  return c10::Dispatcher::singleton().findSchemaOrThrow(full_name.c_str(), overload).typed<decltype(Operator::call)>();
}

}  // namespace

ForwardOutputs call_forward(const ForwardArgs& args) {
  const auto& [rms, zero_centered_weight, memory_efficient, preserve_layout, activation, gate_first] = args.options;
  if (args.in_place) {
    static const auto op = find<InPlaceForwardOperator<nullptr>>("forward_", "fused");
    auto [output, mean, rstd] =
        op.call(args.input, args.normalized_shape, args.weight, args.bias, args.eps, *args.residual, args.gate, rms,
                zero_centered_weight, memory_efficient, preserve_layout);
    return {std::move(output), *args.residual, std::move(mean), std::move(rstd)};
  }
  if (present(args.residual) || present(args.gate) || args.options.is_gated_norm() || gate_first) {
    static const auto op = find<FusedForwardOperator<nullptr>>("forward", "fused");
    auto [output, sum, mean, rstd] =
        op.call(args.input, args.normalized_shape, args.weight, args.bias, args.eps, args.residual, args.gate, rms,
                zero_centered_weight, memory_efficient, preserve_layout, activation_name(activation), gate_first);
    return {std::move(output), std::move(sum), std::move(mean), std::move(rstd)};
  }
  static const auto op = find<ForwardOperator<nullptr>>("forward", "");
  auto [output, mean, rstd] = op.call(args.input, args.normalized_shape, args.weight, args.bias, args.eps, rms,
                                      zero_centered_weight, memory_efficient, preserve_layout);
  return {std::move(output), Tensor(), std::move(mean), std::move(rstd)};
}

BackwardOutputs call_backward(const BackwardArgs& args) {
  const auto& [rms, zero_centered_weight, memory_efficient, preserve_layout, activation, gate_first] = args.options;
  if (present(args.gate) || present(args.gated_input) || args.options.is_gated_norm() || gate_first) {
    static const auto op = find<FusedBackwardOperator<nullptr>>("backward", "fused");
    auto [grad_input, grad_weight, grad_bias, grad_gated_input, grad_gate] =
        op.call(args.grad_output, args.input, args.normalized_shape, args.mean, args.rstd, args.weight, args.bias,
                args.output_mask, args.grad_sum, args.gate, args.gated_input, rms, zero_centered_weight,
                memory_efficient, preserve_layout, activation_name(activation), gate_first);
    return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias), std::move(grad_gated_input),
            std::move(grad_gate)};
  }
  static const auto op = find<BackwardOperator<nullptr>>("backward", "");
  auto [grad_input, grad_weight, grad_bias] =
      op.call(args.grad_output, args.input, args.normalized_shape, args.mean, args.rstd, args.weight, args.bias,
              {args.output_mask[0], args.output_mask[1], args.output_mask[2]}, args.grad_sum, rms, zero_centered_weight,
              memory_efficient, preserve_layout);
  return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias), Tensor(), Tensor()};
}

ActivationName activation_name(int64_t activation) {
  switch (static_cast<Activation>(activation)) {
    case Activation::kSilu:
      return "silu";
    case Activation::kSigmoid:
      return "sigmoid";
    default:
      return std::nullopt;
  }
}

int64_t parse_activation(const ActivationName& name, const Tensor& input) {
  if (!name) return static_cast<int64_t>(Activation::kNone);
  for (const auto activation : {Activation::kSilu, Activation::kSigmoid}) {
    if (*name == activation_name(static_cast<int64_t>(activation))) return static_cast<int64_t>(activation);
  }
  TORCH_CHECK(false, "Expected activation to be \"silu\" or \"sigmoid\", but got activation = \"", *name,
              "\" and input of shape ", input.sym_sizes());
}

void call_check_allocated(const Tensor& tensor, std::string_view name) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow((std::string(kOperatorNamespace) + "::check_allocated").c_str(), "")
                             .typed<void(const Tensor&, std::string_view)>();
  op.call(tensor, name);
}

// ---- registrations --------------------------------------------------------------------------------------------------

namespace {

// A kernel for the negative bit. torch's own works only with operators that return the tensor that they change, and
// torch.compile only with operators that do not.
ForwardOutputs forward_negative(const ForwardArgs& args) {
  check_allocated(args);
  ForwardOutputs outputs = call_with(call_forward, args, [](const Tensor& t) { return t.resolve_neg(); });
  if (args.in_place && !outputs.sum.is_same(*args.residual)) outputs.sum = args.residual->copy_(outputs.sum);
  return outputs;
}

// A kernel for functionalization, whose own kernel also works only with operators that return what they change.
ForwardOutputs forward_functional(const ForwardArgs& args) {
  ForwardArgs below = args;
  below.in_place = false;
  ForwardOutputs outputs = call_forward(below);
  outputs.sum = args.residual->copy_(outputs.sum);
  return outputs;
}

}  // namespace

// The other operators have torch's fallbacks.
void Operators::implement_negative(torch::Library& m) {
  m.impl("forward_.fused", TORCH_FN(InPlaceForwardOperator<forward_negative>::call));
}

void Operators::implement_functionalize(torch::Library& m) {
  m.impl("forward_.fused", TORCH_FN(InPlaceForwardOperator<forward_functional>::call));
}

void Operators::implement_any_backend(torch::Library& m) {
  m.impl("check_allocated", [](const Tensor& tensor, std::string_view name) { check_allocated(tensor, name); });
}

void Operators::implement_batched(torch::Library& m) {
  m.impl("check_allocated", [](const Tensor& tensor, std::string_view name) {
    const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::FuncTorchBatched);
    check_allocated(at::functorch::maybeGetBatchedImpl(tensor)->value(), name);
  });
}

void Operators::implement_composite(torch::Library& m) {
  m.impl("check_forward", TORCH_FN(check_arguments));
  m.impl("check_images", TORCH_FN(check_images));
  m.impl("check_modulation", TORCH_FN(check_modulation));
}

}  // namespace layernorm
