// Reads the records of options of fastattn/backends/primitives.py, by the names of their attributes.
//
// Each reader below lists its names beside the members that they fill. To add an option, add it to
// its struct in params.h and to its reader here.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <tuple>

#include "params.h"

namespace fastattn {

inline const char* module_name = "";  // in error messages

// An attribute of a record.
struct Attribute {
  PyObject *record, *name;

  // Such as "fastattn._cpu: softcap of AttentionOptions".
  std::string place() const {
    return std::string(module_name) + ": " + PyUnicode_AsUTF8(name) + " of " +
           Py_TYPE(record)->tp_name;
  }
};

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

// How an attribute fills a struct: `fill(struct, value, attribute)`, false for another type. The name is
// interned once, so a look-up compares addresses.
template <class Fill>
struct Field {
  PyObject* name;
  Fill fill;
};

template <class Fill>
Field<Fill> field_of(const char* name, Fill fill) {
  return {PyUnicode_InternFromString(name), fill};
}

template <class Struct, class Member>
auto field(const char* name, Member Struct::* member) {
  return field_of(name, [=](Struct& to, PyObject* value, const Attribute&) {
    return convert(value, to.*member);
  });
}

// A field that may be None: a bool tells whether it has a value.
template <class Struct>
auto field(const char* name, bool Struct::* given, int64_t Struct::* member) {
  return field_of(name, [=](Struct& to, PyObject* value, const Attribute&) {
    to.*given = value != Py_None;
    return !(to.*given) || convert(value, to.*member);
  });
}

// An integer that kernels add to others: at most `most` in size. Larger ones are errors, except in a
// limit, where they change nothing.
template <class Struct>
auto position(const char* name, int64_t Struct::* member, int64_t most = kFarthest) {
  return field_of(name, [=](Struct& to, PyObject* value, const Attribute& attribute) {
    const bool right = convert(value, to.*member);
    if (right && (to.*member < -most || to.*member > most))
      throw pybind11::value_error(attribute.place() + " must be within " + std::to_string(most) +
                                  " of 0, got " + std::to_string(to.*member));
    return right;
  });
}

template <class Struct>
auto limit(const char* name, int64_t Struct::* member) {
  return field_of(name, [=](Struct& to, PyObject* value, const Attribute&) {
    const bool right = convert(value, to.*member);
    to.*member = std::clamp(to.*member, -2 * kFarthest, 2 * kFarthest);
    return right;
  });
}

// A field that is a string in Python, one of `choices`; the first is 0.
template <class Struct, class Member, class... Choices>
auto choice(const char* name, Member Struct::* member, Choices... choices) {
  const std::array<PyObject*, sizeof...(Choices)> names{PyUnicode_InternFromString(choices)...};
  return field_of(name, [=](Struct& to, PyObject* value, const Attribute&) {
    const auto* const found = std::find_if(names.begin(), names.end(), [value](PyObject* x) {
      return PyUnicode_Check(value) && PyUnicode_Compare(value, x) == 0;
    });
    to.*member = static_cast<Member>(found - names.begin());
    return found != names.end();
  });
}

// A record, whose attributes are read.
class Named {
 public:
  explicit Named(pybind11::handle from) : from_(from.ptr()) {}

  template <class Struct, class... Fields>
  void read(Struct& to, const std::tuple<Fields...>& fields) const {
    const auto read_one = [&](const auto& field) {
      const auto fill = [&](PyObject* value, const Attribute& x) {
        return field.fill(to, value, x);
      };
      read_by(fill, field.name);
    };
    std::apply([&](const auto&... each) { (read_one(each), ...); }, fields);
  }

  // One attribute, of calls that are not short.
  template <class T>
  T read(const char* name) const {
    T value;
    const auto fill = [&](PyObject* from, const Attribute&) { return convert(from, value); };
    read_by(fill, pybind11::str(name).ptr());
    return value;
  }

 private:
  template <class Fill>
  void read_by(Fill fill, PyObject* name) const {
    const Attribute attribute{from_, name};
    const auto value = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(from_, name));
    if (!value) {
      PyErr_Clear();
      throw pybind11::type_error(attribute.place() + " is missing");
    }
    if (!fill(value.ptr(), attribute))
      throw pybind11::type_error(attribute.place() + " cannot be " +
                                 std::string(pybind11::repr(value)));
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

}  // namespace fastattn
