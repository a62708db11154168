// Checks of arguments, and facts of dtypes, that the bindings share.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "params.h"

namespace fastattn {

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

}  // namespace fastattn
