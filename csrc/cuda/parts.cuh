// The exchange of three numbers of each part of a row between the row's blocks.
#pragma once

#include "slice.cuh"

namespace layernorm::cuda {

using PartValue = Acc[3];

// The blocks of a cluster send the values to each other's shared memory, where four buffers take turns. A block sends
// the value of row r after it has received those of row r - 2 from all blocks. Each of these had sent its own after a
// barrier before which its threads had read the values of row r - 4, which are now overwritten.
class ClusterExchange {
 public:
  static constexpr int kBuffers = 4;
  struct Memory {
    PartValue values[kBuffers][kMaxClusterSize];
    TransactionBarrier barriers[kBuffers];
  };

  // All threads of the cluster call this.
  __device__ __forceinline__ static void start(Memory& memory) {
    if (threadIdx.x == 0) {
      for (auto& barrier : memory.barriers) barrier.init();
    }
    cluster_arrive();
    cluster_wait();
  }
  __device__ __forceinline__ ClusterExchange(Memory& memory, int num_parts) : memory_(memory), num_parts_(num_parts) {}

  // The block sends the value of its part of a row. `round` counts the rows of the block.
  __device__ __forceinline__ void send(const PartValue& value, int round) const {
    const int buffer = round % kBuffers, part = blockIdx.x, thread = compute_again(static_cast<int>(threadIdx.x));
    if (thread == 0) memory_.barriers[buffer].expect(num_parts_ * sizeof(PartValue));
    if (thread < num_parts_) memory_.barriers[buffer].store(memory_.values[buffer][part], value, thread);
  }
  // Returns the values of the row's parts when they are there.
  __device__ __forceinline__ const PartValue* receive(int round) const {
    memory_.barriers[round % kBuffers].wait(round / kBuffers);
    return memory_.values[round % kBuffers];
  }

 private:
  Memory& memory_;
  const int num_parts_;
};

// Without a cluster, a launch stores the values in the workspace, and the next launch loads them.
class WorkspaceExchange {
 public:
  __device__ __forceinline__ explicit WorkspaceExchange(void* workspace)
      : values_(static_cast<PartValue*>(workspace)) {}

  __device__ __forceinline__ void send(const PartValue& value, int round) const {
    if (threadIdx.x > 0) return;
#pragma unroll
    for (int k = 0; k < 3; ++k) values_[first_part(round) + blockIdx.x][k] = value[k];
  }
  __device__ __forceinline__ const PartValue* receive(int round) const { return values_ + first_part(round); }

  static int64_t bytes(dim3 grid, int64_t rounds) {
    return rounds * grid.y * grid.x * static_cast<int64_t>(sizeof(PartValue));
  }

 private:
  // The blocks of a row have the same blockIdx.y and round.
  __device__ __forceinline__ static int64_t first_part(int round) {
    return (int64_t{compute_again(round)} * gridDim.y + blockIdx.y) * gridDim.x;
  }

  PartValue* const values_;
};

// The exchange of a call.
class PartExchange {
 public:
  __device__ __forceinline__ PartExchange(ClusterExchange::Memory& memory, void* workspace, int num_parts, Flags flags)
      : cluster_(memory, num_parts), workspace_(workspace), flags_(flags) {}

  __device__ __forceinline__ void send(const PartValue& value, int round) const {
    if (flags_.has(kInCluster)) {
      cluster_.send(value, round);
    } else if (flags_.has(kStoresSums)) {
      workspace_.send(value, round);
    }
  }
  __device__ __forceinline__ const PartValue* receive(int round) const {
    return flags_.has(kLoadsSums) ? workspace_.receive(round) : cluster_.receive(round);
  }

 private:
  const ClusterExchange cluster_;
  const WorkspaceExchange workspace_;
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
