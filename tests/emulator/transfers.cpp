// Asynchronous copies and mbarriers.
//
// A copy arrives as late as CUDA allows: cp.async at its wait, and a bulk copy when no thread can run any more. Until
// then its target holds NaN, and the checker reports every access to it.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

constexpr int64_t kMaxBytesPerPhase = (1 << 20) - 1;  // PTX ISA: tx-count of an mbarrier

void require_sm90(const void* pc) {
  require(options().architecture >= 90, "an instruction of compute capability 9.0", pc);
}
bool aligned(const void* address, size_t bytes) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

MBarrier& find_mbarrier(const void* address, const void* pc) {
  Block& block = *current->block;
  const auto found = block.mbarriers.find(address);
  require(found != block.mbarriers.end(), "an mbarrier that was not initialized", pc);
  check_access(address, sizeof(uint64_t), Access::kRead, pc);  // after the initialization
  return found->second;
}

void finish_phase_if_complete(MBarrier& barrier) {
  if (!barrier.arrived || barrier.pending_bytes != 0) return;
  barrier.phase++;
  barrier.arrived = false;
  barrier.completed = barrier.last_arrival;
  for (Block& block : running->blocks) {
    for (unsigned i = 0; i < running->threads_per_block; ++i) {
      Thread& thread = block.threads[i];
      if (thread.wait == Wait::kMBarrier && thread.mbarrier == &barrier) make_runnable(thread);
    }
  }
}

void start(const Transfer& transfer) {
  begin_transfer(transfer);
  std::memset(transfer.to, 0xff, transfer.bytes);
}

void finish(const Transfer& transfer, const Moment& by) {
  end_transfer(transfer, by);
  if (transfer.from) {
    std::memcpy(transfer.to, transfer.from, transfer.bytes);
  } else {
    std::memset(transfer.to, 0, transfer.bytes);
  }
}

}  // namespace

bool deliver_transfers() {
  std::vector<Transfer> arriving;
  arriving.swap(running->transfers);
  if (options().order == Order::kRandom) std::shuffle(arriving.begin(), arriving.end(), running->random);
  for (const Transfer& transfer : arriving) {
    MBarrier& barrier = *transfer.barrier;
    const Moment by{tick(), barrier.agent, {}};
    finish(transfer, by);
    barrier.last_arrival = by.time;
    barrier.pending_bytes -= static_cast<int64_t>(transfer.bytes);
    finish_phase_if_complete(barrier);
  }
  return !arriving.empty();
}

void check_nothing_in_flight(const Block& block) {
  for (const Transfer& transfer : running->transfers) {
    if (in_shared(block, transfer.to)) {
      fail("block " + std::to_string(block.threads->id.block) + " returned before the asynchronous copy of " +
           at(transfer.pc) + " into its shared memory was complete");
    }
  }
}

// ---- cp.async -------------------------------------------------------------------------------------------------------

void async_copy(void* to, const void* from, size_t bytes) {
  const void* pc = __builtin_return_address(0);
  require(in_shared(*current->block, to), "an asynchronous copy to an address outside the block's shared memory", pc);
  require(aligned(to, bytes) && aligned(from, bytes), "a misaligned asynchronous copy", pc);
  const Transfer transfer{to, from, bytes, nullptr, pc};
  start(transfer);
  current->open_copies.push_back(transfer);
}

void async_commit() {
  current->copy_groups.push_back(std::move(current->open_copies));
  current->open_copies.clear();
}

void async_wait(int groups_left) {
  auto& groups = current->copy_groups;
  for (; groups.size() > static_cast<size_t>(groups_left); groups.pop_front()) {
    for (const Transfer& transfer : groups.front()) finish(transfer, now());
  }
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------

void mbarrier_init(MBarrierStorage* address, unsigned arrivals) {
  const void* pc = __builtin_return_address(0);
  Block& block = *current->block;
  require_sm90(pc);
  require(in_shared(block, address) && aligned(address, sizeof(uint64_t)),
          "an mbarrier that is not 8 aligned bytes of the block's shared memory", pc);
  require(arrivals == 1, "an mbarrier with several arrivals, which the emulator does not support", pc);
  check_access(address, sizeof(uint64_t), Access::kWrite, pc);
  for (const Transfer& transfer : running->transfers) {
    require(transfer.barrier->address != address, "an mbarrier is initialized again while copies are under way", pc);
  }
  const ThreadId agent{current->id.block, current->id.cluster, kAgent + running->mbarriers++};
  block.mbarriers[address] = {address, agent, false, 0, 0, false, current->id.thread, 0, 0};
}

void mbarrier_fence_init() {
  for (auto& [address, barrier] : current->block->mbarriers) {
    if (barrier.initialized_by == current->id.thread) barrier.fenced = true;
  }
}

void mbarrier_arrive(MBarrierStorage* address, unsigned expected_bytes) {
  const void* pc = __builtin_return_address(0);
  MBarrier& barrier = find_mbarrier(address, pc);
  require(!barrier.arrived, "a second arrival in one phase of an mbarrier", pc);
  barrier.pending_bytes += expected_bytes;
  require(barrier.pending_bytes <= kMaxBytesPerPhase, "more than 1048575 bytes expected in one phase of an mbarrier",
          pc);
  barrier.arrived = true;
  finish_phase_if_complete(barrier);
}

void mbarrier_wait(MBarrierStorage* address, unsigned parity) {
  Thread& thread = *current;
  thread.pc = __builtin_return_address(0);
  MBarrier& barrier = find_mbarrier(address, thread.pc);
  require(parity <= 1, "a phase parity other than 0 and 1", thread.pc);
  while (barrier.phase % 2 == parity) {
    thread.mbarrier = &barrier;
    thread.wait = Wait::kMBarrier;
    switch_away();
  }
  learn(thread.known, {{barrier.agent.thread, barrier.completed}});
}

bool has_bulk_copies() { return options().architecture >= 90; }

void bulk_copy(void* to, const void* from, unsigned bytes, MBarrierStorage* address) {
  const void* pc = __builtin_return_address(0);
  require_sm90(pc);
  require(in_shared(*current->block, to), "a bulk copy to an address outside the block's shared memory", pc);
  require(aligned(to, 16) && aligned(from, 16) && bytes % 16 == 0,
          "a bulk copy whose addresses or size are not multiples of 16 bytes", pc);
  MBarrier& barrier = find_mbarrier(address, pc);
  require(barrier.fenced, "a bulk copy to an mbarrier whose initialization was not fenced", pc);
  const Transfer transfer{to, from, bytes, &barrier, pc};
  start(transfer);
  running->transfers.push_back(transfer);
}

}  // namespace emulator
