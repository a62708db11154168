// Python's view of memory hops on a GPU, and of Hopfield retrieval, which uses the same kernels.
#include "../memory_hops_arguments.h"
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// operands: see read_hops and read_hop_biases; and the addresses of partial, scores and taken.
// partial is 0 if one block takes a whole query; taken [B, Q] is the number of steps of a retrieval,
// else 0.
HopsArguments hops_arguments(int dtype, const py::tuple& sizes, const py::dict& operands) {
  using P = HopsArguments;
  static const auto own = std::make_tuple(field("partial", &P::partial),
                                          field("scores", &P::scores), field("taken", &P::taken));
  HopsArguments p{};
  read_hops(named(operands), dtype, sizes, p);
  read_hop_biases(named(operands), p);
  named(operands).read(p, own);
  p.settles = p.taken != nullptr;
  p.slots = p.K + (p.stack ? 1 : 0);
  if (p.partial != nullptr)
    p.splits = static_cast<int>((p.N + kHopRowsOfSplit - 1) / kHopRowsOfSplit);
  return p;
}

bool rows_are_aligned(const HopsArguments& p) {
  const int64_t bytes = element_bytes(p.dtype);
  return p.D * bytes % 16 == 0 && is_aligned(p.in_memory, bytes) &&
         is_aligned(p.out_memory, bytes) && (p.proj.data == nullptr || is_aligned(p.proj, bytes));
}

// results: see read_hop_results.
void launch_memory_hops_forward(int dtype, uintptr_t stream, const py::tuple& sizes,
                                const py::object& options, const py::dict& operands,
                                const py::dict& results) {
  HopsArguments p = hops_arguments(dtype, sizes, operands);
  read_memory_hop_options(named(options), p);
  read_hop_results(named(results), p);
  p.scale_float = static_cast<float>(p.scale);
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) {
    memory_hops_forward(element, p, rows_are_aligned(p), stream);
  });
}

// gradients: see read_hop_gradients; the addresses of xs and ys; in_of_batch, out_of_batch.
void launch_memory_hops_backward(int dtype, uintptr_t stream, const py::tuple& sizes,
                                 const py::object& options, const py::dict& operands,
                                 const py::dict& gradients) {
  using P = HopsArguments;
  static const auto own = std::make_tuple(field("xs", &P::xs), field("ys", &P::ys),
                                          field("in_of_batch", &P::in_of_batch),
                                          field("out_of_batch", &P::out_of_batch));
  HopsArguments p = hops_arguments(dtype, sizes, operands);
  read_memory_hop_options(named(options), p);
  read_hop_gradients(named(gradients), p);
  named(gradients).read(p, own);
  p.scale_float = static_cast<float>(p.scale);
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) {
    memory_hops_backward(element, p, rows_are_aligned(p), stream);
  });
}

// Retrieval: `together` neighbouring queries stop together; trace is [B, Q, 2, D], taken is
// written, K < 0 is no limit. out: an address.
void launch_hopfield(int dtype, uintptr_t stream, const py::tuple& sizes, const py::object& options,
                     const py::dict& operands, uintptr_t out) {
  HopsArguments p = hops_arguments(dtype, sizes, operands);
  HopfieldOptions asked;
  read_hopfield_options(named(options), asked);
  p.scale = asked.scale;
  p.scale_float = static_cast<float>(p.scale);
  p.eps = asked.eps;
  expect_multiple(asked.together, p.Q, "together");
  p.together = asked.together;
  p.out = reinterpret_cast<void*>(out);
  py::gil_scoped_release release;
  with_element(p.dtype,
               [&](auto* element) { hopfield_search(element, p, rows_are_aligned(p), stream); });
}

}  // namespace

void bind_memory_hops(py::module_& m) {
  m.def("memory_hops_forward", &launch_memory_hops_forward);
  m.def("memory_hops_backward", &launch_memory_hops_backward);
  m.def("hopfield_search", &launch_hopfield);
  m.attr("hop_rows_of_block") = kHopRowsOfBlock;
  m.attr("hop_rows_of_split") = kHopRowsOfSplit;
  m.attr("max_hop_width") = kMaxHopWidth;
}

}  // namespace cuda
}  // namespace fastattn
