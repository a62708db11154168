// Threads and scratch memory, compiled once for the baseline so that no kernel contains library
// code.
#pragma once
#include <cstddef>
#include <cstdint>

namespace fastattn {

// True in a child of fork(): its parent's OpenMP workers do not exist there and a new team would
// hang.
bool in_forked_child();

// The number of threads for `tasks` independent tasks worth `flops` in total: 1 in a forked child,
// inside another parallel region, and where starting a team would cost more than it saves.
int team_size(int wanted, int64_t tasks, double flops);

// This thread's scratch: at least `bytes`, 4 KiB aligned, kept for the next call, contents
// undefined.
void* thread_scratch(size_t bytes);

}  // namespace fastattn
