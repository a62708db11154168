"""Bad input of attention: errors as PyTorch's, and our own, before any kernel runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attention_calls import stock
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fastattn
from fastattn import dispatch
from fastattn.backends import reference
from fastattn.call import Plans
from fastattn.ops import sdpa

attention = fastattn.scaled_dot_product_attention


Q, K, V = (2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6)


def tensors(
    q: tuple[int, ...] = Q, k: tuple[int, ...] = K, v: tuple[int, ...] = V, **dtype: torch.dtype
) -> list[Tensor]:
    """Query, key and value of ones."""
    return [torch.ones(shape, **dtype) for shape in (q, k, v)]


def double_key() -> list[Tensor]:
    """Tensors of which the key has another dtype."""
    query, key, value = tensors()
    return [query, key.double(), value]


# name: (arguments, options, what the message must say)
PYTORCH_ERRORS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], str]] = {
    "query-none": (lambda: [None, *tensors()[1:]], {}, "'query' .position 1. must be Tensor"),
    "key-array": (lambda: [torch.ones(Q), np.ones(K), torch.ones(V)], {}, "'key' .position 2."),
    "value-list": (lambda: [*tensors()[:2], [1.0]], {}, "'value' .position 3."),
    "query-1d": (lambda: tensors(q=(4,)), {}, "query must have at least 2 dimensions"),
    "value-1d": (lambda: tensors(v=(5,)), {}, "value must have at least 2 dimensions"),
    "dtypes": (double_key, {}, "same dtype, got float32, float64 and float32"),
    "integers": (lambda: tensors(dtype=torch.int64), {}, "one of float32.* got int64"),
    "bools": (lambda: tensors(dtype=torch.bool), {}, "one of float32.* got bool"),
    "complex": (lambda: tensors(dtype=torch.complex64), {}, "one of float32.* got complex64"),
    "float8": (lambda: tensors(dtype=torch.float8_e4m3fn), {}, "one of float32.* got float8"),
    "head-dims": (lambda: tensors(k=(2, 2, 5, 7)), {}, "query and key .* last dimension"),
    "lengths": (lambda: tensors(v=(2, 2, 9, 6)), {}, "key and value .* same length"),
    "heads": (lambda: tensors(q=(2, 4, 3, 4)), {}, "numbers of heads"),
    "batches": (lambda: tensors(q=(3, 2, 3, 4)), {}, "batch dimensions"),
    "gqa-2d": (
        lambda: tensors((3, 4), (5, 4), (5, 4)),
        {"enable_gqa": True},
        "enable_gqa=True needs a head dimension",
    ),
    "gqa-few-queries": (
        lambda: tensors((2, 2, 3, 4), (2, 4, 5, 4), (2, 4, 5, 4)),
        {"enable_gqa": True},
        "heads of key must divide that of query, got 4 and 2",
    ),
    "gqa-value": (
        lambda: tensors((2, 4, 3, 4), (2, 2, 5, 4), (2, 3, 5, 4)),
        {"enable_gqa": True},
        "heads of value must divide that of query, got 3 and 4",
    ),
    "mask-list": (tensors, {"attn_mask": [1]}, "'attn_mask' must be Tensor, not list"),
    "mask-int": (tensors, {"attn_mask": torch.ones(3, 5).int()}, "attn_mask must be bool.*int32"),
    "mask-double": (tensors, {"attn_mask": torch.ones(3, 5).double()}, "attn_mask must be bool"),
    "mask-half": (tensors, {"attn_mask": torch.ones(3, 5).half()}, "attn_mask must be bool"),
    "mask-shape": (tensors, {"attn_mask": torch.ones(4, 5)}, r"attn_mask .*\(2, 2, 3, 5\)"),
    "mask-empty": (tensors, {"attn_mask": torch.ones(3, 0)}, "attn_mask must be broadcastable"),
    "mask-5d": (tensors, {"attn_mask": torch.ones(1, 2, 2, 3, 5)}, "attn_mask must be broadcast"),
    "mask-3d-on-2d": (
        lambda: tensors((3, 4), (5, 4), (5, 4)),
        {"attn_mask": torch.ones(1, 3, 5)},
        "attn_mask must be broadcastable",
    ),
    "mask-device": (
        tensors,
        {"attn_mask": torch.ones(3, 5, device="meta")},
        "attn_mask must be on query's device cpu, got meta",
    ),
    "mask-and-causal": (
        tensors,
        {"attn_mask": torch.ones(3, 5), "is_causal": True},
        "Explicit attn_mask should not be set when is_causal=True",
    ),
    "causal-bias-and-causal": (
        tensors,
        {"attn_mask": causal_upper_left(3, 5), "is_causal": True},
        "CausalBias should not be used with causal=True",
    ),
    "causal-bias-lengths": (
        tensors,
        {"attn_mask": causal_lower_right(4, 5)},
        r"a CausalBias of the lengths of query and key, \(3, 5\), got \(4, 5\)",
    ),
    "device": (
        lambda: [torch.ones(Q), torch.ones(K, device="meta"), torch.ones(V)],
        {},
        "same device, got cpu, meta and cpu",
    ),
    "dropout-large": (tensors, {"dropout_p": 1.1}, "dropout_p must be between 0 and 1, got 1.1"),
    "dropout-type": (tensors, {"dropout_p": "a"}, "'dropout_p' must be float, not str"),
    "dropout-empty": (tensors, {"dropout_p": ""}, "'dropout_p' must be float, not str"),
    "causal-int": (tensors, {"is_causal": 1}, "'is_causal' must be bool, not int"),
    "causal-none": (tensors, {"is_causal": None}, "'is_causal' must be bool, not NoneType"),
    "causal-tensor": (tensors, {"is_causal": torch.tensor(True)}, "must be bool, not Tensor"),
    "causal-numpy": (tensors, {"is_causal": np.bool_(True)}, "must be bool, not bool"),
    "gqa-int": (tensors, {"enable_gqa": 1}, "'enable_gqa' must be bool, not int"),
    "scale-type": (tensors, {"scale": "1"}, "'scale' must be float, not str"),
    "scale-type-no-head-dim": (
        lambda: tensors((2, 2, 3, 0), (2, 2, 5, 0)),
        {"scale": "1"},
        "'scale' must be float, not str",
    ),
}


def _refused(monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> Exception:
    """The exception of a call that must neither reach a kernel nor consume a random number."""

    class Forbidden:
        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("a bad input reached a kernel")

    cpu = dispatch.load("cpu")
    if not isinstance(cpu, str):
        for name in ("scaled_dot_product_attention", "_cpu"):  # a new plan calls one of the two
            monkeypatch.setattr(cpu, name, Forbidden())
    monkeypatch.setattr(reference, "attend", Forbidden())
    monkeypatch.setattr(sdpa, "plans", Plans(rows=3))  # without plans of other tests
    state = torch.get_rng_state()
    with pytest.raises(Exception) as caught:
        attention(*args, **kwargs)
    assert torch.equal(torch.get_rng_state(), state)
    return caught.value


@pytest.mark.parametrize("name", PYTORCH_ERRORS)
def test_errors_of_calls_equal_pytorchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options, message = PYTORCH_ERRORS[name]
    with pytest.raises(Exception) as expected:
        stock(*make(), **options)
    ours = _refused(monkeypatch, *make(), **options)
    assert type(ours) is expected.type
    with pytest.raises(expected.type, match=message):
        raise ours


def nested(layout: torch.layout) -> list[Tensor]:
    """Nested tensors of a layout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        return [torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)] * 3


