// Asynchronous copies. A copy arrives as late as CUDA allows, at the wait for it. Until then its target holds NaN, and
// the checker reports every access to it.
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

bool aligned(const void* address, size_t bytes) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

void start(const Transfer& transfer) {
  begin_transfer(transfer);
  std::memset(transfer.to, 0xff, transfer.bytes);
}

void finish(const Transfer& transfer) {
  end_transfer(transfer);
  if (transfer.from) {
    std::memcpy(transfer.to, transfer.from, transfer.bytes);
  } else {
    std::memset(transfer.to, 0, transfer.bytes);
  }
}

}  // namespace

void async_copy(void* to, const void* from, size_t bytes) {
  const void* pc = __builtin_return_address(0);
  require(in_shared(*current->block, to), "an asynchronous copy to an address outside the block's shared memory", pc);
  require(aligned(to, bytes) && aligned(from, bytes), "a misaligned asynchronous copy", pc);
  const Transfer transfer{to, from, bytes, pc};
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
    for (const Transfer& transfer : groups.front()) finish(transfer);
  }
}

}  // namespace emulator
