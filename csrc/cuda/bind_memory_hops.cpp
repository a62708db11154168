// Memory hops on a GPU, and Hopfield retrieval, which uses the same kernels, as Python calls them:
// tensors in, tensors out.
#include "../memory_hops_arguments.h"
#include "binding.h"

namespace fastattn {
namespace cuda {
namespace {

// The arguments of a call, and the memory that they point to.
struct Hops : HopsArguments, HopCall {
  py::object partial_owner, scores_owner;
};

struct Retrieval : HopsArguments, RetrievalCall {
  py::object scores_owner, taken_copy, trace_copies[2];
};

// Sets the arguments that the host derives for the kernels.
void set_hops(HopsArguments& p) {
  p.slots = p.K + (p.stack ? 1 : 0);
  p.scale_float = static_cast<float>(p.scale);
}

// Whether a memory is so long that several blocks read it.
bool is_split(const HopsArguments& p) { return p.N > kHopRowsOfBlock; }

// Allocates partial results if a long memory is split; otherwise one block takes a whole query.
void split(Hops& p) {
  if (!is_split(p)) return;
  p.splits = static_cast<int>((p.N + kHopRowsOfSplit - 1) / kHopRowsOfSplit);
  p.partial_owner = new_floats({p.B * p.Q, p.splits, p.D + 2}, &p.partial);
}

// Reads a call of memory hops, and divides long memories into splits.
template <class Tensors>
void read_hops(Hops& p, py::handle options, const Tensors& from) {
  read_hop_call(p, p, options, from);
  set_hops(p);
  split(p);
}

bool rows_are_aligned(const HopsArguments& p) {
  return are_aligned(p.dtype, {p.in_memory, p.out_memory, p.proj}, p.D);
}

// Returns (out, trace, stats, weights or None).
py::tuple hop(const HopTensors& x, py::handle options, Stream stream) {
  Hops p{};
  read_hops(p, options, x);
  const py::object out = new_contiguous_like(x.query, &p.out),
                   trace = new_result(DType::f32, {p.B, p.queries, 2 * p.K + 1, p.D}, &p.trace),
                   stats = new_result(DType::f32, {p.B, p.queries, p.K, 2}, &p.stats);
  py::object weights = none();
  if (p.returns_weights) weights = new_result(p.dtype, {p.B, p.queries, p.K, p.N}, &p.weights);
  if (is_split(p)) {
    trace.attr("select")(-2, 0).attr("copy_")(x.query);
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

// The gradient of the scores of all hops, the first of the terms [2, B, Q, slots, N].
py::object of_scores(const py::tuple& terms, const HopsArguments& p) {
  return terms[0].attr("select")(0, 0).attr("narrow")(2, 0, p.K);
}

// Returns the gradients of query, in_memory, out_memory, hop_proj and memory_bias; None where the
// options do not ask for one.
py::tuple hop_gradients(const HopGradTensors& x, py::handle options, Stream stream) {
  Hops p{};
  read_hops(p, options, x);
  read_trace_and_stats(p, p, x);
  read_hop_gradients(p, p, options, x);
  py::tuple made = new_hop_gradients(p, p, x, [](int, py::handle memory, void** data) {
    return new_contiguous_like(memory, data);
  });
  p.in_of_batch = p.memories[0].size[0] == 1;
  p.out_of_batch = !x.out_memory.is_none() && p.memories[1].size[0] == 1;
  const py::tuple terms = new_terms(p);
  zero_without_queries(p, terms), zero_without_queries(p, made);
  with_element(p.dtype, [&](auto* element) {
    memory_hops_backward(element, p, rows_are_aligned(p), stream);
  });
  if (p.needed & 16 && !x.memory_bias.is_none())
    made[4] = gradient_of(x.memory_bias, of_scores(terms, p));
  return made;
}

// Reads a Hopfield retrieval as memory hops over its patterns.
template <class Tensors>
void read_patterns(Retrieval& p, py::handle options, const Tensors& from, bool search,
                   int64_t steps) {
  read_retrieval(p, p, options, from, search);
  p.K = search ? p.steps_max : steps;
  set_hops(p);
  // Global memory for scores that do not fit in shared memory.
  if (is_split(p)) p.scores_owner = new_floats({p.B, p.Q, 2, p.N}, &p.scores);
}

// Reads how many steps each query took, [B, Q].
void read_taken(Retrieval& p, py::handle taken) {
  p.taken = static_cast<int64_t*>(read_flat("taken", taken, kInt64, {p.B, p.Q}, &p.taken_copy));
}

// Returns (xi, taken, the last two states [G, Q, 2, D]). Queries that stop together are neighbours;
// a negative steps_max is no limit.
py::tuple retrieve(const Patterns& x, py::handle options, Stream stream) {
  Retrieval p{};
  read_patterns(p, options, x, true, 0);
  const py::object xi = new_contiguous_like(x.state, &p.out),
                   ends = new_result(DType::f32, {p.B, p.Q, 2, p.D}, &p.trace),
                   taken = new_result(kInt64, {p.B, p.Q}, &p.taken);
  with_element(p.dtype,
               [&](auto* element) { hopfield_search(element, p, rows_are_aligned(p), stream); });
  return py::make_tuple(xi, taken, ends);
}

// Returns (trace [G, Q, 2 most + 1, D], stats [G, Q, most, 2]): each query repeats the steps that
// it took.
py::tuple take_steps(const StepTensors& x, py::handle options, Stream stream, int64_t most) {
  Retrieval p{};
  read_patterns(p, options, x, false, most);
  read_taken(p, x.taken);
  const py::object xi = new_contiguous_like(x.state, &p.out),
                   trace = new_result(DType::f32, {p.B, p.Q, 2 * p.K + 1, p.D}, &p.trace),
                   stats = new_result(DType::f32, {p.B, p.Q, p.K, 2}, &p.stats);
  with_element(p.dtype, [&](auto* element) {
    memory_hops_forward(element, p, rows_are_aligned(p), stream);
  });
  return py::make_tuple(trace, stats);
}

// Returns the gradients of state, stored, keys and bias; None where `needed` does not ask for one.
py::tuple step_gradients(const StepGradTensors& x, py::handle options, Stream stream,
                         int64_t needed) {
  Retrieval p{};
  read_patterns(p, options, x, false, view_of("stats", x.stats).size[2]);
  read_taken(p, x.taken);
  p.trace =
      read_flat("trace", x.trace, DType::f32, {p.B, p.Q, 2 * p.K + 1, p.D}, &p.trace_copies[0]);
  p.stats = read_flat("stats", x.stats, DType::f32, {p.B, p.Q, p.K, 2}, &p.trace_copies[1]);
  const TensorView g = read_sizes("grad_xi", x.grad_xi, p.dtype, {p.B, p.Q, p.D});
  p.grad_out = {g.data, {g.stride[0], g.stride[1], 0, g.stride[2]}};
  py::tuple made = new_step_gradients(p, p, x, needed);
  p.in_of_batch = p.out_of_batch = p.B == 1;
  const py::tuple terms = new_terms(p);
  zero_without_queries(p, terms), zero_without_queries(p, made);
  with_element(p.dtype, [&](auto* element) {
    memory_hops_backward(element, p, rows_are_aligned(p), stream);
  });
  const bool of_bias = (needed & kOfBias) != 0 && !x.bias.is_none();
  return step_gradients_of(x, made, of_bias ? of_scores(terms, p) : none(), needed);
}

}  // namespace
}  // namespace cuda
}  // namespace fastattn
