// Local attention as Python calls it: tensors in, tensors out.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "../arguments.h"
#include "../operands.h"
#include "../options.h"
#include "kernel_table.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// The arguments of a call, and the copies that they point to.
struct LocalCall : LocalParams {
  py::object copies[9];
};

// Without overflow for any reach.
int64_t rows_of_window(const LocalParams& p) {
  expect(p.reach > 0, "reach must be positive, got " + std::to_string(p.reach));
  return p.reach < p.Lk ? std::min(2 * p.reach + 1, p.Lk) : p.Lk;
}

// [B, L, columns]; the columns are together.
Tensor4 rows_operand(const TensorView& x) { return {x.data, {x.stride[0], x.stride[1], 1, 0}}; }

void read_local_call(LocalCall& p, const py::object& options, py::handle query, py::handle key,
                     py::handle value, py::handle positions, py::handle padding,
                     py::handle factor) {
  read_local_options(Named(options), p);
  const TensorView q = view_of("query", query), v = view_of("value", value);
  expect_dtype("query", q, kFloats);
  p.dtype = q.dtype;
  p.threads = threads();
  p.B = q.size[0], p.Lq = q.size[1], p.D = q.size[2], p.Lk = v.size[1], p.Dv = v.size[2];
  p.W = rows_of_window(p);
  p.query =
      rows_operand(read_columns_together("query", query, p.dtype, {p.B, p.Lq, p.D}, &p.copies[0]));
  p.key = rows_operand(read_columns_together("key", key, p.dtype, {p.B, p.Lk, p.D}, &p.copies[1]));
  p.value =
      rows_operand(read_columns_together("value", value, p.dtype, {p.B, p.Lk, p.Dv}, &p.copies[2]));
  const DType acc = accumulator(p.dtype);
  p.positions = read_flat("positions", positions, acc, {p.B, p.Lq}, &p.copies[3]);
  if (!padding.is_none())
    p.padding = static_cast<const uint8_t*>(
        read_flat("padding", padding, DType::boolean, {p.B, p.Lk}, &p.copies[4]));
  if (!factor.is_none())
    p.factor = read_flat("factor", factor, acc, {p.B, p.Lq, p.W}, &p.copies[5]);
}

// (out, weights), new.
py::tuple local_attention(const py::object& options, py::handle query, py::handle key,
                          py::handle value, py::handle positions, py::handle padding,
                          py::handle factor) {
  LocalCall p{};
  read_local_call(p, options, query, key, value, positions, padding, factor);
  const py::object out = p.D == p.Dv ? new_contiguous_like(query, &p.out)
                                     : new_result(p.dtype, {p.B, p.Lq, p.Dv}, &p.out);
  const py::object weights = new_buffer(accumulator(p.dtype), {p.B, p.Lq, p.W}, &p.weights);
  {
    py::gil_scoped_release release;
    kernels(p.dtype).local_attention_forward(p);
  }
  return py::make_tuple(out, weights);
}

// The gradients of query, key, value and positions, new; the last in the accumulator's dtype.
py::tuple local_attention_backward(const py::object& options, py::handle grad_out,
                                   py::handle grad_weights, py::handle query, py::handle key,
                                   py::handle value, py::handle positions, py::handle padding,
                                   py::handle factor, py::handle weights) {
  LocalCall p{};
  read_local_call(p, options, query, key, value, positions, padding, factor);
  const DType acc = accumulator(p.dtype);
  if (!grad_out.is_none())
    p.grad_out = rows_operand(
        read_columns_together("grad_out", grad_out, p.dtype, {p.B, p.Lq, p.Dv}, &p.copies[6]));
  if (!grad_weights.is_none())
    p.grad_weights = read_flat("grad_weights", grad_weights, acc, {p.B, p.Lq, p.W}, &p.copies[7]);
  p.weights = read_flat("weights", weights, acc, {p.B, p.Lq, p.W}, &p.copies[8]);
  const py::handle wide_positions = p.copies[3] ? p.copies[3] : positions;
  const py::object grad_query = new_contiguous_like(query, &p.grad_query),
                   grad_key = new_contiguous_like(key, &p.grad_key),
                   grad_value = new_contiguous_like(value, &p.grad_value),
                   grad_positions = new_contiguous_like(wide_positions, &p.grad_positions);
  const std::unique_ptr<char[]> coefficients(
      new char[static_cast<size_t>(2 * p.B * p.Lq * p.W * element_bytes(acc))]);
  p.coefficients = coefficients.get();
  {
    py::gil_scoped_release release;
    kernels(p.dtype).local_attention_backward(p);
  }
  return py::make_tuple(grad_query, grad_key, grad_value, grad_positions);
}

}  // namespace

void bind_local_attention(py::module_& m) {
  m.def("local_attention", &local_attention);
  m.def("local_attention_backward", &local_attention_backward);
}

}  // namespace fastattn
