// The bindings of attention, and the module itself, compiled together: pybind11's own functions take
// most of the time of a file that includes it.
#include "bind_append.cpp"
#include "bind_decode.cpp"
#include "bind_encoder.cpp"
#include "bind_linear.cpp"
#include "bind_sdpa.cpp"
#include "bind_varlen.cpp"
#include "module.cpp"
