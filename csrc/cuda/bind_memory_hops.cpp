// Memory hops on a GPU, and Hopfield retrieval, which uses the same kernels, as Python calls them:
// tensors in, tensors out.
#include "../memory_hops_arguments.h"
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// The arguments of a call, and what they point to.
struct Hops : HopsArguments, HopCall {
  py::object partial_owner, scores_owner;
};

struct Retrieval : HopsArguments, RetrievalCall {
  py::object scores_owner, taken_copy, trace_copies[3];
};

// What the kernels derive from arguments that are read.
void set_hops(HopsArguments& p) {
  p.slots = p.K + (p.stack ? 1 : 0);
  p.scale_float = static_cast<float>(p.scale);
}

bool is_split(const HopsArguments& p) { return p.N > kHopRowsOfBlock; }

// The partial results of the splits of a long memory; without them one block takes a whole query.
void split(Hops& p) {
  if (!is_split(p)) return;
  p.splits = static_cast<int>((p.N + kHopRowsOfSplit - 1) / kHopRowsOfSplit);
  p.partial_owner = new_floats({p.B * p.Q, p.splits, p.D + 2}, &p.partial);
}

void read_hops(Hops& p, const py::object& options, const HopTensors& from) {
  read_hop_call(p, p, options, from);
  set_hops(p);
  split(p);
}

bool rows_are_aligned(const HopsArguments& p) {
  const int64_t bytes = element_bytes(p.dtype);
  return p.D * bytes % 16 == 0 && is_aligned(p.in_memory, bytes) &&
         is_aligned(p.out_memory, bytes) && (p.proj.data == nullptr || is_aligned(p.proj, bytes));
}

// (out, trace, stats, weights or None), new.
py::tuple hop(uintptr_t stream, const py::object& options, py::handle query, py::handle in_memory,
              py::handle out_memory, py::handle hop_proj, py::handle memory_mask,
              py::handle memory_bias) {
  Hops p{};
  read_hops(p, options, {query, in_memory, out_memory, hop_proj, memory_mask, memory_bias});
  const py::object out = new_contiguous_like(query, &p.out),
                   trace = new_rows_of(new_result, p, p, DType::f32, 2 * p.K + 1, p.D, &p.trace),
                   stats = new_rows_of(new_result, p, p, DType::f32, p.K, 2, &p.stats);
  py::object weights = py::none();
  if (p.returns_weights) weights = new_rows_of(new_result, p, p, p.dtype, p.K, p.N, &p.weights);
  if (is_split(p)) {
    trace.attr("select")(-2, 0).attr("copy_")(query);
    if (p.returns_weights) p.scores_owner = new_floats({p.B, p.Q, p.N}, &p.scores);
  }
  with_element(p.dtype, [&](auto* element) {
    memory_hops_forward(element, p, rows_are_aligned(p), stream);
  });
  return py::make_tuple(out, trace, stats, weights);
}

// The terms of the gradients of memories, [2, B, Q, slots, N] and [2, B, Q, slots, D].
py::tuple new_terms(HopsArguments& p) {
  const py::object xs = new_floats({2, p.B, p.Q, p.slots, p.N}, &p.xs),
                   ys = new_floats({2, p.B, p.Q, p.slots, p.D}, &p.ys);
  if (p.stack)  // the first memory is never an output memory, the last one never an input memory
    for (const py::object& x : {xs, ys}) {
      x.attr("select")(0, 0).attr("select")(2, p.K).attr("zero_")();
      x.attr("select")(0, 1).attr("select")(2, 0).attr("zero_")();
    }
  return py::make_tuple(xs, ys);
}

// The kernels write nothing without queries.
void zero_without_queries(const HopsArguments& p, std::initializer_list<py::object> results) {
  if (p.B * p.Q != 0) return;
  for (const py::object& x : results)
    if (!x.is_none()) x.attr("zero_")();
}

// The gradients of query, in_memory, out_memory and hop_proj, None where the options do not ask for
// them; and those of the scores, [2, B, Q, slots, N], of which the first are wanted. New.
py::tuple hop_gradients(uintptr_t stream, const py::object& options, py::handle grad_out,
                        py::handle grad_weights, py::handle query, py::handle in_memory,
                        py::handle out_memory, py::handle hop_proj, py::handle memory_mask,
                        py::handle memory_bias, py::handle trace, py::handle stats) {
  Hops p{};
  read_hops(p, options, {query, in_memory, out_memory, hop_proj, memory_mask, memory_bias});
  const HopResults results{grad_out, grad_weights, trace, stats};
  read_trace_and_stats(p, p, results);
  read_hop_gradients(p, p, options, results);
  py::object of_in = py::none(), of_out = py::none(), of_proj = py::none();
  const py::object of_query = new_contiguous_like(query, &p.grad_query);
  if (p.needed & 2) of_in = new_contiguous_like(in_memory, &p.grad_in);
  if (p.needed & 4 && !out_memory.is_none())
    of_out = new_contiguous_like(out_memory, &p.grad_out_memory);
  if (p.needed & 8 && !hop_proj.is_none()) of_proj = new_contiguous_like(hop_proj, &p.grad_proj);
  p.in_of_batch = p.memories[0].size[0] == 1;
  p.out_of_batch = !out_memory.is_none() && p.memories[1].size[0] == 1;
  const py::tuple terms = new_terms(p);
  zero_without_queries(p, {terms[0], terms[1], of_query, of_in, of_out, of_proj});
  with_element(p.dtype, [&](auto* element) {
    memory_hops_backward(element, p, rows_are_aligned(p), stream);
  });
  return py::make_tuple(of_query, of_in, of_out, of_proj, terms[0]);
}

