"""Shared by the cases of all operators, and the case table of attention.

A case is data: lengths, heads, mask, options, memory layout, which results carry a gradient.
``fastattn.testing.inputs`` makes its tensors. Add a value here to cover more.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastattn.backends.primitives import Weights

# Every byte around the tensors is poison, so a read out of bounds changes the results.
_POISON = {torch.bool: 1, torch.int8: 127}  # NaN in floating tensors, else 2**30
_GUARD = 2048  # poisoned elements before and after a tensor, a multiple of all vector widths

# A layout makes an empty [B, H, L, D] view; `new` allocates contiguous memory of a shape.
_New = Callable[..., Tensor]
LAYOUTS: dict[str, Callable[[_New, int, int, int, int], Tensor]] = {
    "contiguous": lambda new, b, h, n, d: new(b, h, n, d),
    # one element off the alignment
    "unaligned": lambda new, b, h, n, d: new(b * h * n * d + 1)[1:].view(b, h, n, d),
    # [B, L, H, D], the output of a projection
    "blhd": lambda new, b, h, n, d: new(b, n, h, d).transpose(1, 2),
    # [L, B, H, D], nn.MultiheadAttention without batch_first
    "lbhd": lambda new, b, h, n, d: new(n, b, h, d).permute(1, 2, 0, 3),
    # the middle one of a packed projection [B, L, 3, H, D]
    "packed": lambda new, b, h, n, d: new(b, n, 3, h, d)[:, :, 1].transpose(1, 2),
    # D is not the contiguous dimension
    "transposed": lambda new, b, h, n, d: new(b, h, d, n).mT,
    # nothing is contiguous
    "every_second": lambda new, b, h, n, d: new(b, 2 * h, 2 * n, 2 * d)[:, ::2, ::2, 1::2],
    # a window of a larger tensor, such as a preallocated cache
    "sliced": lambda new, b, h, n, d: new(b, h, n + 5, d + 3)[:, :, 2 : n + 2, 1 : d + 1],
    # one row, head or sequence expanded: stride 0
    "expanded_batch": lambda new, b, h, n, d: new(min(b, 1), h, n, d).expand(b, h, n, d),
    "expanded_heads": lambda new, b, h, n, d: new(b, min(h, 1), n, d).expand(b, h, n, d),
    "expanded_rows": lambda new, b, h, n, d: new(b, h, min(n, 1), d).expand(b, h, n, d),
    "expanded_dims": lambda new, b, h, n, d: new(b, h, n, min(d, 1)).expand(b, h, n, d),
    "expanded_all": lambda new, b, h, n, d: new(1, 1, 1, 1).expand(b, h, n, d),
}
# The layouts without overlapping elements, except the first.
STRIDED = [name for name in LAYOUTS if not name.startswith(("contiguous", "expanded"))]


def allocate(numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor [numel] inside a larger one."""
    return torch.empty(numel + 2 * _GUARD, dtype=dtype)[_GUARD : numel + _GUARD]


def place(values: Tensor, layout: str = "contiguous") -> Tensor:
    """Return a tensor of ``layout`` inside poisoned memory, equal to ``values`` [..., H, L, D].

    The dimensions before the last three count as one, B; missing dimensions count as 1. An expanded
    layout repeats the first of the values along its dimension.
    """
    missing = 4 - values.ndim
    if missing < 0:
        return place(values.flatten(0, -4), layout).unflatten(0, values.shape[:-3])
    if missing > 0:
        return place(values[(None,) * missing], layout)[(0,) * missing]
    poison = torch.nan if values.is_floating_point() else _POISON.get(values.dtype, 2**30)

    def new(*shape: int) -> Tensor:
        buffer = allocate(math.prod(shape), values.dtype)
        count = buffer.untyped_storage().nbytes() // buffer.itemsize
        buffer.as_strided((count,), (1,), 0).fill_(poison)
        return buffer.view(shape)

    view = LAYOUTS[layout](new, *values.shape)
    first = values
    for dim, stride in enumerate(view.stride()):
        if stride == 0 and layout.startswith("expanded"):
            first = first.narrow(dim, 0, min(first.shape[dim], 1))
    # An expanded tensor cannot be written to, only its single copy.
    target = view.as_strided(first.shape, view.stride(), view.storage_offset())
    target.copy_(first)
    return view


class Watch:
    """Copies the storage of some tensors, and detects writes to it."""

    def __init__(self, **tensors: Tensor | None) -> None:
        memory = {name: bytes_of(x) for name, x in tensors.items() if x is not None}
        self._memory = {name: (now, now.clone()) for name, now in memory.items()}

    def written(self) -> list[str]:
        return [name for name, (now, then) in self._memory.items() if not torch.equal(now, then)]


