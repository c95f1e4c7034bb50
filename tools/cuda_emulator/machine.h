// The emulated machine: what the scheduler and the checker share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "emulator.h"

namespace emulator {

// ---- threads --------------------------------------------------------------------------------------------------------

struct ThreadId {
  uint32_t block = 0, cluster = 0;  // flat index in the grid
  uint32_t thread = 0;              // flat index in the block
};
// How many barriers of its block, its warp and its cluster a thread has passed. An access is ordered before the access
// of another thread of the same block (or warp) if its number of block (or warp) barriers is smaller.
struct Epochs {
  uint32_t block = 0, warp = 0, cluster_arrived = 0, cluster_waited = 0;
};

// A pending cp.async: see async_copy().
struct Transfer {
  void* to;
  const void* from;
  size_t bytes, copied, unused;
  const void* pc;
};

struct Thread;

// Threads that wait for each other: the threads of a warp, a block or a cluster.
struct Group {
  const char* barrier;                               // the name of the group's barrier in reports
  Thread* threads;                                   // the first one; the others follow it
  unsigned size, live, arrived, completed_barriers;  // live: threads that have not returned; arrived: at the barrier
  Place place;                                       // the line of the barrier at which threads wait
};
struct Warp : Group {
  unsigned runnable;  // mask of the lanes that do not wait
};
struct Cluster : Group {
  std::set<size_t> shared;  // offsets of the shared arrays whose declaration a thread has reached
};
struct Block : Group {
  uint3 index;
  unsigned rank;  // in the cluster
  Cluster* cluster;
  char* arena;  // the block's shared memory, kArenaBytes
};

// {index of a block that sent a message: Epochs::block of its sender at that time}.
using Messages = std::map<uint32_t, uint32_t>;

// An mbarrier. The threads of a block wait on it for messages: asynchronous stores of other blocks, or of their own.
struct TransactionBarrier : Group {
  bool announced = false;                        // a thread has announced the bytes of the current phase
  int64_t missing_bytes = 0;                     // announced bytes that have not arrived
  Messages arrived_messages{}, last_messages{};  // of the current phase, and of the last completed one
};

struct Thread {
  ThreadView view{};
  ThreadId id;
  Epochs epochs;
  unsigned lane;
  Block* block;
  Warp* warp;
  char* stack;          // kStackBytes
  void* stack_pointer;  // while it does not run

  Group* waits_for;  // the group at whose barrier the thread waits, or null
  Exchange exchange;
  uint64_t result;  // of the last exchange

  std::vector<Transfer> open_copies;              // cp.async, not committed
  std::deque<std::vector<Transfer>> copy_groups;  // committed, oldest first
  Messages known_messages;                        // the messages of mbarriers at which this thread has waited
  bool waited_for_previous_grid;                  // this thread, or another before a block barrier that both passed
};

struct RunningLaunch {
  const Launch& launch;
  void (*body)(const void*);
  const void* call;
  unsigned threads_per_block = 0, warps_per_block = 0;
  std::mt19937_64 random{};
  unsigned live = 0;
  std::vector<Block> blocks{};  // resident
  std::vector<Cluster> clusters{};
  std::vector<Warp> warps{};
  std::vector<size_t> order{};                           // indices of warps: the first runnable one runs
  std::map<const void*, size_t> static_offsets{};        // of static shared arrays, by declaration
  std::map<const void*, TransactionBarrier> barriers{};  // by the address of the kernel's variable
  size_t static_end = 0, static_bytes = 0;               // of these arrays: offset of their end, and sum of their sizes
  std::string fault{};
};

constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kMaxStatic = 48 * 1024;   // bytes of static shared memory of a block
constexpr size_t kMaxShared = 227 * 1024;  // bytes of static and dynamic shared memory, of any GPU
constexpr size_t kRedZone = 256;  // bytes after a shared array that belong to no array, so that an overrun is found
constexpr size_t kDynamicBase = 2 * kMaxStatic;  // below it are static arrays and the gaps between them
constexpr size_t kArenaBytes = kDynamicBase + kMaxShared + 2 * kRedZone;

extern RunningLaunch* running;  // null between launches
extern Thread* current;         // null on the host

// Ends the launch with a Fault. Abandons the fiber, and destroys nothing on its stack.
[[noreturn]] void fail(std::string what);
void require(bool condition, const char* otherwise, const void* pc);  // fails, at the line of pc, without the condition
std::string describe_thread(const ThreadId& id);

Block& peer(Block& block, unsigned rank);
// The same variable in the shared memory of another block of the current thread's cluster.
void* cluster_peer(const void* address, unsigned rank, const void* pc);
void receive_message(const void* barrier, size_t bytes, const void* pc);
bool in_shared(const Block& block, const void* address);

// Returns "row.cuh:35 < forward_staged.cu:147": the line of the call before pc, then those into which it was inlined.
std::string source_line(const void* pc);

// ---- checker.cpp, active if a kernel was compiled with -fsanitize=thread --------------------------------------------

void checker_begin_launch(bool overlaps_previous, const void* arguments, size_t bytes);
void checker_end_launch();
void add_shared_memory(Block& block, char* base, size_t bytes, const char* name);
void checker_end_block(Block& block);  // its last thread returns

}  // namespace emulator
