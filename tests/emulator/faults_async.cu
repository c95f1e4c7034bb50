// Faults of asynchronous copies, mbarriers, clusters and overlapping launches, planted one at a time, next to
// their right counterparts. A comment "fault" marks the line that a report must name.
#include "cases.h"

namespace {

using namespace layernorm;
using cases::Data;
using cases::kN;

constexpr unsigned kRowBytes = kN * sizeof(float);

// What a kernel leaves out or does wrong. Named after it.
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
  kNotInitialised,
};

// ---- read-only cache --------------------------------------------------------------------------------------
__global__ void load_rows(const float* in, float* out) {
  if (threadIdx.x >= kN / 4) return;
  const uint4 v = load_once(reinterpret_cast<const uint4*>(in) + threadIdx.x);
  reinterpret_cast<uint4*>(out)[threadIdx.x] = v;
}
__global__ void load_after_write(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] += __ldg(&out[threadIdx.x ^ 1]);  // fault
}
__global__ void write_after_load(const float* in, float* out) {
  const uint4 v = load_once(reinterpret_cast<const uint4*>(out) + threadIdx.x / 4);
  __syncthreads();
  out[threadIdx.x] = in[threadIdx.x] + __uint_as_float(v.x);  // fault
}
__global__ void load_misaligned(const float* in, float* out) {
  out[threadIdx.x] = __uint_as_float(load_once(reinterpret_cast<const uint4*>(in + 1)).x);  // fault
}

