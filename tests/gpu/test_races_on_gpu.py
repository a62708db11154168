"""A race changes bits in some of many runs: every operator, on each GPU backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_device import DEVICE, loaded, skip_without_gpu

from fastattn import dispatch
from fastattn.testing import PROOFS, Case, OnGpu
from fastattn.testing.around_attention import MergeCase, SinusoidalCase
from fastattn.testing.decode import AppendCase, DecodeCase
from fastattn.testing.memories import EncodeCase, HopCase, HopfieldCase
from fastattn.testing.packed import VarlenCase
from fastattn.testing.recurrent import AdditiveCase

skip_without_gpu()
pytestmark = pytest.mark.gpu

RUNS = 1000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# More tiles of 128 rows than a GPU has multiprocessors, for queries and for keys: some blocks of
# threads take several.
LARGE: dict[str, Any] = {"batch": 4, "q_len": 1100, "k_len": 1100}
HEADS: dict[str, Any] = {"heads": 16, "kv_heads": 4, "head_dim": 128}
PAGED: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128, "page": 64, "capacity": 1024}
LENGTHS = (300, 1, 0, 1000, 1000, 1000, 1000, 700)
STACK: dict[str, Any] = {"hops": 3, "in_memory": "BSN", "out_memory": None}


def _additive(name: str, batch: int, queries: int, keys: int, width: int) -> AdditiveCase:
    """A case of additive attention."""
    sizes = {"batch": batch, "q_len": queries, "k_len": keys, "head_dim": width}
    return AdditiveCase(name, value_dim=width, **sizes)  # type: ignore[arg-type]


def _hopfield(name: str, batch: int, heads: int, states: int, rows: int) -> HopfieldCase:
    """A case of Hopfield retrieval."""
    sizes = {"batch": batch, "heads": heads, "q_len": states, "k_len": rows}
    return HopfieldCase(name, head_dim=64, **sizes)  # type: ignore[arg-type]


CASES: dict[str, list[Any]] = {
    "scaled_dot_product_attention": [
        Case("causal", causal="upper_left", **LARGE, **HEADS),
        Case("masked", mask="float_inf", mask_grad=True, dropout_p=0.1, **LARGE, **HEADS),
    ],
    "varlen_attention": [VarlenCase("packed", LENGTHS, window=(-1, 0), **HEADS)],
    "decode_attention": [DecodeCase("decoding", (900, 40), **PAGED)],
    "append_to_cache": [AppendCase("appending", (700, 40), rows=200, **PAGED)],
    "merge_states": [MergeCase("merging", (1, 8, 2000, 128))],
    "sinusoidal_encoding": [
        SinusoidalCase(layout, shape=(32, 1, 2048, 1024), layout=layout, scale=32.0)
        for layout in ("interleaved", "marian")
    ],
    "additive_attention": [
        _additive("square", 8, 256, 256, 256),
        _additive("wide", 64, 30, 30, 512),
        _additive("step", 64, 1, 50, 512),
    ],
    "memory_hop_attention": [
        HopCase("few", 32, rows=50, width=20, **STACK),
        HopCase("many", 1024, rows=50, width=20, **STACK),
        HopCase("wide", 64, rows=320, width=128, **STACK),
        HopCase("long", 4, rows=100_000, width=64, **STACK),
    ],
    "encode_memory": [
        EncodeCase("small", (32, 50, 11, 200, 20, None)),
        EncodeCase("large", (1024, 50, 11, 20_000, 64, None)),
    ],
    "hopfield_retrieve": [
        _hopfield("several", 8, 8, 32, 256),
        _hopfield("long", 1, 1, 64, 10_000),
    ],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    ("operator", "case"),
    [
        pytest.param(operator, case, id=f"{operator}-{case.name}")
        for operator, cases in CASES.items()
        for case in cases
    ],
)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_many_runs_have_the_same_bits(
    backend: str, operator: str, case: Any, dtype: torch.dtype
) -> None:
    module = loaded(backend)
    inputs = OnGpu(backend, device=DEVICE).placed(PROOFS[operator].make(case, dtype))
    with dispatch.use_backend(backend):
        first = inputs.results(module)
        for n in range(RUNS):
            for name, x in inputs.results(module).items():
                assert torch.equal(first[name], x), f"{name} of run {n + 1} differs from the first"
