// The part of the CUDA C++ language that the kernels use, for an ordinary host compiler: a kernel that is
// written against csrc/cuda/device.h compiles unchanged, and runs in the emulator.
//
// Types (float4, dim3, __half, __nv_bfloat16, ...) and their arithmetic come from the CUDA toolkit's own
// headers, which support plain host compilation. Nothing of the CUDA runtime is linked.
#pragma once

#if defined(__CUDACC__)
#error "cuda_on_cpu.h is for host compilers; nvcc compiles the real thing"
#endif

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

#undef __shared__  // shared memory goes through the macros below, so that it can be checked
#undef __launch_bounds__
#define __launch_bounds__(...)

// ---- index variables --------------------------------------------------------------------------------------
#define threadIdx (::emulator::self().thread_idx)
#define blockIdx (::emulator::self().block_idx)
#define blockDim (::emulator::self().block_dim)
#define gridDim (::emulator::self().grid_dim)

// ---- shared memory ----------------------------------------------------------------------------------------
#define EMULATOR_SHARED(name, ...)                              \
  using name##_shared_type = __VA_ARGS__;                       \
  static const char name##_shared_key = 0;                      \
  name##_shared_type& name = *static_cast<name##_shared_type*>( \
      ::emulator::static_shared(&name##_shared_key, sizeof(name##_shared_type), alignof(name##_shared_type), #name))
#define EMULATOR_DYNAMIC_SHARED(name, ...) __VA_ARGS__* name = static_cast<__VA_ARGS__*>(::emulator::dynamic_shared(16))

// ---- barriers, fences -------------------------------------------------------------------------------------
inline void __syncthreads(emulator::Place place = emulator::Place::current()) {
  emulator::block_barrier(emulator::Vote::kNone, false, place);
}
inline int __syncthreads_count(int predicate, emulator::Place place = emulator::Place::current()) {
  return emulator::block_barrier(emulator::Vote::kCount, predicate != 0, place);
}
inline int __syncthreads_and(int predicate, emulator::Place place = emulator::Place::current()) {
  return emulator::block_barrier(emulator::Vote::kAnd, predicate != 0, place);
}
inline int __syncthreads_or(int predicate, emulator::Place place = emulator::Place::current()) {
  return emulator::block_barrier(emulator::Vote::kOr, predicate != 0, place);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, emulator::Place place = emulator::Place::current()) {
  emulator::warp_collective(emulator::Collective::kSync, mask, 0, 0, place);
}
inline void __nanosleep(unsigned) { emulator::yield(); }
inline void __threadfence() {}  // memory is sequentially consistent here: a missing fence is not found
[[noreturn]] inline void __trap() { emulator::trap(); }

// ---- warp collectives -------------------------------------------------------------------------------------
namespace emulator {
template <class T>
T shuffle(unsigned mask, T value, int source_lane, const Place& place) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, static_cast<const void*>(&value), sizeof(T));
  bits = warp_collective(Collective::kShuffle, mask, bits, source_lane, place);
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}
// First and last lane of the caller's segment of `width` lanes.
inline int segment_begin(int lane, int width) { return lane & ~(width - 1); }
inline int segment_end(int lane, int width) { return lane | (width - 1); }
}  // namespace emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, emulator::Place place = emulator::Place::current()) {
  return emulator::shuffle(mask, value, emulator::segment_begin(emulator::lane(), width) + (source & (width - 1)),
                           place);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  emulator::Place place = emulator::Place::current()) {
  const int lane = emulator::lane(), source = lane ^ lane_mask;
  return emulator::shuffle(mask, value, source > emulator::segment_end(lane, width) ? lane : source, place);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   emulator::Place place = emulator::Place::current()) {
  const int lane = emulator::lane(), source = lane + static_cast<int>(delta);
  return emulator::shuffle(mask, value, source > emulator::segment_end(lane, width) ? lane : source, place);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 emulator::Place place = emulator::Place::current()) {
  const int lane = emulator::lane(), source = lane - static_cast<int>(delta);
  return emulator::shuffle(mask, value, source < emulator::segment_begin(lane, width) ? lane : source, place);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, emulator::Place place = emulator::Place::current()) {
  return static_cast<unsigned>(
      emulator::warp_collective(emulator::Collective::kBallot, mask, predicate != 0, 0, place));
}
inline int __any_sync(unsigned mask, int predicate, emulator::Place place = emulator::Place::current()) {
  return static_cast<int>(emulator::warp_collective(emulator::Collective::kAny, mask, predicate != 0, 0, place));
}
inline int __all_sync(unsigned mask, int predicate, emulator::Place place = emulator::Place::current()) {
  return static_cast<int>(emulator::warp_collective(emulator::Collective::kAll, mask, predicate != 0, 0, place));
}

// ---- loads and atomics ------------------------------------------------------------------------------------
#define EMULATOR_INLINE __attribute__((always_inline)) inline  // so that a report names the kernel's line
template <class T>
EMULATOR_INLINE T __ldg(const T* address) {
  emulator::read_only_load(address, sizeof(T));
  return *address;
}

namespace emulator {
template <class T, class F>
EMULATOR_INLINE T atomic_update(T* address, F next) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint64_t bits = atomic_begin(address, sizeof(T));
  T old;
  std::memcpy(&old, &bits, sizeof(T));
  const T made = next(old);
  std::memcpy(&bits, &made, sizeof(T));
  atomic_end(address, sizeof(T), bits);
  return old;
}
}  // namespace emulator
template <class T>
EMULATOR_INLINE T atomicAdd(T* address, std::type_identity_t<T> value) {
  return emulator::atomic_update(address, [=](T old) { return old + value; });
}
template <class T>
EMULATOR_INLINE T atomicExch(T* address, std::type_identity_t<T> value) {
  return emulator::atomic_update(address, [=](T) { return value; });
}
template <class T>
EMULATOR_INLINE T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return emulator::atomic_update(address, [=](T old) { return old == expected ? value : old; });
}

// ---- arithmetic that glibc does not have, or has of doubles alone ---------------------------------------
using std::abs, std::fma, std::hypot, std::sqrt;
// Off by far more than the 2 units in the last place that CUDA allows: enough to see who improves it.
inline float rsqrtf(float x) { return (1 + 0x1p-13f) / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
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
