"""onnxruntime and OpenVINO on CPUs: attention as a model with one node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.bench import ops
from fastattn.bench.cells import Cell

_NAMES = ("query", "key", "value", "attn_mask")


class SdpaOnly:
    """A provider that has no operator but `sdpa`; the attributes say what it serves."""

    DTYPES: Sequence[str] = ("fp32",)
    PASSES_ON: Mapping[str, Sequence[str]] = {"cpu": ("fwd",)}  # device: passes
    MASKS: Sequence[str] = ops.get("sdpa").MASKS
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
        self.MASKS = [mask for mask in self.MASKS if mask not in ("bool", "documents")]
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
        if not self.variant:
            kept = {name: inputs[name] for name in _NAMES if name in inputs}
            if (
                "attn_mask" in kept
            ):  # expanded outside the timing: onnxruntime needs all of its rows
                shape = (*inputs.attn_mask.shape[:-2], cell["Lq"], cell["Lk"])
                kept["attn_mask"] = inputs.attn_mask.expand(shape).contiguous()
            causal = int(cell.mask == "causal")
            return _session(kept, f"Attention <is_causal={causal}> ({', '.join(kept)})")
        kept = {name: inputs[name].transpose(1, 2).flatten(2).contiguous() for name in _NAMES[:3]}
        if cell.mask == "padding":
            kept["padding"] = inputs.attn_mask[:, 0, 0].int()
        elif cell.mask == "bias":
            kept["bias"] = inputs.attn_mask[None].contiguous()
        places = ("query", "key", "value", "", "padding", "bias")
        given = ", ".join(name if name in kept else '""' for name in places)
        options = f"num_heads={cell['H']}, unidirectional={int(cell.mask == 'causal')}"
        call = _session(kept, f"com.microsoft.MultiHeadAttention <{options}> ({given})")
        # A view of [B, L, H·D] as [B, H, L, D].
        heads = (cell["B"], cell["Lq"], cell["H"], cell["Dv"])
        return lambda: [call()[0].reshape(heads).transpose(0, 2, 1, 3)]


def _session(inputs: dict[str, Tensor], node: str) -> Callable[[], list[Any]]:
    """A call of a model of one node, which is written in ONNX's text format."""
    import onnxruntime
    from onnx.parser import parse_model

    kinds = {torch.float32: "float", torch.bool: "bool", torch.int32: "int32"}
    declared = ", ".join(f"{kinds[x.dtype]}{list(x.shape)} {name}" for name, x in inputs.items())
    head = '<ir_version: 11, opset_import: ["": 23, "com.microsoft": 1]>'
    model = parse_model(f"{head} attention ({declared}) => (float[] out) {{ out = {node} }}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feed = {name: x.numpy() for name, x in inputs.items()}
    return lambda: list(session.run(None, feed))


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
