// Faults of memory, barriers and collectives, planted one at a time, next to their right counterparts. A
// comment "fault" marks the line that a report must name.
#include "cases.h"

namespace {

using namespace layernorm;
using cases::Data;
using cases::kN;

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ float warp_sum(float v) {
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(kAllLanes, v, offset);
  return v;
}

// ---- memory -----------------------------------------------------------------------------------------------
__global__ void read_past_end(const float* in, float* out) {
  const float v = in[threadIdx.x];  // fault
  __syncwarp();
  if (threadIdx.x < kN) out[threadIdx.x] = v;
}
__global__ void read_before_start(const float* in, float* out) {
  out[threadIdx.x] = in[static_cast<int>(threadIdx.x) - 1];  // fault
}
__global__ void write_past_end(const float* in, float* out) {
  if (threadIdx.x <= kN) out[threadIdx.x] = in[threadIdx.x % kN];  // fault
}
__global__ void write_input(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x == 0) const_cast<float*>(in)[1] = 0.f;  // fault
}
__global__ void read_workspace(const float* workspace, float* out) {
  out[threadIdx.x] = workspace[threadIdx.x];  // fault
}
__global__ void fill_workspace(const float* in, float* workspace, int count) {
  if (static_cast<int>(threadIdx.x) < count) workspace[threadIdx.x] = in[threadIdx.x];
}
__global__ void static_overrun(const float* in, float* out) {
  LAYERNORM_SHARED(tile, float[kN]);
  tile[threadIdx.x + 1] = in[threadIdx.x];  // fault
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x == 0 ? 1 : threadIdx.x];
}
__global__ void dynamic_overrun(const float* in, float* out) {
  LAYERNORM_DYNAMIC_SHARED(tile, float);
  tile[threadIdx.x + 1] = in[threadIdx.x];  // fault
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x == 0 ? 1 : threadIdx.x];
}
__global__ void uninitialised_shared(const float* in, float* out) {
  LAYERNORM_SHARED(tile, float[kN]);
  if (threadIdx.x < kN - 1) tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];  // fault
}
__global__ void misaligned_global(const float* in, float* out) {
  const float4 v = *reinterpret_cast<const float4*>(in + 1);  // fault
  out[threadIdx.x] = v.x;
}
__global__ void misaligned_shared(const float* in, float* out) {
  LAYERNORM_SHARED(tile, float[kN]);  // aligned to 4 bytes
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  const float4 v = *reinterpret_cast<const float4*>(&tile[threadIdx.x / 4 * 4]);  // fault
  out[threadIdx.x] = v.x;
}
__global__ void index_overflow(float* out, int rows, int cols) {
  const int offset = rows * cols;  // fault
  out[threadIdx.x] = offset < 0 ? -1.f : 1.f;
}
__global__ void array_overrun(const float* in, float* out, int n) {
  float v[4] = {};
  for (int i = 0; i <= n; ++i) v[i] = in[i];  // fault
  out[threadIdx.x] = v[0];
}
__global__ void overrun_into_padding(const float* in, float* out, int n) {
  struct alignas(16) {
    float of[2];
  } v = {};
  for (int i = 0; i <= n; ++i) v.of[i] = in[i];  // fault
  out[threadIdx.x] = v.of[0];
}

