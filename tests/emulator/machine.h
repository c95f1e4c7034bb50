// The emulated machine: what the scheduler, the asynchronous copies and the checker share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "emulator.h"

namespace emulator {

// ---- time -------------------------------------------------------------------------------------------------
struct ThreadId {
  uint32_t block = 0, cluster = 0;  // flat index in the grid
  uint32_t thread = 0;              // flat index in the block; or kAgent + the index of an mbarrier
};
constexpr uint32_t kAgent = 1u << 31;  // the one who writes what asynchronous copies bring

// How many barriers of each scope a thread has passed.
struct Epochs {
  uint32_t block = 0, warp = 0, cluster_arrived = 0, cluster_waited = 0;
};

// A point in the life of a thread.
struct Moment {
  uint64_t time = 0;
  ThreadId id;
  Epochs epochs;
};
// Whether program order or a barrier puts a before b.
bool before(const Moment& a, const Moment& b);

// What someone knows to have happened through atomics and mbarriers: of each thread, everything up to a
// moment. Sorted by block and thread.
using Knowledge = std::vector<Moment>;
void learn(Knowledge& mine, const Knowledge& other);

// ---- asynchronous copies ----------------------------------------------------------------------------------
struct MBarrier {
  const void* address;
  ThreadId agent;
  unsigned arrivals, pending;  // per phase; still missing in this one
  int64_t bytes_left;          // expected minus arrived
  unsigned phase;
  bool fenced;              // the initialisation is visible to other blocks and to copies
  uint32_t initialised_by;  // thread
  Knowledge arriving, completed;
};

struct Transfer {
  void* to;
  const void* from;  // null: `value`
  uint64_t value;
  size_t bytes;
  MBarrier* barrier;  // null for cp.async
  const void* pc;
};

// ---- threads ----------------------------------------------------------------------------------------------
enum class Wait : uint8_t { kRunnable, kBlock, kWarp, kCluster, kMBarrier, kDone };

struct Block;
struct Warp;

struct Thread {
  ThreadView view{};
  ThreadId id;
  Epochs epochs;
  unsigned lane;
  Block* block;
  Warp* warp;
  char* stack;          // kStackBytes
  void* stack_pointer;  // while it does not run

  Wait wait;
  Place place;     // of the block barrier or warp collective it waits at
  const void* pc;  // of any other wait
  Collective collective;
  unsigned mask;
  uint64_t value;  // into and out of a warp collective
  int source_lane;
  Vote vote;
  int vote_result;
  bool arrived_at_cluster;
  unsigned cluster_phase;
  const MBarrier* mbarrier;

  std::vector<Transfer> open_copies;              // cp.async not committed yet
  std::deque<std::vector<Transfer>> copy_groups;  // committed, oldest first
  Knowledge known;
  bool waited_for_previous_grid;
};

struct Warp {
  Thread* lanes;
  unsigned live, runnable, waiting;  // masks of lanes
};

struct Cluster {
  unsigned live, arrived, phase;
};

struct Block {
  uint3 index;
  unsigned rank, live, arrived;
  int votes;
  Place place;
  Cluster* cluster;
  char* arena;  // its shared memory, kArenaBytes
  std::vector<bool> slot_ready;
  bool dynamic_ready;
  Thread* threads;
  Knowledge known;  // by all of its threads
  bool waited_for_previous_grid;
  std::map<const void*, MBarrier> mbarriers;
};

struct SharedSlot {
  const void* key;
  size_t offset, bytes;
  const char* name;
};

struct Running {
  const Launch& launch;
  void (*body)(void*);
  void* closure;
  unsigned threads_per_block = 0, warps_per_block = 0;
  std::mt19937_64 random{};
  unsigned live = 0;
  uint64_t switches = 0;
  std::vector<Block> blocks{};  // resident
  std::vector<Cluster> clusters{};
  std::vector<Warp> warps{};
  std::vector<unsigned> order{};  // warps, by falling priority
  std::vector<SharedSlot> slots{};
  size_t slots_end = 0, static_bytes = 0;
  std::vector<Transfer> transfers{};  // that complete on an mbarrier, under way
  uint32_t mbarriers = 0;             // ever initialised
  std::string fault{};
};

constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kMaxStatic = 48 * 1024;   // of shared memory, per block
constexpr size_t kMaxShared = 227 * 1024;  // static and dynamic, of any GPU
constexpr size_t kRedZone = 256;
constexpr size_t kDynamicBase = 2 * kMaxStatic;  // static arrays and the gaps between them lie below
constexpr size_t kArenaBytes = kDynamicBase + kMaxShared + 2 * kRedZone;

extern Running* running;  // null between launches
extern Thread* current;   // null on the host

// Ends the launch with a Fault; @address@ in the text becomes the line of that code.
[[noreturn]] void fail(std::string what);
void need(bool condition, const char* otherwise, const void* pc);  // or fails, at that line
std::string who(const ThreadId& id);
std::string explain(const std::string& text);
std::string kernel_name(const void* kernel);
std::string at(const void* pc);

void switch_away();
void make_runnable(Thread& thread);
Block& peer(Block& block, unsigned rank);
// Whether an address lies in the shared memory of a block.
bool in_shared(const Block& block, const void* address);

// ---- asynchronous copies: transfers.cpp -------------------------------------------------------------------
bool deliver_transfers();  // true if there were any
void check_nothing_in_flight(const Block& block);

// ---- the checker: checker.cpp. Active if a kernel was compiled with -fsanitize=thread ---------------------
void checker_begin_launch(bool overlaps_previous);
void checker_end_launch();
uint64_t tick();
Moment now();  // of the current thread
// A thread's own access.
enum class Access { kRead, kLook, kWrite, kAtomic, kReadOnlyCache };  // kLook: a read that nothing has to wait for
void check_access(const void* address, size_t bytes, Access access, const void* pc);
// A copy's: nobody else may touch the target between the two. `by` is who wrote it in the end.
void begin_transfer(const Transfer& transfer);
void end_transfer(const Transfer& transfer, const Moment& by);
void shared_memory_here(Block& block, char* base, size_t bytes, const char* name);
void shared_memory_gone(Block& block);     // the block starts
void shared_memory_leaving(Block& block);  // its last thread returns

}  // namespace emulator
