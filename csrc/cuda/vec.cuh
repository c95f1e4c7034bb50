// Elements and vectors of them: 16 bytes of a row, and as many of the parameters.
#pragma once

#include <type_traits>

#include "device.h"

namespace layernorm::cuda {

// The element types of the CUDA kernels for dtypes.h.
struct Elements {
  using Float64 = double;
  using Float32 = float;
  using Float16 = __half;
  using BFloat16 = __nv_bfloat16;
};

template <class T>
using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Elements of T that a thread handles at a time.
template <class T>
constexpr int kVectorSize = 16 / sizeof(T);

template <class E, int kCount>
struct alignas(16) Vector {
  E of[kCount];
};

// kPiece of the elements, from number `begin` on.
template <int kPiece, class E, int kCount>
__device__ __forceinline__ Vector<E, kPiece> piece(const Vector<E, kCount>& v, int begin) {
  Vector<E, kPiece> result;
#pragma unroll
  for (int e = 0; e < kPiece; ++e) result.of[e] = v.of[begin + e];
  return result;
}

// Loads `valid` elements, of which there may be more than a vector or less than one; zeros beyond. Full vectors by
// accesses of 16 bytes, if those are aligned.
template <class E, int kCount>
__device__ __forceinline__ void load(Vector<E, kCount>& v, const E* from, int valid, bool aligned) {
  if (aligned && valid >= kCount) {
    v = *reinterpret_cast<const Vector<E, kCount>*>(from);
    return;
  }
  v = {};
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if (e < valid) v.of[e] = from[e];
  }
}

// With `otherwise` for an array that is not there.
template <class E, int kCount>
__device__ __forceinline__ void load_or(Vector<E, kCount>& v, const E* array, int64_t begin, int valid, bool aligned,
                                        E otherwise) {
  if (array) {
    load(v, array + begin, valid, aligned);
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) v.of[e] = otherwise;
  }
}

// To the nearest, ties to even; subnormal numbers stay.
template <class E, class Acc, int kCount>
__device__ __forceinline__ Vector<E, kCount> rounded(const Acc (&v)[kCount]) {
  Vector<E, kCount> result;
  if constexpr (sizeof(E) == 2) {  // one instruction converts two
#pragma unroll
    for (int e = 0; e < kCount; e += 2) {
      if constexpr (std::is_same_v<E, __half>) {
        reinterpret_cast<__half2&>(result.of[e]) = __floats2half2_rn(v[e], v[e + 1]);
      } else {
        reinterpret_cast<__nv_bfloat162&>(result.of[e]) = __floats2bfloat162_rn(v[e], v[e + 1]);
      }
    }
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) result.of[e] = static_cast<E>(v[e]);
  }
  return result;
}

// All elements in Acc, by one instruction each: the bits of a bfloat16 are the upper half of those of a float.
template <class E, class Acc, int kCount>
__device__ __forceinline__ void widen(Acc (&to)[kCount], const Vector<E, kCount>& v) {
  if constexpr (std::is_same_v<E, __nv_bfloat16>) {
#pragma unroll
    for (int e = 0; e < kCount; e += 2) {
      const uint32_t pair = reinterpret_cast<const uint32_t&>(v.of[e]);
      to[e] = __uint_as_float(pair << 16);
      to[e + 1] = __uint_as_float(pair & 0xffff0000u);
    }
  } else if constexpr (std::is_same_v<E, __half>) {
#pragma unroll
    for (int e = 0; e < kCount; e += 2) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(v.of[e]));
      to[e] = pair.x, to[e + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) to[e] = static_cast<Acc>(v.of[e]);
  }
}

}  // namespace layernorm::cuda
