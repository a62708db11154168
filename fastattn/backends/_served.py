"""The options that the kernels of each backend, forward and backward, serve, by primitive.

A backend declines each call that uses another one (:func:`fastattn.backends.primitives.unserved`).
To serve an option in one backend, add it to the table of that backend.
"""

from __future__ import annotations

from fastattn.backends.primitives import served

__all__ = ["CPU", "CUDA", "TORCH", "TRITON"]

_EVERYWHERE = served(
    additive_attention="causal dropout_p weights needs_mask_grad",
    append_to_cache="",
    decode_attention="scale window_left window_right softcap",
    encode_memory="padding_idx rows temporal",
    hopfield_retrieve="scale steps_max eps together crowded grad needed",
    memory_hop_attention="hops activation normalize scale weights needed",
    merge_states="",
    scaled_dot_product_attention="scale offset window_left window_right softcap dropout_p weights "
    "needs_mask_grad partial",
    sinusoidal_encoding="offset layout max_timescale scale padding_idx",
    varlen_attention="scale bottom_right window_left window_right softcap dropout_p",
)

CPU = _EVERYWHERE | served(
    append_to_cache="rotary_interleaved",
    linear="gemm needed",
    local_attention="reach bell",
    scaled_dot_product_attention=" ".join(_EVERYWHERE["scaled_dot_product_attention"])
    + " first_query first_key first_head",
)
CUDA = _EVERYWHERE
TRITON = _EVERYWHERE
# Its own why_not declines most values of these options, each with its own reason.
_ATTENTION = _EVERYWHERE["scaled_dot_product_attention"] - {"partial"}
TORCH = {"scaled_dot_product_attention": _ATTENTION}
