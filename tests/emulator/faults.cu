// One kernel per fault that the emulator finds, beside correct counterparts without a report. Prints one line per case
// and schedule for test_emulator.py. A report must name a line with the comment "fault".
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device.h"

namespace {

using namespace layernorm;

constexpr int kN = 256;
constexpr unsigned kAllLanes = 0xffffffffu, kRowBytes = kN * sizeof(float);

struct Data {
  const float* in;   // [kN], read-only
  float* out;        // [kN]
  float* workspace;  // [kN], uninitialized
};

// The faults that a kernel can have.
enum class Fault {
  kNone,
  kNoWait,
  kNoBarrier,
  kWrongPhase,
  kMisaligned,
  kTooEarly,
  kReadByOthers,
};

// ---- memory ---------------------------------------------------------------------------------------------------------

__global__ void read_past_end(const float* in, float* out) {
  const float v = in[threadIdx.x];  // fault
  __syncwarp();
  if (threadIdx.x < kN) out[threadIdx.x] = v;
}
__global__ void write_input(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x == 0) const_cast<float*>(in)[1] = 0.f;  // fault
}
__global__ void fill(const float* in, float* workspace) {
  workspace[threadIdx.x] = in[threadIdx.x];
  let_next_grid_start();
}
__global__ void copy_workspace(const float* workspace, float* out) {
  out[threadIdx.x] = workspace[threadIdx.x];  // fault
}
__global__ void uninitialized_shared(const float* in, float* out) {
  __shared__ float tile[kN];
  if (threadIdx.x < kN - 1) tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];  // fault
}
__global__ void misaligned_shared(const float* in, float* out) {
  __shared__ float tile[kN];  // aligned to 4 bytes
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  const float4 v = *reinterpret_cast<const float4*>(&tile[threadIdx.x / 4 * 4]);  // fault
  out[threadIdx.x] = v.x;
}
__global__ void index_overflow(float* out, int rows, int cols) {
  const int offset = rows * cols;  // fault
  out[threadIdx.x] = offset < 0 ? -1.f : 1.f;
}

// ---- races ----------------------------------------------------------------------------------------------------------

template <bool kBarrierBefore, bool kBarrierAfter>
__device__ float block_sum(float v) {
  __shared__ float partial[8];
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(kAllLanes, v, offset);
  if (kBarrierBefore) __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;  // fault
  if (kBarrierAfter) __syncthreads();
  float total = 0.f;
  for (int w = 0; w < 8; ++w) total += partial[w];  // fault
  return total;
}
// The second sum reuses the shared memory of the first.
template <bool kBarrierBefore, bool kBarrierAfter>
__global__ void sums(const float* in, float* out) {
  const float a = block_sum<kBarrierBefore, kBarrierAfter>(in[threadIdx.x]);
  out[threadIdx.x] = a + block_sum<kBarrierBefore, kBarrierAfter>(in[threadIdx.x] * 2.f);
}
__global__ void same_value(const float* in, float* out) {
  __shared__ float first;
  first = in[0];  // fault
  __syncthreads();
  out[threadIdx.x] = first;
}
// A shuffle orders no accesses.
template <bool kSync>
__global__ void swap_in_warp(const float* in, float* out) {
  __shared__ float tile[kN];
  tile[threadIdx.x] = in[threadIdx.x];
  const float v = __shfl_xor_sync(kAllLanes, in[threadIdx.x], 1);
  if (kSync) __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x ^ 1] + 0.f * v;  // fault
}
__global__ void blocks_overwrite(const float*, float* out) {
  out[threadIdx.x] = static_cast<float>(blockIdx.x);  // fault
}

// ---- barriers and collectives ---------------------------------------------------------------------------------------

__global__ void barrier_in_branch(const float* in, float* out) {
  if (threadIdx.x < 128) __syncthreads();  // fault
  out[threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x >= 128) __syncthreads();  // fault
}
__global__ void shuffle_in_branch(const float* in, float* out) {
  float v = in[threadIdx.x];
  if (threadIdx.x % 32 < 16) v += __shfl_xor_sync(kAllLanes, v, 1);  // fault
  __syncthreads();
  out[threadIdx.x] = v;
}
__global__ void shuffle_of_half_a_warp(const float* in, float* out) {
  out[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, in[threadIdx.x], 1);  // fault
}
__global__ void shuffle_from_absent_lane(const float* in, float* out) {  // 48 threads: half a second warp
  out[threadIdx.x] = __shfl_xor_sync(kAllLanes, in[threadIdx.x], 16);    // fault
}

// ---- cp.async -------------------------------------------------------------------------------------------------------

