"""`MemN2N`: a complete memory network, from words to the logits of the answer."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Outputs, Sizes
from fastattn.bench.ops._module import Module
from fastattn.bench.ops.encode_memory import encoded
from fastattn.nn import MemN2N


class Memn2n(Module):
    FUNCTION = "nn.MemN2N"
    ABOUT = (
        "stories [B, N, J] and questions [B, J] of V words, width D, K hops, adjacent tying or "
        "layerwise"
    )
    TORCH = "the same network in plain PyTorch"
    SIZES: ClassVar[Sizes] = {"B": 32, "N": 50, "J": 11, "V": 175, "D": 50, "K": 3}
    OPTIONS = ("none", "layerwise")
    SHAPES: ClassVar = {}
    OUTPUT = "B V"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        batch, rows, words, width, hops = (cell[key] for key in ("B", "N", "J", "D", "K"))
        tables = 2 if cell.option == "layerwise" else hops + 1
        encode = 2 * batch * words * width * (tables * rows + 1)
        attend = batch * hops * rows * width
        answer = 2 * batch * width * cell["V"]
        if cell.option == "layerwise":
            answer += 2 * batch * hops * width**2
        return encode + 4 * attend + answer, encode + 10 * attend + 2 * answer

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        stories = draw.sentences(cell["B"], cell["N"], cell["J"], cell["V"])
        questions = draw.integers(0, cell["V"], cell["B"], cell["J"])
        return {"stories": stories, "questions": questions, **super().inputs(cell, draw)}

    def parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        return draw.normal(*shape, scale=shape[-1] ** -0.5 if name == "hop_proj" else 0.1)

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        tying = "layerwise" if cell.option == "layerwise" else "adjacent"
        sizes: dict[str, Any] = {"hops": cell["K"], "memory_size": cell["N"]}
        return MemN2N(cell["V"], cell["D"], **sizes, weight_tying=tying, **made)

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        out: Tensor = module(inputs["stories"], inputs["questions"])
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        stories, embedding, temporal = (inputs[n] for n in ("stories", "embedding", "temporal"))
        filled = (stories != 0).any(-1, keepdim=True)
        memories = [
            encoded(stories, table) + row * filled
            for table, row in zip(embedding, temporal, strict=True)
        ]
        own = cell.option == "layerwise"
        u = encoded(inputs["questions"], inputs["question"] if own else embedding[0])
        for m, c in [memories] * cell["K"] if own else itertools.pairwise(memories):
            p = torch.einsum("bnd,bd->bn", m, u).softmax(-1)
            kept = u @ inputs["hop_proj"].T if own else u
            u = kept + torch.einsum("bn,bnd->bd", p, c)
        return (u @ (inputs["answer"] if own else embedding[-1]).T,)


OP = Memn2n()
