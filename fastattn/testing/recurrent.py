"""The cases of additive and of Luong's attention, on the inputs of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.backends.primitives import AdditiveOptions, AttentionOptions
from fastattn.testing.calls import Call, Operands
from fastattn.testing.cases import LAYOUTS, Case, Draw, drawn
from fastattn.testing.inputs import make_inputs, of_one_head
from fastattn.testing.judge import Proof


@dataclass(frozen=True)
class AdditiveCase(Case):
    """One call of ``additive_attention`` and of its backward."""

    heads: int = 1
    q_len: int = 21
    k_len: int = 37
    head_dim: int = 20  # A
    value_dim: int | None = 18
    spreads: tuple[float, float] = (1.0, 1.0)
    scale: float | None = 1.0
    grad_layout: str = "every_second"
    bias: bool = True


_ADDITIVE_SIZES: dict[str, Sequence[Any]] = {
    "batch q_len k_len": [
        *((1, 1, 1), (3, 1, 50), (1, 1, 300), (2, 2, 3), (2, 65, 129), (1, 260, 130), (2, 90, 70)),
        *((1, 1100, 20), (1, 9, 12), (0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 21, 37), (1, 70, 150)),
    ],
    "head_dim value_dim": [(1, 1), (33, 20), (16, 70), (5, 4), (24, 16), (0, 6), (5, 0), (20, 18)],
    "bias": [True, True, False],
}
_ADDITIVE_OPTIONS: dict[str, Sequence[Any]] = {
    "mask mask_dims": [
        *(("bool", "bqk"), ("bool_rows", "qk"), ("padding", "bk"), ("left_padding", "bk")),
        *(("nothing", "k"), ("one_key", "qk"), ("bool_rows_inf", "bq"), ("finfo_min", "qk")),
        *(("steep", "bqk"), ("float_inf", "bqk"), *(("float", x) for x in ("bqk", "qk", "bk"))),
    ],
    "mask mask_float32": [("float", True), ("float_inf", True)],
    "poison mask": [(True, kind) for kind in ("padding", "left_padding_inf", "nothing")],
    "poison causal": [(True, "upper_left")] * 2,
    "causal": ["upper_left"] * 3,
    "dropout_p": [0.1, 0.3, 0.5, 1.0],
    "weights grads": [(1, ("out", "weights"))] * 5,
    # Beyond the range of the factored form, in some blocks or in all of them.
    "spreads": [(x, x) for x in (4.0, 8.0, 30.0, 1e4)],
    "layouts": [
        # If all keys or all values are equal, the gradients of the softmax are 0, without a scale.
        *((x, *(["contiguous"] * 2 if x in ("expanded_rows", "expanded_all") else [x] * 2))
          for x in LAYOUTS),
        ("every_second", "transposed", "sliced"),
    ],
}  # fmt: skip
_WIDE = AdditiveCase("wide", batch=1, q_len=9, k_len=12, head_dim=530, value_dim=300)
ADDITIVE_CASES = (
    *(AdditiveCase("plain"), _WIDE),
    *drawn(AdditiveCase("mixed"), 70, _ADDITIVE_SIZES, _ADDITIVE_OPTIONS),
)


def make_additive(case: AdditiveCase, dtype: torch.dtype) -> Operands:
    inputs, draw = make_inputs(case, dtype), Draw(replace(case, name=f"{case.name}-v"), dtype)
    tensors, clean, grads = map(of_one_head, (inputs.tensors, inputs.clean, inputs.grads))
    mask, width = tensors["attn_mask"], case.head_dim
    v = draw.placed(2 * draw.normal(width) / max(width, 1) ** 0.5)
    bias = draw.placed(draw.normal(width)) if case.bias else None
    named = {name: tensors[name] for name in ("query", "key", "value")}
    named |= {"v": v, "bias": bias, "attn_mask": mask, "seed": tensors["seed"]}
    of_backward = {"needs_mask_grad": mask is not None and mask.is_floating_point()}
    options = AdditiveOptions(case.causal is not None, case.dropout_p, case.weights > 0)
    return Operands("additive_attention", named, options, grads, of_backward, clean)


check_additive = Proof("additive_attention", ADDITIVE_CASES, make=make_additive)


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


_LUONG_SIZES: dict[str, Sequence[Any]] = {
    "batch q_len k_len half": [
        *((2, 9, 40, 5), (2, 9, 40, 1), (2, 9, 3, 7), (3, 1, 100, 16), (1, 70, 130, 10)),
        *((2, 5, 90, 40), (0, 9, 40, 5), (2, 0, 40, 5), (2, 9, 0, 5)),
    ],
    "head_dim value_dim": [(24, 24), (1, 3), (67, 33), (16, 80), (300, 7), (0, 24), (24, 0)],
    "kind": ["local-p", "local-m"],
}
_LUONG_OPTIONS: dict[str, Sequence[Any]] = {
    "mask mask_dims poison": [("bool", "bk", True)] * 4,
    "weights grads": [(1, ("out", "weights"))] * 4,
    "layouts": [(x, x, x) for x in LAYOUTS],
}
LUONG_CASES = (
    LuongCase("plain"),
    # Keys that share memory cannot be padding and real at once.
    *(case for case in drawn(LuongCase("mixed"), 44, _LUONG_SIZES, _LUONG_OPTIONS)
      if not (case.poison and case.layouts[0].startswith("expanded"))),
)  # fmt: skip


def _attend_locally(
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


def _make_luong(case: LuongCase, dtype: torch.dtype) -> Call:
    inputs, draw = make_inputs(case, dtype), Draw(case, dtype)
    tensors, clean, grads = map(of_one_head, (inputs.tensors, inputs.clean, inputs.grads))
    # Some windows cross the ends of the keys or lie outside; a third are centered on a key and
    # have one key more than the others.
    places = torch.rand(case.batch, case.q_len, generator=draw.generator).double()
    positions = (places * (case.k_len + 4 * case.half) - 2 * case.half).to(draw.wide)
    positions[:, ::3] = positions[:, ::3].round()
    mask, named = tensors["attn_mask"], {n: tensors[n] for n in ("query", "key", "value")}
    options = {"window": case.kind, "D": case.half, "need_weights": case.weights > 0}
    options["key_padding_mask"] = None if mask is None else ~mask[:, 0]
    (named if case.kind == "local-p" else options)["positions"] = positions
    return Call("luong_attention", named, options, grads, clean=clean, plain=_attend_locally)


check_luong = Proof("luong_attention", LUONG_CASES, make=_make_luong, coarse=("grad_positions",))
