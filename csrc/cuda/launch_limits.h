// The sizes at which the host code chooses another kernel or another launch. The emulator has lower ones for tests.
#pragma once

#include <cstdint>

namespace layernorm::cuda {

constexpr int64_t kMaxGridY = 65535;  // blocks of a grid along y

// The most vectors of a row that forward keeps in registers, that a warp stages, and that a block stages.
constexpr int64_t kMaxRegisterVectors = 2048;
constexpr int64_t kMaxWarpVectors = 128;
constexpr int64_t kMaxBlockVectors = 2048;

// The most iterations of a block in backward for which one launch, without add_partials, is faster: see plan_launch().
constexpr int64_t kFewIterations = 2;

// The most bytes of a staged tile of images (channels_first.cu), so that two blocks fit on a multiprocessor of an H100.
// GPUs of compute capability 8.6, 8.9 and 12.0 have less shared memory.
constexpr int64_t kMaxStagedBytes = 96 * 1024;

}  // namespace layernorm::cuda