// Two rows go through one buffer: the second is fetched after the block has read the first.
template <Fault kFault>
__global__ void fetch(const float* in, float* out) {
  extern __shared__ __align__(16) float tile[];
  for (int row = 0; row < 2; ++row) {
    if (threadIdx.x < kN / 4) {
      const int shift = kFault == Fault::kMisaligned;
      async_copy<16>(tile + 4 * threadIdx.x, in + 4 * threadIdx.x + shift);  // fault
    }
    async_commit();
    if (kFault != Fault::kNoWait) async_wait<kFault == Fault::kWrongPhase>();
    if (kFault != Fault::kReadByOthers) __syncthreads();
    if (kFault == Fault::kTooEarly && row == 1) tile[threadIdx.x] = 1.f;
    out[threadIdx.x] = tile[threadIdx.x ^ 1];  // fault
    if (kFault != Fault::kNoBarrier) __syncthreads();
  }
  async_wait<0>();
}
__global__ void leave_copy(const float* in, float*) {
  extern __shared__ __align__(16) float tile[];
  async_copy<16>(tile + 4 * threadIdx.x, in + 4 * threadIdx.x);
  async_commit();
}

// ---- clusters -------------------------------------------------------------------------------------------------------

__device__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}
// Each of two blocks reads the other's part.
template <Fault kFault>
__global__ void read_peers(const float* in, float* out) {
  __shared__ float part[kN];
  part[threadIdx.x] = in[threadIdx.x];  // fault
  if (kFault != Fault::kNoBarrier) cluster_barrier();
  const unsigned other = kFault == Fault::kWrongPhase ? 2 : 1 - cluster_rank();
  const float v = *cluster_peer(&part[threadIdx.x ^ 1], other);  // fault
  if (kFault != Fault::kTooEarly) cluster_barrier();
  if (cluster_rank() == 0) out[threadIdx.x] = v;
}
// Each block writes its rank to both blocks, row after row. With two slots in turn, one barrier a row is enough.
template <int kSlots>
__global__ void write_peers(const float* in, float* out) {
  __shared__ float ranks[2][2];
  cluster_barrier();
  float sum = in[threadIdx.x];
  for (int row = 0; row < 4; ++row) {
    if (threadIdx.x < 2) *cluster_peer(&ranks[row % kSlots][cluster_rank()], threadIdx.x) = cluster_rank();  // fault
    cluster_barrier();
    sum += ranks[row % kSlots][0] - ranks[row % kSlots][1] + 1.f;  // fault
  }
  if (cluster_rank() == 0) out[threadIdx.x] = sum;
}
__global__ void return_between(const float*, float*) { cluster_arrive(); }

// ---- overlapping launches -------------------------------------------------------------------------------------------

__global__ void read_before_wait(const float* workspace, float* out) {
  const float v = workspace[threadIdx.x];  // fault
  wait_for_previous_grid();
  out[threadIdx.x] = v;
}
__global__ void overwrite_input(const float* in, float* workspace) {
  workspace[threadIdx.x] = in[threadIdx.x];  // fault
  wait_for_previous_grid();
}
__global__ void one_waits(const float* workspace, float* out) {  // correct: the barrier comes after its wait
  if (threadIdx.x == 0) wait_for_previous_grid();
  __syncthreads();
  out[threadIdx.x] = workspace[threadIdx.x];
}
__global__ void never_waits(const float*, float*) {}

// ---- the table ------------------------------------------------------------------------------------------------------

struct Case {
  const char* name;
  const char* report;  // part of the expected report, or alternatives separated by " or "; empty: none
  std::function<void(const Data&)> run;
};

const LaunchConfig kOne{1, kN}, kPair{2, kN, 0, nullptr, 2}, kOverlapping{1, kN, 0, nullptr, 1, true},
    kWithRow{1, kN, kRowBytes};

std::function<void(const Data&)> launch_in(LaunchConfig config, void (*kernel)(const float*, float*),
                                           int architecture = 90) {
  return [=](const Data& d) {
    emulator::options().architecture = architecture;
    launch(config, kernel, d.in, d.out);
  };
}
std::function<void(const Data&)> fill_and_launch(LaunchConfig config, void (*kernel)(const float*, float*),
                                                 unsigned filled = kN) {
  return [=](const Data& d) {
    launch({1, filled}, fill, d.in, d.workspace);
    launch(config, kernel, d.workspace, d.out);
  };
}

