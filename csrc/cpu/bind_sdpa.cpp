// Python's view of attention: addresses, shapes and strides in, nothing out.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "kernel_table.h"
#include "sdpa_arguments.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// operands: see optional_arguments; and applied, the weights.
AttentionParams arguments(AttentionParams p, const py::object& options,
                          const py::object& operands) {
  static const auto applied = std::make_tuple(field("applied", &AttentionParams::applied));
  read_attention_options(named(options), p);
  optional_arguments(p, operands);
  if (!operands.is_none()) named(operands).read_given(p, applied);
  return p;
}

void attention_forward(int dtype, bool reduced, int threads, const py::tuple& sizes, uintptr_t q,
                       const py::tuple& q_stride, uintptr_t k, const py::tuple& k_stride,
                       uintptr_t v, const py::tuple& v_stride, uintptr_t out,
                       const py::tuple& out_stride, uintptr_t lse, const py::object& options,
                       const py::object& operands) {
  AttentionParams p = arguments(common_arguments(dtype, reduced, threads, sizes, q, q_stride, k,
                                                 k_stride, v, v_stride, out, out_stride, lse),
                                options, operands);
  py::gil_scoped_release release;
  // A caller without a gradient passes no lse: a tensor costs two microseconds, this buffer a
  // twentieth.
  std::unique_ptr<double[]> unwanted;
  if (lse == 0) {
    unwanted.reset(new double[static_cast<size_t>(p.B * p.Hq * p.Lq)]);
    p.lse = unwanted.get();
  }
  kernels(p.dtype).attention_forward(p);
}

// gradients: see read_gradients; and grad_mask.
void attention_backward(int dtype, bool reduced, int threads, const py::tuple& sizes, uintptr_t q,
                        const py::tuple& q_stride, uintptr_t k, const py::tuple& k_stride,
                        uintptr_t v, const py::tuple& v_stride, uintptr_t out,
                        const py::tuple& out_stride, uintptr_t lse, const py::object& options,
                        const py::object& operands, const py::dict& gradients) {
  static const auto mask = std::make_tuple(field("grad_mask", &AttentionParams::grad_mask));
  AttentionParams p = arguments(common_arguments(dtype, reduced, threads, sizes, q, q_stride, k,
                                                 k_stride, v, v_stride, out, out_stride, lse),
                                options, operands);
  read_gradients(named(gradients), p);
  named(gradients).read(p, mask);
  py::gil_scoped_release release;
  kernels(p.dtype).attention_backward(p);
}

}  // namespace

void bind_sdpa(py::module_& m) {
  m.def("attention_forward", &attention_forward);
  m.def("attention_backward", &attention_backward);
}

}  // namespace fastattn