def bytes_of(tensor: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


# Cases

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_Case = TypeVar("_Case", bound="NamedCase")

# With only a gradient of out, some gradients would be 0 up to rounding, which a relative bound
# cannot judge: a query with one visible key has a constant weight, and a bias that is equal for all
# keys changes no weight. Such cases also have a gradient of lse.
SCALED = ("out", "lse")


@dataclass(frozen=True)
class NamedCase:
    """A case of any operator."""

    name: str
    _: KW_ONLY
    dtypes: tuple[torch.dtype, ...] = FLOATS
    slow: bool = False
    draw: int = 0  # the random values depend on it


@dataclass(frozen=True, kw_only=True)
class HeadCase(NamedCase):
    """A case with heads of queries, and heads of keys and values."""

    heads: int = 2
    kv_heads: int | None = None  # None: equal to heads
    head_dim: int = 16
    value_dim: int | None = None  # None: as head_dim

    @property
    def of_values(self) -> tuple[int, int]:
        """The number of heads of keys and values, and the width of values."""
        heads = self.heads if self.kv_heads is None else self.kv_heads
        return heads, self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, kw_only=True)
class AttentionCase(HeadCase):
    """A case of any form of attention."""

    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str | None = None  # h: one slope per head; bh: per sequence and head
    program: str | None = None  # a mask of fastattn.masks, see PROGRAMS


@dataclass(frozen=True)
class Case(AttentionCase):
    """One call of ``scaled_dot_product_attention``."""

    batch: int = 2
    q_len: int = 33
    k_len: int = 65
    # Of the elements of queries and keys: with nearly equal weights, errors would cancel.
    spreads: tuple[float, float] = (2.0, 1.0)
    mask: str | None = None  # a kind, see inputs.MASKS
    mask_dims: str = "bhqk"  # which of [B, H, Lq, Lk] the mask has; the others are 1
    mask_float32: bool = False  # a float32 mask for any dtype of the query
    mask_layout: str = "contiguous"
    mask_grad: bool = False
    causal: str | None = None  # upper_left | bottom_right
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    sinks: str | None = None  # h: one per head; bh: per sequence and head
    relative_bias: str | None = None  # a table; h: one per head; bh: per sequence and head
    terms: str | None = None  # of relative attention: query | key | both (tables)
    buckets: str = "clipped"  # of their distances, see inputs.BUCKETS
    image: int | None = None  # keys are an image of this width; the bias of its rows and columns
    positions: str | None = None  # of the relative bias, see inputs.POSITIONS; None: 0, 1, 2, ...
    dropout_p: float = 0.0
    first: tuple[int, int, int] = (0, 0, 0)  # query, key and head of dropout's draws
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")  # of q, k, v
    weights: Weights = 0  # 0 none | 1 per head | 2 averaged
    grads: tuple[str, ...] = ("out",)  # the results whose gradient is given: out, lse, weights
    grad_layout: str = "contiguous"  # of the gradients of out and weights
    partial: bool = False  # the backward has out and lse of more keys
    poison: bool = False  # NaN and inf in every key and value that no query can see
    poison_queries: bool = False  # NaN and inf in fully masked queries and in their gradients


def drawn(
    base: _Case,
    count: int,
    sizes: Mapping[str, Sequence[Any]],
    options: Mapping[str, Sequence[Any]],
) -> Iterator[_Case]:
    """Draw cases of random sizes, each with up to three options; every value is equally frequent.

    A key of ``sizes`` or ``options`` is a field, or several fields that are set together.
    """
    draw = random.Random(base.name)

    def shuffled(values: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        while True:
            yield from draw.sample(values, len(values))

    columns = [shuffled([(name, x) for x in values]) for name, values in sizes.items()]
    deck = shuffled([(name, x) for name, values in options.items() for x in values])
    for n in range(count):
        changes: dict[str, Any] = {"name": f"{base.name}-{n}"}
        for name, x in [*map(next, columns), *(next(deck) for _ in range(n % 4))]:
            names = name.split()
            changes.update(zip(names, x if len(names) > 1 else [x], strict=True))
        yield replace(base, **changes)


class Draw:
    """Draws the tensors of a case in a dtype, equal from call to call, in poisoned memory."""

    def __init__(self, case: NamedCase, dtype: torch.dtype) -> None:
        seed = zlib.crc32(case.name.encode()) + (case.draw << 32)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.wide = dtype, torch.promote_types(dtype, torch.float32)

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers, float64."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def placed(
        self, values: Tensor, layout: str = "contiguous", dtype: torch.dtype | None = None
    ) -> Tensor:
        """The values in the dtype of the case, or another dtype, in a layout."""
        return place(values.to(dtype or self.dtype), layout)

    def seed(self, dropout_p: float) -> Tensor | None:
        """The seed of dropout; None without dropout."""
        if dropout_p == 0:
            return None
        return torch.randint(-(2**63), 2**63 - 1, (), generator=self.generator)

    def slopes(self, kind: str | None, batch: int, heads: int) -> Tensor | None:
        """Slopes of ALiBi: [1, heads] for "h", [batch, heads] for "bh", else None."""
        if kind is None:
            return None
        rows = batch if kind == "bh" else 1
        return torch.rand(rows, heads, generator=self.generator).to(self.wide)


