"""Memory hops and Hopfield retrieval on one rank's rows, and on one process."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from distributed_runs import as_operations, run_twice
from torch import Tensor

import fastattn

N, D = 12, 6
LENGTHS = {1: [12], 2: [9, 3], 3: [7, 0, 5]}
# The dimension of an argument or result that has the rows; the others are the same on all ranks.
ROWS = {"in_memory": -2, "out_memory": -2, "stored": -2, "projection": -2}
ROWS |= {"memory_mask": -1, "memory_bias": -1, "attn_mask": -1, "weights": -1}

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    function: str  # of fastattn and of fastattn.distributed
    shapes: Shapes  # of float arguments
    options: dict[str, Any] = field(default_factory=dict)
    mask: tuple[str, tuple[int, ...], tuple[int, ...]] | None = None  # name, shape, hidden index
    dtype: torch.dtype = torch.float32
    poisoned: bool = False  # NaN in the last row, which the mask hides
    constant: tuple[str, ...] = ()  # without a gradient

    @property
    def results(self) -> list[str]:
        found = ["out"]
        found += ["weights"] if self.options.get("need_weights") else []
        return found + (["steps"] if self.options.get("need_steps") else [])


HOPS = functools.partial(Case, function="memory_hop_attention")
RETRIEVE = functools.partial(Case, function="hopfield_retrieve")

CASES = (
    HOPS("hops", shapes={"query": (3, D), "in_memory": (3, N, D)}),
    HOPS(
        "hops-shared",
        shapes={
            "query": (3, 2, D),
            "in_memory": (1, N, D),
            "out_memory": (1, N, D),
            "hop_proj": (D, D),
            "memory_bias": (3, 2, N),
        },
        options={"hops": 3, "activation": "tanh", "scale": 0.7, "need_weights": True},
        mask=("memory_mask", (3, N), (1,)),
    ),
    HOPS(
        "hops-stack",
        shapes={"query": (3, D), "in_memory": (3, 3, N, D), "hop_proj": (2, D, D)},
        options={"hops": 2, "activation": "relu", "need_weights": True},
        mask=("memory_mask", (3, 2, N), (2, 1)),
        poisoned=True,
    ),
    HOPS(
        "hops-half-shared",
        shapes={"query": (3, 2, D), "in_memory": (1, N, D), "out_memory": (3, 2, N, D)},
        options={"hops": 2},
        constant=("query", "in_memory"),
    ),
    HOPS(
        "hops-linear",
        shapes={"query": (3, 2, D), "in_memory": (3, N, D), "memory_bias": (N,)},
        options={"hops": 2, "normalize": "none", "scale": 0.2, "need_weights": True},
        mask=("memory_mask", (3, 2, N), (0,)),
        poisoned=True,
    ),
    HOPS(
        "hops-linear-bf16",
        shapes={"query": (3, D), "in_memory": (3, N, D), "memory_bias": (3, N)},
        options={"hops": 2, "normalize": "none", "scale": 0.2},
        dtype=torch.bfloat16,
    ),
    HOPS(
        "hops-bf16",
        shapes={"query": (3, D), "in_memory": (1, N, D), "hop_proj": (D, D)},
        options={"hops": 3, "need_weights": True},
        dtype=torch.bfloat16,
    ),
    HOPS(
        "hops-fp64",
        shapes={"query": (3, D), "in_memory": (3, N, D)},
        options={"hops": 3, "activation": "sigmoid"},
        mask=("memory_mask", (N,), ()),
        dtype=torch.float64,
    ),
    RETRIEVE(
        "retrieve",
        shapes={"state": (4, D), "stored": (N, D)},
        options={"beta": 1.5, "need_steps": True},
        dtype=torch.float64,
    ),
    RETRIEVE(
        "retrieve-shared",
        shapes={
            "state": (2, 3, 4, D),
            "stored": (1, 3, N, D),
            "projection": (1, 3, N, 5),
            "beta": (3,),
        },
        options={"update_steps_max": 2, "update_steps_eps": 0.0, "need_weights": True},
        mask=("attn_mask", (2, 1, 4, N), (1, 0, 2)),
    ),
    RETRIEVE(
        "retrieve-added",
        shapes={"state": (2, 4, D), "stored": (2, N, D), "attn_mask": (4, N)},
        options={"update_steps_max": 3, "update_steps_eps": 0.0, "stop": "head"},
    ),
    RETRIEVE(
        "retrieve-one-step",
        shapes={"state": (2, 3, 4, D), "stored": (2, 3, N, D)},
        options={"update_steps_max": 2, "update_steps_eps": 0.0, "grad": "one_step"},
        mask=("attn_mask", (4, N), (3,)),
        poisoned=True,
        constant=("state",),
    ),
    RETRIEVE(
        "retrieve-implicit",
        shapes={"state": (2, 3, 4, D), "stored": (2, 3, N, D), "projection": (2, 3, N, 5)},
        options={"beta": 0.3, "update_steps_eps": 1e-9, "grad": "implicit", "need_steps": True},
        mask=("attn_mask", (4, N), (3,)),
        dtype=torch.float64,
        poisoned=True,
    ),
    RETRIEVE(  # some queries are not at a strict minimum, and are unrolled
        "retrieve-implicit-unrolled",
        shapes={"state": (9, D), "stored": (N, D), "beta": ()},
        options={"update_steps_max": 6, "update_steps_eps": 1e-9, "grad": "implicit"},
        dtype=torch.float64,
    ),
    RETRIEVE(
        "retrieve-dropout",
        shapes={"state": (2, 3, 4, D), "stored": (1, 3, N, D), "projection": (1, 3, N, 5)},
        options={"update_steps_max": 1, "dropout_p": 0.4, "need_weights": True},
        mask=("attn_mask", (2, 1, 4, N), (1, 0, 2)),
    ),
    RETRIEVE(
        "retrieve-attention",
        shapes={"state": (4, D), "stored": (N, D), "projection": (N, 3)},
        options={"update_steps_max": 0, "need_weights": True, "need_steps": True},
        dtype=torch.bfloat16,
    ),
)


@functools.cache
def whole(case: Case) -> dict[str, Tensor]:
    """The tensors of all ranks."""
    draw = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    found = {
        name: torch.randn(shape, generator=draw, dtype=torch.float64).to(case.dtype)
        for name, shape in case.shapes.items()
    }
    if "beta" in found:
        found["beta"] = found["beta"].abs() + 0.5
    if case.mask is not None:
        name, shape, hidden = case.mask
        found[name] = torch.rand(shape, generator=draw) < 0.6
        if hidden:
            found[name][hidden] = False
        if case.poisoned:
            found[name][..., -1] = False
            for memory in ("in_memory", "out_memory", "stored", "projection"):
                if memory in found:
                    found[memory][..., -1, :] = torch.nan
    return found


def shard(x: Tensor, name: str, rank: int, ranks: int) -> Tensor:
    """A rank's part of a tensor."""
    dim = ROWS.get(name)
    if dim is None or x.shape[dim] != N:
        return x.clone()
    return x.split(LENGTHS[ranks], dim)[rank].clone()


