// The operands of a native call: each tensor is read once and checked against the expected sizes,
// so that no kernel reads or writes outside. Errors name the tensor.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

#include "params.h"
#include "tensors.h"

namespace fastattn {

namespace py = pybind11;

using Make = py::object (*)(DType, const Sizes&, void**);  // new_result, new_buffer or new_zeros

inline constexpr std::initializer_list<DType> kFloats = {DType::f32, DType::f64, DType::bf16,
                                                         DType::f16};

inline void expect(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

// Takes a function that builds the text: building it without an error would slow small calls down.
template <class Text, class = decltype(std::declval<Text>()())>
void expect(bool holds, const Text& what) {
  if (!holds) throw std::invalid_argument(what());
}

// Expects that `of` is positive and divides `number`: kernels divide by both.
inline void expect_multiple(int64_t of, int64_t number, const char* name) {
  if (of > 0 && number % of == 0) return;
  throw std::invalid_argument(std::string(name) + " must be positive and divide " +
                              std::to_string(number) + ", got " + std::to_string(of));
}

// The size of a floating type.
inline int64_t element_bytes(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
}

// The type that kernels compute in: "acc" in params.h.
inline DType accumulator(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

inline int64_t integer(PyObject* item) {
  const int64_t value = PyLong_AsLongLong(item);
  if (value == -1 && PyErr_Occurred()) throw pybind11::error_already_set();
  return value;
}

void expect_dtype(const char* name, const TensorView& view, std::initializer_list<DType> allowed);
void expect_sizes(const char* name, const TensorView& view, DType dtype, const Sizes& sizes);

TensorView read_sizes(const char* name, py::handle from, DType dtype, const Sizes& sizes);
// read_sizes(), or for None a view without data, whose strides are 0.
TensorView read_if_given(const char* name, py::handle from, DType dtype, const Sizes& sizes);

// The dimensions of a tensor in this order, such as "0.12"; a dot adds a dimension of size 1 and
// stride 0.
TensorView permuted(const char* name, const TensorView& view, const char* order);

// Four dimensions: missing leading dimensions have size 1 and stride 0.
TensorView filled(const char* name, const TensorView& view);

// A tensor that broadcasts to these sizes, aligned at the last dimension. Writes one stride per
// size, 0 where it broadcasts.
TensorView read_broadcast(const char* name, py::handle from, const Sizes& sizes, int64_t* strides);
void expect_broadcast(const char* name, const TensorView& view, const Sizes& sizes,
                      int64_t* strides);

// A vector of int32, contiguous and not empty.
const int32_t* read_words(const char* name, py::handle from, int64_t* count);

// The random key of dropout, from a tensor with one integer; 0 for None.
uint64_t read_seed(py::handle from);

// Sets the Python functions that calls use: new_rows(like, width) makes a result where
// torch.empty_like() would not keep its columns contiguous, summed_to(tensor, gradient) reduces the
// gradient of an expanded tensor (fastattn/backends/_alloc.py), and may_round() tells whether
// products of float32 may round their factors to 16 bits.
void use_rules(const py::object& new_rows, const py::object& summed_to,
               const py::object& may_round);
bool may_round();

// A contiguous tensor of these sizes and this dtype; `owners` owns a copy if one is needed.
// Converts to floating dtypes only.
void* read_flat(const char* name, py::handle from, DType dtype, const Sizes& sizes,
                py::object* owners);
// read_flat(), or null for None.
void* read_flat_if_given(const char* name, py::handle from, DType dtype, const Sizes& sizes,
                         py::object* owners);
// A tensor with contiguous columns; `owners` owns a copy if one is needed. For a batch that shares
// one entry, only that entry is copied.
TensorView with_rows(const char* name, py::handle from, py::object* owners);

// A new tensor with rows of `width` columns, otherwise like `like`.
py::object new_rows(py::handle like, int64_t width, TensorView* to);

// A new tensor of these sizes, contiguous and filled with zeros.
py::object new_zeros(DType dtype, const Sizes& sizes, void** data);

// Reduces and converts a gradient to the sizes and the dtype of its tensor, which the kernel read
// expanded or widened.
py::object gradient_of(py::handle tensor, const py::object& made);

// A tuple of `count` results, None until they are set.
inline py::tuple no_results(size_t count) {
  py::tuple made(count);
  for (size_t n = 0; n < count; ++n) made[n] = py::none();
  return made;
}

// Runs f with the GIL released.
template <class F>
auto without_gil(F f) {
  py::gil_scoped_release release;
  return f();
}

}  // namespace fastattn
