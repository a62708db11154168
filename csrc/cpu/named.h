// Records and dicts that fastattn._cpu reads by name.
#pragma once
#include "../options.h"

namespace fastattn {

inline Named named(pybind11::handle from) { return Named(from, "fastattn._cpu"); }

}  // namespace fastattn
