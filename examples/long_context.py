"""Train a small decoder on one sequence whose rows are on several ranks.

    torchrun --nproc-per-node 4 examples/long_context.py --limit 100
    python examples/long_context.py --limit 100            # one rank: the sequence does not fit
    python examples/long_context.py                        # without the limit: the same losses

The sequence is the text of Python's own standard library, as bytes; the model predicts the next
byte. Each rank has some rows of the sequence in the zigzag layout, which balances causal attention,
and every activation of these rows alone. Attention is to the keys of all ranks
(docs/distributed.md). The gradients of the parameters are summed over the ranks, so all ranks make
the same step.

--limit is how many MiB a rank may allocate beyond what it has after the imports (RLIMIT_DATA).
--checkpoint keeps model and optimizer: an interrupted run resumes, on any number of ranks.
The output of one rank and two steps:

    16384 bytes on 1 ranks, 0 steps done
    step    1 loss 5.72164  ... s
    step    2 loss 5.21218  ... s
    peak resident memory: 665 MiB
    of which before the first step: 378 MiB
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Checkpoint, shown
from ranks import group, limit_memory, peaks_of_all
from torch import Tensor, nn
from torch.nn import functional as F

import fastattn
from fastattn.distributed import Layout

SYMBOLS = 256


def text(length: int) -> Tensor:
    """The first bytes of the modules of the standard library, uint8 [length]."""
    data = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(data) >= length:
            break
        data += path.read_bytes()
    if len(data) < length:
        raise SystemExit(f"--length must be less than {len(data)}, the bytes there are")
    return torch.frombuffer(data[:length], dtype=torch.uint8)


class Decoder(nn.Module):
    """Bytes at positions -> logits of the next bytes."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, width)
        layer = fastattn.nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = fastattn.nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.output = nn.Linear(width, SYMBOLS)

    def forward(self, symbols: Tensor, positions: Tensor) -> Tensor:
        x = fastattn.sinusoidal_encoding(self.embedding(symbols), positions=positions)
        return self.output(self.layers(x, is_causal=True))


def train(options: argparse.Namespace) -> list[float]:
    """The loss of each step, on this rank of the group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lengths = [len(part) for part in torch.arange(options.length).tensor_split(ranks)]
    layout = Layout.zigzag(lengths)
    positions = layout.positions(rank)
    data = text(options.length + 1).long()
    symbols, targets = data[positions][None], data[positions + 1]  # the shift before the cut

    torch.manual_seed(options.seed)  # the same parameters on all ranks
    model = Decoder(options.width, options.heads, options.layers)
    model.layers.context_parallel(method=options.method, layout=layout)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    recipe = {
        name: getattr(options, name) for name in ("length", "width", "heads", "layers", "seed")
    }
    checkpoint = Checkpoint(options.checkpoint, recipe)
    state = checkpoint.states.get("decoder", {"losses": []})
    losses: list[float] = state["losses"]
    if losses:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    if options.limit:
        limit_memory(options.limit)
    if rank == 0:
        print(f"{options.length} bytes on {ranks} ranks, {len(losses)} steps done", flush=True)
    before, steps = peaks_of_all(), range(len(losses), options.steps)
    for step in shown(steps, "training") if rank == 0 else steps:
        start = time.perf_counter()
        loss = step_on(model, symbols, targets, positions, options.length)
        optimizer.step()
        losses.append(loss)
        if rank == 0:
            seconds = time.perf_counter() - start
            print(f"step {step + 1:4} loss {loss:.5f} {seconds:7.2f} s", flush=True)
            saved = {"losses": losses, "model": model.state_dict()}
            checkpoint.write("decoder", saved | {"optimizer": optimizer.state_dict()})
    peaks = peaks_of_all()
    if rank == 0:
        print("peak resident memory:", ", ".join(f"{peak:.0f} MiB" for peak in peaks))
        print(f"of which before the first step: {max(before):.0f} MiB")
    return losses


def step_on(
    model: Decoder, symbols: Tensor, targets: Tensor, positions: Tensor, length: int
) -> float:
    """Leave the gradients of the mean loss of all ranks in the parameters, and return the loss."""
    model.zero_grad()
    logits = model(symbols, positions)[0]
    loss_of_rank = F.cross_entropy(logits, targets, reduction="sum") / length
    loss_of_rank.backward()
    flat = torch.cat([loss_of_rank.detach()[None], *(p.grad.flatten() for p in model.parameters())])
    dist.all_reduce(flat)  # each rank has the part of its rows
    loss, *grads = flat.split([1, *(p.numel() for p in model.parameters())])
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad.view_as(parameter)
    return float(loss)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=16384, help="bytes of the sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--method", default="auto", help="of fastattn.distributed.attention")
    parser.add_argument("--limit", type=float, default=0, help="MiB that a rank may allocate")
    parser.add_argument("--checkpoint", type=Path, help="a run goes on from it")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train on this rank; a rank whose rows do not fit ends with advice."""
    options: Any = parsed(arguments)
    with group():
        try:
            return train(options)
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            raise SystemExit(
                f"rank {dist.get_rank()} cannot hold its rows in {options.limit:g} MiB: start more "
                "ranks"
            ) from error


if __name__ == "__main__":
    main()
