"""`MemN2N`: a whole memory network, from words to the logits of the answer."""

from __future__ import annotations

import itertools
from typing import ClassVar

import torch
from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes
from fastattn.bench.ops.encode_memory import encoded
from fastattn.nn import MemN2N


class Memn2n(Operator):
    FUNCTION = "nn.MemN2N"
    ABOUT = "stories [B, N, J] and questions [B, J] of V words, width D, K hops, adjacent tying"
    TORCH = "the same network in plain PyTorch"
    SIZES: ClassVar[Sizes] = {"B": 32, "N": 50, "J": 11, "V": 175, "D": 50, "K": 3}
    LEAVES = ("embedding", "temporal")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        batch, rows, words, width, hops = (cell[key] for key in ("B", "N", "J", "D", "K"))
        encode = 2 * batch * words * width * ((hops + 1) * rows + 1)
        attend = batch * hops * rows * width
        answer = 2 * batch * width * cell["V"]
        return encode + 4 * attend + answer, encode + 10 * attend + 2 * answer

    def elements(self, cell: Cell) -> tuple[int, int]:
        tables = (cell["K"] + 1) * (cell["V"] + cell["N"]) * cell["D"]
        return tables, cell["B"] * cell["V"]

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        tables = cell["K"] + 1
        return {
            "stories": draw.sentences(cell["B"], cell["N"], cell["J"], cell["V"]),
            "questions": draw.integers(0, cell["V"], cell["B"], cell["J"]),
            "embedding": draw.normal(tables, cell["V"], cell["D"], scale=0.1),
            "temporal": draw.normal(tables, cell["N"], cell["D"], scale=0.1),
            "grad_out": draw.normal(cell["B"], cell["V"]),
        }

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        embedding, temporal = self.leaves(inputs)
        stories, questions = inputs["stories"], inputs["questions"]
        module = MemN2N(
            cell["V"],
            cell["D"],
            hops=cell["K"],
            memory_size=cell["N"],
            device=embedding.device,
            dtype=embedding.dtype,
        )
        module.embedding, module.temporal = nn.Parameter(embedding), nn.Parameter(temporal)
        module.train(cell.passes != "fwd")
        return lambda: (module(stories, questions),), [module.embedding, module.temporal]

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        stories, embedding, temporal = (inputs[n] for n in ("stories", "embedding", "temporal"))
        told = (stories != 0).any(-1, keepdim=True)
        memories = [
            encoded(stories, table) + row * told
            for table, row in zip(embedding, temporal, strict=True)
        ]
        u = encoded(inputs["questions"], embedding[0])
        for m, c in itertools.pairwise(memories):
            p = torch.einsum("bnd,bd->bn", m, u).softmax(-1)
            u = u + torch.einsum("bn,bnd->bd", p, c)
        return (u @ embedding[-1].T,)


OP = Memn2n()
