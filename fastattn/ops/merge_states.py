"""Merges two partial results of attention: the specification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import checks
from fastattn._derivative import Derivative
from fastattn.backends.primitives import NoOptions
from fastattn.checks import name_of
from fastattn.library import Operator

_NAME = "merge_states"


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Merge attention over two sets of keys into attention over both.

    .. math:: lse = \log(e^{lse_a} + e^{lse_b}), \qquad
              out = e^{lse_a - lse} \, out_a + e^{lse_b - lse} \, out_b

    The same queries attend to each set by itself, with ``return_lse=True``; no key may be in both.
    So a prefix that many requests share is read once for all of them, and keys may be on several
    machines. Merging is associative: more than two states are merged one after the other.

    Args:
        out_a: [..., L, Dv] in float32, bfloat16, float16 or float64: the output over the first set.
        lse_a: [..., L], the natural logarithm of the sum of the exponentials of its scores, in
            float32 or float64; -inf for a query that can see no key of the set.
        out_b: The output over the second set, with the shape and dtype of ``out_a``.
        lse_b: Its logarithm, with the shape and dtype of ``lse_a``.

    Returns:
        ``(out, lse)`` with the shapes and dtypes of ``out_a`` and ``lse_a``. 16-bit outputs are
        merged in float32. A state whose lse is -inf contributes nothing, NaN and inf included, and
        gets the gradient 0; if both are -inf, out is 0 and lse is -inf. A state whose lse is inf
        has the whole weight; two such states share it.

    Raises:
        TypeError: An argument is not a tensor.
        NotImplementedError: ``out_a`` has another floating dtype.
        RuntimeError: Shapes, dtypes or devices do not fit, or a tensor is not dense.

    Sources:
        Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867 (the merge of online softmax);
        Juravsky et al. 2024, https://arxiv.org/abs/2402.05099 (shared prefixes).

    Example:
        >>> query, key, value = (torch.randn(1, 8, 100, 64) for _ in range(3))
        >>> first = scaled_dot_product_attention(
        ...     query, key[:, :, :60], value[:, :, :60], return_lse=True)
        >>> second = scaled_dot_product_attention(
        ...     query, key[:, :, 60:], value[:, :, 60:], return_lse=True)
        >>> out, lse = merge_states(*first, *second)
        >>> torch.allclose(out, scaled_dot_product_attention(query, key, value), atol=1e-6)
        True
    """
    operator, states = prepare(out_a, lse_a, out_b, lse_b)
    return operator(*states)


def prepare(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any
) -> tuple[Operator, tuple[Tensor, Tensor, Tensor, Tensor, NoOptions]]:
    """Validate the arguments of :func:`merge_states`; return the operator and its arguments."""
    _check(out_a, lse_a, out_b, lse_b)
    return merge, (out_a, lse_a, out_b, lse_b, NoOptions())


def _check(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> None:
    states = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, x in states.items():
        checks.check_strided(_NAME, name, x)
        if x.device != out_a.device:
            raise RuntimeError(
                f"{_NAME}: {name} must be on out_a's device {out_a.device}, got {x.device}"
            )
    if out_a.dtype not in checks.DTYPES:
        error = NotImplementedError if out_a.dtype.is_floating_point else RuntimeError
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in checks.DTYPES)
        raise error(f"{_NAME}: out_a must be one of {allowed}, got {name_of(out_a)}")
    if lse_a.dtype not in (torch.float32, torch.float64):
        raise RuntimeError(f"{_NAME}: lse_a must be float32 or float64, got {name_of(lse_a)}")
    if out_a.dim() < 2:
        raise RuntimeError(f"{_NAME}: out_a must be [..., L, Dv], got shape {tuple(out_a.shape)}")
    for name, x, like, shape in (
        ("lse_a", lse_a, lse_a, out_a.shape[:-1]),
        ("out_b", out_b, out_a, out_a.shape),
        ("lse_b", lse_b, lse_a, out_a.shape[:-1]),
    ):
        if x.shape != shape:
            raise RuntimeError(
                f"{_NAME}: {name} must have shape {tuple(shape)}, got {tuple(x.shape)}"
            )
        if x.dtype != like.dtype:
            like_name = "out_a" if like is out_a else "lse_a"
            raise RuntimeError(
                f"{_NAME}: {name} must be of {like_name}'s dtype {name_of(like)}, got {name_of(x)}"
            )


# --- the operator -----------------------------------------------------------------------------


def _fake_backward(
    grad_out: Tensor | None, grad_lse: Tensor | None, *inputs: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in inputs[:4])  # the two outputs and their lse


merge = Operator(
    "merge_states",
    "out_a: ... L Dv; lse_a: ... L; out_b: ... L Dv; lse_b: ... L",
    "out: ... L Dv; lse: ... L",
    fake=lambda out_a, lse_a, *rest: (torch.empty_like(out_a), torch.empty_like(lse_a)),
    derivative=Derivative(
        grads="out lse",
        reads="out_a lse_a out_b lse_b",
        gives="out_a lse_a out_b lse_b",
        options=NoOptions,
        fake=_fake_backward,
    ),
    flops=lambda _, out_a, *rest, backward=False: (8 if backward else 4) * out_a.numel(),
)
