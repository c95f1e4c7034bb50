// Rows that begin anywhere in memory, by accesses of 16 aligned bytes.
//
// A granule is 16 bytes at a multiple of 16. A row's image in shared memory consists of the granules that it touches,
// as they lie in memory; bytes that are not the row's are 0, and never read from memory. Vectors are read from it at
// any distance, and shifted in registers, so that what is computed of a row does not depend on where it lies.
#pragma once

#include "row.cuh"

namespace layernorm::cuda {

// The granules of `bytes` bytes at `pointer`, counted from the first that they touch.
struct Granules {
  int shift;        // bytes before the row in the first granule
  int end;          // of the row
  int whole_begin;  // of the granules that are all the row's
  int whole_end;

  __device__ __forceinline__ Granules(const void* pointer, int bytes)
      : shift(static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % 16)),
        end(shift + bytes),
        whole_begin((shift + 15) & ~15),
        whole_end(max(end & ~15, whole_begin)) {}
};

// Two neighbouring granules, less their first `shift` bytes (0 to 15, a multiple of an element's size), of which 16
// are kept.
template <int kElementSize>
__device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high, int shift) {
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
  if constexpr (kElementSize <= 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
  }
  if constexpr (kElementSize <= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = shift & 2 ? words[i] >> 16 | words[i + 1] << 16 : words[i];
  }
  return {words[0], words[1], words[2], words[3]};
}

// The image of what a tile holds, of elements of T. Its threads share the work. An aligned row needs no barriers: then
// each thread finds what it has brought itself.
template <class T, class Tile>
class Image {
 public:
  static constexpr int kCount = kVectorSize<T>;
  // Of shared memory: the granules, and one of zeros after them.
  __host__ __device__ static constexpr size_t bytes(int threads) { return (threads * Tile::kVectors + 2) * 16; }
  using Vectors = Vector<T, kCount>[Tile::kVectors];  // a thread's part of a row

  __device__ __forceinline__ Image(void* shared, const Place<Tile>& place, bool aligned)
      : bytes_(static_cast<char*>(shared)), place_(place), aligned_(aligned) {}

  __device__ __forceinline__ bool is_aligned() const { return aligned_; }

  // Starts to copy `cols` elements of a row.
  __device__ __forceinline__ void fetch(const T* row, int cols) {
    if (aligned_) {
      const T* const from = row + place_.vector(0) * kCount;
      for_each_vector([&](int i, int index) {
        async_copy16_or_zeros(&granule(index), from + i * place_.distance() * kCount, valid(i, cols) > 0);
      });
      return;
    }
    const Granules granules(row, cols * kSize);
    const char* const from = reinterpret_cast<const char*>(row) - granules.shift;
#pragma unroll 1
    for (int at = granules.whole_begin + place_.thread * 16; at < granules.whole_end; at += place_.threads() * 16) {
      async_copy16(bytes_ + at, from + at);
    }
    const auto copy = [&](int begin, int end) {
#pragma unroll 1
      for (int at = begin + place_.thread * kSize; at < end; at += place_.threads() * kSize) {
        *element(at) = at >= granules.shift && at < granules.end ? *reinterpret_cast<const T*>(from + at) : T(0.0f);
      }
    };
    copy(0, granules.whole_begin);
    copy(granules.whole_end, granules.whole_end + 32);
    shift_ = granules.shift;
  }

  // The same of an aligned row, by one thread; completes on the barrier. What lies beyond the row has been cleared.
  __device__ __forceinline__ void fetch_in_bulk(const T* row, int cols, MBarrier* barrier) {
    bulk_copy(bytes_, row, cols * kSize, barrier);
  }
  __device__ __forceinline__ void clear_beyond(int cols) {
    for_each_vector([&](int, int index) {
      if (index * kCount >= cols) granule(index) = {};
    });
  }

  // Waits for all images that have been fetched.
  __device__ __forceinline__ void wait() const {
    async_commit();
    async_wait<0>();
    if (!aligned_) place_.barrier();
  }

  // Reads this thread's vectors; zeros beyond the end of the row.
  __device__ __forceinline__ void read(Vectors& v, int cols) const {
    if (aligned_) {
      get(v);
    } else {
      for_each_vector(
          [&](int i, int index) { bits(v[i]) = valid(i, cols) > 0 ? shifted_granule(index, shift_) : uint4{}; });
    }
  }

