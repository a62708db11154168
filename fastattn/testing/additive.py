"""The cases of ``additive_attention``, their inputs and their proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastattn.backends.primitives import AdditiveOptions
from fastattn.testing import memory
from fastattn.testing.calls import Operands
from fastattn.testing.cases import NamedCase, dropout_seed, numbers_of
from fastattn.testing.inputs import make_mask, poison
from fastattn.testing.judge import Proof


@dataclass(frozen=True)
class AdditiveCase(NamedCase):
    """One call of ``additive_attention`` and of its backward."""

    batch: int = 2
    q_len: int = 21
    k_len: int = 37
    width: int = 20  # A
    value_dim: int = 18
    spread: float = 1.0  # of query and key
    bias: bool = True
    mask: str | None = None  # one of MASKS
    mask_dims: str = "bqk"  # the dimensions that the mask has
    mask_float32: bool = False
    causal: bool = False
    dropout_p: float = 0.0
    weights: bool = False  # returned, with a gradient
    poison: bool = False  # NaN and inf in keys and values that no query can see
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")


_SIZES = {
    "one": (1, 1, 1, 1, 1),
    "step": (3, 1, 50, 33, 20),
    "long-step": (1, 1, 300, 16, 70),
    "two": (2, 2, 3, 5, 4),
    "edges": (2, 65, 129, 17, 33),
    "blocks": (1, 260, 130, 24, 16),
    "chunks": (1, 1100, 20, 8, 4),
    "wide": (1, 9, 12, 530, 300),
    "no-batch": (0, 3, 4, 5, 6),
    "no-query": (2, 0, 4, 5, 6),
    "no-key": (2, 3, 0, 5, 6),
    "no-width": (2, 3, 4, 0, 6),
    "no-value": (2, 3, 4, 5, 0),
}
_MASKS = """
    bool-bqk bool_rows-qk padding-bk left_padding-bk nothing-k one_key-qk float-bqk float-qk
    float-bk float-k float_inf-bqk bool_rows_inf-bq finfo_min-qk steep-bqk
"""


def _cases() -> Iterator[AdditiveCase]:
    base = AdditiveCase("plain")
    yield base
    for name, (b, q, k, a, d) in _SIZES.items():
        case = replace(base, name=f"size-{name}", batch=b, q_len=q, k_len=k, width=a, value_dim=d)
        yield replace(case, weights=True, bias=name != "two")
    for mask, _, dims in (name.partition("-") for name in _MASKS.split()):
        yield replace(base, name=f"mask-{mask}-{dims}", mask=mask, mask_dims=dims)
    for mask in ("padding", "left_padding_inf", "nothing"):
        yield replace(base, name=f"poison-{mask}", mask=mask, poison=True, weights=True)
    yield replace(base, name="poison-causal", causal=True, q_len=21, k_len=90, poison=True)
    yield replace(base, name="causal", causal=True, q_len=90, k_len=70)
    yield replace(base, name="causal-mask", causal=True, mask="float_inf", q_len=40)
    yield replace(base, name="mask-float32", mask="float", mask_float32=True)
    for p in (0.1, 0.5, 1.0):
        yield replace(base, name=f"dropout-{p}", dropout_p=p, weights=True, k_len=77, q_len=70)
    yield replace(base, name="dropout-mask", dropout_p=0.3, mask="float_inf", causal=True)
    # Beyond the range of the factored form, in some blocks or in all of them.
    for spread in (4.0, 8.0, 30.0):
        yield replace(base, name=f"spread-{spread:g}", spread=spread, q_len=70, k_len=150)
    yield replace(base, name="saturated", spread=1e4, q_len=70, k_len=150)
    yield replace(base, name="spread-poison", spread=30, mask="padding", poison=True)
    for layout in memory.LAYOUTS:
        # If all keys or all values are equal, the gradients of the softmax are 0, without a scale.
        one = layout in ("expanded_rows", "expanded_all")
        layouts = (layout, "contiguous", "contiguous") if one else (layout, layout, layout)
        yield replace(base, name=f"memory-{layout}", layouts=layouts)
    yield replace(base, name="memory-mixed", layouts=("every_second", "transposed", "sliced"))


ADDITIVE_CASES = tuple(_cases())


def make_additive(case: AdditiveCase, dtype: torch.dtype) -> Operands:
    """Return the tensors of ``case``, equal from call to call, in poisoned memory."""
    draw, normal = numbers_of(case.name)

    def placed(values: Tensor, layout: str) -> Tensor:
        return memory.place(values[:, None].to(dtype), layout)[:, 0]

    b, q, k = case.batch, case.q_len, case.k_len
    tensors: dict[str, Tensor | None] = {
        "query": placed(case.spread * normal(b, q, case.width), case.layouts[0])
    }
    key = placed(case.spread * normal(b, k, case.width), case.layouts[1])
    clean = {
        "key": key,
        "value": placed(normal(b, k, case.value_dim), case.layouts[2]),
    }
    tensors |= clean
    tensors["v"] = (2 * normal(case.width) / max(case.width, 1) ** 0.5).to(dtype)
    tensors["bias"] = normal(case.width).to(dtype) if case.bias else None
    mask = make_mask(case, (b, 1, q, k), draw, dtype)
    mask = None if mask is None else mask[:, 0]
    tensors |= {"attn_mask": mask, "seed": dropout_seed(draw, case.dropout_p)}
    if case.poison:
        visible = torch.ones(b, q, k, dtype=torch.bool)
        if mask is not None:
            visible = visible & (mask if mask.dtype == torch.bool else mask != -torch.inf)
        hidden = ~(visible.tril() if case.causal else visible).any(1)
        assert hidden.any(), case.name
        for (name, x), layout in zip(clean.items(), case.layouts[1:], strict=True):
            tensors[name] = placed(poison(x, hidden), layout)
    grad_out = placed(normal(b, q, case.value_dim), "every_second")
    grad_weights = placed(normal(b, q, k), "transposed") if case.weights else None
    options = AdditiveOptions(case.causal, case.dropout_p, case.weights)
    needs_mask_grad = mask is not None and mask.is_floating_point()
    return Operands(
        "additive_attention",
        tensors,
        options,
        {"out": grad_out, "weights": grad_weights},
        {"needs_mask_grad": needs_mask_grad},
        clean,
    )


check_additive = Proof("additive_attention", ADDITIVE_CASES, make=make_additive)
