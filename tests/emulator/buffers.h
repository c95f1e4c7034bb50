// The global memory that kernels may touch: what the host code of an emulated library needs of the emulator.
// Free of CUDA's headers, and so of their macros.
#pragma once

#include <cstddef>

namespace emulator {

enum class Contents {
  kInput,   // filled; kernels only read it
  kOutput,  // a kernel writes before one reads
  kInOut,   // filled, and kernels write
};

// `name` is what reports call it. A second registration of an address replaces the first.
void register_buffer(const void* base, size_t bytes, const char* name, Contents contents);
void clear_buffers();

}  // namespace emulator
