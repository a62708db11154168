// Facts about Python objects on which a plan depends, and whether they still hold. They are checked
// in C++ because checking the hundred facts of an encoder layer in Python takes longer than
// computing the layer.
#pragma once
#include <pybind11/pybind11.h>

#include <vector>

#include "../operands.h"

namespace fastattn {

class Facts {
 public:
  // places: (dictionary, key, value), where the value `...` means that the key is absent; kinds:
  // objects whose classes must not change; hooks: dictionaries whose values must not change.
  Facts(const py::list& places, const py::list& kinds, const py::list& hooks) {
    for (const py::handle each : places) {
      const auto place = each.cast<py::tuple>();
      expect(PyDict_Check(py::object(place[0]).ptr()), "places must be in dictionaries");
      const bool absent = py::object(place[2]).ptr() == Py_Ellipsis;
      places_.push_back({place[0], place[1], absent ? py::object() : py::object(place[2])});
    }
    for (const py::handle each : kinds) {
      const auto object = py::reinterpret_borrow<py::object>(each);
      kinds_.push_back({object, py::type::of(object)});
    }
    for (const py::handle each : hooks) {
      expect(PyDict_Check(each.ptr()), "hooks must be dictionaries");
      const auto hook = py::reinterpret_borrow<py::dict>(each);
      std::vector<py::object> values;
      for (const auto& item : hook)
        values.push_back(py::reinterpret_borrow<py::object>(item.second));
      hooks_.push_back({hook, values});
    }
  }

  bool hold() const {
    for (const Place& each : places_)
      if (PyDict_GetItemWithError(each.owner.ptr(), each.key.ptr()) != each.value.ptr())
        return PyErr_Clear(), false;
    for (const Kind& each : kinds_)
      if (reinterpret_cast<PyObject*>(Py_TYPE(each.object.ptr())) != each.type.ptr()) return false;
    for (const Hooks& each : hooks_) {
      if (static_cast<size_t>(PyDict_Size(each.owner.ptr())) != each.values.size()) return false;
      if (each.values.empty()) continue;
      Py_ssize_t at = 0;
      PyObject *key, *value;
      for (const py::object& before : each.values)
        if (!PyDict_Next(each.owner.ptr(), &at, &key, &value) || value != before.ptr())
          return false;
    }
    return true;
  }

 private:
  struct Place {
    py::object owner, key, value;
  };
  struct Kind {
    py::object object, type;
  };
  struct Hooks {
    py::object owner;
    std::vector<py::object> values;
  };
  std::vector<Place> places_;
  std::vector<Kind> kinds_;
  std::vector<Hooks> hooks_;
};

}  // namespace fastattn
