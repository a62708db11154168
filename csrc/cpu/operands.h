// The operands of a native call: each tensor is read once and checked against the sizes that the call
// promises for it, so that no kernel reads or writes outside. Errors name the tensor.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "../params.h"
#include "tensors.h"

namespace fastattn {

using Sizes = std::initializer_list<int64_t>;

void expect_dtype(const char* name, const TensorView& view, std::initializer_list<DType> allowed);
void expect_sizes(const char* name, const TensorView& view, DType dtype, Sizes sizes);
void expect_sizes(const char* name, const TensorView& view, DType dtype, const int64_t* sizes,
                  int rank);

TensorView read_sizes(const char* name, pybind11::handle from, DType dtype, Sizes sizes);

// A tensor that broadcasts to these sizes, aligned at the last dimension; where it does, its stride is 0.
// Writes as many strides as there are sizes.
TensorView read_broadcast(const char* name, pybind11::handle from, Sizes sizes, int64_t* strides);

// A vector of int32, contiguous and not empty.
const int32_t* read_words(const char* name, pybind11::handle from, int64_t* count);

// The random key of dropout, from a tensor with one integer; 0 for None.
uint64_t read_seed(pybind11::handle from);

// What the calls ask Python: new_rows(like, width) makes a result where torch.empty_like() does not keep
// its columns together (empty_output of fastattn/backends/_alloc.py); may_round() tells whether products
// of float32 may round their factors to 16 bits.
void use_rules(const pybind11::object& new_rows, const pybind11::object& may_round);
pybind11::object rule_of_rounding();

// A tensor of these sizes, without gaps and in this dtype; `kept` owns a copy where it is another one.
// Converts to floating dtypes only.
void* read_flat(const char* name, pybind11::handle from, DType dtype, Sizes sizes,
                pybind11::object* kept);
// A tensor of these sizes whose columns are together; `kept` owns a copy where they are not.
TensorView read_columns_together(const char* name, pybind11::handle from, DType dtype, Sizes sizes,
                                 pybind11::object* kept);

// A new tensor with rows of `width` columns, otherwise like `like`.
pybind11::object new_rows(pybind11::handle like, int64_t width, TensorView* to);
pybind11::object new_rows(pybind11::handle like, int64_t width, Tensor4* to);  // of four dimensions

// A new tensor of these sizes, contiguous and filled with zeros.
pybind11::object new_zeros(DType dtype, Sizes sizes, void** data);

}  // namespace fastattn