// ---- cp.async ---------------------------------------------------------------------------------------------
// Two rows through one buffer: the second is fetched when the block has read the first.
template <Fault kFault>
__global__ void fetch(const float* in, float* out) {
  LAYERNORM_DYNAMIC_SHARED(tile, float);
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
__global__ void leave_copy(const float* in, float*) {
  LAYERNORM_DYNAMIC_SHARED(tile, float);
  async_copy16(tile + 4 * threadIdx.x, in + 4 * threadIdx.x);
  async_commit();
}

// ---- bulk copies and mbarriers
// --------------------------------------------------------------------------------------------- A ring of two
// stages over four rows, all of them `in`; every thread reads what another one's copy brought.
template <Fault kFault>
__global__ void ring(const float* in, float* out) {
  LAYERNORM_DYNAMIC_SHARED(stages, float);
  LAYERNORM_SHARED(full, MBarrier[2]);
  const auto fetch_row = [&](int row) {
    MBarrier* barrier = &full[row % 2];
    const int shift = kFault == Fault::kMisaligned;
    const unsigned bytes = kFault == Fault::kOddSize ? kRowBytes - 4 : kRowBytes;
    mbarrier_arrive(barrier, kFault == Fault::kWrongBytes ? bytes + 16 : bytes);  // fault
    bulk_copy(stages + row % 2 * kN, in + shift, bytes, barrier);                 // fault
  };
  if (threadIdx.x == 0) {
    if (kFault != Fault::kNotInitialised) {
      mbarrier_init(&full[0], 1);
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
// The block hands its buffer back by arrivals at a second mbarrier, and only one thread waits for the copies.
template <bool kHandBack>
__global__ void hand_back(const float* in, float* out) {
  LAYERNORM_DYNAMIC_SHARED(tile, float);
  LAYERNORM_SHARED(full, MBarrier);
  LAYERNORM_SHARED(empty, MBarrier);
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init(&empty, kN);
    mbarrier_fence_init();
  }
  __syncthreads();
  for (int row = 0; row < 3; ++row) {
    if (threadIdx.x == 0) {
      if (row > 0 && kHandBack) mbarrier_wait(&empty, (row - 1) % 2);
      mbarrier_arrive(&full, kRowBytes);
      bulk_copy(tile, in, kRowBytes, &full);  // fault
    }
    mbarrier_wait(&full, row % 2);
    out[threadIdx.x] = tile[threadIdx.x];
    mbarrier_arrive(&empty);
  }
}
// One thread waits, and a barrier passes on what it knows.
__global__ void wait_for_all(const float* in, float* out) {
  LAYERNORM_DYNAMIC_SHARED(tile, float);
  LAYERNORM_SHARED(full, MBarrier);
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);  // fault, on sm_80
    mbarrier_fence_init();
    mbarrier_arrive(&full, kRowBytes);
    bulk_copy(tile, in, kRowBytes, &full);  // fault, if the tile is smaller
    mbarrier_wait(&full, 0);
  }
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}
__global__ void arrive_too_often(const float*, float*) {
  LAYERNORM_SHARED(barrier, MBarrier);
  if (threadIdx.x == 0) mbarrier_init(&barrier, kN - 1);
  __syncthreads();
  mbarrier_arrive(&barrier, 16);  // fault
}
__global__ void expect_too_much(const float*, float*) {
  LAYERNORM_SHARED(barrier, MBarrier);
  if (threadIdx.x == 0) {
    mbarrier_init(&barrier, 1);
    mbarrier_arrive(&barrier, 1 << 20);  // fault
  }
}
__global__ void write_in_flight(const float* in, float* out) {
  LAYERNORM_DYNAMIC_SHARED(tile, float);
  LAYERNORM_SHARED(full, MBarrier);
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_fence_init();
    mbarrier_arrive(&full, kRowBytes);
    bulk_copy(tile, in, kRowBytes, &full);
  }
  __syncthreads();
  tile[threadIdx.x] = 0.f;  // fault
  mbarrier_wait(&full, 0);
  out[threadIdx.x] = tile[threadIdx.x];
}
__global__ void leave_bulk_copy(const float* in, float*) {
  LAYERNORM_DYNAMIC_SHARED(tile, float);
  LAYERNORM_SHARED(full, MBarrier);
  if (threadIdx.x != 0) return;
  mbarrier_init(&full, 1);
  mbarrier_fence_init();
  mbarrier_arrive(&full, kRowBytes);
  bulk_copy(tile, in, kRowBytes, &full);  // fault
}
__global__ void copy_past_end(const float* in, float* out) {
  LAYERNORM_DYNAMIC_SHARED(tile, float);
  LAYERNORM_SHARED(full, MBarrier);
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_fence_init();
    mbarrier_arrive(&full, kRowBytes);
    bulk_copy(tile, in + 4, kRowBytes, &full);  // fault
  }
  __syncthreads();
  mbarrier_wait(&full, 0);
  out[threadIdx.x] = tile[threadIdx.x];
}

