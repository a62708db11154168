// Python's view of memory hops.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "../memory_hops_arguments.h"
#include "kernel_table.h"
#include "memory.h"
#include "named.h"
#include "tensors.h"

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
  read_hop_gradients(named(gradients), p);
  named(gradients).read(p, own);
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

// gradients: see read_hop_gradients; and the addresses of grad_scores and grad_states.
void memory_hops_backward(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                          const py::dict& operands, const py::object& biases,
                          const py::dict& gradients) {
  MemoryHopsParams p = common(dtype, threads, sizes, operands, biases);
  read_memory_hop_options(named(options), p);
  read_gradients(gradients, p);
  run_backward(p);
}

// -- calls without other options, whose tensors are read here --------------------------------------

Strided strided(const TensorView& x) {
  return {x.data, x.rank, {x.stride[0], x.stride[1], x.stride[2], x.stride[3]}};
}

// A memory of each example, [B, N, D] or [B, slots, N, D].
bool read_memory(py::handle from, int64_t slots, const MemoryHopsParams& p, TensorView* to) {
  if (!read_tensor(from, to) || to->dtype != p.dtype || to->rank < 3) return false;
  const int last = to->rank - 1;
  return to->size[0] == p.B && (last == 2 || to->size[1] == slots) && to->size[last] == p.D &&
         to->stride[last] == 1;
}

// Reads query [B, D], the memories and a mask [B, N]; false if the general path has to see the call.
bool read_plain_hops(py::handle query, py::handle in_memory, py::handle out_memory, py::handle mask,
                     int64_t hops, MemoryHopsParams& p) {
  TensorView q, m, c, visible;
  if (!read_tensor(query, &q) || q.rank != 2 || q.dtype == DType::boolean || q.size[1] == 0)
    return false;
  p.dtype = q.dtype, p.B = q.size[0], p.Q = 1, p.K = hops, p.D = q.size[1];
  HopOperands x{strided(q), {}, {}, {}};
  if (!read_memory(in_memory, hops + out_memory.is_none(), p, &m)) return false;
  p.N = m.size[m.rank - 2], x.in_memory = strided(m);
  if (!out_memory.is_none()) {
    if (!read_memory(out_memory, hops, p, &c) || c.size[c.rank - 2] != p.N) return false;
    x.out_memory = strided(c);
  }
  if (!mask.is_none()) {
    if (!read_tensor(mask, &visible) || visible.dtype != DType::boolean ||
        !visible.has_sizes({p.B, p.N}))
      return false;
    p.mask = {visible.data, {visible.stride[0], 0, 0, visible.stride[1]}};
  }
  place_hops(x, p);
  return true;
}

// 0 if the general path has to see a call; else a number that is the same for calls of the same dtype,
// and odd if a tensor requires a gradient.
int64_t plain_hops_call(py::handle query, py::handle in_memory, py::handle out_memory,
                        py::handle mask, int64_t hops) {
  MemoryHopsParams p{};
  if (!read_plain_hops(query, in_memory, out_memory, mask, hops, p)) return 0;
  // Another kernel handles a memory that all queries share.
  if (p.B <= 1 || p.in_memory.stride[0] == 0 || p.out_memory.stride[0] == 0) return 0;
  return number_of_call(p.dtype, {query, in_memory, out_memory, mask});
}

// What the backward pass reads is one array [B, size]: the trace of all, the statistics of all and, of
// short memories, the weights of all, so that it need not compute them again.
struct Kept {
  static constexpr int64_t kShort = 64;  // rows that the kernel reads as one block
  int64_t trace, stats, weights;         // elements of each example

  Kept(const MemoryHopsParams& p, bool differentiable)
      : trace((2 * p.K + 1) * p.D), stats(p.K * 2), weights(0) {
    if (differentiable && p.N <= kShort && accumulator(p.dtype) == p.dtype) weights = p.K * p.N;
  }
  int64_t size() const { return trace + stats + weights; }
  void place(void* data, MemoryHopsParams& p) const {
    char* const at = static_cast<char*>(data);
    const int64_t bytes = p.B * element_bytes(accumulator(p.dtype));
    p.trace = at, p.stats = at + trace * bytes;
    if (weights > 0) p.weights = at + (trace + stats) * bytes;
  }
};

// (out, kept), new.
py::tuple plain_hops(py::handle query, py::handle in_memory, py::handle out_memory, py::handle mask,
                     int64_t hops, double scale, bool differentiable, int threads) {
  MemoryHopsParams p{};
  if (!read_plain_hops(query, in_memory, out_memory, mask, hops, p))
    throw py::type_error("fastattn: not a plain call of memory hops");
  p.scale = scale, p.threads = threads;
  const Kept kept(p, differentiable);
  void* data;
  const py::object out = new_contiguous_like(query, &p.out);
  const py::object buffer = new_buffer(accumulator(p.dtype), {p.B, kept.size()}, &data);
  kept.place(data, p);
  run_forward(p);
  return py::make_tuple(out, buffer);
}

// The gradients of query, in_memory and out_memory, new, None where they are not wanted; None if the
// general path has to see the call.
py::object plain_hops_backward(py::handle grad_out, py::handle query, py::handle in_memory,
                               py::handle out_memory, py::handle mask, py::handle buffer,
                               int64_t hops, double scale, bool wants_in, bool wants_out,
                               int threads) {
  MemoryHopsParams p{};
  TensorView of_out, of_kept;
  if (!read_plain_hops(query, in_memory, out_memory, mask, hops, p) ||
      !read_tensor(grad_out, &of_out) || !read_tensor(buffer, &of_kept))
    return py::none();
  const Kept kept(p, true);
  if (of_out.dtype != p.dtype || !of_out.has_sizes({p.B, p.D}) ||
      of_kept.dtype != accumulator(p.dtype) || !of_kept.has_sizes({p.B, kept.size()}) ||
      !of_kept.is_contiguous())
    return py::none();
  p.scale = scale, p.threads = threads;
  kept.place(of_kept.data, p);
  p.grad_out = {of_out.data, {of_out.stride[0], 0, 0, of_out.stride[1]}};
  const py::object grad_query = new_contiguous_like(query, &p.grad_query);
  py::object grad_in = py::none(), grad_out_memory = py::none();
  if (wants_in) grad_in = new_contiguous_like(in_memory, &p.grad_in);
  if (wants_out && !out_memory.is_none())
    grad_out_memory = new_contiguous_like(out_memory, &p.grad_out_memory);
  run_backward(p);
  return py::make_tuple(grad_query, grad_in, grad_out_memory);
}

}  // namespace

void bind_memory_hops(py::module_& m) {
  m.def("plain_hops_call", &plain_hops_call);
  m.def("plain_hops", &plain_hops);
  m.def("plain_hops_backward", &plain_hops_backward);
  m.def("memory_hops_forward", &memory_hops_forward);
  m.def("memory_hops_backward", &memory_hops_backward);
}

}  // namespace fastattn
