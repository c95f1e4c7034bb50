// The sizes at which the host code chooses another kernel or another launch configuration. The emulator replaces this
// file by tools/cuda_emulator/lowered_limits.h, whose sizes tests lower.
#pragma once

#include <cstdint>

namespace layernorm::cuda {

constexpr int64_t kMaxGridY = 65535;  // blocks along y in a grid; CUDA's limit

// The most vectors (16 bytes) of a row that forward keeps in registers, that one warp stages in shared memory, and that
// one block stages there.
constexpr int64_t kMaxRegisterVectors = 2048;
constexpr int64_t kMaxWarpVectors = 128;
constexpr int64_t kMaxBlockVectors = 2048;

// Backward is a single launch if one block handles all rows in at most so many iterations, or each of up to 8 blocks of
// a cluster its share of them. This block or cluster sums the weight gradients of all rows, because a second kernel
// (add_partials) would take longer. See plan_launch() in backward_kernel.cuh.
constexpr int64_t kFewIterations = 2;

// The most shared memory of a block for pixels of images (channels_first.cu), so that two blocks fit on a
// multiprocessor of an H100. GPUs of compute capability 8.6, 8.9 and 12.0 have about so much in all, and run one block.
constexpr int64_t kMaxStagedBytes = 96 * 1024;

}  // namespace layernorm::cuda
