#include "sdpa_forward.h"

#include "../launch.h"
#include "choose.h"

namespace fastattn {
namespace cuda {

namespace {

// Launches the kernel for one width of heads.
template <class T, int kD, bool kGeneral>
void run(const AttentionArguments& p, uintptr_t stream) {
  using Shape = ForwardShape<T, kD, kGeneral>;
  const int64_t blocks = blocks_of_queries<Shape::kQueries>(p);
  launch({"attention_forward", blocks, Shape::kThreads, Shape::kSharedBytes, stream, shapes(p)},
         attention_forward_kernel<T, kD, kGeneral>, p);
}

}  // namespace

// The forward pass. Calls without options have a kernel of their own.
void attention_forward(const FASTATTN_ELEMENT*, const AttentionArguments& p, uintptr_t stream) {
  using T = FASTATTN_ELEMENT;
  with_width(p, [&](auto width) {
    constexpr int kD = decltype(width)::value;
    is_plain(p) ? run<T, kD, false>(p, stream) : run<T, kD, true>(p, stream);
  });
}

}  // namespace cuda
}  // namespace fastattn
