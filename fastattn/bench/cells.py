"""One cell of a benchmark: an operator on one shape, dtype and pass, and what it must cost.

FLOPs are counted for visible pairs only. A query that may see a key costs 2·D for its score and
2·Dv for its share of the output; the backward pass has five products where the forward has two:

    forward   2·D + 2·Dv           (4·D  when Dv = D)
    backward  6·D + 4·Dv           (10·D when Dv = D)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

OPS = ("sdpa", "mha", "sinusoidal")
DTYPES = ("fp32", "bf16", "fp16")
PASSES = ("fwd", "bwd", "fwd+bwd")
MASKS = ("none", "causal", "padding", "bool", "bias")
WEIGHTS = ("none", "average", "per-head")

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Cell:
    """What is measured: plain data, so that a cell can travel to another process as JSON.

    op        sdpa: query [B, H, Lq, D], key [B, Hkv, Lk, D], value [B, Hkv, Lk, Dv]
              mha: self-attention module on x [B, L, E] with E = H·D
              sinusoidal: x [B, L, E], written as heads=1, head_dim=E
    passes    fwd (no gradient), bwd (the backward alone) or fwd+bwd
    mask      none, causal (upper left), padding (a key padding mask, half of the keys on average),
              bool (a random [Lq, Lk] mask, half of it True), bias (an additive [H, Lq, Lk] mask)
    weights   which attention weights are returned: none, average (over the heads) or per-head
    label     the model it comes from, in words
    """

    op: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: str = "fp32"
    passes: str = "fwd"
    mask: str = "none"
    weights: str = "none"
    preset: str = ""
    label: str = ""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("op", OPS),
            ("dtype", DTYPES),
            ("passes", PASSES),
            ("mask", MASKS),
            ("weights", WEIGHTS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, allowed are {', '.join(allowed)}"
                )
        if self.heads % self.kv_heads:
            raise ValueError(f"H={self.heads} is not a multiple of Hkv={self.kv_heads}")

    @property
    def embed_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def shape(self) -> str:
        """The shape in the notation of `--shapes`."""
        if self.op != "sdpa":
            heads = f",H={self.heads}" if self.op == "mha" else ""
            return f"B={self.batch},L={self.q_len},E={self.embed_dim}{heads}"
        parts = [f"B={self.batch}", f"H={self.heads}"]
        if self.kv_heads != self.heads:
            parts.append(f"Hkv={self.kv_heads}")
        if self.q_len == self.kv_len:
            parts.append(f"L={self.q_len}")
        else:
            parts += [f"Lq={self.q_len}", f"Lk={self.kv_len}"]
        parts.append(f"D={self.head_dim}")
        if self.value_dim != self.head_dim:
            parts.append(f"Dv={self.value_dim}")
        return ",".join(parts)

    @property
    def options(self) -> str:
        """Mask and weights in words; empty when there are none."""
        words = []
        if self.mask != "none":
            words.append(self.mask)
        if self.weights != "none":
            words.append(f"{self.weights} weights")
        return ", ".join(words)

    @property
    def name(self) -> str:
        """A name that is unique within a run and readable in a log."""
        words = [self.op, self.shape, self.dtype, self.passes, self.options]
        return " ".join(word for word in words if word)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cell:
        fields = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in fields})


def padding_lengths(cell: Cell) -> list[int]:
    """Valid keys of each sequence: evenly from a quarter to three quarters of Lk."""
    spread = max(cell.batch - 1, 1)
    middle = [0.5] if cell.batch == 1 else [0.25 + 0.5 * b / spread for b in range(cell.batch)]
    return [max(1, round(cell.kv_len * share)) for share in middle]


def visible_per_row(cell: Cell) -> Iterator[int]:
    """How many keys each query row of one sequence may see, without padding."""
    for i in range(cell.q_len):
        yield min(cell.kv_len, i + 1) if cell.mask == "causal" else cell.kv_len


def visible_pairs(cell: Cell, true_in_mask: int | None = None) -> int:
    """Pairs (query, key) that take part, over the whole batch and all heads.

    `true_in_mask` is the number of True in the random [Lq, Lk] mask of a `bool` cell, which only
    the inputs know.
    """
    if cell.mask == "padding":
        return cell.heads * cell.q_len * sum(padding_lengths(cell))
    if cell.mask == "bool":
        if true_in_mask is None:
            raise ValueError("a cell with a bool mask needs true_in_mask")
        return cell.batch * cell.heads * true_in_mask
    return cell.batch * cell.heads * sum(visible_per_row(cell))


def flops(cell: Cell, true_in_mask: int | None = None) -> int:
    """Floating-point operations of a cell, the projections of a module included."""
    if cell.op == "sinusoidal":
        per_pass = cell.batch * cell.q_len * cell.embed_dim
        return {"fwd": 2, "bwd": 1, "fwd+bwd": 3}[cell.passes] * per_pass
    pairs = visible_pairs(cell, true_in_mask)
    forward = pairs * (2 * cell.head_dim + 2 * cell.value_dim)
    backward = pairs * (6 * cell.head_dim + 4 * cell.value_dim)
    if cell.op == "mha":
        # Three input projections and one output projection; each has two products in the backward.
        projections = 8 * cell.batch * cell.q_len * cell.embed_dim**2
        forward += projections
        backward += 2 * projections
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[cell.passes]


def bytes_touched(cell: Cell) -> int:
    """The least a forward pass must read and write: every input and the output once.

    The backward reads all of that again with the output's gradient and writes a gradient for every
    input.
    """
    size = DTYPE_BYTES[cell.dtype]
    if cell.op == "sdpa":
        inputs = cell.batch * (
            cell.heads * cell.q_len * cell.head_dim
            + cell.kv_heads * cell.kv_len * (cell.head_dim + cell.value_dim)
        )
        output = cell.batch * cell.heads * cell.q_len * cell.value_dim
    else:
        inputs = output = cell.batch * cell.q_len * cell.embed_dim
        if cell.op == "mha":
            inputs += 4 * cell.embed_dim**2
    forward, backward = inputs + output, 2 * inputs + 2 * output
    count = {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[cell.passes]
    return size * count
