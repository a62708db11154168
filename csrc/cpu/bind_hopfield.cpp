// Hopfield retrieval as Python calls it: tensors in, tensors out. Its steps are hops without the
// old state, u' = o, and run on the kernels of memory hops.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "../memory_hops_arguments.h"
#include "kernel_table.h"
#include "memory.h"

namespace fastattn {
namespace {

// Steps of one call of the kernel. Between two calls Python can interrupt a search, which may have
// no limit and never converge.
constexpr int64_t kRound = 256;

// The arguments of a call, and the memory that they point to.
struct Retrieval : MemoryHopsParams, RetrievalCall {
  std::vector<int64_t> own_taken;  // [G, Q]

  template <class Tensors>
  Retrieval(py::handle options, const Tensors& from, bool is_search) : MemoryHopsParams{} {
    read_retrieval(*this, *this, options, from, is_search);
    threads = fastattn::threads();
  }

  int64_t queries() const { return B * Q; }
};

// Runs the steps of a retrieval, as memory hops.
void take_steps(const Retrieval& p) {
  without_gil([&] { kernels(p.dtype).memory_hops_forward(p); });
}

// Whether the backward pass differentiates all steps.
bool unrolls(py::handle options) {
  struct Gradient {
    int kind;
  } gradient;
  Named(options).read_choice<&Gradient::kind>("grad", gradient, {"unroll", "implicit", "one_step"});
  return gradient.kind == 0;
}

// [G, Q, K + 1, D] and [G, Q, K, 2]
py::tuple new_steps(Retrieval& p) {
  const DType acc = accumulator(p.dtype);
  const py::object trace = new_buffer(acc, {p.B, p.Q, p.K + 1, p.D}, &p.trace),
                   stats = new_buffer(acc, {p.B, p.Q, p.K, 2}, &p.stats);
  return py::make_tuple(trace, stats);
}

// Runs rounds of steps until every query has converged or has taken its maximum number of steps.
void search_until_rest(Retrieval& p) {
  for (int64_t done = 0;;) {
    const int64_t until = p.steps_max < 0 ? done + kRound : std::min(done + kRound, p.steps_max);
    p.K = until - done, p.resume = done > 0;
    take_steps(p);
    done = until;
    const auto at_rest = [](int64_t taken) { return taken > 0; };
    if (done == p.steps_max || std::all_of(p.taken, p.taken + p.queries(), at_rest)) return;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

// Returns (xi, taken, ends). `taken` has the sizes of state but the last, and is negative where a
// query has not converged; `ends` are the last two states of each query, [G, Q, 2, D]. A call that
// `keeps` also returns (trace, stats): all states, which `ends` then is as well, and their
// statistics. They are None where the backward pass does not read them or there may be many steps.
py::tuple hopfield_retrieve(const Patterns& x, py::handle options, bool keeps) {
  constexpr int64_t kFewSteps = 4;
  Retrieval p(options, x, true);
  const py::object xi = new_contiguous_like(p.read(0, x.state), &p.out);
  const TensorView of_state = view_of("state", x.state);
  const py::object taken = new_buffer(kInt64, {of_state.size, of_state.rank - 1}, &p.taken);
  std::fill_n(p.taken, p.queries(), 0);
  if (keeps && p.together == 1 && p.steps_max > 0 && p.steps_max <= kFewSteps && unrolls(options)) {
    p.K = p.steps_max, p.keep = true;
    const py::tuple steps = new_steps(p);
    take_steps(p);
    return py::make_tuple(xi, taken, steps[0], steps[0], steps[1]);
  }
  const py::object ends = new_buffer(accumulator(p.dtype), {p.B, p.Q, 2, p.D}, &p.trace);
  const auto pairs = static_cast<size_t>(2 * p.queries());
  const std::unique_ptr<double[]> stats(new double[pairs]);
  std::unique_ptr<double[]> moved;
  if (p.together > 1) moved.reset(new double[pairs]);
  p.stats = stats.get(), p.moved = moved.get();
  search_until_rest(p);
  if (keeps) return py::make_tuple(xi, taken, ends, none(), none());
  return py::make_tuple(xi, taken, ends);
}

// A contiguous view: of `copy` if the tensor is not contiguous.
TensorView read_contiguous(const char* name, py::handle from, py::object* copy) {
  const TensorView x = view_of(name, from);
  return x.is_contiguous() ? x : view_of(name, *copy = contiguous(from));
}

// How many steps each query takes, at most K: [G, Q] or [B, H, Q], negative where it did not
// converge.
void read_taken(py::handle from, Retrieval& p) {
  py::object copy;
  TensorView x = read_contiguous("taken", from, &copy);
  if (x.rank == 3) x.size[0] *= x.size[1], x.size[1] = x.size[2], x.rank = 2;
  expect_sizes("taken", x, kInt64, {p.B, p.Q});
  p.own_taken.resize(static_cast<size_t>(p.queries()));
  const auto* const counts = static_cast<const int64_t*>(x.data);
  for (size_t n = 0; n < p.own_taken.size(); ++n) {
    p.own_taken[n] = std::abs(counts[n]);
    if (p.own_taken[n] > p.K)
      throw py::value_error("fastattn: taken must be at most the number of steps, " +
                            std::to_string(p.K) + ", got " + std::to_string(counts[n]));
  }
  p.taken = p.own_taken.data();
}

// Returns (trace, stats): each query repeats the steps that it took.
py::tuple hopfield_steps(const StepTensors& x, py::handle options, int64_t max_steps) {
  Retrieval p(options, x, false);
  if (max_steps <= 0) throw py::value_error("fastattn: the number of steps must be positive");
  p.K = max_steps;
  read_taken(x.taken, p);
  py::tuple steps = new_steps(p);
  const auto bytes = static_cast<size_t>(p.queries() * p.D * element_bytes(p.dtype));
  const std::unique_ptr<char[]> xi(new char[bytes]);
  p.out = xi.get();
  take_steps(p);
  return steps;
}

// Returns the gradients of state, stored, keys and bias. All but the first are None unless `needed`
// asks for them, see HopfieldBackwardOptions.
py::tuple hopfield_backward(const StepGradTensors& x, py::handle options, int64_t needed) {
  Retrieval p(options, x, false);
  py::object copies[3];
  const DType acc = accumulator(p.dtype);
  const TensorView trace = read_contiguous("trace", x.trace, &copies[0]),
                   stats = read_contiguous("stats", x.stats, &copies[1]);
  p.K = std::max(trace.size[2] - 1, int64_t{1});
  expect_sizes("trace", trace, acc, {p.B, p.Q, p.K + 1, p.D});
  expect_sizes("stats", stats, acc, {p.B, p.Q, p.K, 2});
  p.trace = trace.data, p.stats = stats.data;
  read_taken(x.taken, p);
  const TensorView of_xi = read_groups("grad_xi", x.grad_xi, false, &copies[2]);
  expect_sizes("grad_xi", of_xi, p.dtype, {p.B, p.Q, p.D});
  p.grad_out = {of_xi.data, {of_xi.stride[0], of_xi.stride[1], 0, of_xi.stride[2]}};

  py::tuple gradients = new_step_gradients(p, p, x, needed);
  py::object scores = none();
  if ((needed & kOfBias) != 0 && !x.bias.is_none())
    scores = new_zeros(acc, {p.B, p.Q, p.K, p.N}, &p.grad_scores);
  zero_without_queries(p, gradients);
  without_gil([&] {
    const auto bytes = static_cast<size_t>(p.B * p.N * p.D * element_bytes(p.dtype));
    if (p.grad_in != nullptr) expect_to_fill(p.grad_in, bytes);
    if (p.grad_out_memory != nullptr) expect_to_fill(p.grad_out_memory, bytes);
    kernels(p.dtype).memory_hops_backward(p);
  });
  return step_gradients_of(x, gradients, scores, needed);
}

}  // namespace
}  // namespace fastattn
