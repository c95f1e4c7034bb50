// The activations of gated norms.
#pragma once

#include "geometry.h"
#include "vec.cuh"

namespace layernorm::cuda {

// The activation f(z) of a gate, and its derivative.
struct Activated {
  Acc value, derivative;

  // sigmoid(z) and 1 - sigmoid(z) come from the same exponential, which does not overflow, and neither cancels.
  __device__ __forceinline__ Activated(Acc z, Flags flags) {
    const Acc e = exp(-abs(z)), larger = fast_divide(Acc(1), 1 + e), smaller = e * larger;
    const Acc sigmoid = z < 0 ? smaller : larger, rest = z < 0 ? larger : smaller;
    value = flags.has(kSigmoid) ? sigmoid : z * sigmoid;
    derivative = sigmoid * (flags.has(kSigmoid) ? rest : fma(z, rest, Acc(1)));
  }
};

}  // namespace layernorm::cuda
