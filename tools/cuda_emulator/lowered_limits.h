// The emulator's version of csrc/cuda/launch_limits.h, whose limits tests lower to reach every kernel with short rows.
#pragma once

#include <algorithm>
#include <cstdint>

namespace layernorm::cuda {

inline int64_t kMaxGridY = 5;  // so small that a block takes several segments, samples (add_partials) or iterations
inline int64_t kMaxRegisterVectors = 2048, kMaxWarpVectors = 128, kMaxBlockVectors = 2048;
inline int64_t kMaxStagedBytes = 96 * 1024;
inline int64_t kFewIterations = 0;  // few rows then reach the kernel that adds partial sums

// Lowers the limits on a row (in vectors) and on staged pixels (in bytes) to path_limit, and the limit on the
// iterations of a single launch of backward to few_iterations.
inline void lower_launch_limits(int64_t path_limit, int64_t few_iterations) {
  kFewIterations = few_iterations;
  kMaxRegisterVectors = std::min<int64_t>(path_limit, 2048);
  kMaxWarpVectors = std::min<int64_t>(path_limit, 128);
  kMaxBlockVectors = std::clamp<int64_t>(path_limit, 32, 2048);  // 32: a vector for each lane
  kMaxStagedBytes = std::min<int64_t>(path_limit, 96 * 1024);
}

}  // namespace layernorm::cuda
