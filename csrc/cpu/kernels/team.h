// Loops over tasks in a team of threads.
#pragma once
#include "../simd/simd.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// Static: a thread gets the same tasks in every call. Any other number: dynamic, with this many
// tasks at a time.
constexpr int64_t kStatic = 0;

// task(f, t) for every t < count, each thread with its own f from make(). A team of one is a plain
// loop, because the overhead of OpenMP matters for a small call.
template <class Make, class Task>
void each_task(int team, int64_t count, int64_t at_a_time, Make make, Task task) {
  const auto run = [&](auto& f, int64_t t) __attribute__((noinline)) { task(f, t); };
  if (team == 1) {
    auto f = make();
    for (int64_t t = 0; t < count; ++t) run(f, t);
    return;
  }
#pragma omp parallel num_threads(team)
  {
    auto f = make();
    if (at_a_time == kStatic) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < count; ++t) run(f, t);
    } else {
#pragma omp for schedule(dynamic, at_a_time)
      for (int64_t t = 0; t < count; ++t) run(f, t);
    }
  }
}

// task(t) for every t < count, without per-thread state.
template <class Task>
void each_task(int team, int64_t count, int64_t at_a_time, Task task) {
  struct Nothing {};
  each_task(team, count, at_a_time, [] { return Nothing(); }, [&](Nothing, int64_t t) { task(t); });
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
