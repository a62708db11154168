// Memory hops as Python calls them: tensors in, tensors out.
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

}  // namespace

void bind_memory_hops(py::module_& m) {
  m.def("memory_hops", &memory_hops);
  m.def("memory_hops_backward", &memory_hops_backward);
}

}  // namespace fastattn
