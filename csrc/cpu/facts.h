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
      std::vector<Item> items;
      for (const auto& [key, value] : owner)
        items.push_back(
            {py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value)});
      dictionaries_.push_back({owner, items});
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
    for (const Dictionary& each : dictionaries_) {
      if (static_cast<size_t>(PyDict_Size(each.owner.ptr())) != each.items.size()) return false;
      Py_ssize_t at = 0;
      PyObject *key, *value;
      for (const Item& before : each.items)
        if (!PyDict_Next(each.owner.ptr(), &at, &key, &value) || key != before.key.ptr() ||
            value != before.value.ptr())
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
    std::vector<Item> items;
  };
  std::vector<Kind> kinds_;
  std::vector<Dictionary> dictionaries_;
};

}  // namespace fastattn
