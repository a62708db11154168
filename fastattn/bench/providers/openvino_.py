"""OpenVINO's scaled_dot_product_attention (opset 13) on its CPU plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.bench.cells import Cell
from fastattn.bench.providers import sdpa_reasons

THREADS_OF_TORCH = False
ABOUT = "OpenVINO: scaled_dot_product_attention of opset 13 (forward, fp32)"


def versions() -> dict[str, str]:
    import openvino

    return {"openvino": openvino.__version__}


def why_not(cell: Cell) -> list[str]:
    return sdpa_reasons(cell, dtypes=("fp32",), grouped=False)


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], list[Any]]:
    import openvino
    from openvino import opset13

    names = [name for name in ("query", "key", "value", "attn_mask") if name in inputs]
    kinds = {torch.float32: openvino.Type.f32, torch.bool: openvino.Type.boolean}
    parameters = [
        opset13.parameter(list(inputs[name].shape), kinds[inputs[name].dtype], name=name)
        for name in names
    ]
    node = opset13.scaled_dot_product_attention(*parameters, causal=cell.mask == "causal")
    compiled = openvino.compile_model(
        openvino.Model([node], parameters),
        "CPU",
        {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            # By default it computes fp32 models in bf16 if the processor supports bf16.
            "INFERENCE_PRECISION_HINT": "f32",
        },
    )
    request = compiled.create_infer_request()
    arrays = [inputs[name].numpy() for name in names]

    def run() -> list[Any]:
        return [request.infer(arrays, share_inputs=True, share_outputs=True)[0]]

    return run
