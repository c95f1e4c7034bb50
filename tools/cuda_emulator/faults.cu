// Faults that the emulator finds, beside correct counterparts without a report. Prints one line per case and schedule
// for test_emulator.py. A report must name a line with the comment "fault".
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "emulated_device.h"

namespace {

using namespace layernorm;

constexpr int kN = 256;
constexpr unsigned kAllLanes = 0xffffffffu, kRowBytes = kN * sizeof(float);

// The faults of fetch() and exchange() below, and the wrong uses of clusters, mbarriers and asynchronous copies in
// meet().
enum class Fault { kNone, kNoWait, kNoBarrier, kWrongPhase, kMisaligned, kTooEarly, kReadByOthers };
enum class Misuse { kNone, kNoArrival, kTwoArrivals, kLateInit, kTwoExpects, kNextPhase, kMisaligned, kLocal, kGlobal };

// ---- memory ---------------------------------------------------------------------------------------------------------

__global__ void copy(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];  // fault
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
__global__ void large_shared(const float*, float* out) {
  __shared__ float tile[49 * 256];
  tile[threadIdx.x] = 1.f;
  out[threadIdx.x] = tile[threadIdx.x];
}
__global__ void index_overflow(const float*, float* out) {
  const int rows = blockDim.x << 8, offset = rows * (1 << 15);  // fault
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
// The second sum uses the same shared memory as the first.
template <bool kBarrierBefore, bool kBarrierAfter>
__global__ void sums(const float* in, float* out) {
  const float a = block_sum<kBarrierBefore, kBarrierAfter>(in[threadIdx.x]);
  out[threadIdx.x] = a + block_sum<kBarrierBefore, kBarrierAfter>(in[threadIdx.x] * 2.f);
}
// Each lane reads the element of its neighbour, which needs __syncwarp(), because a shuffle orders no accesses.
template <bool kSync>
__global__ void swap_in_warp(const float* in, float* out) {
  __shared__ float tile[kN];
  tile[threadIdx.x] = in[threadIdx.x];
  const float v = __shfl_xor_sync(kAllLanes, in[threadIdx.x], 1);
  if (kSync) __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x ^ 1] + 0.f * v;  // fault
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

// The first copy uses none of its bytes, which precede `in`. The last copies end kMore elements after `in`, and zeros
// fill the rest of their 16 bytes.
template <int kMore>
__global__ void fetch_part(const float* in, float* out) {
  extern __shared__ __align__(16) float tile[];
  const int first = 4 * static_cast<int>(threadIdx.x) - 4, left = (kN - first + kMore) * 4;
  async_copy<16>(tile + first + 4, in + first, min(max(left, 0), 16), threadIdx.x == 0 ? 16 : 0);  // fault
  async_commit();
  async_wait<0>();
  __syncthreads();
  if (threadIdx.x == 0 && tile[kN + 3] != 0) out[kN] = 0;  // fault
  out[threadIdx.x] = tile[threadIdx.x + 4];
}

// ---- clusters -------------------------------------------------------------------------------------------------------

// The blocks exchange their ranks once per row, in kSlots buffers in turn.
template <int kSlots, Fault kFault>
__global__ void exchange(const float*, float* out) {
  __shared__ float ranks[kSlots][2];
  __shared__ TransactionBarrier barriers[kSlots];
  for (int slot = 0; slot < kSlots; ++slot) {
    if (threadIdx.x == 0) barriers[slot].init();
  }
  if (kFault != Fault::kNoBarrier) cluster_arrive(), cluster_wait();
  const unsigned rank = cluster_rank(), blocks = kFault == Fault::kWrongPhase ? 3 : 2;
  constexpr int kRows = 4;
  float sum = 0.f;
  for (int row = 0; row < kRows; ++row) {
    const int slot = row % kSlots;
    if (threadIdx.x == 0) barriers[slot].expect(sizeof(ranks[slot]));
    if (threadIdx.x < blocks) barriers[slot].store(ranks[slot][rank], static_cast<float>(rank), threadIdx.x);  // fault
    if (kFault == Fault::kTooEarly && rank == 0 && row == kRows - 1) return;                                   // fault
    if (kFault != Fault::kNoWait) barriers[slot].wait(row / kSlots);                                           // fault
    sum += ranks[slot][0] - ranks[slot][1] + 1.f;                                                              // fault
    __syncthreads();
  }
  if (rank == 1) out[threadIdx.x] = sum;
}
// The blocks wait for each other and do nothing else.
template <Misuse kMisuse>
__global__ void meet(const float* in, float* out) {
  __shared__ TransactionBarrier barrier;
  __shared__ short values[2];
  if (kMisuse == Misuse::kNoArrival) cluster_wait();  // fault
  if (threadIdx.x == 0) barrier.init();
  cluster_arrive();
  if (kMisuse == Misuse::kTwoArrivals) cluster_arrive();  // fault
  if (kMisuse == Misuse::kLateInit) barrier.init();       // fault
  cluster_wait();
  float local = 0.f;
  if (kMisuse == Misuse::kTwoExpects) barrier.expect(4);                     // fault: one thread may do so
  if (kMisuse == Misuse::kNextPhase) barrier.wait(1);                        // fault
  if (kMisuse == Misuse::kMisaligned) barrier.store(values[1], short{}, 0);  // fault
  if (kMisuse == Misuse::kLocal) barrier.store(local, local, 0);             // fault
  if (kMisuse == Misuse::kGlobal) async_copy<16>(out, in);                   // fault
}
__global__ void return_between(const float*, float*) { cluster_arrive(); }

// ---- overlapping launches -------------------------------------------------------------------------------------------

__global__ void one_waits(const float* workspace, float* out) {  // correct: the barrier comes after its wait
  if (threadIdx.x == 0) wait_for_previous_grid();
  __syncthreads();
  out[threadIdx.x] = workspace[threadIdx.x];
}
__global__ void never_waits(const float*, float*) {}

// ---- the table ------------------------------------------------------------------------------------------------------

enum Array { kIn, kOut, kWorkspace };  // of kN floats: read-only, writable and initialized, and uninitialized

struct Step {
  LaunchConfig config;
  void (*kernel)(const float* from, float* to);
  Array from = kIn, to = kOut;
};

struct Case {
  const char* name;
  const char* report;  // part of the expected report, or alternatives separated by " or "; empty: none
  std::vector<Step> steps;
};

const LaunchConfig kOne{1, kN}, kPair{2, kN, 0, nullptr, 2}, kOverlapping{1, kN, 0, nullptr, 1, true},
    kWithRow{1, kN, kRowBytes};
const Step kFill{kOne, copy, kIn, kWorkspace};

const std::vector<Case> kCases = {
    {"read_past_end", "0 bytes after the end of 'in'", {{{1, kN + 1}, copy}}},
    {"write_input", "read-only global memory 'in'", {{kOne, copy, kIn, kIn}}},
    {"uninitialized_global",
     "uninitialized global memory 'workspace'",
     {{{1, kN - 1}, copy, kIn, kWorkspace}, {kOne, copy, kWorkspace}}},
    {"uninitialized_shared", "uninitialized shared memory 'tile'", {{kOne, uninitialized_shared}}},
    {"misaligned_shared", "misaligned", {{kOne, misaligned_shared}}},
    {"index_overflow", "undefined behavior (mul_overflow)", {{kOne, index_overflow}}},
    {"sums", "", {{kOne, sums<true, true>}}},
    {"no_barrier_before_read", "shared memory 'partial'", {{kOne, sums<true, false>}}},
    {"no_barrier_before_write", "data race (write after read) on shared memory 'partial'", {{kOne, sums<false, true>}}},
    {"syncwarp", "", {{kOne, swap_in_warp<true>}}},
    {"no_syncwarp", "shared memory 'tile'", {{kOne, swap_in_warp<false>}}},
    {"blocks_store_the_same_value", "data race (write after write) on global memory 'out'", {{{2, kN}, copy}}},
    {"barrier_in_branch", "divergent block barrier", {{kOne, barrier_in_branch}}},
    {"shuffle_in_branch", "deadlock", {{kOne, shuffle_in_branch}}},
    {"shuffle_of_half_a_warp", "fewer than all lanes", {{kOne, shuffle_of_half_a_warp}}},
    {"shuffle_from_absent_lane", "does not take part", {{{1, 48}, shuffle_from_absent_lane}}},
    {"too_much_shared", "0 of them static, are more than 232448", {{{1, kN, 300000}, copy}}},
    {"too_much_static", "more than 48 KiB of static shared memory", {{kOne, large_shared}}},
    {"fetch", "", {{kWithRow, fetch<Fault::kNone>}}},
    {"fetch_without_wait", "which the asynchronous copy", {{kWithRow, fetch<Fault::kNoWait>}}},
    {"fetch_waits_for_older", "which the asynchronous copy", {{kWithRow, fetch<Fault::kWrongPhase>}}},
    {"fetch_read_by_others", "shared memory", {{kWithRow, fetch<Fault::kReadByOthers>}}},
    {"fetch_refilled_too_early", "data race or which the asynchronous copy", {{kWithRow, fetch<Fault::kNoBarrier>}}},
    {"fetch_misaligned", "a misaligned asynchronous copy", {{kWithRow, fetch<Fault::kMisaligned>}}},
    {"leave_copy", "before its asynchronous copies were complete", {{{1, 64, kRowBytes}, leave_copy}}},
    {"fetch_part", "", {{{1, kN / 4 + 1, kRowBytes + 16}, fetch_part<-1>}}},
    {"fetch_part_past_end", "bytes after the end of 'in'", {{{1, kN / 4 + 2, kRowBytes + 32}, fetch_part<1>}}},
    {"exchange", "", {{kPair, exchange<2, Fault::kNone>}}},
    {"exchange_before_start",
     "no cluster barrier before or an mbarrier that is not initialized",
     {{kPair, exchange<2, Fault::kNoBarrier>}}},
    {"exchange_without_wait",
     "data race or uninitialized shared memory 'ranks'",
     {{kPair, exchange<2, Fault::kNoWait>}}},
    {"exchange_in_one_buffer",
     "data race or uninitialized shared memory 'ranks'",
     {{kPair, exchange<1, Fault::kNone>}}},
    {"exchange_with_absent_block",
     "a block that the cluster does not have",
     {{kPair, exchange<2, Fault::kWrongPhase>}}},
    {"exchange_and_return",
     "can return before or the shared memory of a block that has returned",
     {{kPair, exchange<2, Fault::kTooEarly>}}},
    {"meet", "", {{kPair, meet<Misuse::kNone>}}},
    {"wait_before_arrival", "a wait at a cluster barrier without an arrival", {{kPair, meet<Misuse::kNoArrival>}}},
    {"two_arrivals", "a second arrival at one cluster barrier", {{kPair, meet<Misuse::kTwoArrivals>}}},
    {"late_init", "initialized after cluster_arrive", {{kPair, meet<Misuse::kLateInit>}}},
    {"two_announcements", "a second announcement in one phase", {{kPair, meet<Misuse::kTwoExpects>}}},
    {"wait_for_later_phase", "neither this nor the last", {{kPair, meet<Misuse::kNextPhase>}}},
    {"misaligned_message", "a misaligned store to another block", {{kPair, meet<Misuse::kMisaligned>}}},
    {"message_to_local", "the peer of an address outside", {{kPair, meet<Misuse::kLocal>}}},
    {"copy_to_global", "outside the block's shared memory", {{kPair, meet<Misuse::kGlobal>}}},
    {"return_between", "returned between cluster_arrive and cluster_wait", {{kPair, return_between}}},
    {"overlap", "", {kFill, {kOverlapping, one_waits, kWorkspace}}},
    {"overlap_read_before_wait",
     "before the wait for the previous grid, which writes",
     {kFill, {kOverlapping, copy, kWorkspace}}},
    {"overlap_unknown_input", "before the wait for the previous grid, which may still write", {{kOverlapping, copy}}},
    {"overlap_write_before_wait",
     "before the wait for the previous grid, which reads",
     {kFill, {kOne, copy, kWorkspace}, {kOverlapping, copy, kIn, kWorkspace}}},
    {"overlap_chain",  // the grid in between waits, but lets the last one start before
     "before the wait for the previous grid, which writes",
     {kFill, {kOverlapping, one_waits}, {kOverlapping, copy, kWorkspace}}},
    {"overlap_never_waits", "returned without a wait for the previous grid", {kFill, {kOverlapping, never_waits}}},
};

std::string outcome(const Case& c) {
  const std::unique_ptr<float[]> in(new float[kN]()), out(new float[kN]()), workspace(new float[kN]);
  float* const arrays[] = {in.get(), out.get(), workspace.get()};
  using emulator::Contents;
  emulator::clear_buffers();
  emulator::register_buffer(in.get(), kRowBytes, "in", Contents::kInput);
  emulator::register_buffer(out.get(), kRowBytes, "out", Contents::kInOut);
  emulator::register_buffer(workspace.get(), kRowBytes, "workspace", Contents::kOutput);
  try {
    for (const Step& step : c.steps) {
      launch(step.config, step.kernel, arrays[step.from], arrays[step.to]);
    }
  } catch (const emulator::Fault& fault) {
    return fault.what();
  }
  return "";
}

}  // namespace

int main() {
  for (const Case& c : kCases) {
    for (unsigned schedule = 0; schedule < 8; ++schedule) {
      emulator::options() = {schedule};
      std::string report = outcome(c);
      for (char& letter : report) letter = letter == '\n' ? '|' : letter;
      std::printf("%s\t%s\t%s\n", c.name, c.report, report.c_str());
    }
  }
}
