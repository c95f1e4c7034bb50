// Asynchronous copies and mbarriers.
//
// A copy arrives as late as the rules allow: cp.async at its wait, what completes on an mbarrier when no
// thread can run any more. Until then its target reads as NaN, and the checker reports whoever touches it.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

constexpr int64_t kMaxBytesPerPhase = (1 << 20) - 1;  // of an mbarrier's transaction count, PTX ISA

void need_sm90(const void* pc) { need(options().architecture >= 90, "an instruction of compute capability 9.0", pc); }
bool aligned(const void* address, size_t bytes) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

MBarrier& find_mbarrier(Block& block, const void* address, const void* pc) {
  const auto found = block.mbarriers.find(address);
  need(found != block.mbarriers.end(), "an mbarrier that was not initialised", pc);
  // The initialisation came before. What another block sends arrives later, and its receiver waits for that.
  check_access(address, sizeof(uint64_t), &block == current->block ? Access::kRead : Access::kLook, pc);
  return found->second;
}

void finish_phase_if_complete(MBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes_left != 0) return;
  barrier.phase++;
  barrier.pending = barrier.arrivals;
  learn(barrier.completed, barrier.arriving);
  barrier.arriving.clear();
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
  } else {  // 8 bytes of st.async, or zeros of cp.async
    std::memset(transfer.to, 0, transfer.bytes);
    std::memcpy(transfer.to, &transfer.value, sizeof(transfer.value));
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
    learn(barrier.arriving, {by});
    barrier.bytes_left -= static_cast<int64_t>(transfer.bytes);
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

// ---- cp.async ---------------------------------------------------------------------------------------------
void async_copy(void* to, const void* from, size_t bytes) {
  const void* pc = __builtin_return_address(0);
  need(in_shared(*current->block, to), "an asynchronous copy to somewhere else than the block's shared memory", pc);
  need(aligned(to, bytes) && aligned(from, bytes), "a misaligned asynchronous copy", pc);
  const Transfer transfer{to, from, 0, bytes, nullptr, pc};
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

// ---- mbarriers --------------------------------------------------------------------------------------------
void mbarrier_init(const void* address, unsigned arrivals) {
  const void* pc = __builtin_return_address(0);
  Block& block = *current->block;
  need_sm90(pc);
  need(in_shared(block, address) && aligned(address, sizeof(uint64_t)),
       "an mbarrier that is not 8 aligned bytes of the block's shared memory", pc);
  need(arrivals >= 1 && arrivals < 1 << 20, "an mbarrier with an invalid number of arrivals", pc);
  check_access(address, sizeof(uint64_t), Access::kWrite, pc);
  for (const Transfer& transfer : running->transfers) {
    need(transfer.barrier->address != address, "an mbarrier is initialised again while copies are under way", pc);
  }
  const ThreadId agent{current->id.block, current->id.cluster, kAgent + running->mbarriers++};
  block.mbarriers[address] = {address, agent, arrivals, arrivals, 0, 0, false, current->id.thread, {}, {}};
}

void mbarrier_fence_init() {
  for (auto& [address, barrier] : current->block->mbarriers) {
    if (barrier.initialised_by == current->id.thread) barrier.fenced = true;
  }
}

void mbarrier_arrive(const void* address, unsigned expected_bytes) {
  const void* pc = __builtin_return_address(0);
  MBarrier& barrier = find_mbarrier(*current->block, address, pc);
  need(barrier.pending != 0, "more arrivals at an mbarrier than a phase has", pc);
  barrier.bytes_left += expected_bytes;
  need(barrier.bytes_left <= kMaxBytesPerPhase, "more than 1048575 bytes expected in one phase of an mbarrier", pc);
  learn(barrier.arriving, current->known);
  learn(barrier.arriving, current->block->known);
  learn(barrier.arriving, {now()});
  barrier.pending--;
  finish_phase_if_complete(barrier);
}

void mbarrier_wait(const void* address, unsigned parity) {
  Thread& thread = *current;
  thread.pc = __builtin_return_address(0);
  MBarrier& barrier = find_mbarrier(*thread.block, address, thread.pc);
  need(parity <= 1, "a phase parity other than 0 and 1", thread.pc);
  while (barrier.phase % 2 == parity) {
    thread.mbarrier = &barrier;
    thread.wait = Wait::kMBarrier;
    switch_away();
  }
  learn(thread.known, barrier.completed);
}

bool has_bulk_copies() { return options().architecture >= 90; }

void bulk_copy(void* to, const void* from, size_t bytes, const void* address) {
  const void* pc = __builtin_return_address(0);
  need_sm90(pc);
  need(in_shared(*current->block, to), "a bulk copy to somewhere else than the block's shared memory", pc);
  need(aligned(to, 16) && aligned(from, 16) && bytes % 16 == 0,
       "a bulk copy whose addresses or size are not multiples of 16 bytes", pc);
  MBarrier& barrier = find_mbarrier(*current->block, address, pc);
  need(barrier.fenced, "a bulk copy to an mbarrier whose initialisation was not fenced", pc);
  const Transfer transfer{to, from, 0, bytes, &barrier, pc};
  start(transfer);
  running->transfers.push_back(transfer);
}

void store_async(void* to, uint64_t value, const void* address, unsigned rank) {
  const void* pc = __builtin_return_address(0);
  need_sm90(pc);
  need(rank < running->launch.cluster, "a store to a block that the cluster does not have", pc);
  Block& block = *current->block;
  Block& target = peer(block, rank);
  need(in_shared(block, to) && aligned(to, sizeof value),
       "a store to a peer of something else than 8 aligned bytes of shared memory", pc);
  need(target.live != 0, "a store to a block that has returned", pc);
  const auto there = [&](const void* mine) { return target.arena + (static_cast<const char*>(mine) - block.arena); };
  MBarrier& barrier = find_mbarrier(target, there(address), pc);
  need(barrier.fenced, "a store to an mbarrier whose initialisation was not fenced", pc);
  const Transfer transfer{there(to), nullptr, value, sizeof value, &barrier, pc};
  start(transfer);
  running->transfers.push_back(transfer);
}

}  // namespace emulator
