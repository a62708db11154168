"""The inputs of a cell, equal in every process: drawn in fp32 and rounded to the cell's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.bench import ops
from fastattn.bench.cells import Cell, padding_lengths

TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Draw:
    """Random tensors from one seed."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return (low + (high - low) * torch.rand(shape, generator=self.generator)).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def sentences(self, batch: int, sentences: int, words: int, vocabulary: int) -> Tensor:
        """[batch, sentences, words]: about half of them are padding, which is 0."""
        stories = self.integers(min(1, vocabulary - 1), vocabulary, batch, sentences, words)
        lengths = self.integers(max(1, words // 4), words + 1, batch, sentences, 1)
        counts = self.integers(1, sentences + 1, batch, 1, 1)
        stories *= torch.arange(words) < lengths
        stories *= torch.arange(sentences).unsqueeze(-1) < counts
        return stories

    def visible(self, queries: int, keys: int) -> Tensor:
        """[queries, keys], half of it True, with at least one True in every row."""
        visible = torch.rand(queries, keys, generator=self.generator) < 0.5
        rows = torch.arange(queries)
        visible[rows, rows % keys] = True
        return visible

    @staticmethod
    def valid(batch: int, keys: int) -> Tensor:
        """[batch, keys], True where the key is not padding."""
        return torch.arange(keys) < torch.tensor(padding_lengths(batch, keys))[:, None]


def output_names(cell: Cell) -> list[str]:
    """The names of a provider's outputs for `cell`, in order."""
    names = []
    if cell.passes != "bwd":
        names.append("out")
        if cell.weights != "none":
            names.append("weights")
    if cell.passes != "fwd":
        names += [f"grad_{name}" for name in ops.get(cell.op).leaf_names(cell)]
    return names


def make_inputs(cell: Cell, seed: int) -> dict[str, Tensor]:
    """The inputs of `cell` by name."""
    return ops.get(cell.op).inputs(cell, Draw(TORCH_DTYPES[cell.dtype], seed))


def true_in_mask(cell: Cell, seed: int) -> int | None:
    """The number of visible pairs in the random [Lq, Lk] mask of a `bool` cell, else None."""
    if cell.mask != "bool":
        return None
    mask = make_inputs(cell, seed)["attn_mask"]
    return int((~mask if cell.op == "mha" else mask).sum())
