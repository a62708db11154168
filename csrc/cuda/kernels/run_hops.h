// Launches the kernels of memory hops; host code.
#pragma once
#include "../launch.h"
#include "memory_hops.h"

namespace fastattn {
namespace cuda {

inline int64_t rooms_bytes(int64_t width, int64_t rows) {  // the size of HopRooms
  const int64_t w = (width + 3) / 4 * 4, n = (rows + 3) / 4 * 4;
  return 4 * ((kHopWarps + 3) * w + 2 * n + 2 * kHopWarps);
}

// The launch of a kernel, with the sizes of the call for its error.
inline Launch launch_of(const char* name, const HopsArguments& p, int64_t blocks, int64_t shared,
                        uintptr_t stream) {
  auto text = [](int64_t n) { return std::to_string(n); };
  return {name,
          blocks,
          kHopThreads,
          static_cast<int>(shared),
          stream,
          "B=" + text(p.B) + " Q=" + text(p.Q) + " K=" + text(p.K) + " N=" + text(p.N) +
              " D=" + text(p.D)};
}

// A memory that is the same in every hop is kept in shared memory if it fits.
template <class T>
int64_t choose_residents(HopsArguments& p) {
  constexpr int64_t kMostShared = 96 << 10;  // two blocks on a multiprocessor of sm_80
  int64_t shared = rooms_bytes(p.D, p.scores != nullptr ? 0 : p.N);
  const int64_t memory = p.N * p.D * static_cast<int64_t>(sizeof(typename T::Storage));
  auto resides = [&](const Tensor4& t) {
    if (p.K == 1 || t.stride[1] != 0 || shared + memory > kMostShared) return false;
    shared += memory;
    return true;
  };
  p.in_resides = resides(p.in_memory);
  p.out_resides = p.same_rows ? p.in_resides : resides(p.out_memory);
  return shared;
}

}  // namespace cuda
}  // namespace fastattn
