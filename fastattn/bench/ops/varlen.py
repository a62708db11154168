"""`varlen_attention`: attention within packed sequences; torch pads them.

The lengths are those of a padded batch: evenly spaced from a quarter to three quarters of L. With S
they grow by a constant factor from S to L. The cost of padding is not counted. Masks and distances
are those within a sequence; torch gets them as a mask of all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastattn.bench.cells import Cell, keys_of, padding_lengths
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import attend, biases, mask_of, visible_to_last
from fastattn.bench.ops._base import Inputs, Operator, Prepared


class _Varlen(Operator):
    FUNCTION = "varlen_attention"
    ABOUT = "attention within B packed sequences of L/4 to 3L/4, or S to L, [T, H, D], [T, Hkv, D]"
    TORCH = "F.scaled_dot_product_attention on the padded batch, packed again"
    MASKS = ("none", "causal", "documents", "prefix", "window")
    OPTIONS = ("none", "relative")
    FLOPS = "attention(pairs * H, D, D)"
    BY_EQUATION = True

    def pairs(self, cell: Cell, pairs: int) -> int:
        return sum(len(keys_of(cell, i, n)) for n in _lengths(cell) for i in range(n))

    def size(self, cell: Cell, key: str) -> int:
        return sum(_lengths(cell)) if key == "T" else super().size(cell, key)

    def others(self, cell: Cell, draw: Draw) -> Inputs:
        lengths = _lengths(cell)
        inputs = {"ends": torch.tensor([0, *lengths]).cumsum(0)}
        if cell.option == "relative":
            inputs["relative_bias"] = draw.normal(cell["H"], 2 * max(lengths) - 1)
        return inputs

    def leaf_names(self, cell: Cell) -> Sequence[str]:
        return [*self.SHAPES, *(["relative_bias"] if cell.option == "relative" else [])]

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        ends = inputs["ends"]
        options: dict[str, Any] = {
            "is_causal": cell.mask == "causal",
            "mask": mask_of(cell, *_lengths(cell)),
            "relative_bias": inputs.get("relative_bias"),
        }
        return [*self.leaves(inputs), ends, ends], options

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        """The timing includes padding and packing, which packed inputs and outputs require."""
        leaves, lengths = self.leaves(inputs), inputs["ends"].diff()
        longest = max(_lengths(cell))
        valid = torch.arange(longest, device=lengths.device) < lengths[:, None]  # [B, L]
        visible = valid[:, None, None]
        for b, n in enumerate(_lengths(cell)):
            square = visible_to_last(cell, n, n, lengths.device)
            if square is not None:  # a row of padding sees all keys of its sequence: no NaN
                visible = visible.expand(-1, -1, longest, -1).contiguous()  # [B, 1, L, L]
                visible[b, 0, :n, :n] = square

        def padded(x: Tensor) -> Tensor:
            batch = x.new_zeros(*valid.shape, *x.shape[1:])
            return batch.index_put((valid,), x).transpose(1, 2)

        def forward(masks: Sequence[Tensor | None]) -> Tensor:
            query, key, value = (padded(x) for x in leaves)
            grouped = cell["H"] != cell["Hkv"]
            out = scaled_dot_product_attention(query, key, value, masks[0], enable_gqa=grouped)
            return out.transpose(1, 2)[valid]

        return self._with_masks(cell, inputs, [longest], [visible], forward)

    def one_by_one(self, cell: Cell, inputs: Inputs) -> Prepared:
        """A loop over the sequences, without padding."""
        grouped, lengths = cell["H"] != cell["Hkv"], _lengths(cell)
        causal = cell.mask == "causal" and cell.option == "none"  # else a mask says it
        device = inputs["ends"].device
        visible = [None if causal else visible_to_last(cell, n, n, device) for n in lengths]

        def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)

        def forward(masks: Sequence[Tensor | None]) -> Tensor:
            return self._of_each(cell, inputs, attention, masks)

        return self._with_masks(cell, inputs, lengths, visible, forward)

    def equation(self, cell: Cell, inputs: Inputs) -> Tensor:
        """The definition of attention, for each sequence: it has no pairs of two sequences."""
        device, table = inputs["ends"].device, inputs.get("relative_bias")
        given = {"relative_bias": None if table is None else table[None]}
        visible = [visible_to_last(cell, n, n, device) for n in _lengths(cell)]
        return self._of_each(cell, inputs, lambda *call: attend(*call, given=given)[0], visible)

    def _of_each(
        self,
        cell: Cell,
        inputs: Inputs,
        attention: Callable[..., Tensor],
        masks: Sequence[Tensor | None],
    ) -> Tensor:
        """The outputs [T, H, D] of an attention on [1, H, L, D] of each sequence."""
        outs = []
        tensors = (x.split(_lengths(cell)) for x in self.leaves(inputs))
        for *parts, mask in zip(*tensors, masks, strict=True):
            out = attention(*(x.transpose(0, 1)[None] for x in parts), mask)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    def _with_masks(
        self,
        cell: Cell,
        inputs: Inputs,
        lengths: Sequence[int],
        visible: Sequence[Tensor | None],
        forward: Callable[[Sequence[Tensor | None]], Tensor],
    ) -> Prepared:
        """The call of PyTorch, which gets a table of biases as masks.

        They are made in each call if the table has a gradient.
        """
        table = inputs.get("relative_bias")

        def made() -> Sequence[Tensor | None]:
            if table is None:
                return visible
            return [biases(table, n, n, seen) for n, seen in zip(lengths, visible, strict=True)]

        ready = made()
        return self.prepared(
            cell, inputs, lambda: forward(ready if cell.passes == "fwd" else made())
        )


def _lengths(cell: Cell) -> list[int]:
    batch, shortest, longest = cell["B"], cell["S"], cell["L"]
    if not shortest:
        return padding_lengths(batch, longest)
    step = (longest / shortest) ** (1 / max(batch - 1, 1))
    return [round(longest / step**n) for n in range(batch)]


VARLEN = _Varlen(
    SIZES={"B": 16, "H": 8, "Hkv": "H", "L": 256, "S": 0, "D": 64},
    LIMITS={"S": "L"},
    SHAPES={"query": "T H D", "key": "T Hkv D", "value": "T Hkv D"},
)