// ---- clusters ---------------------------------------------------------------------------------------------
__device__ float block_sum(float v) {
  LAYERNORM_SHARED(partial, float[8]);
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  float total = 0.f;
  for (int w = 0; w < 8; ++w) total += partial[w];
  return total;
}
// Sums over a cluster of two, read from each other's shared memory.
template <Fault kFault>
__global__ void read_peers(const float* in, float* out) {
  LAYERNORM_SHARED(part, float);
  const float sum = block_sum(in[threadIdx.x]);
  if (threadIdx.x == 0) part = sum;  // fault
  if (kFault != Fault::kNoBarrier) {
    cluster_arrive();
    cluster_wait();
  }
  float total = 0.f;
  for (unsigned rank = 0; rank < 2; ++rank)
    total += *cluster_peer(&part, kFault == Fault::kWrongPhase ? rank + 1 : rank);  // fault
  if (kFault != Fault::kTooEarly) {
    cluster_arrive();
    cluster_wait();
  }
  if (cluster_rank() == 0) out[threadIdx.x] = total;
}
// The same, sent to each other: one value per block and its mbarrier. Nobody waits at the end: a block that
// has received all is not written to any more.
template <Fault kFault>
__global__ void send_to_peers(const float* in, float* out) {
  LAYERNORM_SHARED(parts, uint64_t[2]);
  LAYERNORM_SHARED(received, MBarrier);
  if (threadIdx.x == 0 && kFault != Fault::kNotInitialised) {
    mbarrier_init(&received, 1);
    if (kFault != Fault::kNoFence) mbarrier_fence_init();
    mbarrier_arrive(&received, kFault == Fault::kWrongBytes ? 24 : 16);
  }
  cluster_arrive();
  const float sum = block_sum(in[threadIdx.x]);
  if (kFault != Fault::kNoBarrier) cluster_wait();
  if (threadIdx.x < 2) {
    store_async(&parts[cluster_rank()], __float_as_uint(sum), &received, threadIdx.x);  // fault
  }
  if (kFault != Fault::kNoWait) mbarrier_wait(&received, kFault == Fault::kWrongPhase);  // fault
  const float total = __uint_as_float(static_cast<unsigned>(parts[0])) +                 // fault
                      __uint_as_float(static_cast<unsigned>(parts[1]));
  if (cluster_rank() == 0) out[threadIdx.x] = total;
  if (kFault == Fault::kNoBarrier) cluster_wait();
}
// The same for row after row, by every warp and into two sets of slots in turn. A set is sent to again when
// the cluster has read it: the barrier's halves are a row apart, so nobody waits for it.
template <Fault kFault>
__global__ void exchange_rows(const float* in, float* out) {
  constexpr int kWarps = kN / 32;
  LAYERNORM_SHARED(parts, uint64_t[2][2 * kWarps]);
  LAYERNORM_SHARED(received, MBarrier[2]);
  const int warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    mbarrier_init(&received[0], 1);
    mbarrier_init(&received[1], 1);
    mbarrier_fence_init();
  }
  cluster_arrive();
  cluster_wait();
  float total = 0.f;
  for (int row = 0; row < 5; ++row) {
    const int set = row % 2;
    if (threadIdx.x == 0) mbarrier_arrive(&received[set], sizeof parts[set]);
    float sum = in[threadIdx.x];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    uint64_t* slot = &parts[set][cluster_rank() * kWarps + warp];
    if (lane < 2) store_async(slot, __float_as_uint(sum), &received[set], lane);  // fault
    mbarrier_wait(&received[set], row / 2 % 2);
    for (uint64_t part : parts[set]) total += __uint_as_float(static_cast<unsigned>(part));  // fault
    if (kFault == Fault::kNoBarrier) continue;
    if (row > 0) cluster_wait();
    cluster_arrive();
  }
  if (kFault != Fault::kNoBarrier) cluster_wait();
  if (cluster_rank() == 0) out[threadIdx.x] = total / 5;
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

// ---- overlapping launches ---------------------------------------------------------------------------------
__global__ void fill(const float* in, float* workspace) {
  workspace[threadIdx.x] = in[threadIdx.x];
  let_next_grid_start();
}
__global__ void read_other_input(const float* in, const float* workspace, float* out) {
  const float early = in[threadIdx.x];  // right: the grid before does not write it
  wait_for_previous_grid();
  out[threadIdx.x] = workspace[threadIdx.x ^ 1] - workspace[threadIdx.x] + early;
}
__global__ void read_before_wait(const float* workspace, float* out) {
  const float v = workspace[threadIdx.x];  // fault
  wait_for_previous_grid();
  out[threadIdx.x] = v;
}
__global__ void write_before_wait(float* workspace, float* out) {
  out[threadIdx.x] = 1.f;
  wait_for_previous_grid();
  out[threadIdx.x] = workspace[threadIdx.x];
}
__global__ void overwrite_input(const float* in, float* workspace) {
  workspace[threadIdx.x] = in[threadIdx.x];  // fault
  wait_for_previous_grid();
}
__global__ void copy_workspace(const float* workspace, float* out) { out[threadIdx.x] = workspace[threadIdx.x]; }
__global__ void one_waits(const float* workspace, float* out) {  // right: the barrier comes after its wait
  if (threadIdx.x == 0) wait_for_previous_grid();
  __syncthreads();
  out[threadIdx.x] = workspace[threadIdx.x];
}
__global__ void never_waits(const float*, float*) {}

