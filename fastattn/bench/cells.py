"""One cell of a benchmark: an operator with a shape, a dtype and a pass; its inputs and its cost.

The operator's file in `bench/ops` defines the sizes and the cost of the passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn import masks
from fastattn.bench import ops
from fastattn.bench.ops._base import value_of

DTYPES = ("fp32", "bf16", "fp16")
PASSES = ("fwd", "bwd", "fwd+bwd")
Defaults = Mapping[str, "int | str"]  # of sizes: numbers, or other keys
DOCUMENTS = 8  # documents per sequence with mask=documents
DEVICES = ("cpu", "cuda")
# float64 can be explained but not measured, because the check needs a wider type.
TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


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
            *(("dtype", TORCH_DTYPES), ("passes", op.PASSES), ("mask", op.MASKS)),
            *(("weights", op.WEIGHTS), ("option", op.OPTIONS), ("device", DEVICES)),
        ):
            if (value := getattr(self, name)) not in allowed:
                names = ", ".join(allowed)
                raise ValueError(f"{name} is {value!r}, allowed for {self.op} are {names}")
        op.check(self)

    def __hash__(self) -> int:
        return hash(self.name)

    def __getitem__(self, key: str) -> int:
        return self.sizes[key]

    # The masks: the visible keys of each query, as bounds, pairs, or masks of the library

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys, 0 for an operator without them."""
        length = self.sizes.get("L", 0)
        return self.sizes.get("Lq", length), self.sizes.get("Lk", length)

    def padded(self, keys: int) -> list[int]:
        """The valid keys of each sequence, evenly spaced from a quarter to three quarters."""
        spread = max(self["B"] - 1, 1)
        shares = [0.25 + 0.5 * b / spread for b in range(self["B"])] if self["B"] > 1 else [0.5]
        return [max(1, round(keys * share)) for share in shares]

    @property
    def window(self) -> int:
        """The largest distance of a visible key: W, or with a window a quarter of the keys."""
        return self.sizes.get("W") or max(1, self.lengths[1] // 4)

    @property
    def limits_keys(self) -> bool:
        """Whether `keys_of` may exclude keys."""
        is_local = self.option == "window" or "W" in self.sizes
        return is_local or self.mask not in ("none", "bool", "bias")

    def keys_of(self, at: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The beginning and the end of the visible keys, for the query at each position."""
        first, end = torch.zeros_like(at), torch.full_like(at, length)
        if self.option == "window" or "W" in self.sizes:
            first, end = at - self.window, at + self.window + 1
        elif self.mask == "window":
            first = at - self.window
        elif self.mask == "documents":
            own = at * DOCUMENTS // (at.max() + 1)
            first, end = (-(-number * length // DOCUMENTS) for number in (own, own + 1))
        if self.mask in ("causal", "window"):
            end = at + 1
        elif self.mask == "prefix":
            end = (at + 1).clamp(min=length // 2)
        return first.clamp(0, length), end.clamp(max=length)

    def visible(self, at: Tensor, length: int, device: Any = "cpu") -> Tensor | None:
        """The visible pairs [queries, length] of the queries at these positions; None: all."""
        if not self.limits_keys:
            return None
        first, end = self.keys_of(at[:, None], length)
        keys = torch.arange(length)
        return ((first <= keys) & (keys < end)).to(device)

    def documents(self, length: int) -> Tensor:
        """The document of each row, [length]."""
        return (torch.arange(length) * DOCUMENTS // max(length, 1)).to(self.device)

    def library_mask(self, *lengths: int) -> masks.Mask | None:
        """The mask of `fastattn.masks`, for one length or for one length per sequence."""
        if self.mask == "documents":
            return masks.document(torch.cat([*map(self.documents, lengths)]))
        if self.mask == "prefix":
            several = torch.tensor([length // 2 for length in lengths], device=self.device)
            return masks.prefix_lm(several if len(lengths) > 1 else lengths[0] // 2)
        return masks.sliding_window(self.window, 0) if self.mask == "window" else None

    @property
    def itemsize(self) -> int:
        return TORCH_DTYPES[self.dtype].itemsize

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


def shape_text(sizes: Mapping[str, int], defaults: Defaults) -> str:
    """Format sizes in this grammar, leaving out defaults and zeros."""
    parts = []
    for key, default in defaults.items():
        size = sizes.get(key, 0)
        if key == "Lq" and defaults.get("Lk") == "Lq" and sizes["Lk"] == size:
            parts.append(f"L={size}")
        elif size and (not isinstance(default, str) or sizes[default] != size):
            parts.append(f"{key}={size}")
    return ",".join(parts)


def with_defaults(sizes: Mapping[str, int], defaults: Defaults) -> dict[str, int]:
    """The sizes in the order of the operator; a missing size has its default."""
    shape: dict[str, int] = {}
    for key, default in defaults.items():
        shape[key] = sizes.get(key, shape[default] if isinstance(default, str) else default)
    return shape


def options_in_words(mask: str, weights: str, option: str) -> list[str]:
    """The options among the three that are not "none"."""
    shown = (mask, weights if weights == "none" else f"{weights} weights", option)
    return [word for word in shown if word != "none"]


# Inputs

POOL = 2**24


class Draw:
    """Random tensors from one seed."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype, self.seed, self.begin = dtype, seed, 0
        self.pools: dict[float, Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.dtype)

    def pooled(self, *shape: int, scale: float) -> Tensor:
        """A slice of one pool of numbers, because drawing a billion takes longer than a model."""
        if scale not in self.pools:
            pool = torch.randn(POOL, generator=torch.Generator().manual_seed(self.seed))
            self.pools[scale] = (pool * scale).to(self.dtype)
        pool, count = self.pools[scale], math.prod(shape)
        if count > POOL:
            return pool.repeat(-(-count // POOL))[:count].view(shape)
        self.begin = 0 if self.begin + count > POOL else self.begin
        self.begin += count
        return pool[self.begin - count : self.begin].view(shape)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def token_ids(self, batch: int, sentences: int, words: int, vocabulary: int) -> Tensor:
        """[batch, sentences, words]: stories of one or more sentences, padded with 0."""
        ids = self.integers(min(1, vocabulary - 1), vocabulary, batch, sentences, words)
        lengths = self.integers(max(1, words // 4), words + 1, batch, sentences, 1)
        counts = self.integers(1, sentences + 1, batch, 1, 1)
        ids *= torch.arange(words) < lengths
        ids *= torch.arange(sentences).unsqueeze(-1) < counts
        return ids

    def visible(self, queries: int, keys: int) -> Tensor:
        """[queries, keys], half of it True, with at least one True in every row."""
        visible = torch.rand(queries, keys, generator=self.generator) < 0.5
        rows = torch.arange(queries)
        visible[rows, rows % keys] = True
        return visible

    @staticmethod
    def valid(cell: Cell, keys: int) -> Tensor:
        """[batch, keys], True where the key is not padding."""
        return torch.arange(keys) < torch.tensor(cell.padded(keys))[:, None]


def make_inputs(cell: Cell, seed: int) -> ops.Inputs:
    """The inputs of `cell` by name, equal in every process: drawn in fp32 and rounded."""
    return ops.get(cell.op).inputs(cell, Draw(TORCH_DTYPES[cell.dtype], seed))


def output_names(cell: Cell) -> list[str]:
    """The names of a provider's outputs for `cell`, in order."""
    names = ["out", *(["weights"] if cell.weights != "none" else [])]
    gradients = [f"grad_{name}" for name in ops.get(cell.op).leaf_names(cell)]
    return {"fwd": names, "bwd": gradients, "fwd+bwd": names + gradients}[cell.passes]


# The cost


def visible_pairs(cell: Cell, seed: int = 0) -> int:
    """The visible pairs (query, key) of one head, over the batch; `seed` draws a bool mask."""
    op = ops.get(cell.op)
    if cell.mask == "bool":
        mask = make_inputs(cell, seed)["attn_mask"]
        return cell["B"] * int((~mask if cell.op == "mha" else mask).sum())
    if not (cell.limits_keys or op.DERIVED):  # without a tensor, which may be too large
        return cell.sizes.get("B", 1) * math.prod(cell.lengths)
    bounds = (cell.keys_of(*sequence) for sequence in op.sequences(cell))
    return sum(int((end - first).clamp(min=0).sum()) for first, end in bounds)


def flops(cell: Cell, seed: int = 0) -> int:
    """The floating-point operations of a cell, including the projections of a module."""
    return _of_pass(cell, *ops.get(cell.op).flops(cell, visible_pairs(cell, seed)))


def bytes_touched(cell: Cell) -> int:
    """The minimum memory traffic: each input that the result depends on and the output, once.

    The backward reads them and the gradient of the output, and writes the gradients of the inputs.
    """
    op = ops.get(cell.op)
    inputs, outputs = op.elements(cell)
    read = {size: int(value_of(rows, cell)) for size, rows in op.READ.items()}
    if "Lk" in cell.sizes and cell.limits_keys and cell.mask != "padding":
        first, end = cell.keys_of(*op.sequences(cell)[0])
        read["Lk"] = int(end.max() - first.min())
    forward = op.elements(cell, **read)[0] + outputs
    return cell.itemsize * _of_pass(cell, forward, forward + inputs + outputs)


def _of_pass(cell: Cell, forward: int, backward: int) -> int:
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[cell.passes]
