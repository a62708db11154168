// Memory hops as Python calls them: tensors in, tensors out.
#include <cstdint>
#include <memory>

#include "../memory_hops_arguments.h"
#include "kernel_table.h"
#include "memory.h"

namespace fastattn {
namespace {

// Asks for huge pages for the gradients of the memories, and runs the kernel.
void run_backward(const MemoryHopsParams& p) {
  const int64_t memory = (p.shared ? 1 : p.B) * p.N * p.D * element_bytes(p.dtype);
  if (p.grad_in != nullptr) expect_to_fill(p.grad_in, static_cast<size_t>(memory * p.in_slots));
  if (p.grad_out_memory != nullptr)
    expect_to_fill(p.grad_out_memory, static_cast<size_t>(memory * p.out_slots));
  kernels(p.dtype).memory_hops_backward(p);
}

// The arguments of a call, and the memory that they point to.
struct Hops : MemoryHopsParams, HopCall {
  template <class Tensors>
  Hops(py::handle options, const Tensors& from) : MemoryHopsParams{} {
    read_hop_call(*this, *this, options, from);
    threads = fastattn::threads();
  }
};

// The backward kernel for short memories reads the weights instead of computing the scores again,
// unless they were rounded.
bool backward_reads_weights(const Hops& p) {
  constexpr int64_t kShort = 64;  // rows that the kernel reads as one block
  return !p.is_one_memory && p.Q == 1 && p.N <= kShort && accumulator(p.dtype) == p.dtype;
}

// Returns (out, trace, stats, weights or None); `only_first`: out alone, for a call without a
// gradient; `keeps`: also the weights that the backward pass can read, or None.
py::object memory_hops(const HopTensors& x, py::handle options, bool only_first, bool keeps) {
  Hops p(options, x);
  p.shared = p.memories[0].stride[0] == 0 && p.memories[1].stride[0] == 0;
  const DType wide = accumulator(p.dtype);
  const py::object out = new_contiguous_like(x.query, &p.out);
  py::object trace, stats, weights = none(), kept = none();
  std::unique_ptr<double[]> own;
  if (only_first) {
    const int64_t of_trace = p.B * p.Q * (2 * p.K + 1) * p.D, of_stats = p.B * p.Q * p.K * 2;
    own.reset(new double[static_cast<size_t>(of_trace + of_stats)]);
    p.trace = own.get(), p.stats = own.get() + of_trace;
  } else {
    trace = new_buffer(wide, {p.B, p.queries, 2 * p.K + 1, p.D}, &p.trace);
    stats = new_buffer(wide, {p.B, p.queries, p.K, 2}, &p.stats);
  }
  if (p.returns_weights)
    weights = new_result(p.dtype, {p.B, p.queries, p.K, p.N}, &p.weights);
  else if (keeps && backward_reads_weights(p))
    kept = new_buffer(wide, {p.B, p.K, p.N}, &p.weights);
  without_gil([&] { kernels(p.dtype).memory_hops_forward(p); });
  if (only_first) return out;
  if (keeps) return py::make_tuple(out, trace, stats, weights, kept);
  return py::make_tuple(out, trace, stats, weights);
}

// Returns the gradients of query, in_memory, out_memory, hop_proj and memory_bias; None where the
// options do not ask for one.
py::tuple memory_hops_backward(const HopGradTensors& x, py::handle options) {
  Hops p(options, x);
  p.shared = p.is_one_memory;
  const DType wide = accumulator(p.dtype);
  read_trace_and_stats(p, p, x);
  if (!x.kept.is_none()) {
    const TensorView rows = read_sizes("kept", x.kept, wide, {p.B, p.K, p.N});
    expect(rows.is_contiguous() && backward_reads_weights(p), "kept must be what the forward kept");
    p.weights = rows.data;
  }
  read_hop_gradients(p, p, options, x);

  // A memory that all examples share has one gradient; otherwise each example has one.
  const int64_t entries = p.shared ? 1 : p.B;
  py::tuple gradients = new_hop_gradients(p, p, x, [&](int n, py::handle memory, void** data) {
    const TensorView& rows = p.memories[n];
    if (rows.size[0] == entries) return new_contiguous_like(memory, data);
    const int64_t slots = rows.rank == 4 ? rows.size[1] : kLeftOut;
    return new_result(p.dtype, {entries, slots, p.N, p.D}, data);
  });
  py::object states;
  if (p.grad_proj != nullptr) states = new_buffer(wide, {p.B, p.Q, p.K, p.D}, &p.grad_states);
  if (p.needed & 16 && !x.memory_bias.is_none())
    gradients[4] = new_buffer(wide, {p.B, p.Q, p.K, p.N}, &p.grad_scores);
  zero_without_queries(p, gradients);
  without_gil([&] { run_backward(p); });
  // All may share one of two memories.
  for (size_t n : {0, 1})
    if (p.memories[0].size[0] != p.memories[1].size[0] && p.memories[n].size[0] != entries &&
        !gradients[n + 1].is_none())
      gradients[n + 1] = gradients[n + 1].attr("sum")(0, true);
  if (!gradients[4].is_none()) gradients[4] = gradient_of(x.memory_bias, gradients[4]);
  return gradients;
}

}  // namespace
}  // namespace fastattn
