#include "hopfield.h"

#include "run_hops.h"

namespace fastattn {
namespace cuda {

namespace {

// One block for each query, or for all queries of a head that stop together.
template <int kN>
void run(HopsArguments p, uintptr_t stream) {
  using T = FASTATTN_ELEMENT;
  p.lanes = lanes_of_row<kN>(p.D);
  const int64_t shared = choose_residents<T>(p);
  launch(launch_of("hopfield", p, p.B * p.Q / p.together, shared, stream), hopfield_kernel<T, kN>,
         p);
}

}  // namespace

// Launches the search for the fixed point of every query.
void hopfield_search(const FASTATTN_ELEMENT*, const HopsArguments& p, bool aligned,
                     uintptr_t stream) {
  if (p.B * p.Q == 0) return;
  constexpr int kN = kChunk<FASTATTN_ELEMENT>;
  aligned ? run<kN>(p, stream) : run<1>(p, stream);
}

}  // namespace cuda
}  // namespace fastattn
