// Faults of memory, barriers and collectives, one per kernel, beside correct counterparts. A report must name a line
// with the comment "fault".
#include "cases.h"

namespace {

using namespace layernorm;
using cases::Data;
using cases::kN;

constexpr unsigned kAllLanes = 0xffffffffu;

// ---- memory ---------------------------------------------------------------------------------------------------------

__global__ void read_past_end(const float* in, float* out) {
  const float v = in[threadIdx.x];  // fault
  __syncwarp();
  if (threadIdx.x < kN) out[threadIdx.x] = v;
}
__global__ void read_before_start(const float* in, float* out) {
  out[threadIdx.x] = in[static_cast<int>(threadIdx.x) - 1];  // fault
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
  __shared__ float tile[kN];
  tile[threadIdx.x + 1] = in[threadIdx.x];  // fault
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x == 0 ? 1 : threadIdx.x];
}
__global__ void dynamic_overrun(const float* in, float* out) {
  extern __shared__ __align__(16) float tile[];
  tile[threadIdx.x + 1] = in[threadIdx.x];  // fault
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x == 0 ? 1 : threadIdx.x];
}
__global__ void uninitialized_shared(const float* in, float* out) {
  __shared__ float tile[kN];
  if (threadIdx.x < kN - 1) tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];  // fault
}
__global__ void misaligned_global(const float* in, float* out) {
  const float4 v = *reinterpret_cast<const float4*>(in + 1);  // fault
  out[threadIdx.x] = v.x;
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
__global__ void overrun_into_padding(const float* in, float* out, int n) {
  struct alignas(16) {
    float of[2];
  } v = {};
  for (int i = 0; i <= n; ++i) v.of[i] = in[i];  // fault
  out[threadIdx.x] = v.of[0];
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
template <bool kSync>
__global__ void swap_in_warp(const float* in, float* out) {
  __shared__ float tile[kN];
  tile[threadIdx.x] = in[threadIdx.x];
  if (kSync) __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x ^ 1];  // fault
}
__global__ void shuffle_is_no_barrier(const float* in, float* out) {
  __shared__ float tile[kN];
  tile[threadIdx.x] = in[threadIdx.x];
  const float v = __shfl_xor_sync(kAllLanes, in[threadIdx.x], 1);
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

// Every collective, in 256 = 64 * 4 threads of a grid of 2 x 2 blocks; out[i] counts the correct results.
__global__ void collectives(const float*, float* out) {
  const int lane = threadIdx.x % 32;
  int correct = __shfl_sync(kAllLanes, 100.0 + lane, 7) == 107.0;
  for (int mask = 1; mask < 32; mask *= 2) correct += __shfl_xor_sync(kAllLanes, lane, mask) == (lane ^ mask);
  correct += __any_sync(kAllLanes, lane == 31) && !__any_sync(kAllLanes, lane > 31);
  correct += __syncthreads_or(threadIdx.x == 40) && !__syncthreads_or(0);
  const __half2 pair = __shfl_xor_sync(kAllLanes, __floats2half2_rn(static_cast<float>(lane), -1.f), 1);
  correct += __low2float(pair) == static_cast<float>(lane ^ 1);
  out[(blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x] = static_cast<float>(correct);
}
// Barriers and full masks count only the threads that remain; the last warp has 20 lanes.
__global__ void early_return(const float* in, float* out) {
  __shared__ float tile[kN];
  if (threadIdx.x % 32 < 4) return;
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = __any_sync(kAllLanes, threadIdx.x % 32 < 4) ? -1.f : tile[threadIdx.x ^ 1];
}
__global__ void rough_root(const float*, float* out) { out[threadIdx.x] = rsqrtf(4.f); }  // see device.h

// ---- the table ------------------------------------------------------------------------------------------------------

float same(const Data& d, int i) { return d.in[i]; }
float swapped(const Data& d, int i) { return d.in[i ^ 1]; }

std::function<void(const Data&)> launch_in(LaunchConfig config, void (*kernel)(const float*, float*)) {
  return [=](const Data& d) { launch(config, kernel, d.in, d.out); };
}
std::function<void(const Data&)> fill_and_read(int count) {
  return [=](const Data& d) {
    launch({1, kN}, fill_workspace, d.in, d.workspace, count);
    launch({1, kN}, read_workspace, d.workspace, d.out);
  };
}

}  // namespace

int main() {
  const LaunchConfig one{1, kN}, with_row{1, kN, kN * sizeof(float)};
  return cases::run({
      {"read_past_end", "0 bytes after the end of 'in'", launch_in({1, kN + 1}, read_past_end)},
      {"read_before_start", "4 bytes before 'in'", launch_in(one, read_before_start)},
      {"write_input", "read-only global memory 'in'", launch_in(one, write_input)},
      {"read_workspace", "uninitialized global memory 'workspace'", fill_and_read(kN - 1)},
      {"workspace", "", fill_and_read(kN), same},
      {"static_overrun", "undefined behavior (out_of_bounds)", launch_in(one, static_overrun)},
      {"dynamic_overrun", "0 bytes after the end of 'dynamic shared memory'", launch_in(with_row, dynamic_overrun)},
      {"uninitialized_shared", "uninitialized shared memory 'tile'", launch_in(one, uninitialized_shared)},
      {"misaligned_global", "misaligned", launch_in(one, misaligned_global)},
      {"misaligned_shared", "misaligned", launch_in(one, misaligned_shared)},
      {"index_overflow", "undefined behavior (mul_overflow)",
       [=](const Data& d) { launch(one, index_overflow, d.out, 1 << 16, 1 << 15); }},
      {"overrun_into_padding", "undefined behavior (out_of_bounds)",
       [=](const Data& d) { launch(one, overrun_into_padding, d.in, d.out, 2); }},

      {"sums", "", launch_in(one, sums<true, true>), [](const Data& d, int) { return 3 * d.sum; }},
      {"no_barrier_before_read", "shared memory 'partial'", launch_in(one, sums<true, false>)},
      {"no_barrier_before_write", "data race (write after read) on shared memory 'partial'",
       launch_in(one, sums<false, true>)},
      {"same_value", "data race (write after write) on shared memory 'first'", launch_in(one, same_value)},
      {"syncwarp", "", launch_in(one, swap_in_warp<true>), swapped},
      {"no_syncwarp", "shared memory 'tile'", launch_in(one, swap_in_warp<false>)},
      {"shuffle_is_no_barrier", "data race (read after write) on shared memory 'tile'",
       launch_in(one, shuffle_is_no_barrier)},
      {"blocks_overwrite", "data race (write after write) on global memory 'out'",
       launch_in({2, kN}, blocks_overwrite)},

      {"barrier_in_branch", "divergent block barrier", launch_in(one, barrier_in_branch)},
      {"barrier_for_some", "deadlock", launch_in(one, barrier_for_some)},
      {"shuffle_in_branch", "deadlock", launch_in(one, shuffle_in_branch)},
      {"shuffle_outside_mask", "not in the mask", launch_in(one, shuffle_outside_mask)},
      {"shuffle_from_absent_lane", "does not take part", launch_in({1, 48}, shuffle_from_absent_lane)},
      {"shuffle_with_other_mask", "deadlock", launch_in(one, shuffle_with_other_mask)},
      {"collectives", "", launch_in({dim3(2, 2), 64}, collectives), [](const Data&, int) { return 9.f; }},
      {"early_return", "", launch_in({1, kN - 12}, early_return),
       [](const Data& d, int i) { return i % 32 < 4 || i >= kN - 12 ? 0 : d.in[i ^ 1]; }},
      {"rough_root", "", launch_in(one, rough_root), [](const Data&, int) { return 0.5f + 0x1p-14f; }},

      {"empty_grid", "invalid grid size", launch_in({0, kN}, same_value)},
      {"block_too_large", "invalid block size", launch_in({1, 1056}, same_value)},
      {"too_much_shared", "bytes of shared memory, 0 of them static, are more than 232448",
       launch_in({1, kN, 300000}, same_value)},
      {"cluster_does_not_divide", "invalid cluster size", launch_in({3, kN, 0, nullptr, 2}, same_value)},
  });
}
