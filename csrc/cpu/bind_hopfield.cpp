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

namespace py = pybind11;

namespace fastattn {
namespace {

// Steps of one call of the kernel. Between two calls Python can interrupt a search, which may have no
// limit and never converge.
constexpr int64_t kRound = 256;

// The arguments of a call, and the memory that they point to.
struct Retrieval : MemoryHopsParams, RetrievalCall {
  std::vector<int64_t> own_taken;  // [G, Q]

  Retrieval(const py::object& options, const Patterns& from, bool is_search) : MemoryHopsParams{} {
    read_retrieval(*this, *this, options, from, is_search);
    threads = fastattn::threads();
  }

  int64_t queries() const { return B * Q; }
};

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
  Retrieval p(options, {state, stored, keys, mask, bias}, true);
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
  Retrieval p(options, {state, stored, keys, mask, bias}, false);
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
  Retrieval p(options, {state, stored, keys, mask, bias}, false);
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