_SIZES: dict[str, Sequence[Any]] = {
    "q_len k_len": [
        *product((1, 3, 8, 17, 33, 64, 130), (1, 7, 16, 31, 65, 128, 257)),
        *((1, 2), (2, 1500), (1, 700), (5, 520), (300, 20), (100, 520), (513, 3), (257, 200)),
    ],
    "batch heads kv_heads": [(2, 4, 2), (1, 2, 2), (2, 2, 1), (1, 6, 3), (1, 8, 1), (3, 3, 3)],
    "head_dim value_dim": [
        *((d, None) for d in (1, 2, 5, 8, 16, 24, 31, 32, 33, 48, 64, 64, 80, 96, 100, 128, 192)),
        *((256, None), (64, 40), (40, 24), (33, 48), (7, 130), (96, 1), (512, 64)),
    ],
}
_OPTIONS: dict[str, Sequence[Any]] = {
    "mask mask_dims mask_float32": [
        *(("bool", dims, False) for dims in ("", "qk", "hk", "bhqk")),
        *(("bool_rows", "bhqk", False), ("bool", "bhqk", False), ("bool_rows", "bhqk", False)),
        *(("one_key", "bhqk", False), ("nothing", "bhqk", False)),
        *((kind, "bk", False) for kind in ("padding", "left_padding", "padding_inf")),
        *(("float", dims, False) for dims in ("k", "bq", "hqk", "bhqk")),
        *(("float_inf", "bhqk", wide) for wide in (False, True)),
        *((kind, "qk", False) for kind in ("finfo_min", "steep", "bool_rows_inf")),
    ],
    "mask_layout mask mask_grad": [
        *((layout, "bool", False) for layout in ("transposed", "sliced", "expanded_rows")),
        *((layout, "float_inf", True) for layout in ("unaligned", "every_second", "blhd")),
        ("expanded_heads", "float", True),
    ],
    "causal": ["upper_left", "bottom_right"] * 3,
    "window": [(0, -1), (-1, 3), (3, 5), (16, 0), (64, 64)],
    "scale": [0.0, 1.0, -0.7],
    "softcap": [0.5, 20.0],
    "alibi": ["h", "bh"],
    "sinks": ["h", "bh"],
    "relative_bias positions": [("h", None), ("bh", None), ("h", "grid"), ("bh", "any")],
    "terms buckets": [("both", "log"), ("query", "every"), ("key", "clipped"), ("both", "any")],
    "program": [
        *("chunks", "not_window", "prefix", "chunks", "documents", "documents_b", "groups"),
        *("not_window", "function", "function", "function", "documents_b", "many"),
    ],
    "dropout_p": [0.1, 0.5, 1.0],
    "dropout_p first": [(0.3, (70, 13, 1))],
    "layouts": [
        *((layout,) * 3 for layout in LAYOUTS if layout != "expanded_all"),
        ("transposed", "expanded_heads", "every_second"),
    ],
    "grad_layout": ["blhd", "every_second", "expanded_all"],
    "weights": [1, 2],
    "weights grads": [(1, ("out", "lse", "weights")), (2, ("out", "weights")), (1, ("lse",))],
    "grads": [(), ("out",), ("lse",)],
    "partial": [True, True],
    "poison program": [(True, "many"), (True, "groups")],
    "poison mask mask_dims": [(True, "padding", "bk"), (True, "bool_rows_inf", "qk")],
    "poison_queries mask": [(True, "bool_rows")],
}


def _possible(case: Case) -> bool:
    if case.poison and any(layout.startswith("expanded") for layout in case.layouts):
        return False  # hidden rows share their memory with visible ones
    of_parts = case.sinks is None and "weights" not in case.grads
    return (case.positions is None or case.q_len <= case.k_len) and (of_parts or not case.partial)


def mixed(name: str, count: int) -> Iterator[Case]:
    """Cases of attention with any sizes and options."""
    base = Case(name, grads=SCALED)
    for case in filter(_possible, drawn(base, count, _SIZES, _OPTIONS)):
        kind = case.mask or ""
        yield replace(case, mask_grad=kind in ("float", "finfo_min", "steep") or "_inf" in kind)


def _cases() -> Iterator[Case]:
    yield from mixed("mixed", 330)
    yield Case("plain")
    empty = Case("empty", mask="bool", mask_dims="qk", weights=1)
    for name in ("batch", "heads", "q_len", "k_len"):
        yield replace(empty, name=f"zero-{name}", **{name: 0})  # type: ignore[arg-type]
    # Their log-sum-exp has fewer digits in float32 than the differences of the scores.
    for scale, dtypes in ((1e4, FLOATS), (1e9, (torch.float32,))):
        yield Case(f"scale-{scale:.0e}", scale=scale, causal="upper_left", dtypes=dtypes)
    # Not in float64, which takes seconds and has the same blocks as float32.
    long = Case("long", batch=1, kv_heads=1, q_len=1100, k_len=1100, head_dim=64, dtypes=FLOATS[:3])
    yield long
    yield replace(long, name="long-causal", head_dim=128, causal="upper_left")
    yield replace(long, name="long-queries", q_len=2100, k_len=17, grads=SCALED)


ATTENTION_CASES = tuple(_cases())
