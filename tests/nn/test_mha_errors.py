"""Errors, warnings and signatures of ``MultiheadAttention`` equal PyTorch's."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastattn.nn import MultiheadAttention


def message(function: Callable[[], Any]) -> tuple[type, str] | None:
    """The error of a call, as type and text."""
    try:
        function()
    except Exception as error:
        return type(error), str(error)
    return None


def assert_same_error(call: Callable[[Any], Any]) -> None:
    """The call must raise the same error with our class as with PyTorch's."""
    want = message(lambda: call(nn.MultiheadAttention))
    assert want is not None
    assert message(lambda: call(MultiheadAttention)) == want


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


X = ones(5, 2, 8)
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "query rank": ((ones(1, 5, 2, 8), X, X), {}),
    "query rank 1": ((ones(8), X, X), {}),
    "key rank": ((X, ones(5, 8), X), {}),
    "unbatched value rank": ((ones(5, 8), ones(5, 8), X), {}),
    "embed": ((ones(5, 2, 6), X, X), {}),
    "key is not value": ((X, X, ones(4, 2, 8)), {}),
    "padding rank": ((X, X, X), {"key_padding_mask": ones(5, dtype=torch.bool)}),
    "padding batch": ((X, X, X), {"key_padding_mask": ones(3, 5, dtype=torch.bool)}),
    "padding source": ((X, X, X), {"key_padding_mask": ones(2, 4, dtype=torch.bool)}),
    "padding dtype": ((X, X, X), {"key_padding_mask": ones(2, 5, dtype=torch.uint8)}),
    "mask dtype": ((X, X, X), {"attn_mask": ones(5, 5, dtype=torch.int64)}),
    "mask rank": ((X, X, X), {"attn_mask": ones(5)}),
    "mask rank 4": ((X, X, X), {"attn_mask": ones(2, 2, 5, 5)}),
    "mask shape 2": ((X, X, X), {"attn_mask": ones(5, 4)}),
    "mask shape 3": ((X, X, X), {"attn_mask": ones(2, 5, 5)}),
    "unbatched mask": ((ones(5, 8),) * 3, {"attn_mask": ones(3, 5, 5)}),
    "hint without a mask": ((X, X, X), {"is_causal": True}),
    "hint without a mask or weights": ((X, X, X), {"is_causal": True, "need_weights": False}),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"add_bias_kv": True}], ids=str)
def test_errors_equal_pytorchs(case: str, options: dict[str, Any]) -> None:
    args, keywords = WRONG[case]
    assert_same_error(lambda cls: cls(8, 2, **options)(*args, **keywords))


def test_errors_of_separate_projections_equal_pytorchs() -> None:
    for args in ((X, ones(5, 2, 6), ones(4, 2, 8)), (X, ones(5, 2, 6), ones(5, 3, 8))):
        assert_same_error(lambda cls, args=args: cls(8, 2, kdim=6)(*args))


@pytest.mark.parametrize("name", ["bias_k", "bias_v"])
def test_bias_k_without_bias_v_is_an_error(name: str) -> None:
    def call(cls: type[nn.MultiheadAttention]) -> None:
        module = cls(8, 2, add_bias_kv=True)
        setattr(module, name, None)
        module(X, X, X)

    assert_same_error(call)


def test_different_batches_of_keys_and_queries_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="batch size of key and value is 3, that of query is 2"):
        MultiheadAttention(8, 2)(X, ones(5, 3, 8), ones(5, 3, 8))


@pytest.mark.parametrize("options", [(0, 1), (8, 0), (8, 3), (-1, 1)])
def test_errors_of_the_constructor_equal_pytorchs(options: tuple[int, int]) -> None:
    assert_same_error(lambda cls: cls(*options))


DTYPES = [torch.bool, torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("padding", "mask"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_warnings_about_masks_equal_pytorchs(
    padding: torch.dtype, mask: torch.dtype, query_dtype: torch.dtype
) -> None:
    def said(cls: type[nn.MultiheadAttention]) -> list[str]:
        module, x = cls(8, 2, dtype=query_dtype), X.to(query_dtype)
        masks = {
            "key_padding_mask": torch.zeros(2, 5, dtype=padding),
            "attn_mask": torch.zeros(5, 5, dtype=mask),
        }
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            message(lambda: module(x, x, x, **masks, need_weights=False))
        return [str(w.message) for w in caught]

    assert said(MultiheadAttention) == said(nn.MultiheadAttention)


def test_signatures_equal_pytorchs() -> None:
    for name in ("__init__", "forward"):
        ours, stock = (
            inspect.signature(getattr(cls, name))
            for cls in (MultiheadAttention, nn.MultiheadAttention)
        )
        given, promised = (
            [(p.name, p.kind, p.default) for p in signature.parameters.values()]
            for signature in (ours, stock)
        )
        assert given[: len(promised)] == promised
        for _, kind, default in given[len(promised) :]:  # our own arguments
            assert kind is inspect.Parameter.KEYWORD_ONLY
            assert default is not inspect.Parameter.empty
