"""onnxruntime's CPU kernel of the operator Attention (opset 23), one node in a model of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.bench.cells import Cell

ABOUT = "onnxruntime: the operator Attention of opset 23 (forward, fp32)"


def versions() -> dict[str, str]:
    import onnx
    import onnxruntime

    return {"onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__}


def why_not(cell: Cell) -> list[str]:
    reasons = []
    if cell.op != "sdpa":
        reasons.append("only sdpa is wired up")
    if cell.passes != "fwd":
        reasons.append("it has no backward")
    if cell.dtype != "fp32":
        reasons.append("its CPU kernel is for fp32")
    if cell.weights != "none":
        reasons.append("no weights are asked of it")
    if cell.mask == "causal" and cell["Lq"] != cell["Lk"]:
        reasons.append("it aligns the causal diagonal differently when Lq is not Lk")
    return reasons


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], list[Any]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    if "attn_mask" in inputs:
        # It wants every row of the mask, so the cell's mask is written out, untimed.
        rows = (*inputs["attn_mask"].shape[:-2], cell["Lq"], cell["Lk"])
        inputs = inputs | {"attn_mask": inputs["attn_mask"].expand(rows).contiguous()}
    session = onnxruntime.InferenceSession(
        _model(cell, inputs), options, providers=["CPUExecutionProvider"]
    )
    feed = {name: inputs[name].numpy() for name in ("query", "key", "value")}
    if "attn_mask" in inputs:
        feed["attn_mask"] = inputs["attn_mask"].numpy()
    return lambda: list(session.run(None, feed))


def _model(cell: Cell, inputs: dict[str, Tensor]) -> bytes:
    from onnx import TensorProto, helper

    names = [name for name in ("query", "key", "value", "attn_mask") if name in inputs]
    kinds = {torch.float32: TensorProto.FLOAT, torch.bool: TensorProto.BOOL}
    declared = [
        helper.make_tensor_value_info(name, kinds[inputs[name].dtype], list(inputs[name].shape))
        for name in names
    ]
    shape = [cell[key] for key in ("B", "H", "Lq", "Dv")]
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, shape)
    node = helper.make_node("Attention", names, ["out"], is_causal=int(cell.mask == "causal"))
    graph = helper.make_graph([node], "attention", declared, [out])
    opsets = [helper.make_opsetid("", 23)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
