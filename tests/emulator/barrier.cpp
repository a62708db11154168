#include "barrier.h"

#include <map>
#include <utility>

namespace emulator {

namespace {

struct State {
  uint64_t phase = 0;
  int arrivals = 0, missing = 0;
  long bytes = 0;  // announced and not yet there
};

std::map<uint32_t, State> barriers;  // by address; none before mbarrier.init

// The phase that a thread has last waited for at a barrier.
std::map<std::pair<unsigned, uint32_t>, uint64_t> awaited;

const bool registered = [] {
  hooks().at_begin.push_back([] {
    barriers.clear();
    awaited.clear();
  });
  hooks().at_end.push_back([] {
    for (const auto& [address, state] : barriers)
      if (state.bytes != 0) fail("the block has ended, but not all bytes that were announced came");
  });
  return true;
}();

State& find(const void* barrier, const char* operation, Place place) {
  const auto found = barriers.find(shared_address(barrier, 8, 8, operation, place));
  if (found == barriers.end()) fail(std::string(operation) + " before mbarrier.init", place);
  return found->second;
}

void end_phase_if_complete(State& state) {
  if (state.missing == 0 && state.bytes < 0) fail("more bytes came than were announced", {});
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
  constexpr long kMost = (1 << 20) - 1;
  State& state = find(barrier, "mbarrier.arrive", place);
  state.bytes += announced;
  if (state.bytes > kMost) fail("more bytes are announced than an mbarrier counts", place);
  if (--state.missing < 0) fail("more arrivals than the mbarrier was made for", place);
  end_phase_if_complete(state);
}

void bring_bytes(const void* barrier, long bytes) {
  State& state = find(barrier, "complete_tx", {});
  state.bytes -= bytes;
  end_phase_if_complete(state);
}

// A parity names the phase that goes on and the one before. A thread that waits by turns for
// parities 0 and 1 means the phase after its last one: if the barrier is beyond the next, too, the
// thread would wait for another phase than it means.
void check_phase(const State& state, const void* barrier, int parity, Place place) {
  const auto address = static_cast<uint32_t>(static_cast<const char*>(barrier) - machine.shared);
  const auto parity_now = static_cast<int>(state.phase & 1);
  const uint64_t named = parity_now == parity ? state.phase : state.phase - 1;
  const auto [last, is_first] = awaited.try_emplace({machine.current->id, address}, named);
  if (!is_first && (last->second & 1) != static_cast<uint64_t>(parity) && named > last->second + 1)
    fail("a thread waits for a phase of the mbarrier, which is two phases further on", place);
  last->second = named;
}

void wait_mbarrier(const void* barrier, int parity, Place place) {
  State& state = find(barrier, "mbarrier.try_wait", place);
  check_phase(state, barrier, parity, place);
  while (static_cast<int>(state.phase & 1) == parity)
    wait_while(&state.phase, state.phase, "mbarrier.try_wait", place);
}

}  // namespace emulator
