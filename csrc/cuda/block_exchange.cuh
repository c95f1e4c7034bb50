// The exchange of partial results between the blocks that share a long row. Blocks with the same blockIdx.y share their
// rows: block blockIdx.x has the columns from blockIdx.x * block_cols on.
#pragma once

#include "thread_columns.cuh"

namespace layernorm::cuda {

// The result of a block for its columns of a row: encoded moments in forward, RowSums in backward.
using PartialResult = Acc[3];

// Gives the blocks of a row the results of all of them.
//
// If a cluster shares a row, each block stores its result in the shared memory of all blocks of the cluster
// (distributed shared memory), and an mbarrier there tells when all results have arrived. A block has one row in each
// iteration of its loop. Four buffers, which take turns, suffice: when a block sends result i, it has received result
// i - 2 of every block, and each block sent result i - 2 after a barrier that follows its reads of results i - 4. So no
// block still reads the buffer that result i overwrites.
//
// If the blocks of a row are no cluster, the kernel is launched twice: the first launch stores the results in the
// workspace, and the second one loads them.
class BlockExchange {
 public:
  static constexpr int kBuffers = 4;
  struct Memory {
    PartialResult results[kBuffers][kMaxClusterSize];
    TransactionBarrier barriers[kBuffers];
  };

  // Initializes the mbarriers. All threads of a cluster call this first.
  __device__ __forceinline__ static void start(Memory& memory) {
    if (threadIdx.x == 0) {
      for (auto& barrier : memory.barriers) barrier.init();
    }
    cluster_arrive();
    cluster_wait();
  }
  __device__ __forceinline__ BlockExchange(Memory& memory, void* workspace, int row_blocks, Flags flags)
      : memory_(memory), workspace_(static_cast<PartialResult*>(workspace)), row_blocks_(row_blocks), flags_(flags) {}

  // Sends the block's result for the row of this iteration to the row's blocks. All threads of the block call this.
  __device__ __forceinline__ void send(const PartialResult& result, int iteration) const {
    const int block = blockIdx.x, thread = recompute_from(static_cast<int>(threadIdx.x));
    if (flags_.has(kClusterSharesRow)) {
      auto& barrier = memory_.barriers[iteration % kBuffers];
      if (thread == 0) barrier.expect(row_blocks_ * sizeof(PartialResult));
      if (thread < row_blocks_) barrier.store(memory_.results[iteration % kBuffers][block], result, thread);
    } else if (flags_.has(kFirstLaunch) && thread == 0) {
      for (int k = 0; k < 3; ++k) workspace_[row_begin(iteration) + block][k] = result[k];
    }
  }
  // Waits for the results of all blocks of the row, and returns them in the order of the blocks.
  __device__ __forceinline__ const PartialResult* receive(int iteration) const {
    if (flags_.has(kSecondLaunch)) return workspace_ + row_begin(iteration);
    memory_.barriers[iteration % kBuffers].wait(iteration / kBuffers);
    return memory_.results[iteration % kBuffers];
  }

  // The bytes of workspace for two launches of `grid` blocks, each of which has `iterations` iterations.
  static int64_t workspace_bytes(dim3 grid, int64_t iterations) {
    return iterations * grid.y * grid.x * static_cast<int64_t>(sizeof(PartialResult));
  }

 private:
  // The index of the first result of a row in the workspace, which is [iterations, gridDim.y, gridDim.x].
  __device__ __forceinline__ static int64_t row_begin(int iteration) {
    return (int64_t{recompute_from(iteration)} * gridDim.y + blockIdx.y) * gridDim.x;
  }

  Memory& memory_;
  PartialResult* const workspace_;
  const int row_blocks_;
  const Flags flags_;
};

// Launches a kernel once or, if blocks share rows without being a cluster, twice: see BlockExchange.
template <class Params, class Plan>
void launch_once_or_twice(const LaunchConfig& config, void (*kernel)(Params, Plan), const Params& p, Plan plan) {
  if (plan.row_blocks > static_cast<int>(config.cluster)) {
    plan.flags.set(kFirstLaunch, true);
    launch(config, kernel, p, plan);
    plan.flags.set(kFirstLaunch, false);
    plan.flags.set(kSecondLaunch, true);
  }
  launch(config, kernel, p, plan);
}

}  // namespace layernorm::cuda
