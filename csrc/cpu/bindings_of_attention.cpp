// The bindings of attention, and the module itself, compiled together: pybind11's own functions
// take most of the time of a file that includes it.
#include "bind_append.cpp"
#include "bind_decode.cpp"
#include "bind_encoder.cpp"
#include "bind_flex.cpp"
#include "bind_linear.cpp"
#include "bind_sdpa.cpp"
#include "bind_table_layer.cpp"
#include "bind_varlen.cpp"

namespace fastattn {

// Registers the operators of attention.
void define_attention(py::module_& m) {
  define<&append_to_cache>(m, "append_to_cache");
  define<&attention>(m, "scaled_dot_product_attention", "options, only_first=False");
  define<&attention_backward>(m, "scaled_dot_product_attention_backward");
  define<&decode_attention>(m, "decode_attention");
  define<&encoder_layers>(m, "encoder_layers", "plans, wants_gradients");
  define<&encode_texts>(m, "encode_texts", "texts, wants_gradients");
  define<&flex_attention>(m, "flex_attention", "options, only_first=False");
  define<&flex_attention_backward>(m, "flex_attention_backward");
  define<&linear>(m, "linear", "on_tiles=False, packed=None");
  define<&pack_weight>(m, "pack_weight", "");
  define<&self_attention>(m, "self_attention", "num_heads, batch_first, causal, recorded");
  define<&table_layer>(m, "table_layer",
                       "parts, eps, num_heads, known, rms, in_place, keeps, wants_gradients");
  define<&varlen_attention>(m, "varlen_attention");
  define<&varlen_attention_backward>(m, "varlen_attention_backward");
  m.def("decodes_on_tiles", &heads_decode_on_tiles);
  define_encoder_plans(m);
}

}  // namespace fastattn

#include "module.cpp"
