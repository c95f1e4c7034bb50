// The sizes at which the host code chooses another kernel or another launch.
#pragma once

#include <cstdint>

namespace layernorm::cuda {

constexpr int64_t kMaxGridY = 65535;  // blocks of a grid along y

// Vectors of a row that forward keeps in registers, and of a row or part that a warp or a block stages.
constexpr int64_t kMaxRegisterVectors = 2048;
constexpr int64_t kMaxWarpVectors = 128;
constexpr int64_t kMaxPartVectors = 2048;

// Rounds of a block in backward that take less time than a second launch.
constexpr int64_t kFewRounds = 2;

// Bytes of shared memory that stage the pixels of a block, so that two blocks fit on a multiprocessor of an H100. GPUs
// of compute capability 8.6, 8.9 and 12.0 have less.
constexpr int64_t kMaxStagedBytes = 96 * 1024;

}  // namespace layernorm::cuda
