"""The numbers and the picture of docs/hopper.md: python docs/make_hopper_picture.py

Prints the tables, whose shapes are read from the kernel's source, and draws
docs/images/hopper-timeline.png from the same model of its time. Nothing here is measured.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
SOURCE, SOURCE_Q, SOURCE_KV = (
    (HERE.parent / f"csrc/cuda/kernels/hopper/sdpa_{name}.h").read_text()
    for name in ("forward", "backward_q", "backward_kv")
)
WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
LENGTHS = (512, 2048, 8192, 16384)

# A multiprocessor of Hopper, a clock; sources in docs/hopper.md.
FLOPS, EXPONENTIALS, SHARED_BYTES = 4096, 16, 128
# TFLOP/s of a large product on an H200, and two constants that give about what FlashAttention-3 is
# published to reach: of the shorter of products and exponentials this part is not hidden; and of
# all the time this part is the loop.
PEAK, EXPOSED, LOOP = 790, 0.45, 0.95
# And of the backward pass: its five products at 128 columns, 8k, full.
LOOP_BACKWARD = 0.77


def tile(rows: int, columns: int) -> int:
    """Bytes in shared memory."""
    return rows * 128 * math.ceil(columns / 64)


def chosen(source: str, name: str, width: int) -> int:
    """What a kernel without options takes for so many columns of Q and K."""
    found = re.search(rf"{name} = kGeneral\s*\? \([^)]*\)\s*:([^;]*);", source)
    assert found, name
    for compare, bound, n in re.findall(r"kQ (<=|==) (\d+)\s*\? (\d+)", found[1]):
        if width == int(bound) or (compare == "<=" and width < int(bound)):
            return int(n)
    return int(found[1].split(":")[-1])


@dataclass(frozen=True)
class Shape:
    """Of the kernel without options; a step is one of both consumers."""

    q: int
    v: int

    @property
    def keys(self) -> int:
        chosen = dict(re.findall(r"kV == (\d+)\s*\? (\d+)", SOURCE))
        other = re.search(r"kV == 192\s*\? \d+\s*: (\d+);", SOURCE)
        assert other
        return int(chosen.get(str(self.v), other[1]))

    @property
    def stages(self) -> tuple[int, int]:
        found = re.search(r"kKStages = kOverlapped \? (\d) : (\d), kVStages = (\d);", SOURCE)
        assert found
        return int(found[1 if self.v < 256 else 2]), int(found[3])

    @property
    def bytes(self) -> tuple[int, int, int]:
        """Of Q, of one K and of one V in shared memory."""
        return tile(128, self.q), tile(self.keys, self.q), tile(self.keys, self.v)

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a consumer's thread: O, the scores, the weights."""
        return self.v // 2, self.keys // 2 * (2 if self.v < 256 else 1), self.keys // 4

    @property
    def products(self) -> tuple[float, float]:
        """Clocks of Q K^T and P V of one consumer."""
        return 2 * 64 * self.keys * self.q / FLOPS, 2 * 64 * self.keys * self.v / FLOPS

    @property
    def exponentials(self) -> float:
        """Clocks of those of one consumer: the scores, and a factor for each row of a thread."""
        return 128 * (self.keys // 2 + 2) / EXPONENTIALS

    @property
    def shared(self) -> float:
        """Clocks in which shared memory is busy, for one consumer and half of the loads."""
        scores = self.q // 16 * (64 * 32 + self.keys * 32)  # a and b are read by each instruction
        values = self.keys // 16 * self.v * 32  # a is in registers
        return (scores + values + sum(self.bytes[1:]) / 2) / SHARED_BYTES

    @property
    def clocks(self) -> dict[str, float]:
        return {
            "products": 2 * sum(self.products),
            "exponentials": 2 * self.exponentials,
            "shared memory": 2 * self.shared,
        }

    def tflops(self, length: int, causal: bool) -> float:
        """Predicted, for as many heads as fill the machine."""
        clocks = self.clocks
        hidden = min(clocks["products"], clocks["exponentials"])
        share = clocks["products"] / (max(clocks.values()) + EXPOSED * hidden)
        seen = length / 2 if causal else length
        passed = length / 2 + 64 + self.keys / 2 if causal else length
        # The first scores of a tile have no softmax beside them, nor the last weights a product.
        steps = math.ceil(passed / self.keys) + 1
        return PEAK * LOOP * share * seen / self.keys / steps


@dataclass(frozen=True)
class Backward:
    """Of a kernel of the backward pass without options: of dQ, or of dK and dV."""

    q: int
    v: int
    of_keys: bool  # dK and dV

    @property
    def divided(self) -> bool:
        """Has one consumer dV, the other dK, of the same keys?"""
        return self.of_keys and self.q > 128

    @property
    def stay(self) -> int:
        """The rows of a tile that stays."""
        return 64 if self.divided else 128

    @property
    def passing(self) -> int:
        """The rows of a step."""
        if self.of_keys:
            return chosen(SOURCE_KV, "kQueries", self.q)
        return chosen(SOURCE_Q, "kKeys", self.q)

    @property
    def bytes(self) -> tuple[int, int]:
        """Of both operands that stay, and of both that pass, in shared memory."""
        stay, passing = (
            tile(rows, self.q) + tile(rows, self.v) for rows in (self.stay, self.passing)
        )
        return stay, passing

    @property
    def registers(self) -> tuple[int, ...]:
        """Of a consumer's thread: sums, S and dP, and of dQ dS."""
        if not self.of_keys:
            return self.q // 2, self.passing, self.passing // 4
        return (self.q if self.divided else self.q + self.v) // 2, self.passing

    @property
    def columns(self) -> tuple[int, int]:
        """Of both consumers, columns of the products from shared memory, and from registers."""
        if self.divided:
            return 2 * self.q + self.v, self.q + self.v
        return 2 * (self.q + self.v), 2 * (self.q + (self.v if self.of_keys else 0))

    @property
    def clocks(self) -> dict[str, float]:
        """Of a step of both consumers."""
        from_shared, from_registers = self.columns
        rows = self.passing
        moved = from_shared // 16 * (64 + rows) * 32 + rows // 16 * from_registers * 32
        return {
            "products": 2 * 64 * rows * (from_shared + from_registers) / FLOPS,
            "exponentials": 2 * 64 * rows / EXPONENTIALS,
            "shared memory": (moved + self.bytes[1]) / SHARED_BYTES,
        }

    def time(self, length: int, causal: bool) -> float:
        """Clocks for one head, but for what is not the loop."""
        clocks = self.clocks
        hidden = min(clocks["products"], clocks["exponentials"])
        passed = length / 2 + self.stay / 2 + self.passing / 2 if causal else length
        steps = math.ceil(passed / self.passing) + 1
        return length / self.stay * steps * (max(clocks.values()) + EXPOSED * hidden)


def backward_tflops(q: int, v: int, length: int, causal: bool) -> float:
    """Predicted; the FLOP of the five products that a backward pass needs."""
    clocks = sum(Backward(q, v, of_keys).time(length, causal) for of_keys in (False, True))
    products = 2 * (3 * q + 2 * v) * length**2 / (2 if causal else 1) / FLOPS
    return PEAK * LOOP_BACKWARD * products / clocks


def predicted(tflops: Callable[[int, int, int, bool], float]) -> Iterator[str]:
    heads = " | ".join(f"{n // 1024}k" if n >= 1024 else str(n) for n in LENGTHS)
    yield f"| D / Dv | {heads} |"
    yield "| --- |" + " --- |" * len(LENGTHS)
    for q, v in WIDTHS:
        cells = " | ".join(f"{tflops(q, v, n, False):.0f} / {tflops(q, v, n, True):.0f}"
                          for n in LENGTHS)  # fmt: skip
        yield f"| {q} / {v} | {cells} |"


def tables() -> Iterator[str]:
    yield "| D / Dv | keys | buffers K, V | Q + K + V, KiB | O + S + P + 40 registers |"
    yield "| --- | --- | --- | --- | --- |"
    for shape in (Shape(*width) for width in WIDTHS):
        q, k, v = (n // 1024 for n in shape.bytes)
        (k_stages, v_stages), registers = shape.stages, shape.registers
        total = q + k_stages * k + v_stages * v
        yield (
            f"| {shape.q} / {shape.v} | {shape.keys} | {k_stages}, {v_stages} "
            f"| {q} + {k_stages}·{k} + {v_stages}·{v} = {total} "
            f"| {' + '.join(map(str, registers))} + 40 = {sum(registers) + 40} |"
        )
    yield ""
    yield "| D / Dv | products | exponentials | shared memory | bound by |"
    yield "| --- | --- | --- | --- | --- |"
    for shape in (Shape(*width) for width in WIDTHS):
        clocks = shape.clocks
        most = max(clocks, key=lambda name: clocks[name])
        cells = " | ".join(f"{n:.0f}" for n in clocks.values())
        yield f"| {shape.q} / {shape.v} | {cells} | {most} |"
    yield ""
    yield from predicted(lambda q, v, n, causal: Shape(q, v).tflops(n, causal))
    for of_keys, passing, cells in (
        (False, "keys", "Q + dO + K + V, KiB | dQ + S, dP + dS"),
        (True, "queries", "K + V + Q + dO, KiB | sums + S, dP"),
    ):
        yield ""
        yield f"| D / Dv | {passing} | {cells} + 40 registers | products | exponentials | shared |"
        yield "| --- |" + " --- |" * 6
        for q, v in WIDTHS:
            kernel = Backward(q, v, of_keys)
            stay, passed = (n // 1024 for n in kernel.bytes)
            clocks = " | ".join(f"{n:.0f}" for n in kernel.clocks.values())
            yield (
                f"| {q} / {v} | {kernel.passing} | {stay} + 2·{passed} = {stay + 2 * passed} "
                f"| {' + '.join(map(str, kernel.registers))} + 40 = {sum(kernel.registers) + 40} "
                f"| {clocks} |"
            )
    yield ""
    yield from predicted(backward_tflops)


# -- the timeline ----------------------------------------------------------------------------------


@dataclass
class Machine:
    """Two consumers that share the tensor cores, which compute in the order of the requests."""

    bars: list[tuple[str, int, str, float, float]] = field(default_factory=list)
    busy_until: float = 0.0
    turns: list[float | None] = field(default_factory=lambda: [0.0, None])

    def begin(self, consumer: int, name: str, now: float, clocks: float) -> float:
        start = max(now, self.busy_until)
        self.busy_until = start + clocks
        self.bars.append(("tensor cores", consumer, name, start, self.busy_until))
        return self.busy_until

    def work(self, consumer: int, name: str, now: float, clocks: float) -> float:
        self.bars.append((f"consumer {consumer}", consumer, name, now, now + clocks))
        return now + clocks


def consume(machine: Machine, me: int, shape: Shape, steps: int) -> Iterator[float | None]:
    """`run_overlapped`: yields the time at which it goes on, or None to wait for its turn."""
    scores, values = shape.products
    softmax = shape.exponentials + 6 * shape.keys / 2  # and about six other instructions a score
    rescale = shape.v / 2 + shape.keys / 2
    now = scores_done = machine.begin(me, "S0", 0.0, scores)
    values_done = 0.0
    yield now
    for j in range(steps):
        while machine.turns[me] is None:
            yield None
        turn = machine.turns[me]
        assert turn is not None
        now, machine.turns[me] = max(now, turn), None
        if j > 0:
            values_done = machine.begin(me, f"P{j - 1}V", now, values)
            now = max(now, scores_done)
        scores_done = machine.begin(me, f"S{j + 1}", now, scores)
        machine.turns[1 - me] = now
        yield now
        now = machine.work(me, f"softmax {j}", now, softmax)
        now = max(now, values_done)
        now = machine.work(me, "", now, rescale)
        yield now


def timeline(shape: Shape, steps: int) -> list[tuple[str, int, str, float, float]]:
    machine = Machine()
    runs = [consume(machine, me, shape, steps) for me in range(2)]
    ready = [(0.0, me) for me in range(2)]
    while ready:
        now, me = heapq.heappop(ready)
        try:
            then = next(runs[me])
        except StopIteration:
            continue
        # Who has no turn looks again after the other one.
        heapq.heappush(ready, (then if then is not None else now + 1, me))
    return machine.bars


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shape = Shape(128, 128)
    rows = ["tensor cores", "consumer 1", "consumer 0"]
    colours = {0: "#4878a8", 1: "#d08838"}
    figure, axes = pyplot.subplots(figsize=(11, 2.6))
    for row, consumer, name, begin, end in timeline(shape, 5):
        axes.barh(rows.index(row), end - begin, left=begin, height=0.7, color=colours[consumer],
                  alpha=1.0 if name else 0.5, edgecolor="white", linewidth=0.8)  # fmt: skip
        axes.text((begin + end) / 2, rows.index(row), name, ha="center", va="center", fontsize=7,
                  color="white", clip_on=True)  # fmt: skip
    axes.set_yticks(range(3), rows)
    axes.set_xlabel("clocks of a multiprocessor, D = 128, 80 keys a step: a model, not measured")
    axes.set_xlim(0, 5200)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    print("\n".join(tables()))
    draw(HERE / "images/hopper-timeline.png")
