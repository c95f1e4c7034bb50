#include "family.h"

#include <algorithm>

#include "ops/checks.h"

namespace layernorm {

ForwardOutputs evaluate(const Member& m, const MemberArgs& args) {
  Options options;
  options.rms = m.rms;
  options.zero_centered_weight = args.zero_centered_weight || m.adaptive;
  options.memory_efficient = args.memory_efficient;
  options.images = m.images;
  options.num_groups = args.num_groups;
  ForwardArgs call = {args.input, args.normalized_shape, args.weight, args.bias, args.eps, options, args.residual};
  if (m.gated) {
    const int64_t activation = parse_activation(args.activation, args.input);
    if (present(args.gate)) {
      call.gate = args.gate;
      call.options.activation = activation;
      call.options.gate_first = args.gate_first;
    }
  } else {
    call.input_scale = args.gate;
    call.inplace = args.inplace;
  }
  if (m.adaptive || call.input_scale) {  // whose names differ from those of the operator
    check_call(call, m.adaptive);
  } else {
    check_layouts(call);
  }
  if (m.images) {
    const auto sizes = args.input.sym_sizes();
    call.normalized_shape = sizes.slice(std::min<size_t>(sizes.size(), 1), sizes.size() > 1 ? 1 : 0);
  }
  return call_forward(call);
}

}  // namespace layernorm
