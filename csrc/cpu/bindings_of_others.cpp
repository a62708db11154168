// All other bindings, compiled together for the reason given in bindings_of_attention.cpp.
#include "../function.cpp"
#include "../operands.cpp"
#include "../tensors.cpp"
#include "bind_additive.cpp"
#include "bind_encode_memory.cpp"
#include "bind_hopfield.cpp"
#include "bind_local_attention.cpp"
#include "bind_memory_hops.cpp"
#include "bind_merge_states.cpp"
#include "bind_signature.cpp"
#include "bind_sinusoidal.cpp"

namespace fastattn {

// Registers all other operators.
void define_others(py::module_& m) {
  define<&additive_attention>(m, "additive_attention");
  define<&additive_attention_backward>(m, "additive_attention_backward");
  define<&are_plain>(m, "are_plain", "");
  define<&encode_memory>(m, "encode_memory");
  define<&encode_memory_backward>(m, "encode_memory_backward");
  define<&fingerprint>(m, "fingerprint", "");
  define<&hopfield_backward>(m, "hopfield_backward", "options, needed");
  define<&hopfield_retrieve>(m, "hopfield_retrieve", "options, keeps=False");
  define<&hopfield_steps>(m, "hopfield_steps", "options, most");
  define<&local_attention>(m, "local_attention");
  define<&local_attention_backward>(m, "local_attention_backward");
  define<&memory_hops>(m, "memory_hop_attention", "options, only_first=False, keeps=False");
  define<&memory_hops_backward>(m, "memory_hop_attention_backward");
  define<&merge_states>(m, "merge_states");
  define<&merge_states_backward>(m, "merge_states_backward");
  define<&sinusoidal_encoding>(m, "sinusoidal_encoding", "options, columns, offset=None, out=None");
  define<&signature>(m, "signature", "");
}

}  // namespace fastattn
