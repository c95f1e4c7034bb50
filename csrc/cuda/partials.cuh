// The gradients of parameters from their partial sums in the workspace.
#pragma once

#include "row.cuh"

namespace layernorm::cuda {

// Adds the partial sums of dweight [plan.weight_partials, pitch] and dbias [plan.bias_partials, pitch] in the
// workspace. `config` launched the kernel that computes them.
template <class Acc>
void launch_add_partials(const BackwardParams& p, const GradientPlan& plan, int64_t pitch, LaunchConfig config);

}  // namespace layernorm::cuda