OWN_ERRORS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], type[Exception], str]] = {
    "dropout-negative": (tensors, {"dropout_p": -0.1}, RuntimeError, "dropout_p .* got -0.1"),
    "dropout-nan": (tensors, {"dropout_p": math.nan}, RuntimeError, "dropout_p .* got nan"),
    "nested": (lambda: nested(torch.strided), {}, RuntimeError, "query must be a dense .* nested"),
    "jagged-key": (
        lambda: [torch.ones(2, 3, 4), *nested(torch.jagged)[1:]],
        {},
        RuntimeError,
        "key must be a dense .* nested",
    ),
    "sparse": (
        lambda: [torch.ones(Q), torch.ones(Q).to_sparse(), torch.ones(Q)],
        {},
        RuntimeError,
        "key must be a dense tensor, got a sparse_coo one",
    ),
    "mask-sparse": (
        tensors,
        {"attn_mask": torch.ones(3, 5).to_sparse()},
        RuntimeError,
        "attn_mask must be a dense",
    ),
    "window-int": (tensors, {"window": 3}, TypeError, "window must be None or a pair of ints"),
    "window-one": (tensors, {"window": (3,)}, TypeError, "window .* got .3,."),
    "window-float": (tensors, {"window": (1.0, 2)}, TypeError, "window must be None or a pair"),
    "window-bool": (tensors, {"window": (True, 2)}, TypeError, "window must be None or a pair"),
    "window-low": (tensors, {"window": (-2, 0)}, ValueError, "window must be at least -1"),
    "softcap-zero": (tensors, {"softcap": 0.0}, ValueError, "softcap .* got 0.0"),
    "softcap-negative": (tensors, {"softcap": -1}, ValueError, "softcap .* got -1"),
    "softcap-inf": (tensors, {"softcap": math.inf}, ValueError, "softcap .* got inf"),
    "softcap-nan": (tensors, {"softcap": math.nan}, ValueError, "softcap .* got nan"),
    "softcap-type": (tensors, {"softcap": "1"}, TypeError, "'softcap' must be float"),
    "alibi-list": (tensors, {"alibi_slopes": [1.0, 2.0]}, TypeError, "'alibi_slopes' must be"),
    "alibi-int": (tensors, {"alibi_slopes": torch.ones(2).int()}, RuntimeError, "got int32"),
    "alibi-heads": (
        tensors,
        {"alibi_slopes": torch.ones(3)},
        RuntimeError,
        r"alibi_slopes must have shape \(2,\) or \(2, 2\), got \(3,\)",
    ),
    "alibi-one": (tensors, {"alibi_slopes": torch.ones(1)}, RuntimeError, "alibi_slopes must"),
    "alibi-scalar": (tensors, {"alibi_slopes": torch.ones(())}, RuntimeError, "alibi_slopes must"),
    "alibi-batch": (tensors, {"alibi_slopes": torch.ones(3, 2)}, RuntimeError, "alibi_slopes must"),
    "alibi-device": (
        tensors,
        {"alibi_slopes": torch.ones(2, device="meta")},
        RuntimeError,
        "alibi_slopes must be on query's device cpu, got meta",
    ),
    "alignment": (
        tensors,
        {"causal_alignment": "top_left"},
        ValueError,
        "causal_alignment must be 'upper_left' or 'bottom_right', got 'top_left'",
    ),
    "alignment-and-causal-bias": (
        tensors,
        {"attn_mask": causal_upper_left(3, 5), "causal_alignment": "bottom_right"},
        ValueError,
        "causal_alignment must be left out with a CausalBias",
    ),
    "causal-bias-view": (
        tensors,
        {"attn_mask": causal_upper_left(3, 5)[0]},
        RuntimeError,
        r"attn_mask must be a CausalBias of the lengths .* got \(None, None\)",
    ),
    "causal-bias-upper-lengths": (
        tensors,
        {"attn_mask": causal_upper_left(4, 5)},
        RuntimeError,
        r"attn_mask must be a CausalBias of the lengths .* got \(4, 5\)",
    ),
    "alignment-type": (tensors, {"causal_alignment": None}, ValueError, "causal_alignment must"),
    "generator": (tensors, {"generator": 7}, TypeError, "'generator' must be torch.Generator"),
    "scale-learned": (
        tensors,
        {"scale": torch.tensor(0.5, requires_grad=True)},
        TypeError,
        "scale is a constant and gets no gradient",
    ),
    "softcap-learned": (
        tensors,
        {"softcap": torch.tensor(5.0, requires_grad=True)},
        TypeError,
        "softcap is a constant and gets no gradient",
    ),
    "lse-type": (tensors, {"return_lse": 1}, TypeError, "'return_lse' must be bool, not int"),
    "weights-type": (tensors, {"need_weights": None}, TypeError, "'need_weights' must be bool"),
    "average-type": (tensors, {"average_weights": 0}, TypeError, "'average_weights' must be bool"),
    "average-alone": (
        tensors,
        {"average_weights": True},
        ValueError,
        "average_weights=True needs need_weights=True",
    ),
}


