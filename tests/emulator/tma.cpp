#include "tma.h"

#include <cstring>
#include <map>

#include "barrier.h"

namespace emulator {

namespace {

struct Stores {  // of one thread
  std::vector<std::function<void()>> open;
  std::deque<std::vector<std::function<void()>>> groups;
};

std::map<unsigned, Stores> stores;

const bool registered = [] {
  hooks().at_begin.push_back([] { stores.clear(); });
  hooks().at_end.push_back([] {
    for (const auto& [thread, of_thread] : stores)
      if (!of_thread.open.empty() || !of_thread.groups.empty())
        fail("the block has ended, but not the bulk stores of thread " + std::to_string(thread));
  });
  return true;
}();

int64_t bytes_of(const TensorMap& map) {
  return int64_t(map.element_bytes) * map.box[0] * map.box[1] * map.box[2] * map.box[3];
}

// Bits 4 to 6 of an address are exchanged with bits 7 to 9, as many as the swizzle has.
uint32_t swizzled(uint32_t address, int swizzle) {
  const uint32_t bits = swizzle == 128 ? 7 : swizzle == 64 ? 3 : swizzle == 32 ? 1 : 0;
  return address ^ (address >> 7 & bits) << 4;
}

// visit(in shared memory, in global memory or null if outside of the tensor)
template <class F>
void each_element(const TensorMap& map, uint32_t address, const int (&at)[4], F visit) {
  int64_t offset = 0;
  for (int d = 0; d < map.box[3]; ++d)
    for (int c = 0; c < map.box[2]; ++c)
      for (int b = 0; b < map.box[1]; ++b)
        for (int a = 0; a < map.box[0]; ++a, offset += map.element_bytes) {
          const int64_t place[4] = {int64_t(at[0]) + a, int64_t(at[1]) + b, int64_t(at[2]) + c,
                                    int64_t(at[3]) + d};
          char* global = map.base;
          for (int n = 0; n < 4 && global != nullptr; ++n) {
            const bool inside = place[n] >= 0 && place[n] < map.size[n];
            global = inside ? global + place[n] * map.stride[n] : nullptr;
          }
          const auto to = static_cast<uint32_t>(address + offset);
          visit(machine.shared + swizzled(to, map.swizzle), global);
        }
}

uint32_t check(const TensorMap& map, const void* shared, const char* operation, Place place) {
  if (map.swizzle != 0 && map.box[0] * map.element_bytes > map.swizzle)
    fail(std::string(operation) + ": a row of the box is wider than the swizzle", place);
  for (int n = 1; n < 4; ++n)
    if (map.stride[n] % 16 != 0)
      fail(std::string(operation) + ": a stride is no multiple of 16", place);
  if (reinterpret_cast<uintptr_t>(map.base) % 16 != 0)
    fail(std::string(operation) + ": the tensor is not aligned to 16 bytes", place);
  // The address decides where the pattern of the swizzle begins.
  const size_t alignment = map.swizzle == 128 ? 1024 : map.swizzle == 64 ? 512 : 128;
  return shared_address(shared, static_cast<size_t>(bytes_of(map)), alignment, operation, place);
}

}  // namespace

void load_box(void* shared, const TensorMap& map, const void* barrier, const int (&at)[4],
              Place place) {
  const uint32_t address = check(map, shared, "cp.async.bulk.tensor", place);
  std::memset(shared, 0xFF, static_cast<size_t>(bytes_of(map)));
  const int a = at[0], b = at[1], c = at[2], d = at[3];
  begin_work([=] {
    each_element(map, address, {a, b, c, d}, [&](char* to, const char* from) {
      if (from != nullptr)
        std::memcpy(to, from, static_cast<size_t>(map.element_bytes));
      else
        std::memset(to, 0, static_cast<size_t>(map.element_bytes));
    });
    bring_bytes(barrier, bytes_of(map));
  });
}

void store_box(const TensorMap& map, const void* shared, const int (&at)[4], bool add,
               Place place) {
  const uint32_t address = check(map, shared, "cp.async.bulk.tensor (store)", place);
  if (add && !map.is_float32) fail("only float32 is added by the emulator", place);
  const int a = at[0], b = at[1], c = at[2], d = at[3];
  stores[machine.current->id].open.push_back([=] {
    each_element(map, address, {a, b, c, d}, [&](const char* from, char* to) {
      if (to == nullptr) return;
      if (!add) {
        std::memcpy(to, from, static_cast<size_t>(map.element_bytes));
      } else {
        float x, y;
        std::memcpy(&x, from, 4);
        std::memcpy(&y, to, 4);
        y += x;
        std::memcpy(to, &y, 4);
      }
    });
  });
}

void commit_boxes() {
  Stores& mine = stores[machine.current->id];
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
}

void wait_boxes(size_t remaining) {
  Stores& mine = stores[machine.current->id];
  while (mine.groups.size() > remaining) {
    for (const auto& store : mine.groups.front()) store();
    mine.groups.pop_front();
  }
}

}  // namespace emulator
