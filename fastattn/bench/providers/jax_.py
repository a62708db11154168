"""jax.nn.dot_product_attention, compiled by XLA; layout [B, L, H, D]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.dlpack
from torch import Tensor

from fastattn.bench.cells import Cell
from fastattn.bench.providers import sdpa_reasons

THREADS_OF_TORCH = False
ABOUT = "JAX: jax.nn.dot_product_attention, jitted"


def versions() -> dict[str, str]:
    import jax
    import jaxlib

    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__}


def why_not(cell: Cell) -> list[str]:
    passes = ("fwd", "fwd+bwd")
    reasons = sdpa_reasons(cell, dtypes=("fp32", "bf16", "fp16"), passes=passes)
    if cell.op == "sdpa" and cell["D"] != cell["Dv"]:
        reasons.append("it needs D = Dv")
    return reasons


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], list[Any]]:
    import jax

    def array(x: Tensor) -> Any:
        return jax.numpy.from_dlpack(x.contiguous())

    leaves = [array(inputs[name].transpose(1, 2)) for name in ("query", "key", "value")]
    options: dict[str, Any] = {"is_causal": cell.mask == "causal"}
    if cell.mask == "bias":
        options["bias"] = array(inputs["attn_mask"][None])
    elif "attn_mask" in inputs:
        mask = inputs["attn_mask"]
        options["mask"] = array(mask.byte().view(*[1] * (4 - mask.dim()), *mask.shape)).astype(bool)

    def attend(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, **options)

    if cell.passes == "fwd":
        compiled = jax.jit(lambda *leaves: (attend(*leaves),))
    else:
        grad_out = array(inputs["grad_out"].transpose(1, 2))

        @jax.jit
        def compiled(*leaves: Any) -> Any:
            out, backward = jax.vjp(attend, *leaves)
            return (out, *backward(grad_out))

    def run() -> list[Tensor]:
        # Views of the results as tensors [B, H, L, D]; their cost is negligible.
        results = jax.block_until_ready(compiled(*leaves))
        return [torch.utils.dlpack.from_dlpack(x).transpose(1, 2) for x in results]

    return run
