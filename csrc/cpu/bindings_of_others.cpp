// The other bindings, compiled together for the same reason as those of attention.
#include "bind_additive.cpp"
#include "bind_encode_memory.cpp"
#include "bind_local_attention.cpp"
#include "bind_memory_hops.cpp"
#include "bind_merge_states.cpp"
#include "bind_sinusoidal.cpp"
#include "tensors.cpp"
