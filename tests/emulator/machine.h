// A GPU on the CPU, one thread block at a time: every CUDA thread is a fiber, and only one runs.
//
// A fiber runs until it waits for others. What the hardware does asynchronously is done as late as
// it may be, in random order, and shared memory is NaN until it is written: a wait or a barrier
// that is missing becomes a wrong result. docs/testing.md says what is modelled and what is not.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <vector>

namespace emulator {

// Where in the kernel's source something was called; the last parameter of what may fail.
struct Place {
  const char* file = "?";
  int line = 0;
  // As a default argument: where the call is.
  static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct Copy {  // one cp.async on its way
  void* to;
  const void* from;
  int bytes;  // of 16; the rest is zeros
};

struct WgmmaOp;  // wgmma.cpp

struct Thread {
  unsigned id = 0;
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  bool done = false;
  // Waits while *watched == seen.
  const uint64_t* watched = nullptr;
  uint64_t seen = 0;
  const char* operation = "";
  Place place;
  std::vector<Copy> open_copies;
  std::deque<std::vector<Copy>> copy_groups;
};

// Something that a fixed number of threads do together; the last one to come does it for all.
struct Collective {
  uint64_t generation = 0;
  unsigned count = 0;
  const char* operation = "";
  Place place;
  void* argument[128];
};

struct Barrier {
  uint64_t generation = 0;
  unsigned count = 0, expected = 0;
  bool any = false, result = false;  // of __syncthreads_or
};

struct Machine {
  Dim3 grid, block, block_index;
  std::vector<Thread> threads;
  Thread* current = nullptr;
  void* scheduler_stack = nullptr;
  char* shared = nullptr;
  size_t shared_bytes = 0;
  Barrier barriers[16];
  std::vector<Collective> warps, warpgroups;
  // What engines beside the threads have still to do, such as TMA; in any order, but what is late
  // when no thread can go on before.
  struct Work {
    std::function<void()> finish;
    bool late;
  };
  std::vector<Work> in_flight;
  std::function<void()> entry;
  std::string failure;
  uint64_t random = 1;
  bool shuffled = false;  // random order of warps, random stalls, random completion
};

extern Machine machine;

// Called when a block begins and when it has ended; they may call fail().
struct Hooks {
  std::vector<std::function<void()>> at_begin, at_end;
};
Hooks& hooks();  // made when the first one is added, which may be before `machine` is

// 0 runs all in order and completes as late as may be; others shuffle.
void set_seed(uint64_t seed);
uint64_t random_bits();
// Work for an engine; with a seed some of it is late.
void begin_work(std::function<void()> finish);

// Ends the launch with an exception that names the block, the thread and the place.
[[noreturn]] void fail(const std::string& what, Place place = {});

void wait_while(const uint64_t* watched, uint64_t seen, const char* operation, Place place);
void run_grid(Dim3 grid, Dim3 block, size_t shared_bytes, std::function<void()> entry);

// A shared memory address as PTX counts it, checked: `bytes` from it on exist and it is aligned.
uint32_t shared_address(const void* pointer, size_t bytes, size_t alignment, const char* operation,
                        Place place);
char* shared_pointer(uint32_t address, size_t bytes, size_t alignment, const char* operation,
                     Place place);

void sync_barrier(int id, unsigned threads, const char* operation, Place place);
void arrive_barrier(int id, unsigned threads, Place place);
bool sync_or(bool mine, Place place);

// Mostly the same literal.
inline bool same_text(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

// `execute(arguments)` runs once, when all `width` threads have come with the same operation.
template <class F>
void together(std::vector<Collective>& groups, unsigned width, const char* operation,
              void* argument, Place place, F execute) {
  const unsigned id = machine.current->id;
  if (machine.threads.size() % width != 0)
    fail(std::string(operation) + " in a partial group", place);
  Collective& group = groups[id / width];
  if (group.count == 0) {
    group.operation = operation;
    group.place = place;
  } else if (group.place.line != place.line || !same_text(group.operation, operation)) {
    fail(std::string("threads of a group diverge: ") + operation + ", others are at " +
             group.operation + " in line " + std::to_string(group.place.line),
         place);
  }
  group.argument[id % width] = argument;
  const uint64_t generation = group.generation;
  if (++group.count < width) return wait_while(&group.generation, generation, operation, place);
  execute(group.argument);
  group.count = 0;
  ++group.generation;
}

template <class F>
void warp_together(const char* operation, void* argument, Place place, F execute) {
  together(machine.warps, 32, operation, argument, place, execute);
}

template <class F>
void warpgroup_together(const char* operation, void* argument, Place place, F execute) {
  together(machine.warpgroups, 128, operation, argument, place, execute);
}

inline unsigned lane() { return machine.current->id % 32; }

}  // namespace emulator
