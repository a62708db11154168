// The operands of a native call: each tensor is read once and checked against the sizes that the call
// promises for it, so that no kernel reads or writes outside. Errors name the tensor.
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

// The same for a text that is made for the error alone: a small call would notice it.
template <class Text, class = decltype(std::declval<Text>()())>
void expect(bool holds, const Text& what) {
  if (!holds) throw std::invalid_argument(what());
}

// Kernels divide by both.
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
// The same; of None, a view without data, whose strides are 0.
TensorView read_if_given(const char* name, py::handle from, DType dtype, const Sizes& sizes);

// The dimensions of a tensor in this order, such as "0.12"; a dot adds one of size 1, with stride 0.
TensorView permuted(const char* name, const TensorView& view, const char* order);

// Four dimensions: those that are missing at the front have size 1 and stride 0.
TensorView filled(const char* name, const TensorView& view);

// A tensor that broadcasts to these sizes, aligned at the last dimension; where it does, its stride is 0.
// Writes as many strides as there are sizes.
TensorView read_broadcast(const char* name, py::handle from, const Sizes& sizes, int64_t* strides);
void expect_broadcast(const char* name, const TensorView& view, const Sizes& sizes,
                      int64_t* strides);

// A vector of int32, contiguous and not empty.
const int32_t* read_words(const char* name, py::handle from, int64_t* count);

// The random key of dropout, from a tensor with one integer; 0 for None.
uint64_t read_seed(py::handle from);

// What the calls ask Python: new_rows(like, width) makes a result where torch.empty_like() does not keep
// its columns together, and summed_to(tensor, gradient) makes the gradient of an expanded tensor that of
// the tensor (fastattn/backends/_alloc.py); may_round() tells whether products of float32 may round
// their factors to 16 bits.
void use_rules(const py::object& new_rows, const py::object& summed_to,
               const py::object& may_round);
bool may_round();

// A tensor of these sizes, without gaps and in this dtype; `kept` owns a copy where it is another one.
// Converts to floating dtypes only.
void* read_flat(const char* name, py::handle from, DType dtype, const Sizes& sizes,
                py::object* kept);
// The same; a null pointer for None.
void* read_flat_if_given(const char* name, py::handle from, DType dtype, const Sizes& sizes,
                         py::object* kept);
// A tensor whose columns are together; `kept` owns a copy where they are not. Of a batch that shares one
// entry, only that entry is copied.
TensorView with_rows(const char* name, py::handle from, py::object* kept);

// A new tensor with rows of `width` columns, otherwise like `like`.
py::object new_rows(py::handle like, int64_t width, TensorView* to);

// A new tensor of these sizes, contiguous and filled with zeros.
py::object new_zeros(DType dtype, const Sizes& sizes, void** data);

// A gradient in the sizes and the dtype of its tensor, of which the kernel took an expanded or a wider
// one.
py::object gradient_of(py::handle tensor, const py::object& made);

// So many results, None until they are made.
inline py::tuple no_results(size_t count) {
  py::tuple made(count);
  for (size_t n = 0; n < count; ++n) made[n] = py::none();
  return made;
}

// Runs f while other threads of Python may run.
template <class F>
auto without_gil(F f) {
  py::gil_scoped_release release;
  return f();
}

}  // namespace fastattn
