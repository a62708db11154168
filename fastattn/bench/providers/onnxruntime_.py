"""onnxruntime's CPU kernels of attention, as a model with one node.

The operator is `Attention` of opset 23 on [B, H, L, D], or `MultiHeadAttention` of com.microsoft on
[B, L, H·D], which is faster for some shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.bench.cells import MASKS, Cell
from fastattn.bench.providers import sdpa_reasons

THREADS_OF_TORCH = False
ABOUT = "onnxruntime: Attention of opset 23; @mha: MultiHeadAttention of com.microsoft"
VARIANTS = ("mha",)
_variant = ""


def select(variant: str) -> None:
    global _variant
    _variant = variant


def versions() -> dict[str, str]:
    import onnx
    import onnxruntime

    return {"onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__}


def why_not(cell: Cell) -> list[str]:
    masks = [mask for mask in MASKS if mask not in ("bool", "documents") or not _variant]
    reasons = sdpa_reasons(cell, dtypes=("fp32",), masks=masks, grouped=not _variant)
    if cell.op == "sdpa" and cell.mask == "causal" and cell["Lq"] != cell["Lk"]:
        reasons.append("it aligns the causal diagonal differently when Lq is not Lk")
    return reasons


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], list[Any]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    inputs = _packed(cell, inputs) if _variant else _as_rows(cell, inputs)
    session = onnxruntime.InferenceSession(
        _model(cell, inputs), options, providers=["CPUExecutionProvider"]
    )
    feed = {name: x.numpy() for name, x in inputs.items()}

    def run() -> list[Any]:
        return list(session.run(None, feed))

    if not _variant:
        return run
    # A view of [B, L, H·D] as [B, H, L, D].
    heads = (cell["B"], cell["Lq"], cell["H"], cell["Dv"])
    return lambda: [run()[0].reshape(heads).transpose(0, 2, 1, 3)]


def _as_rows(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Expands the mask, outside the timing: onnxruntime needs all of its rows."""
    kept = {name: inputs[name] for name in ("query", "key", "value")}
    if "attn_mask" in inputs:
        mask = inputs["attn_mask"]
        kept["attn_mask"] = mask.expand(*mask.shape[:-2], cell["Lq"], cell["Lk"]).contiguous()
    return kept


def _packed(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = {
        name: inputs[name].transpose(1, 2).flatten(2).contiguous()
        for name in ("query", "key", "value")
    }
    if cell.mask == "padding":
        kept["key_padding_mask"] = inputs["attn_mask"][:, 0, 0].int()
    elif cell.mask == "bias":
        kept["attention_bias"] = inputs["attn_mask"][None].contiguous()
    return kept


def _model(cell: Cell, inputs: dict[str, Tensor]) -> bytes:
    from onnx import TensorProto, helper

    kinds = {
        torch.float32: TensorProto.FLOAT,
        torch.bool: TensorProto.BOOL,
        torch.int32: TensorProto.INT32,
    }
    declared = [
        helper.make_tensor_value_info(name, kinds[x.dtype], list(x.shape))
        for name, x in inputs.items()
    ]
    causal = int(cell.mask == "causal")
    if _variant:
        places = ("query", "key", "value", "", "key_padding_mask", "attention_bias")
        names = [name if name in inputs else "" for name in places]
        node = helper.make_node(
            "MultiHeadAttention",
            names,
            ["out"],
            domain="com.microsoft",
            num_heads=cell["H"],
            unidirectional=causal,
        )
        shape = [cell["B"], cell["Lq"], cell["H"] * cell["Dv"]]
    else:
        node = helper.make_node("Attention", list(inputs), ["out"], is_causal=causal)
        shape = [cell[key] for key in ("B", "H", "Lq", "Dv")]
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, shape)
    graph = helper.make_graph([node], "attention", declared, [out])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
