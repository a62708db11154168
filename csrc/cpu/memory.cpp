#include "memory.h"

#include <sys/mman.h>

#include <cstdint>

namespace fastattn {

// Asks for huge pages where a large result will be written, which saves page faults.
void expect_to_fill(void* data, size_t bytes) {
  constexpr uintptr_t kHugePage = 2 << 20;
  constexpr size_t kWorthwhile = 8 << 20;  // smaller results mostly reuse pages
  if (bytes < kWorthwhile) return;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (address + bytes) / kHugePage * kHugePage;
  // An error (no transparent huge pages) is harmless.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

}  // namespace fastattn
