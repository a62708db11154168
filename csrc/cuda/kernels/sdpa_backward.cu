#include "sdpa_backward.h"

#include "../launch.h"
#include "choose.h"

namespace fastattn {
namespace cuda {

namespace {

// Launches the kernels of dQ, then of dK and dV, for one width of heads.
template <class T, int kD, bool kGeneral>
void run(const AttentionArguments& p, uintptr_t stream) {
  using Shape = BackwardQueriesShape<T, kD, kGeneral>;
  using KeysShape = BackwardKeysShape<T, kD, kGeneral>;
  const std::string sizes = shapes(p);
  const int bytes = kGeneral ? Shape::kSharedBytes : Shape::kBits;
  // dQ first, because its kernel completes delta if the weights have a gradient.
  launch({"attention_backward_q", blocks_of_queries<Shape::kStaying>(p), Shape::kThreads, bytes,
          stream, sizes},
         attention_backward_q_kernel<T, kD, kGeneral>, p);
  launch({"attention_backward_kv", blocks_of_keys<Shape::kStaying>(p), KeysShape::kThreads, bytes,
          stream, sizes},
         attention_backward_kv_kernel<T, kD, kGeneral>, p);
}

}  // namespace

// The backward pass. Calls without options have kernels of their own.
void attention_backward(const FASTATTN_ELEMENT*, const AttentionArguments& p, uintptr_t stream) {
  using T = FASTATTN_ELEMENT;
  with_width(p, [&](auto width) {
    constexpr int kD = decltype(width)::value;
    is_plain(p) ? run<T, kD, false>(p, stream) : run<T, kD, true>(p, stream);
  });
}

}  // namespace cuda
}  // namespace fastattn
