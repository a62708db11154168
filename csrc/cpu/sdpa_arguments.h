// Shared by the bindings of attention: reading its arguments.
#pragma once
#include <pybind11/pybind11.h>

#include "../arguments.h"
#include "isa.h"
#include "kernel_table.h"
#include "named.h"

namespace fastattn {

namespace py = pybind11;

// Whether products of float32 may round their factors to 16 bits. Only tiles do, so that the question
// to PyTorch's settings, may_reduce() -> bool, costs calls on vectors nothing. None: they
// may not.
inline bool reduces(const AttentionParams& p, const py::object& may_reduce) {
  return p.dtype == DType::f32 && pays_on_tiles(p.dtype, p.Lq, p.Lk, p.D) && on_tiles(DType::f32) &&
         !may_reduce.is_none() && may_reduce().cast<bool>();
}

inline AttentionParams common_arguments(int dtype, const py::object& may_reduce, int threads,
                                        const py::tuple& sizes, uintptr_t q,
                                        const py::tuple& q_stride, uintptr_t k,
                                        const py::tuple& k_stride, uintptr_t v,
                                        const py::tuple& v_stride, uintptr_t out,
                                        const py::tuple& out_stride, uintptr_t lse) {
  AttentionParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.threads = threads;
  int64_t n[7];
  integers(sizes, n);
  p.B = n[0], p.Hq = n[1], p.Hkv = n[2], p.Lq = n[3], p.Lk = n[4], p.D = n[5], p.Dv = n[6];
  if (p.Hq > 0) expect_multiple(p.Hkv, p.Hq, "the number of heads of key");
  p.reduced = reduces(p, may_reduce);
  p.q = operand(q, q_stride);
  p.k = operand(k, k_stride);
  p.v = operand(v, v_stride);
  p.out = operand(out, out_stride);
  p.lse = reinterpret_cast<double*>(lse);
  return p;
}

// operands: see read_biases, and seed, those that the call has.
inline void optional_arguments(AttentionParams& p, const py::object& operands) {
  using P = AttentionParams;
  static const auto seed = std::make_tuple(field("seed", &P::seed));
  const Named given = named(operands);
  read_biases(given, p);
  given.read_given(p, seed);
}

}  // namespace fastattn
