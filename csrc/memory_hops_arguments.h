// Reading the arguments of memory hops, which Hopfield retrieval shares.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

#include "arguments.h"
#include "options.h"

namespace fastattn {

// What Python passes as it is; rank 0 = none.
struct HopOperands {
  Strided query;       // [B, D] or [B, Q, D]
  Strided in_memory;   // [B, N, D] or [B, K, N, D], the same in every hop or one a hop
  Strided out_memory;  // as in_memory; none = the next memory of a stack, or in_memory itself
  Strided hop_proj;    // [D, D] or [K, D, D]
};

inline Tensor4 per_hop(const Strided& memory) {
  const auto& s = memory.stride;
  if (memory.rank == 4) return {memory.data, {s[0], s[1], s[2], 1}};
  return {memory.data, {s[0], 0, s[1], 1}};
}

// Their columns are contiguous, except in query; p has the sizes and the dtype.
inline void place_hops(const HopOperands& x, MemoryHopsParams& p) {
  const auto& q = x.query.stride;
  p.query = {x.query.data, {q[0], x.query.rank == 3 ? q[1] : 0, 0, q[x.query.rank == 3 ? 2 : 1]}};
  p.in_memory = per_hop(x.in_memory);
  p.in_slots = p.out_slots = p.proj_slots = 1;
  if (x.in_memory.rank == 4) p.in_slots = p.K;
  if (x.out_memory.rank != 0) {
    p.out_memory = per_hop(x.out_memory);
    if (x.out_memory.rank == 4) p.out_slots = p.K;
  } else {
    p.stack = x.in_memory.rank == 4;
    p.same_rows = !p.stack;
    p.in_slots += p.stack;
    p.out_memory = p.in_memory;
    if (p.in_memory.data != nullptr)
      p.out_memory.data =
          static_cast<char*>(p.in_memory.data) + p.in_memory.stride[1] * element_bytes(p.dtype);
  }
  const auto& h = x.hop_proj.stride;
  if (x.hop_proj.rank == 2) p.proj = {x.hop_proj.data, {0, 0, h[0], 1}};
  if (x.hop_proj.rank == 3) {
    p.proj = {x.hop_proj.data, {0, h[0], h[1], 1}};
    p.proj_slots = p.K;
  }
}

// sizes: B, Q, K, N, D. operands: those above, and the addresses of trace and stats.
inline void read_hops(const Named& operands, int dtype, const pybind11::tuple& sizes,
                      MemoryHopsParams& p) {
  using O = HopOperands;
  using P = MemoryHopsParams;
  static const auto given =
      std::make_tuple(field("query", &O::query), field("in_memory", &O::in_memory),
                      field("out_memory", &O::out_memory), field("hop_proj", &O::hop_proj));
  static const auto states = std::make_tuple(field("trace", &P::trace), field("stats", &P::stats));
  O x;
  operands.read(x, given);
  operands.read(p, states);
  p.dtype = static_cast<DType>(dtype);
  int64_t n[5];
  integers(sizes, n);
  p.B = n[0], p.Q = n[1], p.K = n[2], p.N = n[3], p.D = n[4];
  place_hops(x, p);
}

inline void read_hop_biases(const Named& from, MemoryHopsParams& to) {
  using P = MemoryHopsParams;
  static const auto fields = std::make_tuple(field("mask", &P::mask), field("bias", &P::bias),
                                             field("bias_dtype", &P::bias_dtype));
  from.read(to, fields);
}

inline void read_hop_results(const Named& from, MemoryHopsParams& to) {
  using P = MemoryHopsParams;
  static const auto fields = std::make_tuple(field("out", &P::out), field("weights", &P::weights));
  from.read(to, fields);
}

// The inputs and the results of the backward pass.
inline void read_hop_gradients(const Named& from, MemoryHopsParams& to) {
  using P = MemoryHopsParams;
  static const auto fields = std::make_tuple(
      field("grad_out", &P::grad_out), field("grad_weights", &P::grad_weights),
      field("grad_query", &P::grad_query), field("grad_in", &P::grad_in),
      field("grad_out_memory", &P::grad_out_memory), field("grad_proj", &P::grad_proj));
  from.read(to, fields);
}

}  // namespace fastattn