// ---- races within a block ---------------------------------------------------------------------------------
template <bool kBarrierBefore, bool kBarrierAfter>
__device__ float block_sum(float v) {
  LAYERNORM_SHARED(partial, float[8]);
  v = warp_sum(v);
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
  LAYERNORM_SHARED(first, float);
  first = in[0];  // fault
  __syncthreads();
  out[threadIdx.x] = first;
}
template <bool kSync>
__global__ void swap_in_warp(const float* in, float* out) {
  LAYERNORM_SHARED(tile, float[kN]);
  tile[threadIdx.x] = in[threadIdx.x];
  if (kSync) __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x ^ 1];  // fault
}
__global__ void shuffle_is_no_barrier(const float* in, float* out) {
  LAYERNORM_SHARED(tile, float[kN]);
  tile[threadIdx.x] = __shfl_xor_sync(kAllLanes, in[threadIdx.x], 1);
  const float mine = __shfl_xor_sync(kAllLanes, in[threadIdx.x], 1);
  out[threadIdx.x] = tile[threadIdx.x ^ 1] + 0.f * mine;  // fault
}
__global__ void early_return(const float* in, float* out) {  // right: the barrier counts those that remain
  if (threadIdx.x >= 192) return;
  LAYERNORM_SHARED(tile, float[kN]);
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

// ---- barriers and collectives -----------------------------------------------------------------------------
__global__ void barrier_in_branch(const float* in, float* out) {
  if (threadIdx.x < 128) __syncthreads();  // fault
  out[threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x >= 128) __syncthreads();  // fault
}
__global__ void barrier_for_some(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x % 32 == 0) __syncthreads();  // fault
  __syncwarp();                                // fault
  __syncthreads();
}
__global__ void shuffle_in_branch(const float* in, float* out) {
  float v = in[threadIdx.x];
  if (threadIdx.x % 32 < 16) v += __shfl_xor_sync(kAllLanes, v, 1);  // fault
  __syncthreads();
  out[threadIdx.x] = v;
}
__global__ void shuffle_outside_mask(const float* in, float* out) {
  out[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, in[threadIdx.x], 1);  // fault
}
__global__ void shuffle_from_absent_lane(const float* in, float* out) {  // 48 threads: half a second warp
  out[threadIdx.x] = __shfl_xor_sync(kAllLanes, in[threadIdx.x], 16);    // fault
}
__global__ void shuffle_with_other_mask(const float* in, float* out) {
  const unsigned mask = threadIdx.x % 32 < 8 ? kAllLanes : 0xffffff00u;
  out[threadIdx.x] = __shfl_xor_sync(mask, in[threadIdx.x], 1);  // fault
  __syncwarp();
}

// ---- between blocks ---------------------------------------------------------------------------------------
template <bool kAtomic>
__global__ void add(const float* in, float* out) {
  if (kAtomic) {
    atomicAdd(&out[threadIdx.x], in[threadIdx.x]);
  } else {
    out[threadIdx.x] += in[threadIdx.x];  // fault
  }
}
// Every block stores its part, and the one that draws the last ticket adds them up.
template <bool kBarrier>
__global__ void last_block(const float* in, float* workspace, unsigned* ticket, float* out) {
  LAYERNORM_SHARED(is_last, bool);
  workspace[blockIdx.x * kN + threadIdx.x] = in[threadIdx.x];
  __threadfence();
  if (kBarrier) __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  float total = 0.f;
  for (unsigned b = 0; b < gridDim.x; ++b) total += workspace[b * kN + threadIdx.x];  // fault
  out[threadIdx.x] = total;
}
__global__ void wait_for_block(const float* in, float* out, unsigned* flag) {
  if (blockIdx.x == 1) {
    atomicExch(flag, 1u);
  } else {
    while (atomicAdd(flag, 0u) == 0) __nanosleep(100);
    out[threadIdx.x] = in[threadIdx.x];
  }
}
__global__ void other_block(const float*, float* out) {
  out[threadIdx.x] = static_cast<float>(blockIdx.x);  // fault
}
__global__ void trapped(const float*, float*) {
  __trap();  // fault
}

// ---- the table --------------------------------------------------------------------------------------------
float same(const Data& d, int i) { return d.in[i]; }
float swapped(const Data& d, int i) { return d.in[i ^ 1]; }
float three_sums(const Data& d, int) { return 3 * d.sum; }
float four_times(const Data& d, int i) { return 4 * d.in[i]; }

std::function<void(const Data&)> launch_in(LaunchConfig config, void (*kernel)(const float*, float*)) {
  return [=](const Data& d) { launch(config, kernel, d.in, d.out); };
}

}  // namespace

