"""Memory hops as a differentiable operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastattn._derivative import Derivative
from fastattn._flops import attention_flops, product_flops
from fastattn.backends.primitives import MemoryHopBackwardOptions, MemoryHopOptions
from fastattn.batching import fold, one_by_one, size_of_batch, unfold
from fastattn.library import Operator


def _vmap_backward(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Fold the mapped dimension into the batch, unless a tensor shared by the batch needs a
    gradient per example, or a memory without a batch would be repeated."""
    *tensors, options, backend = args
    n, needed = info.batch_size, options.needed
    query, in_memory, out_memory, hop_proj, _, bias = tensors[2:8]
    batch = size_of_batch(query, in_dims[2])
    memories = [
        x is None or (needed >> bit & 1 and size_of_batch(x, in_dims[place]) == batch)
        for bit, place, x in ((1, 3, in_memory), (2, 4, out_memory), (4, 7, bias))
    ]
    if hop_proj is not None or not all(memories):
        return one_by_one(hop_attention.backward, n, in_dims, args)
    folded = [fold(x, dim, n, batch) for x, dim in zip(tensors, in_dims, strict=True)]
    results = hop_attention.backward.dispatched(*folded, options, backend)
    differentiated = (query, in_memory, out_memory, hop_proj, bias)
    pairs = zip(results, differentiated, strict=True)
    return tuple(g.expand(n, 0) if x is None else unfold(g, n) for g, x in pairs), (0,) * 5


def _work(
    query: Tensor, in_memory: Tensor, hop_proj: Tensor | None, options: MemoryHopOptions
) -> tuple[int, int]:
    """The number of multiplications with the rows of the memories and of ``hop_proj``."""
    states = query.numel() * options.hops  # [B, Q, K, D]
    return states * in_memory.shape[-2], 0 if hop_proj is None else states * query.shape[-1]


def _flops(
    _: Any,
    query: Tensor,
    in_memory: Tensor,
    out_memory: Any,
    hop_proj: Tensor | None,
    *rest: Any,
    backward: bool = False,
) -> int:
    of_rows, of_projection = _work(query, in_memory, hop_proj, rest[-1])
    products = product_flops(of_projection, backward=backward)
    return attention_flops(of_rows, 1, 1, backward=backward) + products


class _Backward(Operator):
    def lifted(self, tensors: Sequence[Any]) -> list[Any]:
        """Add the dimensions that masks and biases of a plan may lack."""
        results = list(tensors)
        query = results[self.place_of("query")]
        for n in (self.place_of("memory_mask"), self.place_of("memory_bias")):
            if results[n] is not None:
                results[n] = of_four_dimensions(results[n], query)
        return results


def of_four_dimensions(x: Tensor, query: Tensor) -> Tensor:
    """A mask or a bias as [B|1, Q|1, K|1, N|1]."""
    if x.dim() == 4:
        return x
    if x.dim() == 3:
        return x.unsqueeze(2 if query.dim() == 3 else 1)
    return x[:, None, None] if x.dim() == 2 else x[None, None, None]


hop_attention = Operator(
    "memory_hop_attention",
    "query: B D / B Q D; in_memory: B|1 N D / B|1 * N D; out_memory?: B|1 N D / B|1 * N D; "
    "hop_proj?: D D / * D D; memory_mask?: B|1 Q|1 *|1 N|1; memory_bias?: B|1 Q|1 *|1 N|1",
    "out: B D / B Q D; trace: B * D / B Q * D; stats: B K 2 / B Q K 2; weights: B K N / B Q K N",
    options=MemoryHopOptions,
    sizes=lambda options, known: {"K": options.hops, "*": 2 * options.hops + 1, "2": 2},
    derivative=Derivative(
        grads="out weights",
        # Not the weights, so that the saved tensors do not grow with the memory.
        reads="query in_memory out_memory hop_proj memory_mask memory_bias trace stats",
        gives="query in_memory out_memory hop_proj memory_bias",
        options=MemoryHopBackwardOptions,
        vmap=_vmap_backward,
        operator=_Backward,
        keeps="kept",
    ),
    flops=_flops,
    checked_by=("cpu",),
)
