// One register's worth of numbers in the instruction set this file is compiled for: AVX-512, AVX2, or the
// baseline.
//
// Built on the vector types of GCC and Clang, whose + - * / & compare and shift work lane by lane; what those
// types lack (fma, fp16 conversion, masked access) is added here, once per instruction set. Everything stands
// in an anonymous namespace and no library template is used: an inline function compiled with AVX-512 must
// never be chosen by the linker for a machine without it.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace layernorm::cpu {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class Lane, int kBytes = kVectorBytes>
struct VectorOf {
  typedef Lane type __attribute__((vector_size(kBytes), may_alias));
};
template <class Acc>
using Vec = typename VectorOf<Acc>::type;
template <class Acc>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(Acc));

using Bits32 = Vec<uint32_t>;                                        // as many lanes as Vec<float>
using Bits16 = typename VectorOf<uint16_t, kVectorBytes / 2>::type;  // as many lanes as Vec<float>

template <class T>
struct AccumulateType {
  using type = float;
};
template <>
struct AccumulateType<double> {
  using type = double;
};
template <class T>
using AccOf = typename AccumulateType<T>::type;

// How a T lies in a vector: 16-bit numbers as their bits.
template <class T>
struct LaneOf {
  using type = std::conditional_t<sizeof(T) == 2, uint16_t, T>;
};

// Which lanes of a vector are inside the row: all of them, or, at its end, the first few.
struct All {};
struct First {
  int count;  // 1 <= count < lanes
};

template <class Acc>
inline Vec<Acc> broadcast(Acc value) {
  return Vec<Acc>{} + value;
}

// ---- a * b + c with one rounding, where the instruction set has it
// --------------------------------------------------

#if defined(__AVX512F__)
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return _mm512_fmadd_pd(a, b, c); }
#elif defined(__AVX2__)
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return _mm256_fmadd_pd(a, b, c); }
#else
template <class V>
inline V fma(V a, V b, V c) {
  return a * b + c;
}
#endif

// ---- sums over lanes
// ------------------------------------------------------------------------------------------------

template <class Acc, int kBytes>
inline Acc sum_lanes(typename VectorOf<Acc, kBytes>::type v) {
  if constexpr (kBytes == 2 * sizeof(Acc)) {
    return v[0] + v[1];
  } else {
    typename VectorOf<Acc, kBytes / 2>::type low, high;
    std::memcpy(&low, &v, sizeof(low));
    std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof(low), sizeof(high));
    return sum_lanes<Acc, kBytes / 2>(low + high);
  }
}
inline float sum_lanes(Vec<float> v) { return sum_lanes<float, kVectorBytes>(v); }
inline double sum_lanes(Vec<double> v) { return sum_lanes<double, kVectorBytes>(v); }

// As many doubles as Vec<Acc> has lanes: for sums over many rows.
template <class Acc>
using Doubles = typename VectorOf<double, kLanes<Acc> * 8>::type;
template <class Acc>
inline Doubles<Acc> to_double(Vec<Acc> v) {
  return __builtin_convertvector(v, Doubles<Acc>);
}
template <class Acc>
inline Vec<Acc> from_double(Doubles<Acc> v) {
  return __builtin_convertvector(v, Vec<Acc>);
}

// ---- lanes outside the row become zero
// ------------------------------------------------------------------------------

template <class V>
inline V keep(V v, All) {
  return v;
}
template <class V>
inline V keep(V v, First lanes) {
  constexpr int kCount = sizeof(V) / sizeof(v[0]);
  using Integer = std::conditional_t<sizeof(v[0]) == 4, int32_t, int64_t>;
  Vec<Integer> index;
  for (int k = 0; k < kCount; ++k) index[k] = k;
  return index < Vec<Integer>{} + static_cast<Integer>(lanes.count) ? v : V{};
}

// ---- conversions between memory and accumulation types
// --------------------------------------------------------------

inline Vec<float> widen(Bits16 v, BFloat16) {
  return reinterpret_cast<Vec<float>>(__builtin_convertvector(v, Bits32) << 16);
}

// In integer arithmetic, because AVX-512's own conversion flushes subnormal numbers to zero.
inline Bits16 narrow(Vec<float> v, BFloat16) {
  const Bits32 bits = reinterpret_cast<Bits32>(v);
  const Bits32 nearest_even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Bits32 quiet_nan = Bits32{} + 0x7fc0;
  return __builtin_convertvector(v == v ? nearest_even : quiet_nan, Bits16);
}

