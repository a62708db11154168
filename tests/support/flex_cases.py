"""Functions of the scores, and their results on stored scores: cases of flex_attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.ops import flex
from fastattn.testing.judge import deviations
from fastattn.testing.rounding import Noise

flex_attention: Any = flex.flex_attention
BATCH, HEADS, KV_HEADS, Q_LEN, K_LEN, WIDTH = 2, 4, 2, 45, 70, 16
Mod = Callable[[Any, Any, Any, Any, Any], Any]
_TABLE = (HEADS, Q_LEN + K_LEN - 1)
# Functions of captured tensors, and the shapes or values of these.
CASES: dict[str, tuple[Callable[..., Mod], dict[str, Any]]] = {
    "constant": (lambda: lambda s, b, h, q, k: torch.zeros_like(s), {}),
    "softcap": (lambda: lambda s, b, h, q, k: 3.0 * torch.tanh(s / 3.0), {}),
    "alibi": (lambda a: lambda s, b, h, q, k: s - a[h] * (q - k).abs(), {"a": (HEADS,)}),
    "distances": (lambda a: lambda s, b, h, q, k: s + a[h, q - k + (K_LEN - 1)], {"a": _TABLE}),
    "shifted": (
        lambda a: lambda s, b, h, q, k: s + a[h, q + 2 * b - k + K_LEN],
        {"a": (HEADS, Q_LEN + K_LEN + 2)},
    ),
    "by_head": (lambda a: lambda s, b, h, q, k: s + a.detach()[h] * 2 + a[h] ** 2, {"a": (HEADS,)}),
    "prefix": (
        lambda a: lambda s, b, h, q, k: torch.where((k <= a[b]) | (q >= k), s, -math.inf),
        {"a": torch.tensor([3, 20])},
    ),
    "learned": (lambda a: lambda s, b, h, q, k: s + a[h, q, k], {"a": (HEADS, Q_LEN, K_LEN)}),
    "gathers": (
        lambda a, c: lambda s, b, h, q, k: 2 * s + a[h, q - k + (K_LEN - 1)] * c[h, q, k],
        {"a": _TABLE, "c": (HEADS, Q_LEN, K_LEN)},
    ),
    "two_terms": (
        lambda a, c: lambda s, b, h, q, k: s * torch.sigmoid(c[b, q]) + a[k].exp(),
        {"a": (K_LEN,), "c": (BATCH, Q_LEN)},
    ),
    "shared": (
        lambda a, c: lambda s, b, h, q, k: s * a.abs() + c[(q * k + h) % 5] + c[-1] * c[h // 2],
        {"a": (), "c": (5,)},
    ),
    "documents": (
        lambda a, c: (
            lambda s, b, h, q, k: torch.where(
                (a[q] == a[k]) | (c[k] & (k < 20)), s, torch.full_like(s, -math.inf)
            )
        ),
        {"a": torch.arange(K_LEN) // 9, "c": torch.arange(K_LEN) % 3 > 0},
    ),
}


def case(**captured: Any) -> Callable[[Callable[..., Mod]], Callable[..., Mod]]:
    """Register a score_mod and the tensors that it captures, or their shapes, as a case."""

    def add(make: Callable[..., Mod]) -> Callable[..., Mod]:
        CASES[make.__name__] = make, captured
        return make

    return add


@case(table=(HEADS,))
def far(table: Tensor) -> Mod:
    """A softcap, a penalty of the distance and a factor for each head."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        d = (k - q).abs().to(s.dtype)
        return 2.0 * (s * 0.5).tanh() - d * d * 1e-3 + torch.log1p(d) * torch.sigmoid(table[h])

    return mod


