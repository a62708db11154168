"""One cell of a benchmark: an operator with a shape, a dtype and a pass, and its cost.

The operator's file in `bench/ops` defines the sizes and the cost of the passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastattn.bench import ops
from fastattn.bench.shapes import shape_text

DTYPES = ("fp32", "bf16", "fp16")
PASSES = ("fwd", "bwd", "fwd+bwd")
MASKS = ("none", "causal", "padding", "bool", "bias", "documents", "prefix", "window")
DOCUMENTS = 8  # of a cell with mask=documents
WEIGHTS = ("none", "average", "per-head")
OPTIONS = (
    *("none", "window", "softcap", "alibi", "sinks", "relative", "t5", "int8", "fp8", "latent"),
    *("dropout", "learnable", "stepwise", "layerwise"),
)
DEVICES = ("cpu", "cuda")

# float64 can be explained, not measured: the check needs a wider type.
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Cell:
    """One measurement as plain data; docs/benchmarks.md explains masks, weights and options.

    op      a name of `bench.ops`, or an importable module of that form
    sizes   the operator's sizes by their keys, such as {"B": 1, "H": 8, "Lq": 512, ...}
    passes  fwd (no gradient), bwd (the backward only) or fwd+bwd
    label   a description, such as the model that has this shape
    """

    op: str
    sizes: Mapping[str, int]
    dtype: str = "fp32"
    passes: str = "fwd"
    mask: str = "none"
    weights: str = "none"
    option: str = "none"
    device: str = "cpu"
    preset: str = ""
    label: str = ""

    def __post_init__(self) -> None:
        op = ops.get(self.op)
        for name, allowed in (
            ("dtype", DTYPE_BYTES),
            ("passes", op.PASSES),
            ("mask", op.MASKS),
            ("weights", op.WEIGHTS),
            ("option", op.OPTIONS),
            ("device", DEVICES),
        ):
            if (given := getattr(self, name)) not in allowed:
                names = ", ".join(allowed)
                raise ValueError(f"{name} is {given!r}, allowed for {self.op} are {names}")
        op.check(self)

    def __hash__(self) -> int:
        return hash(self.name)

    def __getitem__(self, key: str) -> int:
        return self.sizes[key]

    @property
    def shape(self) -> str:
        """The shape in the notation of `--shapes`."""
        return shape_text(self.sizes, ops.get(self.op).SIZES)

    @property
    def name(self) -> str:
        """A name that is unique within a run and readable in a log."""
        options = ", ".join(options_in_words(self.mask, self.weights, self.option))
        device = "" if self.device == "cpu" else f"on {self.device}"
        words = [self.op, self.shape, self.dtype, self.passes, options, device]
        return " ".join(word for word in words if word)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cell:
        fields = {field.name for field in dataclasses.fields(cls)}
        known = {key: value for key, value in data.items() if key in fields}
        sizes = dict(known["sizes"])
        # In a result from before a size was added, the size has its default.
        for key, default in ops.get(known["op"]).SIZES.items():
            sizes.setdefault(key, sizes[default] if isinstance(default, str) else default)
        return cls(**known | {"sizes": sizes})


def options_in_words(mask: str, weights: str, option: str) -> list[str]:
    """Those of the three that are not "none"."""
    shown = (mask, weights if weights == "none" else f"{weights} weights", option)
    return [word for word in shown if word != "none"]


def padding_lengths(batch: int, keys: int) -> list[int]:
    """The valid keys of each sequence, evenly spaced from a quarter to three quarters of `keys`."""
    spread = max(batch - 1, 1)
    middle = [0.5] if batch == 1 else [0.25 + 0.5 * b / spread for b in range(batch)]
    return [max(1, round(keys * share)) for share in middle]


def window_width(cell: Cell) -> int:
    """The window of a cell with option=window or mask=window: its largest distance."""
    return max(1, cell.sizes.get("Lk", cell.sizes.get("L", 0)) // 4)


def prefix_length(length: int) -> int:
    """The prefix of a sequence with mask=prefix."""
    return length // 2


def keys_of(cell: Cell, at: int, length: int, queries: int = 0) -> range:
    """The visible keys of the query at a position of a sequence: with these masks, neighbours.

    `queries` is the number of queries, if it is not that of the keys.
    """
    if cell.option == "window":
        width = window_width(cell)
        last = at if cell.mask == "causal" else at + width
        return range(max(0, at - width), min(length, last + 1))
    if cell.mask == "causal":
        return range(min(length, at + 1))
    if cell.mask == "prefix":
        return range(max(at + 1, prefix_length(length)))
    if cell.mask == "window":
        return range(max(0, at - window_width(cell)), at + 1)
    if cell.mask == "documents":
        own = at * DOCUMENTS // (queries or length)
        return range(-(-own * length // DOCUMENTS), -(-(own + 1) * length // DOCUMENTS))
    return range(length)


def visible_pairs(cell: Cell, true_in_mask: int | None = None) -> int:
    """The visible pairs (query, key) of one head, over the batch.

    `true_in_mask` is the number of True in the random [Lq, Lk] mask of a `bool` cell.
    """
    batch = cell.sizes.get("B", 1)
    queries, keys = (cell.sizes.get(key, cell.sizes.get("L", 0)) for key in ("Lq", "Lk"))
    if cell.mask == "padding":
        return queries * sum(padding_lengths(batch, keys))
    if cell.mask == "bool":
        if true_in_mask is None:
            raise ValueError("a cell with a bool mask needs true_in_mask")
        return batch * true_in_mask
    if cell.mask == cell.option == "none":
        return batch * queries * keys
    return batch * sum(len(keys_of(cell, i, keys, queries)) for i in range(queries))


def flops(cell: Cell, true_in_mask: int | None = None) -> int:
    """The floating-point operations of a cell, including the projections of a module."""
    pairs = visible_pairs(cell, true_in_mask)
    forward, backward = ops.get(cell.op).flops(cell, pairs)
    return _of_pass(cell, forward, backward)


def bytes_touched(cell: Cell) -> int:
    """The minimum memory traffic: each input that the result depends on and the output, once.

    The backward reads them again with the gradient of the output, and writes a gradient for every
    input.
    """
    op = ops.get(cell.op)
    inputs, outputs = op.elements(cell)
    forward = inputs - op.unread(cell) + outputs
    backward = forward + inputs + outputs
    return DTYPE_BYTES[cell.dtype] * _of_pass(cell, forward, backward)


def _of_pass(cell: Cell, forward: int, backward: int) -> int:
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[cell.passes]
