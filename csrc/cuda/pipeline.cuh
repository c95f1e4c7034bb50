// Fetches rows to shared memory while the block works on earlier rows.
#pragma once

#include "staged_row.cuh"

namespace layernorm::cuda {

constexpr int kMaxStages = 2;

// A ring of stages. A stage holds one row of dy (of T), x and the gradient of the sum (both of X) for every row of the
// block; x and the gradient of the sum may be absent. Rows are fetched by the threads that share them or, if one block
// handles an aligned row, by bulk copies. One thread starts the bulk copies, and they complete on the full barrier of
// their stage. All rows that are copied in bulk have `cols` columns.
template <class T, class X, class Tile>
class RowPipeline {
 public:
  using StagedX = StagedRow<X, Tile>;
  using StagedDy = StagedRow<T, Tile, kVectorSize<X>>;

  struct Rows {  // null for an array that is not needed
    const T* dy;
    const X *x, *dsum;
  };

  // The shared memory for rows of `threads` threads. Unaligned rows need one more staged row for dx.
  static size_t bytes(int threads, int rows, int arrays, int stages, bool aligned) {
    return (stages * arrays + !aligned) * rows * StagedX::bytes(threads);
  }

  // Must be called by all threads of the block.
  __device__ __forceinline__ RowPipeline(unsigned char* shared, MBarrier* full_barriers, int arrays, int stages,
                                         bool aligned, bool in_bulk, int cols, const Position<Tile>& position)
      : shared_(shared),
        full_barriers_(full_barriers),
        arrays_(arrays),
        stages_(stages),
        aligned_(aligned),
        in_bulk_(Tile::kWarps > 1 && aligned && in_bulk && has_bulk_copies()) {
    if (!in_bulk_) return;
#pragma unroll 1
    for (int i = 0; i < stages * arrays; ++i) {
      if (i % arrays == 0) {
        StagedDy(shared_memory(i, position), position, true).clear_after(cols);
      } else {
        StagedX(shared_memory(i, position), position, true).clear_after(cols);
      }
    }
    if (position.thread == 0) {
#pragma unroll 1
      for (int i = 0; i < stages; ++i) mbarrier_init(&full_barriers[i], 1);
      mbarrier_fence_init();
    }
    __syncthreads();
  }

  // Starts to fetch `cols` columns of the next rows, or of none if `cols` is 0, to a stage that is new or released.
  __device__ __forceinline__ void fetch(const Rows& rows, int cols, const Position<Tile>& position) {
    if (in_bulk_) {
      if (position.thread == 0) {
        MBarrier* const full_barrier = &full_barriers_[stage_];
        mbarrier_arrive(full_barrier, cols * static_cast<int>(sizeof(T) + (arrays_ - 1) * sizeof(X)));
        if (cols > 0) {
          for_each_array(rows, position,
                         [&](auto staged, const auto* row) { staged.fetch_in_bulk(row, cols, full_barrier); });
        }
      }
    } else {
      for_each_array(rows, position, [&](auto staged, const auto* row) { staged.fetch(row, cols); });
      async_commit();
    }
    if (++stage_ == stages_) stage_ = 0, parity_ ^= 1;
  }

  // Waits for the oldest rows that have not been released. rows() returns their addresses, which unaligned rows need.
  template <class F>
  __device__ __forceinline__ void wait(const F& rows, int cols, const Position<Tile>& position) const {
    if (in_bulk_) {
      mbarrier_wait(&full_barriers_[stage_], parity_);
      return;
    }
    if (stages_ == 1) {
      async_wait<0>();
    } else {
      async_wait<kMaxStages - 1>();
    }
    if (aligned_) return;
    position.sync();
    for_each_array(rows(), position, [&](auto staged, const auto* row) { staged.realign(row, cols); });
  }

  // The rows that wait() waited for.
  __device__ __forceinline__ StagedDy dy(const Position<Tile>& position) const { return row<StagedDy>(0, position); }
  __device__ __forceinline__ StagedX x(const Position<Tile>& position) const { return row<StagedX>(1, position); }
  __device__ __forceinline__ StagedX dsum(const Position<Tile>& position) const { return row<StagedX>(2, position); }

  // Releases the oldest rows. The next fetch overwrites them.
  __device__ __forceinline__ void release() const {
    if (in_bulk_ || !aligned_) Position<Tile>::sync();
  }

  // The shared memory that stages dx.
  __device__ __forceinline__ StagedX dx(const Position<Tile>& position) const {
    return {shared_memory(stages_ * arrays_, position), position, aligned_};
  }

  // Must be called before the block returns.
  __device__ __forceinline__ static void drain() { async_wait<0>(); }

 private:
  __device__ __forceinline__ unsigned char* shared_memory(int index, const Position<Tile>& position) const {
    const int row = index * position.rows_per_block() + position.row;
    return shared_ + row * StagedX::bytes(position.threads_per_row());
  }
  template <class Staged>
  __device__ __forceinline__ Staged row(int array, const Position<Tile>& position) const {
    return {shared_memory(stage_ * arrays_ + array, position), position, aligned_};
  }

  // Calls f(staged row, row in global memory) for each array that is needed.
  template <class F>
  __device__ __forceinline__ void for_each_array(const Rows& rows, const Position<Tile>& position, const F& f) const {
    if (rows.dy) f(dy(position), rows.dy);
    if (rows.x) f(x(position), rows.x);
    if (rows.dsum) f(dsum(position), rows.dsum);
  }

  unsigned char* shared_;
  MBarrier* full_barriers_;
  int arrays_, stages_;
  bool aligned_, in_bulk_;
  int stage_ = 0;
  // The parity of the phase to wait for. The first round of fetches fills the stages and sets it to 0; each later round
  // flips it.
  unsigned parity_ = 1;
};

}  // namespace layernorm::cuda