def gradient(case: Case, name: str, like: Tensor) -> Tensor:
    """The gradient of a whole result."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {name}".encode()))
    return torch.randn(like.shape, generator=draw, dtype=torch.float64).to(case.dtype)


def computed(
    case: Case,
    tensors: dict[str, Tensor],
    function: Callable[..., Any],
    of_result: Callable[[Tensor, str], Tensor],
) -> dict[str, Tensor]:
    """Results and gradients; ``of_result`` gives the gradient of a result."""
    given = {
        n: x.requires_grad_(x.is_floating_point() and n not in case.constant)
        for n, x in tensors.items()
    }
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)  # for dropout: rank 0's seed is used
    leaves = {n: x for n, x in given.items() if x.requires_grad}
    found = function(**given, **case.options)
    found = dict(zip(case.results, found if isinstance(found, tuple) else (found,), strict=True))
    outs = {n: x for n, x in found.items() if n != "steps"}
    given_grads = [of_result(x, n) for n, x in outs.items()]
    grads = torch.autograd.grad(
        list(outs.values()), list(leaves.values()), given_grads, allow_unused=True
    )
    results = {n: x.detach() for n, x in found.items()}
    return results | {
        f"grad_{n}": torch.zeros_like(x) if g is None else g
        for (n, x), g in zip(leaves.items(), grads, strict=True)
    }


def call(case: Case, rank: int, ranks: int) -> dict[str, Tensor]:
    """The results and gradients of one rank."""
    tensors = {n: shard(x, n, rank, ranks) for n, x in whole(case).items()}

    def of_result(x: Tensor, name: str) -> Tensor:
        if name in ROWS:
            like = x.new_empty((*x.shape[:-1], N))
            return shard(gradient(case, name, like), name, rank, ranks)
        return gradient(case, name, x)

    return computed(case, tensors, getattr(fastattn.distributed, case.function), of_result)


def definition(case: Case) -> dict[str, Tensor]:
    """One process, in float64, as single operations of PyTorch."""
    tensors = {n: x.double() if x.is_floating_point() else x for n, x in whole(case).items()}
    function = getattr(fastattn, case.function)
    with as_operations():
        return computed(case, tensors, function, lambda x, n: gradient(case, n, x).double())


def joined(case: Case, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of all rows, joined from the ranks' results."""
    found = {}
    for name, first in parts[0].items():
        given = name.removeprefix("grad_")
        shape = whole(case)[given].shape if given in whole(case) else (N,)
        if given in ROWS and shape[ROWS[given]] == N:
            found[name] = torch.cat([part[name] for part in parts], ROWS[given])
            continue
        assert all(torch.equal(part[name], first) for part in parts), f"{name} differs by rank"
        found[name] = first
    return found


def run_cases() -> dict[str, dict[str, Tensor] | str]:
    return run_twice(call, CASES)
