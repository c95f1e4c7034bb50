// Faults of asynchronous copies, mbarriers, clusters and overlapping launches, beside correct counterparts. A report
// must name a line with the comment "fault".
#include "cases.h"

namespace {

using namespace layernorm;
using cases::Data;
using cases::kN;

constexpr unsigned kRowBytes = kN * sizeof(float);

// What a kernel omits or does wrong.
enum class Fault {
  kNone,
  kNoWait,
  kNoBarrier,
  kNoFence,
  kWrongPhase,
  kWrongBytes,
  kMisaligned,
  kOddSize,
  kTooEarly,
  kReadByOthers,
  kNotInitialized,
  kPastEnd,
};

// ---- cp.async -------------------------------------------------------------------------------------------------------

// Two rows go through one buffer: the second is fetched after the block has read the first.
template <Fault kFault>
__global__ void fetch(const float* in, float* out) {
  extern __shared__ __align__(16) float tile[];
  for (int row = 0; row < 2; ++row) {
    if (threadIdx.x < kN / 4) {
      const int shift = kFault == Fault::kMisaligned;
      async_copy16(tile + 4 * threadIdx.x, in + 4 * threadIdx.x + shift);  // fault
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
// The older of two groups is complete while the newer one is pending; a copy of nothing writes zeros.
__global__ void two_groups(const float* in, float* out) {
  extern __shared__ __align__(16) float tile[];
  float* const own = tile + 8 * threadIdx.x;
  async_copy16(own, in + threadIdx.x / 4 * 4);
  async_commit();
  async_copy16_or_zeros(own + 4, nullptr, false);
  async_commit();
  async_wait<1>();
  out[threadIdx.x] = own[threadIdx.x % 4];
  async_wait<0>();
  out[threadIdx.x] += own[4 + threadIdx.x % 4];
}
__global__ void leave_copy(const float* in, float*) {
  extern __shared__ __align__(16) float tile[];
  async_copy16(tile + 4 * threadIdx.x, in + 4 * threadIdx.x);
  async_commit();
}

// ---- bulk copies and mbarriers --------------------------------------------------------------------------------------

// A ring of two stages over four rows, all of them `in`. Every thread reads what another one's copy brought.
template <Fault kFault>
__global__ void ring(const float* in, float* out) {
  extern __shared__ __align__(16) float stages[];
  __shared__ MBarrier full[2];
  const auto fetch_row = [&](int row) {
    MBarrier* barrier = &full[row % 2];
    const int shift = kFault == Fault::kMisaligned ? 1 : kFault == Fault::kPastEnd ? 4 : 0;
    const unsigned bytes = kFault == Fault::kOddSize ? kRowBytes - 4 : kRowBytes;
    mbarrier_arrive(barrier, kFault == Fault::kWrongBytes ? bytes + 16 : bytes);  // fault
    bulk_copy(stages + row % 2 * kN, in + shift, bytes, barrier);                 // fault
  };
  if (threadIdx.x == 0) {
    if (kFault != Fault::kNotInitialized) {
      mbarrier_init(&full[0], 1);  // fault, on sm_80
      mbarrier_init(&full[1], 1);
    }
    if (kFault != Fault::kNoFence) mbarrier_fence_init();
    fetch_row(0);
    fetch_row(1);
  }
  if (kFault != Fault::kNoBarrier) __syncthreads();
  float sum = 0.f;
  for (int row = 0; row < 4; ++row) {
    const unsigned parity = kFault == Fault::kWrongPhase ? 1 - row / 2 % 2 : row / 2 % 2;
    if (kFault != Fault::kNoWait && (kFault != Fault::kReadByOthers || threadIdx.x < 32)) {
      mbarrier_wait(&full[row % 2], parity);  // fault
    }
    sum += stages[row % 2 * kN + (threadIdx.x ^ 1)];  // fault
    if (kFault != Fault::kTooEarly) __syncthreads();
    if (threadIdx.x == 0 && row + 2 < 4) fetch_row(row + 2);
  }
  out[threadIdx.x] = sum / 4;
}
// One thread waits for the copy, and a barrier informs the others. The parity before the first phase is complete.
__global__ void one_thread_waits(const float* in, float* out) {
  extern __shared__ __align__(16) float tile[];
  __shared__ MBarrier full;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_fence_init();
    mbarrier_wait(&full, 1);
    mbarrier_arrive(&full, kRowBytes);
    bulk_copy(tile, in, kRowBytes, &full);  // fault, if the tile is smaller
    mbarrier_wait(&full, 0);
  }
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}
// All threads arrive, so that the next phase orders the reads of this one.
template <bool kWait>
__global__ void arrivals_order(const float* in, float* out) {
  __shared__ float tile[kN];
  __shared__ MBarrier all;
  if (threadIdx.x == 0) {
    mbarrier_init(&all, kN);
    mbarrier_fence_init();
  }
  __syncthreads();
  tile[threadIdx.x] = in[threadIdx.x];
  mbarrier_arrive(&all);
  if (kWait) mbarrier_wait(&all, 0);
  out[threadIdx.x] = tile[threadIdx.x ^ 1];  // fault
}
__global__ void arrive_too_often(const float*, float*) {
  __shared__ MBarrier barrier;
  if (threadIdx.x == 0) mbarrier_init(&barrier, kN - 1);
  __syncthreads();
  mbarrier_arrive(&barrier, 16);  // fault
}
__global__ void expect_too_much(const float*, float*) {
  __shared__ MBarrier barrier;
  if (threadIdx.x == 0) {
    mbarrier_init(&barrier, 1);
    mbarrier_arrive(&barrier, 1 << 20);  // fault
  }
}
__global__ void leave_bulk_copy(const float* in, float*) {
  extern __shared__ __align__(16) float tile[];
  __shared__ MBarrier full;
  if (threadIdx.x != 0) return;
  mbarrier_init(&full, 1);
  mbarrier_fence_init();
  mbarrier_arrive(&full, kRowBytes);
  bulk_copy(tile, in, kRowBytes, &full);  // fault
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
__global__ void arrive_twice(const float*, float*) {
  cluster_arrive();
  cluster_arrive();  // fault
}
__global__ void wait_without_arrival(const float*, float*) {
  cluster_wait();  // fault
}
__global__ void return_between(const float*, float*) { cluster_arrive(); }
__global__ void arrive_in_branch(const float*, float*) {
  if (threadIdx.x < 128) {
    cluster_arrive();
    cluster_wait();  // fault
  } else {
    __syncthreads();  // fault
  }
}

// ---- overlapping launches -------------------------------------------------------------------------------------------

__global__ void fill(const float* in, float* workspace) {
  workspace[threadIdx.x] = in[threadIdx.x];
  let_next_grid_start();
}
__global__ void read_other_input(const float* in, const float* workspace, float* out) {
  const float early = in[threadIdx.x];  // correct: the previous grid does not write it
  out[threadIdx.x] = early;
  wait_for_previous_grid();
  out[threadIdx.x] = workspace[threadIdx.x ^ 1] - workspace[threadIdx.x] + early;
}
__global__ void read_before_wait(const float* workspace, float* out) {
  const float v = workspace[threadIdx.x];  // fault
  wait_for_previous_grid();
  out[threadIdx.x] = v;
}
__global__ void overwrite_input(const float* in, float* workspace) {
  workspace[threadIdx.x] = in[threadIdx.x];  // fault
  wait_for_previous_grid();
}
__global__ void copy_workspace(const float* workspace, float* out) { out[threadIdx.x] = workspace[threadIdx.x]; }
__global__ void one_waits(const float* workspace, float* out) {  // correct: the barrier comes after its wait
  if (threadIdx.x == 0) wait_for_previous_grid();
  __syncthreads();
  out[threadIdx.x] = workspace[threadIdx.x];
}
__global__ void never_waits(const float*, float*) {}

// ---- the table ------------------------------------------------------------------------------------------------------

float same(const Data& d, int i) { return d.in[i]; }
float swapped(const Data& d, int i) { return d.in[i ^ 1]; }

const LaunchConfig kOne{1, kN}, kPair{2, kN, 0, nullptr, 2}, kOverlapping{1, kN, 0, nullptr, 1, true},
    kWithRow{1, kN, kRowBytes}, kWithTwoRows{1, kN, 2 * kRowBytes};

std::function<void(const Data&)> launch_in(LaunchConfig config, void (*kernel)(const float*, float*)) {
  return [=](const Data& d) { launch(config, kernel, d.in, d.out); };
}
std::function<void(const Data&)> launch_in_sm80(LaunchConfig config, void (*kernel)(const float*, float*)) {
  return [=](const Data& d) {
    emulator::options().architecture = 80;
    launch(config, kernel, d.in, d.out);
  };
}
std::function<void(const Data&)> launch_after_fill(void (*kernel)(const float*, float*)) {
  return [=](const Data& d) {
    launch(kOne, fill, d.in, d.workspace);
    launch(kOverlapping, kernel, d.workspace, d.out);
  };
}

}  // namespace

int main() {
  return cases::run({
      {"fetch", "", launch_in(kWithRow, fetch<Fault::kNone>), swapped},
      {"fetch_without_wait", "which the asynchronous copy", launch_in(kWithRow, fetch<Fault::kNoWait>)},
      {"fetch_waits_for_older", "which the asynchronous copy", launch_in(kWithRow, fetch<Fault::kWrongPhase>)},
      {"fetch_read_by_others", "shared memory", launch_in(kWithRow, fetch<Fault::kReadByOthers>)},
      {"fetch_written", "data race", launch_in(kWithRow, fetch<Fault::kTooEarly>)},
      {"fetch_refilled_too_early", "data race or which the asynchronous copy",
       launch_in(kWithRow, fetch<Fault::kNoBarrier>)},
      {"fetch_misaligned", "a misaligned asynchronous copy", launch_in(kWithRow, fetch<Fault::kMisaligned>)},
      {"two_groups", "", launch_in({1, kN, 8 * kRowBytes}, two_groups), same},
      {"leave_copy", "before its asynchronous copies were complete", launch_in({1, 64, kRowBytes}, leave_copy)},

      {"ring", "", launch_in(kWithTwoRows, ring<Fault::kNone>), swapped},
      {"ring_without_wait", "which the asynchronous copy", launch_in(kWithTwoRows, ring<Fault::kNoWait>)},
      {"ring_waits_for_wrong_phase", "which the asynchronous copy", launch_in(kWithTwoRows, ring<Fault::kWrongPhase>)},
      {"ring_read_by_others", "shared memory", launch_in(kWithTwoRows, ring<Fault::kReadByOthers>)},
      {"ring_initialized_without_barrier", "mbarrier or 'full'", launch_in(kWithTwoRows, ring<Fault::kNoBarrier>)},
      {"ring_without_fence", "was not fenced", launch_in(kWithTwoRows, ring<Fault::kNoFence>)},
      {"ring_not_initialized", "an mbarrier that was not initialized",
       launch_in(kWithTwoRows, ring<Fault::kNotInitialized>)},
      {"ring_misaligned", "not multiples of 16 bytes", launch_in(kWithTwoRows, ring<Fault::kMisaligned>)},
      {"ring_odd_size", "not multiples of 16 bytes", launch_in(kWithTwoRows, ring<Fault::kOddSize>)},
      {"ring_expects_more", "lacks 0 arrivals and 16 bytes", launch_in(kWithTwoRows, ring<Fault::kWrongBytes>)},
      {"ring_past_end", "outside any buffer", launch_in(kWithTwoRows, ring<Fault::kPastEnd>)},
      {"ring_refilled_too_early", "data race or which the asynchronous copy",
       launch_in(kWithTwoRows, ring<Fault::kTooEarly>)},
      {"ring_on_sm80", "compute capability 9.0", launch_in_sm80(kWithTwoRows, ring<Fault::kNone>)},
      {"one_thread_waits", "", launch_in(kWithRow, one_thread_waits), same},
      {"copy_past_shared", "outside any buffer", launch_in({1, kN, kRowBytes / 2}, one_thread_waits)},
      {"arrivals_order", "", launch_in(kOne, arrivals_order<true>), swapped},
      {"arrivals_without_wait", "shared memory 'tile'", launch_in(kOne, arrivals_order<false>)},
      {"arrive_too_often", "more arrivals at an mbarrier than a phase has", launch_in(kOne, arrive_too_often)},
      {"expect_too_much", "more than 1048575 bytes", launch_in(kOne, expect_too_much)},
      {"leave_bulk_copy", "into its shared memory was complete", launch_in(kWithRow, leave_bulk_copy)},

      {"read_peers", "", launch_in(kPair, read_peers<Fault::kNone>), swapped},
      {"read_peers_without_barrier", "a block that may not have started or uninitialized shared memory 'part'",
       launch_in(kPair, read_peers<Fault::kNoBarrier>)},
      {"read_peers_and_return", "block", launch_in(kPair, read_peers<Fault::kTooEarly>)},
      {"read_absent_peer", "a block that the cluster does not have", launch_in(kPair, read_peers<Fault::kWrongPhase>)},
      {"write_peers", "", launch_in(kPair, write_peers<2>), same},
      {"write_peers_too_early", "data race", launch_in(kPair, write_peers<1>)},
      {"arrive_twice", "a second arrival", launch_in(kPair, arrive_twice)},
      {"wait_without_arrival", "without an arrival", launch_in(kPair, wait_without_arrival)},
      {"return_between", "returned between cluster_arrive and cluster_wait", launch_in(kPair, return_between)},
      {"arrive_in_branch", "deadlock", launch_in(kPair, arrive_in_branch)},
      {"cluster_on_sm80", "clusters need compute capability 9.0", launch_in_sm80(kPair, read_peers<Fault::kNone>)},

      {"overlap", "",
       [](const Data& d) {
         launch(kOne, fill, d.in, d.workspace);
         launch(kOverlapping, read_other_input, d.in, d.workspace, d.out);
       },
       swapped},
      {"overlap_one_waits", "", launch_after_fill(one_waits), same},
      {"overlap_read_before_wait", "before the wait for the previous grid, which writes",
       launch_after_fill(read_before_wait)},
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
      {"overlap_never_waits", "returned without a wait for the previous grid", launch_after_fill(never_waits)},
  });
}
