// The exchange of three numbers of each part of a row between the row's blocks.
#pragma once

#include "slice.cuh"

namespace layernorm::cuda {

using PartValue = Acc[3];

// The blocks of a cluster send the values to each other's shared memory. Four buffers, which take turns, suffice: a
// block sends the value of row r only after it has received that of row r - 2 from every block, and each of them sent
// that only after a barrier that follows its reads of row r - 4.
//
// Without a cluster, a launch stores the values in the workspace, and the next launch loads them.
class PartExchange {
 public:
  static constexpr int kBuffers = 4;
  struct Memory {
    PartValue values[kBuffers][kMaxClusterSize];
    TransactionBarrier barriers[kBuffers];
  };

  // All threads of a cluster call this first.
  __device__ __forceinline__ static void start(Memory& memory) {
    if (threadIdx.x == 0) {
      for (auto& barrier : memory.barriers) barrier.init();
    }
    cluster_arrive();
    cluster_wait();
  }
  __device__ __forceinline__ PartExchange(Memory& memory, void* workspace, int num_parts, Flags flags)
      : memory_(memory), workspace_(static_cast<PartValue*>(workspace)), num_parts_(num_parts), flags_(flags) {}

  // The block sends the value of its part of a row. `round` counts the rows of the block.
  __device__ __forceinline__ void send(const PartValue& value, int round) const {
    const int part = blockIdx.x, thread = compute_again(static_cast<int>(threadIdx.x));
    if (flags_.has(kInCluster)) {
      auto& barrier = memory_.barriers[round % kBuffers];
      if (thread == 0) barrier.expect(num_parts_ * sizeof(PartValue));
      if (thread < num_parts_) barrier.store(memory_.values[round % kBuffers][part], value, thread);
    } else if (flags_.has(kStoresSums) && thread == 0) {
      for (int k = 0; k < 3; ++k) workspace_[first_part(round) + part][k] = value[k];
    }
  }
  // Returns the values of the row's parts when they are there.
  __device__ __forceinline__ const PartValue* receive(int round) const {
    if (flags_.has(kLoadsSums)) return workspace_ + first_part(round);
    memory_.barriers[round % kBuffers].wait(round / kBuffers);
    return memory_.values[round % kBuffers];
  }

  static int64_t workspace_bytes(dim3 grid, int64_t rounds) {
    return rounds * grid.y * grid.x * static_cast<int64_t>(sizeof(PartValue));
  }

 private:
  // The blocks of a row have the same blockIdx.y and round.
  __device__ __forceinline__ static int64_t first_part(int round) {
    return (int64_t{compute_again(round)} * gridDim.y + blockIdx.y) * gridDim.x;
  }

  Memory& memory_;
  PartValue* const workspace_;
  const int num_parts_;
  const Flags flags_;
};

// Launches a kernel; twice, if its blocks share rows without a cluster.
template <class Params, class Plan>
void launch_parts(const LaunchConfig& config, void (*kernel)(Params, Plan), const Params& p, Plan plan) {
  if (plan.num_parts > static_cast<int>(config.cluster)) {
    plan.flags.set(kStoresSums, true);
    launch(config, kernel, p, plan);
    plan.flags.set(kStoresSums, false);
    plan.flags.set(kLoadsSums, true);
  }
  launch(config, kernel, p, plan);
}

}  // namespace layernorm::cuda
