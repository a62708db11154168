// Reading the tensors of memory hops and of Hopfield retrieval, for the bindings of both modules.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

#include "function.h"
#include "options.h"

namespace fastattn {

// Permutes a tensor by `three` if it has three dimensions, else by `others`, see permuted(); an
// absent tensor stays without data.
inline Tensor4 placed(const TensorView& x, const char* three, const char* others) {
  if (x.rank == 0) return {};
  return operand_of(permuted("an operand", x, x.rank == 3 ? three : others));
}

// Memories [B, N, D], the same in every hop, or [B, K, N, D], one per hop, with contiguous columns.
// Without `out`, the output memory is the next memory of a stack, or `in` itself. p already has the
// sizes and the dtype.
inline void place_memories(const TensorView& in, const TensorView* out, MemoryHopsParams& p) {
  p.in_memory = placed(in, "0.12", "0123");
  p.in_slots = in.rank == 4 ? p.K : 1;
  p.out_slots = out != nullptr && out->rank == 4 ? p.K : 1;
  p.proj_slots = 1;
  if (out != nullptr) {
    p.out_memory = placed(*out, "0.12", "0123");
    return;
  }
  p.stack = in.rank == 4;
  p.same_rows = !p.stack;
  p.in_slots += p.stack;
  p.out_memory = p.in_memory;
  if (p.in_memory.data != nullptr)
    p.out_memory.data =
        static_cast<char*>(p.in_memory.data) + p.in_memory.stride[1] * element_bytes(p.dtype);
}

struct HopTensors {
  // out_memory and all tensors after it may be None.
  FASTATTN_TENSORS(query, in_memory, out_memory, hop_proj, memory_mask, memory_bias)
};

struct HopGradTensors {
  // On the CPU, `kept` holds the weights that the forward pass kept, or None.
  FASTATTN_TENSORS(grad_out, grad_weights, query, in_memory, out_memory, hop_proj, memory_mask,
                   memory_bias, trace, stats, kept)
};

// The part of a call that is not a kernel argument, and the copies that own kernel arguments.
struct HopCall {
  int64_t queries = kLeftOut;  // Q, if query has it
  bool is_one_memory = false;  // both memories have one entry
  bool returns_weights = false;
  int64_t needed = 0;      // bits of the gradients to compute
  TensorView memories[2];  // in and out, as the kernel reads them
  py::object copies[5];
};

// Reads a memory [B|1, N, D], or a stack [B|1, slots, N, D] with one memory for each hop. A shared
// memory gets the batch stride 0. If the columns are not contiguous, `copy` owns a copy.
inline TensorView read_memory(const char* name, py::handle from, int64_t slots,
                              const MemoryHopsParams& p, py::object* copy) {
  TensorView x = with_rows(name, from, copy);
  const int64_t entries = x.size[0] == 1 ? 1 : p.B;
  expect_sizes(name, x, p.dtype, {entries, x.rank == 4 ? slots : kLeftOut, p.N, p.D});
  if (entries == 1) x.stride[0] = 0;
  return x;
}

// Reads the projection [D, D], or [K, D, D] with one for each hop.
inline void read_projection(py::handle from, MemoryHopsParams& p, py::object* copy) {
  const TensorView x = with_rows("hop_proj", from, copy);
  expect_sizes("hop_proj", x, p.dtype, {x.rank == 3 ? p.K : kLeftOut, p.D, p.D});
  p.proj = placed(x, ".012", "..01");
  if (x.rank == 3) p.proj_slots = p.K;
}

// A mask or a bias [N], [B, N], [B, Q, N] (for a query without Q: [B, K, N]) or [B, Q, K, N]; any
// size may be 1 instead.
inline DType read_per_hop(const char* name, py::handle from, std::initializer_list<DType> allowed,
                          const MemoryHopsParams& p, const HopCall& call, Tensor4* to) {
  if (from.is_none()) return p.dtype;
  const TensorView x = view_of(name, from);
  const char* const order = x.rank == 1                ? "...0"
                            : x.rank == 2              ? "0..1"
                            : x.rank == 4              ? "0123"
                            : call.queries != kLeftOut ? "01.2"
                                                       : "0.12";
  expect_broadcast(name, permuted(name, x, order), {p.B, p.Q, p.K, p.N}, to->stride);
  expect_dtype(name, x, allowed);
  to->data = x.data;
  return x.dtype;
}

// Fills everything but `shared`.
template <class Tensors>
void read_hop_call(MemoryHopsParams& p, HopCall& call, py::handle options, const Tensors& from) {
  using O = MemoryHopsParams;
  const Named record(options);
  record.read_choice<&O::activation>("activation", p, {"none", "relu", "tanh", "sigmoid"});
  record.read_choice<&O::normalize>("normalize", p, {"none", "softmax"});
  record.read<&O::scale>("scale", p);
  record.read<&O::K>("hops", p);
  record.read<&HopCall::returns_weights>("weights", call);
  expect(p.K >= 1, "fastattn: hops must be at least 1");
  const TensorView q = view_of("query", from.query);
  expect_dtype("query", q, kFloats);
  const bool has_queries = q.rank == 3;
  if (has_queries) call.queries = q.size[1];
  p.dtype = q.dtype;
  p.B = q.size[0], p.Q = has_queries ? call.queries : 1, p.D = q.size[has_queries ? 2 : 1];
  expect_sizes("query", q, p.dtype, {p.B, call.queries, p.D});
  const bool stacks = from.out_memory.is_none();
  const TensorView rows = view_of("in_memory", from.in_memory);
  p.N = rows.size[rows.rank == 4 ? 2 : 1];
  TensorView& m = call.memories[0];
  TensorView& c = call.memories[1];
  m = read_memory("in_memory", from.in_memory, p.K + stacks, p, &call.copies[0]);
  c = stacks ? m : read_memory("out_memory", from.out_memory, p.K, p, &call.copies[1]);
  call.is_one_memory = m.size[0] == 1 && c.size[0] == 1;
  p.query = placed(q, "01.2", "0..1");
  place_memories(m, stacks ? nullptr : &c, p);
  if (!from.hop_proj.is_none()) read_projection(from.hop_proj, p, &call.copies[2]);
  read_per_hop("memory_mask", from.memory_mask, {DType::boolean}, p, call, &p.mask);
  p.bias_dtype =
      read_per_hop("memory_bias", from.memory_bias, {p.dtype, DType::f32}, p, call, &p.bias);
}

// Rows of each query, contiguous.
inline void* read_results(const char* name, py::handle from, DType dtype, int64_t rows,
                          int64_t columns, const MemoryHopsParams& p, const HopCall& call,
                          py::object* copy) {
  TensorView x = view_of(name, from);
  // The gradients of a batch of calls share one, with stride 0.
  if (!x.is_contiguous()) x = view_of(name, *copy = contiguous(from));
  expect_sizes(name, x, dtype, {p.B, call.queries, rows, columns});
  return x.data;
}

// Reads what the forward pass returned for the backward pass.
inline void read_trace_and_stats(MemoryHopsParams& p, HopCall& call, const HopGradTensors& from) {
  const DType wide = accumulator(p.dtype);
  p.trace = read_results("trace", from.trace, wide, 2 * p.K + 1, p.D, p, call, &call.copies[3]);
  p.stats = read_results("stats", from.stats, wide, p.K, 2, p, call, &call.copies[4]);
}

// The gradients of both outputs, and which gradients are needed.
inline void read_hop_gradients(MemoryHopsParams& p, HopCall& call, py::handle options,
                               const HopGradTensors& from) {
  call.needed = Named(options).read<int64_t>("needed");
  const auto read = [&](const char* name, py::handle x, const Sizes& sizes) {
    return read_if_given(name, x, p.dtype, sizes);
  };
  p.grad_out = placed(read("grad_out", from.grad_out, {p.B, call.queries, p.D}), "01.2", "0..1");
  if (call.returns_weights)
    p.grad_weights = placed(read("grad_weights", from.grad_weights, {p.B, call.queries, p.K, p.N}),
                            "0.12", "0123");
}

// Allocates the gradients of query, in_memory, out_memory and hop_proj where `needed` asks for
// them; the others, and memory_bias, are None. `new_memory(n, memory, data)` allocates the gradient
// of a memory.
template <class New>
py::tuple new_hop_gradients(MemoryHopsParams& p, const HopCall& call, const HopGradTensors& of,
                            New new_memory) {
  py::tuple made = no_results(5);
  made[0] = new_contiguous_like(of.query, &p.grad_query);
  if (call.needed & 2) made[1] = new_memory(0, of.in_memory, &p.grad_in);
  if (call.needed & 4 && !of.out_memory.is_none())
    made[2] = new_memory(1, of.out_memory, &p.grad_out_memory);
  if (call.needed & 8 && !of.hop_proj.is_none())
    made[3] = new_contiguous_like(of.hop_proj, &p.grad_proj);
  return made;
}

// The kernels write nothing without queries.
inline void zero_without_queries(const MemoryHopsParams& p, py::handle results) {
  if (p.B * p.Q != 0) return;
  for (const py::handle x : results)
    if (!x.is_none()) x.attr("zero_")();
}

// -- Hopfield retrieval: hops without the old state, u' = o
// ------------------------------------------

// G groups are B, or B H; each group has its own patterns.
struct Patterns {
  // [G, Q, D] or [B, H, Q, D]; [G, N, D] or [B, H, N, D]; as stored, or None: stored; two of [G|1,
  // Q|1, N|1] or None
  FASTATTN_TENSORS(state, stored, keys, mask, bias)
};

struct StepTensors {
  FASTATTN_TENSORS(state, stored, keys, mask, bias, taken)  // [G, Q] or [B, H, Q]
};

struct StepGradTensors {
  FASTATTN_TENSORS(grad_xi, state, stored, keys, mask, bias, taken, trace, stats)
};

// The part of a call that is not a kernel argument, and the copies that own kernel arguments.
struct RetrievalCall {
  int64_t steps_max = 0;
  py::object copies[3];  // of state, stored and keys

