"""Is the answer right? Every cell is compared with plain fp64 PyTorch before it is timed.

The bound is the library's own (docs/numerics.md): with ref the same maths in fp64 and eager the
same maths in plain PyTorch in the cell's dtype (for 16 bits: each operation in fp32, its result
rounded),

    max|x − ref|  ≤  2·max|eager − ref| + 4·eps(dtype)·max|ref|

Attention of one (sequence, key head) does not depend on the others, so beyond `PAIRS_CHECKED` pairs
a random sample of them is compared, and the result file says how many.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import PARAMETERS, TORCH_DTYPES, make_inputs
from fastattn.testing.compare import deviation

PAIRS_CHECKED = 1 << 26
_SCORES_AT_ONCE = 1 << 23  # 64 MB in fp64

Rounded = Callable[[Tensor], Tensor]
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Check:
    """The worst tensor of a comparison: its error, what is allowed, and what was compared."""

    ok: bool
    tensor: str
    max_error: float
    bound: float
    largest: float  # of the tensor's reference: what the error is relative to
    compared: str
    reason: str = ""


class Oracle:
    """The expected outputs of one cell, computed once and compared with every provider's."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell = cell
        self.inputs = make_inputs(cell, seed)
        self.slices = _slices(cell, seed)
        self.compared = _coverage(cell, self.slices)
        dtype = TORCH_DTYPES[cell.dtype]
        self.reference = self._all(torch.float64, lambda x: x)
        self.eager = self._all(torch.float32, lambda x: x.to(dtype).float())

    def check(self, outputs: Outputs) -> Check:
        """The tensor of `outputs` that is worst against its bound."""
        worst, worst_ratio = Check(True, "", 0.0, 0.0, 1.0, self.compared), -1.0
        dtype = TORCH_DTYPES[self.cell.dtype]
        for name, whole in outputs.items():
            got, want = self._sample(name, whole), self.reference[name]
            if got.shape != want.shape or got.dtype != dtype:
                reason = (
                    f"{name} is {got.dtype} {list(got.shape)}, expected {dtype} {list(want.shape)}"
                )
                return Check(False, name, float("inf"), 0.0, 1.0, self.compared, reason)
            found = deviation(got, self.eager[name], want, name)
            if found.ratio > worst_ratio:
                reason = "" if found.ok else str(found)
                worst_ratio = found.ratio
                worst = Check(
                    ok=found.ok,
                    tensor=name,
                    max_error=found.error,
                    bound=found.bound,
                    largest=float(want.abs().max()) if want.numel() else 1.0,
                    compared=self.compared,
                    reason=reason,
                )
        return worst

    def _all(self, dtype: torch.dtype, rounded: Rounded) -> Outputs:
        parts = [self._run(where, dtype, rounded) for where in self.slices]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _sample(self, name: str, whole: Tensor) -> Tensor:
        return torch.cat([_take(self.cell, name, whole, where) for where in self.slices])

    def _run(self, where: tuple[int, ...], dtype: torch.dtype, rounded: Rounded) -> Outputs:
        taken = {name: _take(self.cell, name, x, where) for name, x in self.inputs.items()}
        cast = {n: x.to(dtype) if x.is_floating_point() else x for n, x in taken.items()}
        return {"sdpa": _sdpa, "mha": _mha, "sinusoidal": _sinusoidal}[self.cell.op](
            self.cell, cast, rounded
        )


