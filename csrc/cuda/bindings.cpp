// All bindings, compiled together: pybind11's own functions take most of the time of a file that
// includes it.
#include "../function.cpp"
#include "../operands.cpp"
#include "../tensors.cpp"
#include "bind_additive.cpp"
#include "bind_decode.cpp"
#include "bind_encode_memory.cpp"
#include "bind_memory_hops.cpp"
#include "bind_merge_states.cpp"
#include "bind_sdpa.cpp"
#include "bind_sinusoidal.cpp"

namespace fastattn {
namespace cuda {

// Adds all functions to the module. A number says how many tensors a function takes, if it does not
// take the optional ones at the end.
void define_all(py::module_& m) {
  constexpr size_t kAll = SIZE_MAX;
  define_on_stream<&additive_attention>(m, "additive_attention");
  define_on_stream<&additive_gradients>(m, "additive_attention_backward");
  define_on_stream<&append>(m, "append_to_cache", 7);                   // not rotary_cos, ...
  define_on_stream<&attention>(m, "scaled_dot_product_attention", 10);  // not position_query, ...
  define_on_stream<&attention_gradients>(m, "scaled_dot_product_attention_backward", 15);
  define_on_stream<&decode>(m, "decode_attention", 10);  // not cache_leftpad, ...
  define_on_stream<&encode_memory>(m, "encode_memory");
  define_on_stream<&encode_positions>(m, "sinusoidal_encoding", kAll,
                                      "options, place, columns, offset=None, out=None");
  define_on_stream<&encoding_gradients>(m, "encode_memory_backward");
  define_on_stream<&hop>(m, "memory_hop_attention");
  define_on_stream<&hop_gradients>(m, "memory_hop_attention_backward", 10);  // not kept
  define_on_stream<&merge>(m, "merge_states");
  define_on_stream<&merge_gradients>(m, "merge_states_backward");
  define_on_stream<&retrieve>(m, "hopfield_retrieve");
  define_on_stream<&step_gradients>(m, "hopfield_backward", kAll, "options, place, needed");
  define_on_stream<&take_steps>(m, "hopfield_steps", kAll, "options, place, most");
  define_on_stream<&varlen_attention>(m, "varlen_attention", 10);
  define_on_stream<&varlen_gradients>(m, "varlen_attention_backward", 14);
  m.attr("max_hop_width") = kMaxHopWidth;
}

}  // namespace cuda
}  // namespace fastattn

#include "module.cpp"
