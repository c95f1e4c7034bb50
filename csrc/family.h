// The public functions, and the call of forward that each means. bindings.cpp makes them functions of Python.
#pragma once

#include <string>

#include "ops/ops.h"

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
  bool gate_first = false, zero_centered_weight = false, memory_efficient = false, inplace = false;
};

// Returns the output and, with a residual, the sum.
ForwardOutputs evaluate(const Member& member, const MemberArgs& args);

}  // namespace layernorm
