// The global memory that kernels may access. Host code includes this header without CUDA's headers and macros.
#pragma once

#include <cstddef>

namespace emulator {

enum class Contents {
  kInput,   // initialized and read-only
  kOutput,  // uninitialized
  kInOut,   // initialized and writable
};

// Reports call the buffer `name`. A second registration of an address replaces the first.
void register_buffer(const void* base, size_t bytes, const char* name, Contents contents);
void clear_buffers();

}  // namespace emulator
