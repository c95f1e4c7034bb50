#include "family.h"

#include <ATen/ExpandUtils.h>

#include "checks.h"
#include "images.h"
#include "types.h"
#include "views.h"

namespace layernorm {

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
  check_layouts(whole);
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
  if (m.gated) return evaluate_gated(args, options);
  if (m.images) {
    check_images(args.input, args.weight, args.bias);
    return forward_images({args.input, {args.input.sym_size(1)}, args.weight, args.bias, args.eps, options});
  }
  const SymIntArrayRef shape = args.normalized_shape;
  const auto call = [&](const optional<Tensor>& weight, const optional<Tensor>& bias, const optional<Tensor>& gate) {
    const ForwardArgs whole = {args.input, shape, weight, bias, args.eps, options, args.residual, gate, args.in_place};
    check_layouts(whole);
    return call_forward(whole);
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

}  // namespace layernorm
