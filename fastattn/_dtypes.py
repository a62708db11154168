"""The dtypes of an operator's tensors, checked where nothing has checked them before.

As in :mod:`fastattn._shapes`: a kernel reads all tensors by the dtype of one of them, so it would
read beyond the end of a tensor of narrower elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.primitives import QUANTISED

# The first of these tensors decides the dtype of all tensors that are not named below.
_LEADING = ("query", "state", "weight", "x", "out_a", "key", "grad_out")
_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# The dtypes that a tensor may have, given the dtype of the leading tensor.
_Rule = Callable[[torch.dtype], tuple[torch.dtype, ...]]


def _only(dtype: torch.dtype) -> _Rule:
    return lambda leading: (dtype,)


def _at_least_float32(leading: torch.dtype) -> tuple[torch.dtype, ...]:
    return (torch.promote_types(leading, torch.float32),)


def _same_or_float32(leading: torch.dtype) -> tuple[torch.dtype, ...]:
    return leading, torch.float32


def _any_floating(leading: torch.dtype) -> tuple[torch.dtype, ...]:
    return _FLOATING


# By the name of a tensor, or by "operator.tensor".
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(
        "seed cu_seqlens_q cu_seqlens_k cache_seqlens cache_batch_idx cache_leftpad "
        "rotary_positions tokens taken sinusoidal_encoding.positions".split(),
        _only(torch.int64),
    ),
    **dict.fromkeys(
        "block_table mask_program positions score_program distance_buckets".split(),
        _only(torch.int32),
    ),
    **dict.fromkeys(("mask", "memory_mask", "padding"), _only(torch.bool)),
    **dict.fromkeys(("key_scales", "value_scales"), _only(torch.float32)),
    "lse": _only(torch.float64),
    **dict.fromkeys(
        "alibi_slopes sinks relative_bias row_bias column_bias score_data factors trace stats ends "
        "local_attention.positions local_attention.factor local_attention.weights "
        "local_attention.grad_weights".split(),
        _at_least_float32,
    ),
    **dict.fromkeys(
        "memory_bias rotary_cos rotary_sin hopfield_retrieve.bias".split(), _same_or_float32
    ),
    "attn_mask": lambda leading: (torch.bool, *_same_or_float32(leading)),
    # Converted before the kernel runs.
    "grad_lse": _any_floating,
    "lse_a": lambda leading: (torch.float32, torch.float64),
}
_LIKE = {"value_cache": "key_cache", "lse_b": "lse_a"}  # tensors with the dtype of another tensor


def _rule_of(op: str, name: str) -> _Rule:
    rule = _RULES.get(f"{op.removesuffix('_backward')}.{name}") or _RULES.get(name)
    return rule or (lambda leading: (leading,))  # the same dtype


class Dtypes:
    """The dtypes that an operator allows."""

    def __init__(self, op: str, names: Sequence[str]) -> None:
        self.op = op
        self._leading = next(names.index(name) for name in _LEADING if name in names)
        self._rules = list(self._rules_of(names))
        self._scales = names.index("key_scales") if "key_scales" in names else None

    def _rules_of(self, names: Sequence[str]) -> Iterator[tuple[str, int, _Rule]]:
        """The name of each tensor, the place of the tensor that decides its dtype, and the rule."""
        for name in names:
            like = names.index(_LIKE[name]) if name in _LIKE else self._leading
            yield name, like, _rule_of(self.op, name)

    def leading(self, tensors: Sequence[Any]) -> Any:
        """The tensor that decides the dtypes."""
        return tensors[self._leading]

    def of_result(self, name: str, leading: Tensor) -> torch.dtype:
        return _rule_of(self.op, name)(leading.dtype)[0]

    def check(self, tensors: Sequence[Any]) -> None:
        """Raise a RuntimeError if a tensor has the wrong dtype."""
        leading: Tensor | None = tensors[self._leading]
        if leading is None:
            return
        if leading.dtype not in _FLOATING:
            self._refuse(self._rules[self._leading][0], leading, _FLOATING)
        for (name, like, rule), x in zip(self._rules, tensors, strict=True):
            if x is None:
                continue
            dtypes = rule(tensors[like].dtype)
            if name == "key_cache":  # quantised if there are key_scales
                scaled = self._scales is not None and tensors[self._scales] is not None
                dtypes = tuple(QUANTISED) if scaled else dtypes[:1]
            if x.dtype not in dtypes:
                self._refuse(name, x, dtypes)

    def _refuse(self, name: str, x: Tensor, dtypes: Sequence[torch.dtype]) -> None:
        expected = " or ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
        actual = str(x.dtype).removeprefix("torch.")
        raise RuntimeError(f"{self.op}: {name} must be {expected}, got {actual}")
