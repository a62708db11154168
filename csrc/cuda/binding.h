// Shared by the bindings of all operators: what the host derives, and choosing the element type.
#pragma once
#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>

#include "../arguments.h"
#include "../options.h"
#include "kernels/table.h"
#include "params.h"

namespace fastattn {
namespace cuda {

inline Named named(pybind11::handle from) { return Named(from, "fastattn._cuda"); }

// Derives the dropout parameters from dropout_p.
inline void set_dropout(AttentionArguments& p) {
  // Halves are rounded to even, as in every backend.
  p.keep_below = static_cast<uint32_t>(std::nearbyint((1.0 - p.dropout_p) * 65536.0));
  p.keep_scale = p.keep_below == 0 ? 0.0f : static_cast<float>(65536.0 / p.keep_below);
}

// A mask program's address, its length and the address of mask_workspace(...) bytes, if the call has
// one.
inline void read_mask_program(const Named& from, AttentionArguments& to) {
  using P = AttentionArguments;
  static const auto fields =
      std::make_tuple(field("mask_program", &P::mask_words), field("mask_length", &P::mask_length),
                      field("mask_workspace", &P::mask_table));
  from.read_given(to, fields);
  to.mask_columns = mask_tiles_of(to.Lk);
}

// Can rows be copied 16 bytes at a time?
inline bool is_aligned(const Tensor4& t, int64_t element_bytes) {
  auto multiple = [&](int64_t n) { return n * element_bytes % 16 == 0; };
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[3] == 1 &&
         multiple(t.stride[0]) && multiple(t.stride[1]) && multiple(t.stride[2]);
}

// Calls f with a null pointer to the element type: the kernels of an operator are overloads.
template <class F>
void with_element(DType dtype, F f) {
  switch (dtype) {
    case DType::bf16:
      return f(static_cast<Bf16*>(nullptr));
    case DType::f16:
      return f(static_cast<F16*>(nullptr));
    case DType::f32:
      return f(static_cast<F32*>(nullptr));
    default:
      throw pybind11::value_error("fastattn._cuda: the dtype must be float32, bfloat16 or float16");
  }
}

// Attention has one more type: float32 with tf32 products.
template <class F>
void with_element_of_attention(const AttentionArguments& p, F f) {
  p.tf32 ? f(static_cast<Tf32*>(nullptr)) : with_element(p.dtype, f);
}

}  // namespace cuda
}  // namespace fastattn
