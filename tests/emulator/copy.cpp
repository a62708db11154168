#include "copy.h"

#include <cstring>

namespace emulator {

namespace {

void complete(const Copy& copy) {
  std::memset(copy.to, 0, 16);
  if (copy.bytes > 0) std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
}

}  // namespace

void begin_copy(void* shared, const void* global, int bytes, Place place) {
  shared_address(shared, 16, 16, "cp.async", place);
  if (bytes < 0 || bytes > 16) fail("cp.async copies 0 to 16 bytes", place);
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0)
    fail("cp.async from a misaligned address", place);
  std::memset(shared, 0xFF, 16);
  machine.current->open_copies.push_back({shared, global, bytes});
}

void commit_copies() {
  Thread& me = *machine.current;
  if (machine.shuffled && random_bits() % 4 == 0) {  // some are done at once
    for (const Copy& copy : me.open_copies) complete(copy);
    me.open_copies.clear();
  }
  me.copy_groups.push_back(std::move(me.open_copies));
  me.open_copies.clear();
}

void wait_copies(size_t remaining) {
  auto& groups = machine.current->copy_groups;
  while (groups.size() > remaining) {
    for (const Copy& copy : groups.front()) complete(copy);
    groups.pop_front();
  }
}

}  // namespace emulator
