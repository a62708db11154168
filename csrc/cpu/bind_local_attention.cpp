// Local attention as Python calls it: tensors in, tensors out.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "../function.h"
#include "../options.h"
#include "kernel_table.h"

namespace fastattn {
namespace {

struct LocalTensors {
  // [B, Lq, D], [B, Lk, D], [B, Lk, Dv], [B, Lq], [B, Lk] bool or None, [B, Lq, W] or None
  FASTATTN_TENSORS(query, key, value, positions, padding, factor)
};

struct LocalGradTensors {
  FASTATTN_TENSORS(grad_out, grad_weights, query, key, value, positions, padding, factor, weights)
};

// 2 reach + 1, limited so that it cannot overflow.
int64_t rows_of_window(const LocalParams& p) {
  expect(p.reach > 0, "reach must be positive, got " + std::to_string(p.reach));
  return p.reach < p.Lk ? std::min(2 * p.reach + 1, p.Lk) : p.Lk;
}

// The arguments of a call, and the copies that they point to.
struct LocalCall : LocalParams {
  py::object copies[9];

  // Reads the tensors and the options of a call.
  template <class Tensors>
  LocalCall(py::handle options, const Tensors& from) : LocalParams{} {
    LocalParams& p = *this;
    Named(options).read<&LocalOptions::reach>("reach", p);
    Named(options).read<&LocalOptions::bell>("bell", p);
    const TensorView q = view_of("query", from.query), v = view_of("value", from.value);
    expect_dtype("query", q, kFloats);
    p.dtype = q.dtype;
    p.threads = fastattn::threads();
    p.B = q.size[0], p.Lq = q.size[1], p.D = q.size[2], p.Lk = v.size[1], p.Dv = v.size[2];
    p.W = rows_of_window(p);
    p.query = read_rows_of("query", from.query, {p.B, p.Lq, p.D}, 0);
    p.key = read_rows_of("key", from.key, {p.B, p.Lk, p.D}, 1);
    p.value = read_rows_of("value", from.value, {p.B, p.Lk, p.Dv}, 2);
    const DType acc = accumulator(p.dtype);
    p.positions = read_flat("positions", from.positions, acc, {p.B, p.Lq}, &copies[3]);
    p.padding = static_cast<const uint8_t*>(
        read_flat_if_given("padding", from.padding, DType::boolean, {p.B, p.Lk}, &copies[4]));
    p.factor = read_flat_if_given("factor", from.factor, acc, {p.B, p.Lq, p.W}, &copies[5]);
  }

  // [B, L, columns]; the columns are together.
  Tensor4 read_rows_of(const char* name, py::handle from, const Sizes& sizes, int copy) {
    const TensorView x = with_rows(name, from, &copies[copy]);
    expect_sizes(name, x, dtype, sizes);
    return {x.data, {x.stride[0], x.stride[1], 1, 0}};
  }
};

// Returns (out, weights).
py::tuple local_attention(const LocalTensors& x, py::handle options) {
  LocalCall p(options, x);
  const py::object out = p.D == p.Dv ? new_contiguous_like(x.query, &p.out)
                                     : new_result(p.dtype, {p.B, p.Lq, p.Dv}, &p.out),
                   weights = new_buffer(accumulator(p.dtype), {p.B, p.Lq, p.W}, &p.weights);
  without_gil([&] { kernels(p.dtype).local_attention_forward(p); });
  return py::make_tuple(out, weights);
}

// Returns the gradients of query, key, value and positions.
py::tuple local_attention_backward(const LocalGradTensors& x, py::handle options) {
  LocalCall p(options, x);
  const DType acc = accumulator(p.dtype);
  const Sizes of_weights = {p.B, p.Lq, p.W};
  if (!x.grad_out.is_none())
    p.grad_out = p.read_rows_of("grad_out", x.grad_out, {p.B, p.Lq, p.Dv}, 6);
  p.grad_weights =
      read_flat_if_given("grad_weights", x.grad_weights, acc, of_weights, &p.copies[7]);
  p.weights = read_flat("weights", x.weights, acc, of_weights, &p.copies[8]);
  const py::handle wide_positions = p.copies[3] ? py::handle(p.copies[3]) : x.positions;
  const py::object of_query = new_contiguous_like(x.query, &p.grad_query),
                   of_key = new_contiguous_like(x.key, &p.grad_key),
                   of_value = new_contiguous_like(x.value, &p.grad_value),
                   of_positions = new_contiguous_like(wide_positions, &p.grad_positions);
  const std::unique_ptr<char[]> coefficients(
      new char[static_cast<size_t>(2 * p.B * p.Lq * p.W * element_bytes(acc))]);
  p.coefficients = coefficients.get();
  without_gil([&] { kernels(p.dtype).local_attention_backward(p); });
  return py::make_tuple(of_query, of_key, of_value, gradient_of(x.positions, of_positions));
}

}  // namespace
}  // namespace fastattn
