// The schemas of the operators, their calls through the dispatcher, and the registrations that no backend owns.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/functorch/BatchedTensorImpl.h>

#include "checks.h"
#include "ops.h"

namespace layernorm {

// See Options. num_groups is optional, because AOTInductor (torch 2.13) miscounts integers that a call leaves out.
#define FIRST_OPTIONS "bool rms=False, bool zero_centered_weight=False, bool memory_efficient=False, bool images=False"
#define ALL_OPTIONS FIRST_OPTIONS ", SymInt? num_groups=None, str? activation=None, bool gate_first=False"

// The first positional arguments are aten's. All tensors are positional because DTensor does not redistribute others.
// An absent result is an undefined Tensor: AOTInductor (torch 2.13) would need the type Tensor?, which torch.jit.trace
// refuses.
void Operators::define(torch::Library& m) {
  // Compiled code passes tensors in the order of strides that the tracer saw. With the default tag, which fixes the
  // strides themselves, Inductor also spells out all options, and parsing them takes 2 us a call (AMD EPYC Zen 4).
  const auto define = [&](const char* schema) {
    m.def(schema, {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
  };
  define(
      "forward(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
      "*, " FIRST_OPTIONS ") -> (Tensor output, Tensor mean, Tensor rstd)");
  define(
      "forward.fused(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
      "Tensor? residual=None, Tensor? gate=None, Tensor? input_scale=None, *, " ALL_OPTIONS
      ") -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)");
  define(
      "forward_.fused(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
      "Tensor(a!) residual, Tensor? input_scale=None, *, " ALL_OPTIONS
      ") -> (Tensor output, Tensor mean, Tensor rstd)");
  define(
      "backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? mean, Tensor rstd, "
      "Tensor? weight, Tensor? bias, bool[3] output_mask, Tensor? grad_sum=None, *, " FIRST_OPTIONS
      ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  define(
      "backward.fused(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? mean, Tensor rstd, "
      "Tensor? weight, Tensor? bias, bool[6] output_mask, Tensor? grad_sum, Tensor? gate, Tensor? input_scale=None, "
      "Tensor? scaled_input=None, *, " ALL_OPTIONS
      ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_gate, Tensor grad_scaled_input, "
      "Tensor grad_input_scale)");
  // The checks of the public functions, for graphs that call forward with other names, or aten's operators. Compilers
  // remove them from a graph, because they return nothing.
  define(
      "check(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? gate, "
      "Tensor? input_scale, bool adaptive, *, " ALL_OPTIONS ") -> ()");
  define("check_allocated(Tensor tensor, str name) -> ()");  // see call_check_allocated()
}

// ---- the dispatcher -------------------------------------------------------------------------------------------------

namespace {

// The handle of an operator, whose signature is that of Operator::call.
template <class Operator>
auto find(const char* name, const char* overload) {
  const auto full_name = std::string(kOperatorNamespace) + "::" + name;
  return c10::Dispatcher::singleton().findSchemaOrThrow(full_name.c_str(), overload).typed<decltype(Operator::call)>();
}

// Call an operator with the values of the first or of all options after other arguments.
template <class Operator, class... Args>
auto call_first(const Operator& op, const Options& options, const Args&... args) {
  return op.call(args..., options.rms, options.zero_centered_weight, options.memory_efficient, options.images);
}
template <class Operator, class... Args>
auto call_all(const Operator& op, const Options& options, const Args&... args) {
  const auto num_groups = options.has_groups() ? optional<c10::SymInt>(options.num_groups) : std::nullopt;
  return op.call(args..., options.rms, options.zero_centered_weight, options.memory_efficient, options.images,
                 num_groups, activation_name(options.activation), options.gate_first);
}
bool needs_all(const Options& options) { return options.has_groups() || options.activation != 0 || options.gate_first; }

}  // namespace

ForwardOutputs call_forward(const ForwardArgs& args) {
  const auto& [input, normalized_shape, weight, bias, eps, options, residual, gate, input_scale, inplace] = args;
  if (inplace) {
    static const auto op = find<InPlaceForwardOperator<nullptr>>("forward_", "fused");
    auto [output, mean, rstd] =
        call_all(op, options, input, normalized_shape, weight, bias, eps, *residual, input_scale);
    return {std::move(output), *residual, std::move(mean), std::move(rstd)};
  }
  if (residual || gate || input_scale || needs_all(options)) {
    static const auto op = find<FusedForwardOperator<nullptr>>("forward", "fused");
    auto [output, sum, mean, rstd] =
        call_all(op, options, input, normalized_shape, weight, bias, eps, residual, gate, input_scale);
    return {std::move(output), std::move(sum), std::move(mean), std::move(rstd)};
  }
  static const auto op = find<ForwardOperator<nullptr>>("forward", "");
  auto [output, mean, rstd] = call_first(op, options, input, normalized_shape, weight, bias, eps);
  return {std::move(output), Tensor(), std::move(mean), std::move(rstd)};
}

BackwardOutputs call_backward(const BackwardArgs& args) {
  const auto& [grad_output, input, normalized_shape, mean, rstd, weight, bias, mask, grad_sum, options, gate,
               input_scale, scaled_input] = args;
  if (gate || input_scale || scaled_input || needs_all(options)) {
    static const auto op = find<FusedBackwardOperator<nullptr>>("backward", "fused");
    auto [grad_input, grad_weight, grad_bias, grad_gate, grad_scaled_input, grad_input_scale] =
        call_all(op, options, grad_output, input, normalized_shape, mean, rstd, weight, bias, mask, grad_sum, gate,
                 input_scale, scaled_input);
    return {std::move(grad_input), std::move(grad_weight),       std::move(grad_bias),
            std::move(grad_gate),  std::move(grad_scaled_input), std::move(grad_input_scale)};
  }
  static const auto op = find<BackwardOperator<nullptr>>("backward", "");
  auto [grad_input, grad_weight, grad_bias] =
      call_first(op, options, grad_output, input, normalized_shape, mean, rstd, weight, bias,
                 std::array<bool, 3>{mask[0], mask[1], mask[2]}, grad_sum);
  return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias), {}, {}, {}};
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
  if (args.inplace && !outputs.sum.is_same(*args.residual)) outputs.sum = args.residual->copy_(outputs.sum);
  return outputs;
}

// A kernel for functionalization, whose own kernel also works only with operators that return what they change.
ForwardOutputs forward_functional(const ForwardArgs& args) {
  ForwardArgs below = args;
  below.inplace = false;
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

void Operators::implement_composite(torch::Library& m) { m.impl("check", TORCH_FN(CheckOperator<>::call)); }

}  // namespace layernorm
