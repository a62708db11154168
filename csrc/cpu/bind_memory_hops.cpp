// Python's view of memory hops, and of Hopfield retrieval, which uses the same kernels.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "../memory_hops_arguments.h"
#include "kernel_table.h"
#include "memory.h"
#include "named.h"
#include "operands.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// operands: see read_hops; and shared, whether all B have one memory. biases: see read_hop_biases;
// None = none.
MemoryHopsParams common(int dtype, int threads, const py::tuple& sizes, const py::dict& operands,
                        const py::object& biases) {
  static const auto shared = std::make_tuple(field("shared", &MemoryHopsParams::shared));
  MemoryHopsParams p{};
  read_hops(named(operands), dtype, sizes, p);
  named(operands).read(p, shared);
  if (!biases.is_none()) read_hop_biases(named(biases), p);
  p.threads = threads;
  return p;
}

void read_gradients(const py::dict& gradients, MemoryHopsParams& p) {
  using P = MemoryHopsParams;
  static const auto own =
      std::make_tuple(field("grad_scores", &P::grad_scores), field("grad_states", &P::grad_states));
  read_hop_gradients(named(gradients), p);
  named(gradients).read(p, own);
}

void run_forward(const MemoryHopsParams& p) {
  py::gil_scoped_release release;
  kernels(p.dtype).memory_hops_forward(p);
}

void run_backward(const MemoryHopsParams& p) {
  py::gil_scoped_release release;
  const int64_t memory = (p.shared ? 1 : p.B) * p.N * p.D * element_bytes(p.dtype);
  if (p.grad_in != nullptr) expect_to_fill(p.grad_in, static_cast<size_t>(memory * p.in_slots));
  if (p.grad_out_memory != nullptr)
    expect_to_fill(p.grad_out_memory, static_cast<size_t>(memory * p.out_slots));
  kernels(p.dtype).memory_hops_backward(p);
}

// -- memory hops: tensors in, tensors out -----------------------------------------------------------

// The arguments of a call, and the copies that they point to.
struct HopCall : MemoryHopsParams {
  bool has_queries = false;    // query has Q
  bool is_one_memory = false;  // both memories have one entry
  bool returns_weights = false;
  int64_t needed = 0;  // bits of the gradients to compute
  py::object copies[5];
};

Strided strided(const TensorView& x) {
  return {x.data, x.rank, {x.stride[0], x.stride[1], x.stride[2], x.stride[3]}};
}

