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

// The kernel of the backward pass for short memories reads the weights, if they are not rounded, instead
// of computing the scores again.
bool backward_reads_weights(const Hops& p) {
  constexpr int64_t kShort = 64;  // rows that the kernel reads as one block
  return !p.is_one_memory && p.Q == 1 && p.N <= kShort && accumulator(p.dtype) == p.dtype;
}

// (out, trace, stats, weights, kept), new, or None: trace and stats only if a caller needs `states`;
// kept, if it `keeps` what the backward pass can read.
py::tuple memory_hops(const py::object& options, py::handle query, py::handle in_memory,
                      py::handle out_memory, py::handle hop_proj, py::handle memory_mask,
                      py::handle memory_bias, bool states, bool keeps) {
  Hops p{};
  read_hop_call(p, p, options, {query, in_memory, out_memory, hop_proj, memory_mask, memory_bias});
  p.threads = threads();
  p.shared = p.memories[0].stride[0] == 0 && p.memories[1].stride[0] == 0;
  const DType wide = accumulator(p.dtype);
  const py::object out = new_contiguous_like(query, &p.out);
  py::object trace = py::none(), stats = py::none(), weights = py::none(), kept = py::none();
  std::unique_ptr<double[]> own;
  if (states) {
    trace = new_rows_of(new_buffer, p, p, wide, 2 * p.K + 1, p.D, &p.trace);
    stats = new_rows_of(new_buffer, p, p, wide, p.K, 2, &p.stats);
  } else {
    const int64_t of_trace = p.B * p.Q * (2 * p.K + 1) * p.D, of_stats = p.B * p.Q * p.K * 2;
    own.reset(new double[static_cast<size_t>(of_trace + of_stats)]);
    p.trace = own.get(), p.stats = own.get() + of_trace;
  }
  if (p.returns_weights)
    weights = new_rows_of(new_result, p, p, p.dtype, p.K, p.N, &p.weights);
  else if (keeps && backward_reads_weights(p))
    kept = new_buffer(wide, {p.B, p.K, p.N}, &p.weights);
  run_forward(p);
  return py::make_tuple(out, trace, stats, weights, kept);
}

// The gradient of a memory, new: of one that all share, or of each example.
py::object new_grad_memory(const Hops& p, py::handle memory, const TensorView& x, void** data) {
  const int64_t entries = p.shared ? 1 : p.B;
  if (x.size[0] == entries) return new_contiguous_like(memory, data);
  return x.rank == 4 ? new_result(p.dtype, {entries, x.size[1], p.N, p.D}, data)
                     : new_result(p.dtype, {entries, p.N, p.D}, data);
}

// The gradients of query, in_memory, out_memory and hop_proj, and that of the scores [B, Q, K, N], new;
// None where the options do not ask for them. kept may be None.
py::tuple memory_hops_backward(const py::object& options, py::handle grad_out,
                               py::handle grad_weights, py::handle query, py::handle in_memory,
                               py::handle out_memory, py::handle hop_proj, py::handle memory_mask,
                               py::handle memory_bias, py::handle trace, py::handle stats,
                               py::handle kept) {
  Hops p{};
  const HopResults results{grad_out, grad_weights, trace, stats};
  read_hop_call(p, p, options, {query, in_memory, out_memory, hop_proj, memory_mask, memory_bias});
  p.threads = threads();
  p.shared = p.is_one_memory;
  const DType wide = accumulator(p.dtype);
  read_trace_and_stats(p, p, results);
  if (!kept.is_none()) {
    const TensorView x = read_sizes("kept", kept, wide, {p.B, p.K, p.N});
    expect(x.is_contiguous() && backward_reads_weights(p), "kept must be what the forward kept");
    p.weights = x.data;
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