  // Puts vectors where this thread, and no other without a barrier, gets them again.
  __device__ __forceinline__ void put(int i, const Vector<T, kCount>& v) const { granule(place_.vector(i)) = bits(v); }
  __device__ __forceinline__ void put(const Vectors& v) const {
    for_each_vector([&](int i, int) { put(i, v[i]); });
  }
  __device__ __forceinline__ void get(Vectors& v) const {
    for_each_vector([&](int i, int) { v[i] = get(i); });
  }

  __device__ __forceinline__ Vector<T, kCount> get(int i) const {
    Vector<T, kCount> v;
    bits(v) = granule(place_.vector(i));
    return v;
  }
  // Puts all of a row that has been fetched and is not aligned.
  __device__ __forceinline__ void shift(const T* row, int cols) const {
    const int shift = Granules(row, cols * kSize).shift;
    Vectors v;
    for_each_vector(
        [&](int i, int index) { bits(v[i]) = valid(i, cols) > 0 ? shifted_granule(index, shift) : uint4{}; });
    place_.barrier();
    put(v);
  }

  // Stores vectors as `cols` elements of a row. The image is overwritten.
  __device__ __forceinline__ void store(T* row, const Vectors& v, int cols) const {
    if (aligned_) {
      T* const to = row + place_.vector(0) * kCount;
#pragma unroll
      for (int i = 0; i < Tile::kVectors; ++i) {
        if (valid(i, cols) <= 0) break;
        *reinterpret_cast<Vector<T, kCount>*>(to + i * place_.distance() * kCount) = v[i];
      }
      return;
    }
    place_.barrier();
    put(v);
    end_of_store(row, cols);
  }

  // The same, a vector of index i at a time, and of the last an end. Of rows that are not aligned, this puts, and the
  // end stores what all threads have put.
  __device__ __forceinline__ void store(T* row, int i, const Vector<T, kCount>& v, int cols) const {
    if (!aligned_) {
      put(i, v);
    } else if (valid(i, cols) > 0) {
      reinterpret_cast<Vector<T, kCount>*>(row)[place_.vector(i)] = v;
    }
  }
  __device__ __forceinline__ void end_of_store(T* row, int cols) const {
    if (aligned_) return;
    place_.barrier();
    const Granules granules(row, cols * kSize);
    char* const to = reinterpret_cast<char*>(row) - granules.shift;
    const int distance = granules.whole_begin - granules.shift;  // of the first whole granule, in the row
#pragma unroll 1
    for (int index = place_.thread; granules.whole_begin + index * 16 < granules.whole_end; index += place_.threads()) {
      *reinterpret_cast<uint4*>(to + granules.whole_begin + index * 16) = shifted_granule(index, distance);
    }
    const auto copy = [&](int begin, int end) {
#pragma unroll 1
      for (int at = begin + place_.thread * kSize; at < end; at += place_.threads() * kSize) {
        *reinterpret_cast<T*>(to + at) = *element(at - granules.shift);
      }
    };
    copy(granules.shift, min(granules.whole_begin, granules.end));
    copy(granules.whole_end, granules.end);
  }

  // Of the threads of the tile, if others have read from the image what this one is going to overwrite.
  __device__ __forceinline__ void release() const {
    if (!aligned_) place_.barrier();
  }

 private:
  static constexpr int kSize = sizeof(T);

  // Calls f(i, index) for this thread's vectors, with their indices in the row.
  template <class F>
  __device__ __forceinline__ void for_each_vector(const F& f) const {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) f(i, place_.vector(i));
  }

  __device__ __forceinline__ int valid(int i, int cols) const { return place_.template valid<kCount>(i, cols); }

  __device__ __forceinline__ static uint4& bits(Vector<T, kCount>& v) { return reinterpret_cast<uint4&>(v); }
  __device__ __forceinline__ static const uint4& bits(const Vector<T, kCount>& v) {
    return reinterpret_cast<const uint4&>(v);
  }
  __device__ __forceinline__ uint4& granule(int index) const { return reinterpret_cast<uint4*>(bytes_)[index]; }
  __device__ __forceinline__ uint4 shifted_granule(int index, int shift) const {
    return shift == 0 ? granule(index) : shifted<kSize>(granule(index), granule(index + 1), shift);
  }
  __device__ __forceinline__ T* element(int at) const { return reinterpret_cast<T*>(bytes_ + at); }

  char* bytes_;
  Place<Tile> place_;
  int shift_ = 0;
  bool aligned_;
};

}  // namespace layernorm::cuda
