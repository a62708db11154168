"""Calls of ``fastattn.distributed.attention``, on one rank's shards and on one process."""

from __future__ import annotations

import contextlib
import functools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from distributed_runs import Results, as_operations, run_twice
from torch import Tensor

import fastattn
from fastattn import masks
from fastattn.distributed import Layout
from fastattn.testing.cases import drawn

B, L = 2, 40
DOCUMENTS = torch.arange(L) // 11
STARTS = torch.tensor([0, 3, 3, 22, 40])  # of packed sequences, one of which is empty
DIFFERENTIATED = ("query", "key", "value", "attn_mask", "sinks", "alibi_slopes")

LENGTHS: dict[str, Callable[[int], list[int]]] = {
    "even": lambda ranks: [L // ranks + (rank < L % ranks) for rank in range(ranks)],
    "uneven": lambda ranks: [[40], [27, 13], [21, 0, 19], [5, 0, 28, 7], [3, 9, 0, 17, 11]][
        ranks - 1
    ],
}
MASKS: dict[str, Callable[[], Any]] = {
    "documents": lambda: masks.document(DOCUMENTS) & masks.causal(),
    "packed": lambda: masks.document(torch.repeat_interleave(STARTS.diff())),
    "prefix": lambda: masks.prefix_lm(torch.tensor([3, 17])),
    "not-chunks": lambda: ~masks.chunked(8) | masks.causal(),
    "function": lambda: masks.from_function(
        lambda b, h, q, k: (q - k) % (h + 2) == 0, None, 4, L, L
    ),
}


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    method: str = "ring"
    layout: str = "contiguous"  # or "zigzag", "shuffled", "reversed"
    lengths: str = "even"
    dtype: torch.dtype = torch.float32
    heads: tuple[int, int] = (4, 4)
    widths: tuple[int, int] = (8, 8)
    options: dict[str, Any] = field(default_factory=dict)  # passed as they are
    attn_mask: str = ""  # "bool", "added", "columns" (one row for all), "hidden" (no key for some)
    mask: str = ""  # of MASKS
    sinks: bool | str = False  # "infinite": some are inf and -inf
    slopes: bool | str = False  # "differentiated": with a gradient
    poisoned: bool = False  # NaN in the last key and value, which a causal mask hides
    backend: str = ""

    def fits(self, ranks: int) -> bool:
        """Whether a case can run on so many ranks."""
        if ranks == 1 and "-" in self.name:  # a few are enough
            return False
        divided = all(heads % ranks == 0 for heads in self.heads)
        return self.method != "ulysses" or divided


CASES = (
    Case("plain"),
    Case("plain-allgather", "allgather", lengths="uneven"),
    Case("plain-ulysses", "ulysses", "zigzag", "uneven"),
    Case("plain-auto-grouped", "auto", "zigzag", heads=(4, 2)),
    Case("causal", lengths="uneven", options={"is_causal": True}),
    Case("causal-zigzag", layout="zigzag", options={"is_causal": True}),
    Case("causal-zigzag-uneven", layout="zigzag", lengths="uneven", options={"is_causal": True}),
    Case("causal-allgather", "allgather", options={"is_causal": True}),
    Case("causal-allgather-zigzag", "allgather", "zigzag", "uneven", options={"is_causal": True}),
    Case("causal-ulysses", "ulysses", "contiguous", "uneven", options={"is_causal": True}),
    Case("causal-reversed", layout="reversed", lengths="uneven", options={"is_causal": True}),
    Case("causal-shuffled", layout="shuffled", lengths="uneven", options={"is_causal": True}),
    Case("causal-shuffled-ulysses", "ulysses", "shuffled", options={"is_causal": True}),
    Case("causal-shuffled-allgather", "allgather", "shuffled", options={"is_causal": True}),
    Case("causal-bf16", layout="zigzag", dtype=torch.bfloat16, options={"is_causal": True}),
    Case("causal-bf16-allgather", "allgather", dtype=torch.bfloat16, options={"is_causal": True}),
    Case("causal-bf16-ulysses", "ulysses", dtype=torch.bfloat16, options={"is_causal": True}),
    Case("causal-fp16", lengths="uneven", dtype=torch.float16, options={"is_causal": True}),
    Case("causal-poisoned", poisoned=True, options={"is_causal": True}),
    Case("causal-poisoned-allgather", "allgather", poisoned=True, options={"is_causal": True}),
    Case("window", lengths="uneven", options={"window": (5, 2)}),
    Case("window-allgather", "allgather", "zigzag", options={"window": (3, 0)}),
    Case("window-ulysses", "ulysses", options={"window": (3, 4)}),
    Case("grouped", lengths="uneven", heads=(6, 2), widths=(8, 12), options={"scale": 0.3}),
    Case("grouped-allgather", "allgather", heads=(6, 2), widths=(8, 12)),
    Case("grouped-ulysses", "ulysses", heads=(8, 4), widths=(8, 12)),
    Case("softcap", options={"softcap": 1.5, "is_causal": True}),
    Case("slopes", layout="zigzag", slopes=True, options={"is_causal": True}),
    Case("slopes-differentiated", layout="zigzag", lengths="uneven", slopes="differentiated",
         options={"is_causal": True, "dropout_p": 0.3}),
    Case("slopes-differentiated-bf16", slopes="differentiated", dtype=torch.bfloat16,
         mask="documents"),
    Case("slopes-allgather", "allgather", "zigzag", "uneven", slopes=True),
    Case("slopes-ulysses", "ulysses", slopes=True, options={"window": (9, 9)}),
    Case("sinks", layout="zigzag", lengths="uneven", sinks=True, options={"is_causal": True}),
    Case("sinks-allgather", "allgather", sinks=True, attn_mask="hidden"),
    Case("sinks-infinite", sinks="infinite", attn_mask="hidden"),
    Case("sinks-infinite-allgather", "allgather", "zigzag", sinks="infinite"),
    Case("sinks-ulysses", "ulysses", "zigzag", sinks=True),
    Case("sinks-hidden", sinks=True, attn_mask="hidden"),
    Case("mask-bool", lengths="uneven", attn_mask="bool"),
    Case("mask-bool-allgather", "allgather", "zigzag", attn_mask="bool"),
    Case("mask-hidden", layout="zigzag", attn_mask="hidden"),
    Case("mask-added", layout="zigzag", lengths="uneven", attn_mask="added"),
    Case("mask-added-allgather", "allgather", "zigzag", attn_mask="added"),
    Case("mask-added-ulysses", "ulysses", "zigzag", "uneven", attn_mask="added"),
    Case("mask-added-bf16", dtype=torch.bfloat16, attn_mask="added"),
    Case("mask-columns", attn_mask="columns"),
    Case("mask-columns-ulysses", "ulysses", attn_mask="columns"),
    Case("documents", lengths="uneven", mask="documents"),
    Case("documents-allgather", "allgather", "zigzag", mask="documents"),
    Case("documents-ulysses", "ulysses", "zigzag", "uneven", mask="documents"),
    Case("documents-shuffled", layout="shuffled", mask="documents"),
    Case("prefix", layout="zigzag", mask="prefix", options={"window": (20, -1)}),
    Case("not-chunks", lengths="uneven", mask="not-chunks"),
    Case("function", lengths="uneven", layout="zigzag", mask="function"),
    Case("function-allgather", "allgather", mask="function"),
    Case("function-ulysses", "ulysses", mask="function"),
    Case("packed", lengths="uneven", mask="packed"),
    Case("packed-causal", layout="zigzag", mask="packed", slopes=True, options={"is_causal": True}),
    Case("packed-allgather", "allgather", "shuffled", mask="packed", options={"window": (4, 2)}),
    Case("packed-ulysses", "ulysses", "zigzag", "uneven", mask="packed"),
    Case("dropout", options={"dropout_p": 0.4}),
    Case("dropout-causal", layout="zigzag", lengths="uneven",
         options={"dropout_p": 0.4, "is_causal": True}),
    Case("dropout-shuffled", layout="shuffled", heads=(4, 2), options={"dropout_p": 0.7}),
    Case("dropout-allgather", "allgather", "zigzag", "uneven",
         options={"dropout_p": 0.4, "window": (9, 0)}),
    Case("dropout-ulysses", "ulysses", "zigzag", "uneven", options={"dropout_p": 0.4}),
    Case("dropout-bf16-allgather", "allgather", "shuffled", dtype=torch.bfloat16,
         options={"dropout_p": 0.4, "is_causal": True}),
)  # fmt: skip


def generator(case: Case, rank: int = 0) -> dict[str, torch.Generator]:
    """The argument of dropout, different on each rank; rank 0's is used."""
    if "dropout_p" not in case.options:
        return {}
    seed = zlib.crc32(case.name.encode()) + rank
    return {"generator": torch.Generator().manual_seed(seed)}


@functools.cache
def whole(case: Case) -> dict[str, Tensor]:
    """The tensors of the whole sequence, and the gradients of the results."""
    draw = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(case.dtype)

    (heads, kv_heads), (width, value_width) = case.heads, case.widths
    found = {
        "query": normal(B, heads, L, width),
        "key": normal(B, kv_heads, L, width),
        "value": normal(B, kv_heads, L, value_width),
    }
    if case.attn_mask == "added":
        found["attn_mask"] = normal(1, heads, L, L)
    elif case.attn_mask == "columns":
        found["attn_mask"] = normal(B, 1, 1, L)
    elif case.attn_mask:
        visible = torch.rand(B, 1, L, L, generator=draw) < 0.5
        if case.attn_mask == "hidden":
            visible[:, :, 7:23] = False
        found["attn_mask"] = visible
    if case.sinks:
        found["sinks"] = normal(heads).float()
        if case.sinks == "infinite":
            found["sinks"][:2] = torch.tensor([torch.inf, -torch.inf])
    if case.slopes:
        found["alibi_slopes"] = torch.rand(heads, generator=draw)
    found["grad_out"] = normal(B, heads, L, value_width)
    found["grad_lse"] = normal(B, heads, L).float()
    if case.poisoned:
        for name in ("key", "value"):
            found[name][:, :, -1] = torch.nan
        # Its own query sees it, so that row has no gradient to compare.
        found["query"], found["grad_out"] = found["query"][:, :, :-1], found["grad_out"][:, :, :-1]
        found["grad_lse"] = found["grad_lse"][:, :, :-1]
    return found


def layout_of(case: Case, ranks: int) -> Layout:
    """Which positions each rank holds."""
    lengths = LENGTHS[case.lengths](ranks)
    if case.layout == "contiguous":
        return Layout.contiguous(lengths)
    if case.layout == "zigzag":
        return Layout.zigzag(lengths)
    order = list(range(L))[::-1]
    if case.layout == "shuffled":  # in pieces of four, so that runs are longer than a row
        pieces = [order[::-1][n : n + 4] for n in range(0, L, 4)]
        random.Random(0).shuffle(pieces)
        order = [n for piece in pieces for n in piece]
    return Layout.of_positions(torch.tensor(order).split(lengths))


def results_of(
    case: Case, attend: Callable[..., Any], tensors: dict[str, Tensor], **more: Any
) -> dict[str, Tensor]:
    """Results and gradients; ``tensors`` has the gradients of the results too."""
    tensors = tensors.copy()
    grads = [tensors.pop(name) for name in ("grad_out", "grad_lse")]
    leaves = {
        name: x.detach().requires_grad_()
        for name, x in tensors.items()
        if name in DIFFERENTIATED and x.is_floating_point()
        if name != "alibi_slopes" or case.slopes == "differentiated"
    }
    is_grouped = case.heads[0] != case.heads[1]
    results = attend(
        **tensors | leaves, **case.options, **more, enable_gqa=is_grouped, return_lse=True
    )
    grads = [grad.to(x.dtype) for grad, x in zip(grads, results, strict=True)]
    gradients = torch.autograd.grad(results, list(leaves.values()), grads)
    found = {name: x.detach() for name, x in zip(("out", "lse"), results, strict=True)}
    return found | {f"grad_{name}": x for name, x in zip(leaves, gradients, strict=True)}


def definition(case: Case) -> dict[str, Tensor]:
    """The results and gradients of one process in float64, as single operations of PyTorch."""
    given = {n: x.double() if x.is_floating_point() else x for n, x in whole(case).items()}
    hidden = ("key", "value") if case.poisoned else ()  # the last key, which no query can see
    given |= {name: given[name][:, :, :-1] for name in hidden}
    mask = MASKS[case.mask]() if case.mask else None
    with as_operations():
        found = results_of(
            case, fastattn.scaled_dot_product_attention, given, **generator(case), mask=mask
        )
    for name in hidden:
        found[f"grad_{name}"] = torch.nn.functional.pad(found[f"grad_{name}"], (0, 0, 0, 1))
    return found


def shard(case: Case, rank: int, ranks: int) -> dict[str, Tensor]:
    """This rank's arguments and the gradients of its results."""
    every = whole(case)
    own = layout_of(case, ranks).positions(rank)
    rows = own[own < every["query"].shape[2]]
    found = {}
    for name, x in every.items():
        if name in ("query", "grad_out", "grad_lse"):
            found[name] = x[:, :, rows]
        elif name in ("key", "value"):
            found[name] = x[:, :, own]
        elif name == "attn_mask" and x.shape[2] > 1:
            found[name] = x[:, :, rows]
        else:
            found[name] = x.clone()
    return found


def call(case: Case, rank: int, ranks: int) -> dict[str, Tensor]:
    """The results and gradients of one rank."""
    layout: Any = case.layout
    if layout not in ("contiguous", "zigzag"):
        layout = layout_of(case, ranks)
        layout = layout if case.lengths == "even" else layout.positions(rank)
    packed = STARTS if case.mask == "packed" else None
    mask = MASKS[case.mask]() if case.mask and packed is None else None
    with fastattn.use_backend(case.backend) if case.backend else contextlib.nullcontext():
        return results_of(
            case,
            fastattn.distributed.attention,
            shard(case, rank, ranks),
            **generator(case, rank),
            method=case.method,
            layout=layout,
            mask=mask,
            cu_seqlens=packed,
        )


def run_cases(cases: Sequence[Case] = CASES) -> dict[str, Results | str]:
    return run_twice(call, [case for case in cases if case.fits(dist.get_world_size())])


def joined(case: Case, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of the whole sequence, joined from the ranks' results."""
    ranks = len(parts)
    layout = layout_of(case, ranks)
    shapes = {f"grad_{n}": x.shape for n, x in whole(case).items()}
    found: dict[str, Tensor] = {}
    for name in parts[0]:
        summed = name in ("grad_sinks", "grad_alibi_slopes")
        summed |= name == "grad_attn_mask" and shapes[name][2] == 1
        if summed:
            found[name] = torch.stack([part[name] for part in parts]).sum(0)
            continue
        like = parts[0][name]
        length = L if name in ("grad_key", "grad_value") else whole(case)["query"].shape[2]
        total = like.new_full((*like.shape[:2], length, *like.shape[3:]), torch.nan)
        for rank, part in enumerate(parts):
            own = layout.positions(rank)
            total[:, :, own[own < length]] = part[name]
        found[name] = total
    return found


REFERENCE_CASES = (
    Case(
        "reference", backend="reference", lengths="uneven", sinks=True, options={"is_causal": True}
    ),
    Case("reference-mask", backend="reference", layout="zigzag", attn_mask="added"),
)


def run_reference_cases() -> dict[str, Results | str]:
    return run_cases(REFERENCE_CASES)


def _random_cases() -> Iterator[Case]:
    """Any options that fit each other."""
    sizes = {
        "method": ["ring", "allgather", "ulysses", "auto"],
        "layout": ["contiguous", "zigzag", "shuffled", "reversed"],
        "lengths": list(LENGTHS),
        "heads": [(4, 4), (4, 2), (12, 12), (12, 4)],
        "widths": [(8, 8), (16, 5)],
    }
    options = {
        "options": [
            *({"is_causal": True}, {"window": (9, 3)}, {"window": (-1, 0)}, {"softcap": 2.0}),
            *({"dropout_p": 0.4}, {"window": (30, 4), "softcap": 2.0, "dropout_p": 0.4}),
            *({"is_causal": True, "dropout_p": 0.4}, {"is_causal": True, "softcap": 2.0}),
        ],
        "dtype": [torch.bfloat16] * 4,
        "mask": list(MASKS),
        "attn_mask": ["bool", "added", "hidden", "columns"],
        "sinks": [True] * 4,
        "slopes": [True, "differentiated"] * 2,
    }
    for case in drawn(Case("random"), 60, sizes, options):
        alone = not (case.attn_mask and (case.mask or "is_causal" in case.options))
        if alone and (case.heads[0] == 4 or not case.mask):
            yield case


RANDOM_CASES = tuple(_random_cases())


def run_random_cases() -> dict[str, Results | str]:
    return run_cases(RANDOM_CASES)
