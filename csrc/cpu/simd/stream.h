// Non-temporal stores, for large results.
#pragma once
#include "convert.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// Larger results bypass the caches. Chosen on Zen 4 with 32 MiB of L3, see docs/sinusoidal.md.
constexpr int64_t kStreamBytes = 4 << 20;

// Stores a whole vector with a non-temporal store: it is not read soon, and its line need not be
// fetched first. p is aligned to the number of written bytes.
template <class T, class S>
FASTATTN_INLINE void stream_as(S* p, Vec<T> v) {
#if defined(__SSE2__)
  constexpr int kBytes = kLanes<T> * static_cast<int>(sizeof(S));
  alignas(kVectorBytes) S lanes[kLanes<T>];
  store_as<T>(lanes, v, kLanes<T>);
  [[maybe_unused]] void* const from = lanes;
#if FASTATTN_AVX512
  if constexpr (kBytes == 64)
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(p), _mm512_load_si512(from));
#endif
#if defined(__AVX2__)
  if constexpr (kBytes == 32)
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(p),
                               _mm256_load_si256(static_cast<__m256i*>(from)));
#endif
  if constexpr (kBytes == 16)
    return _mm_stream_si128(reinterpret_cast<__m128i*>(p),
                            _mm_load_si128(static_cast<__m128i*>(from)));
#endif
  store_as<T>(p, v, kLanes<T>);
}

// Orders non-temporal stores before any later store.
FASTATTN_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
