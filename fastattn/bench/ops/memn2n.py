"""`MemN2N`: a whole memory network, from words to the logits of the answer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes
from fastattn.bench.ops.encode_memory import encoded
from fastattn.nn import MemN2N

_OWN = ("question", "answer", "hop_proj")  # of layerwise tying


class Memn2n(Operator):
    FUNCTION = "nn.MemN2N"
    ABOUT = (
        "stories [B, N, J] and questions [B, J] of V words, width D, K hops, adjacent tying or "
        "layerwise"
    )
    TORCH = "the same network in plain PyTorch"
    SIZES: ClassVar[Sizes] = {"B": 32, "N": 50, "J": 11, "V": 175, "D": 50, "K": 3}
    OPTIONS = ("none", "layerwise")
    LEAVES = ("embedding", "temporal")

    def leaf_names(self, cell: Cell) -> Sequence[str]:
        return [*self.LEAVES, *(_OWN if cell.option == "layerwise" else ())]

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        batch, rows, words, width, hops = (cell[key] for key in ("B", "N", "J", "D", "K"))
        encode = 2 * batch * words * width * (_tables(cell) * rows + 1)
        attend = batch * hops * rows * width
        answer = 2 * batch * width * cell["V"]
        if cell.option == "layerwise":
            answer += 2 * batch * hops * width**2
        return encode + 4 * attend + answer, encode + 10 * attend + 2 * answer

    def elements(self, cell: Cell) -> tuple[int, int]:
        numbers = _tables(cell) * (cell["V"] + cell["N"]) * cell["D"]
        if cell.option == "layerwise":
            numbers += (2 * cell["V"] + cell["D"]) * cell["D"]
        return numbers, cell["B"] * cell["V"]

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        tables, words, width = _tables(cell), cell["V"], cell["D"]
        inputs = {
            "stories": draw.sentences(cell["B"], cell["N"], cell["J"], cell["V"]),
            "questions": draw.integers(0, cell["V"], cell["B"], cell["J"]),
            "embedding": draw.normal(tables, words, width, scale=0.1),
            "temporal": draw.normal(tables, cell["N"], width, scale=0.1),
            "grad_out": draw.normal(cell["B"], words),
        }
        if cell.option == "layerwise":
            inputs |= {name: draw.normal(words, width, scale=0.1) for name in _OWN[:2]}
            inputs["hop_proj"] = draw.normal(width, width, scale=width**-0.5)
        return inputs

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        embedding = inputs["embedding"]
        stories, questions = inputs["stories"], inputs["questions"]
        module = MemN2N(
            cell["V"],
            cell["D"],
            hops=cell["K"],
            memory_size=cell["N"],
            weight_tying="layerwise" if cell.option == "layerwise" else "adjacent",
            device=embedding.device,
            dtype=embedding.dtype,
        )
        leaves = [nn.Parameter(inputs[name]) for name in self.leaf_names(cell)]
        for name, leaf in zip(self.leaf_names(cell), leaves, strict=True):
            setattr(module, name, leaf)
        module.train(cell.passes != "fwd")
        return lambda: (module(stories, questions),), leaves

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        stories, embedding, temporal = (inputs[n] for n in ("stories", "embedding", "temporal"))
        told = (stories != 0).any(-1, keepdim=True)
        memories = [
            encoded(stories, table) + row * told
            for table, row in zip(embedding, temporal, strict=True)
        ]
        own = cell.option == "layerwise"
        u = encoded(inputs["questions"], inputs["question"] if own else embedding[0])
        for m, c in [memories] * cell["K"] if own else itertools.pairwise(memories):
            p = torch.einsum("bnd,bd->bn", m, u).softmax(-1)
            kept = u @ inputs["hop_proj"].T if own else u
            u = kept + torch.einsum("bn,bnd->bd", p, c)
        return (u @ (inputs["answer"] if own else embedding[-1]).T,)


def _tables(cell: Cell) -> int:
    """Of the memories: two for all hops, or one more than there are hops."""
    return 2 if cell.option == "layerwise" else cell["K"] + 1


OP = Memn2n()
