// Rows in shared memory. A row may start at any address: global memory is accessed in aligned granules of the size of a
// vector, which is 16 bytes, or 8 for 16-bit elements in a row whose x is float.
//
// Shared memory holds the granules that the row touches. Bytes outside the row are zeros there, and are never read from
// global memory. Vectors are read at any byte offset and shifted in registers, so that the result does
// not depend on the row's address.
#pragma once

#include "row.cuh"

namespace layernorm::cuda {

// Byte offsets from the start of the first granule that a row touches.
template <int kSize>
struct Granules {
  int begin;       // of the row
  int end;         // of the row
  int full_begin;  // of the granules that lie completely in the row
  int full_end;

  __device__ __forceinline__ Granules(const void* row, int bytes)
      : begin(static_cast<int>(reinterpret_cast<uintptr_t>(row) % kSize)),
        end(begin + bytes),
        full_begin((begin + kSize - 1) & ~(kSize - 1)),
        full_end(max(end & ~(kSize - 1), full_begin)) {}
};

// The granule that starts `offset` bytes into two neighbouring granules. The offset is less than the granules' size,
// and a multiple of the element size.
template <int kElementSize, int kWords>
__device__ __forceinline__ Vector<uint32_t, kWords> funnel_shift(const Vector<uint32_t, kWords>& low,
                                                                 const Vector<uint32_t, kWords>& high, int offset) {
  uint32_t words[2 * kWords];
#pragma unroll
  for (int i = 0; i < 2 * kWords; ++i) words[i] = i < kWords ? low.values[i] : high.values[i - kWords];
  if constexpr (kWords == 4) {
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = offset & 8 ? words[i + 2] : words[i];
  }
  if constexpr (kElementSize <= 4) {
#pragma unroll
    for (int i = 0; i <= kWords; ++i) words[i] = offset & 4 ? words[i + 1] : words[i];
  }
  if constexpr (kElementSize <= 2) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = offset & 2 ? words[i] >> 16 | words[i + 1] << 16 : words[i];
  }
  Vector<uint32_t, kWords> result;
#pragma unroll
  for (int i = 0; i < kWords; ++i) result.values[i] = words[i];
  return result;
}

// A tile's row, or chunk of a row, in shared memory. The tile's threads share the work. Aligned rows need no barrier,
// because each thread reads what it fetched itself.
template <class T, class Tile, int kVec_ = kVectorSize<T>>
class StagedRow {
 public:
  static constexpr int kVec = kVec_;
  using Vectors = Vector<T, kVec>[Tile::kVectors];  // a thread's part of a row

  // The shared memory of a row: one more granule for the row's offset, and one for the zeros after the row.
  __host__ __device__ static constexpr size_t bytes(int threads) { return (threads * Tile::kVectors + 2) * kGranule; }

  __device__ __forceinline__ StagedRow(void* shared, const Position<Tile>& position, bool aligned)
      : bytes_(static_cast<char*>(shared)), position_(position), aligned_(aligned) {}

  __device__ __forceinline__ bool is_aligned() const { return aligned_; }
  __device__ __forceinline__ void* data() const { return bytes_; }

  // Starts to copy `cols` elements of a row.
  __device__ __forceinline__ void fetch(const T* row, int cols) {
    if (aligned_) {
      const T* const src = row + position_.vector_index(0) * kVec;
      for_each_vector([&](int i, int index) {
        async_copy_or_zeros<kGranule>(&granule(index), src + i * position_.vector_stride() * kVec,
                                      remaining(i, cols) > 0);
      });
      return;
    }
    const Granules<kGranule> granules(row, cols * kElementSize);
    const char* const src = reinterpret_cast<const char*>(row) - granules.begin;
#pragma unroll 1
    for (int byte = granules.full_begin + position_.thread * kGranule; byte < granules.full_end;
         byte += position_.threads_per_row() * kGranule) {
      async_copy<kGranule>(bytes_ + byte, src + byte);
    }
    const auto copy = [&](int begin, int end) {
#pragma unroll 1
      for (int byte = begin + position_.thread * kElementSize; byte < end;
           byte += position_.threads_per_row() * kElementSize) {
        *element(byte) =
            byte >= granules.begin && byte < granules.end ? *reinterpret_cast<const T*>(src + byte) : T(0.0f);
      }
    };
    copy(0, granules.full_begin);
    copy(granules.full_end, granules.full_end + 2 * kGranule);
    offset_ = granules.begin;
  }

  // Starts to copy an aligned row from one thread. The copy completes on the barrier, and leaves the rest of the shared
  // memory as it is: clear_after() must have zeroed that.
  __device__ __forceinline__ void fetch_in_bulk(const T* row, int cols, MBarrier* barrier) {
    bulk_copy(bytes_, row, cols * kElementSize, barrier);
  }
  __device__ __forceinline__ void clear_after(int cols) {
    for_each_vector([&](int, int index) {
      if (index * kVec >= cols) granule(index) = {};
    });
  }

  // Waits for all rows that have been fetched.
  __device__ __forceinline__ void wait() const {
    async_commit();
    async_wait<0>();
    if (!aligned_) position_.sync();
  }

