"""Operators of the dispatcher refuse tensors whose shapes disagree where no public function checks
them: in graphs of ``torch.jit.trace`` and in direct calls."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import library
from fastattn._shapes import Shapes

OPERATORS = {operator.name: operator for operator in library.operators.values()}
pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning"),
]


def valid(shapes: Shapes, ranks: int = 0) -> dict[int, list[tuple[str, int]]]:
    """For each tensor with a declared shape, the names and sizes of its dimensions."""
    sizes: dict[str, int] = {}

    def size(name: str, less: int) -> int:
        if name.isdigit():
            return int(name)
        # A multiple of the heads of keys; all others are different numbers above 2.
        return {"Hq": 6, "Hkv": 3}.get(name) or sizes.setdefault(name, 11 + len(sizes)) - less

    found = {}
    for n, _, alternatives in shapes._shapes:
        shape = alternatives[min(ranks, len(alternatives) - 1)]
        lead = [("...", 2), ("...", 7)] if shape.leading else []
        found[n] = lead + [(s.name, size(s.name, s.less)) for s in shape.sizes]
    return found


def tensors_of(count: int, shapes: dict[int, list[tuple[str, int]]]) -> list[Tensor | None]:
    """Tensors of the given shapes, None where there is no shape."""
    made: list[Tensor | None] = [None] * count
    for n, dims in shapes.items():
        made[n] = torch.empty([size for _, size in dims], device="meta")
    return made


@pytest.mark.parametrize("ranks", [0, 1])
@pytest.mark.parametrize("name", list(OPERATORS))
def test_every_size_must_agree(name: str, ranks: int) -> None:
    shapes = OPERATORS[name]._shapes
    count = len(OPERATORS[name].names)
    dims = valid(shapes, ranks)
    shapes.check(tensors_of(count, dims))
    uses = [size for of in dims.values() for size in {name for name, _ in of}]
    for n, own in dims.items():
        for at, (size, length) in enumerate(own):
            if size and (uses.count(size) > 1 or size.isdigit()):
                changed = [*own[:at], (size, length + 1), *own[at + 1 :]]
                with pytest.raises(
                    RuntimeError, match=rf"^{name}: (.+ must have the shape|H.* mult)"
                ):
                    shapes.check(tensors_of(count, {**dims, n: changed}))
        with pytest.raises(RuntimeError, match="must have the shape"):
            shapes.check(tensors_of(count, {**dims, n: []}))


def test_every_tensor_of_several_dimensions_has_a_shape() -> None:
    free = {"mask_program", "seed", "positions"}
    for name, operator in OPERATORS.items():
        declared = {tensor for _, tensor, _ in operator._shapes._shapes}
        assert set(operator.names) - declared <= free, name


def test_the_message_names_the_tensor_and_the_sizes() -> None:
    x, mask = torch.randn(2, 4, 5, 8), torch.ones(1, 1, 5, 6, dtype=torch.bool)
    operator = OPERATORS["scaled_dot_product_attention"]
    others = (None,) * (len(operator.names) - 4)
    message = (
        "scaled_dot_product_attention: attn_mask must have the shape [B|1, Hq|1, Lq|1, Lk|1] with "
        "B = 2, Hq = 4, Lq = 5, Lk = 5, got (1, 1, 5, 6)"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        operator.dispatched(x, x, x, mask, *others, operator.options(scale=1.0), "")
    three = (x, x[:, :3], x[:, :3], None)
    with pytest.raises(RuntimeError, match="Hq must be a multiple of Hkv, got 4 and 3"):
        operator.dispatched(*three, *others, operator.options(scale=1.0), "")


FLOATING = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("own", FLOATING, ids=str)
@pytest.mark.parametrize("name", list(OPERATORS))
def test_every_dtype_must_fit(name: str, own: torch.dtype) -> None:
    operator = OPERATORS[name]
    names, dtypes = operator.names, operator._dtypes

    def tensors(**others: torch.dtype) -> list[Tensor]:
        made = dict.fromkeys(names, own)
        if "key_scales" in names:
            made["key_cache"] = torch.int8
        for tensor, like, rule in dtypes._rules:
            if tensor != "key_cache":
                made[tensor] = rule(made[names[like]])[0]
        return [torch.empty((), dtype=(made | others)[n], device="meta") for n in names]

    dtypes.check(tensors())
    for tensor in set(names) - {"grad_lse"}:
        with pytest.raises(RuntimeError, match=f"^{name}: .+ must be .+, got "):
            dtypes.check(tensors(**{tensor: torch.complex64}))


def test_a_graph_of_a_trace_refuses_other_dtypes() -> None:
    query, key = torch.randn(2, 1, 2, 5, 8)
    graph = torch.jit.trace(
        lambda q, k: fastattn.scaled_dot_product_attention(q, k, k), (query, key)
    )
    assert graph(query.double(), key.double()).dtype is torch.float64
    with pytest.raises(RuntimeError, match="key must be float32, got float16"):
        graph(query, key.half())


def test_a_cache_is_quantised_if_it_has_scales() -> None:
    op = torch.ops.fastattn.decode_attention
    query, cache, lengths = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 5, 8), torch.tensor([5])
    rest = (None,) * 7
    options = (0.5, -1, -1, 0.0, "")
    with pytest.raises(RuntimeError, match="key_cache must be float32, got int8"):
        op(query, cache.to(torch.int8), cache, lengths, *rest, None, None, *options)
    scales = torch.ones(1, 1, 5)
    with pytest.raises(RuntimeError, match="key_cache must be int8 or float8_e4m3fn, got float32"):
        op(query, cache, cache, lengths, *rest, scales, scales, *options)
