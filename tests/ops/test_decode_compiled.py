"""Calls of ``decode_attention`` under the compiler, and their operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_calls import cache_operands
from recorder import Recorder
from torch import Tensor
from torch.testing import assert_close

from fastattn import decode_attention, masks
from fastattn.bias import T5

pytestmark = pytest.mark.usefixtures("seeded", "fresh_compiler")


def attending(**given: Any) -> Tensor:
    return decode_attention(**given).sin()


def masked(table: Tensor, ids: Tensor, **given: Any) -> Tensor:
    """Decode with a table of distances and a mask of documents, windows and drafts."""
    tree = masks.draft_tree(torch.ones(2, 2, device=ids.device).tril().bool())
    mask = masks.document(ids) & masks.sliding_window(5, 0) & tree
    return attending(**given, mask=mask, relative_bias=T5(table, False, 6))


def without_new_rows(**options: Any) -> dict[str, Any]:
    """A call that appends nothing."""
    given = cache_operands(**options)
    return {name: x for name, x in given.items() if name not in ("key", "value")}


def rotating() -> dict[str, Any]:
    """A call with rotary embedding."""
    turns = torch.arange(12)[:, None] * 10000.0 ** -(torch.arange(4) / 4)
    return cache_operands() | {"rotary_cos": turns.cos(), "rotary_sin": turns.sin()}


def with_table_and_ids() -> dict[str, Any]:
    """A call with a table of distances and a mask of document ids."""
    ids = torch.arange(36).view(3, 12).div(5, rounding_mode="floor")
    draw = torch.Generator().manual_seed(1)
    given = {"table": torch.randn(8, 4, generator=draw), "ids": ids}
    return given | without_new_rows(is_causal=False)


def with_everything() -> dict[str, Any]:
    """A call with all biases, cache entries and left padding."""
    entries = {"cache_batch_idx": torch.tensor([2, 0, 1]), "cache_leftpad": torch.tensor([1, 0, 2])}
    biases = {"alibi_slopes": torch.full((4,), 0.5), "sinks": torch.arange(4.0)}
    return cache_operands() | entries | biases | {"scale": 0.3, "window": (5, 0), "softcap": 2.0}


CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[], dict[str, Any]]]] = {
    "plain": (attending, without_new_rows),
    "appending": (attending, cache_operands),
    "pages": (attending, lambda: cache_operands(paged=True)),
    "rotating": (attending, rotating),
    "masked": (masked, with_table_and_ids),
    "everything": (attending, with_everything),
    "int8": (attending, lambda: cache_operands(cached=torch.int8)),
    "fp8": (attending, lambda: cache_operands(cached=torch.float8_e4m3fn)),
}


def in_memory(x: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return x.contiguous().view(torch.uint8)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_without_graph_breaks(backend: str, name: str, dynamic: bool) -> None:
    call, operands = CALLS[name]
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    got, want, before = operands(), operands(), operands()
    assert_close(compiled(**got), call(**want))
    written = []
    for key, x in want.items():
        if isinstance(x, Tensor):
            assert torch.equal(in_memory(got[key]), in_memory(x)), key
            written += [key] if not torch.equal(in_memory(x), in_memory(before[key])) else []
    caches = [key for key in want if key.endswith(("_cache", "_scales"))]
    assert written == (caches if "key" in want else [])


# Not of fp8: opcheck itself multiplies what it is given, which PyTorch cannot.
@pytest.mark.parametrize("name", [name for name in CALLS if name != "fp8"])
def test_opcheck(backend: str, name: str) -> None:
    call, operands = CALLS[name]
    with Recorder() as recorder:
        call(**operands())
    assert torch.ops.fastattn.decode_attention.default in recorder.calls
    for operator, args in recorder.calls.items():
        torch.library.opcheck(operator, args)
