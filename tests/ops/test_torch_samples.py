"""PyTorch's own samples of scaled_dot_product_attention, run on ours.

``torch.testing`` ships the inputs on which PyTorch tests its operators: for this one, batches of
any number of dimensions, causal, masked, with dropout and grouped heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_methods_invocations import op_db
from within_bound import assert_right

from fastattn import scaled_dot_product_attention

(OP,) = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def samples(dtype: torch.dtype, dropout: bool = False) -> Iterator[tuple[list[Tensor], dict]]:
    torch.manual_seed(0)
    for sample in OP.sample_inputs("cpu", dtype, requires_grad=True):
        if bool(sample.kwargs.get("dropout_p", 0.0)) == dropout:
            yield [sample.input, *sample.args], sample.kwargs


def result(tensors: list[Tensor], kwargs: dict[str, Any], function: Any) -> list[Tensor]:
    leaves = [
        t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
        for t in tensors
    ]
    out = function(*leaves, **kwargs)
    wanted = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, wanted, grad)]


def test_there_are_samples() -> None:
    assert len(list(samples(torch.float32))) > 10
    assert len(list(samples(torch.float32, dropout=True))) > 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(dtype: torch.dtype) -> None:
    theirs = torch.nn.functional.scaled_dot_product_attention
    names = ("out", "grad_query", "grad_key", "grad_value")
    for tensors, kwargs in samples(dtype):
        wide = [_as_leaf(t) for t in tensors]
        wide_kwargs = {name: _as_leaf(x) for name, x in kwargs.items()}

        def definition(t: Any = wide, k: Any = wide_kwargs) -> dict[str, Tensor]:
            with sdpa_kernel(SDPBackend.MATH):
                return dict(zip(names, result(t, k, theirs), strict=False))

        ours = result(tensors, kwargs, scaled_dot_product_attention)
        assert all(x.dtype == dtype for x in ours)
        assert_right(dict(zip(names, ours, strict=False)), definition)


def _as_leaf(t: Any) -> Any:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    return t.detach().double().requires_grad_(t.requires_grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_has_the_shape_and_is_finite(dtype: torch.dtype) -> None:
    for tensors, kwargs in samples(dtype, dropout=True):
        theirs = torch.nn.functional.scaled_dot_product_attention
        ours, eager = (result(tensors, kwargs, f) for f in (scaled_dot_product_attention, theirs))
        for x, e in zip(ours, eager, strict=True):
            assert x.shape == e.shape
            assert x.isfinite().all()


def test_first_and_second_derivatives() -> None:
    for tensors, kwargs in samples(torch.float64):
        if sum(t.numel() for t in tensors if isinstance(t, Tensor)) > 2000:
            continue
        inputs = tuple(tensors)

        def call(*x: Tensor, kwargs: dict[str, Any] = kwargs) -> Tensor:
            return scaled_dot_product_attention(*x, **kwargs)

        assert gradcheck(call, inputs, fast_mode=True)
        assert gradgradcheck(call, inputs, fast_mode=True)