  // The nth of state, stored and keys, or its copy; results get the memory order of this tensor.
  py::handle read(int n, py::handle given) const {
    return copies[n] ? py::handle(copies[n]) : given;
  }
};

// A view with three dimensions; the first two of four dimensions are merged. It views `copy` if no
// stride steps through both, or if columns must be contiguous and are not.
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

// Reads the mask and the bias of a retrieval, which are the same in all steps: [G|1, Q|1, N|1].
template <class Tensors>
void read_step_biases(MemoryHopsParams& p, const Tensors& from) {
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

// Reads the arguments of a search, or of repeated steps; fills all but the number of steps.
template <class Tensors>
void read_retrieval(MemoryHopsParams& p, RetrievalCall& call, py::handle options,
                    const Tensors& from, bool search) {
  using O = MemoryHopsParams;
  const Named record(options);
  record.read<&O::scale>("scale", p);
  record.read<&O::eps>("eps", p);
  record.read<&O::together>("together", p);
  record.read<&O::crowded>("crowded", p);
  record.read<&RetrievalCall::steps_max>("steps_max", call);
  const TensorView state = read_groups("state", from.state, false, &call.copies[0]),
                   stored = read_groups("stored", from.stored, true, &call.copies[1]);
  expect_dtype("state", state, kFloats);
  p.dtype = state.dtype;
  p.B = state.size[0], p.Q = state.size[1], p.D = state.size[2], p.N = stored.size[1];
  expect_sizes("state", state, p.dtype, {p.B, p.Q, p.D});  // of three dimensions
  expect_sizes("stored", stored, p.dtype, {p.B, p.N, p.D});
  p.query = placed(state, "01.2", "0..1");
  if (from.keys.is_none()) {
    place_memories(stored, nullptr, p);
  } else {
    const TensorView keys = read_groups("keys", from.keys, true, &call.copies[2]);
    expect_sizes("keys", keys, p.dtype, {p.B, p.N, p.D});
    place_memories(keys, &stored, p);
  }
  read_step_biases(p, from);
  expect_multiple(p.together, p.Q, "together");
  p.shared = p.B == 1;
  p.settles = true, p.search = search;
  if (!search) p.together = 1, p.eps = 0;
}

constexpr int64_t kOfStored = 2, kOfKeys = 4, kOfBias = 8;  // bits of `needed`

// Allocates the gradients of state, stored and keys: of both memories, if `needed` asks for one.
inline py::tuple new_step_gradients(MemoryHopsParams& p, const RetrievalCall& call,
                                    const StepGradTensors& of, int64_t needed) {
  const bool has_keys = !of.keys.is_none();
  const py::handle stored = call.read(1, of.stored);
  py::tuple made = no_results(4);
  made[0] = new_contiguous_like(call.read(0, of.state), &p.grad_query);
  if ((needed & (has_keys ? kOfStored | kOfKeys : kOfStored)) == 0) return made;
  made[1] = new_contiguous_like(stored, has_keys ? &p.grad_out_memory : &p.grad_in);
  if (has_keys) made[2] = new_contiguous_like(call.read(2, of.keys), &p.grad_in);
  return made;
}

// Drops the gradients that `needed` does not ask for, and adds the gradient of the bias: the sum of
// `scores` [G, Q, K, N] over all steps.
inline py::tuple step_gradients_of(const StepGradTensors& x, py::tuple& made,
                                   const py::object& scores, int64_t needed) {
  if ((needed & kOfStored) == 0) made[1] = none();
  if ((needed & kOfKeys) == 0) made[2] = none();
  if (!scores.is_none())
    made[3] = gradient_of(x.bias.attr("unsqueeze")(2), scores).attr("squeeze")(2);
  return made;
}

}  // namespace fastattn
