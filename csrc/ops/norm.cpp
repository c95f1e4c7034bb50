// The schemas of the operators, their calls through the dispatcher, and the dispatch keys that need neither a kernel
// nor a derivative.
#include "norm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/functorch/BatchedTensorImpl.h>

#include <string>
#include <vector>

#include "checks.h"

namespace layernorm {

// ---- schemas --------------------------------------------------------------------------------------------------------

namespace {

constexpr const char* kOperators[] = {"forward", "forward.fused", "forward_.fused", "backward"};

// Throws an error that names the argument whose layout made the dispatcher choose a key without kernels, for example
// SparseCPU.
void refuse_layout(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  Options options;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "zero_centered_weight") options.zero_centered_weight = values[i].toBool();
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (values[i].isTensor() && values[i].toTensor().defined()) {
      check_layout(public_name(arguments[i].name(), options), values[i].toTensor());
    }
  }
  TORCH_INTERNAL_ASSERT(false, "no argument of ", op.schema(), " is sparse, nested, quantized or in MKL-DNN's layout");
}

#if !defined(WITH_CUDA)
// Throws an error that says why there are no CUDA kernels, instead of the dispatcher's list of backends.
void refuse_cuda(const c10::OperatorHandle&, torch::jit::Stack*) {
  TORCH_CHECK(false,
              "layernorm_ext was built without CUDA kernels, for a reason that `python -m layernorm_ext` prints");
}
#endif

// The declaration of an option in a schema.
std::string declaration(const bool&, const char* name) { return c10::str("bool ", name, "=False"); }
// The integer is optional, because AOTInductor (torch 2.13) miscounts integer arguments that a call leaves out.
std::string declaration(const optional<c10::SymInt>&, const char* name) { return c10::str("SymInt? ", name, "=None"); }

std::string option_declarations() {
#define LAYERNORM_DECLARATION(name) declaration(Options().name, #name)
  return c10::Join(", ", std::vector<std::string>{LAYERNORM_EACH_OPTION(LAYERNORM_DECLARATION)});
#undef LAYERNORM_DECLARATION
}

}  // namespace

// The first positional arguments are those of aten::native_layer_norm and its backward. All tensors are positional
// because DTensor does not redistribute keyword arguments. The first result has the type Tensor and not Tensor?, also
// where it may be undefined (grad_input), because DTensor takes its type for that of all results.
TORCH_LIBRARY(layernorm, m) {
  // Compiled code passes tensors in the order of strides that the tracer saw. With the default tag, which fixes the
  // strides themselves, Inductor also spells out all options, and parsing them takes 2 us a call (AMD EPYC Zen 4).
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order};
  const auto define = [&](const std::string& arguments, const char* results) {
    m.def(c10::str(arguments, ", *, ", option_declarations(), ") -> ", results).c_str(), tags);
  };
  define("forward(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05",
         "(Tensor output, Tensor? mean, Tensor rstd)");
  const std::string fused =
      "(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
      "Tensor? residual=None, Tensor? gate=None, Tensor? input_scale=None";
  define("forward.fused" + fused, "(Tensor output, Tensor? sum, Tensor? mean, Tensor rstd)");
  define("check" + fused, "()");  // compilers remove it from a graph, because it returns nothing
  define(
      "forward_.fused(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
      "Tensor(a!) residual, Tensor? input_scale=None",
      "(Tensor output, Tensor? mean, Tensor rstd)");
  define(
      "backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? mean, Tensor rstd, "
      "Tensor? weight, Tensor? bias, bool[6] output_mask, Tensor? grad_sum=None, Tensor? gate=None, "
      "Tensor? input_scale=None, Tensor? scaled_input=None",
      "(Tensor grad_input, Tensor? grad_weight, Tensor? grad_bias, Tensor? grad_gate, "
      "Tensor? grad_scaled_input, Tensor? grad_input_scale)");
  m.def("check_allocated(Tensor tensor, str name) -> ()", tags);  // see call_check_allocated()

  using c10::DispatchKey;
  for (const auto key :
       {DispatchKey::SparseCPU, DispatchKey::SparseCUDA, DispatchKey::SparseCsrCPU, DispatchKey::SparseCsrCUDA,
        DispatchKey::SparseCsrMeta, DispatchKey::SparseMeta, DispatchKey::MkldnnCPU, DispatchKey::QuantizedCPU,
        DispatchKey::QuantizedCUDA, DispatchKey::QuantizedMeta, DispatchKey::NestedTensorCPU,
        DispatchKey::NestedTensorCUDA, DispatchKey::NestedTensorMeta, DispatchKey::AutogradNestedTensor}) {
    const auto refuse = [&](const char* name) {
      m.impl(name, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&refuse_layout>()));
    };
    for (const char* name : kOperators) refuse(name);
    refuse("check_allocated");
  }
#if !defined(WITH_CUDA)
  for (const char* name : kOperators) {
    m.impl(name, torch::dispatch(DispatchKey::CUDA, torch::CppFunction::makeFromBoxedFunction<&refuse_cuda>()));
  }
