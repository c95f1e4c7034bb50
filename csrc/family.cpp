#include "family.h"

#include <utility>

#include "checks.h"
#include "images.h"
#include "views.h"

namespace layernorm {

std::string signature(const Member& m, const Spelling& spelling) {
  std::string s = std::string(m.name) + "(Tensor input";
  if (m.adds) s += std::string(", ") + spelling.changed_tensor + " residual";
  if (!m.images) s += std::string(", ") + spelling.shape + " normalized_shape";
  s += m.adaptive ? ", Tensor? scale=None, Tensor? shift=None" : ", Tensor? weight=None";
  if (!m.adaptive && m.has_bias()) s += ", Tensor? bias=None";
  s += std::string(", ") + spelling.real;
  s += m.has_default_eps() ? "? eps=None" : m.adaptive || m.images ? " eps=1e-06" : " eps=1e-05";
  if (!m.adaptive) s += ", *, bool zero_centered_weight=False";
  if (m.adds) s += ", bool inplace=False";
  if (m.has_memory_efficient()) s += ", bool memory_efficient=False";
  return s + ")";
}

ForwardOutputs evaluate(const Member& m, const MemberArgs& args) {
  const Options options = {m.rms, args.zero_centered_weight || m.adaptive, args.memory_efficient,
                           /*preserve_layout=*/m.images};
  const auto call = [&](ForwardFunction function, SymIntArrayRef shape, const optional<Tensor>& weight,
                        const optional<Tensor>& bias) {
    return function({args.input, shape, weight, bias, args.eps, options, args.residual, args.in_place});
  };
  if (m.images) {
    check_images(args.input, args.residual, args.weight, args.bias, m.adaptive);
    return call(forward_images, {args.input.sym_size(1)}, args.weight, args.bias);
  }
  const SymIntArrayRef shape = args.normalized_shape;
  if (!m.adaptive) return call(call_forward, shape, args.weight, args.bias);
  check_modulation(args.input, shape, args.weight, args.bias);
  return call(call_forward, shape, insert_batch_dims(args.weight, args.input, shape),
              insert_batch_dims(args.bias, args.input, shape));
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
