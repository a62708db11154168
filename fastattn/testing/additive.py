"""The cases of ``additive_attention`` and their judge.

The judge of 16 and 32 bits is the reference in float64; that of float64 is additive attention
written a second time, in NumPy, with its gradients by hand, in extended precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.backends.primitives import AdditiveBackwardOptions, AdditiveOptions, extended
from fastattn.testing import memory
from fastattn.testing.draws import cached, generator_of
from fastattn.testing.inputs import MASKS
from fastattn.testing.rounding import Noise
from fastattn.testing.targets import Target
from fastattn.testing.verdict import Verdict, fresh_memory_is_nan

__all__ = ["ADDITIVE_CASES", "AdditiveCase", "AdditiveInputs", "check_additive", "make_additive"]

_NAMES = ("grad_query", "grad_key", "grad_value", "grad_v", "grad_bias", "grad_mask")


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
    weights: bool = False  # asked for, and given a gradient
    poison: bool = False  # NaN and inf in keys and values that no query sees
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    dtypes: tuple[torch.dtype, ...] = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    )
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
    # Beyond the factored form, in some blocks or in all of them.
    for spread in (4.0, 8.0, 30.0):
        yield replace(base, name=f"spread-{spread:g}", spread=spread, q_len=70, k_len=150)
    yield replace(base, name="saturated", spread=1e4, q_len=70, k_len=150)
    yield replace(base, name="spread-poison", spread=30, mask="padding", poison=True)
    for layout in memory.LAYOUTS:
        # Where all keys or all values are one, the gradients of a softmax are 0: nothing to judge.
        one = layout in ("expanded_rows", "expanded_all")
        layouts = (layout, "contiguous", "contiguous") if one else (layout, layout, layout)
        yield replace(base, name=f"memory-{layout}", layouts=layouts)
    yield replace(base, name="memory-mixed", layouts=("every_second", "transposed", "sliced"))


ADDITIVE_CASES = tuple(_cases())


@dataclass(frozen=True)
class AdditiveInputs:
    """The primitive's arguments, with keys and values as the candidate and as the judge get it."""

    args: tuple[Tensor | None, ...]
    clean: tuple[Tensor | None, ...]
    given: tuple[Tensor, Tensor | None]  # the gradients of out and weights
    options: AdditiveOptions
    needs_mask_grad: bool


def make_additive(case: AdditiveCase, dtype: torch.dtype, *, fence: bool = False) -> AdditiveInputs:
    """Return the tensors of ``case``, always the same, in hostile memory."""
    draw = generator_of(case.name)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

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
    seed = None
    if case.dropout_p > 0:
        seed = torch.randint(-(2**63), 2**63 - 1, (), generator=draw, dtype=torch.int64)
    poisoned = key, value
    if case.poison:
        seen = torch.ones(b, q, k, dtype=torch.bool)
        if mask is not None:
            seen = seen & (mask if mask.dtype == torch.bool else mask != -torch.inf)
        seen = seen.tril() if case.causal else seen
        unseen = ~seen.any(1)[:, :, None]
        assert unseen.any(), case.name
        kinds = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)
        columns = [kinds[torch.arange(x.shape[2]) % 3].expand_as(x) for x in poisoned]
        poisoned = tuple(  # type: ignore[assignment]
            placed(torch.where(unseen, column, x), layout)
            for x, column, layout in zip(poisoned, columns, case.layouts[1:], strict=True)
        )
    grad_out = placed(normal(b, q, case.value_dim), "every_second")
    grad_weights = placed(normal(b, q, k), "transposed") if case.weights else None
    rest = (v, bias, mask, seed)
    return AdditiveInputs(
        args=(query, *poisoned, *rest),
        clean=(query, key, value, *rest),
        given=(grad_out, grad_weights),
        options=AdditiveOptions(case.causal, case.dropout_p, case.weights),
        needs_mask_grad=mask is not None and mask.is_floating_point(),
    )


def run_additive(backend: Any, inputs: AdditiveInputs) -> dict[str, Tensor]:
    """The primitive of a backend, forward and backward."""
    out, weights = backend.additive_attention(*inputs.args, options=inputs.options)
    options = extended(
        AdditiveBackwardOptions, inputs.options, needs_mask_grad=inputs.needs_mask_grad
    )
    grads = backend.additive_attention_backward(*inputs.given, *inputs.args, options=options)
    results = {"out": out}
    if inputs.options.weights:
        results["weights"] = weights
    results.update((n, g) for n, g in zip(_NAMES, grads, strict=True) if g is not None)
    return results


def exact_additive(inputs: AdditiveInputs) -> dict[str, Tensor]:
    """The results as they should be, in float64."""
    query = inputs.args[0]
    assert query is not None
    return _extended(inputs) if query.dtype == torch.float64 else define_additive(inputs)


