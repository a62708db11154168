// Reads the records of options of fastattn/backends/primitives.py, by the names of their
// attributes.
//
// A reader lists the names with the members that they fill: for attention below, for the other
// operators next to their tensors. To add an option, extend its struct in params.h and its reader.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "params.h"

namespace fastattn {

inline const char* module_name = "";  // in error messages

inline bool succeeded(bool may_be_error) {
  if (!may_be_error || !PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}

// All return false, without an error, if the value has another type.
inline bool convert(PyObject* value, double& to) {
  to = PyFloat_AsDouble(value);
  return succeeded(to == -1.0);
}

inline bool convert(PyObject* value, int64_t& to) {
  to = PyLong_AsLongLong(value);
  return succeeded(to == -1);
}

inline bool convert(PyObject* value, bool& to) {
  to = value == Py_True;
  return PyBool_Check(value);
}

inline bool convert(PyObject* value, Weights& to) {
  int64_t number;
  if (!convert(value, number)) return false;
  to = static_cast<Weights>(number);
  return true;
}

// A record, whose attributes fill the members of structs. Their names are interned once for each
// member, so a look-up compares addresses.
class Named {
 public:
  explicit Named(pybind11::handle from) : from_(from.ptr()) {}

  template <auto member, class Struct>
  void read(const char* name, Struct& to) const {
    fill(interned<member>(name), [&](PyObject* value) { return convert(value, to.*member); });
  }

  // An attribute that may be None: the member `given` tells whether it has a value.
  template <auto given, auto member, class Struct>
  void read(const char* name, Struct& to) const {
    fill(interned<member>(name), [&](PyObject* value) {
      to.*given = value != Py_None;
      return !(to.*given) || convert(value, to.*member);
    });
  }

  // An integer that kernels add to others, so a larger one is an error.
  template <auto member, class Struct>
  void read_position(const char* name, Struct& to) const {
    read<member>(name, to);
    if (to.*member < -kFarthest || to.*member > kFarthest)
      throw pybind11::value_error(place(interned<member>(name)) + " must be within " +
                                  std::to_string(kFarthest) + " of 0, got " +
                                  std::to_string(to.*member));
  }

  // An integer that is only compared with positions, so a larger one means the same as the limit.
  template <auto member, class Struct>
  void read_limit(const char* name, Struct& to) const {
    read<member>(name, to);
    to.*member = std::clamp(to.*member, -2 * kFarthest, 2 * kFarthest);
  }

  // A string: the member becomes its index in `choices`, as an enumerator of the same number.
  template <auto member, class Struct>
  void read_choice(const char* name, Struct& to, std::initializer_list<const char*> choices) const {
    fill(interned<member>(name), [&](PyObject* value) {
      const auto* const found =
          std::find_if(choices.begin(), choices.end(), [value](const char* x) {
            return PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, x) == 0;
          });
      to.*member = static_cast<std::decay_t<decltype(to.*member)>>(found - choices.begin());
      return found != choices.end();
    });
  }

  // Reads one attribute by name, for calls where the look-up does not matter.
  template <class T>
  T read(const char* name) const {
    T value;
    fill(pybind11::str(name).ptr(), [&](PyObject* from) { return convert(from, value); });
    return value;
  }

 private:
  template <auto member>
  static PyObject* interned(const char* name) {
    static PyObject* const made = PyUnicode_InternFromString(name);
    return made;
  }

  template <class Fill>
  void fill(PyObject* name, Fill converted) const {
    const auto value = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(from_, name));
    if (!value) {
      PyErr_Clear();
      throw pybind11::type_error(place(name) + " is missing");
    }
    if (!converted(value.ptr()))
      throw pybind11::type_error(place(name) + " cannot be " + std::string(pybind11::repr(value)));
  }

  // Such as "fastattn._cpu: softcap of AttentionOptions".
  std::string place(PyObject* name) const {
    return std::string(module_name) + ": " + PyUnicode_AsUTF8(name) + " of " +
           Py_TYPE(from_)->tp_name;
  }

  PyObject* from_;
};

// The options of every kind of attention; decoding has no other options.
inline void read_score_options(const Named& from, AttentionOptions& to) {
  using O = AttentionOptions;
  from.read<&O::scale>("scale", to);
  from.read_limit<&O::window_left>("window_left", to);
  from.read_limit<&O::window_right>("window_right", to);
  from.read<&O::softcap>("softcap", to);
}

// Reads the options of scaled_dot_product_attention.
inline void read_attention_options(const Named& from, AttentionOptions& to) {
  using O = AttentionOptions;
  read_score_options(from, to);
  from.read_position<&O::offset>("offset", to);
  from.read<&O::dropout_p>("dropout_p", to);
  from.read<&O::weights>("weights", to);
  if (to.dropout_p <= 0) return;
  from.read_position<&O::first_query>("first_query", to);
  from.read_position<&O::first_key>("first_key", to);
  from.read_position<&O::first_head>("first_head", to);
}

// Reads the options of varlen_attention.
template <class Call>
void read_varlen_options(const Named& from, AttentionOptions& to, Call& call) {
  read_score_options(from, to);
  from.read<&Call::bottom_right>("bottom_right", call);
  from.read<&AttentionOptions::dropout_p>("dropout_p", to);
}

}  // namespace fastattn
