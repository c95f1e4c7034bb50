// Rows on their way to shared memory while others are worked on.
#pragma once

#include "image.cuh"

namespace layernorm::cuda {

constexpr int kMostStages = 2;

// The images of `arrays` rows at a time, one of each array, in one of `stages` places that take turns. They are brought
// by the threads that share them; or in bulk, by copies that one thread starts, and that complete on the barrier of
// their stage: rows of blocks that are aligned, and all of them of `cols` columns.
template <class T, class Tile, int kArrays>
class Ring {
 public:
  struct Rows {
    const T* of[kArrays];  // null: there is no such array
  };

  // Of shared memory, if `threads` share a row; with images for what is stored as rows that are not aligned.
  static size_t bytes(int threads, int rows, int arrays, int stages, bool aligned) {
    return (stages * arrays + !aligned) * rows * Image<T, Tile>::bytes(threads);
  }

  // By all threads of the block.
  __device__ __forceinline__ Ring(unsigned char* shared, MBarrier* arrived, int arrays, int stages, bool aligned,
                                  bool in_bulk, int cols, const Place<Tile>& place)
      : shared_(shared),
        arrived_(arrived),
        arrays_(arrays),
        stages_(stages),
        aligned_(aligned),
        in_bulk_(Tile::kWarps > 1 && aligned && in_bulk && has_bulk_copies()) {
    if (!in_bulk_) return;
#pragma unroll 1
    for (int i = 0; i < stages * arrays; ++i) Image<T, Tile>(shared_for(i, place), place, true).clear_beyond(cols);
    if (place.thread == 0) {
#pragma unroll 1
      for (int i = 0; i < stages; ++i) mbarrier_init(&arrived[i], 1);
      mbarrier_fence_init();
    }
    __syncthreads();
  }

  // Starts to bring `cols` columns of the next rows; of none, where `cols` is 0. Their place is that of the rows that
  // have been released; at first, all are to be filled.
  __device__ __forceinline__ void fetch(const Rows& rows, int cols, const Place<Tile>& place) {
    if (in_bulk_) {
      if (place.thread == 0 && cols > 0) {
        MBarrier* const arrived = &arrived_[stage_];
        mbarrier_arrive(arrived, arrays_ * cols * static_cast<int>(sizeof(T)));
        for_each_image(rows, place, [&](auto image, const T* row) { image.fetch_in_bulk(row, cols, arrived); });
      }
    } else {
      for_each_image(rows, place, [&](auto image, const T* row) { image.fetch(row, cols); });
      async_commit();
    }
    if (++stage_ == stages_) stage_ = 0, parity_ ^= 1;
  }

  // Waits for the rows that were fetched first of those that have not been released. `rows()` tells where they lie, if
  // that matters.
  template <class F>
  __device__ __forceinline__ void wait(const F& rows, int cols, const Place<Tile>& place) const {
    if (in_bulk_) {
      mbarrier_wait(&arrived_[stage_], parity_);
      return;
    }
    if (stages_ == 1) {
      async_wait<0>();
    } else {
      async_wait<kMostStages - 1>();
    }
    if (aligned_) return;
    place.barrier();
    for_each_image(rows(), place, [&](auto image, const T* row) { image.shift(row, cols); });
  }

  // Of those rows, where each thread gets its vectors.
  __device__ __forceinline__ Image<T, Tile> image(int array, const Place<Tile>& place) const {
    return {shared_for(stage_ * arrays_ + array, place), place, aligned_};
  }

  // Gives up their place, which is filled next.
  __device__ __forceinline__ void release() const {
    if (in_bulk_ || !aligned_) Place<Tile>::barrier();
  }

  // The image for what is stored.
  __device__ __forceinline__ Image<T, Tile> output(const Place<Tile>& place) const {
    return {shared_for(stages_ * arrays_, place), place, aligned_};
  }

  // Before the block returns.
  __device__ __forceinline__ static void drain() { async_wait<0>(); }

 private:
  __device__ __forceinline__ unsigned char* shared_for(int image, const Place<Tile>& place) const {
    return shared_ + (image * place.rows() + place.row) * Image<T, Tile>::bytes(place.threads());
  }

  // Calls f(image, row) for the arrays that there are.
  template <class F>
  __device__ __forceinline__ void for_each_image(const Rows& rows, const Place<Tile>& place, const F& f) const {
#pragma unroll
    for (int i = 0; i < kArrays; ++i) {
      if (rows.of[i]) f(image(i, place), rows.of[i]);
    }
  }

  unsigned char* shared_;
  MBarrier* arrived_;
  int arrays_, stages_;
  bool aligned_, in_bulk_;
  int stage_ = 0;
  unsigned parity_ = 1;  // 0 when all stages have been filled
};

}  // namespace layernorm::cuda
