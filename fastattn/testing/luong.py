"""The cases of ``luong_attention`` in a local window, their inputs and their proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.backends.primitives import AttentionOptions
from fastattn.testing.calls import Call
from fastattn.testing.cases import NamedByFields, numbers_of
from fastattn.testing.judge import Proof
from fastattn.testing.memory import LAYOUTS, place


@dataclass(frozen=True)
class LuongCase(NamedByFields):
    """Sizes, half the window, and its kind; with ``padded``, some keys are padding and NaN."""

    batch: int = 2
    queries: int = 9
    keys: int = 40
    width: int = 24
    value_width: int = 24
    half: int = 5
    window: str = "local-p"
    padded: bool = False
    weights: bool = False
    layout: str = "contiguous"


def _cases() -> Iterator[LuongCase]:
    for window in ("local-p", "local-m"):
        for weights in (False, True):
            yield LuongCase(window=window, weights=weights)
            yield LuongCase(window=window, weights=weights, padded=True)
        yield LuongCase(window=window, half=1, width=1, value_width=3, weights=True)
        yield LuongCase(window=window, keys=3, half=7, padded=True, weights=True)
        yield LuongCase(3, 1, 100, 67, 33, half=16, window=window, padded=True)
        yield LuongCase(1, 70, 130, 16, 80, half=10, window=window)
        yield LuongCase(2, 5, 90, 300, 7, half=40, window=window, weights=True)
    for layout in LAYOUTS:
        yield LuongCase(layout=layout, weights=True)
    yield LuongCase(queries=0)
    yield LuongCase(batch=0)
    yield LuongCase(keys=0, weights=True)
    yield LuongCase(width=0, weights=True)
    yield LuongCase(value_width=0, weights=True)


LUONG_CASES = tuple(dict.fromkeys(_cases()))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    key_padding_mask: Tensor | None,
    window: str,
    D: int,
    need_weights: bool,
) -> Any:
    """The definition on complete matrices of scores; visibility has no rounding errors."""
    j, at = torch.arange(key.shape[1]), positions[..., None]
    visible = (j - D <= at) & (at <= j + D)  # [B, Tq, Tk]
    if key_padding_mask is not None:
        visible = visible & ~key_padding_mask[:, None]
    q, k, v, mask = (x[:, None] for x in (query, key, value, visible))
    weights = reference.attend(q, k, v, mask, None, None, AttentionOptions(scale=1.0))[2][:, 0]
    if window == "local-p":
        weights = weights * torch.exp(-2 * ((j - at) / D) ** 2).to(weights.dtype)
    return (weights @ value, weights) if need_weights else weights @ value


def _make(case: LuongCase, dtype: torch.dtype) -> Call:
    draw, normal = numbers_of(case.name)

    def placed(*size: int) -> Tensor:
        return place(normal(size[0], 1, *size[1:]).to(dtype), case.layout)[:, 0]

    query = placed(case.batch, case.queries, case.width)
    key = placed(case.batch, case.keys, case.width)
    value = placed(case.batch, case.keys, case.value_width)
    # Some windows cross the ends of the keys or lie outside; a third are centered on a key and
    # have one key more than the others.
    places = torch.rand(case.batch, case.queries, dtype=torch.float64, generator=draw)
    positions = places * (case.keys + 4 * case.half) - 2 * case.half
    positions = positions.to(torch.promote_types(dtype, torch.float32))
    positions[:, ::3] = positions[:, ::3].round()
    padding = None
    if case.padded:
        padding = torch.rand(case.batch, case.keys, generator=draw) < 0.3
        for x in (key, value):
            x[padding] = float("nan")
    out = normal(case.batch, case.queries, case.value_width).to(dtype)
    weights = normal(case.batch, case.queries, case.keys).to(dtype) if case.weights else None
    tensors: dict[str, Tensor | None] = {"query": query, "key": key, "value": value}
    options = {"window": case.window, "D": case.half, "key_padding_mask": padding}
    (tensors if case.window == "local-p" else options)["positions"] = positions
    options["need_weights"] = case.weights
    clean = {"key": key.nan_to_num(0.0), "value": value.nan_to_num(0.0)}
    grads = {"out": out, "weights": weights}
    return Call("luong_attention", tensors, options, grads, clean=clean, plain=_attend)


check_luong = Proof("luong_attention", LUONG_CASES, make=_make, coarse=("grad_positions",))
