"""onnxruntime and OpenVINO on CPUs: attention as a model with one node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.bench import ops
from fastattn.bench.cells import MASKS, Cell

_NAMES = ("query", "key", "value", "attn_mask")


class SdpaOnly:
    """A provider that has no operator but `sdpa`; the attributes say what it serves."""

    DTYPES: Sequence[str] = ("fp32",)
    PASSES_ON: Mapping[str, Sequence[str]] = {"cpu": ("fwd",)}  # device: passes
    MASKS: Sequence[str] = MASKS
    GROUPED = True

    def why_not(self, cell: Cell) -> list[str]:
        passes = self.PASSES_ON.get(cell.device)
        reasons = [] if passes else [f"it runs on {' and '.join(self.PASSES_ON)}"]
        if cell.op != "sdpa":
            return [*reasons, "only sdpa is supported here"]
        unmet = {
            f"it takes {', '.join(self.DTYPES)}": cell.dtype not in self.DTYPES,
            "it has no backward": passes is not None and cell.passes not in passes,
            f"no {cell.mask} mask is supported here": cell.mask not in self.MASKS,
            "it returns no weights": cell.weights != "none",
            f"no {cell.option} is supported here": cell.option != "none",
            "it has no grouped heads": cell["H"] != cell["Hkv"] and not self.GROUPED,
        }
        return reasons + [reason for reason, is_unmet in unmet.items() if is_unmet]


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

    def prepare(self, cell: Cell, inputs: ops.Inputs) -> Callable[[], list[Any]]:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        model, feed = (_packed_model if self.variant else _model)(cell, inputs)
        where = ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(model, options, providers=where)
        if not self.variant:
            return lambda: list(session.run(None, feed))
        # A view of [B, L, H·D] as [B, H, L, D].
        heads = (cell["B"], cell["Lq"], cell["H"], cell["Dv"])
        return lambda: [session.run(None, feed)[0].reshape(heads).transpose(0, 2, 1, 3)]


def _model(cell: Cell, inputs: ops.Inputs) -> tuple[bytes, dict[str, Any]]:
    kept = {name: inputs[name] for name in _NAMES if name in inputs}
    if "attn_mask" in kept:  # expanded outside the timing: onnxruntime needs all of its rows
        shape = (*inputs.attn_mask.shape[:-2], cell["Lq"], cell["Lk"])
        kept["attn_mask"] = inputs.attn_mask.expand(shape).contiguous()
    return _serialized(kept, "Attention", list(kept), is_causal=int(cell.mask == "causal"))


def _packed_model(cell: Cell, inputs: ops.Inputs) -> tuple[bytes, dict[str, Any]]:
    kept = {name: inputs[name].transpose(1, 2).flatten(2).contiguous() for name in _NAMES[:3]}
    if cell.mask == "padding":
        kept["key_padding_mask"] = inputs.attn_mask[:, 0, 0].int()
    elif cell.mask == "bias":
        kept["attention_bias"] = inputs.attn_mask[None].contiguous()
    places = ("query", "key", "value", "", "key_padding_mask", "attention_bias")
    options = {"num_heads": cell["H"], "unidirectional": int(cell.mask == "causal")}
    names = [name if name in kept else "" for name in places]
    return _serialized(kept, "MultiHeadAttention", names, domain="com.microsoft", **options)


def _serialized(
    inputs: dict[str, Tensor], kind: str, names: list[str], **options: Any
) -> tuple[bytes, dict[str, Any]]:
    """A model of one node, and its inputs as arrays."""
    from onnx import TensorProto, helper

    kinds = {torch.float32: "FLOAT", torch.bool: "BOOL", torch.int32: "INT32"}
    declared = [
        helper.make_tensor_value_info(name, getattr(TensorProto, kinds[x.dtype]), list(x.shape))
        for name, x in inputs.items()
    ]
    node = helper.make_node(kind, names, ["out"], **options)
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "attention", declared, [out])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    return model.SerializeToString(), {name: x.numpy() for name, x in inputs.items()}


class OpenVino(SdpaOnly):
    ABOUT = "OpenVINO: scaled_dot_product_attention of opset 13 (forward, fp32)"
    THREADS_OF_TORCH = False
    GROUPED = False

    def versions(self) -> dict[str, str]:
        import openvino

        return {"openvino": openvino.__version__}

    def prepare(self, cell: Cell, inputs: ops.Inputs) -> Callable[[], list[Any]]:
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