def define_additive(inputs: AdditiveInputs) -> dict[str, Tensor]:
    """The results of the reference in float64."""

    def wide(x: Tensor | None) -> Tensor | None:
        return x.double() if x is not None and x.is_floating_point() else x

    given = tuple(wide(x) for x in inputs.given)
    clean = tuple(wide(x) for x in inputs.clean)
    return run_additive(reference, replace(inputs, args=clean, given=given))  # type: ignore[arg-type]


def _extended(inputs: AdditiveInputs) -> dict[str, Tensor]:
    """Forward and backward by hand, in extended precision."""
    import numpy as np

    def array(x: Tensor) -> Any:
        return np.asarray(x.detach().cpu(), dtype=np.longdouble)

    tensors = [None if x is None else x.detach() for x in inputs.clean]
    q, k, value, v = (array(x) for x in tensors[:4] if x is not None)
    bias, mask, seed = tensors[4:]
    b, nq, nk, causal = q.shape[0], q.shape[1], k.shape[1], inputs.options.causal
    seen = np.ones((b, nq, nk), dtype=bool)
    hidden = q[:, :, None] + k[:, None]
    if bias is not None:
        hidden = hidden + array(bias)
    t = np.tanh(hidden)
    e = (t * v).sum(-1)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask.numpy()
    elif mask is not None:
        seen = seen & (mask.numpy() != -np.inf)
        e = e + np.where(np.isfinite(array(mask)), array(mask), 0)
    seen = np.tril(seen) if causal else seen
    top = np.where(seen, e, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    p = np.where(seen, np.exp(e - np.where(np.isfinite(top), top, 0)), 0)
    total = p.sum(-1, keepdims=True)
    p = p / np.where(total == 0, 1, total)
    z = np.ones_like(p)
    if seed is not None:
        kept = reference.dropout_keep((b, 1, nq, nk), inputs.options.dropout_p, seed)[:, 0]
        threshold = round((1 - inputs.options.dropout_p) * 65536)
        z = kept.numpy() * (np.longdouble(65536) / threshold if threshold else 0)
    w = p * z
    d_out = array(inputs.given[0])
    d_w = d_out @ value.swapaxes(1, 2)
    if inputs.given[1] is not None:
        d_w = d_w + array(inputs.given[1])
    d_p = d_w * z
    g = p * (d_p - (p * d_p).sum(-1, keepdims=True))
    h = g[..., None] * v * (1 - t) * (1 + t)
    results = {
        "out": w @ value,
        "weights": w,
        "grad_query": h.sum(2),
        "grad_key": h.sum(1),
        "grad_value": w.swapaxes(1, 2) @ d_out,
        "grad_v": (g[..., None] * t).sum((0, 1, 2)),
        "grad_bias": h.sum((0, 1, 2)),
    }
    if not inputs.options.weights:
        del results["weights"]
    if bias is None:
        del results["grad_bias"]
    if inputs.needs_mask_grad:
        assert mask is not None
        axes = tuple(n for n, size in enumerate(mask.shape) if size == 1)
        results["grad_mask"] = g.sum(axes, keepdims=True)
    return {name: torch.from_numpy(x.astype(np.float64)) for name, x in results.items()}


@cached
def expected_additive(
    case: AdditiveCase, dtype: torch.dtype
) -> tuple[AdditiveInputs, dict[str, Tensor], Noise]:
    """Return the inputs, what they should give, and how far rounding alone moves that."""
    inputs = make_additive(case, dtype)
    exact = exact_additive(inputs)
    return inputs, exact, Noise(lambda: define_additive(inputs), exact, dtype)


def check_additive(case: AdditiveCase, dtype: torch.dtype, target: Target) -> Verdict:
    """Run ``case`` forward and backward on ``target`` and judge it by the error bound."""
    inputs, exact, noise = expected_additive(case, dtype)
    verdict = Verdict()
    with target.active() as backend:
        verdict.declined = backend.why_not(
            "additive_attention", *inputs.args, options=inputs.options
        )
        if verdict.declined:
            return verdict
        names = ("query", "key", "value", "v", "bias", "mask")
        tensors = dict(zip(names, inputs.args, strict=False))
        watch = memory.Watch(**tensors, grad_out=inputs.given[0], grad_weights=inputs.given[1])
        with fresh_memory_is_nan():
            results = run_additive(backend, inputs)
    verdict.faults += [f"{name} was written to" for name in watch.written()]
    mask = inputs.args[5]
    dtypes = dict.fromkeys(exact, dtype) | ({} if mask is None else {"grad_mask": mask.dtype})
    verdict.judge(results, exact, noise, dtypes)
    return verdict
