// Reads the records of options of fastattn/backends/primitives.py, by the names of their attributes.
//
// Each reader below lists its names beside the members that they fill. To add an option, add it to
// its struct in params.h and to its reader here.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "params.h"

namespace fastattn {

// Fills one member. The name is interned once, so a look-up compares addresses.
template <class Struct, class Member>
struct Field {
  PyObject* name;
  Member Struct::* member;
};

template <class Struct, class Member>
Field<Struct, Member> field(const char* name, Member Struct::* member) {
  return {PyUnicode_InternFromString(name), member};
}

// A field that may be None: a bool tells whether it has a value.
template <class Struct>
struct OptionalField {
  PyObject* name;
  bool Struct::* given;
  int64_t Struct::* member;
};

template <class Struct>
OptionalField<Struct> field(const char* name, bool Struct::* given, int64_t Struct::* member) {
  return {PyUnicode_InternFromString(name), given, member};
}

// An integer that kernels add to others: at most `most` in size. Larger ones are errors, except in a
// limit, where they change nothing.
template <class Struct>
struct BoundedField {
  PyObject* name;
  int64_t Struct::* member;
  int64_t most;
  bool is_limit;
};

template <class Struct>
BoundedField<Struct> position(const char* name, int64_t Struct::* member,
                              int64_t most = kFarthest) {
  return {PyUnicode_InternFromString(name), member, most, false};
}

template <class Struct>
BoundedField<Struct> limit(const char* name, int64_t Struct::* member) {
  return {PyUnicode_InternFromString(name), member, 2 * kFarthest, true};
}

// A field that is a string in Python, one of `choices`; the first is 0.
template <class Struct, class Member, int N>
struct ChoiceField {
  PyObject* name;
  Member Struct::* member;
  PyObject* choices[N];
};

template <class Struct, class Member, class... Choices>
ChoiceField<Struct, Member, sizeof...(Choices)> choice(const char* name, Member Struct::* member,
                                                       Choices... choices) {
  return {PyUnicode_InternFromString(name), member, {PyUnicode_InternFromString(choices)...}};
}

inline const char* module_name = "";  // in error messages

// A record, whose attributes are read.
class Named {
 public:
  explicit Named(pybind11::handle from) : from_(from.ptr()) {}

  template <class Struct, class... Fields>
  void read(Struct& to, const std::tuple<Fields...>& fields) const {
    std::apply([&](const auto&... each) { (fill(to, each), ...); }, fields);
  }

 private:
  template <class Struct, class Owner, class Member>
  void fill(Struct& to, const Field<Owner, Member>& field) const {
    const pybind11::object value = get(field.name);
    if (!convert(value.ptr(), to.*field.member)) complain(field.name, value);
  }

  template <class Struct, class Owner>
  void fill(Struct& to, const OptionalField<Owner>& field) const {
    const pybind11::object value = get(field.name);
    to.*field.given = !value.is_none();
    if (to.*field.given && !convert(value.ptr(), to.*field.member)) complain(field.name, value);
  }

  template <class Struct, class Owner>
  void fill(Struct& to, const BoundedField<Owner>& field) const {
    const pybind11::object value = get(field.name);
    int64_t& member = to.*field.member;
    if (!convert(value.ptr(), member)) complain(field.name, value);
    if (-field.most <= member && member <= field.most) return;
    if (!field.is_limit)
      throw pybind11::value_error(place(field.name) + " must be within " +
                                  std::to_string(field.most) + " of 0, got " +
                                  std::to_string(member));
    member = member < 0 ? -field.most : field.most;
  }

  template <class Struct, class Owner, class Member, int N>
  void fill(Struct& to, const ChoiceField<Owner, Member, N>& field) const {
    const pybind11::object value = get(field.name);
    for (int n = 0; n < N; ++n) {
      if (!PyUnicode_Check(value.ptr()) || PyUnicode_Compare(value.ptr(), field.choices[n]) != 0)
        continue;
      to.*field.member = static_cast<Member>(n);
      return;
    }
    complain(field.name, value);
  }

  pybind11::object get(PyObject* name) const {
    if (PyObject* value = PyObject_GetAttr(from_, name))
      return pybind11::reinterpret_steal<pybind11::object>(value);
    PyErr_Clear();
    throw pybind11::type_error(place(name) + " is missing");
  }

  [[noreturn]] void complain(PyObject* name, const pybind11::object& value) const {
    throw pybind11::type_error(place(name) + " cannot be " + std::string(pybind11::repr(value)));
  }

