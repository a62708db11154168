#include "threads.h"

#include <omp.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace fastattn {
namespace {

std::atomic<bool> forked{false};

void mark_forked() { forked.store(true, std::memory_order_relaxed); }

const int registered = pthread_atfork(nullptr, nullptr, mark_forked);

struct Scratch {
  void* data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
};

thread_local Scratch scratch;

// Starting a team costs a few microseconds; a core does about this much work in that time (Zen 3).
constexpr double kSerialFlops = 1e6;

}  // namespace

bool in_forked_child() { return registered != 0 || forked.load(std::memory_order_relaxed); }

// How many threads compute a call: `wanted`, but not more than tasks, and one for a small call.
int team_size(int wanted, int64_t tasks, double flops) {
  if (wanted <= 1 || tasks <= 1 || flops < kSerialFlops || omp_in_parallel() || in_forked_child())
    return 1;
  return tasks < wanted ? static_cast<int>(tasks) : wanted;
}

// Memory of this thread that lives as long as the thread, at least `bytes`.
void* thread_scratch(size_t bytes) {
  if (bytes > scratch.size) {
    std::free(scratch.data);
    scratch.size = 0;
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    scratch.data = std::aligned_alloc(4096, rounded);
    if (scratch.data == nullptr) throw std::bad_alloc();
    scratch.size = rounded;
  }
  return scratch.data;
}

}  // namespace fastattn