@case()
def window_2d() -> Mod:
    """A window in two dimensions, over rows of eight."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        y, x = (q // 8 - k // 8).abs(), (q % 8 - k % 8).abs()
        return torch.where(torch.logical_and(y <= 2, x <= 3), s, float("-inf"))

    return mod


@case()
def neighbours() -> Mod:
    """The 5 x 5 around each query, moved into the image at its borders."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        y, x = (q // 7).clamp(2, 4), (q % 7).clamp(2, 4)
        near = ((y - k // 7).abs() <= 2) & ((x - k % 7).abs() <= 2)
        return torch.where(near, s, float("-inf"))

    return mod


@case(slope=(HEADS,), pages=torch.randperm(2 * 9).view(2, 9) - 3)
def paged(slope: Tensor, pages: Tensor) -> Mod:
    """Keys are in pages of 8; the table has the logical page of each, below 0 for none."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        page = pages[b, k // 8]
        score = s - slope[h] * (q - (page * 8 + k % 8)).abs()
        return torch.where(page >= 0, score, float("-inf"))

    return mod


@case(bias=(HEADS,))
def functions(bias: Tensor) -> Mod:
    """Logarithms, roots, limits and whole numbers."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        far = torch.log(1 + (q - k).abs().to(s.dtype))
        bent = torch.maximum(s, bias[h]) - torch.minimum(s * 0.5, far)
        root = torch.sqrt(1 + s * s) - torch.abs(s - 0.1)
        third = (q / 3).floor() / (2 + s.exp())
        return bent + root.clamp(-1, 1.5) + torch.relu(s) ** 2 * 0.1 - third

    return mod


@case(bias=(HEADS,))
def waves(bias: Tensor) -> Mod:
    """Trigonometric functions, and integers that are shifted and divided."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        x, i = s + bias[h], q.to(s.dtype)
        angles = torch.atan2(x, 1 + bias[h] ** 2) + torch.asin(0.9 * torch.sin(i * 0.1)) + x.atan()
        angles = angles - torch.acos(0.5 * torch.tanh(x))
        whole = (q >> 2) - torch.div(q - k, 3, rounding_mode="trunc") + (k & 6)
        return (
            torch.sin(3 * x)
            + torch.cos(40 * x) * torch.tan(s.tanh())
            + angles
            + 0.1 * whole.to(s.dtype)
        )

    return mod


@case(bias=(HEADS,))
def powers(bias: Tensor) -> Mod:
    """Powers, exponentials and functions made of them."""
    gelu = torch.nn.functional.gelu

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        x = s + bias[h]
        power = (1 + s.abs()) ** bias[h].sigmoid() + torch.exp2(-x.abs()) - torch.expm1(-x * x)
        bell = torch.erf(x) - gelu(x) + gelu(s, approximate="tanh") + 1.5 ** torch.tanh(x)
        return power + bell + torch.sinh(s.tanh()) * torch.cosh(s.tanh()) + torch.log1p(x * x)

    return mod


@case(place=(K_LEN, 3), factor=(3,))
def far_apart(place: Tensor, factor: Tensor) -> Mod:
    """Distances of rows of captured tensors."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        apart = (place[q] - place[k]) * factor
        size = (1 + place[q].norm(dim=-1)) * (1 + place[k].square().mean(-1))
        angle = torch.acos((place[q] * place[k]).sum(-1) / (4 + 4 * size))
        return s - (1 + apart.square().sum(-1)).sqrt() + angle - apart.amax(-1) * place[k, 2]

    return mod


@case(bias=(3, 5))
def out_of_order(bias: Tensor) -> Mod:
    """Captured elements whose indices are computed, and a gradient through a detached score."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        inner = torch.where((q + k) % 2 == 0, bias[q % 3, k % 5], bias[k % 3, h])
        inner = inner * torch.exp(s - s.detach())  # 1, with a gradient
        return (
            inner * s + (b * 2 - h).to(s.device, s.dtype) * 0.25 + torch.logical_not(q > k).float()
        )

    return mod


def tensors_of(captured: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Queries, keys, values, and the captured tensors."""
    wide = torch.promote_types(dtype, torch.float32)
    sizes = ((HEADS, Q_LEN), (KV_HEADS, K_LEN), (KV_HEADS, K_LEN))
    made = {name: torch.randn(BATCH, *size, WIDTH).to(dtype)
            for name, size in zip(("query", "key", "value"), sizes, strict=True)}  # fmt: skip
    return made | {
        name: x if isinstance(x, Tensor) else torch.randn(x, dtype=torch.float64).to(wide)
        for name, x in captured.items()
    }


def results(
    attend: Callable[..., Any], make: Any, tensors: dict[str, Tensor], grads: Any
) -> dict[str, Tensor]:
    """out, lse, and the gradients of all floating tensors."""
    leaves = {n: x.detach().requires_grad_(x.is_floating_point()) for n, x in tensors.items()}
    operands = [leaves.pop(n) for n in ("query", "key", "value")]
    out, lse = attend(*operands, make(**leaves))
    wanted = dict(zip(("query", "key", "value"), operands, strict=True)) | leaves
    wanted = {n: x for n, x in wanted.items() if x.requires_grad}
    pairs = [(x, g.to(x.dtype)) for x, g in zip((out, lse), grads, strict=True) if x.requires_grad]
    outs, given = ([pair[n] for pair in pairs] for n in (0, 1))
    options: Any = {"allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad(outs, [*wanted.values()], given, **options)
    named = {f"grad_{n}": g for n, g in zip(wanted, found, strict=True)}
    return {"out": out.detach(), "lse": lse.detach()} | named


def equation(
    visible: Tensor | None, query: Tensor, key: Tensor, value: Tensor, mod: Mod
) -> tuple[Tensor, Tensor]:
    """The function on all scores, which are stored."""
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    s = query @ key.mT * WIDTH**-0.5
    index = [torch.arange(n).view([-1 if m == d else 1 for m in range(4)])
             for d, n in enumerate(s.shape)]  # fmt: skip
    s = mod(s, *index).expand(s.shape)
    if visible is not None:
        s = torch.where(visible, s, -math.inf)
    lse = torch.where((s == -math.inf).all(-1), -math.inf, torch.logsumexp(s, -1))
    w = torch.where(s == -math.inf, 0.0, torch.exp(s - lse[..., None].nan_to_num(0, 0, 0)))
    return w @ value, lse


def judged(
    make: Any, captured: Any, dtype: torch.dtype, visible: Any = None, **options: Any
) -> None:
    """Compare results and gradients with the equation in float64, by the error bound."""
    tensors = tensors_of(captured, dtype)
    grads = torch.randn(BATCH, HEADS, Q_LEN, WIDTH).to(dtype), torch.rand(BATCH, HEADS, Q_LEN)
    attend = functools.partial(flex_attention, enable_gqa=True, return_lse=True, **options)
    found = results(attend, make, tensors, grads)
    doubles = {n: x.double() if x.is_floating_point() else x for n, x in tensors.items()}
    by_equation = functools.partial(equation, visible)
    definition = functools.partial(results, by_equation, make, doubles, grads)
    exact = definition()
    noise = Noise(definition, exact, dtype)
    off = [str(d) for d in deviations(found, exact, noise, dict.fromkeys(found, dtype)) if not d.ok]
    assert not off, off
