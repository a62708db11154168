"""One cell of a benchmark: an operator with a shape, a dtype and a pass, and its cost.

The operator's file in `bench/ops` defines the sizes and the cost of the passes.
"""

from __future__ import annotations

import dataclasses
import itertools
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
    """One measurement as plain data, so it can be sent to another process as JSON.

    op        a name of `bench.ops`, or an importable module of that form
    sizes     the operator's sizes by their keys, such as {"B": 1, "H": 8, "Lq": 512, ...}
    passes    fwd (no gradient), bwd (the backward only) or fwd+bwd
    mask      none, causal (upper left), padding (a key padding mask, half of the keys on average),
              bool (a random [Lq, Lk] mask, half of it True), bias (an additive mask), or a mask of
              `fastattn.masks`, for others a [Lq, Lk] mask: documents (eight of equal lengths),
              prefix (the first half of the keys, and those before the query) or window (keys at
              most Lk / 4 places before the query)
    weights   which attention weights are returned: none, average (over the heads) or per-head
    option    none, window (keys at most Lk / 4 places away), softcap (2), alibi (the slopes of its
              paper), sinks (a logit per head), relative (a learned bias of every distance), t5
              (one of 32 buckets of distances), int8 or fp8 (a quantised cache), latent (values are
              the first columns of the keys), dropout (of 0.1), learnable (the bias of the mask has
              a gradient), stepwise (one position at a time, on a cache) or layerwise (tying of a
              memory network)
    label     a description, such as the model that has this shape
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
            ("dtype", tuple(DTYPE_BYTES)),
            ("passes", op.PASSES),
            ("mask", op.MASKS),
            ("weights", op.WEIGHTS),
            ("option", op.OPTIONS),
            ("device", DEVICES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, allowed for {self.op} are "
                    f"{', '.join(allowed)}"
                )
        op.check(self.sizes)
        op.check_option(self)

    def __hash__(self) -> int:
        return hash(self.name)

    def __getitem__(self, key: str) -> int:
        return self.sizes[key]

    @property
    def shape(self) -> str:
        """The shape in the notation of `--shapes`."""
        return shape_text(self.sizes, ops.get(self.op).SIZES)

    @property
    def options(self) -> str:
        """Mask, weights and option in words; empty if all are "none"."""
        return ", ".join(options_in_words(self.mask, self.weights, self.option))

    @property
    def name(self) -> str:
        """A name that is unique within a run and readable in a log."""
        device = "" if self.device == "cpu" else f"on {self.device}"
        words = [self.op, self.shape, self.dtype, self.passes, self.options, device]
        return " ".join(word for word in words if word)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

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


def document_lengths(length: int) -> list[int]:
    """The lengths of the documents, if row i is of document `i * DOCUMENTS // length`."""
    ends = [-(-n * length // DOCUMENTS) for n in range(DOCUMENTS + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


def window_width(cell: Cell) -> int:
    """The window of a cell with option=window or mask=window: its largest distance."""
    return max(1, cell.sizes.get("Lk", cell.sizes.get("L", 0)) // 4)


def prefix_length(length: int) -> int:
    """The prefix of a sequence with mask=prefix."""
    return length // 2


def keys_of(cell: Cell, at: int, length: int) -> range:
    """The visible keys of the query at a position of a sequence: with these masks, neighbours."""
    if cell.mask == "causal":
        return range(at + 1)
    if cell.mask == "prefix":
        return range(max(at + 1, prefix_length(length)))
    if cell.mask == "window":
        return range(max(0, at - window_width(cell)), at + 1)
    if cell.mask == "documents":
        own = at * DOCUMENTS // length
        return range(-(-own * length // DOCUMENTS), -(-(own + 1) * length // DOCUMENTS))
    return range(length)


def visible_pairs(cell: Cell, true_in_mask: int | None = None) -> int:
    """The visible pairs (query, key) of one head, over the batch.

    `true_in_mask` is the number of True in the random [Lq, Lk] mask of a `bool` cell.
    """
    sizes = cell.sizes
    batch = sizes.get("B", 1)
    queries, keys = (sizes.get(key, sizes.get("L", 0)) for key in ("Lq", "Lk"))
    if cell.mask == "padding":
        return queries * sum(padding_lengths(batch, keys))
    if cell.mask == "bool":
        if true_in_mask is None:
            raise ValueError("a cell with a bool mask needs true_in_mask")
        return batch * true_in_mask
    if cell.mask == "documents":
        lengths = zip(document_lengths(queries), document_lengths(keys), strict=True)
        return batch * sum(a * b for a, b in lengths)
    if cell.option == "window":
        width, causal = window_width(cell), cell.mask == "causal"
        return batch * sum(
            min(keys, i + 1 if causal else i + width + 1) - max(0, i - width)
            for i in range(queries)
        )
    if cell.mask == "causal":
        return batch * sum(min(keys, i + 1) for i in range(queries))
    return batch * queries * keys


def flops(cell: Cell, true_in_mask: int | None = None) -> int:
    """The floating-point operations of a cell, including the projections of a module."""
    pairs = visible_pairs(cell, true_in_mask)
    forward, backward = ops.get(cell.op).flops(cell, pairs)
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[cell.passes]


def bytes_touched(cell: Cell) -> int:
    """The minimum memory traffic: each input that the result depends on and the output, once.

    The backward reads them again with the gradient of the output, and writes a gradient for every
    input.
    """
    op = ops.get(cell.op)
    inputs, outputs = op.elements(cell)
    forward = inputs - op.unread(cell) + outputs
    backward = forward + inputs + outputs
    count = {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[cell.passes]
    return DTYPE_BYTES[cell.dtype] * count
