"""What a kernel costs by its machine code: the issue slots of its hottest loop, pipe by pipe.

The loop is the one whose shortest way round has the most products of the tensor cores, or without
any the most instructions in all. Only that way is counted: waits that are over, and code for masks
and edges beside it, are not. Clocks are those of one of the four parts of a multiprocessor, as if
its pipes had nothing else to do. All figures are predicted from the code; none is measured.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from sass import Code

# The CUDA programming guide, "Throughput of Native Arithmetic Instructions": results a clock of a
# multiprocessor, here clocks that an instruction of a warp keeps its pipe in one of four parts.
CLOCKS = {
    "sm_80": {"fma": 2, "alu": 2, "mufu": 8, "lsu": 4, "uniform": 1, "control": 1},
    "sm_90": {"fma": 1, "alu": 2, "mufu": 8, "lsu": 4, "uniform": 1, "control": 1},
}
TENSOR_FLOPS = {"sm_80": 512, "sm_90": 1024}  # a clock of one of four parts, dense, 16 bits
# Of mma.sync on sm_90, which does not reach what wgmma does.
MMA_SYNC = 0.62

PIPES = {
    "fma": "FFMA FFMA2 FMUL FADD HFMA2 HADD2 HMUL2 HFMA2.BF16 IMAD FSWZADD",
    "mufu": "MUFU I2F I2FP F2I F2F FRND POPC FLO I2I BREV DADD DMUL DFMA DSETP DMNMX",
    "lsu": """LDS STS LDSM STSM LDG STG LD ST LDGSTS LDL STL ATOM ATOMG ATOMS RED SHFL LDC S2R
        UTMALDG UTMASTG UBLKCP SYNCS MATCH CCTL LDGDEPBAR ARRIVES""",
    "uniform": "",  # whatever begins with U, and what moves to and from its registers
    "control": """BRA BRX JMP EXIT RET CALL BAR DEPBAR WARPSYNC BSSY BSYNC BREAK NOP YIELD MEMBAR
        FENCE ERRBAR NANOSLEEP ELECT WARPGROUP VOTE VOTEU ENDCOLLECTIVE KILL PMTRIG USETMAXREG
        ACQBULK R2B B2R CS2R""",
}
PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names.split()}
BARRIERS = re.compile(r"BAR|SYNCS|WARPSYNC|DEPBAR|WARPGROUP|LDGDEPBAR")
# The barriers that a warp waits at. Others only arrive.
WAITS = re.compile(r"BAR\.(SYNC|RED)|SYNCS\.PHASECHK|(WARPGROUP\.)?DEPBAR")
WORD_BYTES = {"8": 1, "U8": 1, "S8": 1, "16": 2, "U16": 2, "S16": 2, "64": 8, "128": 16}


def opcode(line: str) -> str:
    """`@!P0 LDS.128 R4, [R2]` -> LDS.128"""
    return re.sub(r"^@!?U?P\w+\s+", "", line).split(" ")[0].rstrip(";")


def pipe_of(name: str) -> str:
    stem = name.partition(".")[0]
    if stem.endswith(("MMA", "GMMA")) and stem[0] in "HIBQ":
        return "tensor"
    if stem in PIPE_OF:
        return PIPE_OF[stem]
    return "uniform" if stem.startswith("U") or stem == "R2UR" else "alu"


def tensor_flops(line: str) -> int:
    """Of one instruction of one warp."""
    name = opcode(line)
    if found := re.match(r"[HQ]GMMA\.(\d+)x(\d+)x(\d+)", name):
        m, n, k = map(int, found.groups())
        return 2 * m * n * k // 4  # a warpgroup has four warps
    if found := re.match(r"HMMA\.(16)(8)(\d+)", name):
        m, n, k = map(int, found.groups())
        return 2 * m * n * k
    return 0


def shared_bytes(line: str) -> int:
    """What one warp reads or writes of shared memory; of wgmma its share of both operands."""
    name = opcode(line)
    stem = name.partition(".")[0]
    if found := re.match(r"[HQ]GMMA\.(\d+)x(\d+)x(\d+)", name):
        m, n, k = map(int, found.groups())
        from_shared = 2 * n * k + (0 if re.search(r"GMMA\S* R\d+, R\d+", line) else 2 * m * k)
        return from_shared // 4
    if stem in ("LDSM", "STSM"):
        tiles = re.search(r"\.M\w+\.(\d)|\.x?(\d)\b", name)
        return 128 * int((tiles[1] or tiles[2]) if tiles else 1)
    if stem in ("LDS", "STS", "ATOMS", "LDGSTS"):
        words = [WORD_BYTES[part] for part in name.split(".") if part in WORD_BYTES]
        return 32 * (words[0] if words else 4)
    return 0


def global_bytes(line: str) -> int:
    """What one warp reads or writes elsewhere, but by TMA, whose instruction does not tell."""
    name = opcode(line)
    if name.partition(".")[0] not in ("LDG", "STG", "LD", "ST", "LDGSTS", "ATOMG", "RED"):
        return 0
    words = [WORD_BYTES[part] for part in name.split(".") if part in WORD_BYTES]
    return 32 * (words[-1] if words else 4)


# -- the way round a loop --------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """The basic blocks of a kernel: their lines, and which may follow each."""

    lines: list[list[str]]
    after: list[list[int]]


def blocks_of(code: Code) -> Blocks:
    count = len(code.lines)
    begins = {0, *(n for n in code.labels.values() if n < count)}
    jumps = [bool(re.search(r"\b(BRA|EXIT|RET|BRX|JMP|BREAK|BSYNC)\b", x)) for x in code.lines]
    begins |= {n + 1 for n, is_jump in enumerate(jumps) if is_jump and n + 1 < count}
    starts = sorted(begins)
    number = {start: n for n, start in enumerate(starts)}
    lines, after = [], []
    for n, start in enumerate(starts):
        end = starts[n + 1] if n + 1 < len(starts) else count
        last = code.lines[end - 1]
        targets = [code.labels[name] for name in re.findall(r"`\((\.L_\w+)\)", last)]
        following = [number[t] for t in targets if t in number and "BSSY" not in last]
        if not re.match(r"(BRA(\.\S+)? (?!.*P\d)|EXIT|RET|JMP)", last) and n + 1 < len(starts):
            following.append(n + 1)
        lines.append(code.lines[start:end])
        after.append(list(dict.fromkeys(following)))
    return Blocks(lines, after)


def loops_of(blocks: Blocks) -> list[tuple[int, list[int]]]:
    """The natural loops: the first block of each, and all of its blocks; inner ones first."""
    back = []
    state = [0] * len(blocks.lines)
    stack = [(0, iter(blocks.after[0]))]
    state[0] = 1
    while stack:
        at, following = stack[-1]
        then = next(following, None)
        if then is None:
            state[at] = 2
            stack.pop()
        elif state[then] == 1:
            back.append((at, then))
        elif state[then] == 0:
            state[then] = 1
            stack.append((then, iter(blocks.after[then])))
    before: list[list[int]] = [[] for _ in blocks.lines]
    for n, following_blocks in enumerate(blocks.after):
        for then in following_blocks:
            before[then].append(n)
    loops: dict[int, set[int]] = {}
    for last, head in back:
        inside = loops.setdefault(head, {head})
        ahead = [last]
        while ahead:
            n = ahead.pop()
            if n not in inside:
                inside.add(n)
                ahead += before[n]
    return sorted(((head, sorted(x)) for head, x in loops.items()), key=lambda loop: len(loop[1]))


def way_round(blocks: Blocks, head: int, inside: Iterable[int]) -> list[int]:
    """The blocks of the way from the first block of a loop back to it that has the most products
    and, of such ways, the fewest instructions. A loop within it is gone through once."""
    members = set(inside)
    flops = {n: sum(map(tensor_flops, blocks.lines[n])) for n in members}
    order: list[int] = []
    done: set[int] = set()
    ahead: set[int] = set()

    def visit(start: int) -> None:
        stack = [(start, iter(blocks.after[start]))]
        ahead.add(start)
        while stack:
            at, following = stack[-1]
            then = next(following, None)
            if then is None:
                stack.pop()
                ahead.discard(at)
                done.add(at)
                order.append(at)
            elif then in members and then not in done and then not in ahead:
                ahead.add(then)
                stack.append((then, iter(blocks.after[then])))

    visit(head)
    place = {n: i for i, n in enumerate(reversed(order))}
    best: dict[int, tuple[tuple[int, int], list[int]]] = {}
    ends: list[tuple[tuple[int, int], list[int]]] = []
    best[head] = ((flops[head], -len(blocks.lines[head])), [head])
    for at in sorted(place, key=place.__getitem__):
        if at not in best:
            continue
        (most, fewest), way = best[at]
        for then in blocks.after[at]:
            if then == head:
                ends.append(best[at])
            elif then in place and place[then] > place[at]:
                found = (most + flops[then], fewest - len(blocks.lines[then]))
                if then not in best or found > best[then][0]:
                    best[then] = (found, [*way, then])
    _, way = max(ends, key=lambda end: end[0])
    return way


def hottest(code: Code) -> tuple[list[str], bool]:
    """The instructions of the way round the hottest loop, all of a kernel without one; and whether
    a loop with products is within it."""
    blocks = blocks_of(code)
    flops = [sum(map(tensor_flops, lines)) for lines in blocks.lines]
    sizes = [len(lines) for lines in blocks.lines]
    loops = loops_of(blocks)
    ways = [way_round(blocks, head, inside) for head, inside in loops]
    if not ways:
        return code.lines, False
    of_way = [sum(flops[n] for n in way) for way in ways]
    lengths = [sum(sizes[n] for n in way) for way in ways]
    most = max(of_way)
    if most == 0:
        chosen = max(range(len(ways)), key=lengths.__getitem__)
    else:
        # Of loops in one another the inner one has nearly as many products, and little else.
        inner = [n for n in range(len(ways)) if of_way[n] >= 0.45 * most]
        chosen = max(inner, key=lambda n: of_way[n] / lengths[n])
    way = ways[chosen]
    rolled = any(
        n != chosen and set(inside) < set(loops[chosen][1]) and any(flops[b] for b in inside)
        for n, (_, inside) in enumerate(loops)
    )
    return [line for n in way for line in blocks.lines[n]], rolled


def between_waits(way: list[str]) -> list[int]:
    """The numbers of instructions from each wait to the next, round the loop; one if none waits."""
    waits = [n for n, line in enumerate(way) if WAITS.match(opcode(line))]
    if not waits:
        return [len(way)]
    following = (*waits[1:], waits[0] + len(way))
    return [then - n - 1 for n, then in zip(waits, following, strict=True)]


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slots:
    """Of one warp on one way round the hottest loop."""

    flops: int  # of its products
    tensor: int  # instructions
    fma: int
    alu: int
    mufu: int
    lsu: int
    uniform: int
    control: int
    shared_bytes: int
    global_bytes: int
    barriers: int
    between_waits: float  # instructions from a wait to the next: the median
    without_wait: int  # and the most
    registers: int
    wgmma: bool
    rolled: bool  # a loop with products within the way round is counted once
    threads: int = 0  # of a block; 0 in what a cubin alone tells
    shared: int = 0  # bytes of a block, likewise

    @property
    def issue(self) -> int:
        """All instructions: a part of a multiprocessor issues one a clock."""
        names = ("tensor", "fma", "alu", "mufu", "lsu", "uniform", "control")
        return sum(getattr(self, name) for name in names)

    def clocks(self, chip: str) -> dict[str, float]:
        rate = TENSOR_FLOPS[chip] * (MMA_SYNC if chip == "sm_90" and not self.wgmma else 1)
        found = {"tensor": self.flops / rate, "issue": float(self.issue)}
        for pipe in ("fma", "alu", "mufu"):
            found[pipe] = float(getattr(self, pipe) * CLOCKS[chip][pipe])
        # 128 bytes a clock of a multiprocessor.
        found["shared"] = self.shared_bytes / 128 * 4
        return found

    def bound(self, chip: str) -> tuple[str, float]:
        """Predicted: the busiest pipe, and the share of the tensor cores' peak that it allows."""
        clocks = self.clocks(chip)
        busiest = max(clocks, key=lambda name: clocks[name])
        peak = self.flops / TENSOR_FLOPS[chip]
        return busiest, peak / clocks[busiest] if self.flops else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@functools.cache
