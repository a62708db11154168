// The state of modules of Python on which a plan depends, and whether it still is the same. A layer
// of an encoder has hundreds of facts: Python would take longer to look at them than the layer to
// compute.
#pragma once
#include <pybind11/pybind11.h>

#include <vector>

#include "../operands.h"

namespace fastattn {

class Facts {
 public:
  // dictionaries: whose keys and values stay the same objects; kinds: objects whose classes do.
  // Whole dictionaries, since their items lie one after the other: after a layer's weights were
  // read, a look-up by key is several cache misses.
  Facts(const py::list& dictionaries, const py::list& kinds) {
    for (const py::handle each : dictionaries) {
      expect(PyDict_Check(each.ptr()), "dictionaries must be dictionaries");
      const auto owner = py::reinterpret_borrow<py::dict>(each);
      dictionaries_.push_back({owner, owner.size()});
      for (const auto& [key, value] : owner)
        items_.push_back(
            {py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value)});
    }
    for (const py::handle each : kinds) {
      const auto object = py::reinterpret_borrow<py::object>(each);
      kinds_.push_back({object, py::type::of(object)});
    }
  }

  // Whether no class and no dictionary entry has changed since the facts were recorded.
  bool hold() const {
    for (const Kind& each : kinds_)
      if (reinterpret_cast<PyObject*>(Py_TYPE(each.object.ptr())) != each.type.ptr()) return false;
    const Item* before = items_.data();
    for (const Dictionary& each : dictionaries_) {
      if (static_cast<size_t>(PyDict_Size(each.owner.ptr())) != each.size) return false;
      Py_ssize_t at = 0;
      PyObject *key, *value;
      for (size_t n = 0; n < each.size; ++n, ++before)
        if (!PyDict_Next(each.owner.ptr(), &at, &key, &value) || key != before->key.ptr() ||
            value != before->value.ptr())
          return false;
    }
    return true;
  }

 private:
  struct Kind {
    py::object object, type;
  };
  struct Item {
    py::object key, value;
  };
  struct Dictionary {
    py::object owner;
    size_t size;
  };
  std::vector<Kind> kinds_;
  std::vector<Dictionary> dictionaries_;
  std::vector<Item> items_;  // of all dictionaries, so that they are read ahead
};

}  // namespace fastattn
