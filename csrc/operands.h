// The operands of a native call: each tensor is read once and checked against the sizes that the call
// promises for it, so that no kernel reads or writes outside. Errors name the tensor.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "params.h"
#include "tensors.h"

namespace fastattn {

namespace py = pybind11;

using Sizes = std::initializer_list<int64_t>;

inline constexpr std::initializer_list<DType> kFloats = {DType::f32, DType::f64, DType::bf16,
                                                         DType::f16};

void expect_dtype(const char* name, const TensorView& view, std::initializer_list<DType> allowed);
void expect_sizes(const char* name, const TensorView& view, DType dtype, Sizes sizes);
void expect_sizes(const char* name, const TensorView& view, DType dtype, const int64_t* sizes,
                  int rank);

TensorView read_sizes(const char* name, py::handle from, DType dtype, Sizes sizes);

// A tensor that broadcasts to these sizes, aligned at the last dimension; where it does, its stride is 0.
// Writes as many strides as there are sizes.
TensorView read_broadcast(const char* name, py::handle from, Sizes sizes, int64_t* strides);

// A vector of int32, contiguous and not empty.
const int32_t* read_words(const char* name, py::handle from, int64_t* count);

// The random key of dropout, from a tensor with one integer; 0 for None.
uint64_t read_seed(py::handle from);

// What the calls ask Python: new_rows(like, width) makes a result where torch.empty_like() does not keep
// its columns together (empty_output of fastattn/backends/_alloc.py); may_round() tells whether products
// of float32 may round their factors to 16 bits.
void use_rules(const py::object& new_rows, const py::object& may_round);
py::object rule_of_rounding();

// A tensor of these sizes, without gaps and in this dtype; `kept` owns a copy where it is another one.
// Converts to floating dtypes only.
void* read_flat(const char* name, py::handle from, DType dtype, Sizes sizes, py::object* kept);
// A tensor of these sizes whose columns are together; `kept` owns a copy where they are not.
TensorView read_columns_together(const char* name, py::handle from, DType dtype, Sizes sizes,
                                 py::object* kept);

// A new tensor with rows of `width` columns, otherwise like `like`.
py::object new_rows(py::handle like, int64_t width, TensorView* to);
py::object new_rows(py::handle like, int64_t width, Tensor4* to);  // of four dimensions

// A new tensor of these sizes, contiguous and filled with zeros.
py::object new_zeros(DType dtype, Sizes sizes, void** data);

}  // namespace fastattn
