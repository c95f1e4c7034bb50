// The public functions: their signatures, and the call of forward that each means.
//
// Each is registered as a composite operator, which TorchScript compiles, and as a Python function of layernorm_ext._C
// for eager calls.
#pragma once

#include <limits>
#include <string>

#include "ops.h"

namespace layernorm {

struct Member {
  const char* name;
  bool rms = false;
  bool adds = false;      // a residual
  bool adaptive = false;  // the parameters are scale and shift
  bool images = false;    // the channels are the second dimension
  bool gated = false;     // a gated norm; a residual may have a gate in any case

  constexpr bool has_bias() const { return adaptive || !rms; }
  constexpr bool has_default_eps() const { return rms && !adaptive; }  // that of the dtype
  constexpr bool has_memory_efficient() const { return !rms && !adds && !adaptive && !gated; }
};

constexpr Member kFamily[] = {
    {"layer_norm"},
    {"rms_norm", /*rms=*/true},
    {"add_layer_norm", false, /*adds=*/true},
    {"add_rms_norm", true, true},
    {"ada_layer_norm", false, false, /*adaptive=*/true},
    {"ada_rms_norm", true, false, true},
    {"add_ada_layer_norm", false, true, true},
    {"add_ada_rms_norm", true, true, true},
    {"gated_layer_norm", false, false, false, false, /*gated=*/true},
    {"gated_rms_norm", true, false, false, false, true},
    {"layer_norm_2d", false, false, false, /*images=*/true},
    {"rms_norm_2d", true, false, false, true},
};
constexpr size_t kFamilySize = std::size(kFamily);

// How a parser of signatures spells types.
struct Spelling {
  const char *changed_tensor, *shape, *real, *integer, *string;
};
constexpr Spelling kSchemaSpelling = {"Tensor(a!)", "SymInt[]", "float", "int", "str"};
constexpr Spelling kPythonSpelling = {"Tensor", "SymIntArrayRef", "double", "int64_t", "c10::string_view"};

// The arguments in the order in which read_arguments() reads them.
std::string signature(const Member& member, const Spelling& spelling);

// The arguments of a call of any member.
struct MemberArgs {
  Tensor input;
  optional<Tensor> residual;
  std::vector<c10::SymInt> normalized_shape;
  optional<Tensor> weight, bias;
  double eps = 0;
  optional<Tensor> gate;
  std::string activation;
  int64_t num_groups = 1;
  bool gate_first = false, zero_centered_weight = false, memory_efficient = false, in_place = false;
};

// The eps of RMSNorm if it is absent: the machine epsilon of the accumulation type.
inline double default_eps(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                            : std::numeric_limits<float>::epsilon();
}

// Reads the arguments after the input. A Reader returns one argument after the other.
template <class Reader>
MemberArgs read_arguments(const Member& member, Tensor input, Reader&& next) {
  MemberArgs args;
  args.input = std::move(input);
  if (member.adds) {
    args.residual = next.tensor();
    TORCH_CHECK(args.residual->defined(), "Expected residual to be a tensor, but got None for input of shape ",
                args.input.sym_sizes());
  }
  if (member.gated) args.gate = next.optional_tensor();
  if (!member.images) args.normalized_shape = next.shape();
  args.weight = next.optional_tensor();
  if (member.has_bias()) args.bias = next.optional_tensor();
  args.eps = member.has_default_eps() ? next.optional_real().value_or(default_eps(args.input)) : next.real();
  if (member.adds) args.gate = next.optional_tensor();
  if (member.gated) {
    args.activation = next.string();
    args.gate_first = next.flag();
    args.num_groups = next.integer();
  }
  if (!member.adaptive) args.zero_centered_weight = next.flag();
  if (member.adds) args.in_place = next.flag();
  if (member.has_memory_efficient()) args.memory_efficient = next.flag();
  return args;
}

// Returns the output and, with a residual, the sum.
ForwardOutputs evaluate(const Member& member, const MemberArgs& args);

}  // namespace layernorm
