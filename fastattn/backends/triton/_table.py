"""The table of launches: (architecture, kernel, bits of an element, width of a row) -> tile.

A tile has BM queries and BN keys; a program has ``warps`` warps and loads ``stages`` tiles ahead.
There is no autotuning at the first call of a kernel. The entries must compile without spilled
registers and within the GPU's shared memory: ``tests/triton/test_triton_aot.py`` tests the most
common ones, and its slow test all of them. Their speed is unmeasured. ``FASTATTN_TRITON_TABLE`` may
name a JSON file that takes precedence, of the form
``{architecture: {kernel: {bits: [[width, [BM, BN, warps, stages, greedy]], ...]}}}``, where greedy
is optional; ``python -m fastattn tune --launches`` measures such a table.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["ARCHITECTURES", "Launch", "choose", "table_of", "trying"]


class Launch(NamedTuple):
    BM: int  # queries
    BN: int  # keys
    warps: int
    stages: int
    greedy: int = 0  # 1: the compiler may use all registers; NVIDIA only

    def q_tiles(self, q_len: int) -> int:
        return -(-q_len // self.BM)

    def k_tiles(self, k_len: int) -> int:
        return -(-k_len // self.BN)

    def tiles(self, q_len: int, k_len: int) -> int:
        return self.q_tiles(q_len) * self.k_tiles(k_len)

    def halved(self) -> Launch:
        """Half of the tile, if it is larger than 32 x 32: for options that need more registers."""
        if max(self.BM, self.BN) <= 32:
            return self
        if self.BM > self.BN:
            return self._replace(BM=self.BM // 2)
        return self._replace(BN=self.BN // 2)


# kernel -> bits -> (maximum width, launch), the narrowest first
_Rows = list[tuple[int, Launch]]
_Table = dict[str, dict[int, _Rows]]


def _with(rows: _Rows, changed: dict[int, Launch]) -> _Rows:
    """These rows with some of their launches replaced."""
    return [(up_to, changed.get(up_to, launch)) for up_to, launch in rows]


# Small, so that a short sequence has several tiles; used by tests.
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
            (128, Launch(32, 16, 8, 1)),
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
            (128, Launch(16, 16, 8, 1)),
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
            (64, Launch(32, 32, 4, 1)),
            (128, Launch(16, 32, 8, 1)),
            (256, Launch(16, 16, 8, 1)),
            (512, Launch(16, 16, 8, 1)),
        ],
    },
}

# Rows are the query heads of a key head, 16 or more. Memory bound.
_HOPPER["decode"] = {
    16: [
        (128, Launch(16, 64, 4, 3)),
        (256, Launch(16, 32, 4, 3)),
        (512, Launch(16, 32, 8, 2)),
    ],
    32: [
        (64, Launch(16, 32, 4, 2)),
        (256, Launch(16, 16, 4, 2)),
        (512, Launch(16, 16, 8, 2)),
    ],
}
_HOPPER["decode_rows"] = {
    16: [
        (128, Launch(64, 64, 8, 3)),
        (256, Launch(32, 32, 8, 3)),
        (512, Launch(16, 32, 8, 2)),
    ],
    32: _HOPPER["decode"][32],
}
# A program computes all hops of a tile of queries. Most calls have few queries.
_HOPPER["hops"] = {
    16: [(256, Launch(16, 32, 4, 1))],
    32: [(128, Launch(16, 16, 4, 1, greedy=1)), (256, Launch(16, 16, 8, 1))],
}
_HOPPER["hops_backward"] = {
    16: [(128, Launch(16, 32, 4, 1, greedy=1)), (256, Launch(16, 16, 8, 1))],
    32: [(256, Launch(16, 16, 8, 1))],
}
# A mask needs registers, and so do the values that are summed with it.
_HOPPER["forward_masked"] = {
    16: _with(_HOPPER["forward"][16], {128: Launch(128, 32, 8, 3), 256: Launch(64, 32, 8, 2)}),
    32: _HOPPER["forward"][32],
}
_HOPPER["backward_query_masked"] = {
    16: _with(_HOPPER["backward_query"][16], {128: Launch(64, 32, 8, 2)}),
    32: _HOPPER["backward_query"][32],
}
_HOPPER["backward_key_value_masked"] = {
    16: _with(
        _HOPPER["backward_key_value"][16], {64: Launch(64, 64, 8, 1), 512: Launch(16, 16, 8, 1)}
    ),
    32: _with(_HOPPER["backward_key_value"][32], {64: Launch(32, 32, 8, 1)}),
}
_HOPPER["statistics"] = {
    16: _with(_HOPPER["backward_query"][16], {256: Launch(32, 16, 8, 1)}),
    32: _HOPPER["backward_query"][32],
}
_HOPPER["backward_mask"] = {
    16: _with(_HOPPER["backward_key_value"][16], {256: Launch(16, 32, 4, 1)}),
    32: _HOPPER["backward_key_value_masked"][32],
}
# Bound by tanh: a tile needs only enough pairs for its threads.
_HOPPER["additive"] = {
    16: [(512, Launch(16, 32, 4, 1))],
    32: [(64, Launch(16, 32, 4, 1)), (256, Launch(16, 16, 8, 1)), (512, Launch(16, 16, 16, 1))],
}

# mma.sync keeps its operands in registers, and the GPU has less shared memory.
_AMPERE: _Table = {
    **_HOPPER,
    "forward": {
        16: [
            (64, Launch(64, 64, 8, 3)),
            (128, Launch(64, 64, 8, 2)),
            (256, Launch(32, 32, 8, 2)),
            (512, Launch(16, 32, 8, 1)),
        ],
        32: _with(_HOPPER["forward"][32], {128: Launch(16, 32, 8, 1)}),
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

_AMPERE["forward_masked"] = {
    16: _AMPERE["forward"][16],
    32: _with(_HOPPER["forward"][32], {128: Launch(32, 16, 4, 1)}),
}
_AMPERE["backward_query_masked"] = _AMPERE["backward_query"]
_AMPERE["backward_key_value_masked"] = {
    16: _AMPERE["backward_key_value"][16],
    32: _HOPPER["backward_key_value_masked"][32],
}
_AMPERE["statistics"] = {
    16: _with(_HOPPER["statistics"][16], {128: Launch(64, 32, 8, 2)}),
    32: _HOPPER["statistics"][32],
}

_AMPERE["hops"] = {
    16: _HOPPER["hops"][16],
    32: [(256, Launch(16, 16, 8, 1))],
}

# Waves of 64 lanes: 4 waves leave 512 registers per lane, 8 only 256. 64 KiB of local memory.
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

_CDNA["decode"] = {
    16: [
        (128, Launch(16, 64, 4, 2)),
        (256, Launch(16, 32, 4, 2)),
        (512, Launch(16, 16, 4, 2)),
    ],
    32: [
        (128, Launch(16, 32, 4, 1)),
        (512, Launch(16, 16, 4, 1)),
    ],
}
_CDNA["decode_rows"] = {
    16: [(128, Launch(32, 32, 4, 2)), *_CDNA["decode"][16][1:]],
    32: _CDNA["decode"][32],
}
_CDNA["hops"] = {
    16: [(128, Launch(16, 32, 4, 1)), (256, Launch(16, 16, 4, 1))],
    32: [(128, Launch(16, 32, 4, 1)), (256, Launch(16, 16, 4, 1))],
}
_CDNA["hops_backward"] = _CDNA["hops"]
_CDNA["additive"] = {
    16: [(512, Launch(16, 32, 4, 1))],
    32: [(512, Launch(16, 32, 4, 1))],
}
_CDNA["forward_masked"] = _CDNA["forward"]
_CDNA["backward_query_masked"] = _CDNA["backward_query"]
_CDNA["backward_key_value_masked"] = _CDNA["backward_key_value"]
_CDNA["statistics"] = _CDNA["backward_query"]
_CDNA["backward_mask"] = _CDNA["backward_key_value"]

_BLACKWELL: _Table = {
    **_HOPPER,
    "decode": {
        16: _HOPPER["decode"][16],
        32: _with(_HOPPER["decode"][32], {256: Launch(16, 16, 8, 2)}),
    },
    "decode_rows": {
        16: _HOPPER["decode_rows"][16],
        32: _with(_HOPPER["decode_rows"][32], {256: Launch(16, 16, 8, 2)}),
    },
    "backward_query": {
        16: _with(_HOPPER["backward_query"][16], {512: Launch(16, 16, 8, 1)}),
        32: _HOPPER["backward_query"][32],
    },
    "hops": {
        16: _HOPPER["hops"][16],
        32: [(64, Launch(16, 16, 4, 1)), (128, Launch(16, 16, 2, 1)), (256, Launch(16, 16, 8, 1))],
    },
    "backward_key_value": {
        16: _with(_HOPPER["backward_key_value"][16], {128: Launch(32, 64, 4, 1)}),
        32: _HOPPER["backward_key_value"][32],
    },
    "backward_query_masked": {
        16: _with(_HOPPER["backward_query"][16], {512: Launch(16, 16, 8, 1)}),
        32: _HOPPER["backward_query"][32],
    },
    "backward_key_value_masked": {
        16: _with(
            _HOPPER["backward_key_value_masked"][16],
            {64: Launch(64, 64, 8, 1, greedy=1), 128: Launch(32, 64, 4, 1)},
        ),
        32: _HOPPER["backward_key_value_masked"][32],
    },
    "statistics": {
        16: [
            (64, Launch(64, 64, 8, 2)),
            (128, Launch(64, 64, 4, 2)),
            (256, Launch(16, 32, 8, 1)),
            (512, Launch(16, 32, 4, 1)),
        ],
        32: _HOPPER["statistics"][32],
    },
}


def _greedy(table: _Table, *bits: int) -> _Table:
    """Let ptxas use all registers for elements of these sizes, where it would otherwise spill.

    With 16 bits this concerns the forward kernels and the statistics, with float32 additive
    attention and the backward kernels. For the others ptxas would then take too many registers and
    spill. Entries of the table may set it, too.
    """

    def of_size(kernel: str, size: int, rows: _Rows) -> _Rows:
        forward = kernel.startswith(("forward", "decode")) or kernel == "hops"
        wanted = forward or kernel == "statistics" if size == 16 else not forward
        if size not in bits or not wanted:
            return rows
        return [(up_to, launch._replace(greedy=1)) for up_to, launch in rows]

    return {
        kernel: {size: of_size(kernel, size, rows) for size, rows in of_kernel.items()}
        for kernel, of_kernel in table.items()
    }


ARCHITECTURES: dict[str, _Table] = {
    "sm_80": _greedy(_AMPERE, 32),
    "sm_90": _greedy(_HOPPER, 32),
    "sm_100": _greedy(_BLACKWELL, 16, 32),
    "gfx942": _CDNA,
}


_trials: dict[str, Launch] = {}


@contextlib.contextmanager
def trying(kernel: str, launch: Launch) -> Iterator[None]:
    """Use this launch for a kernel instead of the table's within the block; for measurements."""
    _trials[kernel] = launch
    try:
        yield
    finally:
        del _trials[kernel]


