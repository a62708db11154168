#include "threads.h"

#include <omp.h>
#include <pthread.h>
#include <sys/mman.h>

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

constexpr size_t kHugePage = size_t{2} << 20;

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
    const size_t page = bytes < kHugePage / 8 ? 4096 : kHugePage;
    const size_t rounded = (bytes + page - 1) / page * page;
    scratch.data = std::aligned_alloc(page, rounded);
    if (scratch.data == nullptr) throw std::bad_alloc();
    // Consecutive lines of a huge page are spread evenly over the sets of L2. A hint: it may fail.
    if (page == kHugePage) madvise(scratch.data, rounded, MADV_HUGEPAGE);
    scratch.size = rounded;
  }
  return scratch.data;
}

}  // namespace fastattn
