"""The cases of ``additive_attention``, their inputs and their proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.backends.primitives import AdditiveBackwardOptions, AdditiveOptions, extended
from fastattn.testing import memory
from fastattn.testing.calls import double
from fastattn.testing.cases import FLOATS
from fastattn.testing.draws import dropout_seed, numbers_of
from fastattn.testing.inputs import MASKS
from fastattn.testing.verdict import Proof

__all__ = ["ADDITIVE_CASES", "AdditiveCase", "AdditiveInputs", "check_additive", "make_additive"]

_NAMES = ("query", "key", "value", "v", "bias", "mask")
_GRADS = tuple(f"grad_{name}" for name in _NAMES)


@dataclass(frozen=True)
class AdditiveCase:
    """One call of ``additive_attention`` and of its backward."""

    name: str
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
    dtypes: tuple[torch.dtype, ...] = FLOATS
    slow: bool = False


def _cases() -> Iterator[AdditiveCase]:
    base = AdditiveCase("plain")
    yield base
    sizes = {
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
    for name, (b, q, k, a, d) in sizes.items():
        case = replace(base, name=f"size-{name}", batch=b, q_len=q, k_len=k, width=a, value_dim=d)
        yield replace(case, weights=True, bias=name != "two")
    for mask, dims in (
        ("bool", "bqk"),
        ("bool_rows", "qk"),
        ("padding", "bk"),
        ("left_padding", "bk"),
        ("nothing", "k"),
        ("one_key", "qk"),
        ("float", "bqk"),
        ("float", "qk"),
        ("float", "bk"),
        ("float", "k"),
        ("float_inf", "bqk"),
        ("bool_rows_inf", "bq"),
        ("finfo_min", "qk"),
        ("steep", "bqk"),
    ):
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


@dataclass(frozen=True)
class AdditiveInputs:
    """The primitive's arguments: `args` for the backend, `clean`, without NaN, for the judge."""

    args: tuple[Tensor | None, ...]
    clean: tuple[Tensor | None, ...]
    given: tuple[Tensor, Tensor | None]  # the gradients of out and weights
    options: AdditiveOptions


def make_additive(case: AdditiveCase, dtype: torch.dtype, *, fence: bool = False) -> AdditiveInputs:
    """Return the tensors of ``case``, equal from call to call, in poisoned memory."""
    draw, normal = numbers_of(case.name)

    def placed(values: Tensor, layout: str, as_dtype: torch.dtype = dtype) -> Tensor:
        return memory.place(values[:, None].to(as_dtype), layout, fence=fence)[:, 0]

    b, q, k = case.batch, case.q_len, case.k_len
    query = placed(case.spread * normal(b, q, case.width), case.layouts[0])
    key = placed(case.spread * normal(b, k, case.width), case.layouts[1])
    value = placed(normal(b, k, case.value_dim), case.layouts[2])
    v = (2 * normal(case.width) / max(case.width, 1) ** 0.5).to(dtype)
    bias = normal(case.width).to(dtype) if case.bias else None
    mask = None
    if case.mask is not None:
        full = dict(zip("bqk", (b, q, k), strict=True))
        shape = tuple(full[dim] if dim in case.mask_dims else 1 for dim in "bqk")
        mask_dtype = torch.float32 if case.mask_float32 else dtype
        values = MASKS[case.mask]((shape[0], 1, *shape[1:]), draw, mask_dtype)[:, 0]
        as_dtype = torch.bool if values.dtype == torch.bool else mask_dtype
        mask = placed(values, "contiguous", as_dtype)
    seed = dropout_seed(draw, case.dropout_p)
    poisoned = [key, value]
    if case.poison:
        visible = torch.ones(b, q, k, dtype=torch.bool)
        if mask is not None:
            visible = visible & (mask if mask.dtype == torch.bool else mask != -torch.inf)
        hidden = ~(visible.tril() if case.causal else visible).any(1)[:, :, None]
        assert hidden.any(), case.name
        kinds = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)
        poisoned = [
            placed(torch.where(hidden, kinds[torch.arange(x.shape[2]) % 3], x), layout)
            for x, layout in zip(poisoned, case.layouts[1:], strict=True)
        ]
    grad_out = placed(normal(b, q, case.value_dim), "every_second")
    grad_weights = placed(normal(b, q, k), "transposed") if case.weights else None
    rest = (v, bias, mask, seed)
    return AdditiveInputs(
        args=(query, *poisoned, *rest),
        clean=(query, key, value, *rest),
        given=(grad_out, grad_weights),
        options=AdditiveOptions(case.causal, case.dropout_p, case.weights),
    )


def run_additive(backend: Any, inputs: AdditiveInputs) -> dict[str, Tensor]:
    """Run the primitive of a backend, forward and backward."""
    out, weights = backend.additive_attention(*inputs.args, options=inputs.options)
    mask = inputs.args[5]
    options = extended(
        AdditiveBackwardOptions,
        inputs.options,
        needs_mask_grad=mask is not None and mask.is_floating_point(),
    )
    grads = backend.additive_attention_backward(*inputs.given, *inputs.args, options=options)
    results = {"out": out}
    if inputs.options.weights:
        results["weights"] = weights
    results.update((n, g) for n, g in zip(_GRADS, grads, strict=True) if g is not None)
    return results


def _definition(inputs: AdditiveInputs) -> dict[str, Tensor]:
    wide = replace(inputs, args=double(inputs.clean), given=double(inputs.given))
    return run_additive(reference, wide)


check_additive = Proof(
    "additive_attention",
    ADDITIVE_CASES,
    make=make_additive,
    watched=lambda inputs: dict(
        zip((*_NAMES, "seed", "grad_out", "grad_weights"), inputs.args + inputs.given, strict=True)
    ),
    primitive=lambda inputs: (inputs.args, inputs.options),
    run=run_additive,
    definition=_definition,
    extended=lambda naive, x: naive.additive_attention(*x.clean, x.options, *x.given),
    dtypes=lambda inputs: {} if inputs.args[5] is None else {"grad_mask": inputs.args[5].dtype},
)