def choose(architecture: str, kernel: str, bits: int, width: int) -> Launch:
    """Return the launch of a kernel for rows of ``width`` elements."""
    if kernel in _trials:
        return _trials[kernel]
    if architecture == "interpreter":
        return _INTERPRETER
    for up_to, launch in table_of(architecture)[kernel][bits]:
        if width <= up_to:
            return launch
    raise ValueError(f"the table of {architecture} has no {kernel} for rows of {width} elements")


@functools.cache
def table_of(architecture: str) -> _Table:
    """The table of an architecture: the user's entries, then ours or those of the nearest GPU.

    Raises ``ValueError`` if the user's file has another form.
    """
    nearest = next((name for name in ARCHITECTURES if name[:-1] == architecture[:-1]), "sm_80")
    if architecture.startswith("gfx"):
        nearest = "gfx942"
    table = ARCHITECTURES.get(architecture, ARCHITECTURES[nearest])
    path = os.environ.get("FASTATTN_TRITON_TABLE")
    if not path:
        return table
    try:
        own = json.loads(Path(path).read_text()).get(architecture, {})
        return table | {
            kernel: table[kernel]
            | {int(bits): _before(rows, table[kernel][int(bits)]) for bits, rows in by_bits.items()}
            for kernel, by_bits in own.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"FASTATTN_TRITON_TABLE: {path} is no table of launches: {error!r}"
        ) from None


def _before(own: list[Any], ours: _Rows) -> _Rows:
    """Rows from a file, then those of our rows that are wider than all of them."""
    rows = sorted((int(up_to), Launch(*map(int, launch))) for up_to, launch in own)
    return rows + [row for row in ours if not rows or row[0] > rows[-1][0]]
