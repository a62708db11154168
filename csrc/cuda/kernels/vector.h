// Rows of elements as floats: one element at a time, or 16 bytes per memory access.
#pragma once
#include "element.h"

namespace fastattn {
namespace cuda {

// The number of elements in 16 bytes.
template <class T>
constexpr int kChunk = 16 / static_cast<int>(sizeof(typename T::Storage));

// A float as an element of type T.
template <class T>
FASTATTN_DEVICE typename T::Storage narrow(float x) {
  if constexpr (sizeof(typename T::Storage) == 2)
    return static_cast<uint16_t>(T::pack(x, 0.0f));
  else
    return x;
}

// The elements of one memory access, in their storage type; kN is 1 or kChunk, which needs 16-byte
// alignment.
template <class T, int kN>
struct Elements {
  using Storage = typename T::Storage;
  struct alignas(kN * sizeof(Storage)) Stored {
    Storage x[kN];
  } stored;

  // Loads and stores aligned elements as one word.
  static FASTATTN_DEVICE Elements load(const Storage* from) {
    return {*reinterpret_cast<const Stored*>(from)};
  }
  FASTATTN_DEVICE float operator[](int n) const { return T::widen(stored.x[n]); }
  FASTATTN_DEVICE void set(int n, float x) { stored.x[n] = narrow<T>(x); }
  FASTATTN_DEVICE void store(Storage* to) const { *reinterpret_cast<Stored*>(to) = stored; }
};

}  // namespace cuda
}  // namespace fastattn
