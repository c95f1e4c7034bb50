// Vector operations for the instruction set that this file is compiled for: AVX-512, AVX2, or the baseline.
//
// They use the vector types of GCC and Clang, whose + - * & and shifts work lane by lane. Operations that these types
// lack, or that compilers translate badly, are written once per instruction set. Everything is in an anonymous
// namespace, so that the linker cannot choose an inline function compiled with AVX-512 for a machine without it.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// GCC 12 warns of vectors that a loop fills lane by lane, and of the undefined vectors inside its own intrinsics. A
// full mask, as in _mm512_maskz_shuffle_f32x4(0xffff, ...), avoids such a vector and changes no instruction.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace layernorm::cpu {
namespace {

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

struct Half {  // float16
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The type of statistics and sums: double for double, else float.
template <class T>
using AccOf = std::conditional_t<sizeof(T) == 8, double, float>;

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// Vectors, by default as large as a register.
template <class Lane, int kBytes = kVectorBytes>
struct VectorOf {
  typedef Lane type __attribute__((vector_size(kBytes), may_alias));
};
template <class Acc>
using Vec = typename VectorOf<Acc>::type;
using Words = Vec<uint32_t>;

// ---- packs ----------------------------------------------------------------------------------------------------------

// The unit of all loops: two vectors. One register of 16-bit elements widens to a pack of floats.
template <class Acc>
struct Pack {
  Vec<Acc> a, b;
};
template <class Acc>
constexpr int kPackSize = 2 * kVectorBytes / static_cast<int>(sizeof(Acc));

// Whether a pack holds the even elements in one vector and the odd ones in the other. Widening bfloat16 this way takes
// one instruction per vector; keeping the order takes two or three.
template <class T>
constexpr bool kEvenOdd = std::is_same_v<T, BFloat16>;

// The lanes of a pack that are inside the row: all, or the first few at the end of a row.
struct AllLanes {};
struct FirstLanes {
  int count;  // 1 <= count < kPackSize
};

// Returns a pack as it is, and a scalar in every lane, so that operators take both. value - 0 keeps -0, value + 0 would
// not.
template <class Acc>
inline const Pack<Acc>& broadcast(const Pack<Acc>& p) {
  return p;
}
template <class Acc, class = std::enable_if_t<std::is_floating_point_v<Acc>>>
inline Pack<Acc> broadcast(Acc value) {
  return {value - Vec<Acc>{}, value - Vec<Acc>{}};
}

template <class Acc, class Y>
inline Pack<Acc> operator+(const Pack<Acc>& x, const Y& y) {
  return {x.a + broadcast(y).a, x.b + broadcast(y).b};
}
template <class Acc, class Y>
inline Pack<Acc> operator-(const Pack<Acc>& x, const Y& y) {
  return {x.a - broadcast(y).a, x.b - broadcast(y).b};
}
template <class Acc>
inline Pack<Acc> operator/(const Pack<Acc>& x, const Pack<Acc>& y) {
  return {x.a / y.a, x.b / y.b};
}
template <class Acc, class Y>
inline Pack<Acc> operator*(const Pack<Acc>& x, const Y& y) {
  return {x.a * broadcast(y).a, x.b * broadcast(y).b};
}

// x * y + z: rounded once in code for AVX2 and AVX-512, twice in the baseline, which is also the code for aarch64.
#if defined(__AVX512F__)
inline Vec<float> fma_vectors(Vec<float> x, Vec<float> y, Vec<float> z) { return _mm512_fmadd_ps(x, y, z); }
inline Vec<double> fma_vectors(Vec<double> x, Vec<double> y, Vec<double> z) { return _mm512_fmadd_pd(x, y, z); }
#elif defined(__AVX2__)
inline Vec<float> fma_vectors(Vec<float> x, Vec<float> y, Vec<float> z) { return _mm256_fmadd_ps(x, y, z); }
inline Vec<double> fma_vectors(Vec<double> x, Vec<double> y, Vec<double> z) { return _mm256_fmadd_pd(x, y, z); }
#else
template <class V>
inline V fma_vectors(V x, V y, V z) {
  return x * y + z;
}
#endif
template <class Acc, class Y, class Z>
inline Pack<Acc> fma(const Pack<Acc>& x, const Y& y, const Z& z) {
  return {fma_vectors(x.a, broadcast(y).a, broadcast(z).a), fma_vectors(x.b, broadcast(y).b, broadcast(z).b)};
}

// ---- exp ------------------------------------------------------------------------------------------------------------

// max(x, least). NaN stays NaN.
#if defined(__AVX512F__)
inline Vec<float> at_least(Vec<float> x, Vec<float> least) { return _mm512_max_ps(least, x); }
inline Vec<double> at_least(Vec<double> x, Vec<double> least) { return _mm512_max_pd(least, x); }
#elif defined(__AVX2__)
inline Vec<float> at_least(Vec<float> x, Vec<float> least) { return _mm256_max_ps(least, x); }
inline Vec<double> at_least(Vec<double> x, Vec<double> least) { return _mm256_max_pd(least, x); }
#else
template <class V>
inline V at_least(V x, V least) {
  return x < least ? least : x;
}
#endif

// exp(x) = 2^n * exp(r), where n is x / ln(2) rounded to an integer, so that |r| is at most about ln(2) / 2. ln(2) has
// two parts; the product of n with the first one is exact. exp(r) is 1 + r + r^2 * p(r). The coefficients of p, from
// the highest power down, minimize the largest relative error (2^-28 for float and 2^-57 for double).
template <class Acc>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  using Bits = uint32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr float kLeast = -104;  // exp(kLeast) is zero in float
  static constexpr float kInverseLn2 = 0x1.715476p+0f, kLn2First = 0x1.63p-1f, kLn2Rest = -0x1.bd0106p-13f;
  static constexpr float kShift = 0x1p64f, kRound = 0x1.8p23f + 127 + 64;  // 127: the bias of the exponent
  static constexpr float kCoefficients[] = {0x1.6a23e6p-10f, 0x1.123a2p-7f, 0x1.5558f2p-5f, 0x1.555492p-3f,
                                            0x1.fffffcp-2f};
};
template <>
struct ExpConstants<double> {
  using Bits = uint64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr double kLeast = -746;
  static constexpr double kInverseLn2 = 0x1.71547652b82fep+0, kLn2First = 0x1.62e42feep-1,
                          kLn2Rest = 0x1.a39ef35793c76p-33;
  static constexpr double kShift = 0x1p512, kRound = 0x1.8p52 + 1023 + 512;
  static constexpr double kCoefficients[] = {
      0x1.ad7f3b22740dcp-26, 0x1.28ad9b7868661p-22, 0x1.71df25b516d4cp-19, 0x1.a01999e274b14p-16, 0x1.a01a012a0e7e8p-13,
      0x1.6c16c18438a89p-10, 0x1.1111111127d10p-7,  0x1.555555555083fp-5,  0x1.55555555554f9p-3,  0x1.000000000000ap-1};
};

// exp(-|x|).
template <class Acc>
inline Vec<Acc> exp_of_minus_abs(Vec<Acc> x) {
  using C = ExpConstants<Acc>;
  using Bits = Vec<typename C::Bits>;
  const auto vector = [](Acc value) { return value - Vec<Acc>{}; };
  x = reinterpret_cast<Vec<Acc>>(reinterpret_cast<Bits>(x) | reinterpret_cast<Bits>(vector(-0.0)));
  x = at_least(x, vector(C::kLeast));
  // Adding kRound rounds to an integer n. The last bits of the sum are then n + 127 + 64 for float: the exponent bits
  // of 2^n * kShift, which is a normal number, although 2^n may be subnormal.
  const Vec<Acc> sum = fma_vectors(x, vector(C::kInverseLn2), vector(C::kRound));
  const Vec<Acc> n = sum - C::kRound;
  Vec<Acc> r = fma_vectors(n, vector(-C::kLn2First), x);
  r = fma_vectors(n, vector(-C::kLn2Rest), r);
  // The odd and the even terms of p, each in steps of r^2, so that fewer steps wait for each other.
  const Vec<Acc> square = r * r;
  Vec<Acc> terms = vector(C::kCoefficients[0]), others = vector(C::kCoefficients[1]);
#pragma GCC unroll 16
  for (size_t i = 2; i < sizeof(C::kCoefficients) / sizeof(Acc); ++i) {
    const Vec<Acc> next = fma_vectors(terms, square, vector(C::kCoefficients[i]));
    terms = others;
    others = next;
  }
  const Vec<Acc> p = fma_vectors(terms, r, others);
  const auto power = reinterpret_cast<Vec<Acc>>(reinterpret_cast<Bits>(sum) << C::kMantissaBits);
  return fma_vectors(fma_vectors(square, p, r), power, power) * (1 / C::kShift);
}

// ---- sums over a pack -----------------------------------------------------------------------------------------------

template <class V>
using HalfVector = typename VectorOf<std::decay_t<decltype(V{}[0])>, sizeof(V) / 2>::type;
template <class V>
inline HalfVector<V> low_half(V v) {
  HalfVector<V> half;
  std::memcpy(&half, &v, sizeof(half));
  return half;
}
template <class V>
inline HalfVector<V> high_half(V v) {
  HalfVector<V> half;
  std::memcpy(&half, reinterpret_cast<const char*>(&v) + sizeof(half), sizeof(half));
  return half;
}
#if defined(__AVX512F__)  // GCC would store the vector and load its halves
inline __m256 low_half(Vec<float> v) { return _mm512_maskz_extractf32x8_ps(0xff, v, 0); }
inline __m256 high_half(Vec<float> v) { return _mm512_maskz_extractf32x8_ps(0xff, v, 1); }
inline __m256d low_half(Vec<double> v) { return _mm512_maskz_extractf64x4_pd(0xf, v, 0); }
inline __m256d high_half(Vec<double> v) { return _mm512_maskz_extractf64x4_pd(0xf, v, 1); }
#endif

// Adds the halves of a vector, then the halves of their sum, down to one number.
template <class V>
inline auto sum_lanes(V v) {
  if constexpr (sizeof(v) == 2 * sizeof(v[0])) {
    return v[0] + v[1];
  } else {
    return sum_lanes(low_half(v) + high_half(v));
  }
}
template <class Acc>
inline Acc sum_pack(const Pack<Acc>& p) {
  return sum_lanes(p.a + p.b);
}

// The sum_lanes() of each vector, as doubles. The overloads for four vectors give the same bits with fewer
// instructions.
template <class V, int n>
inline auto sum_each(const V (&v)[n]) {
  typename VectorOf<double, n * 8>::type sums;
  for (int i = 0; i < n; ++i) sums[i] = sum_lanes(v[i]);
  return sums;
}
template <class V>
inline auto to_doubles(V v) {
  using Doubles = typename VectorOf<double, sizeof(v) / sizeof(v[0]) * 8>::type;
#if defined(__AVX2__)  // GCC would convert two halves, and may join them in memory
  if constexpr (sizeof(v) == 16 && sizeof(v[0]) == 4) return Doubles(_mm256_cvtps_pd(v));
#endif
  return __builtin_convertvector(v, Doubles);
}
#if defined(__AVX512F__)
// This takes 14 shuffles and additions instead of 40, which would be a third of the instructions for narrow rows.
inline auto sum_each(const Vec<float> (&v)[4]) {
  const auto add_halves = [](Vec<float> a, Vec<float> b) -> Vec<float> {  // a in the low half, b in the high half
    return _mm512_maskz_shuffle_f32x4(0xffff, a, b, 0x44) + _mm512_maskz_shuffle_f32x4(0xffff, a, b, 0xee);
  };
  const Vec<float> a = add_halves(v[0], v[1]), b = add_halves(v[2], v[3]);
  Vec<float> sum = _mm512_maskz_shuffle_f32x4(0xffff, a, b, 0x88) + _mm512_maskz_shuffle_f32x4(0xffff, a, b, 0xdd);
  sum = sum + _mm512_maskz_permute_ps(0xffff, sum, 0x4e);
  sum = sum + _mm512_maskz_permute_ps(0xffff, sum, 0xb1);
  const __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
  const Vec<float> in_order = _mm512_maskz_permutexvar_ps(0xffff, firsts, sum);
  return to_doubles(_mm512_castps512_ps128(in_order));
}
#elif defined(__AVX2__)
inline auto sum_each(const Vec<float> (&v)[4]) {
  const auto add_halves = [](__m128 a, __m128 b) -> __m128 { return _mm_movelh_ps(a, b) + _mm_movehl_ps(b, a); };
  __m128 half[4];
  for (int i = 0; i < 4; ++i) half[i] = low_half(v[i]) + high_half(v[i]);
  const __m128 sums = _mm_hadd_ps(add_halves(half[0], half[1]), add_halves(half[2], half[3]));
  return to_doubles(sums);
}
#endif

// Whether a comparison of vectors is true in all lanes.
template <class Mask>
inline bool all(Mask mask) {
#if defined(__AVX2__)
  if constexpr (sizeof(mask) == 32) return _mm256_movemask_pd(reinterpret_cast<__m256d>(mask)) == 0xf;
#endif
  bool result = true;
  for (size_t i = 0; i < sizeof(mask) / sizeof(mask[0]); ++i) result &= mask[i] != 0;
  return result;
}

// ---- setting elements outside the row to zero -----------------------------------------------------------------------

// even_odd: the order of the elements in the pack, see kEvenOdd.
template <bool even_odd, class Acc>
inline Pack<Acc> zero_outside(const Pack<Acc>& p, AllLanes) {
  return p;
}
template <bool even_odd, class Acc>
inline Pack<Acc> zero_outside(const Pack<Acc>& p, FirstLanes lanes) {
  using Index = std::conditional_t<sizeof(Acc) == 4, int32_t, int64_t>;
  constexpr int kHalf = kPackSize<Acc> / 2;
  Vec<Index> index_a, index_b;
  for (int k = 0; k < kHalf; ++k) {
    index_a[k] = even_odd ? 2 * k : k;
    index_b[k] = even_odd ? 2 * k + 1 : k + kHalf;
  }
  const Index count = lanes.count;
  return {index_a < count ? p.a : Vec<Acc>{}, index_b < count ? p.b : Vec<Acc>{}};
}

// ---- packs of doubles, for sums over many rows ----------------------------------------------------------------------

template <class Acc>
struct DoublePack {
  typename VectorOf<double, kPackSize<Acc> * 4>::type a, b;  // as many lanes as Vec<Acc>
};
template <class Acc>
inline void add(DoublePack<Acc>& total, const Pack<Acc>& pack) {
  total.a += __builtin_convertvector(pack.a, decltype(total.a));
  total.b += __builtin_convertvector(pack.b, decltype(total.b));
}
template <class Acc>
inline Pack<Acc> rounded(const DoublePack<Acc>& total) {
  return {__builtin_convertvector(total.a, Vec<Acc>), __builtin_convertvector(total.b, Vec<Acc>)};
}

}  // namespace
}  // namespace layernorm::cpu
