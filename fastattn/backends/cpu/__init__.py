"""The native CPU module as a backend; most of its functions are primitives already.

Every function has the same name and arguments as in ``reference/``; ``docs/design.md`` defines the
primitives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu, evidence
from fastattn.backends._hopfield import make_backward_of_steps
from fastattn.backends._precision import allows_bf16_parts
from fastattn.backends._sinusoidal import make_encoding
from fastattn.backends._states import of_any_rank
from fastattn.backends.cpu.linear import faster_than_torch as faster_than_torch
from fastattn.backends.cpu.linear import gemm_of as gemm_of
from fastattn.backends.cpu.linear import gemms_of as gemms_of
from fastattn.backends.cpu.linear import linear as linear
from fastattn.backends.cpu.linear import linear_backward as linear_backward
from fastattn.backends.cpu.linear import linear_packed as linear_packed
from fastattn.backends.cpu.linear import pack_weight as pack_weight
from fastattn.backends.cpu.linear import rule as rule
from fastattn.backends.cpu.operands import DTYPES
from fastattn.backends.primitives import (
    EVERYWHERE,
    QUANTISED,
    served_fields,
    unserved_fields,
    why_not_options,
)

additive_attention = _cpu.additive_attention
additive_attention_backward = _cpu.additive_attention_backward
append_to_cache = _cpu.append_to_cache
decode_attention = _cpu.decode_attention
encode_memory = _cpu.encode_memory
encode_memory_backward = _cpu.encode_memory_backward
flex_attention = _cpu.flex_attention
flex_attention_backward = _cpu.flex_attention_backward
hopfield_retrieve = _cpu.hopfield_retrieve
# -1: the host always reads how many steps were taken, because there is no device to wait for.
hopfield_retrieve_backward = make_backward_of_steps(_cpu.hopfield_steps, _cpu.hopfield_backward, -1)
local_attention = _cpu.local_attention
local_attention_backward = _cpu.local_attention_backward
memory_hop_attention = _cpu.memory_hop_attention
memory_hop_attention_backward = _cpu.memory_hop_attention_backward
merge_states = of_any_rank(_cpu.merge_states)
merge_states_backward = of_any_rank(_cpu.merge_states_backward)
scaled_dot_product_attention = _cpu.scaled_dot_product_attention
scaled_dot_product_attention_backward = _cpu.scaled_dot_product_attention_backward
sinusoidal_encoding = make_encoding(_cpu.sinusoidal_encoding)
varlen_attention = _cpu.varlen_attention
varlen_attention_backward = _cpu.varlen_attention_backward
# Without options.
encode_texts, encoder_layers = _cpu.encode_texts, _cpu.encoder_layers
self_attention, table_layer = _cpu.self_attention, _cpu.table_layer
EncoderPlan, Facts, TextPlan = _cpu.EncoderPlan, _cpu.Facts, _cpu.TextPlan
are_plain, fingerprint, signature = _cpu.are_plain, _cpu.fingerprint, _cpu.signature

_OTHER_DTYPES = (torch.int64, torch.int32, *QUANTISED)
_FLOAT_NAMES = "float32, float64, bfloat16, float16"
_MAX_CACHED_WIDTH = 576  # kWidestCached in csrc/params.h


def _choose_isa() -> None:
    """Use the instruction sets chosen by the measurements, unless others are requested."""
    _cpu.set_default_isa(evidence.isa(_cpu.build_info()["supported"]))


_choose_isa()
evidence.on_change(_choose_isa)


# The primitives with kernels in csrc/cpu/kernels/tiles, and the dtypes.
ON_TILES = ("scaled_dot_product_attention", "varlen_attention", "decode_attention")
DTYPES_ON_TILES = (torch.bfloat16, torch.float16, torch.float32)


def why_not_tiles(op: str, tensors: Mapping[str, Tensor | None], options: Any) -> str:
    """Return why ``op`` runs on vectors although the processor may have tiles; "": on tiles."""
    query, key = tensors.get("query"), tensors.get("key")
    if op not in ON_TILES:
        return "it has no kernel on tiles"
    if query is None or query.dtype not in DTYPES_ON_TILES:
        return "the tiles are for bfloat16, float16 and float32"
    if not _cpu.on_tiles(DTYPES[query.dtype]):
        return "the processor has no AMX with fp16"
    if any(tensors.get(x) is not None for x in ("distance_buckets", "row_bias")):
        return "a bias that depends on the content has no kernel on tiles"
    if op == "decode_attention":
        return _why_not_decode_on_tiles(query, tensors)
    if op == "varlen_attention":
        return ""
    assert key is not None
    if _too_few_queries(query, key, tensors["value"], options):
        return "so few queries do not fill a tile"
    queries, columns = query.shape[-2:]
    pays = _cpu.pays_on_tiles(DTYPES[query.dtype], queries, key.shape[-2], columns)
    return "" if pays else "a call of this size is faster there"


def _too_few_queries(query: Tensor, key: Tensor, value: Tensor | None, options: Any) -> bool:
    """Whether at most four queries run on vectors: in 16 bits, only if decoding serves them."""
    assert value is not None
    rows = query.shape[-2] * query.shape[1] // max(key.shape[1], 1)
    widest = max(key.shape[-1], value.shape[-1])
    contiguous = key.stride(-1) == value.stride(-1) == 1
    decodes = rows <= 64 and widest <= _MAX_CACHED_WIDTH and contiguous and options.dropout_p == 0
    return query.shape[-2] <= 4 and (query.dtype is torch.float32 or decodes)


def _why_not_decode_on_tiles(query: Tensor, tensors: Mapping[str, Tensor | None]) -> str:
    """Return why a call of ``decode_attention`` runs on vectors; "" if it runs on tiles."""
    cache = tensors["key_cache"]
    assert cache is not None
    if cache.dtype in QUANTISED:
        return "the tiles do not multiply quantised rows"
    rows = query.shape[1] * query.shape[2] // max(cache.shape[1], 1)
    single_head_biases = tensors.get("mask_program"), tensors.get("relative_bias")
    heads_stack = all(x is None for x in single_head_biases)
    if (rows >= 16 and heads_stack) or (query.shape[2] > 4 and tensors.get("block_table") is None):
        return ""
    if rows >= 16:
        return "a mask or a relative bias is for the queries of one head"
    return f"{rows} query rows share a key head, and tiles are for 16 or more"


def parts_on_tiles(op: str, dtype: torch.dtype) -> str:
    """Return how products of this dtype run as products of bfloat16: a clause for ``explain``."""
    if dtype is not torch.float32:
        return ""
    if op != "decode_attention" and _cpu.on_tiles(DTYPES[dtype]) and allows_bf16_parts():
        return ", as three products of two bfloat16 parts each (PyTorch's precision of products)"
    return ", as six products of three bfloat16 parts each"


def beside_tiles(op: str, tensors: Mapping[str, Tensor | None], options: Any) -> str:
    """Return which part of a call on tiles runs on vectors: a clause for ``explain``."""
    query, cache = tensors.get("query"), tensors.get("key_cache")
    on_tiles = False
    if query is not None and cache is not None:
        biased = any(tensors.get(x) is not None for x in ("mask_program", "relative_bias"))
        heads, kv_heads, queries = query.shape[1], cache.shape[1], query.shape[2]
        on_tiles = _cpu.decodes_on_tiles(DTYPES[query.dtype], heads, kv_heads, queries, biased)
    if op in ("varlen_attention", "decode_attention") and not on_tiles:
        return "; small sequences on vectors"
    if op == "scaled_dot_product_attention" and options.weights:
        return "; the returned weights on vectors"
    return ""


_SERVED = served_fields(
    EVERYWHERE,
    append_to_cache="rotary_interleaved",
    linear="gemm needed",
    local_attention="reach bell",
    scaled_dot_product_attention="first_query first_key first_head",
)


def serves_all(op: str, kinds: Mapping[str, Any], record: type) -> bool:
    """Whether :func:`why_not` never has a reason against tensors of these kinds: the dtype of a
    tensor, or its device if that is not the CPU."""
    op = op.removesuffix("_backward")
    allowed = (None, *DTYPES, torch.int64, torch.int32)
    known = all(kind in allowed for kind in kinds.values())
    return known and kinds.get("alibi_slopes") is None and not unserved_fields(record, _SERVED[op])


def why_not(op: str, tensors: Mapping[str, Tensor | None], options: Any) -> list[str]:
    """Return the reasons why the CPU kernels cannot run ``op`` on these arguments."""
    for tensor in tensors.values():
        if tensor is None:
            continue
        if not tensor.is_cpu:
            return [f"a tensor is on {tensor.device}"]
        if tensor.dtype not in DTYPES and tensor.dtype not in _OTHER_DTYPES:
            return [f"the dtype {tensor.dtype} is not one of {_FLOAT_NAMES}"]
    op = op.removesuffix("_backward")
    if op == "scaled_dot_product_attention":
        alibi_slopes = tensors.get("alibi_slopes")
        if alibi_slopes is not None and alibi_slopes.requires_grad:
            return ["alibi_slopes requires a gradient, which the kernel does not compute"]
    return why_not_options(options, _SERVED[op])
