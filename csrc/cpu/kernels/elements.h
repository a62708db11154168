// Elements of a tensor in float32, bf16 or fp16, whose dtype is known at run time. The kernels that
// compute in float32 convert elements only where they pack or write a block, so that one kernel
// serves the three dtypes.
#pragma once
#include "../../params.h"
#include "../simd/convert.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// Whether kernels of a dtype are compiled. Tests that need only one dtype compile much faster.
constexpr bool has_kernels([[maybe_unused]] DType dtype) {
#if defined(FASTATTN_ONLY_DTYPE)
  return dtype == DType::FASTATTN_ONLY_DTYPE;
#else
  return true;
#endif
}

FASTATTN_INLINE int64_t bytes_of(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
}

// A pointer to elements whose dtype is known at run time.
class Elements {
 public:
  Elements(void* data, DType dtype) : at_(static_cast<char*>(data)), dtype_(dtype) {}
  DType dtype() const { return dtype_; }
  Elements operator+(int64_t count) const { return {at_ + count * bytes_of(dtype_), dtype_}; }
  const void* address() const { return at_; }
  // The pointer, for a known element type.
  template <class S>
  S* as() const {
    return reinterpret_cast<S*>(at_);
  }

 private:
  char* at_;
  DType dtype_;
};

// Calls f with a pointer to the element type; f may be called with any pointer, too.
template <class F>
FASTATTN_INLINE void with_elements(Elements from, F f) {
  if constexpr (has_kernels(DType::f32))
    if (from.dtype() == DType::f32) return f(from.as<float>());
  if constexpr (has_kernels(DType::bf16))
    if (from.dtype() == DType::bf16) return f(from.as<Bf16>());
  if constexpr (has_kernels(DType::f16))
    if (from.dtype() == DType::f16) return f(from.as<F16>());
}
template <class S, class F>
FASTATTN_INLINE void with_elements(S* from, F f) {
  f(from);
}

// The address of the first element.
template <class S>
FASTATTN_INLINE const void* address_of(const S* at) {
  return at;
}
FASTATTN_INLINE const void* address_of(Elements at) { return at.address(); }

// The address of the elements if they are of type T, else null.
template <class T, class S>
FASTATTN_INLINE const T* in_place(const S* from) {
  if constexpr (kSame<T, S>) return from;
  return nullptr;
}
template <class T>
FASTATTN_INLINE const T* in_place(Elements from) {
  return kSame<T, float> && from.dtype() == DType::f32 ? from.as<const T>() : nullptr;
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
