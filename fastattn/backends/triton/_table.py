"""The table of launches: (architecture, kernel, bits of an element, width of a row) -> tile.

A tile has BM queries and BN keys; a program has ``warps`` warps and loads ``stages`` tiles ahead.
There is no autotuning at the first call of a kernel. The entries must compile without spilled
registers and within the GPU's shared memory: ``tests/triton/test_triton_aot.py`` tests the most
common ones, and its slow test all of them. Their speed is unmeasured. ``FASTATTN_TRITON_TABLE`` may
name a JSON file that takes precedence, of the form
``{architecture: {kernel: {bits: [[width, [BM, BN, warps, stages, greedy]], ...]}}}``, where greedy
is optional.
"""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """The sizes of a tile, and the options of the compiler."""

    BM: int  # queries
    BN: int  # keys
    warps: int
    stages: int
    greedy: int = 0  # 1: the compiler may use all registers; NVIDIA only

    def q_tiles(self, q_len: int) -> int:
        """The number of tiles of queries."""
        return -(-q_len // self.BM)

    def k_tiles(self, k_len: int) -> int:
        """The number of tiles of keys."""
        return -(-k_len // self.BN)

    def tiles(self, q_len: int, k_len: int) -> int:
        """The number of tiles of pairs."""
        return self.q_tiles(q_len) * self.k_tiles(k_len)

    def halved(self) -> Launch:
        """The launch with half of the tile, which needs fewer registers; 32 x 32 and less stay."""
        if max(self.BM, self.BN) <= 32:
            return self
        if self.BM > self.BN:
            return self._replace(BM=self.BM // 2)
        return self._replace(BN=self.BN // 2)


# kernel -> bits -> (maximum width, launch), the narrowest first
_Rows = list[tuple[int, Launch]]
_Table = dict[str, dict[int, _Rows]]

# Small, so that a short sequence has several tiles; used by tests.
_INTERPRETER = Launch(32, 32, 4, 1)

# A kernel, then lines of: bits, architectures, and for each maximum width BMxBN,warps,stages. The
# star lets ptxas use all registers where it would otherwise spill; elsewhere it would then take too
# many and spill.
#
# mma.sync of sm_80 keeps its operands in registers, and the GPU has less shared memory. gfx942 has
# waves of 64 lanes, 64 KiB of local memory, and 512 registers a lane with 4 waves, 256 with 8.
_LAUNCHES = """
forward
    16 sm_80              64:64x64,8,3 128:64x64,8,2 256:32x32,8,2 512:16x32,8,1
    16 sm_90              64:128x64,8,3 128:128x64,8,3 256:128x32,8,2 512:32x32,8,2
    16 sm_100             64:128x64,8,3* 128:128x64,8,3* 256:128x32,8,2* 512:32x32,8,2*
    16 gfx942             64:64x64,4,2 128:64x32,4,2 256:32x32,4,2 512:16x32,4,1
    32 sm_80              64:32x32,4,2 128:16x32,8,1 256:32x16,8,1 512:16x16,8,1
    32 sm_90,sm_100       64:32x32,4,2 128:32x16,8,1 256:32x16,8,1 512:16x16,8,1
    32 gfx942             64:32x32,4,2 128:32x32,4,1 256:16x16,4,1 512:16x16,4,1
# A mask takes registers, and so do the biases that are added with it.
forward_masked
    16 sm_80              64:64x64,8,3 128:64x64,8,2 256:32x32,8,2 512:16x32,8,1
    16 sm_90              64:128x64,8,3 128:128x32,8,3 256:64x32,8,2 512:32x32,8,2
    16 sm_100             64:128x64,8,3* 128:128x32,8,3* 256:64x32,8,2* 512:32x32,8,2*
    16 gfx942             64:64x64,4,2 128:64x32,4,2 256:32x32,4,2 512:16x32,4,1
    32 sm_80              64:32x32,4,2 128:32x16,4,1 256:32x16,8,1 512:16x16,8,1
    32 sm_90,sm_100       64:32x32,4,2 128:32x16,8,1 256:32x16,8,1 512:16x16,8,1
    32 gfx942             64:32x32,4,2 128:32x32,4,1 256:16x16,4,1 512:16x16,4,1
# With 16 bits on sm_80 a bias spills at 64 x 64.
backward_query
    16 sm_80              64:64x32,8,2 128:64x64,8,2 256:32x32,8,1 512:16x32,8,1
    16 sm_90              64:64x64,8,2 128:64x64,8,2 256:32x32,8,1 512:16x32,8,1
    16 sm_100             64:64x64,8,2 128:64x64,8,2 256:32x32,8,1 512:16x16,8,1
    16 gfx942             64:32x64,4,1 128:32x32,4,1 256:16x32,4,1 512:16x16,4,1
    32 sm_80,sm_90,sm_100 64:32x32,8,1* 128:16x16,8,1* 256:16x16,8,1* 512:16x16,8,1*
    32 gfx942             64:32x32,4,1 128:16x16,4,1 512:16x16,4,1
backward_query_masked
    16 sm_80              64:64x32,8,2 128:64x64,8,2 256:32x32,8,1 512:16x32,8,1
    16 sm_90              64:64x64,8,2 128:64x32,8,2 256:32x32,8,1 512:16x32,8,1
    16 sm_100             64:64x64,8,2 128:64x64,8,2 256:32x32,8,1 512:16x16,8,1
    16 gfx942             64:32x64,4,1 128:32x32,4,1 256:16x32,4,1 512:16x16,4,1
    32 sm_80,sm_90,sm_100 64:32x32,8,1* 128:16x16,8,1* 256:16x16,8,1* 512:16x16,8,1*
    32 gfx942             64:32x32,4,1 128:16x16,4,1 512:16x16,4,1
statistics
    16 sm_80              64:64x64,8,2 128:64x32,8,2 256:32x16,8,1 512:16x32,8,1
    16 sm_90              64:64x64,8,2 128:64x64,8,2 256:32x16,8,1 512:16x32,8,1
    16 sm_100             64:64x64,8,2* 128:64x64,4,2* 256:16x32,8,1* 512:16x32,4,1*
    16 gfx942             64:32x64,4,1 128:32x32,4,1 256:16x32,4,1 512:16x16,4,1
    32 sm_80,sm_90,sm_100 64:32x32,8,1* 128:16x16,8,1* 256:16x16,8,1* 512:16x16,8,1*
    32 gfx942             64:32x32,4,1 128:16x16,4,1 512:16x16,4,1
backward_key_value
    16 sm_80              64:32x32,4,1 128:32x64,8,1 256:32x32,8,1 512:16x32,8,1
    16 sm_90              64:64x64,8,2 128:32x64,8,1 256:32x32,8,1 512:16x32,8,1
    16 sm_100             64:64x64,8,2 128:32x64,4,1 256:32x32,8,1 512:16x32,8,1
    16 gfx942             64:32x64,4,1 128:32x32,4,1 256:16x32,4,1 512:16x16,4,1
    32 sm_80,sm_90,sm_100 64:32x32,4,1* 128:16x32,8,1* 256:16x16,8,1* 512:16x16,8,1*
    32 gfx942             64:32x32,4,1 128:16x16,4,1 512:16x16,4,1
backward_key_value_masked
    16 sm_80              64:32x32,4,1 128:32x64,8,1 256:32x32,8,1 512:16x32,8,1
    16 sm_90              64:64x64,8,1 128:32x64,8,1 256:32x32,8,1 512:16x16,8,1
    16 sm_100             64:64x64,8,1* 128:32x64,4,1 256:32x32,8,1 512:16x16,8,1
    16 gfx942             64:32x64,4,1 128:32x32,4,1 256:16x32,4,1 512:16x16,4,1
    32 sm_80,sm_90,sm_100 64:32x32,8,1* 128:16x32,8,1* 256:16x16,8,1* 512:16x16,8,1*
    32 gfx942             64:32x32,4,1 128:16x16,4,1 512:16x16,4,1
backward_mask
    16 sm_80,sm_90,sm_100 64:64x64,8,2 128:32x64,8,1 256:16x32,4,1 512:16x32,8,1
    16 gfx942             64:32x64,4,1 128:32x32,4,1 256:16x32,4,1 512:16x16,4,1
    32 sm_80,sm_90,sm_100 64:32x32,8,1* 128:16x32,8,1* 256:16x16,8,1* 512:16x16,8,1*
    32 gfx942             64:32x32,4,1 128:16x16,4,1 512:16x16,4,1
# Rows are the query heads of a key head, 16 or more. Memory bound.
decode
    16 sm_80,sm_90        128:16x64,4,3 256:16x32,4,3 512:16x32,8,2
    16 sm_100             128:16x64,4,3* 256:16x32,4,3* 512:16x32,8,2*
    16 gfx942             128:16x64,4,2 256:16x32,4,2 512:16x16,4,2
    32 sm_80,sm_90        64:16x32,4,2 256:16x16,4,2 512:16x16,8,2
    32 sm_100             64:16x32,4,2 256:16x16,8,2 512:16x16,8,2
    32 gfx942             128:16x32,4,1 512:16x16,4,1
decode_rows
    16 sm_80,sm_90        128:64x64,8,3 256:32x32,8,3 512:16x32,8,2
    16 sm_100             128:64x64,8,3* 256:32x32,8,3* 512:16x32,8,2*
    16 gfx942             128:32x32,4,2 256:16x32,4,2 512:16x16,4,2
    32 sm_80,sm_90        64:16x32,4,2 256:16x16,4,2 512:16x16,8,2
    32 sm_100             64:16x32,4,2 256:16x16,8,2 512:16x16,8,2
    32 gfx942             128:16x32,4,1 512:16x16,4,1
# A program computes all hops of a tile of queries. Most calls have few queries.
hops
    16 sm_80,sm_90        256:16x32,4,1
    16 sm_100             256:16x32,4,1*
    16 gfx942             128:16x32,4,1 256:16x16,4,1
    32 sm_80              256:16x16,8,1
    32 sm_90              128:16x16,4,1* 256:16x16,8,1
    32 sm_100             64:16x16,4,1 128:16x16,2,1 256:16x16,8,1
    32 gfx942             128:16x32,4,1 256:16x16,4,1
hops_backward
    16 sm_80,sm_90,sm_100 128:16x32,4,1* 256:16x16,8,1
    16 gfx942             128:16x32,4,1 256:16x16,4,1
    32 sm_80,sm_90,sm_100 256:16x16,8,1*
    32 gfx942             128:16x32,4,1 256:16x16,4,1
# Bound by tanh: a tile needs only enough pairs for its threads.
additive
    16 sm_80,sm_90,sm_100,gfx942 512:16x32,4,1
    32 sm_80,sm_90,sm_100 64:16x32,4,1* 256:16x16,8,1* 512:16x16,16,1*
    32 gfx942             512:16x32,4,1
"""


def _parse_launches(text: str) -> dict[str, _Table]:
    """Parse ``_LAUNCHES`` to {architecture: {kernel: {bits: rows}}}."""
    tables: dict[str, _Table] = {}
    kernel = ""
    for line in text.splitlines():
        if line[:1] in ("", "#"):
            continue
        if line[0] != " ":
            kernel = line
            continue
        bits, architectures, *entries = line.split()
        for architecture in architectures.split(","):
            by_bits = tables.setdefault(architecture, {}).setdefault(kernel, {})
            by_bits[int(bits)] = [_parse_entry(entry) for entry in entries]
    return tables


def _parse_entry(text: str) -> tuple[int, Launch]:
    """Parse one entry, such as ``64:128x64,8,3*``."""
    numbers = map(int, re.findall(r"\d+", text))
    return next(numbers), Launch(*numbers)._replace(greedy=int(text.endswith("*")))


ARCHITECTURES = _parse_launches(_LAUNCHES)


def choose(architecture: str, kernel: str, bits: int, width: int) -> Launch:
    """Return the launch of a kernel for rows of ``width`` elements."""
    if architecture == "interpreter":
        return _INTERPRETER
    for max_width, launch in table_of(architecture)[kernel][bits]:
        if width <= max_width:
            return launch
    raise ValueError(f"the table of {architecture} has no {kernel} for rows of {width} elements")


@functools.cache
def table_of(architecture: str) -> _Table:
    """The launches of an architecture: of the user's file, then of the same or the nearest GPU.

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
        from_file = json.loads(Path(path).read_text()).get(architecture, {})
        return table | {
            kernel: table[kernel]
            | {
                int(bits): _override_rows(rows, table[kernel][int(bits)])
                for bits, rows in by_bits.items()
            }
            for kernel, by_bits in from_file.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"FASTATTN_TRITON_TABLE: {path} is no table of launches: {error!r}"
        ) from None


def _override_rows(from_file: list[Any], built_in: _Rows) -> _Rows:
    """The rows of a file, then the built-in rows that are wider than all of them."""
    rows = sorted((int(max_width), Launch(*map(int, launch))) for max_width, launch in from_file)
    return rows + [row for row in built_in if not rows or row[0] > rows[-1][0]]
