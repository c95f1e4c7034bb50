// Loads and stores of packs, and the conversions of 16-bit elements; see simd.h.
#pragma once

#include "simd.h"

namespace layernorm::cpu {
namespace {

// ---- conversions ----------------------------------------------------------------------------------------------------

inline Words bits_of(Vec<float> v) { return reinterpret_cast<Words>(v); }
inline Vec<float> from_bits(Words v) { return reinterpret_cast<Vec<float>>(v); }

// A word holds two bfloat16; the lower one is the even element.
inline Pack<float> widen(Words pairs) { return {from_bits(pairs << 16), from_bits(pairs & 0xffff0000u)}; }

// Rounds to bfloat16, ties to even, in integer arithmetic, because AVX-512's conversion flushes subnormal numbers to
// zero. The carry of the rounding could make a NaN a number. A NaN that was widened from bfloat16 has zeros in its
// lower bits, so that there is no carry; others need may_have_nan.
template <bool may_have_nan>
inline Words narrow(const Pack<float>& p) {
  Words a = bits_of(p.a), b = bits_of(p.b);
  if constexpr (may_have_nan) {
    a = p.a == p.a ? a : (a & 0xffff0000u) | 0x400000u;
    b = p.b == p.b ? b : (b & 0xffff0000u) | 0x400000u;
  }
#if defined(__AVX512F__)  // both at once, with fewer instructions
  using HalfWords = typename VectorOf<uint16_t>::type;
  const auto upper = reinterpret_cast<HalfWords>((a >> 16) | (b & 0xffff0000u));
  const auto lower = reinterpret_cast<HalfWords>((a & 0xffffu) | (b << 16));
  return reinterpret_cast<Words>(((upper & 1) | lower) > 0x8000 ? upper + 1 : upper);
#else
  const auto round = [](Words bits) { return bits + 0x7fffu + ((bits >> 16) & 1); };
  return (round(a) >> 16) | (round(b) & 0xffff0000u);
#endif
}

// Convert float16 to float and back: a vector of floats, and kVectorBytes / 2 bytes at p.
#if defined(__AVX512F__)
inline Vec<float> load_half(const Half* p) {
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m256i to_half(Vec<float> v) { return _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT); }
inline void store_half(Half* p, Vec<float> v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_half(v)); }
#elif defined(__AVX2__)
inline Vec<float> load_half(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m128i to_half(Vec<float> v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline void store_half(Half* p, Vec<float> v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_half(v)); }
#else
using HalfBits = typename VectorOf<uint16_t, kVectorBytes / 2>::type;
// The last bit of 1/2 in fp32 is 2^-24, the smallest fp16 number. So adding 1/2 rounds a number to a subnormal fp16
// number, whose bits are then the last ones of the sum.
inline Vec<float> one_half() { return 0.5f - Vec<float>{}; }
// The exponent bias is 15 in fp16 and 127 in fp32. Infinity and NaN get the largest exponent. A subnormal fp16 number
// is normal in fp32, so no operand here is subnormal: the processor may read such operands as zero
// (torch.set_flush_denormal).
inline Vec<float> load_half(const Half* p) {
  HalfBits v;
  std::memcpy(&v, p, sizeof(v));
  const Words bits = __builtin_convertvector(v, Words);
  const Words sign = (bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  const Words subnormal = bits_of(from_bits(bits_of(one_half()) + magnitude) - one_half());
  const Words normal = (magnitude << 13) + (112u << 23), not_finite = (magnitude << 13) | 0x7f800000u;
  Words result = magnitude < 0x400u ? subnormal : normal;
  result = magnitude >= 0x7c00u ? not_finite : result;
  return from_bits(sign | result);
}
inline void store_half(Half* p, Vec<float> v) {
  const Words sign = (bits_of(v) >> 16) & 0x8000, magnitude = bits_of(v) & 0x7fffffff;
  const Words normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Words subnormal = bits_of(from_bits(magnitude) + one_half()) - bits_of(one_half());
  const Words infinity = Words{} + 0x7c00, quiet_nan = Words{} + 0x7e00;
  Words result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= (143u << 23) ? infinity : result;
  result = magnitude > 0x7f800000u ? quiet_nan : result;
  const HalfBits bits = __builtin_convertvector(sign | result, HalfBits);
  std::memcpy(p, &bits, sizeof(bits));
}
#endif

// Convert a pack in memory order to one with the even elements in `a` and the odd ones in `b`, and back.
#if defined(__AVX512F__)
inline Pack<float> to_even_odd(const Pack<float>& p) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return {_mm512_permutex2var_ps(p.a, even, p.b), _mm512_permutex2var_ps(p.a, odd, p.b)};
}
inline Pack<float> from_even_odd(const Pack<float>& p) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
  return {_mm512_permutex2var_ps(p.a, low, p.b), _mm512_permutex2var_ps(p.a, high, p.b)};
}
#elif defined(__AVX2__)
// Swaps the second and the third quarter, because shuffles of AVX2 work within each half.
inline Vec<float> swap_middle_quarters(__m256 v) {
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
}
inline Pack<float> to_even_odd(const Pack<float>& p) {
  return {swap_middle_quarters(_mm256_shuffle_ps(p.a, p.b, 0x88)),
          swap_middle_quarters(_mm256_shuffle_ps(p.a, p.b, 0xdd))};
}
inline Pack<float> from_even_odd(const Pack<float>& p) {
  const __m256 a = swap_middle_quarters(p.a), b = swap_middle_quarters(p.b);
  return {_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)};
}
#else
inline Pack<float> to_even_odd(const Pack<float>& p) {
  Pack<float> result;
  constexpr int kHalf = kPackSize<float> / 2;
  for (int k = 0; k < kHalf; ++k) {
    result.a[k] = 2 * k < kHalf ? p.a[2 * k] : p.b[2 * k - kHalf];
    result.b[k] = 2 * k + 1 < kHalf ? p.a[2 * k + 1] : p.b[2 * k + 1 - kHalf];
  }
  return result;
}
inline Pack<float> from_even_odd(const Pack<float>& p) {
  Pack<float> result;
  constexpr int kHalf = kPackSize<float> / 2;
  for (int k = 0; k < kHalf; ++k) {
    result.a[k] = k % 2 ? p.b[k / 2] : p.a[k / 2];
    result.b[k] = k % 2 ? p.b[(k + kHalf) / 2] : p.a[(k + kHalf) / 2];
  }
  return result;
}
#endif

