// The schemas of the operators, their calls through the dispatcher, and the registrations that no backend owns.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/functorch/BatchedTensorImpl.h>

#include "checks.h"
#include "ops.h"

namespace layernorm {

#define OPTIONS \
  "bool rms=False, bool zero_centered_weight=False, bool memory_efficient=False, bool preserve_layout=False"

// The first positional arguments are aten's. All tensors are positional because DTensor does not redistribute others.
void Operators::define(torch::Library& m) {
  const auto define = [&](const char* schema) { m.def(schema, {at::Tag::pt2_compliant_tag}); };
  define(
      "forward(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
      "*, " OPTIONS ") -> (Tensor output, Tensor mean, Tensor rstd)");
  define(
      "forward.fused(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
      "Tensor? residual=None, *, " OPTIONS ") -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)");
  define(
      "forward_.fused(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
      "Tensor(a!) residual, *, " OPTIONS ") -> (Tensor output, Tensor mean, Tensor rstd)");
  define(
      "backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? mean, Tensor rstd, "
      "Tensor? weight, Tensor? bias, bool[3] output_mask, Tensor? grad_sum=None, *, " OPTIONS
      ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  // The checks of forward, for graphs of aten operators. Compilers remove them from a graph, because they return
  // nothing.
  define(
      "check_forward(Tensor input, Tensor? residual, SymInt[] normalized_shape, Tensor? weight, Tensor? bias) -> ()");
  define("check_allocated(Tensor tensor, str name) -> ()");
  define("check_images(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, bool adaptive=False) -> ()");
  define("check_modulation(Tensor input, SymInt[] normalized_shape, Tensor? scale, Tensor? shift) -> ()");
  define_family(m);
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
  const auto call = [&](const auto& op, const auto&... residual) {
    const auto& [rms, zero_centered_weight, memory_efficient, preserve_layout] = args.options;
    return op.call(args.input, args.normalized_shape, args.weight, args.bias, args.eps, residual..., rms,
                   zero_centered_weight, memory_efficient, preserve_layout);
  };
  if (args.in_place) {
    static const auto op = find<ForwardOperator<nullptr, const Tensor&>>("forward_", "fused");
    auto [output, mean, rstd] = call(op, *args.residual);
    return {std::move(output), *args.residual, std::move(mean), std::move(rstd)};
  }
  if (present(args.residual)) {
    static const auto op = find<ForwardOperator<nullptr, const optional<Tensor>&>>("forward", "fused");
    auto [output, sum, mean, rstd] = call(op, args.residual);
    return {std::move(output), std::move(sum), std::move(mean), std::move(rstd)};
  }
  static const auto op = find<ForwardOperator<nullptr>>("forward", "");
  auto [output, mean, rstd] = call(op);
  return {std::move(output), Tensor(), std::move(mean), std::move(rstd)};
}

BackwardOutputs call_backward(const BackwardArgs& args) {
  static const auto op = find<BackwardOperator<nullptr>>("backward", "");
  const auto& [rms, zero_centered_weight, memory_efficient, preserve_layout] = args.options;
  return op.call(args.grad_output, args.input, args.normalized_shape, args.mean, args.rstd, args.weight, args.bias,
                 args.output_mask, args.grad_sum, rms, zero_centered_weight, memory_efficient, preserve_layout);
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

}  // namespace

// The other operators have torch's fallback.
void Operators::implement_negative(torch::Library& m) {
  using Operator = ForwardOperator<forward_negative, const Tensor&>;
  m.impl("forward_.fused", TORCH_FN(Operator::call));
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
  m.impl("check_forward", TORCH_FN(check_forward));
  m.impl("check_images", TORCH_FN(check_images));
  m.impl("check_modulation", TORCH_FN(check_modulation));
}

}  // namespace layernorm
