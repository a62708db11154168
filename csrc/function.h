// Python functions of a backend: the tensors of a primitive in the order of its operator, then its
// options by keyword. A function defined by pybind11 alone takes as long as a small kernel.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "operands.h"

// Declares the tensors of a call, in the order of its operator. An omitted tensor is None.
#define FASTATTN_TENSORS(...)     \
  ::pybind11::handle __VA_ARGS__; \
  static constexpr const char* kNames = #__VA_ARGS__;

namespace fastattn {

inline py::none none() { return {}; }

// The parameters of a function: the names of all tensors of the primitive, null for trailing
// tensors that the function does not take, then the names of the keyword-only arguments.
struct Parameters {
  std::string function;
  size_t taken;  // tensors
  std::vector<PyObject*> names;

  // Fills `values`, one for each name; None for omitted arguments.
  void place(PyObject* const* given, Py_ssize_t count, PyObject* named, PyObject** values) const;
};

using NativeCall = PyObject* (*)(PyObject* self, PyObject* const* given, Py_ssize_t count,
                                 PyObject* named);
// `named`: the keyword-only arguments, such as "options, keeps=False". The function's self is a
// capsule of its parameters.
void define(py::module_& m, const char* name, const char* tensors, size_t taken, const char* named,
            NativeCall call);
void raise_caught();  // in a handler: the C++ exception as one of Python

// An argument that is passed by name, as a bool, an integer or any type that pybind11 casts.
template <class T>
T converted(PyObject* value) {
  if constexpr (std::is_same_v<T, bool>)
    return value == Py_True;
  else if constexpr (std::is_integral_v<T>)
    return static_cast<T>(integer(value));
  else
    return T(value);
}

// `f` as a Python function: f(tensors, keyword-only arguments...).
template <auto f>
struct Bound;

template <class Result, class Tensors, class... Named, Result (*f)(const Tensors&, Named...)>
struct Bound<f> {
  static constexpr size_t kTensors = sizeof(Tensors) / sizeof(py::handle);

  // The C function that Python calls: places the arguments, runs f, and turns C++ errors into
  // Python ones.
  static PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* named) {
    try {
      PyObject* values[kTensors + sizeof...(Named)];
      static_cast<const Parameters*>(PyCapsule_GetPointer(self, nullptr))
          ->place(given, count, named, values);
      return run(values, std::index_sequence_for<Named...>());
    } catch (...) {
      raise_caught();
      return nullptr;
    }
  }

  static void define(py::module_& m, const char* name, const char* named, size_t taken) {
    fastattn::define(m, name, Tensors::kNames, std::min(taken, kTensors), named, &call);
  }

 private:
  template <size_t... N>
  static PyObject* run(PyObject* const* values, std::index_sequence<N...>) {
    Tensors tensors;
    std::memcpy(static_cast<void*>(&tensors), values, sizeof tensors);
    return py::object(f(tensors, converted<Named>(values[kTensors + N])...)).release().ptr();
  }
};

// `taken`: how many of the tensors the function takes; the others are None.
template <auto f>
void define(py::module_& m, const char* name, const char* named = "options",
            size_t taken = SIZE_MAX) {
  Bound<f>::define(m, name, named, taken);
}

}  // namespace fastattn
