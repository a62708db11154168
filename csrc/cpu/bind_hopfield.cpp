// Hopfield retrieval as Python calls it: tensors in, tensors out. Its steps are hops without the old
// state, u' = o, and run on the kernels of memory hops.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "../memory_hops_arguments.h"
#include "kernel_table.h"
#include "memory.h"
#include "named.h"
#include "operands.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// Steps of one call of the kernel. Between two calls Python can interrupt a search, which may have no
// limit and never converge.
constexpr int64_t kRound = 256;

// The tensors of a call. G groups are B, or B H, and the patterns of a group are its own.
struct Patterns {
  py::handle state;       // [G, Q, D] or [B, H, Q, D]
  py::handle stored;      // [G, N, D] or [B, H, N, D]
  py::handle keys;        // as stored, or None: stored
  py::handle mask, bias;  // [G|1, Q|1, N|1] or None
};

// The arguments of a call, and the memory that they point to.
struct Retrieval : MemoryHopsParams {
  int64_t steps_max;
  py::object copies[3];            // of state, stored and keys
  std::vector<int64_t> own_taken;  // [G, Q]

  int64_t queries() const { return B * Q; }

  // The nth of state, stored and keys: its copy where there is one, whose memory order is that of results.
  py::handle read(int n, py::handle given) const {
    return copies[n] ? py::handle(copies[n]) : given;
  }
};

