// The emulator's version of csrc/cuda/launch_and_ptx.h, and the part of CUDA C++ that the kernels use, for g++.
//
// Types such as float4, dim3 and __half come from the CUDA toolkit's headers, which support host compilers. The CUDA
// runtime is not linked.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulator.h"

#undef __launch_bounds__
#define __launch_bounds__(...)

#define threadIdx (::emulator::self().thread_idx)
#define blockIdx (::emulator::self().block_idx)
#define blockDim (::emulator::self().block_dim)
#define gridDim (::emulator::self().grid_dim)

// emulated_build.py replaces declarations of shared memory by these macros.
#define EMULATOR_SHARED(name, ...)                              \
  using name##_shared_type = __VA_ARGS__;                       \
  static const char name##_shared_key = 0;                      \
  name##_shared_type& name = *static_cast<name##_shared_type*>( \
      ::emulator::static_shared(&name##_shared_key, sizeof(name##_shared_type), alignof(name##_shared_type), #name))
#define EMULATOR_DYNAMIC_SHARED(name, ...) __VA_ARGS__* name = static_cast<__VA_ARGS__*>(::emulator::dynamic_shared())

// ---- barriers and warp collectives ----------------------------------------------------------------------------------

inline int __syncthreads_or(int predicate, emulator::Place place = emulator::Place::current()) {
  return static_cast<int>(emulator::block_barrier({predicate != 0}, place));
}
inline void __syncthreads(emulator::Place place = emulator::Place::current()) { __syncthreads_or(0, place); }
inline void __syncwarp(unsigned mask = 0xffffffffu, emulator::Place place = emulator::Place::current()) {
  emulator::warp_barrier(mask, place);
}
inline int __any_sync(unsigned mask, int predicate, emulator::Place place = emulator::Place::current()) {
  return static_cast<int>(emulator::warp_collective(mask, {predicate != 0}, place));
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, emulator::Place place = emulator::Place::current()) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, static_cast<const void*>(&value), sizeof(T));
  bits = emulator::warp_collective(mask, {bits, source}, place);
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, emulator::Place place = emulator::Place::current()) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ lane_mask, place);
}

// ---- arithmetic that the C++ library lacks --------------------------------------------------------------------------

using std::abs, std::copysign, std::exp, std::fma, std::hypot, std::signbit, std::sqrt;
inline float __frsqrt_rn(float x) { return static_cast<float>(1 / std::sqrt(static_cast<double>(x))); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
template <class T>
  requires std::is_arithmetic_v<T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
  requires std::is_arithmetic_v<T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}

namespace layernorm {

// ---- launches -------------------------------------------------------------------------------------------------------

using Stream = void*;
using LaunchConfig = emulator::Launch;
using emulator::launch;

template <class... Params>
bool has_clusters(const LaunchConfig&, void (*)(Params...)) {
  return emulator::options().architecture >= 90;
}

inline size_t max_shared_memory(const LaunchConfig&) { return emulator::max_shared_memory(); }

// A test sets the number of resident clusters, or of blocks without clusters, which is the same for all kernels.
template <class... Params>
int resident_blocks(const LaunchConfig& config, void (*)(Params...)) {
  return emulator::options().resident * static_cast<int>(config.cluster);
}

// ---- instructions ---------------------------------------------------------------------------------------------------

using emulator::async_commit, emulator::wait_for_previous_grid;
using emulator::cluster_arrive, emulator::cluster_rank, emulator::cluster_wait;

template <class T>
T* keep_in_register(T* global) {
  return global;
}
inline int keep_in_register(int value) { return value; }
template <class T>
T recompute_from(T value) {
  return value;
}
inline void compiler_fence() {}
template <class T>
T fast_divide(T x, T y) {
  return x / y;
}
inline void prefetch(const void*) {}
inline void prefetch_to_l2(const void*) {}
inline void let_next_grid_start() {}

#define EMULATOR_INLINE __attribute__((always_inline)) inline  // so that a report names the line of the kernel
template <int kBytes>
EMULATOR_INLINE void async_copy(void* shared, const void* global, int bytes = kBytes, int unused = 0) {
  emulator::async_copy(shared, global, kBytes, bytes, unused);
}
template <bool kConstant, class Vector>
EMULATOR_INLINE void load_vector_if(bool condition, Vector& v, const void* from) {
  if (condition) v = *static_cast<const Vector*>(from);
}
template <int kPendingGroups>
EMULATOR_INLINE void async_wait() {
  emulator::async_wait(kPendingGroups);
}
class TransactionBarrier {
 public:
  EMULATOR_INLINE void init() { emulator::barrier_init(this); }
  EMULATOR_INLINE void expect(unsigned bytes) { emulator::barrier_expect(this, bytes); }
  EMULATOR_INLINE void wait(unsigned phase, emulator::Place place = emulator::Place::current()) {
    emulator::barrier_wait(this, phase, place);
  }
  template <class T>
  EMULATOR_INLINE void store(T& shared, const T& value, unsigned rank) {
    emulator::barrier_send(this, &shared, &value, sizeof(T), rank);
  }

 private:
  uint64_t state_;
};

}  // namespace layernorm
