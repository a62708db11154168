// Python's view of memory hops, and of Hopfield retrieval, which uses the same kernels: addresses,
// shapes and strides in, nothing out.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "../memory_hops_arguments.h"
#include "kernel_table.h"
#include "memory.h"
#include "named.h"

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
  static const auto kept = std::make_tuple(field("weights", &P::weights));
  read_hop_gradients(named(gradients), p);
  named(gradients).read(p, own);
  named(gradients).read_given(p, kept);
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

// results: see read_hop_results.
void memory_hops_forward(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                         const py::dict& operands, const py::object& biases,
                         const py::dict& results) {
  MemoryHopsParams p = common(dtype, threads, sizes, operands, biases);
  read_memory_hop_options(named(options), p);
  read_hop_results(named(results), p);
  run_forward(p);
}

// gradients: see read_hop_gradients; the addresses of grad_scores and grad_states; and of the
// forward's weights, where they were kept.
void memory_hops_backward(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                          const py::dict& operands, const py::object& biases,
                          const py::dict& gradients) {
  MemoryHopsParams p = common(dtype, threads, sizes, operands, biases);
  read_memory_hop_options(named(options), p);
  read_gradients(gradients, p);
  run_backward(p);
}

// steps: the addresses of taken and moved, search, resume, keep. Without a search, each query repeats
// its own number of steps.
MemoryHopsParams retrieval(int dtype, int threads, const py::tuple& sizes,
                           const py::object& options, const py::dict& operands,
                           const py::object& biases, const py::dict& steps) {
  using P = MemoryHopsParams;
  static const auto fields = std::make_tuple(field("taken", &P::taken), field("moved", &P::moved),
                                             field("search", &P::search),
                                             field("resume", &P::resume), field("keep", &P::keep));
  MemoryHopsParams p = common(dtype, threads, sizes, operands, biases);
  HopfieldOptions asked;
  read_hopfield_options(named(options), asked);
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

}  // namespace

void bind_memory_hops(py::module_& m) {
  m.def("memory_hops_forward", &memory_hops_forward);
  m.def("memory_hops_backward", &memory_hops_backward);
  m.def("hopfield_forward", &hopfield_forward);
  m.def("hopfield_backward", &hopfield_backward);
}

}  // namespace fastattn