#endif
}

// ---- calls ----------------------------------------------------------------------------------------------------------

namespace {

// The handle of an operator. The last argument is any function with the operator's signature.
template <class Function>
auto find(const char* name, const char* overload, Function*) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Function>();
}

// Calls an operator with the arguments `args` and then the options.
template <class Operator, class... Args>
auto call_with_options(const Operator& op, Options options, const Args&... args) {
  return std::apply([&](const auto&... option) { return op.call(args..., option...); }, options.fields());
}

Tensor or_undefined(optional<Tensor> t) { return t ? *std::move(t) : Tensor(); }
Tensor or_undefined(Tensor t) { return t; }

}  // namespace

ForwardOutputs call_forward(const ForwardArgs& args) {
  const auto call = [&](const auto& op, const auto&... others) {
    return call_with_options(op, args.options, args.input, args.normalized_shape, args.weight, args.bias, args.eps,
                             others...);
  };
  if (args.inplace) {
    static const auto op = find("layernorm::forward_", "fused", inplace_forward_operator<nullptr>);
    auto [output, mean, rstd] = call(op, *args.residual, args.input_scale);
    return {std::move(output), *args.residual, or_undefined(std::move(mean)), std::move(rstd)};
  }
  if (args.residual || args.gate || args.input_scale) {
    static const auto op = find("layernorm::forward", "fused", fused_forward_operator<call_forward>);
    auto [output, sum, mean, rstd] = call(op, args.residual, args.gate, args.input_scale);
    return {std::move(output), or_undefined(std::move(sum)), or_undefined(std::move(mean)), std::move(rstd)};
  }
  static const auto op = find("layernorm::forward", "", forward_operator<nullptr>);
  auto [output, mean, rstd] = call(op);
  return {std::move(output), Tensor(), or_undefined(std::move(mean)), std::move(rstd)};
}

BackwardOutputs call_backward(const BackwardArgs& args) {
  const auto output_mask = c10::bit_cast<std::array<bool, 6>>(args.output_mask);
  static const auto op = find("layernorm::backward", "", backward_operator<call_backward>);
  auto results = call_with_options(op, args.options, args.grad_output, args.input, args.normalized_shape, args.mean,
                                   args.rstd, args.weight, args.bias, output_mask, args.grad_sum, args.gate,
                                   args.input_scale, args.scaled_input);
  return std::apply([](auto&... grads) { return BackwardOutputs{or_undefined(std::move(grads))...}; }, results);
}

// ---- the other dispatch keys ----------------------------------------------------------------------------------------

namespace {

// forward_ for tensors with the negative bit. Only forward_ needs a function of its own, because torch's fallback works
// only with operators that return the tensor that they change, and torch.compile only with operators that do not.
ForwardOutputs forward_negative(const ForwardArgs& args) {
  check_allocated(args);
  ForwardOutputs outputs = call_with(call_forward, args, [](const Tensor& t) { return t.resolve_neg(); });
  if (args.inplace && !outputs.sum.is_same(*args.residual)) outputs.sum = args.residual->copy_(outputs.sum);
  return outputs;
}

// forward_ for functionalization, whose fallback also works only with operators that return what they change.
ForwardOutputs forward_functional(const ForwardArgs& args) {
  ForwardArgs out_of_place = args;
  out_of_place.inplace = false;
  ForwardOutputs outputs = call_forward(out_of_place);
  outputs.sum = args.residual->copy_(outputs.sum);
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(layernorm, Negative, m) {
  m.impl("forward_.fused", TORCH_FN(inplace_forward_operator<forward_negative>));
}

TORCH_LIBRARY_IMPL(layernorm, Functionalize, m) {
  m.impl("forward_.fused", TORCH_FN(inplace_forward_operator<forward_functional>));
}

void check(const ForwardArgs& args) {
  check_layouts(args);
  check_forward(args);
  check_allocated(args);
}

TORCH_LIBRARY_IMPL(layernorm, CompositeImplicitAutograd, m) {
  m.impl("check", TORCH_FN(fused_forward_operator<check>));
}

// ---- check_allocated ------------------------------------------------------------------------------------------------

void call_check_allocated(const Tensor& tensor, std::string_view name) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("layernorm::check_allocated", "")
                             .typed<void(const Tensor&, std::string_view)>();
  op.call(tensor, name);
}

TORCH_LIBRARY_IMPL(layernorm, CompositeExplicitAutograd, m) {
  m.impl("check_allocated", [](const Tensor& tensor, std::string_view name) { check_allocated(tensor, name); });
}

TORCH_LIBRARY_IMPL(layernorm, Autograd, m) { m.impl("check_allocated", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(layernorm, FuncTorchBatched, m) {
  m.impl("check_allocated", [](const Tensor& tensor, std::string_view name) {
    const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::FuncTorchBatched);
    check_allocated(at::functorch::maybeGetBatchedImpl(tensor)->value(), name);
  });
}

}  // namespace layernorm
