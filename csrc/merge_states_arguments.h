// Reading states of attention that are merged, and making the results, for the bindings of both modules.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>

#include "operands.h"

namespace fastattn {

// Outputs [..., L, D] of at most four dimensions, and lse [..., L], as [B, H, L, D] and [B, H, L, -].
class MergedStates {
 public:
  MergeStatesParams params{};

  MergedStates(py::handle out_a, py::handle lse_a, py::handle out_b, py::handle lse_b) {
    MergeStatesParams& p = params;
    out_ = view_of("out_a", out_a), lse_ = view_of("lse_a", lse_a);
    expect_dtype("out_a", out_, kFloats);
    expect_dtype("lse_a", lse_, {DType::f32, DType::f64});
    if (out_.rank < 2) throw py::value_error("fastattn: out_a must have at least two dimensions");
    int64_t sizes[4] = {1, 1, 1, 1};
    std::copy_n(out_.size, out_.rank, sizes + 4 - out_.rank);
    p.B = sizes[0], p.H = sizes[1], p.L = sizes[2], p.D = sizes[3];
    p.dtype = out_.dtype, p.lse_dtype = lse_.dtype;
    p.out_a = operand_of(out_), p.lse_a = rows("lse_a", lse_a);
    p.out_b = output("out_b", out_b), p.lse_b = rows("lse_b", lse_b);
  }

  // (out, lse), new.
  py::tuple new_results(py::handle out_a, py::handle lse_a) {
    const py::object out = new_output(out_a, &params.out),
                     lse = new_rows_of_lse(lse_a, &params.lse);
    return py::make_tuple(out, lse);
  }

  // The gradients of the four tensors, new. A result may have no gradient: None.
  py::tuple new_gradients(py::handle grad_out, py::handle grad_lse, py::handle out_a,
                          py::handle lse_a, py::handle out_b, py::handle lse_b) {
    MergeStatesParams& p = params;
    if (!grad_out.is_none()) p.grad_out = output("grad_out", grad_out);
    if (!grad_lse.is_none()) p.grad_lse = rows("grad_lse", grad_lse);
    const py::object of_out_a = new_output(out_a, &p.grad_out_a),
                     of_lse_a = new_rows_of_lse(lse_a, &p.grad_lse_a),
                     of_out_b = new_output(out_b, &p.grad_out_b),
                     of_lse_b = new_rows_of_lse(lse_b, &p.grad_lse_b);
    return py::make_tuple(of_out_a, of_lse_a, of_out_b, of_lse_b);
  }

 private:
  TensorView out_, lse_;

  // Of the sizes and the dtype of out_a, and of lse_a.
  Tensor4 output(const char* name, py::handle from) const {
    return operand_of(checked(name, from, out_, out_.rank));
  }
  Tensor4 rows(const char* name, py::handle from) const {
    return of_rows(checked(name, from, lse_, out_.rank - 1));
  }

  static py::object new_output(py::handle like, Tensor4* to) {
    TensorView made;
    py::object result = new_like(like, &made);
    *to = operand_of(made);
    return result;
  }
  static py::object new_rows_of_lse(py::handle like, Tensor4* to) {
    TensorView made;
    py::object result = new_like(like, &made);
    *to = of_rows(made);
    return result;
  }

  TensorView checked(const char* name, py::handle from, const TensorView& like, int rank) const {
    const TensorView x = view_of(name, from);
    expect_sizes(name, x, like.dtype, out_.size, rank);
    return x;
  }

  static Tensor4 of_rows(const TensorView& x) {
    Tensor4 found{x.data, {0, 0, 0, 1}};
    std::copy_n(x.stride, x.rank, found.stride + 3 - x.rank);
    return found;
  }
};

}  // namespace fastattn
