// Vector<E, kSize>: neighbouring elements of a row that a thread loads or stores together, by instructions of up to 16
// bytes. A vector of x, the array that is normalized, has 16 bytes. Vectors of other arrays have the same columns, and
// so 8, 16 or 32 bytes, according to their dtypes.
#pragma once

#include <algorithm>
#include <type_traits>

#include "launch_and_ptx.h"

namespace layernorm::cuda {

// The element types for which dispatch_dtypes() instantiates kernels. float64 has none: composite.cpp computes it.
struct Elements {
  using Float64 = void;
  using Float32 = float;
  using Float16 = __half;
  using BFloat16 = __nv_bfloat16;
};

using Acc = float;  // the type of statistics and sums

template <class T>
constexpr int kVectorSize = 16 / sizeof(T);  // elements of T in 16 bytes

template <class E, int kSize>
struct alignas(std::min<size_t>(kSize * sizeof(E), 16)) Vector {
  E values[kSize];
};

// Sets all elements to `value`. Elements of 16 bits are set in pairs, because one register holds two.
template <class E, int kSize>
__device__ __forceinline__ void fill(Vector<E, kSize>& v, E value) {
  constexpr int kPerWord = sizeof(E) == 2 ? 2 : 1;
  using Word = std::conditional_t<sizeof(E) == 2, uint32_t, E>;
  for (int e = 0; e < kSize; e += kPerWord) {
    const Vector<E, 2> word = {{value, value}};
    reinterpret_cast<Word&>(v.values[e]) = reinterpret_cast<const Word&>(word);
  }
}

// Converts Acc to E: rounds to nearest, ties to even, and keeps subnormal numbers.
template <class E, int kSize>
__device__ __forceinline__ Vector<E, kSize> round_to(const Acc (&v)[kSize]) {
  Vector<E, kSize> result;
  if constexpr (sizeof(E) == 2) {  // one instruction converts two elements
    for (int e = 0; e < kSize; e += 2) {
      if constexpr (std::is_same_v<E, __half>) {
        reinterpret_cast<__half2&>(result.values[e]) = __floats2half2_rn(v[e], v[e + 1]);
      } else {
        reinterpret_cast<__nv_bfloat162&>(result.values[e]) = __floats2bfloat162_rn(v[e], v[e + 1]);
      }
    }
  } else {
    for (int e = 0; e < kSize; ++e) result.values[e] = static_cast<E>(v[e]);
  }
  return result;
}

// Converts all elements to Acc. A bfloat16 has the upper half of a float's bits.
template <class E, int kSize>
__device__ __forceinline__ void widen(Acc (&result)[kSize], const Vector<E, kSize>& v) {
  if constexpr (std::is_same_v<E, __nv_bfloat16>) {
    for (int e = 0; e < kSize; e += 2) {
      const uint32_t pair = reinterpret_cast<const uint32_t&>(v.values[e]);
      result[e] = __uint_as_float(pair << 16);
      result[e + 1] = __uint_as_float(pair & 0xffff0000u);
    }
  } else if constexpr (std::is_same_v<E, __half>) {
    for (int e = 0; e < kSize; e += 2) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(v.values[e]));
      result[e] = pair.x;
      result[e + 1] = pair.y;
    }
  } else {
    for (int e = 0; e < kSize; ++e) result[e] = static_cast<Acc>(v.values[e]);
  }
}

}  // namespace layernorm::cuda