#if defined(__AVX512F__)
// The masked forms, with every lane: GCC's plain ones leave the result's old value uninitialised and warn of
// it.
inline Vec<float> widen(Bits16 v, Half) {
  return _mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(v));
}
inline Bits16 narrow(Vec<float> v, Half) {
  return reinterpret_cast<Bits16>(
      _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__AVX2__)
inline Vec<float> widen(Bits16 v, Half) { return _mm256_cvtph_ps(reinterpret_cast<__m128i>(v)); }
inline Bits16 narrow(Vec<float> v, Half) {
  return reinterpret_cast<Bits16>(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
// The exponent of fp16 is biased by 15, that of fp32 by 127: shift the bits into place and multiply by 2^112,
// which is right for subnormal numbers too; infinity and NaN get the largest exponent instead.
inline Vec<float> widen(Bits16 v, Half) {
  const Bits32 bits = __builtin_convertvector(v, Bits32);
  const Bits32 sign = (bits & 0x8000) << 16;
  const Bits32 magnitude = (bits & 0x7fff) << 13;
  const Bits32 finite = reinterpret_cast<Bits32>(reinterpret_cast<Vec<float>>(magnitude) * 0x1p112f);
  return reinterpret_cast<Vec<float>>(sign | (magnitude >= 0x7c00u << 13 ? magnitude | 0x7f800000u : finite));
}
inline Bits16 narrow(Vec<float> v, Half) {
  const Bits32 bits = reinterpret_cast<Bits32>(v);
  const Bits32 sign = (bits >> 16) & 0x8000;
  const Bits32 magnitude = bits & 0x7fffffff;
  const Bits32 normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Added to 1/2, whose last place is fp16's smallest number, a subnormal number is rounded by the addition.
  const Vec<float> half = broadcast(0.5f);
  const Bits32 subnormal = reinterpret_cast<Bits32>(reinterpret_cast<Vec<float>>(magnitude) + half) -
                           reinterpret_cast<Bits32>(half);
  const Bits32 infinity = Bits32{} + 0x7c00, quiet_nan = Bits32{} + 0x7e00;
  Bits32 result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= (143u << 23) ? infinity : result;
  result = magnitude > 0x7f800000u ? quiet_nan : result;
  return __builtin_convertvector(sign | result, Bits16);
}
#endif

// ---- loads and stores; nothing outside the row is touched
// -----------------------------------------------------------

template <class V, class T>
inline V read(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
template <class V, class T>
inline void write(T* p, V v) {
  std::memcpy(p, &v, sizeof(v));
}

#if defined(__AVX512F__)
inline uint32_t mask(First lanes) { return (1u << lanes.count) - 1; }
inline Vec<float> read_first(const float* p, First lanes) { return _mm512_maskz_loadu_ps(mask(lanes), p); }
inline Vec<double> read_first(const double* p, First lanes) { return _mm512_maskz_loadu_pd(mask(lanes), p); }
template <class T>
inline Bits16 read_first(const T* p, First lanes) {
  return reinterpret_cast<Bits16>(_mm256_maskz_loadu_epi16(mask(lanes), p));
}
inline void write_first(float* p, Vec<float> v, First lanes) { _mm512_mask_storeu_ps(p, mask(lanes), v); }
inline void write_first(double* p, Vec<double> v, First lanes) { _mm512_mask_storeu_pd(p, mask(lanes), v); }
template <class T>
inline void write_first(T* p, Bits16 v, First lanes) {
  _mm256_mask_storeu_epi16(p, mask(lanes), reinterpret_cast<__m256i>(v));
}
#else
template <class T>
inline auto read_first(const T* p, First lanes) {
  typename VectorOf<typename LaneOf<T>::type, sizeof(T) * kLanes<AccOf<T>>>::type v{};
  std::memcpy(&v, p, lanes.count * sizeof(T));
  return v;
}
template <class T, class V>
inline void write_first(T* p, V v, First lanes) {
  std::memcpy(p, &v, lanes.count * sizeof(T));
}
#endif

inline Vec<float> load(const float* p, All) { return read<Vec<float>>(p); }
inline Vec<double> load(const double* p, All) { return read<Vec<double>>(p); }
template <class T>
inline Vec<float> load(const T* p, All) {
  return widen(read<Bits16>(p), T{});
}
inline Vec<float> load(const float* p, First lanes) { return read_first(p, lanes); }
inline Vec<double> load(const double* p, First lanes) { return read_first(p, lanes); }
template <class T>
inline Vec<float> load(const T* p, First lanes) {
  return widen(read_first(p, lanes), T{});
}

inline void store(float* p, Vec<float> v, All) { write(p, v); }
inline void store(double* p, Vec<double> v, All) { write(p, v); }
template <class T>
inline void store(T* p, Vec<float> v, All) {
  write(p, narrow(v, T{}));
}
inline void store(float* p, Vec<float> v, First lanes) { write_first(p, v, lanes); }
inline void store(double* p, Vec<double> v, First lanes) { write_first(p, v, lanes); }
template <class T>
inline void store(T* p, Vec<float> v, First lanes) {
  write_first(p, narrow(v, T{}), lanes);
}

}  // namespace
}  // namespace layernorm::cpu