def _kind(name: str) -> str:
    return pipe_of(name)


def slots(code: Code, registers: int) -> Slots:
    way, rolled = hottest(code)
    apart = between_waits(way)
    pipes = [_kind(opcode(line)) for line in way]
    counted = {name: pipes.count(name) for name in ("tensor", *CLOCKS["sm_80"])}
    return Slots(
        flops=sum(map(tensor_flops, way)),
        **counted,
        shared_bytes=sum(map(shared_bytes, way)),
        global_bytes=sum(map(global_bytes, way)),
        barriers=sum(bool(BARRIERS.match(opcode(line))) for line in way),
        between_waits=statistics.median(apart),
        without_wait=max(apart),
        registers=registers,
        wgmma=any("GMMA" in line for line in way),
        rolled=rolled,
    )


# What a change may add: ptxas orders and chooses instructions a little differently for any change.
MARGIN = 0.05
CHECKED = ("tensor", "fma", "alu", "mufu", "lsu", "uniform", "control", "shared_bytes", "barriers")


def regressions(before: Slots, now: Slots) -> list[str]:
    """Counts for each FLOP, or without products for each way round, that have grown too much."""
    faults = []
    scale = now.flops / before.flops if before.flops and now.flops else 1.0
    if bool(before.flops) != bool(now.flops):
        faults.append(f"flops {before.flops} -> {now.flops}")
    for name in (*CHECKED, "issue"):
        was, is_now = getattr(before, name), getattr(now, name) / scale
        if is_now > was * (1 + MARGIN) + 2:
            faults.append(f"{name} {was} -> {is_now:.0f}")
    # Compared as a share of the loop, so that removing instructions is no fault.
    was, is_now = before.without_wait / before.issue, now.without_wait / now.issue * max(scale, 1.0)
    if is_now < was * (1 - 2 * MARGIN):
        faults.append(f"instructions without a wait {was:.0%} -> {is_now:.0%}")
    if now.registers > before.registers + 8:
        faults.append(f"registers {before.registers} -> {now.registers}")
    if now.shared > before.shared:
        faults.append(f"shared {before.shared} -> {now.shared}")
    return faults
