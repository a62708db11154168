"""The table of launches: (architecture, kernel, bits of an element, width of a row) -> tile.

A tile has BM queries and BN keys; a program has ``warps`` warps, and loads ``stages`` tiles ahead.
Nothing is tried out when a kernel is first called. The entries are to compile without a spilled
register and within the chip's shared memory: ``tests/test_triton_aot.py`` holds the commonest to
that, and its slow test all of them. Their speed is unmeasured. ``FASTATTN_TRITON_TABLE`` may name
a JSON file that goes before, of the form
``{architecture: {kernel: {bits: [[width, [BM, BN, warps, stages]], ...]}}}``.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["ARCHITECTURES", "Launch", "choose", "table_of"]


class Launch(NamedTuple):
    BM: int  # queries
    BN: int  # keys
    warps: int
    stages: int

    def q_tiles(self, q_len: int) -> int:
        return -(-q_len // self.BM)

    def k_tiles(self, k_len: int) -> int:
        return -(-k_len // self.BN)

    def tiles(self, q_len: int, k_len: int) -> int:
        return self.q_tiles(q_len) * self.k_tiles(k_len)


# Bound by its tanh: a tile needs no more than enough pairs for its threads.
_ADDITIVE = Launch(16, 32, 4, 1)

# kernel -> bits -> (up to this width, launch), the narrowest first
_Table = dict[str, dict[int, list[tuple[int, Launch]]]]

# Small, so that a short sequence has several tiles: this is for tests.
_INTERPRETER = Launch(32, 32, 4, 1)

_HOPPER: _Table = {
    "forward": {
        16: [
            (64, Launch(128, 64, 8, 3)),
            (128, Launch(128, 64, 8, 3)),
            (256, Launch(128, 32, 8, 2)),
            (512, Launch(32, 32, 8, 2)),
        ],
        32: [
            (64, Launch(32, 32, 4, 2)),
            (128, Launch(32, 32, 8, 2)),
            (256, Launch(32, 16, 8, 1)),
            (512, Launch(16, 16, 8, 1)),
        ],
    },
    "backward_query": {
        16: [
            (64, Launch(64, 64, 8, 2)),
            (128, Launch(64, 64, 8, 2)),
            (256, Launch(32, 32, 8, 1)),
            (512, Launch(16, 32, 8, 1)),
        ],
        32: [
            (64, Launch(32, 32, 8, 1)),
            (128, Launch(32, 16, 8, 1)),
            (256, Launch(16, 16, 8, 1)),
            (512, Launch(16, 16, 8, 1)),
        ],
    },
    "backward_key_value": {
        16: [
            (64, Launch(64, 64, 8, 2)),
            (128, Launch(32, 64, 8, 1)),
            (256, Launch(32, 32, 8, 1)),
            (512, Launch(16, 32, 8, 1)),
        ],
        32: [
            (64, Launch(32, 32, 8, 1)),
            (128, Launch(16, 32, 8, 1)),
            (256, Launch(16, 16, 8, 1)),
            (512, Launch(16, 16, 8, 1)),
        ],
    },
}

_HOPPER["statistics"] = _HOPPER["backward_query"]

# mma.sync keeps its operands in registers, and there is less shared memory.
_AMPERE: _Table = {
    **_HOPPER,
    "forward": {
        16: [
            (64, Launch(64, 64, 8, 3)),
            (128, Launch(64, 64, 8, 2)),
            (256, Launch(32, 32, 8, 2)),
            (512, Launch(16, 32, 8, 1)),
        ],
        32: _HOPPER["forward"][32],
    },
    "backward_query": {
        16: [(64, Launch(64, 32, 8, 2)), *_HOPPER["backward_query"][16][1:]],  # a bias spills at 64
        32: _HOPPER["backward_query"][32],
    },
    "backward_key_value": {
        16: [(64, Launch(32, 32, 4, 1)), *_HOPPER["backward_key_value"][16][1:]],
        32: _HOPPER["backward_key_value"][32],
    },
}

# A wave of 64 lanes: 4 of them leave 512 registers a lane, 8 only 256. 64 KiB of local memory.
_CDNA: _Table = {
    "forward": {
        16: [
            (64, Launch(64, 64, 4, 2)),
            (128, Launch(64, 32, 4, 2)),
            (256, Launch(32, 32, 4, 2)),
            (512, Launch(16, 32, 4, 1)),
        ],
        32: [
            (64, Launch(32, 32, 4, 2)),
            (128, Launch(32, 32, 4, 1)),
            (256, Launch(16, 16, 4, 1)),
            (512, Launch(16, 16, 4, 1)),
        ],
    },
    "backward_query": {
        16: [
            (64, Launch(32, 64, 4, 1)),
            (128, Launch(32, 32, 4, 1)),
            (256, Launch(16, 32, 4, 1)),
            (512, Launch(16, 16, 4, 1)),
        ],
        32: [
            (64, Launch(32, 32, 4, 1)),
            (128, Launch(16, 16, 4, 1)),
            (512, Launch(16, 16, 4, 1)),
        ],
    },
    "backward_key_value": {
        16: [
            (64, Launch(32, 64, 4, 1)),
            (128, Launch(32, 32, 4, 1)),
            (256, Launch(16, 32, 4, 1)),
            (512, Launch(16, 16, 4, 1)),
        ],
        32: [
            (64, Launch(32, 32, 4, 1)),
            (128, Launch(16, 16, 4, 1)),
            (512, Launch(16, 16, 4, 1)),
        ],
    },
}

_CDNA["statistics"] = _CDNA["backward_query"]

# With 8 warps ptxas allots 48 registers to the statistics, and spills 5.
_BLACKWELL: _Table = {
    **_HOPPER,
    "statistics": {
        16: [
            (64, Launch(64, 64, 8, 2)),
            (128, Launch(64, 64, 4, 2)),
            (256, Launch(32, 32, 8, 1)),
            (512, Launch(16, 32, 8, 1)),
        ],
        32: _HOPPER["statistics"][32],
    },
}

ARCHITECTURES: dict[str, _Table] = {
    "sm_80": _AMPERE,
    "sm_90": _HOPPER,
    "sm_100": _BLACKWELL,
    "gfx942": _CDNA,
}


def choose(architecture: str, kernel: str, bits: int, width: int) -> Launch:
    """Return the launch of a kernel for rows of ``width`` elements."""
    if architecture == "interpreter":
        return _INTERPRETER
    if kernel == "additive":
        return _ADDITIVE
    for up_to, launch in table_of(architecture)[kernel][bits]:
        if width <= up_to:
            return launch
    raise ValueError(f"the table of {architecture} has no {kernel} for rows of {width} elements")


@functools.cache
def table_of(architecture: str) -> _Table:
    """The table of an architecture: the user's own, ours, or that of the least of our chips."""
    path = os.environ.get("FASTATTN_TRITON_TABLE")
    table = ARCHITECTURES.get(architecture, ARCHITECTURES["sm_80"])
    if path is None:
        return table
    own = json.loads(Path(path).read_text()).get(architecture, {})
    return table | {
        kernel: {
            int(bits): [(up_to, Launch(*launch)) for up_to, launch in rows]
            for bits, rows in by_bits.items()
        }
        for kernel, by_bits in own.items()
    }
