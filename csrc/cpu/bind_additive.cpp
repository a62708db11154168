// Python's view of additive attention: addresses, shapes and strides in, nothing out.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "../arguments.h"
#include "kernel_table.h"
#include "named.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// operands: query, key, value, the addresses of vector and bias, mask, mask_dtype, seed.
AdditiveParams common(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                      const py::dict& operands) {
  using P = AttentionParams;
  using A = AdditiveParams;
  static const auto shared = std::make_tuple(
      field("query", &P::q), field("key", &P::k), field("value", &P::v), field("mask", &P::mask),
      field("mask_dtype", &P::mask_dtype), field("seed", &P::seed));
  static const auto own = std::make_tuple(field("vector", &A::vector), field("bias", &A::bias));
  AdditiveParams x{};
  AttentionParams& p = x.attention;
  p.dtype = static_cast<DType>(dtype);
  p.threads = threads;
  int64_t n[5];
  integers(sizes, n);
  p.B = n[0], p.Lq = n[1], p.Lk = n[2], p.D = n[3], p.Dv = n[4];
  p.Hq = p.Hkv = 1;
  AdditiveOptions asked;
  read_additive_options(named(options), asked);
  p.window_right = asked.causal ? 0 : -1;
  p.dropout_p = asked.dropout_p;
  named(operands).read(p, shared);
  named(operands).read(x, own);
  return x;
}

// results: out, applied
void additive_forward(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                      const py::dict& operands, const py::dict& results) {
  using P = AttentionParams;
  static const auto written = std::make_tuple(field("out", &P::out), field("applied", &P::applied));
  AdditiveParams x = common(dtype, threads, sizes, options, operands);
  named(results).read(x.attention, written);
  x.wants_weights = x.attention.applied.data != nullptr;
  py::gil_scoped_release release;
  kernels(x.attention.dtype).additive_forward(x);
}

// gradients: grad_out, grad_weights, grad_query, grad_key, grad_value, grad_mask, then the addresses
// of grad_vector, grad_bias, grad_scores and parts, then chunk_rows, chunks, direct.
void additive_backward(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                       const py::dict& operands, const py::dict& gradients) {
  using P = AttentionParams;
  using A = AdditiveParams;
  static const auto shared =
      std::make_tuple(field("grad_out", &P::grad_out), field("grad_weights", &P::grad_weights),
                      field("grad_query", &P::grad_q), field("grad_key", &P::grad_k),
                      field("grad_value", &P::grad_v), field("grad_mask", &P::grad_mask));
  static const auto own =
      std::make_tuple(field("grad_vector", &A::grad_vector), field("grad_bias", &A::grad_bias),
                      field("grad_scores", &A::grad_scores), field("parts", &A::parts),
                      field("chunk_rows", &A::chunk_rows), field("chunks", &A::chunks),
                      field("direct", &A::direct));
  AdditiveParams x = common(dtype, threads, sizes, options, operands);
  named(gradients).read(x.attention, shared);
  named(gradients).read(x, own);
  py::gil_scoped_release release;
  kernels(x.attention.dtype).additive_backward(x);
}

}  // namespace

void bind_additive(py::module_& m) {
  m.def("additive_forward", &additive_forward);
  m.def("additive_backward", &additive_backward);
}

}  // namespace fastattn
