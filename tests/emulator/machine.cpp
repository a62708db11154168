#include "machine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator {

Machine machine;

namespace {

constexpr size_t kStackBytes = 128 << 10;
// Stacks begin at different offsets in a page and in a cache way: every fiber uses the upper end of
// its stack, and equal offsets would compete for the same few cache sets.
constexpr size_t kStackShift = 17 * 64, kStackShifts = 64;
constexpr size_t kGuardBytes = 1024;  // after shared memory, to see what writes past its end
constexpr unsigned char kGuard = 0xC5;

// Saves the registers that a call must keep, stores the stack pointer in *save, and goes on with
// the stack `to`. x86-64, System V.
extern "C" void fastattn_emulator_switch(void** save, void* to);
asm(R"(
.text
.globl fastattn_emulator_switch
.type fastattn_emulator_switch,@function
fastattn_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fastattn_emulator_switch,.-fastattn_emulator_switch
)");

#if defined(__SANITIZE_ADDRESS__)
const void* scheduler_bottom = nullptr;
size_t scheduler_size = 0;
void* scheduler_fake = nullptr;
#endif

void to_scheduler() {
  Thread* me = machine.current;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(me->done ? nullptr : &fake, scheduler_bottom, scheduler_size);
#endif
  fastattn_emulator_switch(&me->stack_pointer, machine.scheduler_stack);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, &scheduler_bottom, &scheduler_size);
#endif
}

void to_thread(Thread& thread) {
  machine.current = &thread;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_fake, thread.stack, kStackBytes);
#endif
  fastattn_emulator_switch(&machine.scheduler_stack, thread.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake, nullptr, nullptr);
#endif
}

void thread_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
#endif
  try {
    machine.entry();
  } catch (const std::exception& error) {
    machine.failure = error.what();
  }
  machine.current->done = true;
  to_scheduler();
  std::abort();  // a thread that is done is never resumed
}

// Of all threads that there ever were at once: the next launch may have fewer, and that after it
// more again.
std::vector<char*> stacks;

void prepare(Thread& thread, unsigned id) {
  if (id == stacks.size())
    stacks.push_back(
        static_cast<char*>(std::aligned_alloc(64, kStackBytes + kStackShifts * kStackShift)));
  thread.stack = stacks[id] + id % kStackShifts * kStackShift;
  thread.id = id;
  thread.done = false;
  thread.watched = nullptr;
  thread.open_copies.clear();
  thread.copy_groups.clear();
  void** top = reinterpret_cast<void**>(thread.stack + kStackBytes);
  *--top = nullptr;                                // what thread_main would return to
  *--top = reinterpret_cast<void*>(&thread_main);  // what the first switch returns to
  for (int n = 0; n < 6; ++n) *--top = nullptr;    // the saved registers
  thread.stack_pointer = top;
}

bool waits(const Thread& thread) {
  return thread.watched != nullptr && *thread.watched == thread.seen;
}

void complete(size_t n) {
  const auto finish = std::move(machine.in_flight[n].finish);
  machine.in_flight.erase(machine.in_flight.begin() + static_cast<std::ptrdiff_t>(n));
  finish();
}

// The first, or any; what is late after all others.
void complete_one() {
  const auto& all = machine.in_flight;
  const bool late = std::all_of(all.begin(), all.end(), [](const auto& work) { return work.late; });
  std::vector<size_t> chosen;
  for (size_t n = 0; n < all.size(); ++n)
    if (all[n].late == late) chosen.push_back(n);
  complete(machine.shuffled ? chosen[random_bits() % chosen.size()] : chosen[0]);
}

void complete_now_and_then() {
  if (!machine.shuffled || machine.in_flight.empty() || random_bits() % 64 != 0) return;
  const size_t n = random_bits() % machine.in_flight.size();
  if (!machine.in_flight[n].late) complete(n);
}

std::string who_waits() {
  std::string text = "deadlock";
  const Thread* last = nullptr;  // one thread for all of a warp that wait together
  for (const Thread& thread : machine.threads) {
    const bool same =
        last != nullptr && thread.id / 32 == last->id / 32 && thread.place.line == last->place.line;
    if (thread.done || same) continue;
    last = &thread;
    text += "; thread " + std::to_string(thread.id) + " waits in " + thread.operation + " (" +
            thread.place.file + ":" + std::to_string(thread.place.line) + ")";
  }
  return text;
}