// ---- loads and stores; they access nothing outside the row ----------------------------------------------------------

// Makes GCC load v once, even if it is used several times. GCC would read it from memory for each use, but the loops of
// backward are bound by loads.
template <class V>
inline V in_register(V v) {
#if defined(__AVX2__)
  asm("" : "+v"(v));
#endif
  return v;
}
template <class Acc>
inline Pack<Acc> in_register(const Pack<Acc>& p) {
  return {in_register(p.a), in_register(p.b)};
}

// read() and write() keep the order of memory. load() and store() below use the lane order of X, which for BFloat16 has
// all even elements before all odd ones, because that is faster (kEvenOdd in simd.h).
template <class Acc, class = std::enable_if_t<std::is_floating_point_v<Acc>>>
inline Pack<Acc> read(const Acc* p, AllLanes) {
  Pack<Acc> pack;
  std::memcpy(&pack.a, p, kVectorBytes);
  std::memcpy(&pack.b, p + kPackSize<Acc> / 2, kVectorBytes);
  return pack;
}
template <class Acc, class = std::enable_if_t<std::is_floating_point_v<Acc>>>
inline void write(Acc* p, const Pack<Acc>& pack, AllLanes) {
  std::memcpy(p, &pack.a, kVectorBytes);
  std::memcpy(p + kPackSize<Acc> / 2, &pack.b, kVectorBytes);
}
inline Pack<float> read(const Half* p, AllLanes) { return {load_half(p), load_half(p + kPackSize<float> / 2)}; }
inline void write(Half* p, const Pack<float>& pack, AllLanes) {
  store_half(p, pack.a);
  store_half(p + kPackSize<float> / 2, pack.b);
}
inline Words read_words(const BFloat16* p, AllLanes) {
  Words words;
  std::memcpy(&words, p, sizeof(words));
  return in_register(words);
}
inline void write_words(BFloat16* p, Words words, AllLanes) { std::memcpy(p, &words, sizeof(words)); }

