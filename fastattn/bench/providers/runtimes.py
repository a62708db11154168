"""The attention kernels of onnxruntime and OpenVINO on CPUs, each as a model with one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.bench.cells import MASKS, Cell
from fastattn.bench.providers import SdpaOnly

Inputs = dict[str, Tensor]
_NAMES = ("query", "key", "value", "attn_mask")


class OnnxRuntime(SdpaOnly):
    """`Attention` of opset 23 on [B, H, L, D], or `MultiHeadAttention` of com.microsoft on
    [B, L, H·D], which is faster for some shapes.
    """

    ABOUT = "onnxruntime: Attention of opset 23; @mha: MultiHeadAttention of com.microsoft"
    THREADS_OF_TORCH = False
    VARIANTS = ("mha",)
    variant = ""

    def select(self, variant: str) -> None:
        self.variant = variant
        self.MASKS = [mask for mask in MASKS if mask not in ("bool", "documents")]
        self.GROUPED = False

    def versions(self) -> dict[str, str]:
        import onnx
        import onnxruntime

        return {"onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__}

    def why_not(self, cell: Cell) -> list[str]:
        reasons = super().why_not(cell)
        if cell.op == "sdpa" and cell.mask == "causal" and cell["Lq"] != cell["Lk"]:
            reasons.append("it aligns the causal diagonal differently when Lq is not Lk")
        return reasons

    def prepare(self, cell: Cell, inputs: Inputs) -> Callable[[], list[Any]]:
        import onnxruntime
        from onnx import helper

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        causal = int(cell.mask == "causal")
        if self.variant:
            given = _packed(cell, inputs)
            places = ("query", "key", "value", "", "key_padding_mask", "attention_bias")
            names = [name if name in given else "" for name in places]
            of_mha: dict[str, Any] = {"num_heads": cell["H"], "unidirectional": causal}
            kind, of_mha["domain"] = "MultiHeadAttention", "com.microsoft"
            node = helper.make_node(kind, names, ["out"], **of_mha)
        else:
            given = _with_rows(cell, inputs)
            node = helper.make_node("Attention", list(given), ["out"], is_causal=causal)
        session = onnxruntime.InferenceSession(
            _model(node, given), options, providers=["CPUExecutionProvider"]
        )
        feed = {name: x.numpy() for name, x in given.items()}
        if not self.variant:
            return lambda: list(session.run(None, feed))
        # A view of [B, L, H·D] as [B, H, L, D].
        heads = (cell["B"], cell["Lq"], cell["H"], cell["Dv"])
        return lambda: [session.run(None, feed)[0].reshape(heads).transpose(0, 2, 1, 3)]


def _with_rows(cell: Cell, inputs: Inputs) -> Inputs:
    """Expands the mask, outside the timing: onnxruntime needs all of its rows."""
    kept = {name: inputs[name] for name in _NAMES if name in inputs}
    if (mask := kept.get("attn_mask")) is not None:
        kept["attn_mask"] = mask.expand(*mask.shape[:-2], cell["Lq"], cell["Lk"]).contiguous()
    return kept


def _packed(cell: Cell, inputs: Inputs) -> Inputs:
    kept = {name: inputs[name].transpose(1, 2).flatten(2).contiguous() for name in _NAMES[:3]}
    if cell.mask == "padding":
        kept["key_padding_mask"] = inputs["attn_mask"][:, 0, 0].int()
    elif cell.mask == "bias":
        kept["attention_bias"] = inputs["attn_mask"][None].contiguous()
    return kept


def _model(node: Any, inputs: Inputs) -> bytes:
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
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "attention", declared, [out])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()


class OpenVino(SdpaOnly):
    ABOUT = "OpenVINO: scaled_dot_product_attention of opset 13 (forward, fp32)"
    THREADS_OF_TORCH = False
    GROUPED = False

    def versions(self) -> dict[str, str]:
        import openvino

        return {"openvino": openvino.__version__}

    def prepare(self, cell: Cell, inputs: Inputs) -> Callable[[], list[Any]]:
        import openvino
        from openvino import opset13

        given = {name: inputs[name] for name in _NAMES if name in inputs}
        kinds = {torch.float32: openvino.Type.f32, torch.bool: openvino.Type.boolean}
        parameters = [
            opset13.parameter(list(x.shape), kinds[x.dtype], name=name) for name, x in given.items()
        ]
        node = opset13.scaled_dot_product_attention(*parameters, causal=cell.mask == "causal")
        options = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            # By default it computes fp32 models in bf16 if the processor supports bf16.
            "INFERENCE_PRECISION_HINT": "f32",
        }
        compiled = openvino.compile_model(openvino.Model([node], parameters), "CPU", options)
        request = compiled.create_infer_request()
        arrays = [x.numpy() for x in given.values()]
        return lambda: [request.infer(arrays, share_inputs=True, share_outputs=True)[0]]
