// Python's view of memory hops on a GPU, and of Hopfield retrieval, which uses the same kernels.
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

template <class T>
T* pointer(const py::handle& address) {
  return reinterpret_cast<T*>(address.cast<uintptr_t>());
}

// sizes: (B, Q, K, N, D); flags: (same rows, stack); operands: (query [B, Q, -, D], in_memory and
// out_memory [B, K, N, D], proj [-, K, D, D], mask and bias [B, Q, K, N]), each (address, strides)
// or None; shared: addresses of (trace, stats, partial, scores, taken). partial is 0 if one block
// takes a whole query; taken [B, Q] is the number of steps of a retrieval, else 0.
HopsArguments arguments(int dtype, const py::tuple& sizes, const py::tuple& flags, int bias_dtype,
                        const py::tuple& operands, const py::tuple& shared) {
  HopsArguments p{};
  p.dtype = static_cast<DType>(dtype);
  int64_t n[5];
  integers(sizes, n);
  p.B = n[0], p.Q = n[1], p.K = n[2], p.N = n[3], p.D = n[4];
  p.same_rows = flags[0].cast<bool>();
  p.stack = flags[1].cast<bool>();
  p.query = optional_operand(operands[0]);
  p.in_memory = optional_operand(operands[1]);
  p.out_memory = optional_operand(operands[2]);
  p.proj = optional_operand(operands[3]);
  p.mask = optional_operand(operands[4]);
  p.bias = optional_operand(operands[5]);
  p.bias_dtype = static_cast<DType>(bias_dtype);
  p.trace = pointer<void>(shared[0]);
  p.stats = pointer<void>(shared[1]);
  p.partial = pointer<float>(shared[2]);
  p.scores = pointer<float>(shared[3]);
  p.taken = pointer<int64_t>(shared[4]);
  p.settles = p.taken != nullptr;
  p.slots = p.K + (p.stack ? 1 : 0);
  if (p.partial != nullptr)
    p.splits = static_cast<int>((p.N + kHopRowsOfSplit - 1) / kHopRowsOfSplit);
  return p;
}

bool rows_are_aligned(const HopsArguments& p) {
  const int64_t bytes = p.dtype == DType::f32 ? 4 : 2;
  return p.D * bytes % 16 == 0 && is_aligned(p.in_memory, bytes) &&
         is_aligned(p.out_memory, bytes) && (p.proj.data == nullptr || is_aligned(p.proj, bytes));
}

// results: addresses of (out, weights or 0).
void forward(int dtype, uintptr_t stream, const py::tuple& sizes, const py::tuple& flags,
             const py::object& options, int bias_dtype, const py::tuple& operands,
             const py::tuple& shared, const py::tuple& results) {
  HopsArguments p = arguments(dtype, sizes, flags, bias_dtype, operands, shared);
  read_memory_hop_options(named(options), p);
  p.scale_float = static_cast<float>(p.scale);
  p.out = pointer<void>(results[0]);
  p.weights = pointer<void>(results[1]);
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) {
    memory_hops_forward(element, p, rows_are_aligned(p), stream);
  });
}

// given: (grad_out [B, Q, -, D], grad_weights [B, Q, K, N]), operands or None; results: addresses
// of (xs, ys, grad_query, grad_in, grad_out_memory, grad_proj), 0 if not wanted; slots: of
// in_memory, out_memory and proj; common: whether all B share in_memory, and out_memory.
void backward(int dtype, uintptr_t stream, const py::tuple& sizes, const py::tuple& flags,
              const py::object& options, int bias_dtype, const py::tuple& operands,
              const py::tuple& shared, const py::tuple& given, const py::tuple& results,
              const py::tuple& slots, const py::tuple& common) {
  HopsArguments p = arguments(dtype, sizes, flags, bias_dtype, operands, shared);
  read_memory_hop_options(named(options), p);
  p.scale_float = static_cast<float>(p.scale);
  p.grad_out = optional_operand(given[0]);
  p.grad_weights = optional_operand(given[1]);
  p.xs = pointer<float>(results[0]);
  p.ys = pointer<float>(results[1]);
  p.grad_query = pointer<void>(results[2]);
  p.grad_in = pointer<void>(results[3]);
  p.grad_out_memory = pointer<void>(results[4]);
  p.grad_proj = pointer<void>(results[5]);
  int64_t n[3];
  integers(slots, n);
  p.in_slots = n[0], p.out_slots = n[1], p.proj_slots = n[2];
  p.in_of_batch = common[0].cast<bool>();
  p.out_of_batch = common[1].cast<bool>();
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) {
    memory_hops_backward(element, p, rows_are_aligned(p), stream);
  });
}

// Retrieval: `together` neighbouring queries stop together; trace is [B, Q, 2, D], taken is
// written, K < 0 is no limit.
void search(int dtype, uintptr_t stream, const py::tuple& sizes, const py::tuple& flags,
            const py::object& options, int bias_dtype, const py::tuple& operands,
            const py::tuple& shared, uintptr_t out) {
  HopsArguments p = arguments(dtype, sizes, flags, bias_dtype, operands, shared);
  HopfieldOptions asked;
  read_hopfield_options(named(options), asked);
  p.scale = asked.scale;
  p.scale_float = static_cast<float>(p.scale);
  p.eps = asked.eps;
  p.together = asked.together;
  p.out = reinterpret_cast<void*>(out);
  py::gil_scoped_release release;
  with_element(p.dtype,
               [&](auto* element) { hopfield_search(element, p, rows_are_aligned(p), stream); });
}

}  // namespace

void bind_memory_hops(py::module_& m) {
  m.def("memory_hops_forward", &forward);
  m.def("memory_hops_backward", &backward);
  m.def("hopfield_search", &search);
  m.attr("hop_rows_of_block") = kHopRowsOfBlock;
  m.attr("hop_rows_of_split") = kHopRowsOfSplit;
  m.attr("max_hop_width") = kMaxHopWidth;
}

}  // namespace cuda
}  // namespace fastattn
