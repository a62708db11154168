#include "merge_states.h"

#include "../launch.h"
#include "choose.h"

namespace fastattn {
namespace cuda {

namespace {

using T = FASTATTN_ELEMENT;

// Launches a kernel with enough lanes for each row.
template <int kN>
void run(const char* name, void (*kernel)(MergeStatesArguments), const MergeStatesParams& given,
         uintptr_t stream) {
  MergeStatesArguments p{};
  static_cast<MergeStatesParams&>(p) = given;
  p.lanes = lanes_of_row<kN>(p.D);
  const auto text = [](int64_t n) { return std::to_string(n); };
  launch({name, blocks_of(p.B * p.H * p.L, kStatesThreads / p.lanes), kStatesThreads, 0, stream,
          "B=" + text(p.B) + " H=" + text(p.H) + " L=" + text(p.L) + " D=" + text(p.D)},
         kernel, p);
}

}  // namespace

// Launches the merge of two states. Aligned rows are read in whole chunks.
void merge_states(const T*, const MergeStatesParams& p, bool aligned, uintptr_t stream) {
  constexpr int kN = kChunk<T>;
  aligned ? run<kN>("merge_states", merge_states_kernel<T, kN>, p, stream)
          : run<1>("merge_states", merge_states_kernel<T, 1>, p, stream);
}

// Launches the gradients of both states.
void merge_states_backward(const T*, const MergeStatesParams& p, bool aligned, uintptr_t stream) {
  constexpr int kN = kChunk<T>;
  aligned ? run<kN>("merge_states_gradient", merge_states_gradient_kernel<T, kN>, p, stream)
          : run<1>("merge_states_gradient", merge_states_gradient_kernel<T, 1>, p, stream);
}

}  // namespace cuda
}  // namespace fastattn
