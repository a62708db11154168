// Python's view of memory hops: addresses, shapes and strides in, nothing out.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "../arguments.h"
#include "kernel_table.h"
#include "memory.h"
#include "named.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// (address, stride) or None.
Tensor4 optional_operand(const py::handle& from) {
  if (from.is_none()) return {};
  const auto pair = py::reinterpret_borrow<py::tuple>(from);
  return operand(static_cast<uintptr_t>(integer(PyTuple_GET_ITEM(pair.ptr(), 0))),
                 py::reinterpret_borrow<py::tuple>(PyTuple_GET_ITEM(pair.ptr(), 1)));
}

void* address(const py::tuple& from, int i) {
  return reinterpret_cast<void*>(integer(PyTuple_GET_ITEM(from.ptr(), i)));
}

// Reads the arguments of both functions below.
MemoryHopsParams hops(bool backward, int dtype, int threads, const py::tuple& sizes, int flags,
                      int bias_dtype, const py::tuple& operands, const py::tuple& results,
                      const py::tuple& slots) {
  MemoryHopsParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.threads = threads;
  int64_t n[5];
  integers(sizes, n);
  p.B = n[0], p.Q = n[1], p.K = n[2], p.N = n[3], p.D = n[4];
  p.shared = flags & 1, p.same_rows = flags & 2, p.stack = flags & 4;
  p.bias_dtype = static_cast<DType>(bias_dtype);
  Tensor4* const to[] = {&p.query, &p.in_memory, &p.out_memory, &p.proj,
                         &p.mask,  &p.bias,      &p.grad_out,   &p.grad_weights};
  void** const outputs[] = {&p.out,         &p.trace,      &p.stats,           &p.weights,
                            &p.grad_query,  &p.grad_in,    &p.grad_out_memory, &p.grad_proj,
                            &p.grad_scores, &p.grad_states};
  const int inputs = backward ? 8 : 6, written = backward ? 10 : 4;
  if (PyTuple_GET_SIZE(operands.ptr()) != inputs || PyTuple_GET_SIZE(results.ptr()) != written)
    throw py::value_error("fastattn: memory hops got a wrong number of operands or results");
  for (int i = 0; i < inputs; ++i) *to[i] = optional_operand(PyTuple_GET_ITEM(operands.ptr(), i));
  for (int i = 0; i < written; ++i) *outputs[i] = address(results, i);
  int64_t count[3];
  integers(slots, count);
  p.in_slots = count[0], p.out_slots = count[1], p.proj_slots = count[2];
  return p;
}

void run(bool backward, const MemoryHopsParams& p) {
  py::gil_scoped_release release;
  const size_t element = p.dtype == DType::f64 ? 8 : p.dtype == DType::f32 ? 4 : 2;
  const size_t memory = static_cast<size_t>((p.shared ? 1 : p.B) * p.N * p.D) * element;
  if (p.grad_in != nullptr) expect_to_fill(p.grad_in, memory * static_cast<size_t>(p.in_slots));
  if (p.grad_out_memory != nullptr)
    expect_to_fill(p.grad_out_memory, memory * static_cast<size_t>(p.out_slots));
  backward ? kernels(p.dtype).memory_hops_backward(p) : kernels(p.dtype).memory_hops_forward(p);
}

// sizes: B, Q, K, N, D. flags: 1 shared, 2 same_rows, 4 stack. operands: query, in_memory,
// out_memory, proj, mask, bias; for backward grad_out, grad_weights. results: out, trace, stats,
// weights; for backward grad_query, grad_in, grad_out_memory, grad_proj, grad_scores, grad_states.
// slots: in, out, proj.
void memory_hops(bool backward, int dtype, int threads, const py::tuple& sizes, int flags,
                 const py::object& options, int bias_dtype, const py::tuple& operands,
                 const py::tuple& results, const py::tuple& slots) {
  MemoryHopsParams p =
      hops(backward, dtype, threads, sizes, flags, bias_dtype, operands, results, slots);
  read_memory_hop_options(named(options), p);
  run(backward, p);
}

// The same with u' = o. flags: also 8 search, 16 resume. Without a search, each query repeats its
// own number of steps.
void hopfield_steps(bool backward, int dtype, int threads, const py::tuple& sizes, int flags,
                    const py::object& options, int bias_dtype, const py::tuple& operands,
                    const py::tuple& results, uintptr_t taken, uintptr_t moved) {
  const py::tuple one_each = py::make_tuple(1, 1, 1);
  MemoryHopsParams p =
      hops(backward, dtype, threads, sizes, flags, bias_dtype, operands, results, one_each);
  HopfieldOptions asked;
  read_hopfield_options(named(options), asked);
  p.settles = true;
  p.search = flags & 8, p.resume = flags & 16;
  p.scale = asked.scale;
  p.crowded = asked.crowded;
  p.together = p.search ? asked.together : 1;
  p.eps = p.search ? asked.eps : 0;
  p.taken = reinterpret_cast<int64_t*>(taken);
  p.moved = reinterpret_cast<double*>(moved);
  run(backward, p);
}

}  // namespace

void bind_memory_hops(py::module_& m) {
  m.def("memory_hops", &memory_hops);
  m.def("hopfield_steps", &hopfield_steps);
}

}  // namespace fastattn
