#include "family.h"

#include "checks.h"

namespace layernorm {

ForwardOutputs evaluate(const Member& m, const MemberArgs& args) {
  Options options;
  options.rms = m.rms;
  options.zero_centered_weight = args.zero_centered_weight || m.adaptive;
  options.memory_efficient = args.memory_efficient;
  options.images = m.images;
  options.num_groups = args.num_groups;
  ForwardArgs call = {args.input, args.normalized_shape, args.weight, args.bias, args.eps, options, args.residual};
  c10::SymDimVector channels;
  if (m.images) {
    TORCH_CHECK(args.input.dim() >= 2, "Expected input of shape [N, C, *], but got input of size",
                args.input.sym_sizes());
    channels = {args.input.sym_size(1)};
    call.normalized_shape = channels;
  }
  if (m.gated) {
    const int64_t activation = parse_activation(args.activation, args.input);
    if (present(args.gate)) {
      call.gate = args.gate;
      call.options.activation = activation;
      call.options.gate_first = args.gate_first;
    }
  } else {
    call.input_scale = args.gate;
    call.in_place = args.in_place;
  }
  const bool has_other_names = m.adaptive || call.input_scale;
  if (has_other_names) {
    check_call(call, m.adaptive);
  } else {
    check_layouts(call);
  }
  return call_forward(call);
}

}  // namespace layernorm
