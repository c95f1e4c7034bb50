// The sizes at which the host code chooses another kernel or another launch.
#pragma once

#include <cstdint>

namespace layernorm::cuda {

constexpr int64_t kMaxGridY = 65535;  // blocks of a grid along y

// Vectors of a row or of a chunk. Rows with more than kMaxTileVectors are cut into chunks. In backward, rows with more
// than kMaxWarpRowVectors have a block to themselves, and larger chunks are allowed if a cluster then holds the row.
constexpr int64_t kMaxTileVectors = 2048;
constexpr int64_t kMaxChunkVectors = 1024;
constexpr int64_t kMaxClusterChunkVectors = 2048;
constexpr int64_t kMaxWarpRowVectors = 128;

// Bytes of shared memory that stage the pixels of a block, so that two blocks fit on a multiprocessor of an H100. GPUs
// of compute capability 8.6, 8.9 and 12.0 have less.
constexpr int64_t kMaxStagedBytes = 96 * 1024;

}  // namespace layernorm::cuda