  // Reads this thread's vectors of a fetched row, with zeros after its end.
  __device__ __forceinline__ void read_fetched(Vectors& v, int cols) const {
    if (aligned_) {
      read(v);
    } else {
      read_shifted(v, cols, offset_);
    }
  }

  // Reads or writes this thread's vectors of an aligned or realigned row. Other threads access them only after a
  // barrier.
  __device__ __forceinline__ Vector<T, kVec> read(int i) const {
    Vector<T, kVec> v;
    bits(v) = granule(position_.vector_index(i));
    return v;
  }
  __device__ __forceinline__ void read(Vectors& v) const {
    for_each_vector([&](int i, int) { v[i] = read(i); });
  }
  __device__ __forceinline__ void write(int i, const Vector<T, kVec>& v) const {
    granule(position_.vector_index(i)) = bits(v);
  }
  __device__ __forceinline__ void write(const Vectors& v) const {
    for_each_vector([&](int i, int) { write(i, v[i]); });
  }

  // Shifts a fetched, unaligned row to where read() expects its vectors.
  __device__ __forceinline__ void realign(const T* row, int cols) const {
    Vectors v;
    read_shifted(v, cols, Granules<kGranule>(row, cols * kElementSize).begin);
    position_.sync();
    write(v);
  }

  // Stores vectors as `cols` elements of a row. An unaligned row is staged here first.
  __device__ __forceinline__ void store(T* row, const Vectors& v, int cols) const {
    if (aligned_) {
      T* const dst = row + position_.vector_index(0) * kVec;
#pragma unroll
      for (int i = 0; i < Tile::kVectors; ++i) {
        if (remaining(i, cols) <= 0) break;
        *reinterpret_cast<Vector<T, kVec>*>(dst + i * position_.vector_stride() * kVec) = v[i];
      }
      return;
    }
    position_.sync();
    write(v);
    end_of_store(row, cols);
  }

  // Stores vector i; call end_of_store() after the last one. Unaligned rows are staged in shared memory and stored by
  // end_of_store().
  __device__ __forceinline__ void store(T* row, int i, const Vector<T, kVec>& v, int cols) const {
    if (!aligned_) {
      write(i, v);
    } else if (remaining(i, cols) > 0) {
      reinterpret_cast<Vector<T, kVec>*>(row)[position_.vector_index(i)] = v;
    }
  }
  __device__ __forceinline__ void end_of_store(T* row, int cols) const {
    if (aligned_) return;
    position_.sync();
    const Granules<kGranule> granules(row, cols * kElementSize);
    char* const dst = reinterpret_cast<char*>(row) - granules.begin;
    const int offset = granules.full_begin - granules.begin;  // of the first full granule in the row
#pragma unroll 1
    for (int index = position_.thread; granules.full_begin + index * kGranule < granules.full_end;
         index += position_.threads_per_row()) {
      *reinterpret_cast<Granule*>(dst + granules.full_begin + index * kGranule) = shifted_granule(index, offset);
    }
    const auto copy = [&](int begin, int end) {
#pragma unroll 1
      for (int byte = begin + position_.thread * kElementSize; byte < end;
           byte += position_.threads_per_row() * kElementSize) {
        *reinterpret_cast<T*>(dst + byte) = *element(byte - granules.begin);
      }
    };
    copy(granules.begin, min(granules.full_begin, granules.end));
    copy(granules.full_end, granules.end);
  }

  // Waits until the other threads have read what this thread is going to overwrite.
  __device__ __forceinline__ void release() const {
    if (!aligned_) position_.sync();
  }

 private:
  static constexpr int kElementSize = sizeof(T), kGranule = kVec * kElementSize;
  using Granule = Vector<uint32_t, kGranule / 4>;

  // Calls f(i, index in the row) for this thread's vectors.
  template <class F>
  __device__ __forceinline__ void for_each_vector(const F& f) const {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) f(i, position_.vector_index(i));
  }

  __device__ __forceinline__ void read_shifted(Vectors& v, int cols, int offset) const {
    for_each_vector(
        [&](int i, int index) { bits(v[i]) = remaining(i, cols) > 0 ? shifted_granule(index, offset) : Granule{}; });
  }

  __device__ __forceinline__ int remaining(int i, int cols) const {
    return position_.template remaining<kVec>(i, cols);
  }
  __device__ __forceinline__ static Granule& bits(Vector<T, kVec>& v) { return reinterpret_cast<Granule&>(v); }
  __device__ __forceinline__ static const Granule& bits(const Vector<T, kVec>& v) {
    return reinterpret_cast<const Granule&>(v);
  }
  __device__ __forceinline__ Granule& granule(int index) const { return reinterpret_cast<Granule*>(bytes_)[index]; }
  __device__ __forceinline__ Granule shifted_granule(int index, int offset) const {
    return offset == 0 ? granule(index) : funnel_shift<kElementSize>(granule(index), granule(index + 1), offset);
  }
  __device__ __forceinline__ T* element(int byte) const { return reinterpret_cast<T*>(bytes_ + byte); }

  char* bytes_;
  Position<Tile> position_;
  int offset_ = 0;
  bool aligned_;
};

}  // namespace layernorm::cuda