@pytest.mark.parametrize("name", OWN_ERRORS)
def test_our_own_errors_name_argument_and_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options, error, message = OWN_ERRORS[name]
    ours = _refused(monkeypatch, *make(), **options)
    assert type(ours) is error
    with pytest.raises(error, match=message):
        raise ours


ROWS = torch.zeros(2, 3, 4)
DENSE: dict[str, Callable[[Tensor], Any]] = {
    "additive_attention: key": lambda x: fastattn.additive_attention(ROWS, x, ROWS, ROWS[0, 0]),
    "attention_stats: query": lambda x: fastattn.attention_stats(x, ROWS[None]),
    "encode_memory: weight": lambda x: fastattn.encode_memory(ROWS.long(), x),
    "hard_attention: value": lambda x: fastattn.hard_attention(ROWS, ROWS, x),
    "hopfield_energy: state": lambda x: fastattn.hopfield_energy(x, ROWS),
    "hopfield_retrieve: stored": lambda x: fastattn.hopfield_retrieve(ROWS, x),
    "luong_attention: query": lambda x: fastattn.luong_attention(x, ROWS, ROWS, window="local-m"),
    "memory_hop_attention: in_memory": lambda x: fastattn.memory_hop_attention(ROWS[:, 0], x),
    "sinusoidal_encoding: x": fastattn.sinusoidal_encoding,
}


@pytest.mark.parametrize("name", DENSE)
def test_operators_refuse_tensors_that_are_not_dense(name: str) -> None:
    for x, kind in ((ROWS.to_sparse(), "sparse_coo"), (nested(torch.strided)[0], "nested")):
        message = f"{name} must be a dense tensor, got a {kind} one"
        with pytest.raises((TypeError, RuntimeError), match=message):
            DENSE[name](x)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        attention(*tensors(), dropout=0.5)
    with pytest.raises(TypeError, match="positional"):
        attention(*tensors(), None, 0.0, False, None, False, (1, 1))