// ---- the table --------------------------------------------------------------------------------------------
float same(const Data& d, int i) { return d.in[i]; }
float swapped(const Data& d, int i) { return d.in[i ^ 1]; }
float two_sums(const Data& d, int) { return 2 * d.sum; }

const LaunchConfig kOne{1, kN}, kPair{2, kN, 0, nullptr, 2}, kOverlapping{1, kN, 0, nullptr, 1, true},
    kWithRow{1, kN, kRowBytes}, kWithTwoRows{1, kN, 2 * kRowBytes};

std::function<void(const Data&)> launch_in(LaunchConfig config, void (*kernel)(const float*, float*)) {
  return [=](const Data& d) { launch(config, kernel, d.in, d.out); };
}
template <class Kernel>
std::function<void(const Data&)> launch_after_fill(Kernel* kernel) {
  return [=](const Data& d) {
    launch(kOne, fill, d.in, d.workspace);
    launch(kOverlapping, kernel, d.workspace, d.out);
  };
}
std::function<void(const Data&)> launch_in_sm80(LaunchConfig config, void (*kernel)(const float*, float*)) {
  return [=](const Data& d) {
    emulator::options().architecture = 80;
    launch(config, kernel, d.in, d.out);
  };
}

}  // namespace

int main() {
  return cases::run({
      {"load_once", "", launch_in(kOne, load_rows), same},
      {"load_after_write", "written in this launch", launch_in(kOne, load_after_write)},
      {"write_after_load", "which this launch reads through the read-only cache", launch_in(kOne, write_after_load)},
      {"load_misaligned", "misaligned", launch_in(kOne, load_misaligned)},

      {"fetch", "", launch_in(kWithRow, fetch<Fault::kNone>), swapped},
      {"fetch_without_wait", "asynchronous copy", launch_in(kWithRow, fetch<Fault::kNoWait>)},
      {"fetch_waits_for_older_group", "asynchronous copy", launch_in(kWithRow, fetch<Fault::kWrongPhase>)},
      {"fetch_without_barrier", "data race", launch_in(kWithRow, fetch<Fault::kNoBarrier>)},
      {"fetch_read_by_others", "shared memory", launch_in(kWithRow, fetch<Fault::kReadByOthers>)},
      {"fetch_overwritten_unordered", "data race", launch_in(kWithRow, fetch<Fault::kTooEarly>)},
      {"fetch_misaligned", "misaligned asynchronous copy", launch_in(kWithRow, fetch<Fault::kMisaligned>)},
      {"fetch_and_leave", "returned before its asynchronous copies were complete",
       launch_in({1, 64, kRowBytes}, leave_copy)},

      {"ring", "", launch_in(kWithTwoRows, ring<Fault::kNone>), swapped},
      {"ring_without_wait", "which the asynchronous copy", launch_in(kWithTwoRows, ring<Fault::kNoWait>)},
      {"ring_waits_for_wrong_phase", "which the asynchronous copy", launch_in(kWithTwoRows, ring<Fault::kWrongPhase>)},
      {"ring_read_by_others", "shared memory", launch_in(kWithTwoRows, ring<Fault::kReadByOthers>)},
      {"ring_initialised_without_barrier", "mbarrier or 'full'", launch_in(kWithTwoRows, ring<Fault::kNoBarrier>)},
      {"ring_without_fence", "was not fenced", launch_in(kWithTwoRows, ring<Fault::kNoFence>)},
      {"ring_not_initialised", "an mbarrier that was not initialised",
       launch_in(kWithTwoRows, ring<Fault::kNotInitialised>)},
      {"ring_misaligned", "not multiples of 16 bytes", launch_in(kWithTwoRows, ring<Fault::kMisaligned>)},
      {"ring_odd_size", "not multiples of 16 bytes", launch_in(kWithTwoRows, ring<Fault::kOddSize>)},
      {"ring_expects_more", "lacks 0 arrivals and 16 bytes", launch_in(kWithTwoRows, ring<Fault::kWrongBytes>)},
      {"ring_refilled_too_early", "data race or which the asynchronous copy",
       launch_in(kWithTwoRows, ring<Fault::kTooEarly>)},
      {"hand_back", "", launch_in(kWithRow, hand_back<true>), same},
      {"hand_back_not_awaited", "data race or which the asynchronous copy", launch_in(kWithRow, hand_back<false>)},
      {"wait_for_all", "", launch_in(kWithRow, wait_for_all), same},
      {"arrive_too_often", "more arrivals at an mbarrier than a phase has", launch_in(kOne, arrive_too_often)},
      {"expect_too_much", "more than 1048575 bytes", launch_in(kOne, expect_too_much)},
      {"write_in_flight", "which the asynchronous copy", launch_in(kWithRow, write_in_flight)},
      {"leave_bulk_copy", "into its shared memory was complete", launch_in(kWithRow, leave_bulk_copy)},
      {"copy_past_end", "outside any buffer", launch_in(kWithRow, copy_past_end)},
      {"copy_past_shared", "outside any buffer", launch_in({1, kN, kRowBytes / 2}, wait_for_all)},
      {"bulk_copy_on_sm80", "compute capability 9.0", launch_in_sm80(kWithRow, wait_for_all)},

      {"read_peers", "", launch_in(kPair, read_peers<Fault::kNone>), two_sums},
      {"read_peers_without_barrier", "a block that may not have started or uninitialised shared memory 'part'",
       launch_in(kPair, read_peers<Fault::kNoBarrier>)},
      {"read_peers_and_return", "block", launch_in(kPair, read_peers<Fault::kTooEarly>)},
      {"read_absent_peer", "a block that the cluster does not have", launch_in(kPair, read_peers<Fault::kWrongPhase>)},
      {"send_to_peers", "", launch_in(kPair, send_to_peers<Fault::kNone>), two_sums},
      {"send_without_barrier", "mbarrier or 'received'", launch_in(kPair, send_to_peers<Fault::kNoBarrier>)},
      {"send_without_fence", "was not fenced", launch_in(kPair, send_to_peers<Fault::kNoFence>)},
      {"send_not_initialised", "an mbarrier that was not initialised",
       launch_in(kPair, send_to_peers<Fault::kNotInitialised>)},
      {"send_without_wait", "shared memory 'parts'", launch_in(kPair, send_to_peers<Fault::kNoWait>)},
      {"send_waits_for_wrong_phase", "shared memory 'parts'", launch_in(kPair, send_to_peers<Fault::kWrongPhase>)},
      {"send_expects_more", "lacks 0 arrivals and 8 bytes", launch_in(kPair, send_to_peers<Fault::kWrongBytes>)},
      {"exchange_rows", "", launch_in(kPair, exchange_rows<Fault::kNone>), two_sums},
      {"exchange_rows_without_barrier", "data race or which the asynchronous copy",
       launch_in(kPair, exchange_rows<Fault::kNoBarrier>)},
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
      {"overlap_write", "", launch_after_fill(write_before_wait), same},
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
       [](const Data& d) {  // the grid in between has waited, but let this one start before
         launch(kOne, fill, d.in, d.workspace);
         launch(kOverlapping, one_waits, d.in, d.out);
         launch(kOverlapping, read_before_wait, d.workspace, d.out);
       }},
      {"overlap_never_waits", "returned without a wait for the previous grid", launch_after_fill(never_waits)},
  });
}