// The tensor, or a copy whose columns are contiguous; of a batch that shares one memory, only that
// memory is copied.
TensorView with_rows(const char* name, py::handle from, py::object* copy) {
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
TensorView read_memory(const char* name, py::handle from, int64_t slots, const MemoryHopsParams& p,
                       py::object* copy) {
  TensorView x = with_rows(name, from, copy);
  const int64_t entries = x.size[0] == 1 ? 1 : p.B;
  if (x.rank == 4)
    expect_sizes(name, x, p.dtype, {entries, slots, p.N, p.D});
  else
    expect_sizes(name, x, p.dtype, {entries, p.N, p.D});
  if (entries == 1) x.stride[0] = 0;
  return x;
}

TensorView read_projection(py::handle from, const MemoryHopsParams& p, py::object* copy) {
  const TensorView x = with_rows("hop_proj", from, copy);
  if (x.rank == 3)
    expect_sizes("hop_proj", x, p.dtype, {p.K, p.D, p.D});
  else
    expect_sizes("hop_proj", x, p.dtype, {p.D, p.D});
  return x;
}

// A mask or a bias [N], [B, N], [B, Q, N] (of a query without Q: [B, K, N]) or [B, Q, K, N]; any size may
// be 1 instead.
TensorView read_per_hop(const char* name, py::handle from, const HopCall& p, Tensor4* to) {
  const TensorView x = view_of(name, from);
  int64_t s[4];
  if (x.rank == 4) {
    read_broadcast(name, from, {p.B, p.Q, p.K, p.N}, s);
    *to = {x.data, {s[0], s[1], s[2], s[3]}};
  } else if (x.rank == 3 && p.has_queries) {
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

struct HopTensors {
  py::handle query, in_memory, out_memory, hop_proj, memory_mask, memory_bias;
};

// Fills everything but `shared`. m and c: the memories as the kernel reads them.
void read_hop_call(HopCall& p, const py::object& options, const HopTensors& from, TensorView* m,
                   TensorView* c) {
  static const auto fields = std::make_tuple(field("hops", &MemoryHopsParams::K),
                                             field("weights", &HopCall::returns_weights));
  read_memory_hop_options(named(options), p);
  named(options).read(p, fields);
  expect(p.K >= 1, "fastattn: hops must be at least 1");
  const TensorView q = view_of("query", from.query);
  expect_dtype("query", q, {DType::f32, DType::f64, DType::bf16, DType::f16});
  p.has_queries = q.rank == 3;
  p.dtype = q.dtype;
  p.B = q.size[0], p.Q = p.has_queries ? q.size[1] : 1, p.D = q.size[p.has_queries ? 2 : 1];
  if (!p.has_queries) expect_sizes("query", q, p.dtype, {p.B, p.D});
  p.threads = threads();
  const bool stacks = from.out_memory.is_none();
  const TensorView rows = view_of("in_memory", from.in_memory);
  p.N = rows.size[rows.rank == 4 ? 2 : 1];
  *m = read_memory("in_memory", from.in_memory, p.K + stacks, p, &p.copies[0]);
  *c = stacks ? *m : read_memory("out_memory", from.out_memory, p.K, p, &p.copies[1]);
  p.is_one_memory = m->size[0] == 1 && c->size[0] == 1;
  HopOperands x{strided(q), strided(*m), {}, {}};
  if (!stacks) x.out_memory = strided(*c);
  if (!from.hop_proj.is_none())
    x.hop_proj = strided(read_projection(from.hop_proj, p, &p.copies[2]));
  place_hops(x, p);
  if (!from.memory_mask.is_none()) {
    const TensorView mask = read_per_hop("memory_mask", from.memory_mask, p, &p.mask);
    expect_dtype("memory_mask", mask, {DType::boolean});
  }
  if (!from.memory_bias.is_none()) {
    const TensorView bias = read_per_hop("memory_bias", from.memory_bias, p, &p.bias);
    expect_dtype("memory_bias", bias, {p.dtype, DType::f32});
    p.bias_dtype = bias.dtype;
  }
}

// trace and stats in one array, and the weights where the kernel of the backward pass reads them: that of
// short memories does, if they are not rounded, instead of computing the scores again.
struct HopStates {
  static constexpr int64_t kShort = 64;  // rows that the kernel reads as one block
  int64_t trace, stats, weights;         // elements of the accumulator's dtype

  HopStates(const HopCall& p, bool keeps_weights)
      : trace(p.B * p.Q * (2 * p.K + 1) * p.D), stats(p.B * p.Q * p.K * 2), weights(0) {
    const bool reads = !p.is_one_memory && p.Q == 1 && p.N <= kShort;
    if (keeps_weights && !p.returns_weights && reads && accumulator(p.dtype) == p.dtype)
      weights = p.B * p.K * p.N;
  }
  int64_t size() const { return trace + stats + weights; }
  void place(void* data, HopCall& p) const {
    char* const at = static_cast<char*>(data);
    const int64_t bytes = element_bytes(accumulator(p.dtype));
    p.trace = at, p.stats = at + trace * bytes;
    if (weights > 0) p.weights = at + (trace + stats) * bytes;
  }
};

// What the caller needs besides the results.
enum States { kNone = 0, kTraceAndStats = 1, kInOneArray = 2 };

// (out, trace, stats, weights), new, or None. states: of States; one array is in the place of trace.
py::tuple memory_hops(const py::object& options, py::handle query, py::handle in_memory,
                      py::handle out_memory, py::handle hop_proj, py::handle memory_mask,
                      py::handle memory_bias, int states) {
  HopCall p{};
  TensorView m, c;
  read_hop_call(p, options, {query, in_memory, out_memory, hop_proj, memory_mask, memory_bias}, &m,
                &c);
  p.shared = m.stride[0] == 0 && c.stride[0] == 0;
  const auto new_rows_of = [&](auto make, DType dtype, int64_t rows, int64_t columns, void** data) {
    return p.has_queries ? make(dtype, {p.B, p.Q, rows, columns}, data)
                         : make(dtype, {p.B, rows, columns}, data);
  };
  const DType wide = accumulator(p.dtype);
  const py::object out = new_contiguous_like(query, &p.out);
  py::object trace = py::none(), stats = py::none(), weights = py::none();
  std::unique_ptr<double[]> own;
  if (states == kTraceAndStats) {
    trace = new_rows_of(new_buffer, wide, 2 * p.K + 1, p.D, &p.trace);
    stats = new_rows_of(new_buffer, wide, p.K, 2, &p.stats);
  } else {
    const HopStates sizes(p, states == kInOneArray);
    void* data;
    if (states == kInOneArray)
      trace = new_buffer(wide, {sizes.size()}, &data);
    else
      own.reset(new double[static_cast<size_t>(sizes.size())]), data = own.get();
    sizes.place(data, p);
  }
  if (p.returns_weights) weights = new_rows_of(new_result, p.dtype, p.K, p.N, &p.weights);
  run_forward(p);
  return py::make_tuple(out, trace, stats, weights);
}

// What a backward pass is given besides the tensors of the call.
struct HopResults {
  py::handle grad_out, grad_weights, trace, stats;
};

// Rows of each query, contiguous.
void* read_results(const char* name, py::handle from, DType dtype, int64_t rows, int64_t columns,
                   const HopCall& p, py::object* copy) {
  TensorView x = view_of(name, from);
  // The gradients of a batch of calls share one, with stride 0.
  if (!x.is_contiguous()) x = view_of(name, *copy = contiguous(from));
  if (p.has_queries)
    expect_sizes(name, x, dtype, {p.B, p.Q, rows, columns});
  else
    expect_sizes(name, x, dtype, {p.B, rows, columns});
  return x.data;
}

void read_hop_backward(HopCall& p, const HopResults& from) {
  const DType wide = accumulator(p.dtype);
  if (from.stats.is_none()) {
    const HopStates sizes(p, true);
    const TensorView x = read_sizes("trace", from.trace, wide, {sizes.size()});
    expect(x.is_contiguous(), "fastattn: trace must be contiguous");
    sizes.place(x.data, p);
  } else {
    p.trace = read_results("trace", from.trace, wide, 2 * p.K + 1, p.D, p, &p.copies[3]);
    p.stats = read_results("stats", from.stats, wide, p.K, 2, p, &p.copies[4]);
  }
  if (!from.grad_out.is_none()) {
    const TensorView x = p.has_queries
                             ? read_sizes("grad_out", from.grad_out, p.dtype, {p.B, p.Q, p.D})
                             : read_sizes("grad_out", from.grad_out, p.dtype, {p.B, p.D});
    const int64_t* s = x.stride;
    p.grad_out = {x.data, {s[0], p.has_queries ? s[1] : 0, 0, s[x.rank - 1]}};
  }
  if (!from.grad_weights.is_none() && p.returns_weights) {
    const auto read = [&](Sizes sizes) {
      return read_sizes("grad_weights", from.grad_weights, p.dtype, sizes);
    };
    const TensorView x = p.has_queries ? read({p.B, p.Q, p.K, p.N}) : read({p.B, p.K, p.N});
    const int64_t* s = x.stride;
    if (p.has_queries)
      p.grad_weights = operand_of(x);
    else
      p.grad_weights = {x.data, {s[0], 0, s[1], s[2]}};
  }
}

// The gradient of a memory, new: of one that all share, or of each example.
py::object new_grad_memory(const HopCall& p, py::handle memory, const TensorView& x, void** data) {
  const int64_t entries = p.shared ? 1 : p.B;
  if (x.size[0] == entries) return new_contiguous_like(memory, data);
  return x.rank == 4 ? new_result(p.dtype, {entries, x.size[1], p.N, p.D}, data)
                     : new_result(p.dtype, {entries, p.N, p.D}, data);
}

// The gradients of query, in_memory, out_memory and hop_proj, and that of the scores [B, Q, K, N], new;
// None where the options do not ask for them. stats is None if trace is the array of HopStates.
py::tuple memory_hops_backward(const py::object& options, py::handle grad_out,
                               py::handle grad_weights, py::handle query, py::handle in_memory,
                               py::handle out_memory, py::handle hop_proj, py::handle memory_mask,
                               py::handle memory_bias, py::handle trace, py::handle stats) {
  static const auto fields = std::make_tuple(field("needed", &HopCall::needed));
  HopCall p{};
  TensorView m, c;
  read_hop_call(p, options, {query, in_memory, out_memory, hop_proj, memory_mask, memory_bias}, &m,
                &c);
  named(options).read(p, fields);
  p.shared = p.is_one_memory;
  read_hop_backward(p, {grad_out, grad_weights, trace, stats});

  const DType wide = accumulator(p.dtype);
  py::object of_in = py::none(), of_out = py::none(), of_proj = py::none(), scores = py::none(),
             states;
  const py::object of_query = new_contiguous_like(query, &p.grad_query);
  if (p.needed & 2) of_in = new_grad_memory(p, in_memory, m, &p.grad_in);
  if (p.needed & 4 && !out_memory.is_none())
    of_out = new_grad_memory(p, out_memory, c, &p.grad_out_memory);
  if (p.needed & 8 && !hop_proj.is_none()) {
    of_proj = new_contiguous_like(hop_proj, &p.grad_proj);
    states = new_buffer(wide, {p.B, p.Q, p.K, p.D}, &p.grad_states);
  }
  if (p.needed & 16 && !memory_bias.is_none())
    scores = new_buffer(wide, {p.B, p.Q, p.K, p.N}, &p.grad_scores);
  if (p.B * p.Q == 0)  // the kernel writes nothing then
    for (const py::object& made : {of_query, of_in, of_out, of_proj, scores})
      if (!made.is_none()) made.attr("zero_")();
  run_backward(p);
  return py::make_tuple(of_query, of_in, of_out, of_proj, scores);
}

// -- Hopfield retrieval ------------------------------------------------------------------------------

// steps: the addresses of taken and moved, search, resume. Without a search, each query repeats
// its own number of steps.
MemoryHopsParams retrieval(int dtype, int threads, const py::tuple& sizes,
                           const py::object& options, const py::dict& operands,
                           const py::object& biases, const py::dict& steps) {
  using P = MemoryHopsParams;
  static const auto fields =
      std::make_tuple(field("taken", &P::taken), field("moved", &P::moved),
                      field("search", &P::search), field("resume", &P::resume));
  MemoryHopsParams p = common(dtype, threads, sizes, operands, biases);
  HopfieldOptions asked;
  read_hopfield_options(named(options), asked);
  expect_multiple(asked.together, p.Q, "together");
  named(steps).read(p, fields);
  p.settles = true;
  p.scale = asked.scale;
  p.crowded = asked.crowded;
  p.together = p.search ? asked.together : 1;
  p.eps = p.search ? asked.eps : 0;
  return p;
}

void hopfield_forward(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                      const py::dict& operands, const py::object& biases, const py::dict& steps,
                      const py::dict& results) {
  MemoryHopsParams p = retrieval(dtype, threads, sizes, options, operands, biases, steps);
  read_hop_results(named(results), p);
  run_forward(p);
}

void hopfield_backward(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                       const py::dict& operands, const py::object& biases, const py::dict& steps,
                       const py::dict& gradients) {
  MemoryHopsParams p = retrieval(dtype, threads, sizes, options, operands, biases, steps);
  read_gradients(gradients, p);
  run_backward(p);
}

// -- retrieval whose steps are unrolled, without other options --------------------------------------

// 0 if the general path has to see a call; else a number that is the same for calls of the same dtype,
// and odd if a tensor requires a gradient.
int64_t plain_retrieval_call(py::handle state, py::handle stored, py::handle projection) {
  TensorView s, x, v;
  if (!read_tensor(state, &s) || !read_tensor(stored, &x)) return 0;
  if (s.rank != 4 || x.rank != 4 || s.dtype == DType::boolean || x.dtype != s.dtype) return 0;
  const int64_t batch = s.size[0], heads = s.size[1], rows = x.size[2];
  if (batch * heads * s.size[2] * s.size[3] * rows == 0) return 0;
  if (!x.has_sizes({batch, heads, rows, s.size[3]}) || x.stride[3] != 1) return 0;
  if (x.stride[0] == 0 && batch > 1) return 0;  // patterns of all queries are read once for them
  if (!projection.is_none()) {
    if (!read_tensor(projection, &v) || v.rank != 4 || v.dtype != s.dtype) return 0;
    if (!v.has_sizes({batch, heads, rows, v.size[3]}) || v.size[3] == 0) return 0;
  }
  return number_of_call(s.dtype, {state, stored, projection});
}

// Reads state [G, Q, D] and stored [G, N, D]; false if they are no such tensors.
bool read_patterns(py::handle state, py::handle stored, int64_t steps, MemoryHopsParams& p) {
  TensorView s, x;
  if (!read_tensor(state, &s) || !read_tensor(stored, &x) || s.rank != 3 || x.rank != 3)
    return false;
  p.dtype = s.dtype, p.B = s.size[0], p.Q = s.size[1], p.K = steps, p.D = s.size[2];
  p.N = x.size[1];
  if (!x.has_sizes({p.B, p.N, p.D}) || x.dtype != p.dtype || x.stride[2] != 1) return false;
  place_hops({strided(s), strided(x), {}, {}}, p);
  p.shared = p.B == 1;
  p.settles = true, p.together = 1;
  return true;
}

// What the backward pass reads is one array: the numbers of steps, the trace and the statistics.
struct KeptSteps {
  int64_t taken, trace, stats;  // elements of the accumulator's dtype

  explicit KeptSteps(const MemoryHopsParams& p)
      : taken(p.B * p.Q * static_cast<int64_t>(sizeof(int64_t)) /
              element_bytes(accumulator(p.dtype))),
        trace(p.B * p.Q * (p.K + 1) * p.D),
        stats(p.B * p.Q * p.K * 2) {}
  int64_t size() const { return taken + trace + stats; }
  void place(void* data, MemoryHopsParams& p) const {
    char* const at = static_cast<char*>(data);
    const int64_t bytes = element_bytes(accumulator(p.dtype));
    p.taken = static_cast<int64_t*>(data);
    p.trace = at + taken * bytes, p.stats = at + (taken + trace) * bytes;
  }
};

// (xi [G, Q, D], kept), new.
py::tuple plain_steps(py::handle state, py::handle stored, double scale, double eps, int64_t steps,
                      int threads) {
  MemoryHopsParams p{};
  if (!read_patterns(state, stored, steps, p))
    throw py::type_error("fastattn: not a plain call of Hopfield retrieval");
  p.scale = scale, p.eps = eps, p.threads = threads;
  p.search = p.keep = true;
  const KeptSteps kept(p);
  void* data;
  const py::object xi = new_contiguous_like(state, &p.out);
  const py::object buffer = new_buffer(accumulator(p.dtype), {kept.size()}, &data);
  kept.place(data, p);
  std::fill_n(p.taken, p.B * p.Q, 0);
  run_forward(p);
  // Those that have not converged have minus their number.
  std::transform(p.taken, p.taken + p.B * p.Q, p.taken, [](int64_t x) { return std::abs(x); });
  return py::make_tuple(xi, buffer);
}

// The gradients of state and stored, new; None for stored if it is not wanted. None if the general
// path has to see the call.
py::object plain_steps_backward(py::handle grad_xi, py::handle state, py::handle stored,
                                py::handle buffer, double scale, int64_t steps, bool wants_stored,
                                int threads) {
  MemoryHopsParams p{};
  TensorView of_xi, of_kept;
  if (!read_patterns(state, stored, steps, p) || !read_tensor(grad_xi, &of_xi) ||
      !read_tensor(buffer, &of_kept))
    return py::none();
  const KeptSteps kept(p);
  if (of_xi.dtype != p.dtype || !of_xi.has_sizes({p.B, p.Q, p.D}) ||
      of_kept.dtype != accumulator(p.dtype) || !of_kept.has_sizes({kept.size()}) ||
      !of_kept.is_contiguous())
    return py::none();
  p.scale = scale, p.threads = threads;
  kept.place(of_kept.data, p);
  p.grad_out = {of_xi.data, {of_xi.stride[0], of_xi.stride[1], 0, of_xi.stride[2]}};
  const py::object grad_state = new_contiguous_like(state, &p.grad_query);
  py::object grad_stored = py::none();
  if (wants_stored) grad_stored = new_contiguous_like(stored, &p.grad_in);
  run_backward(p);
  return py::make_tuple(grad_state, grad_stored);
}

}  // namespace

void bind_memory_hops(py::module_& m) {
  m.def("plain_retrieval_call", &plain_retrieval_call);
  m.def("plain_steps", &plain_steps);
  m.def("plain_steps_backward", &plain_steps_backward);
  m.def("memory_hops", &memory_hops);
  m.def("memory_hops_backward", &memory_hops_backward);
  m.def("hopfield_forward", &hopfield_forward);
  m.def("hopfield_backward", &hopfield_backward);
}

}  // namespace fastattn
