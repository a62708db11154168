// function.h describes the functions that are declared there.
#include "function.h"

#include <algorithm>
#include <new>
#include <stdexcept>

namespace fastattn {
namespace {

// The names of a list "a, b, c".
std::vector<std::string> split(const std::string& names) {
  std::vector<std::string> found;
  for (size_t begin = 0; begin < names.size();) {
    const size_t end = std::min(names.find(", ", begin), names.size());
    found.push_back(names.substr(begin, end - begin));
    begin = end + 2;
  }
  return found;
}

}  // namespace

void Parameters::place(PyObject* const* given, Py_ssize_t count, PyObject* named,
                       PyObject** values) const {
  const auto positional = static_cast<size_t>(count);
  if (positional > taken)
    throw py::type_error(function + "() takes " + std::to_string(taken) + " tensors, got " +
                         std::to_string(positional));
  std::copy_n(given, positional, values);
  std::fill(values + positional, values + names.size(), Py_None);
  const Py_ssize_t others = named == nullptr ? 0 : PyTuple_GET_SIZE(named);
  for (Py_ssize_t n = 0; n < others; ++n) {
    PyObject* const name = PyTuple_GET_ITEM(named, n);
    auto at = std::find(names.begin(), names.end(), name);  // names in code are interned
    if (at == names.end())
      at = std::find_if(names.begin(), names.end(), [name](PyObject* x) {
        return x != nullptr && PyUnicode_Compare(x, name) == 0;
      });
    if (at == names.end() || at < names.begin() + count)
      throw py::type_error(function + "() takes no " + PyUnicode_AsUTF8(name) + " by name");
    values[at - names.begin()] = given[count + n];
  }
}

void define(py::module_& m, const char* name, const char* tensors, size_t taken, const char* named,
            NativeCall call) {
  // They live as long as the process, as all functions do.
  auto* const parameters = new Parameters{name, taken, {}};
  std::vector<PyObject*>& names = parameters->names;
  std::string text;  // for inspect.signature()
  for (const std::string& each : split(tensors)) {
    const bool is_taken = names.size() < taken;
    if (is_taken) text += each + "=None, ";
    names.push_back(is_taken ? PyUnicode_InternFromString(each.c_str()) : nullptr);
  }
  for (const std::string& each : split(named))
    names.push_back(PyUnicode_InternFromString(each.substr(0, each.find('=')).c_str()));
  if (*named != '\0') text += std::string("*, ") + named;
  auto* const doc = new std::string(std::string(name) + "(" + text + ")\n--\n\n");
  auto* const method =
      new PyMethodDef{parameters->function.c_str(),
                      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
                      METH_FASTCALL | METH_KEYWORDS, doc->c_str()};
  const py::capsule self(parameters);
  m.attr(name) = py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(method, self.ptr(), m.attr("__name__").ptr()));
}

void raise_caught() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

}  // namespace fastattn