uint64_t rounds = 0;
uint64_t asleep_until[64];  // round, of each warp

// With a seed warps stall at random: each for a round, and now and then one for many.
uint64_t stalled_warps() {
  if (!machine.shuffled) return 0;
  const uint64_t bits = random_bits();
  if (bits % 32 == 0)
    asleep_until[(bits >> 5) % std::max<size_t>(1, machine.threads.size() / 32)] =
        rounds + (bits >> 11) % 64;
  uint64_t stalled = random_bits() & random_bits();
  for (int warp = 0; warp < 64; ++warp)
    if (rounds < asleep_until[warp]) stalled |= uint64_t(1) << warp;
  ++rounds;
  return stalled;
}

uint64_t parted = ~uint64_t(0), lanes_ahead = 0, parted_until = 0;

// With a seed the first lanes of a warp now and then are ahead of its others for dozens of rounds.
bool is_behind(const Thread& thread) {
  return machine.shuffled && rounds < parted_until && thread.id / 32 == parted &&
         thread.id % 32 >= lanes_ahead;
}

void part_a_warp() {
  if (!machine.shuffled || rounds < parted_until || random_bits() % 16 != 0) return;
  parted = random_bits() % std::max<size_t>(1, machine.threads.size() / 32);
  lanes_ahead = 1 + random_bits() % 31;
  parted_until = rounds + random_bits() % 64;
}

// When no other thread can go on, waiting longer changes nothing.
void wake_all() {
  parted_until = 0;
  for (uint64_t& until : asleep_until) until = 0;
}

// All that could run is late. It may be so late that a copy completes before.
void go_on_without_them() {
  if (!machine.in_flight.empty() && random_bits() % 2 == 0)
    complete_one();
  else
    wake_all();
}

// Every thread that can run, once, beginning with a random one.
bool run_round(size_t& left) {
  const size_t count = machine.threads.size();
  const size_t first = machine.shuffled ? random_bits() % count : 0;
  const uint64_t stalled = stalled_warps();
  part_a_warp();
  bool progress = false, ran = false;
  for (size_t n = 0; n < count; ++n) {
    const size_t id = first + n;
    Thread& thread = machine.threads[id < count ? id : id - count];
    if (thread.done || waits(thread)) continue;
    progress = true;
    if ((stalled >> (thread.id / 32 % 64) & 1) || is_behind(thread)) continue;
    ran = true;
    to_thread(thread);
    if (!machine.failure.empty()) return false;
    left -= thread.done;
    complete_now_and_then();
  }
  if (progress && !ran) go_on_without_them();
  return progress;
}

void run_block(size_t count) {
  machine.threads.resize(count);
  for (unsigned n = 0; n < count; ++n) prepare(machine.threads[n], n);
  machine.warps.assign((count + 31) / 32, {});
  machine.warpgroups.assign((count + 127) / 128, {});
  for (Barrier& barrier : machine.barriers) barrier = {};
  machine.in_flight.clear();
  std::memset(machine.shared, 0xFF, machine.shared_bytes);  // NaN in every float format
  std::memset(machine.shared + machine.shared_bytes, kGuard, kGuardBytes);
  for (const auto& begin : hooks().at_begin) begin();

  size_t left = count;
  while (left > 0) {
    if (run_round(left)) continue;
    if (!machine.failure.empty()) return;
    machine.current = nullptr;
    if (machine.in_flight.empty()) fail(who_waits());
    complete_one();
  }
  machine.current = nullptr;
  if (!machine.in_flight.empty()) fail("the block has ended, but not its bulk copies");
  for (const Thread& thread : machine.threads)
    if (!thread.copy_groups.empty() || !thread.open_copies.empty())
      fail("the block has ended, but not the cp.async of thread " + std::to_string(thread.id));
  for (size_t n = 0; n < kGuardBytes; ++n)
    if (static_cast<unsigned char>(machine.shared[machine.shared_bytes + n]) != kGuard)
      fail("a write past the end of shared memory, by " + std::to_string(n) + " bytes");
  for (const Barrier& barrier : machine.barriers)
    if (barrier.count != 0) fail("the block has ended, but not all threads came to a barrier");
  for (const auto& end : hooks().at_end) end();
}

}  // namespace