// Lanes for write(): all, by streaming stores, which bypass the caches. The address is a multiple of kVectorBytes.
struct Streaming {};
#if defined(__AVX2__)
constexpr bool kHasStreamingStores = true;
template <class V>
inline void stream_vector(void* p, V v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(v) == 64) _mm512_stream_si512(static_cast<__m512i*>(p), reinterpret_cast<__m512i>(v));
#endif
  if constexpr (sizeof(v) == 32) _mm256_stream_si256(static_cast<__m256i*>(p), reinterpret_cast<__m256i>(v));
  if constexpr (sizeof(v) == 16) _mm_stream_si128(static_cast<__m128i*>(p), reinterpret_cast<__m128i>(v));
}
template <class Acc, class = std::enable_if_t<std::is_floating_point_v<Acc>>>
inline void write(Acc* p, const Pack<Acc>& pack, Streaming) {
  stream_vector(p, pack.a);
  stream_vector(p + kPackSize<Acc> / 2, pack.b);
}
inline void write(Half* p, const Pack<float>& pack, Streaming) {
  stream_vector(p, to_half(pack.a));
  stream_vector(p + kPackSize<float> / 2, to_half(pack.b));
}
inline void write_words(BFloat16* p, Words words, Streaming) { stream_vector(p, words); }
// Makes streaming stores visible to other threads.
inline void streaming_fence() { _mm_sfence(); }
#else
constexpr bool kHasStreamingStores = false;
inline void streaming_fence() {}
#endif

