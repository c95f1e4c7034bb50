#include "family.h"

#include <ATen/ExpandUtils.h>

#include <utility>

#include "checks.h"
#include "images.h"
#include "types.h"
#include "views.h"

namespace layernorm {

std::string signature(const Member& m, const Spelling& spelling) {
  std::string s = std::string(m.name) + "(Tensor input";
  if (m.adds) s += std::string(", ") + spelling.changed_tensor + " residual";
  if (m.gated) s += ", Tensor? gate";
  if (!m.images) s += std::string(", ") + spelling.shape + " normalized_shape";
  s += m.adaptive ? ", Tensor? scale=None, Tensor? shift=None" : ", Tensor? weight=None";
  if (!m.adaptive && m.has_bias()) s += ", Tensor? bias=None";
  s += std::string(", ") + spelling.real;
  s += m.has_default_eps() ? "? eps=None" : m.adaptive || m.images ? " eps=1e-06" : " eps=1e-05";
  if (m.adds || !m.adaptive) s += ", *";
  if (m.adds) s += ", Tensor? gate=None";
  if (m.gated) {
    s += std::string(", ") + spelling.string + " activation=\"silu\", bool gate_first=False, " + spelling.integer +
         " num_groups=1";
  }
  if (!m.adaptive) s += ", bool zero_centered_weight=False";
  if (m.adds) s += ", bool inplace=False";
  if (m.has_memory_efficient()) s += ", bool memory_efficient=False";
  return s + ")";
}

namespace {

// A gated norm. With groups, the last dimension becomes two: the groups, and the elements of a group.
ForwardOutputs evaluate_gated(const MemberArgs& args, Options options) {
  const Tensor& input = args.input;
  const int64_t groups = args.num_groups;
  const int64_t activation = parse_activation(args.activation, input);
  if (present(args.gate)) {
    options.activation = activation;
    options.gate_first = args.gate_first;
  }
  const SymIntArrayRef shape = args.normalized_shape;
  const ForwardArgs whole = {input, shape, args.weight, args.bias, args.eps, options, kAbsent, args.gate};
  check_forward(whole);
  TORCH_CHECK(groups >= 1 && (groups == 1 || (shape.size() == 1 && shape[0] % groups == 0)),
              "Expected num_groups to divide the only dimension of normalized_shape, but got num_groups = ", groups,
              ", normalized_shape = ", shape, " and input of shape ", input.sym_sizes());
  if (groups == 1) return call_forward(whole);
  check_allocated(whole);  // torch's error for a view of a freed storage names no argument
  const c10::SymInt group_size = shape[0] / groups;
  // Parameters need a batch dimension for the groups, and therefore all others, with the batch sizes of each other.
  optional<Tensor> weight = args.weight, bias = args.bias;
  if (present(weight) && present(bias) && (weight->dim() != bias->dim() || weight->sym_sizes() != bias->sym_sizes())) {
    const auto sizes = at::infer_size_symint(weight->sym_sizes(), bias->sym_sizes());
    for (auto* const parameter : {&weight, &bias}) {  // in the dtype in which autograd adds the gradients of rows
      *parameter = (*parameter)->to(accumulate_type(input)).expand_symint(sizes);
    }
  }
  ForwardOutputs outputs = call_with(
      call_forward, {input, {group_size}, weight, bias, args.eps, options, kAbsent, args.gate}, [&](const Tensor& t) {
        Tensor result = t.unflatten_symint(-1, {groups, group_size});
        while (result.dim() <= input.dim()) result = result.unsqueeze(0);
        return result;
      });
  outputs.output = outputs.output.flatten(-2);
  return outputs;
}

}  // namespace

ForwardOutputs evaluate(const Member& m, const MemberArgs& args) {
  const Options options = {m.rms, args.zero_centered_weight || m.adaptive, args.memory_efficient,
                           /*preserve_layout=*/m.images};
  check_layouts(args.input, args.residual, args.weight, args.bias, args.gate, m.adaptive);
  if (m.gated) return evaluate_gated(args, options);
  if (m.images) {
    check_images(args.input, args.weight, args.bias);
    return forward_images({args.input, {args.input.sym_size(1)}, args.weight, args.bias, args.eps, options});
  }
  const SymIntArrayRef shape = args.normalized_shape;
  const auto call = [&](const optional<Tensor>& weight, const optional<Tensor>& bias, const optional<Tensor>& gate) {
    return call_forward({args.input, shape, weight, bias, args.eps, options, args.residual, gate, args.in_place});
  };
  const auto insert_dims = [&](const optional<Tensor>& t) { return insert_batch_dims(t, args.input, shape); };
  if (m.adaptive) {
    check_modulation(args.input, shape, args.weight, args.bias, args.gate);
    return call(insert_dims(args.weight), insert_dims(args.bias), insert_dims(args.gate));
  }
  if (!present(args.gate)) return call(args.weight, args.bias, kAbsent);
  check_modulation(args.input, shape, {}, {}, args.gate);
  return call(args.weight, args.bias, insert_dims(args.gate));
}

namespace {

// Reads the arguments of a boxed call.
struct StackReader {
  const c10::IValue* next;

  Tensor tensor() { return (next++)->toTensor(); }
  optional<Tensor> optional_tensor() { return (next++)->to<optional<Tensor>>(); }
  std::vector<c10::SymInt> shape() { return (next++)->to<std::vector<c10::SymInt>>(); }
  double real() { return (next++)->toDouble(); }
  optional<double> optional_real() { return (next++)->to<optional<double>>(); }
  bool flag() { return (next++)->toBool(); }
  int64_t integer() { return (next++)->toInt(); }
  std::string string() { return (next++)->toStringRef(); }
};

template <size_t kMember>
void evaluate_boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  constexpr const Member& member = kFamily[kMember];
  const size_t count = op.schema().arguments().size();
  StackReader next = {stack->data() + stack->size() - count};
  auto input = next.tensor();
  auto outputs = evaluate(member, read_arguments(member, std::move(input), next));
  torch::jit::drop(*stack, count);
  torch::jit::push(*stack, std::move(outputs.output));
  if (member.adds) torch::jit::push(*stack, std::move(outputs.sum));
}

// Registers a member for the keys that decompose it. vmap and functionalization would refuse it otherwise, because it
// may change its residual.
template <size_t kMember>
void define_member(torch::Library& m) {
  constexpr const Member& member = kFamily[kMember];
  const char* const results = member.adds ? " -> (Tensor output, Tensor(a!) sum)" : " -> Tensor";
  m.def((signature(member, kSchemaSpelling) + results).c_str(), {at::Tag::pt2_compliant_tag});
  using c10::DispatchKey;
  for (const auto key : {DispatchKey::CompositeImplicitAutograd, DispatchKey::FuncTorchBatchedDecomposition,
                         DispatchKey::Functionalize}) {
    m.impl(member.name, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&evaluate_boxed<kMember>>()));
  }
}

template <size_t... kMembers>
void define_members(torch::Library& m, std::index_sequence<kMembers...>) {
  (define_member<kMembers>(m), ...);
}

}  // namespace

void Operators::define_family(torch::Library& m) { define_members(m, std::make_index_sequence<kFamilySize>()); }

}  // namespace layernorm
