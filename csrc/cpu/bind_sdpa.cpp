// Python's view of attention: addresses, shapes and strides in, nothing out.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../relative_bias_arguments.h"
#include "kernel_table.h"
#include "mask_program.h"
#include "memory.h"
#include "sdpa_arguments.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// The arguments of a call, and the memory that they point to.
struct Arguments : AttentionParams {
  int64_t positions_length = 0;
  std::vector<MaskStep> steps;
};

// The distances of positions, which are in the memory of the host here.
void check_positions(const AttentionParams& p) {
  if (!reads_relative_bias(p) || p.positions == nullptr) return;
  const auto queries = std::minmax_element(p.positions + p.offset, p.positions + p.offset + p.Lq);
  const auto keys = std::minmax_element(p.positions, p.positions + p.Lk);
  expect_distances(p, int64_t{*queries.first} - *keys.second,
                   int64_t{*queries.second} - *keys.first);
}

// operands: see optional_arguments and read_mask_program; and applied, the weights; how many positions
// there are.
Arguments arguments(const AttentionParams& common, const py::object& options,
                    const py::object& operands) {
  static const auto others =
      std::make_tuple(field("applied", &AttentionParams::applied),
                      field("positions_length", &Arguments::positions_length));
  Arguments p{common, 0, {}};
  read_attention_options(named(options), p);
  if (!optional_arguments(p, operands)) return p;
  named(operands).read_given(p, others);
  check_relative_bias(p, p.positions_length);
  check_positions(p);
  read_mask_program(named(operands), p, p.steps);
  return p;
}

void attention_forward(int dtype, const py::object& may_reduce, int threads, const py::tuple& sizes,
                       uintptr_t q, const py::tuple& q_stride, uintptr_t k,
                       const py::tuple& k_stride, uintptr_t v, const py::tuple& v_stride,
                       uintptr_t out, const py::tuple& out_stride, uintptr_t lse,
                       const py::object& options, const py::object& operands) {
  Arguments p = arguments(common_arguments(dtype, may_reduce, threads, sizes, q, q_stride, k,
                                           k_stride, v, v_stride, out, out_stride, lse),
                          options, operands);
  py::gil_scoped_release release;
  const int64_t weights =
      p.B * (p.weights == Weights::per_head ? p.Hq : 1) * p.Lq * p.Lk * element_bytes(p.dtype);
  if (p.weights != Weights::none) expect_to_fill(p.applied.data, static_cast<size_t>(weights));
  kernels(p.dtype).attention_forward(p);
}

// Of a small call: the address and the strides of grad_out, grad_query, grad_key and grad_value, in
// this order, in one tuple; nothing is then read by name.
bool plain_gradients(const py::object& from, AttentionParams& p) {
  if (!PyTuple_CheckExact(from.ptr())) return false;
  constexpr int kOperands = 4;
  if (PyTuple_GET_SIZE(from.ptr()) != 2 * kOperands)
    throw py::value_error(
        "fastattn: expected an address and strides for each of 4 gradients, got " +
        std::to_string(PyTuple_GET_SIZE(from.ptr())) + " values");
  Tensor4* const to[kOperands] = {&p.grad_out, &p.grad_q, &p.grad_k, &p.grad_v};
  for (int n = 0; n < kOperands; ++n)
    *to[n] = operand(static_cast<uintptr_t>(integer(PyTuple_GET_ITEM(from.ptr(), 2 * n))),
                     py::reinterpret_borrow<py::tuple>(PyTuple_GET_ITEM(from.ptr(), 2 * n + 1)));
  return true;
}

// gradients: see plain_gradients; or, by name, see read_gradients and SinkGradients; grad_mask; and
// partial, if it is.
void attention_backward(int dtype, const py::object& may_reduce, int threads,
                        const py::tuple& sizes, uintptr_t q, const py::tuple& q_stride, uintptr_t k,
                        const py::tuple& k_stride, uintptr_t v, const py::tuple& v_stride,
                        uintptr_t out, const py::tuple& out_stride, uintptr_t lse,
                        const py::object& options, const py::object& operands,
                        const py::object& gradients) {
  static const auto mask = std::make_tuple(field("grad_mask", &AttentionParams::grad_mask));
  static const auto partial = std::make_tuple(field("partial", &AttentionParams::partial));
  Arguments p = arguments(common_arguments(dtype, may_reduce, threads, sizes, q, q_stride, k,
                                           k_stride, v, v_stride, out, out_stride, lse),
                          options, operands);
  if (plain_gradients(gradients, p)) {
    py::gil_scoped_release release;
    kernels(p.dtype).attention_backward(p);
    return;
  }
  read_gradients(named(gradients), p);
  named(gradients).read(p, mask);
  named(gradients).read_given(p, partial);
  const SinkGradients of_sinks(named(gradients), p);
  py::gil_scoped_release release;
  kernels(p.dtype).attention_backward(p);
  of_sinks.write();
}

}  // namespace

void bind_sdpa(py::module_& m) {
  m.def("attention_forward", &attention_forward);
  m.def("attention_backward", &attention_backward);
}

}  // namespace fastattn
