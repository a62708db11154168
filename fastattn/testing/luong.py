"""The cases of ``luong_attention`` in a local window, their inputs and their judge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn.ops.luong import luong_attention
from fastattn.testing.draws import generator_of
from fastattn.testing.memory import LAYOUTS, Watch, place
from fastattn.testing.rounding import Noise
from fastattn.testing.targets import Target
from fastattn.testing.verdict import Verdict, fresh_memory_is_nan

__all__ = ["LUONG_CASES", "LuongCase", "check_luong"]


@dataclass(frozen=True)
class LuongCase:
    """Sizes, half the window, which window; ``padded`` hides keys, which then are NaN."""

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
    dtypes: tuple[torch.dtype, ...] = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    )
    slow: bool = False

    @property
    def name(self) -> str:
        sizes = (self.batch, self.queries, self.keys, self.width, self.value_width, self.half)
        marks = [self.window, self.layout]
        marks += ["padded"] * self.padded + ["weights"] * self.weights
        return "-".join(["x".join(map(str, sizes)), *marks])

    def __str__(self) -> str:
        return self.name


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
    yield LuongCase(keys=0, weights=True)
    yield LuongCase(batch=0)
    yield LuongCase(width=0, weights=True)
    yield LuongCase(value_width=0, weights=True)


LUONG_CASES = tuple(_cases())


def check_luong(case: LuongCase, dtype: torch.dtype, target: Target) -> Verdict:
    """Run ``case`` forward and backward on ``target`` and judge it by the error bound."""
    draw = generator_of(case.name)

    def normal(*size: int) -> Tensor:
        values = torch.randn(size[0], 1, *size[1:], dtype=torch.float64, generator=draw)
        return place(values.to(dtype), case.layout)[:, 0]

    query = normal(case.batch, case.queries, case.width)
    key = normal(case.batch, case.keys, case.width)
    value = normal(case.batch, case.keys, case.value_width)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    # Some windows reach over the ends, or are beyond them; a third are around a key, so that they
    # have one key more than the others.
    places = torch.rand(case.batch, case.queries, dtype=torch.float64, generator=draw)
    positions = (places * (case.keys + 4 * case.half) - 2 * case.half).to(wide)
    positions[:, ::3] = positions[:, ::3].round()
    padding = None
    if case.padded:
        padding = torch.rand(case.batch, case.keys, generator=draw) < 0.3
        for x in (key, value):
            x[padding] = float("nan")
    sizes = [(case.batch, case.queries, case.value_width)]
    sizes += [(case.batch, case.queries, case.keys)] if case.weights else []
    grads = [torch.randn(s, dtype=torch.float64, generator=draw).to(dtype) for s in sizes]

    def run(function: Any, *tensors: Tensor) -> list[Tensor]:
        leaves = [
            x.detach().requires_grad_() for x in tensors[: 4 if case.window == "local-p" else 3]
        ]
        given = (*leaves, *tensors[len(leaves) : 4])
        results = function(*given, padding)
        seeds = [g.to(x.dtype) for g, x in zip(grads, results, strict=True)]
        pairs = [(x, g) for x, g in zip(results, seeds, strict=True) if x.requires_grad]
        outputs, given_grads = zip(*pairs, strict=True)
        derived = torch.autograd.grad(
            outputs, leaves, given_grads, allow_unused=True, materialize_grads=True
        )
        return [x.detach() for x in results] + list(derived)

    def ours(q: Tensor, k: Tensor, v: Tensor, at: Tensor, hidden: Tensor | None) -> Any:
        out = luong_attention(
            q, k, v, window=case.window, D=case.half, positions=at, key_padding_mask=hidden,
            need_weights=case.weights,
        )  # fmt: skip
        return out if case.weights else (out,)

    seen = _seen(key, positions, padding, case)

    def plain(q: Tensor, k: Tensor, v: Tensor, at: Tensor, _: Tensor | None) -> Any:
        out, weights = _plainly(q, k, v, at, seen, case)
        return (out, weights) if case.weights else (out,)

    verdict = Verdict()
    tensors = (query, key, value, positions)
    with target.active():
        watch = Watch(query=query, key=key, value=value, positions=positions, padding=padding)
        with fresh_memory_is_nan(), fastattn.use_backend(target.backend):
            got = run(ours, *tensors)
    verdict.faults += [f"{name} was written to" for name in watch.written()]
    clean = [x.nan_to_num(0.0) for x in tensors]  # what is hidden has no part
    names = ["out"] + ["weights"] * case.weights
    names += [f"grad of {name}" for name in ("query", "key", "value", "positions")]

    def definition() -> dict[str, Tensor]:
        return dict(zip(names, run(plain, *(x.double() for x in clean)), strict=False))

    want = definition()
    if dtype is torch.float64:
        want = dict(zip(want, _in_extended_precision(case, clean, padding, grads), strict=True))
    results = dict(zip(want, got, strict=True))
    dtypes = dict.fromkeys(want, dtype) | {"grad of positions": wide}
    eps_of = dict.fromkeys(want, dtype)
    verdict.judge(results, want, Noise(definition, want, dtype), dtypes, eps_of)
    return verdict


def _plainly(
    query: Tensor, key: Tensor, value: Tensor, at: Tensor, seen: Tensor, case: LuongCase
) -> tuple[Tensor, Tensor]:
    """The definition, on whole matrices of scores. Rounding does not change which keys are seen."""
    distance = torch.arange(key.shape[1]) - at[..., None]  # [B, Tq, Tk]
    scores = (query @ key.mT).masked_fill(~seen, float("-inf"))
    some = seen.any(-1, keepdim=True)
    weights = torch.softmax(torch.where(some, scores, 0.0), -1) * seen
    if case.window == "local-p":
        weights = weights * torch.exp(-2 * (distance / case.half) ** 2).to(weights.dtype)
    return weights @ value, weights


def _seen(key: Tensor, at: Tensor, hidden: Tensor | None, case: LuongCase) -> Tensor:
    """Whether each key is in the window and not hidden, [B, Tq, Tk]."""
    seen = (torch.arange(key.shape[1]) - at[..., None]).abs() <= case.half
    return seen if hidden is None else seen & ~hidden[:, None]


def _in_extended_precision(
    case: LuongCase, tensors: list[Tensor], hidden: Tensor | None, grads: list[Tensor]
) -> list[Tensor]:
    """What is right for float64, in NumPy's long doubles."""
    import numpy as np

    query, key, value, at = (x.numpy().astype(np.longdouble) for x in tensors)
    distance = np.arange(case.keys) - at[..., None]
    seen = _seen(tensors[1], tensors[3], hidden, case).numpy()
    scores = np.where(seen, np.einsum("bqd,bkd->bqk", query, key), -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    e = np.where(seen, np.exp(scores - np.where(np.isinf(top), 0, top)), 0)
    p = e / np.where(e.sum(-1, keepdims=True) == 0, 1, e.sum(-1, keepdims=True))
    bell = np.exp(-2 * (distance / case.half) ** 2) if case.window == "local-p" else np.ones_like(p)
    weights = p * bell
    g = grads[0].numpy().astype(np.longdouble)
    d_weights = np.einsum("bqv,bkv->bqk", g, value)
    if case.weights:
        d_weights = d_weights + grads[1].numpy().astype(np.longdouble)
    d_p = d_weights * bell
    ds = p * (d_p - (p * d_p).sum(-1, keepdims=True))
    results = [np.einsum("bqk,bkv->bqv", weights, value)] + [weights] * case.weights
    results += [
        np.einsum("bqk,bkd->bqd", ds, key),
        np.einsum("bqk,bqd->bkd", ds, query),
        np.einsum("bqk,bqv->bkv", weights, g),
    ]
    if case.window == "local-p":
        results.append((d_weights * p * bell * 4 * distance / case.half**2).sum(-1))
    return [torch.from_numpy(x.astype(np.float64)) for x in results]