// Three dimensions, of which four dimensions' first two are one: of a copy, which `copy` owns, if no
// stride steps through both, or if columns that have to be contiguous are not.
TensorView read_groups(const char* name, py::handle from, bool needs_rows, py::object* copy) {
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

Strided strided_rows(const TensorView& x) {
  return {x.data, x.rank, {x.stride[0], x.stride[1], x.stride[2]}};
}

void read_step_biases(const Patterns& from, Retrieval& p) {
  const Sizes scores = {p.B, p.Q, p.N};
  int64_t s[3];
  if (!from.mask.is_none()) {
    const TensorView x = read_broadcast("mask", from.mask, scores, s);
    expect_dtype("mask", x, {DType::boolean});
    p.mask = {x.data, {s[0], s[1], 0, s[2]}};
  }
  if (!from.bias.is_none()) {
    const TensorView x = read_broadcast("bias", from.bias, scores, s);
    expect_dtype("bias", x, {DType::f32, DType::f64, DType::bf16, DType::f16});
    p.bias = {x.data, {s[0], s[1], 0, s[2]}};
    p.bias_dtype = x.dtype;
  }
}

void read_retrieval(const py::object& options, const Patterns& from, bool search, Retrieval& p) {
  static const auto limits = std::make_tuple(field("steps_max", &Retrieval::steps_max));
  HopfieldOptions asked;
  read_hopfield_options(named(options), asked);
  named(options).read(p, limits);
  const TensorView state = read_groups("state", from.state, false, &p.copies[0]),
                   stored = read_groups("stored", from.stored, true, &p.copies[1]);
  expect_dtype("state", state, {DType::f32, DType::f64, DType::bf16, DType::f16});
  p.dtype = state.dtype;
  p.B = state.size[0], p.Q = state.size[1], p.D = state.size[2], p.N = stored.size[1];
  expect_sizes("state", state, p.dtype, {p.B, p.Q, p.D});  // of three dimensions
  expect_sizes("stored", stored, p.dtype, {p.B, p.N, p.D});
  HopOperands x{strided_rows(state), strided_rows(stored), {}, {}};
  if (!from.keys.is_none()) {
    const TensorView keys = read_groups("keys", from.keys, true, &p.copies[2]);
    expect_sizes("keys", keys, p.dtype, {p.B, p.N, p.D});
    x.in_memory = strided_rows(keys), x.out_memory = strided_rows(stored);
  }
  place_hops(x, p);
  read_step_biases(from, p);
  expect_multiple(asked.together, p.Q, "together");
  p.threads = threads();
  p.shared = p.B == 1;
  p.settles = true, p.search = search;
  p.scale = asked.scale, p.crowded = asked.crowded;
  p.together = search ? asked.together : 1;
  p.eps = search ? asked.eps : 0;
}

void take_steps(const Retrieval& p) {
  py::gil_scoped_release release;
  kernels(p.dtype).memory_hops_forward(p);
}

// Rounds of steps until every query rests or has taken as many as it may.
void search_until_rest(Retrieval& p) {
  for (int64_t done = 0;;) {
    const int64_t until = p.steps_max < 0 ? done + kRound : std::min(done + kRound, p.steps_max);
    p.K = until - done, p.resume = done > 0;
    take_steps(p);
    done = until;
    const auto rests = [](int64_t taken) { return taken > 0; };
    if (done == p.steps_max || std::all_of(p.taken, p.taken + p.queries(), rests)) return;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

// (xi, taken, states, stats), new. `taken`, of state's sizes but the last, is negative where a query does
// not rest; `states` are the last two of each query, [G, Q, 2, D], and stats None. A call that `keeps`
// its steps for the backward pass, as many as it may take, returns all of both: [G, Q, K + 1, D] and
// [G, Q, K, 2].
py::tuple hopfield_retrieve(const py::object& options, py::handle state, py::handle stored,
                            py::handle keys, py::handle mask, py::handle bias, bool keeps) {
  Retrieval p{};
  read_retrieval(options, {state, stored, keys, mask, bias}, true, p);
  const DType acc = accumulator(p.dtype);
  void* data;
  const py::object xi = new_contiguous_like(p.read(0, state), &p.out);
  const TensorView of_state = view_of("state", state);
  const int64_t* n = of_state.size;
  const py::object taken = of_state.rank == 4 ? new_buffer(kInt64, {n[0], n[1], n[2]}, &data)
                                              : new_buffer(kInt64, {n[0], n[1]}, &data);
  p.taken = static_cast<int64_t*>(data);
  std::fill_n(p.taken, p.queries(), 0);
  if (keeps) {
    expect(p.steps_max > 0 && p.together == 1,
           "only a limited number of steps of queries that stop alone can be kept");
    p.K = p.steps_max, p.keep = true;
    const py::object states = new_buffer(acc, {p.B, p.Q, p.K + 1, p.D}, &p.trace),
                     stats = new_buffer(acc, {p.B, p.Q, p.K, 2}, &p.stats);
    take_steps(p);
    return py::make_tuple(xi, taken, states, stats);
  }
  const py::object states = new_buffer(acc, {p.B, p.Q, 2, p.D}, &p.trace);
  const auto pairs = static_cast<size_t>(2 * p.queries());
  const std::unique_ptr<double[]> stats(new double[pairs]);
  std::unique_ptr<double[]> moved;
  if (p.together > 1) moved.reset(new double[pairs]);
  p.stats = stats.get(), p.moved = moved.get();
  search_until_rest(p);
  return py::make_tuple(xi, taken, states, py::none());
}

// Contiguous: of a copy, which `copy` owns, if the tensor is not.
TensorView read_contiguous(const char* name, py::handle from, py::object* copy) {
  const TensorView x = view_of(name, from);
  return x.is_contiguous() ? x : view_of(name, *copy = contiguous(from));
}

// How many steps each query takes, at most K: [G, Q] or [B, H, Q], negative where it does not rest.
void read_taken(py::handle from, Retrieval& p) {
  py::object copy;
  TensorView x = read_contiguous("taken", from, &copy);
  if (x.rank == 3) x.size[0] *= x.size[1], x.size[1] = x.size[2], x.rank = 2;
  expect_sizes("taken", x, kInt64, {p.B, p.Q});
  p.own_taken.resize(static_cast<size_t>(p.queries()));
  const auto* const given = static_cast<const int64_t*>(x.data);
  for (size_t n = 0; n < p.own_taken.size(); ++n) {
    p.own_taken[n] = std::abs(given[n]);
    if (p.own_taken[n] > p.K)
      throw py::value_error("fastattn: taken must be at most the number of steps, " +
                            std::to_string(p.K) + ", got " + std::to_string(given[n]));
  }
  p.taken = p.own_taken.data();
}

// (states [G, Q, most + 1, D], stats [G, Q, most, 2]), new: each query takes its own steps again.
py::tuple hopfield_steps(const py::object& options, py::handle state, py::handle stored,
                         py::handle keys, py::handle mask, py::handle bias, py::handle taken,
                         int64_t most) {
  Retrieval p{};
  read_retrieval(options, {state, stored, keys, mask, bias}, false, p);
  if (most <= 0) throw py::value_error("fastattn: the number of steps must be positive");
  p.K = most;
  read_taken(taken, p);
  const DType acc = accumulator(p.dtype);
  const py::object states = new_buffer(acc, {p.B, p.Q, p.K + 1, p.D}, &p.trace),
                   stats = new_buffer(acc, {p.B, p.Q, p.K, 2}, &p.stats);
  const auto bytes = static_cast<size_t>(p.queries() * p.D * element_bytes(p.dtype));
  const std::unique_ptr<char[]> xi(new char[bytes]);
  p.out = xi.get();
  take_steps(p);
  return py::make_tuple(states, stats);
}

// What the backward pass reads of the steps.
void read_steps(py::handle states, py::handle stats, Retrieval& p, py::object* copies) {
  const DType acc = accumulator(p.dtype);
  const TensorView x = read_contiguous("states", states, &copies[0]),
                   y = read_contiguous("stats", stats, &copies[1]);
  p.K = std::max(x.size[2] - 1, int64_t{1});
  expect_sizes("states", x, acc, {p.B, p.Q, p.K + 1, p.D});
  expect_sizes("stats", y, acc, {p.B, p.Q, p.K, 2});
  p.trace = x.data, p.stats = y.data;
}

// The gradients, new: of state; of what it is compared with; of stored if that is another; and of the
// scores, [G, Q, K, N], before they are summed to the bias. Those that `needed` does not ask for are
// None, see HopfieldBackwardOptions, except that of state.
py::tuple hopfield_backward(const py::object& options, py::handle grad_xi, py::handle state,
                            py::handle stored, py::handle keys, py::handle mask, py::handle bias,
                            py::handle taken, py::handle states, py::handle stats, int64_t needed) {
  constexpr int64_t kOfStored = 2, kOfKeys = 4, kOfBias = 8;
  Retrieval p{};
  read_retrieval(options, {state, stored, keys, mask, bias}, false, p);
  py::object copies[3];
  read_steps(states, stats, p, copies);
  read_taken(taken, p);
  const TensorView of_xi = read_groups("grad_xi", grad_xi, false, &copies[2]);
  expect_sizes("grad_xi", of_xi, p.dtype, {p.B, p.Q, p.D});
  p.grad_out = {of_xi.data, {of_xi.stride[0], of_xi.stride[1], 0, of_xi.stride[2]}};

  const bool nothing = p.queries() == 0;  // the kernel writes nothing then
  const auto new_gradient = [&](py::handle of, void** data) {
    py::object made = new_contiguous_like(of, data);
    if (nothing) made.attr("zero_")();
    return made;
  };
  const bool has_keys = !keys.is_none();
  const py::object grad_state = new_gradient(p.read(0, state), &p.grad_query);
  py::object grad_compared = py::none(), grad_stored = py::none(), grad_scores = py::none();
  if ((needed & (has_keys ? kOfStored | kOfKeys : kOfStored)) != 0) {
    const py::handle of_stored = p.read(1, stored);
    grad_compared = new_gradient(has_keys ? p.read(2, keys) : of_stored, &p.grad_in);
    if (has_keys) grad_stored = new_gradient(of_stored, &p.grad_out_memory);
  }
  if ((needed & kOfBias) != 0 && !bias.is_none())
    grad_scores = new_zeros(accumulator(p.dtype), {p.B, p.Q, p.K, p.N}, &p.grad_scores);
  {
    py::gil_scoped_release release;
    const auto bytes = static_cast<size_t>(p.B * p.N * p.D * element_bytes(p.dtype));
    if (p.grad_in != nullptr) expect_to_fill(p.grad_in, bytes);
    if (p.grad_out_memory != nullptr) expect_to_fill(p.grad_out_memory, bytes);
    kernels(p.dtype).memory_hops_backward(p);
  }
  return py::make_tuple(grad_state, grad_compared, grad_stored, grad_scores);
}

}  // namespace

void bind_hopfield(py::module_& m) {
  m.def("hopfield_retrieve", &hopfield_retrieve);
  m.def("hopfield_steps", &hopfield_steps);
  m.def("hopfield_backward", &hopfield_backward);
}

}  // namespace fastattn