int main() {
  const LaunchConfig one{1, kN}, larger{1, kN + 1}, two{2, kN}, four{4, kN}, with_row{1, kN, kN * sizeof(float)};
  return cases::run({
      {"read_past_end", "outside any buffer", launch_in(larger, read_past_end)},
      {"read_before_start", "4 bytes before 'in'", launch_in(one, read_before_start)},
      {"write_past_end", "outside any buffer", launch_in(larger, write_past_end)},
      {"write_input", "read-only global memory 'in'", launch_in(one, write_input)},
      {"read_workspace", "uninitialised global memory 'workspace'",
       [=](const Data& d) {
         launch(one, fill_workspace, d.in, d.workspace, kN - 1);
         launch(one, read_workspace, d.workspace, d.out);
       }},
      {"workspace", "",
       [=](const Data& d) {
         launch(one, fill_workspace, d.in, d.workspace, kN);
         launch(one, read_workspace, d.workspace, d.out);
       },
       same},
      {"static_overrun", "undefined behaviour (out_of_bounds)", launch_in(one, static_overrun)},
      {"dynamic_overrun", "0 bytes after the end of 'dynamic shared memory'", launch_in(with_row, dynamic_overrun)},
      {"uninitialised_shared", "uninitialised shared memory 'tile'", launch_in(one, uninitialised_shared)},
      {"misaligned_global", "misaligned", launch_in(one, misaligned_global)},
      {"misaligned_shared", "misaligned", launch_in(one, misaligned_shared)},
      {"index_overflow", "undefined behaviour (mul_overflow)",
       [=](const Data& d) { launch(one, index_overflow, d.out, 1 << 16, 1 << 15); }},
      {"array_overrun", "undefined behaviour (out_of_bounds)",
       [=](const Data& d) { launch(one, array_overrun, d.in, d.out, 4); }},
      {"overrun_into_padding", "undefined behaviour (out_of_bounds)",
       [=](const Data& d) { launch(one, overrun_into_padding, d.in, d.out, 2); }},

      {"sums", "", launch_in(one, sums<true, true>), three_sums},
      {"no_barrier_before_read", "shared memory 'partial'", launch_in(one, sums<true, false>)},
      {"no_barrier_before_write", "data race (write after read) on shared memory 'partial'",
       launch_in(one, sums<false, true>)},
      {"same_value", "data race (write after write) on shared memory 'first'", launch_in(one, same_value)},
      {"syncwarp", "", launch_in(one, swap_in_warp<true>), swapped},
      {"no_syncwarp", "shared memory 'tile'", launch_in(one, swap_in_warp<false>)},
      {"shuffle_is_no_barrier", "data race (read after write) on shared memory 'tile'",
       launch_in(one, shuffle_is_no_barrier)},
      {"early_return", "", launch_in(one, early_return),
       [](const Data& d, int i) { return i < 192 ? d.in[i ^ 1] : 0; }},

      {"barrier_in_branch", "divergent block barrier", launch_in(one, barrier_in_branch)},
      {"barrier_for_some", "deadlock", launch_in(one, barrier_for_some)},
      {"shuffle_in_branch", "deadlock", launch_in(one, shuffle_in_branch)},
      {"shuffle_outside_mask", "not in the mask", launch_in(one, shuffle_outside_mask)},
      {"shuffle_from_absent_lane", "does not take part", launch_in({1, 48}, shuffle_from_absent_lane)},
      {"shuffle_with_other_mask", "deadlock", launch_in(one, shuffle_with_other_mask)},

      {"atomic_add", "", launch_in(four, add<true>), four_times},
      {"plain_add", "data race", launch_in(four, add<false>)},
      {"last_block", "", [=](const Data& d) { launch(four, last_block<true>, d.in, d.workspace, d.ticket, d.out); },
       four_times},
      {"last_block_without_barrier", "global memory 'workspace'",
       [=](const Data& d) { launch(four, last_block<false>, d.in, d.workspace, d.ticket, d.out); }},
      {"blocks_overwrite", "data race (write after write) on global memory 'out'", launch_in(two, other_block)},
      {"wait_for_block", "a loop waits in vain",
       [=](const Data& d) {
         emulator::options().concurrent_blocks = 1;
         emulator::options().max_switches = 1 << 16;
         launch({3, kN}, wait_for_block, d.in, d.out, d.ticket);
       }},
      {"trap", "__trap()", launch_in(one, trapped)},

      {"empty_grid", "invalid grid size", launch_in({0, kN}, sums<true, true>)},
      {"block_too_large", "invalid block size", launch_in({1, 1056}, sums<true, true>)},
      {"too_much_shared", "bytes of shared memory, 0 of them static, are more than 232448",
       launch_in({1, kN, 300000}, sums<true, true>)},
      {"cluster_does_not_divide", "invalid cluster size", launch_in({3, kN, 0, nullptr, 2}, sums<true, true>)},
  });
}
