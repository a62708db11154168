"""Modules on one rank's rows, and on one process: outputs, gradients of inputs and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from distributed_faults import message_of
from torch import Tensor, nn

import fastattn
from fastattn import masks
from fastattn.distributed import Layout

Pairs = list[tuple[str, Tensor, Tensor]]
E, H, L = 8, 2, 14
LENGTHS = {1: [14], 2: [9, 5], 3: [6, 0, 8]}
MEMORY = {1: [9], 2: [3, 6], 3: [4, 4, 1]}


def made(module: nn.Module) -> nn.Module:
    """The module in float64, the same on all ranks."""
    draw = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        new = torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 3
        parameter.data = new
    return module.double()


def drawn(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def compared(
    name: str,
    module: nn.Module,
    call: Callable[..., Tensor],
    inputs: list[tuple[Tensor, Tensor]],
    rows: Tensor,
    **context: Any,
) -> Pairs:
    """The results of ``call(inputs, rows)``, and of it on one process.

    Each input [2, L, E] comes with the rows of this rank.
    """
    parameters = list(module.parameters())

    def computed(tensors: list[Tensor], at: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = call(leaves, at)
        grad = drawn(2, L, E) if at is None else drawn(2, L, E)[:, at]
        return out, torch.autograd.grad(out, [*leaves, *parameters], grad)

    want, wanted = computed([x for x, _ in inputs], None)
    module.context_parallel(**context)  # type: ignore[operator]
    out, grads = computed([x[:, at] for x, at in inputs], rows)
    module.context_parallel(enabled=False)  # type: ignore[operator]
    again, _ = computed([x for x, _ in inputs], None)
    pairs = [(f"{name}: out", out, want[:, rows]), (f"{name}: afterwards", again, want)]
    for n, (_, at) in enumerate(inputs):
        pairs.append((f"{name}: gradient of input {n}", grads[n], wanted[n][:, at]))
    for n in range(len(inputs), len(grads)):
        total = grads[n].contiguous()
        dist.all_reduce(total)
        pairs.append((f"{name}: gradient of parameter {n}", total, wanted[n]))
    return pairs


def of_rows(x: Tensor, at: Tensor | None, dim: int) -> Tensor:
    """The rows of a rank; all rows without `at`."""
    return x if at is None else x.index_select(dim, at)


def run_modules() -> Pairs:
    """Pairs of results on all ranks and on one, for every module."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pairs: Pairs = []
    x, memory = drawn(2, L, E), drawn(2, 9, E)
    padding = torch.zeros(2, L, dtype=torch.bool)
    padding[0, 5:8] = padding[1, 12:] = True
    added = drawn(L, L)
    at_memory = Layout.contiguous(MEMORY[ranks]).positions(rank)
    for layout in ("contiguous", "zigzag"):
        at = getattr(Layout, layout)(LENGTHS[ranks]).positions(rank)
        mha: Any = made(fastattn.MultiheadAttention(E, H, batch_first=True))

        def padded(inputs: list[Tensor], rows: Tensor | None, mha: Any = mha) -> Tensor:
            kept = of_rows(padding, rows, 1)
            return mha(*inputs * 3, key_padding_mask=kept, need_weights=False)[0]

        def biased(inputs: list[Tensor], rows: Tensor | None, mha: Any = mha) -> Tensor:
            mask = of_rows(added, rows, 0)
            blocks = masks.causal() | masks.prefix_lm(3)
            return mha(*inputs * 3, attn_mask=mask, mask=blocks, need_weights=False)[0]

        pairs += compared(f"{layout} padded", mha, padded, [(x, at)], at, layout=layout)
        pairs += compared(
            f"{layout} biased", mha, biased, [(x, at)], at, layout=layout, method="ring"
        )
    zigzag = Layout.zigzag(LENGTHS[ranks])
    at = zigzag.positions(rank)
    layer = fastattn.nn.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True)
    encoder: Any = made(fastattn.nn.TransformerEncoder(layer, 2)).eval()

    def encoded(inputs: list[Tensor], rows: Tensor | None) -> Tensor:
        kept = of_rows(padding, rows, 1)
        with torch.no_grad():  # where padding would be packed
            encoder(inputs[0], src_key_padding_mask=kept)
        return encoder(inputs[0], src_key_padding_mask=kept, is_causal=True)

    pairs += compared("encoder", encoder, encoded, [(x, at)], at, layout=zigzag)
    both: Any = made(fastattn.nn.Transformer(E, H, 1, 1, 16, 0.0, batch_first=True))

    def translated(inputs: list[Tensor], rows: Tensor | None) -> Tensor:
        return both(*inputs, tgt_is_causal=True)

    at = Layout.contiguous(LENGTHS[ranks]).positions(rank)
    inputs = [(memory, at_memory), (x, at)]
    return pairs + compared("transformer", both, translated, inputs, at)


def messages() -> dict[str, str]:
    """The errors of unsupported calls, on one rank."""
    x = torch.ones(1, 3, E)

    mha: Any = fastattn.MultiheadAttention(E, H, batch_first=True)
    mha.context_parallel()
    return {
        "weights": message_of(lambda: mha(x, x, x)),
        "method": message_of(lambda: mha.context_parallel(method="tree")),
        "layout": message_of(lambda: mha.context_parallel(layout=[1])),
        "add_zero_attn": message_of(
            lambda: fastattn.MultiheadAttention(E, H, add_zero_attn=True).context_parallel()
        ),
        "tokens": message_of(
            lambda: fastattn.nn.Transformer(E, H, 1, 1, 16, vocab_size=9).context_parallel()
        ),
        "cache": message_of(_with_cache),
    }


def _with_cache() -> None:
    """A call that context parallelism refuses."""
    layer = fastattn.nn.TransformerDecoderLayer(E, H, 16, batch_first=True)
    decoder = fastattn.nn.TransformerDecoder(layer, 1).context_parallel()
    x = torch.ones(1, 3, E)
    decoder(x, x, tgt_is_causal=True, cache=decoder.new_cache())