def _slices(cell: Cell, seed: int) -> list[tuple[int, ...]]:
    """What to compare: everything, or a sample of (sequence, key head).

    Where the weights are averaged over the heads the sample is of whole sequences.
    """
    pairs = cell.batch * cell.heads * cell.q_len * cell.kv_len
    if cell.op != "sdpa" or pairs <= PAIRS_CHECKED:
        return [()]
    heads = [()] if cell.weights == "average" else [(h,) for h in range(cell.kv_heads)]
    units = [(b, *h) for b in range(cell.batch) for h in heads]
    count = max(1, PAIRS_CHECKED * len(units) // pairs)
    return sorted(random.Random(seed).sample(units, count))


def _coverage(cell: Cell, slices: list[tuple[int, ...]]) -> str:
    if slices == [()]:
        return "all"
    if len(slices[0]) == 1:
        return f"{len(slices)} of {cell.batch} sequences"
    return f"{len(slices)} of {cell.batch * cell.kv_heads} (sequence, head)"


def _take(cell: Cell, name: str, x: Tensor, where: tuple[int, ...]) -> Tensor:
    """The part of a tensor that belongs to one (sequence, key head); broadcast dimensions stay."""
    if not where:
        return x
    if name == "attn_mask":
        x = x.expand((*[1] * (4 - x.dim()), *x.shape)) if x.dim() < 4 else x
    b = where[0] if x.shape[0] > 1 else 0
    x = x[b : b + 1]
    if len(where) == 1 or x.dim() < 4 or x.shape[1] == 1:
        return x
    group = x.shape[1] // cell.kv_heads
    return x[:, where[1] * group : (where[1] + 1) * group]


def _attention(
    query: Tensor,  # [B, H, rows, D]
    key: Tensor,  # [B, H, Lk, D]
    value: Tensor,  # [B, H, Lk, Dv]
    visible: Tensor | None,  # broadcastable to [B, H, rows, Lk]
    bias: Tensor | None,
    rounded: Rounded,
) -> tuple[Tensor, Tensor]:
    scores = rounded(rounded(query @ key.mT) * query.shape[-1] ** -0.5)
    if bias is not None:
        scores = rounded(scores + bias)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    weights = rounded(scores.softmax(-1))
    return rounded(weights @ value), weights


def _sdpa(cell: Cell, inputs: dict[str, Tensor], rounded: Rounded) -> Outputs:
    leaves = [inputs[name].clone() for name in ("query", "key", "value")]
    with_gradient = cell.passes != "fwd"
    for leaf in leaves:
        leaf.requires_grad_(with_gradient)
    query, key, value = leaves
    group = query.shape[1] // key.shape[1]
    mask = inputs.get("attn_mask")
    step = max(1, _SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * cell.kv_len))
    outs, weights = [], []
    for first in range(0, cell.q_len, step):  # a block of queries at a time bounds the memory
        rows = slice(first, min(first + step, cell.q_len))
        part = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
        visible = part if part is not None and part.dtype == torch.bool else None
        bias = None if part is visible else part
        if cell.mask == "causal":
            visible = torch.arange(cell.kv_len) <= torch.arange(rows.start, rows.stop)[:, None]
        with torch.set_grad_enabled(with_gradient):
            out, weight = _attention(
                query[:, :, rows],
                key.repeat_interleave(group, 1),
                value.repeat_interleave(group, 1),
                visible,
                bias,
                rounded,
            )
            if with_gradient:
                out.backward(inputs["grad_out"][:, :, rows])
        outs.append(out.detach())
        if cell.weights != "none":
            weights.append(weight.detach())
    results = {"out": torch.cat(outs, 2)}
    if cell.weights != "none":
        results["weights"] = _averaged(cell, torch.cat(weights, 2), rounded)
    for name, leaf in zip(("grad_query", "grad_key", "grad_value"), leaves, strict=True):
        if with_gradient:
            assert leaf.grad is not None
            results[name] = rounded(leaf.grad)
    return results


def _averaged(cell: Cell, weights: Tensor, rounded: Rounded) -> Tensor:
    return rounded(weights.mean(1)) if cell.weights == "average" else weights


def _mha(cell: Cell, inputs: dict[str, Tensor], rounded: Rounded) -> Outputs:
    names = ("x", *PARAMETERS)
    leaves = {name: inputs[name].clone().requires_grad_(cell.passes != "fwd") for name in names}
    batch, length, embed = leaves["x"].shape
    visible, bias = None, None
    if "key_padding_mask" in inputs:
        visible = ~inputs["key_padding_mask"][:, None, None, :]
    elif "attn_mask" in inputs and inputs["attn_mask"].dtype == torch.bool:
        visible = ~inputs["attn_mask"]
    elif "attn_mask" in inputs:
        bias = inputs["attn_mask"].view(batch, cell.heads, length, length)

    def project(x: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
        return rounded(x @ weight.T + offset)

    packed = project(leaves["x"], leaves["in_proj_weight"], leaves["in_proj_bias"])
    query, key, value = (
        part.view(batch, length, cell.heads, cell.head_dim).transpose(1, 2)
        for part in packed.split(embed, -1)
    )
    heads, weights = _attention(query, key, value, visible, bias, rounded)
    joined = heads.transpose(1, 2).reshape(batch, length, embed)
    out = project(joined, leaves["out_proj.weight"], leaves["out_proj.bias"])
    results = {"out": out.detach()}
    if cell.weights != "none":
        results["weights"] = _averaged(cell, weights, rounded).detach()
    if cell.passes != "fwd":
        out.backward(inputs["grad_out"])
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            results[f"grad_{name}"] = rounded(leaf.grad)
    return results


def _sinusoidal(cell: Cell, inputs: dict[str, Tensor], rounded: Rounded) -> Outputs:
    x = inputs["x"]
    embed = cell.embed_dim
    position = torch.arange(cell.q_len, dtype=torch.float64)[:, None]
    angle = position * 10000.0 ** (-torch.arange(0, embed, 2, dtype=torch.float64) / embed)
    table = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :embed].to(x.dtype)
    scale = embed**0.5
    results = {"out": rounded(rounded(x * scale) + rounded(table))}
    if cell.passes != "fwd":
        results["grad_x"] = rounded(inputs["grad_out"] * scale)
    return results
