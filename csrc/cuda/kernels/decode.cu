#include "decode.h"

#include "../launch.h"
#include "choose.h"

namespace fastattn {
namespace cuda {

// Launches the kernel that reads a split of the keys, then the one that merges the splits.
void decode_attention(const FASTATTN_ELEMENT*, const DecodeArguments& p, uintptr_t stream) {
  using T = FASTATTN_ELEMENT;
  const int64_t rows = p.Hkv == 0 ? 0 : p.Hq / p.Hkv * p.Lq;
  with_width(p, [&](auto width) {
    using Shape = DecodeShape<T, decltype(width)::value>;
    launch({"decode_split", blocks_of(rows, Shape::kRows) * p.splits * p.Hkv * p.B, Shape::kThreads,
            Shape::kSharedBytes, stream, shapes(p)},
           decode_split_kernel<T, decltype(width)::value>, p);
  });
  launch({"decode_merge", blocks_of(p.B * p.Hq * p.Lq, kMergeThreads / 32), kMergeThreads, 0,
          stream, shapes(p)},
         decode_merge_kernel<T>, p);
}

// Launches the kernel that writes new keys and values into the caches.
void append_to_cache(const FASTATTN_ELEMENT*, const DecodeArguments& p, uintptr_t stream) {
  launch({"append_to_cache", blocks_of(p.B * p.Hkv * p.Lq, kMergeThreads / 32), kMergeThreads, 0,
          stream, shapes(p)},
         append_to_cache_kernel<FASTATTN_ELEMENT>, p);
}

}  // namespace cuda
}  // namespace fastattn
