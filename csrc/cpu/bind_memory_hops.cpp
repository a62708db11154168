// Memory hops as Python calls them: tensors in, tensors out.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "../memory_hops_arguments.h"
#include "kernel_table.h"
#include "memory.h"

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

// The arguments of a call, and what they point to.
struct Hops : MemoryHopsParams, HopCall {};

// trace and stats in one array, and the weights where the kernel of the backward pass reads them: that of
// short memories does, if they are not rounded, instead of computing the scores again.
struct HopStates {
  static constexpr int64_t kShort = 64;  // rows that the kernel reads as one block
  int64_t trace, stats, weights;         // elements of the accumulator's dtype

  HopStates(const Hops& p, bool keeps_weights)
      : trace(p.B * p.Q * (2 * p.K + 1) * p.D), stats(p.B * p.Q * p.K * 2), weights(0) {
    const bool reads = !p.is_one_memory && p.Q == 1 && p.N <= kShort;
    if (keeps_weights && !p.returns_weights && reads && accumulator(p.dtype) == p.dtype)
      weights = p.B * p.K * p.N;
  }
  int64_t size() const { return trace + stats + weights; }
  void place(void* data, Hops& p) const {
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
  Hops p{};
  read_hop_call(p, p, options, {query, in_memory, out_memory, hop_proj, memory_mask, memory_bias});
  p.threads = threads();
  p.shared = p.memories[0].stride[0] == 0 && p.memories[1].stride[0] == 0;
  const DType wide = accumulator(p.dtype);
  const py::object out = new_contiguous_like(query, &p.out);
  py::object trace = py::none(), stats = py::none(), weights = py::none();
  std::unique_ptr<double[]> own;
  if (states == kTraceAndStats) {
    trace = new_rows_of(new_buffer, p, p, wide, 2 * p.K + 1, p.D, &p.trace);
    stats = new_rows_of(new_buffer, p, p, wide, p.K, 2, &p.stats);
  } else {
    const HopStates sizes(p, states == kInOneArray);
    void* data;
    if (states == kInOneArray)
      trace = new_buffer(wide, {sizes.size()}, &data);
    else
      own.reset(new double[static_cast<size_t>(sizes.size())]), data = own.get();
    sizes.place(data, p);
  }
  if (p.returns_weights) weights = new_rows_of(new_result, p, p, p.dtype, p.K, p.N, &p.weights);
  run_forward(p);
  return py::make_tuple(out, trace, stats, weights);
}

// The gradient of a memory, new: of one that all share, or of each example.
py::object new_grad_memory(const Hops& p, py::handle memory, const TensorView& x, void** data) {
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
  Hops p{};
  const HopResults results{grad_out, grad_weights, trace, stats};
  read_hop_call(p, p, options, {query, in_memory, out_memory, hop_proj, memory_mask, memory_bias});
  p.threads = threads();
  p.shared = p.is_one_memory;
  const DType wide = accumulator(p.dtype);
  if (stats.is_none()) {
    const HopStates sizes(p, true);
    const TensorView x = read_sizes("trace", trace, wide, {sizes.size()});
    expect(x.is_contiguous(), "fastattn: trace must be contiguous");
    sizes.place(x.data, p);
  } else {
    read_trace_and_stats(p, p, results);
  }
  read_hop_gradients(p, p, options, results);

  py::object of_in = py::none(), of_out = py::none(), of_proj = py::none(), scores = py::none(),
             states;
  const py::object of_query = new_contiguous_like(query, &p.grad_query);
  if (p.needed & 2) of_in = new_grad_memory(p, in_memory, p.memories[0], &p.grad_in);
  if (p.needed & 4 && !out_memory.is_none())
    of_out = new_grad_memory(p, out_memory, p.memories[1], &p.grad_out_memory);
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
