"""The cases of ``luong_attention`` in a local window, their inputs and their proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.backends.primitives import AttentionOptions
from fastattn.testing.calls import Call
from fastattn.testing.cases import Case, Draw, drawn
from fastattn.testing.inputs import make_inputs, of_one_head
from fastattn.testing.judge import Proof
from fastattn.testing.memory import LAYOUTS


@dataclass(frozen=True)
class LuongCase(Case):
    """A case of attention with one head, half the window, and its kind; a mask is padding."""

    heads: int = 1
    q_len: int = 9
    k_len: int = 40
    head_dim: int = 24
    spreads: tuple[float, float] = (1.0, 1.0)
    scale: float | None = 1.0
    half: int = 5
    kind: str = "local-p"


_SIZES: dict[str, Sequence[Any]] = {
    "batch q_len k_len half": [
        *((2, 9, 40, 5), (2, 9, 40, 1), (2, 9, 3, 7), (3, 1, 100, 16), (1, 70, 130, 10)),
        *((2, 5, 90, 40), (0, 9, 40, 5), (2, 0, 40, 5), (2, 9, 0, 5)),
    ],
    "head_dim value_dim": [(24, 24), (1, 3), (67, 33), (16, 80), (300, 7), (0, 24), (24, 0)],
    "kind": ["local-p", "local-m"],
}
_OPTIONS: dict[str, Sequence[Any]] = {
    "mask mask_dims poison": [("bool", "bk", True)] * 4,
    "weights grads": [(1, ("out", "weights"))] * 4,
    "layouts": [(x, x, x) for x in LAYOUTS],
}
LUONG_CASES = (
    LuongCase("plain"),
    # Keys that are one in memory are not padding and others.
    *(case for case in drawn(LuongCase("mixed"), 44, _SIZES, _OPTIONS)
      if not (case.poison and case.layouts[0].startswith("expanded"))),
)  # fmt: skip


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
    given, draw = make_inputs(case, dtype), Draw(case, dtype)
    tensors, clean, grads = map(of_one_head, (given.tensors, given.clean, given.grads))
    # Some windows cross the ends of the keys or lie outside; a third are centered on a key and
    # have one key more than the others.
    places = torch.rand(case.batch, case.q_len, generator=draw.generator).double()
    positions = (places * (case.k_len + 4 * case.half) - 2 * case.half).to(draw.wide)
    positions[:, ::3] = positions[:, ::3].round()
    mask, named = tensors["attn_mask"], {n: tensors[n] for n in ("query", "key", "value")}
    options = {"window": case.kind, "D": case.half, "need_weights": case.weights > 0}
    options["key_padding_mask"] = None if mask is None else ~mask[:, 0]
    (named if case.kind == "local-p" else options)["positions"] = positions
    return Call("luong_attention", named, options, grads, clean=clean, plain=_attend)


check_luong = Proof("luong_attention", LUONG_CASES, make=_make, coarse=("grad_positions",))
