#include "registers.h"

namespace emulator {

namespace {

constexpr size_t kRegisters = 64 << 10;  // of a multiprocessor

std::vector<int> held;  // by each thread of a warpgroup
int left = 0;           // registers of the block that no warp holds
uint64_t given = 0;     // how often some were given back

const bool registered = [] {
  hooks().at_begin.push_back([] {
    // A kernel that uses it is compiled for one block a multiprocessor.
    const size_t threads = machine.threads.size();
    const int each = static_cast<int>(kRegisters / threads) / 8 * 8;
    held.assign((threads + 127) / 128, each < 256 ? each : 256);
    left = 0;
  });
  return true;
}();

int& held_here(int count, Place place) {
  if (count % 8 != 0 || count < 24 || count > 256)
    fail("setmaxnreg: the count is a multiple of 8, from 24 to 256", place);
  return held[machine.current->id / 128];
}

}  // namespace

void give_registers(int count, Place place) {
  warpgroup_together("setmaxnreg.dec", nullptr, place, [=](void**) {
    int& mine = held_here(count, place);
    if (count > mine) fail("setmaxnreg.dec to more registers than there are", place);
    left += 128 * (mine - count);
    mine = count;
    ++given;
  });
}

void take_registers(int count, Place place) {
  if (count < held_here(count, place)) fail("setmaxnreg.inc to fewer registers", place);
  const unsigned id = machine.current->id;
  if (id % 128 == 0) {
    int& mine = held[id / 128];
    while (128 * (count - mine) > left) wait_while(&given, given, "setmaxnreg.inc", place);
    left -= 128 * (count - mine);
    mine = count;
  }
  warpgroup_together("setmaxnreg.inc", nullptr, place, [](void**) {});
}

}  // namespace emulator
