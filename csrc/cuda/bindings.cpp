// All bindings, compiled together: pybind11's own functions take most of the time of a file that
// includes it.
#include "../operands.cpp"
#include "../tensors.cpp"
#include "bind_additive.cpp"
#include "bind_decode.cpp"
#include "bind_encode_memory.cpp"
#include "bind_memory_hops.cpp"
#include "bind_merge_states.cpp"
#include "bind_sdpa.cpp"
#include "bind_sinusoidal.cpp"
#include "module.cpp"