  // Such as "fastattn._cpu: softcap of AttentionOptions".
  std::string place(PyObject* name) const {
    return std::string(module_name) + ": " + PyUnicode_AsUTF8(name) + " of " +
           Py_TYPE(from_)->tp_name;
  }

  // Returns false, without an error, if the value has another type.
  static bool convert(PyObject* value, double& to) {
    to = PyFloat_AsDouble(value);
    return succeeded(to == -1.0);
  }

  static bool convert(PyObject* value, int64_t& to) {
    to = PyLong_AsLongLong(value);
    return succeeded(to == -1);
  }

  static bool convert(PyObject* value, bool& to) {
    to = value == Py_True;
    return PyBool_Check(value);
  }

  static bool convert(PyObject* value, Weights& to) {
    int64_t number;
    if (!convert(value, number)) return false;
    to = static_cast<Weights>(number);
    return true;
  }

  static bool succeeded(bool may_be_error) {
    if (!may_be_error || !PyErr_Occurred()) return true;
    PyErr_Clear();
    return false;
  }

  PyObject* from_;
};

inline void read_attention_options(const Named& from, AttentionOptions& to) {
  using O = AttentionOptions;
  static const auto fields =
      std::make_tuple(field("scale", &O::scale), position("offset", &O::offset),
                      limit("window_left", &O::window_left),
                      limit("window_right", &O::window_right), field("softcap", &O::softcap),
                      field("dropout_p", &O::dropout_p), field("weights", &O::weights));
  static const auto of_dropout =
      std::make_tuple(position("first_query", &O::first_query),
                      position("first_key", &O::first_key), position("first_head", &O::first_head));
  from.read(to, fields);
  if (to.dropout_p > 0) from.read(to, of_dropout);
}

inline void read_varlen_options(const Named& from, VarlenOptions& to) {
  using O = VarlenOptions;
  static const auto fields = std::make_tuple(
      field("scale", &O::scale), field("bottom_right", &O::bottom_right),
      limit("window_left", &O::window_left), limit("window_right", &O::window_right),
      field("softcap", &O::softcap), field("dropout_p", &O::dropout_p));
  from.read(to, fields);
}

inline void read_decode_options(const Named& from, DecodeOptions& to) {
  using O = DecodeOptions;
  static const auto fields =
      std::make_tuple(field("scale", &O::scale), limit("window_left", &O::window_left),
                      limit("window_right", &O::window_right), field("softcap", &O::softcap));
  from.read(to, fields);
}

inline void read_append_options(const Named& from, AppendOptions& to) {
  using O = AppendOptions;
  static const auto fields = std::make_tuple(field("rotary_interleaved", &O::rotary_interleaved));
  from.read(to, fields);
}

inline void read_additive_options(const Named& from, AdditiveOptions& to) {
  using O = AdditiveOptions;
  static const auto fields =
      std::make_tuple(field("causal", &O::causal), field("dropout_p", &O::dropout_p));
  from.read(to, fields);
}

inline void read_local_options(const Named& from, LocalOptions& to) {
  using O = LocalOptions;
  static const auto fields = std::make_tuple(field("reach", &O::reach), field("bell", &O::bell));
  from.read(to, fields);
}

inline void read_memory_hop_options(const Named& from, MemoryHopOptions& to) {
  using O = MemoryHopOptions;
  static const auto fields = std::make_tuple(
      choice("activation", &O::activation, "none", "relu", "tanh", "sigmoid"),
      choice("normalize", &O::normalize, "none", "softmax"), field("scale", &O::scale));
  from.read(to, fields);
}

inline void read_hopfield_options(const Named& from, HopfieldOptions& to) {
  using O = HopfieldOptions;
  static const auto fields =
      std::make_tuple(field("scale", &O::scale), field("eps", &O::eps),
                      field("together", &O::together), field("crowded", &O::crowded));
  from.read(to, fields);
}

inline void read_encode_memory_options(const Named& from, EncodeMemoryOptions& to) {
  using O = EncodeMemoryOptions;
  static const auto fields =
      std::make_tuple(field("padding_idx", &O::has_padding_idx, &O::padding_idx));
  from.read(to, fields);
}

inline void read_sinusoidal_options(const Named& from, SinusoidalOptions& to) {
  using O = SinusoidalOptions;
  static const auto fields =
      std::make_tuple(position("offset", &O::offset, kFarthestOffset), field("scale", &O::scale),
                      field("padding_idx", &O::has_padding_idx, &O::padding_idx));
  from.read(to, fields);
}

}  // namespace fastattn
