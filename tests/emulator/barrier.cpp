#include "barrier.h"

#include <map>

namespace emulator {

namespace {

struct State {
  uint64_t phase = 0;
  int arrivals = 0, missing = 0;
  long bytes = 0;  // announced and not yet there
};

std::map<uint32_t, State> barriers;  // by address; none before mbarrier.init

const bool registered = [] {
  machine.at_begin.push_back([] { barriers.clear(); });
  return true;
}();

State& find(const void* barrier, const char* operation, Place place) {
  const auto found = barriers.find(shared_address(barrier, 8, 8, operation, place));
  if (found == barriers.end()) fail(std::string(operation) + " before mbarrier.init", place);
  return found->second;
}

void end_phase_if_complete(State& state) {
  if (state.missing > 0 || state.bytes != 0) return;
  ++state.phase;
  state.missing = state.arrivals;
}

}  // namespace

void init_mbarrier(const void* barrier, int arrivals, Place place) {
  State state;
  state.arrivals = state.missing = arrivals;
  barriers[shared_address(barrier, 8, 8, "mbarrier.init", place)] = state;
}

void arrive_mbarrier(const void* barrier, long announced, Place place) {
  State& state = find(barrier, "mbarrier.arrive", place);
  state.bytes += announced;
  if (--state.missing < 0) fail("more arrivals than the mbarrier was made for", place);
  end_phase_if_complete(state);
}

void bring_bytes(const void* barrier, long bytes) {
  State& state = find(barrier, "complete_tx", {});
  state.bytes -= bytes;
  end_phase_if_complete(state);
}

void wait_mbarrier(const void* barrier, int parity, Place place) {
  State& state = find(barrier, "mbarrier.try_wait", place);
  while (static_cast<int>(state.phase & 1) == parity)
    wait_while(&state.phase, state.phase, "mbarrier.try_wait", place);
}

}  // namespace emulator
