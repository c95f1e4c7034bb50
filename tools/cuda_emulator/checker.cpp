// Checks every load and store of a kernel.
//
// -fsanitize=thread makes the compiler call __tsan_read4(address) and so on before each access, and
// -fsanitize=undefined adds its own calls. This file defines those functions instead of libtsan and libubsan. It finds
// accesses outside the registered buffers and the block's shared memory, writes to inputs, reads of uninitialized
// memory, misaligned vectors, undefined behavior, accesses to the target of a pending asynchronous copy, and data
// races. Races are judged by CUDA's rules (which barrier orders which threads), so that every schedule finds them.
//
// Limits: accesses are recorded by units of 2 bytes, and the checker does not see a memcpy that the compiler leaves a
// call.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "machine.h"

namespace emulator {
namespace {

constexpr size_t kUnit = 2;
enum class Access { kRead, kWrite };
enum class Kind { kPlain, kAsyncCopy, kMessage };  // a message is a store to another block

struct Record {  // an access
  ThreadId id;
  Epochs epochs;
  const void* pc = nullptr;
  uint32_t serial = 0;  // Region::serial at the time of the access
  Kind kind = Kind::kPlain;
};

struct Unit {                       // kUnit bytes of a region
  Record write;                     // the last one
  std::vector<Record> reads;        // since that write; no barrier orders these reads
  const void* in_flight = nullptr;  // the code address of the asynchronous copy that is filling the unit
};

struct Region {  // a buffer in global memory, or a shared array of a block
  uintptr_t begin = 0, end = 0;
  std::string name;
  bool writable = true, uninitialized = true;
  const char* arena = nullptr;  // the block's shared memory (Block::arena); null for a buffer
  bool active = true;           // false after the block of a shared array has returned
  // Grows with each launch, and with each block that reuses an arena, so that it tells the age of a record.
  uint32_t serial = 1;
  uint32_t first_serial = 1;  // the serial at the registration
  std::vector<Unit> units;
};

bool checking = false;
std::map<uintptr_t, std::unique_ptr<Region>> regions;
Region* last_region = nullptr;
std::pair<uintptr_t, uintptr_t> arguments;  // begin and end of the kernel's arguments, which are read-only
// The number of previous launches that may still run, because they were followed only by launches with
// overlaps_previous.
uint32_t overlapped_launches = 0;

Region* find_region(uintptr_t a) {
  if (last_region && a >= last_region->begin && a < last_region->end && last_region->active) return last_region;
  // Regions may be nested.
  for (auto it = regions.upper_bound(a); it != regions.begin();) {
    Region* region = (--it)->second.get();
    if (region->active && a < region->end) return last_region = region;
  }
  return nullptr;
}

// Returns whether program order, a barrier or a message puts an earlier access before the next ones of a thread.
bool ordered(const Record& a, const Thread& b) {
  const bool same_block = a.id.block == b.id.block;
  if (same_block && a.id.thread == b.id.thread) return true;
  // A thread that has received a message from a block is ordered after the message itself, and after the accesses
  // before the last block barrier that precedes the message.
  const auto known = b.known_messages.find(a.id.block);
  if (known != b.known_messages.end()) {
    const auto barriers = known->second;  // the block barriers that the sender had passed
    if (a.kind == Kind::kMessage ? a.epochs.block <= barriers : a.epochs.block < barriers) return true;
  }
  if (!same_block) return false;
  return a.epochs.block < b.epochs.block || (a.id.thread / 32 == b.id.thread / 32 && a.epochs.warp < b.epochs.warp);
}

std::string place(const Region& region, uintptr_t a) {
  return std::string(region.arena ? "shared" : "global") + " memory '" + region.name + "' + " +
         std::to_string(a - region.begin) + " bytes";
}

[[noreturn]] void fail_outside(uintptr_t a, const std::string& what) {
  const auto next = regions.upper_bound(a);
  if (next == regions.begin()) fail(what + " outside any buffer");
  const Region& near = *std::prev(next)->second;
  if (a < near.end) fail(what + " to '" + near.name + "', the shared memory of a block that has returned");
  fail(what + " outside any buffer, " + std::to_string(a - near.end) + " bytes after the end of '" + near.name + "'");
}

// Checks and records an access of the current thread, or the write that its asynchronous copy or message does later.
void check(const void* address, size_t bytes, Access access, bool must_be_aligned, const void* pc,
           Kind kind = Kind::kPlain) {
  if (current == nullptr) return;
  const Thread& thread = *current;
  const auto a = reinterpret_cast<uintptr_t>(address);
  if (a - reinterpret_cast<uintptr_t>(thread.stack) < kStackBytes) return;
  if (a - reinterpret_cast<uintptr_t>(&thread) < sizeof(Thread)) return;
  const bool write = access == Access::kWrite;
  const auto describe = [&] {
    return std::string(write ? "write" : "read") + " of " + std::to_string(bytes) + " bytes by " +
           describe_thread(thread.id) + " at " + source_line(pc);
  };
  if (must_be_aligned && a % bytes != 0) fail("misaligned " + describe());
  Region* found = find_region(a);
  if (found == nullptr || a + bytes > found->end) {
    if (!write && a >= arguments.first && a + bytes <= arguments.second) return;
    fail_outside(found ? found->end : a, describe());
  }
  Region& region = *found;
  if (write && !region.writable) fail(describe() + " to read-only " + place(region, a));
  const bool shared = region.arena != nullptr;
  const bool overlapping = !shared && overlapped_launches != 0 && !thread.waited_for_previous_grid;
  const Record mine{thread.id, thread.epochs, pc, region.serial, kind};
  const auto race = [&](const char* kind, const Record& other) {
    fail(std::string("data race (") + kind + ") on " + place(region, a) + ": " + describe_thread(other.id) + " at " +
         source_line(other.pc) + ", then " + describe_thread(thread.id) + " at " + source_line(pc) +
         " with no barrier between");
  };
  for (size_t u = (a - region.begin) / kUnit; u <= (a + bytes - 1 - region.begin) / kUnit; ++u) {
    Unit& unit = region.units[u];
    if (unit.in_flight) {
      fail(describe() + " to " + place(region, a) + ", which the asynchronous copy of " + source_line(unit.in_flight) +
           " is filling: no wait for it before");
    }
    if (overlapping) {  // the previous grids may still run
      const auto overlaps = [&](const Record& other) {
        return other.serial < region.serial && other.serial + overlapped_launches >= region.serial;
      };
      const char* const why = region.first_serial + overlapped_launches >= region.serial             ? "may still write"
                              : overlaps(unit.write)                                                 ? "writes"
                              : write && std::any_of(unit.reads.begin(), unit.reads.end(), overlaps) ? "reads"
                                                                                                     : nullptr;
      if (why) fail(describe() + " before the wait for the previous grid, which " + why + " " + place(region, a));
    }
    const bool written = unit.write.serial == region.serial;
    if (written && !ordered(unit.write, thread)) {
      race(write ? "write after write" : "read after write", unit.write);
    }
    if (!unit.reads.empty() && unit.reads[0].serial != region.serial) unit.reads.clear();
    if (write) {
      for (const Record& read : unit.reads) {
        if (!ordered(read, thread)) race("write after read", read);
      }
      unit.write = mine;
      unit.reads.clear();
      if (kind == Kind::kAsyncCopy) unit.in_flight = pc;
    } else {
      if (region.uninitialized && (shared ? !written : unit.write.serial < region.first_serial)) {
        fail(describe() + " of uninitialized " + place(region, a));
      }
      if (!region.writable) continue;
      // Reads of one block between two of its barriers are not ordered, so that all are kept. A read after a barrier,
      // or of another block, replaces the reads that are ordered before it.
      const Record* last = unit.reads.empty() ? nullptr : &unit.reads.back();
      if (last && (last->id.block != thread.id.block || last->epochs.block != thread.epochs.block)) {
        std::erase_if(unit.reads, [&](const Record& read) { return ordered(read, thread); });
      } else if (last && last->id.thread == thread.id.thread) {
        unit.reads.pop_back();
      }
      unit.reads.push_back(mine);
    }
  }
}

void add_region(const void* base, size_t bytes, const char* name, Contents contents, const char* arena) {
  if (!checking || bytes == 0) return;
  auto& region = regions[reinterpret_cast<uintptr_t>(base)];
  if (!region) region = std::make_unique<Region>();
  region->begin = reinterpret_cast<uintptr_t>(base);
  region->end = region->begin + bytes;
  region->name = name;
  region->writable = contents != Contents::kInput;
  region->uninitialized = contents == Contents::kOutput;
  region->arena = arena;
  region->active = true;
  region->first_serial = ++region->serial;
  region->units.resize((bytes + kUnit - 1) / kUnit);
}

}  // namespace

// ---- launches and memory --------------------------------------------------------------------------------------------

void checker_begin_launch(bool overlaps_previous, const void* call, size_t bytes) {
  overlapped_launches = overlaps_previous ? overlapped_launches + 1 : 0;
  const auto begin = reinterpret_cast<uintptr_t>(call);
  arguments = {begin, begin + bytes};
  for (auto& [address, region] : regions) region->serial++;
}
void checker_end_launch() {
  last_region = nullptr;
  std::erase_if(regions, [](const auto& entry) { return entry.second->arena != nullptr; });
}

void register_buffer(const void* base, size_t bytes, const char* name, Contents contents) {
  add_region(base, bytes, name, contents, nullptr);
}
void clear_buffers() {
  last_region = nullptr;
  regions.clear();
}

void add_shared_memory(Block& block, char* base, size_t bytes, const char* name) {
  add_region(base, bytes, name, Contents::kOutput, block.arena);
}
// Reports accesses of other blocks to the block's shared memory that no message of theirs orders before its end.
void checker_end_block(Block& block) {
  for (const auto& [begin, region] : regions) {
    if (region->arena != block.arena || !region->active) continue;
    region->active = false;
    const auto check = [&](const Record& record) {
      const auto is_ordered = [&](const Thread& thread) { return ordered(record, thread); };
      if (record.serial != region->serial || record.id.block == current->id.block) return;
      if (std::any_of(block.threads, block.threads + block.size, is_ordered)) return;
      fail("block " + std::to_string(current->id.block) + " can return before " + describe_thread(record.id) +
           " accesses its shared memory '" + region->name + "' at " + source_line(record.pc) +
           ": nothing orders the two");
    };
    for (const Unit& unit : region->units) {
      check(unit.write);
      for (const Record& read : unit.reads) check(read);
    }
  }
}

// ---- asynchronous copies --------------------------------------------------------------------------------------------

void async_copy(void* to, const void* from, size_t bytes, size_t copied, size_t unused) {
  const void* pc = __builtin_return_address(0);
  require(in_shared(*current->block, to), "an asynchronous copy to an address outside the block's shared memory", pc);
  require((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes == 0,
          "a misaligned asynchronous copy", pc);
  require(copied <= bytes && unused <= bytes, "an asynchronous copy of more than its bytes", pc);
  if (checking) {
    if (copied > unused) check(static_cast<const char*>(from) + unused, copied - unused, Access::kRead, false, pc);
    check(to, bytes, Access::kWrite, false, pc, Kind::kAsyncCopy);
  }
  std::memset(to, 0xff, bytes);
  current->open_copies.push_back({to, from, bytes, copied, unused, pc});
}

void async_commit() {
  current->copy_groups.push_back(std::move(current->open_copies));
  current->open_copies.clear();
}

void async_wait(int groups_left) {
  auto& groups = current->copy_groups;
  for (; groups.size() > static_cast<size_t>(groups_left); groups.pop_front()) {
    for (const auto& [to, from, bytes, copied, unused, pc] : groups.front()) {
      if (checking) {
        const auto a = reinterpret_cast<uintptr_t>(to);
        Region& region = *find_region(a);
        for (size_t u = (a - region.begin) / kUnit; u <= (a + bytes - 1 - region.begin) / kUnit; ++u) {
          region.units[u].in_flight = nullptr;
          region.units[u].write = {current->id, current->epochs, pc, region.serial};
        }
      }
      if (copied > unused) {
        std::memcpy(static_cast<char*>(to) + unused, static_cast<const char*>(from) + unused, copied - unused);
      }
      std::memset(static_cast<char*>(to) + copied, 0, bytes - copied);
    }
  }
}

// ---- messages -------------------------------------------------------------------------------------------------------

void barrier_send(const void* barrier, const void* to, const void* from, size_t bytes, unsigned rank) {
  const void* pc = __builtin_return_address(0);
  void* const target = cluster_peer(to, rank, pc);
  require(reinterpret_cast<uintptr_t>(to) % 4 == 0 && bytes % 4 == 0, "a misaligned store to another block", pc);
  if (checking) check(target, bytes, Access::kWrite, false, pc, Kind::kMessage);
  std::memcpy(target, from, bytes);
  receive_message(cluster_peer(barrier, rank, pc), bytes, pc);
}

}  // namespace emulator

// ---- called by the compiled kernels ---------------------------------------------------------------------------------

namespace {

struct UndefinedBehavior {  // the beginning of every report of -fsanitize=undefined
  const char* file;
  uint32_t line, column;
};

[[noreturn]] void undefined_behavior(const char* what, const void* data) {
  const auto* where = static_cast<const UndefinedBehavior*>(data);
  const std::string file = where->file;
  const std::string text = std::string("undefined behavior (") + what + ") at " + file.substr(file.rfind('/') + 1) +
                           ":" + std::to_string(where->line);
  if (emulator::current) emulator::fail(text + " by " + emulator::describe_thread(emulator::current->id));
  std::fprintf(stderr, "%s\n", text.c_str());
  std::abort();
}

}  // namespace

extern "C" {
#define EMULATOR_CHECK(name, bytes, access, must_be_aligned) \
  name { emulator::check(a, bytes, emulator::Access::access, must_be_aligned, __builtin_return_address(0)); }
#define EMULATOR_ACCESS(n)                                                \
  EMULATOR_CHECK(void __tsan_read##n(void* a), n, kRead, true)            \
  EMULATOR_CHECK(void __tsan_write##n(void* a), n, kWrite, true)          \
  EMULATOR_CHECK(void __tsan_unaligned_read##n(void* a), n, kRead, false) \
  EMULATOR_CHECK(void __tsan_unaligned_write##n(void* a), n, kWrite, false)
EMULATOR_ACCESS(1)
EMULATOR_ACCESS(2)
EMULATOR_ACCESS(4)
EMULATOR_ACCESS(8)
EMULATOR_ACCESS(16)
EMULATOR_CHECK(void __tsan_read_range(void* a, size_t n), n, kRead, false)
EMULATOR_CHECK(void __tsan_write_range(void* a, size_t n), n, kWrite, false)
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}          // host code has virtual functions, kernels have none
void __tsan_init() { emulator::checking = true; }  // at load, if anything was compiled with -fsanitize=thread

#define EMULATOR_UNDEFINED(name) \
  void __ubsan_handle_##name##_abort(const void* data) { undefined_behavior(#name, data); }
EMULATOR_UNDEFINED(add_overflow)
EMULATOR_UNDEFINED(sub_overflow)
EMULATOR_UNDEFINED(mul_overflow)
EMULATOR_UNDEFINED(negate_overflow)
EMULATOR_UNDEFINED(divrem_overflow)
EMULATOR_UNDEFINED(shift_out_of_bounds)
EMULATOR_UNDEFINED(out_of_bounds)
EMULATOR_UNDEFINED(pointer_overflow)
EMULATOR_UNDEFINED(load_invalid_value)
void __ubsan_handle_type_mismatch_v1_abort(const void* data) { undefined_behavior("misaligned address", data); }
void __ubsan_handle_builtin_unreachable(const void* data) { undefined_behavior("unreachable", data); }
void __ubsan_handle_missing_return(const void* data) { undefined_behavior("missing return", data); }
}
