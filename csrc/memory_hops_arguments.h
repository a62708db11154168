// Reading the tensors of memory hops and of Hopfield retrieval, for the bindings of both modules.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <tuple>

#include "arguments.h"
#include "operands.h"
#include "options.h"

namespace fastattn {

// The tensors as they are; rank 0 = none.
struct HopOperands {
  TensorView query;       // [B, D] or [B, Q, D]
  TensorView in_memory;   // [B, N, D] or [B, K, N, D], the same in every hop or one a hop
  TensorView out_memory;  // as in_memory; none = the next memory of a stack, or in_memory itself
  TensorView hop_proj;    // [D, D] or [K, D, D]
};

inline Tensor4 per_hop(const TensorView& memory) {
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

// The tensors of a call; those from out_memory on may be None.
struct HopTensors {
  py::handle query, in_memory, out_memory, hop_proj, memory_mask, memory_bias;
};

// What a call has beside the arguments of its kernel, and the copies that they point to.
struct HopCall {
  bool has_queries = false;    // query has Q
  bool is_one_memory = false;  // both memories have one entry
  bool returns_weights = false;
  int64_t needed = 0;      // bits of the gradients to compute
  TensorView memories[2];  // in and out, as the kernel reads them
  py::object copies[5];
};

// The tensor, or a copy whose columns are contiguous; of a batch that shares one memory, only that
// memory is copied.
inline TensorView with_rows(const char* name, py::handle from, py::object* copy) {
  TensorView x = view_of(name, from);
  const int last = x.rank - 1;
  if (last < 0 || x.stride[last] == 1 || x.size[last] <= 1) return x;
  const bool shares = x.rank > 2 && x.stride[0] == 0;
  *copy = shares ? contiguous(from.attr("narrow")(0, 0, 1)) : contiguous(from);
  TensorView made = view_of(name, *copy);
  if (shares) made.size[0] = x.size[0], made.stride[0] = 0;
  return made;
}

// [B|1, N, D], or [B|1, slots, N, D] with one for each hop.
inline TensorView read_memory(const char* name, py::handle from, int64_t slots,
                              const MemoryHopsParams& p, py::object* copy) {
  TensorView x = with_rows(name, from, copy);
  const int64_t entries = x.size[0] == 1 ? 1 : p.B;
  if (x.rank == 4)
    expect_sizes(name, x, p.dtype, {entries, slots, p.N, p.D});
  else
    expect_sizes(name, x, p.dtype, {entries, p.N, p.D});
  if (entries == 1) x.stride[0] = 0;
  return x;
}

inline TensorView read_projection(py::handle from, const MemoryHopsParams& p, py::object* copy) {
  const TensorView x = with_rows("hop_proj", from, copy);
  if (x.rank == 3)
    expect_sizes("hop_proj", x, p.dtype, {p.K, p.D, p.D});
  else
    expect_sizes("hop_proj", x, p.dtype, {p.D, p.D});
  return x;
}

// A mask or a bias [N], [B, N], [B, Q, N] (of a query without Q: [B, K, N]) or [B, Q, K, N]; any size may
// be 1 instead.
inline TensorView read_per_hop(const char* name, py::handle from, const MemoryHopsParams& p,
                               const HopCall& call, Tensor4* to) {
  const TensorView x = view_of(name, from);
  int64_t s[4];
  if (x.rank == 4) {
    read_broadcast(name, from, {p.B, p.Q, p.K, p.N}, s);
    *to = {x.data, {s[0], s[1], s[2], s[3]}};
  } else if (x.rank == 3 && call.has_queries) {
    read_broadcast(name, from, {p.B, p.Q, p.N}, s);
    *to = {x.data, {s[0], s[1], 0, s[2]}};
  } else if (x.rank == 3) {
    read_broadcast(name, from, {p.B, p.K, p.N}, s);
    *to = {x.data, {s[0], 0, s[1], s[2]}};
  } else if (x.rank == 2) {
    read_broadcast(name, from, {p.B, p.N}, s);
    *to = {x.data, {s[0], 0, 0, s[1]}};
  } else {
    read_broadcast(name, from, {p.N}, s);
    *to = {x.data, {0, 0, 0, s[0]}};
  }
  return x;
}

// Fills everything but `shared`.
inline void read_hop_call(MemoryHopsParams& p, HopCall& call, const py::object& options,
                          const HopTensors& from) {
  static const auto of_kernel = std::make_tuple(field("hops", &MemoryHopsParams::K));
  static const auto of_call = std::make_tuple(field("weights", &HopCall::returns_weights));
  read_memory_hop_options(Named(options), p);
  Named(options).read(p, of_kernel);
  Named(options).read(call, of_call);
  expect(p.K >= 1, "fastattn: hops must be at least 1");
  const TensorView q = view_of("query", from.query);
  expect_dtype("query", q, kFloats);
  call.has_queries = q.rank == 3;
  p.dtype = q.dtype;
  p.B = q.size[0], p.Q = call.has_queries ? q.size[1] : 1;
  p.D = q.size[call.has_queries ? 2 : 1];
  if (!call.has_queries) expect_sizes("query", q, p.dtype, {p.B, p.D});
  const bool stacks = from.out_memory.is_none();
  const TensorView rows = view_of("in_memory", from.in_memory);
  p.N = rows.size[rows.rank == 4 ? 2 : 1];
  TensorView& m = call.memories[0];
  TensorView& c = call.memories[1];
  m = read_memory("in_memory", from.in_memory, p.K + stacks, p, &call.copies[0]);
  c = stacks ? m : read_memory("out_memory", from.out_memory, p.K, p, &call.copies[1]);
  call.is_one_memory = m.size[0] == 1 && c.size[0] == 1;
  HopOperands x{q, m, {}, {}};
  if (!stacks) x.out_memory = c;
  if (!from.hop_proj.is_none()) x.hop_proj = read_projection(from.hop_proj, p, &call.copies[2]);
  place_hops(x, p);
  if (!from.memory_mask.is_none()) {
    const TensorView mask = read_per_hop("memory_mask", from.memory_mask, p, call, &p.mask);
    expect_dtype("memory_mask", mask, {DType::boolean});
  }
  if (!from.memory_bias.is_none()) {
    const TensorView bias = read_per_hop("memory_bias", from.memory_bias, p, call, &p.bias);
    expect_dtype("memory_bias", bias, {p.dtype, DType::f32});
    p.bias_dtype = bias.dtype;
  }
}

// What a backward pass is given besides the tensors of the call.
struct HopResults {
  py::handle grad_out, grad_weights, trace, stats;
};

// Rows of each query, contiguous.
inline void* read_results(const char* name, py::handle from, DType dtype, int64_t rows,
                          int64_t columns, const MemoryHopsParams& p, const HopCall& call,
                          py::object* copy) {
  TensorView x = view_of(name, from);
  // The gradients of a batch of calls share one, with stride 0.
  if (!x.is_contiguous()) x = view_of(name, *copy = contiguous(from));
  if (call.has_queries)
    expect_sizes(name, x, dtype, {p.B, p.Q, rows, columns});
  else
    expect_sizes(name, x, dtype, {p.B, rows, columns});
  return x.data;
}

inline void read_trace_and_stats(MemoryHopsParams& p, HopCall& call, const HopResults& from) {
  const DType wide = accumulator(p.dtype);
  p.trace = read_results("trace", from.trace, wide, 2 * p.K + 1, p.D, p, call, &call.copies[3]);
  p.stats = read_results("stats", from.stats, wide, p.K, 2, p, call, &call.copies[4]);
}

// The gradients of both outputs, and which gradients are needed.
inline void read_hop_gradients(MemoryHopsParams& p, HopCall& call, const py::object& options,
                               const HopResults& from) {
  static const auto fields = std::make_tuple(field("needed", &HopCall::needed));
  Named(options).read(call, fields);
  if (!from.grad_out.is_none()) {
    const TensorView x = call.has_queries
                             ? read_sizes("grad_out", from.grad_out, p.dtype, {p.B, p.Q, p.D})
                             : read_sizes("grad_out", from.grad_out, p.dtype, {p.B, p.D});
    const int64_t* s = x.stride;
    p.grad_out = {x.data, {s[0], call.has_queries ? s[1] : 0, 0, s[x.rank - 1]}};
  }
  if (!from.grad_weights.is_none() && call.returns_weights) {
    const auto read = [&](Sizes sizes) {
      return read_sizes("grad_weights", from.grad_weights, p.dtype, sizes);
    };
    const TensorView x = call.has_queries ? read({p.B, p.Q, p.K, p.N}) : read({p.B, p.K, p.N});
    const int64_t* s = x.stride;
    if (call.has_queries)
      p.grad_weights = operand_of(x);
    else
      p.grad_weights = {x.data, {s[0], 0, s[1], s[2]}};
  }
}

// A tensor with rows of each query, by `make`: new_result or new_buffer.
template <class Make>
py::object new_rows_of(Make make, const MemoryHopsParams& p, const HopCall& call, DType dtype,
                       int64_t rows, int64_t columns, void** data) {
  return call.has_queries ? make(dtype, {p.B, p.Q, rows, columns}, data)
                          : make(dtype, {p.B, rows, columns}, data);
}

// -- Hopfield retrieval: hops without the old state, u' = o ------------------------------------------

// The tensors of a call. G groups are B, or B H, and the patterns of a group are its own.
struct Patterns {
  py::handle state;       // [G, Q, D] or [B, H, Q, D]
  py::handle stored;      // [G, N, D] or [B, H, N, D]
  py::handle keys;        // as stored, or None: stored
  py::handle mask, bias;  // [G|1, Q|1, N|1] or None
};

// What a call has beside the arguments of its kernel, and the copies that they point to.
struct RetrievalCall {
  int64_t steps_max = 0;
  py::object copies[3];  // of state, stored and keys

  // The nth of state, stored and keys: its copy where there is one, whose memory order is that of results.
  py::handle read(int n, py::handle given) const {
    return copies[n] ? py::handle(copies[n]) : given;
  }
};

// Three dimensions, of which four dimensions' first two are one: of a copy, which `copy` owns, if no
// stride steps through both, or if columns that have to be contiguous are not.
inline TensorView read_groups(const char* name, py::handle from, bool needs_rows,
                              py::object* copy) {
  TensorView x = view_of(name, from);
  const auto fits = [&] {
    const int last = x.rank - 1;
    return (x.rank != 4 || x.size[0] <= 1 || x.size[1] <= 1 ||
            x.stride[0] == x.size[1] * x.stride[1]) &&
           (!needs_rows || last < 0 || x.size[last] <= 1 || x.stride[last] == 1);
  };
  if (!fits()) x = view_of(name, *copy = contiguous(from));
  if (x.rank != 4) return x;
  const int64_t groups = x.size[0] * x.size[1], step = x.stride[x.size[1] > 1 ? 1 : 0];
  return {x.data, x.dtype, 3, {groups, x.size[2], x.size[3]}, {step, x.stride[2], x.stride[3]}};
}

inline void read_step_biases(MemoryHopsParams& p, const Patterns& from) {
  const auto read = [&](const char* name, py::handle x, Tensor4* to) {
    int64_t s[3];
    const TensorView view = read_broadcast(name, x, {p.B, p.Q, p.N}, s);
    *to = {view.data, {s[0], s[1], 0, s[2]}};
    return view;
  };
  if (!from.mask.is_none())
    expect_dtype("mask", read("mask", from.mask, &p.mask), {DType::boolean});
  if (!from.bias.is_none()) {
    const TensorView x = read("bias", from.bias, &p.bias);
    expect_dtype("bias", x, kFloats);
    p.bias_dtype = x.dtype;
  }
}

// A search, or steps of it again; fills everything but the number of steps.
inline void read_retrieval(MemoryHopsParams& p, RetrievalCall& call, const py::object& options,
                           const Patterns& from, bool search) {
  static const auto limits = std::make_tuple(field("steps_max", &RetrievalCall::steps_max));
  HopfieldOptions asked;
  read_hopfield_options(Named(options), asked);
  Named(options).read(call, limits);
  const TensorView state = read_groups("state", from.state, false, &call.copies[0]),
                   stored = read_groups("stored", from.stored, true, &call.copies[1]);
  expect_dtype("state", state, kFloats);
  p.dtype = state.dtype;
  p.B = state.size[0], p.Q = state.size[1], p.D = state.size[2], p.N = stored.size[1];
  expect_sizes("state", state, p.dtype, {p.B, p.Q, p.D});  // of three dimensions
  expect_sizes("stored", stored, p.dtype, {p.B, p.N, p.D});
  HopOperands x{state, stored, {}, {}};
  if (!from.keys.is_none()) {
    x.in_memory = read_groups("keys", from.keys, true, &call.copies[2]);
    expect_sizes("keys", x.in_memory, p.dtype, {p.B, p.N, p.D});
    x.out_memory = stored;
  }
  place_hops(x, p);
  read_step_biases(p, from);
  expect_multiple(asked.together, p.Q, "together");
  p.shared = p.B == 1;
  p.settles = true, p.search = search;
  p.scale = asked.scale, p.crowded = asked.crowded;
  p.together = search ? asked.together : 1;
  p.eps = search ? asked.eps : 0;
}

}  // namespace fastattn
