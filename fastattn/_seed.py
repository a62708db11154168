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
    return _random_seed(device, generator)


def _random_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device, generator=generator)


# --- the operators of compiled code ---------------------------------------------------------------

_library = torch.library.Library("fastattn", "FRAGMENT")
_calls = itertools.count()


def _decompose_draw_seed(*, device: torch.device) -> Tensor:
    """The decomposition of ``draw_seed``, which the compiler traces in place of the operator."""
    if not compat.may_recompute_forward():
        return _random_seed(device)
    # The compiler merges calls with equal arguments, so each call has its own number.
    seed: Tensor = torch.ops.fastattn.seed(call=next(_calls), device=device)
    compat.keep_random_state_of_last_node()
    return seed


def _run_seed(*, call: int, device: torch.device) -> Tensor:
    return _random_seed(device)


def _fake_seed(*, call: int, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


_tags = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
_library.define("draw_seed(*, Device device) -> Tensor", tags=_tags)
# The default key, CompositeImplicitAutograd, makes the compiler decompose the operator.
_library.impl("draw_seed", _decompose_draw_seed)
_library.define("seed(*, int call, Device device) -> Tensor", tags=_tags)
# Without a tensor among the arguments, the dispatcher calls this key first.
_library.impl("seed", _run_seed, "BackendSelect")
torch.library.register_fake("fastattn::seed", _fake_seed, lib=_library)