const std::vector<Case> kCases = {
    {"read_past_end", "0 bytes after the end of 'in'", launch_in({1, kN + 1}, read_past_end)},
    {"write_input", "read-only global memory 'in'", launch_in(kOne, write_input)},
    {"read_workspace", "uninitialized global memory 'workspace'", fill_and_launch(kOne, copy_workspace, kN - 1)},
    {"workspace", "", fill_and_launch(kOne, copy_workspace)},
    {"uninitialized_shared", "uninitialized shared memory 'tile'", launch_in(kOne, uninitialized_shared)},
    {"misaligned_shared", "misaligned", launch_in(kOne, misaligned_shared)},
    {"index_overflow", "undefined behavior (mul_overflow)",
     [](const Data& d) { launch(kOne, index_overflow, d.out, 1 << 16, 1 << 15); }},
    {"sums", "", launch_in(kOne, sums<true, true>)},
    {"no_barrier_before_read", "shared memory 'partial'", launch_in(kOne, sums<true, false>)},
    {"no_barrier_before_write", "data race (write after read) on shared memory 'partial'",
     launch_in(kOne, sums<false, true>)},
    {"same_value", "data race (write after write) on shared memory 'first'", launch_in(kOne, same_value)},
    {"syncwarp", "", launch_in(kOne, swap_in_warp<true>)},
    {"no_syncwarp", "shared memory 'tile'", launch_in(kOne, swap_in_warp<false>)},
    {"blocks_overwrite", "data race (write after write) on global memory 'out'", launch_in({2, kN}, blocks_overwrite)},
    {"barrier_in_branch", "divergent block barrier", launch_in(kOne, barrier_in_branch)},
    {"shuffle_in_branch", "deadlock", launch_in(kOne, shuffle_in_branch)},
    {"shuffle_of_half_a_warp", "fewer than all lanes", launch_in(kOne, shuffle_of_half_a_warp)},
    {"shuffle_from_absent_lane", "does not take part", launch_in({1, 48}, shuffle_from_absent_lane)},
    {"too_much_shared", "bytes of shared memory, 0 of them static, are more than 232448",
     launch_in({1, kN, 300000}, same_value)},
    {"fetch", "", launch_in(kWithRow, fetch<Fault::kNone>)},
    {"fetch_without_wait", "which the asynchronous copy", launch_in(kWithRow, fetch<Fault::kNoWait>)},
    {"fetch_waits_for_older", "which the asynchronous copy", launch_in(kWithRow, fetch<Fault::kWrongPhase>)},
    {"fetch_read_by_others", "shared memory", launch_in(kWithRow, fetch<Fault::kReadByOthers>)},
    {"fetch_refilled_too_early", "data race or which the asynchronous copy",
     launch_in(kWithRow, fetch<Fault::kNoBarrier>)},
    {"fetch_misaligned", "a misaligned asynchronous copy", launch_in(kWithRow, fetch<Fault::kMisaligned>)},
    {"leave_copy", "before its asynchronous copies were complete", launch_in({1, 64, kRowBytes}, leave_copy)},
    {"read_peers", "", launch_in(kPair, read_peers<Fault::kNone>)},
    {"read_peers_without_barrier", "a block that may not have started or uninitialized shared memory 'part'",
     launch_in(kPair, read_peers<Fault::kNoBarrier>)},
    {"read_peers_and_return", "block", launch_in(kPair, read_peers<Fault::kTooEarly>)},
    {"read_absent_peer", "a block that the cluster does not have", launch_in(kPair, read_peers<Fault::kWrongPhase>)},
    {"write_peers", "", launch_in(kPair, write_peers<2>)},
    {"write_peers_too_early", "data race", launch_in(kPair, write_peers<1>)},
    {"return_between", "returned between cluster_arrive and cluster_wait", launch_in(kPair, return_between)},
    {"cluster_on_sm80", "clusters need compute capability 9.0", launch_in(kPair, read_peers<Fault::kNone>, 80)},
    {"overlap_one_waits", "", fill_and_launch(kOverlapping, one_waits)},
    {"overlap_read_before_wait", "before the wait for the previous grid, which writes",
     fill_and_launch(kOverlapping, read_before_wait)},
    {"overlap_unknown_input", "before the wait for the previous grid, which may still write",
     [](const Data& d) { launch(kOverlapping, read_before_wait, d.in, d.out); }},
    {"overlap_overwrites", "before the wait for the previous grid, which reads",
     [](const Data& d) {
       launch(kOne, fill, d.in, d.workspace);
       launch(kOne, copy_workspace, d.workspace, d.out);
       launch(kOverlapping, overwrite_input, d.in, d.workspace);
     }},
    {"overlap_chain", "before the wait for the previous grid, which writes",
     [](const Data& d) {  // the grid in between waits, but lets this one start before
       launch(kOne, fill, d.in, d.workspace);
       launch(kOverlapping, one_waits, d.in, d.out);
       launch(kOverlapping, read_before_wait, d.workspace, d.out);
     }},
    {"overlap_never_waits", "returned without a wait for the previous grid",
     fill_and_launch(kOverlapping, never_waits)},
};

std::string outcome(const Case& c) {
  const std::unique_ptr<float[]> in(new float[kN]()), out(new float[kN]()), workspace(new float[kN]);
  const Data data{in.get(), out.get(), workspace.get()};
  using emulator::Contents;
  emulator::clear_buffers();
  emulator::register_buffer(data.in, kRowBytes, "in", Contents::kInput);
  emulator::register_buffer(data.out, kRowBytes, "out", Contents::kInOut);
  emulator::register_buffer(data.workspace, kRowBytes, "workspace", Contents::kOutput);
  try {
    c.run(data);
  } catch (const emulator::Fault& fault) {
    return fault.what();
  }
  return "";
}

}  // namespace

int main() {
  for (const Case& c : kCases) {
    for (unsigned schedule = 0; schedule < 8; ++schedule) {
      using emulator::Order;
      const Order order = schedule == 0 ? Order::kForward : schedule == 1 ? Order::kReverse : Order::kRandom;
      emulator::options() = {order, schedule, order == Order::kRandom ? 4u : 1u};
      std::string report = outcome(c);
      for (char& letter : report) letter = letter == '\n' ? '|' : letter;
      std::printf("%s\t%s\t%s\n", c.name, c.report, report.c_str());
    }
  }
}