Hooks& hooks() {
  static Hooks all;
  return all;
}

void set_seed(uint64_t seed) {
  machine.random = seed * 0x9E3779B97F4A7C15u + 1;
  wake_all();
  rounds = 0;
  machine.shuffled = seed != 0;
}

uint64_t random_bits() {  // xorshift64
  machine.random ^= machine.random << 13;
  machine.random ^= machine.random >> 7;
  machine.random ^= machine.random << 17;
  return machine.random;
}

void begin_work(std::function<void()> finish) {
  machine.in_flight.push_back({std::move(finish), machine.shuffled && random_bits() % 4 == 0});
}

void fail(const std::string& what, Place place) {
  const Dim3 b = machine.block_index;
  std::string text = "emulator: " + what + " [block " + std::to_string(b.x) + "," +
                     std::to_string(b.y) + "," + std::to_string(b.z);
  if (machine.current != nullptr) text += ", thread " + std::to_string(machine.current->id);
  if (place.line != 0) text += std::string(", ") + place.file + ":" + std::to_string(place.line);
  throw std::runtime_error(text + "]");
}

void wait_while(const uint64_t* watched, uint64_t seen, const char* operation, Place place) {
  Thread* me = machine.current;
  while (*watched == seen) {
    me->watched = watched;
    me->seen = seen;
    me->operation = operation;
    me->place = place;
    to_scheduler();
  }
  me->watched = nullptr;
}

void sync_barrier(int id, unsigned threads, const char* operation, Place place) {
  const uint64_t generation = machine.barriers[id].generation;
  arrive_barrier(id, threads, place);
  if (machine.barriers[id].generation == generation)
    wait_while(&machine.barriers[id].generation, generation, operation, place);
}

void arrive_barrier(int id, unsigned threads, Place place) {
  if (id < 0 || id > 15) fail("a barrier has a number from 0 to 15", place);
  if (threads % 32 != 0 || threads > machine.threads.size())
    fail("a barrier is for whole warps of this block", place);
  Barrier& barrier = machine.barriers[id];
  if (barrier.count == 0) barrier.expected = threads;
  if (barrier.expected != threads) fail("threads expect different counts at a barrier", place);
  if (++barrier.count < threads) return;
  barrier.count = 0;
  barrier.result = barrier.any;
  barrier.any = false;
  ++barrier.generation;
}

bool sync_or(bool mine, Place place) {
  machine.barriers[0].any |= mine;
  sync_barrier(0, static_cast<unsigned>(machine.threads.size()), "__syncthreads_or", place);
  return machine.barriers[0].result;
}

uint32_t shared_address(const void* pointer, size_t bytes, size_t alignment, const char* operation,
                        Place place) {
  const auto offset = static_cast<const char*>(pointer) - machine.shared;
  if (offset < 0 || static_cast<size_t>(offset) + bytes > machine.shared_bytes)
    fail(std::string(operation) + " outside of shared memory", place);
  if (static_cast<size_t>(offset) % alignment != 0)
    fail(std::string(operation) + " at a misaligned address", place);
  return static_cast<uint32_t>(offset);
}

char* shared_pointer(uint32_t address, size_t bytes, size_t alignment, const char* operation,
                     Place place) {
  char* pointer = machine.shared + address;
  shared_address(pointer, bytes, alignment, operation, place);
  return pointer;
}

void run_grid(Dim3 grid, Dim3 block, size_t shared_bytes, std::function<void()> entry) {
  if (block.y != 1 || block.z != 1) throw std::runtime_error("emulator: blocks have one dimension");
  machine.grid = grid;
  machine.block = block;
  machine.entry = std::move(entry);
  machine.failure.clear();
  machine.current = nullptr;
  machine.shared_bytes = shared_bytes;
  // As aligned as TMA with a 128-byte swizzle wants it; nothing follows the guard, for ASan.
  const size_t bytes = (shared_bytes + kGuardBytes + 1023) & ~size_t(1023);
  std::free(machine.shared);
  machine.shared = static_cast<char*>(std::aligned_alloc(1024, bytes));
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        machine.block_index = {x, y, z};
        run_block(block.x);
        if (!machine.failure.empty()) throw std::runtime_error(machine.failure);
      }
}

}  // namespace emulator
