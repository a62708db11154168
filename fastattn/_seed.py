"""The dropout seed of a call, which a compiled backward must not draw again.

The compiler may recompute parts of the forward in the backward to save memory, for example if
``torch._functorch.config.activation_memory_budget`` is below 1. A recomputed draw would give
another seed, and gradients of other weights than the output's. In a graph that may recompute, the
draw is therefore a separate operator, ``fastattn::seed``, marked as part of a checkpointed region.
The compiler reruns a marked random operator with the generator's state of the forward, whatever
the budget. It would replace ``torch.randint`` by its own draws, which lose the mark.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fastattn import compat


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """The dropout seed of one call, from ``generator`` or PyTorch's default generator."""
    if torch.compiler.is_dynamo_compiling():
        seed: Tensor = torch.ops.fastattn.draw_seed(device=device)
        return seed
    return _drawn(device, generator)


def _drawn(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device, generator=generator)


# --- the operators of compiled code ---------------------------------------------------------------

_library = torch.library.Library("fastattn", "FRAGMENT")
_calls = itertools.count()


def _draw(*, device: torch.device) -> Tensor:
    """Draw where the compiler has split ``draw_seed`` into its parts."""
    if not compat.forward_may_run_again():
        return _drawn(device)
    # The compiler merges equal calls of an operator, so each has a number.
    seed: Tensor = torch.ops.fastattn.seed(call=next(_calls), device=device)
    compat.run_again_with_same_state()
    return seed


def _seed(*, call: int, device: torch.device) -> Tensor:
    return _drawn(device)


def _fake_seed(*, call: int, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


_tags = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
_library.define("draw_seed(*, Device device) -> Tensor", tags=_tags)
_library.impl("draw_seed", _draw)  # the compiler splits an operator without a dispatch key
_library.define("seed(*, int call, Device device) -> Tensor", tags=_tags)
# Without a tensor among the arguments, the dispatcher calls this key first.
_library.impl("seed", _seed, "BackendSelect")
torch.library.register_fake("fastattn::seed", _fake_seed, lib=_library)