void read_patterns(Retrieval& p, const py::object& options, const Patterns& from, bool search,
                   int64_t steps) {
  read_retrieval(p, p, options, from, search);
  p.K = search ? p.steps_max : steps;
  set_hops(p);
  // Of scores that do not fit in shared memory.
  if (is_split(p)) p.scores_owner = new_floats({p.B, p.Q, 2, p.N}, &p.scores);
}

void read_taken(Retrieval& p, py::handle taken) {
  p.taken = static_cast<int64_t*>(read_flat("taken", taken, kInt64, {p.B, p.Q}, &p.taken_copy));
}

// (xi, taken, the last two states [G, Q, 2, D]), new. Queries that stop together are neighbours; a
// negative steps_max is no limit.
py::tuple retrieve(uintptr_t stream, const py::object& options, py::handle state, py::handle stored,
                   py::handle keys, py::handle mask, py::handle bias) {
  Retrieval p{};
  read_patterns(p, options, {state, stored, keys, mask, bias}, true, 0);
  void* data;
  const py::object xi = new_contiguous_like(state, &p.out),
                   ends = new_result(DType::f32, {p.B, p.Q, 2, p.D}, &p.trace),
                   taken = new_result(kInt64, {p.B, p.Q}, &data);
  p.taken = static_cast<int64_t*>(data);
  with_element(p.dtype,
               [&](auto* element) { hopfield_search(element, p, rows_are_aligned(p), stream); });
  return py::make_tuple(xi, taken, ends);
}

// (states [G, Q, 2 most + 1, D], stats [G, Q, most, 2]), new: each query takes its own steps again.
py::tuple take_steps(uintptr_t stream, const py::object& options, py::handle state,
                     py::handle stored, py::handle keys, py::handle mask, py::handle bias,
                     py::handle taken, int64_t most) {
  Retrieval p{};
  read_patterns(p, options, {state, stored, keys, mask, bias}, false, most);
  read_taken(p, taken);
  const py::object xi = new_contiguous_like(state, &p.out),
                   trace = new_result(DType::f32, {p.B, p.Q, 2 * p.K + 1, p.D}, &p.trace),
                   stats = new_result(DType::f32, {p.B, p.Q, p.K, 2}, &p.stats);
  with_element(p.dtype, [&](auto* element) {
    memory_hops_forward(element, p, rows_are_aligned(p), stream);
  });
  return py::make_tuple(trace, stats);
}

// The gradients of state, of what it is compared with, of stored if that is another, and of the scores,
// [2, G, Q, most, N], of which the first are wanted. New; None where `needs_memories` is false.
py::tuple step_gradients(uintptr_t stream, const py::object& options, py::handle grad_xi,
                         py::handle state, py::handle stored, py::handle keys, py::handle mask,
                         py::handle bias, py::handle taken, py::handle trace, py::handle stats,
                         int64_t most, bool needs_memories) {
  Retrieval p{};
  read_patterns(p, options, {state, stored, keys, mask, bias}, false, most);
  read_taken(p, taken);
  p.trace = read_flat("trace", trace, DType::f32, {p.B, p.Q, 2 * p.K + 1, p.D}, &p.trace_copies[0]);
  p.stats = read_flat("stats", stats, DType::f32, {p.B, p.Q, p.K, 2}, &p.trace_copies[1]);
  const TensorView g = read_sizes("grad_xi", grad_xi, p.dtype, {p.B, p.Q, p.D});
  p.grad_out = {g.data, {g.stride[0], g.stride[1], 0, g.stride[2]}};
  py::object of_compared = py::none(), of_stored = py::none();
  const py::object of_state = new_contiguous_like(state, &p.grad_query);
  if (needs_memories) {
    of_compared = new_contiguous_like(keys.is_none() ? stored : keys, &p.grad_in);
    if (!keys.is_none()) of_stored = new_contiguous_like(stored, &p.grad_out_memory);
  }
  p.in_of_batch = p.out_of_batch = p.B == 1;
  const py::tuple terms = new_terms(p);
  zero_without_queries(p, {terms[0], terms[1], of_state, of_compared, of_stored});
  with_element(p.dtype, [&](auto* element) {
    memory_hops_backward(element, p, rows_are_aligned(p), stream);
  });
  return py::make_tuple(of_state, of_compared, of_stored, terms[0]);
}

}  // namespace

void bind_memory_hops(py::module_& m) {
  define(m, "memory_hops", &hop);
  define(m, "memory_hops_backward", &hop_gradients);
  define(m, "hopfield_retrieve", &retrieve);
  define(m, "hopfield_steps", &take_steps);
  define(m, "hopfield_backward", &step_gradients);
  m.attr("max_hop_width") = kMaxHopWidth;
}

}  // namespace cuda
}  // namespace fastattn