// Loads and stores of the first lanes, in memory order. The other lanes are read as zero and not written.
#if defined(__AVX512F__)
inline uint32_t mask(FirstLanes lanes) { return (1u << lanes.count) - 1; }
inline Pack<float> read(const float* p, FirstLanes lanes) {
  return {_mm512_maskz_loadu_ps(mask(lanes), p), _mm512_maskz_loadu_ps(mask(lanes) >> 16, p + 16)};
}
inline Pack<double> read(const double* p, FirstLanes lanes) {
  return {_mm512_maskz_loadu_pd(mask(lanes), p), _mm512_maskz_loadu_pd(mask(lanes) >> 8, p + 8)};
}
inline Pack<float> read(const Half* p, FirstLanes lanes) {
  const __m512i halves = _mm512_maskz_loadu_epi16(mask(lanes), p);
  return {_mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_extracti64x4_epi64(0xf, halves, 0)),
          _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_extracti64x4_epi64(0xf, halves, 1))};
}
inline Words read_words(const BFloat16* p, FirstLanes lanes) {
  return reinterpret_cast<Words>(_mm512_maskz_loadu_epi16(mask(lanes), p));
}
inline void write(float* p, const Pack<float>& pack, FirstLanes lanes) {
  _mm512_mask_storeu_ps(p, mask(lanes), pack.a);
  _mm512_mask_storeu_ps(p + 16, mask(lanes) >> 16, pack.b);
}
inline void write(double* p, const Pack<double>& pack, FirstLanes lanes) {
  _mm512_mask_storeu_pd(p, mask(lanes), pack.a);
  _mm512_mask_storeu_pd(p + 8, mask(lanes) >> 8, pack.b);
}
inline void write(Half* p, const Pack<float>& pack, FirstLanes lanes) {
  _mm256_mask_storeu_epi16(p, mask(lanes), _mm512_maskz_cvtps_ph(0xffff, pack.a, _MM_FROUND_TO_NEAREST_INT));
  _mm256_mask_storeu_epi16(p + 16, mask(lanes) >> 16, _mm512_maskz_cvtps_ph(0xffff, pack.b, _MM_FROUND_TO_NEAREST_INT));
}
inline void write_words(BFloat16* p, Words words, FirstLanes lanes) {
  _mm512_mask_storeu_epi16(p, mask(lanes), reinterpret_cast<__m512i>(words));
}
#else
// Copies an even number of bytes below 64. The number is the same for each row, so the processor predicts the branches.
// Calls of memcpy would be slower.
inline void copy_bytes(void* to, const void* from, int bytes) {
  int done = 0;
  const auto copy = [&](auto size) {
    if (!(bytes & size)) return;
    std::memcpy(static_cast<char*>(to) + done, static_cast<const char*>(from) + done, size);
    done += size;
  };
  copy(Constant<32>{});
  copy(Constant<16>{});
  copy(Constant<8>{});
  copy(Constant<4>{});
  copy(Constant<2>{});
}
// Copies the bytes into vectors, the rest of which is zero.
template <int n>
inline void read_bytes(Words (&to)[n], const void* from, int bytes) {
#if defined(__AVX2__)  // the copies would stall a load of the whole vector
  const Words index = {0, 1, 2, 3, 4, 5, 6, 7};
  for (int i = 0; i < n; ++i) {
    const __m256i words = _mm256_set1_epi32(bytes / 4 - i * 8);
    const __m256i inside = _mm256_cmpgt_epi32(words, reinterpret_cast<__m256i>(index));
    to[i] = reinterpret_cast<Words>(_mm256_maskload_epi32(static_cast<const int*>(from) + i * 8, inside));
  }
  if (bytes & 2) {  // the last of an odd number of 16-bit elements, whose pack is one vector
    const uint32_t end = bytes / 4;
    to[0] = index == end ? Words{} + static_cast<const uint16_t*>(from)[2 * end] : to[0];
  }
#else
  for (Words& words : to) words = Words{};
  copy_bytes(to, from, bytes);
#endif
}
template <class T>
inline auto read(const T* p, FirstLanes lanes) {
  Words buffer[kPackSize<AccOf<T>> * sizeof(T) / kVectorBytes];
  read_bytes(buffer, p, lanes.count * static_cast<int>(sizeof(T)));
  return read(reinterpret_cast<const T*>(buffer), AllLanes{});
}
inline Words read_words(const BFloat16* p, FirstLanes lanes) {
  Words words[1];
  read_bytes(words, p, lanes.count * 2);
  return words[0];
}
template <class T>
inline void write(T* p, const Pack<AccOf<T>>& pack, FirstLanes lanes) {
  T buffer[kPackSize<AccOf<T>>];
  write(buffer, pack, AllLanes{});
  copy_bytes(p, buffer, lanes.count * static_cast<int>(sizeof(T)));
}
inline void write_words(BFloat16* p, Words words, FirstLanes lanes) { copy_bytes(p, &words, lanes.count * 2); }
#endif

// Loads a pack of any elements as Acc, in the lane order of X.
template <class X, class Element, class Lanes>
inline Pack<AccOf<X>> load(const Element* p, Lanes lanes) {
  if constexpr (std::is_same_v<Element, BFloat16>) {
    const Pack<float> pack = widen(read_words(p, lanes));
    if constexpr (kEvenOdd<X>)
      return pack;
    else
      return from_even_odd(pack);
  } else if constexpr (kEvenOdd<X>) {
    return to_even_odd(read(p, lanes));
  } else {
    return read(p, lanes);
  }
}

// Stores a pack in the lane order of X as any elements. may_have_nan says whether it may hold a NaN whose lower 16 bits
// are not zero: a NaN of a wider type than X, which the fast rounding to BFloat16 would turn into infinity or zero.
template <class X, bool may_have_nan, class Element, class Lanes>
inline void store(Element* p, const Pack<AccOf<X>>& pack, Lanes lanes) {
  if constexpr (std::is_same_v<Element, BFloat16>) {
    if constexpr (kEvenOdd<X>)
      write_words(p, narrow<may_have_nan>(pack), lanes);
    else
      write_words(p, narrow<may_have_nan>(to_even_odd(pack)), lanes);
  } else if constexpr (kEvenOdd<X>) {
    write(p, from_even_odd(pack), lanes);
  } else {
    write(p, pack, lanes);
  }
}

}  // namespace
}  // namespace layernorm::cpu
