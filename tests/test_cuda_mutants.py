"""Would the emulator see it? Each mutant is a bug put into the bfloat16 kernels on purpose.

Slow: every one is compiled. 95 % of them must be caught; the others are named, with the reason.
"""

# ruff: noqa: E501  (source lines are quoted whole)
from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from emulator import build

KERNELS = build.ROOT / "csrc/cuda/kernels"


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str  # its first occurrence ...
    new: str  # ... becomes this
    survives: str = ""  # why nothing could see it here
    table: str = "attention"  # of cases: this or one of test_cuda_operators.py, named as its source


FORWARD, BACKWARD, WEIGHTS = "attention_forward.h", "attention_backward.h", "attention_weights.h"
K_WAIT = "cp_async_wait<0>();\n      __syncthreads();  // K has come"
V_WAIT = "cp_async_wait<0>();\n      __syncthreads();  // V has come"
# Of the operators beside attention: name, old, new.
OPERATORS = {
    "sinusoidal": [
        ("a row too few", "n + r < last) add", "n + r + 1 < last) add"),
        ("the wrong partner", "c0 / 2 + i", "c0 / 2 + i + 1"),
        (
            "the low word is lost",
            "static_cast<float>(static_cast<uint32_t>(angle)) * 0x1p-64f",
            "0.0f",
        ),
        ("quadrants change their sign", "sign ^ (odd ? 0x80000000u : 0u)", "sign"),
        ("padding is a position", "position == p.padding_idx", "false"),
        ("heads do not wrap", "if (++h == p.H) h = 0, ++b", "++h"),
    ],
    "additive": [
        ("no guard", "kFactoredLimit = 21.0f", "kFactoredLimit = 1e30f"),
        ("q and bias are added first", "? exp_twice(q[n]) * bias_factor", "? exp_twice(q[n])"),
        ("tiles are read too early", "__syncthreads();  // the tiles are there", ""),
        (
            "tiles are overwritten too early",
            "  __syncthreads();\n  FASTATTN_UNROLL\n  for (int n = 0; n < kAdditiveWarps; ++n)\n    x = fmaxf",
            "  FASTATTN_UNROLL\n  for (int n = 0; n < kAdditiveWarps; ++n)\n    x = fmaxf",
        ),
        ("the reciprocal of the other", "v * (n0 * (d1 * both))", "v * (n0 * (d0 * both))"),
        ("no delta", "(gradients[j] - delta)", "gradients[j]"),
        ("dropped gradients stay", "dp = z == 0.0f ? 0.0f : dp * z", "dp = z == 2.0f ? 0.0f : dp"),
        ("nothing is marked", "seen ? w * kept(j) : no_part()", "seen ? w * kept(j) : 0.0f"),
        (
            "the slope of another",
            "if (!kOfKeys) slope += w0 * (e0 - 1.0f)",
            "if (!kOfKeys) slope += w0 * (e1 - 1.0f)",
        ),
        (
            "G is not transposed",
            "kOfKeys ? n % kRows * kPitch + n / kRows",
            "kOfKeys ? n / kRows * kPitch + n % kRows",
        ),
        (
            "causal queries begin too late",
            "tile * kRows < last ? tile * kRows : last",
            "tile * kRows + kRows < last ? tile * kRows + kRows : last",
        ),
        ("what is excluded is computed", "if (gj == 0.0f) continue;", ""),
    ],
    "encode_memory": [
        ("padding is a word", "token == p.padding_idx", "false"),
        ("T without a word", "p.temporal.data != nullptr && any", "p.temporal.data != nullptr && (any || true)"),
        ("the factor of another place", "factors[j * p.factor_stride + c * kN + e] * x[e]", "factors[(j + 1) % p.J * p.factor_stride + c * kN + e] * x[e]"),
        ("one sentence", "n = place / p.J % p.N", "n = place / p.J % 2"),
        ("a warp too few", "for (int n = 0; n < kEncodeWarps; ++n)", "for (int n = 1; n < kEncodeWarps; ++n)"),
        ("sums are read too early", "  }\n  __syncthreads();\n  auto* result", "  }\n  auto* result"),
        ("empty sentences count", "if (sentences[b * p.N] == 0) continue;", "if (sentences[b * p.N] == 2) continue;"),
    ],
    "hopfield": [
        ("all rest at once", "moves = by > least", "moves = by > least + 1e300"),
        ("the state before is lost", "ends[d] = room.u[d];", ""),
        ("the state is read too early", "for (int d = thread; d < width; d += kHopThreads) room.u[d] = ends[width + d];\n      __syncthreads();", "for (int d = thread; d < width; d += kHopThreads) room.u[d] = ends[width + d];"),
        ("one query of those together", "state[d * p.query.stride[3]]", "state[0]"),
    ],
    "memory_hops": [
        ("a sum of three warps", "for (int n = 0; n < kHopWarps; ++n) sum += sums", "for (int n = 1; n < kHopWarps; ++n) sum += sums"),
        ("a memory resides in another order", "store(room + n * kN)", "store(room + (n ^ 1) * kN)"),
        ("the old state", "const float before = p.settles ? 0.0f : p.proj.data != nullptr ? y[d] : u[d]", "const float before = u[d]"),
        ("the slope of tanh", "return 1.0f - y * y", "return 1.0f"),
        ("no delta", "weight * (dp - delta)", "weight * (dp - 0.0f * delta)"),
        ("H is not read", "before += sums[n * width + d]", "before = g[d]"),
        ("a stack is not shifted", "which == 1 && p.stack ? 1 : 0", "0"),
        ("scores are read too early", "room.s[n] = hops.score(dot, k, n); });\n    __syncthreads();", "room.s[n] = hops.score(dot, k, n); });"),
        ("the state changes too early", "y[d] = dot; });\n    __syncthreads();", "y[d] = dot; });"),
    ],
}  # fmt: skip
MUTANTS = [
    Mutant("K is not waited for", FORWARD, K_WAIT, "__syncthreads();  // K"),
    Mutant("no barrier after K", FORWARD, K_WAIT, "cp_async_wait<0>();  // K"),
    Mutant("V is not waited for", FORWARD, V_WAIT, "__syncthreads();  // V"),
    Mutant("no barrier after V", FORWARD, V_WAIT, "cp_async_wait<0>();  // V"),
    Mutant(
        "the next K is not committed",
        FORWARD,
        "keys.begin, keys.end);\n        cp_async_commit();",
        "keys.begin, keys.end);",
    ),
    Mutant("a block too few", FORWARD, "j0 < keys.end; j0 +=", "j0 + 64 < keys.end; j0 +="),
    Mutant(
        "blocks begin at the first key",
        FORWARD,
        "keys.begin / Shape::kKeys * Shape::kKeys",
        "keys.begin",
    ),
    Mutant("no mask at the right edge", FORWARD, "j0 + Shape::kKeys <= v", "j0 <= v"),
    Mutant("one factor for both rows", FORWARD, "shrink[n / 2 % 2]", "shrink[0]"),
    Mutant("rows go out too early", FORWARD, "__syncwarp();", ";"),
    Mutant("hidden values stay", FORWARD, "v_tile.template clear_rows", "if (0) v_tile.template clear_rows"),
    Mutant(
        "flags are read too early",
        FORWARD,
        "but always 1\n    __syncthreads();",
        "but always 1",
    ),
    Mutant(
        "lse without the sum",
        "softmax.h",
        "m[r] * unit + log(static_cast<double>(l[r]))",
        "m[r] * unit",
    ),
    Mutant(
        "the greatest of two lanes",
        "softmax.h",
        "return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));",
        "return x;",
    ),
    Mutant("the sum of two lanes", "softmax.h", "return x + __shfl_xor_sync(0xffffffffu, x, 2);", "return x;"),
    Mutant("inf - inf", "softmax.h", "most == minus_infinity() ? 0.0f : most", "most"),
    Mutant("one row too many", "tile.h", "row0 + r < last ?", "row0 + r <= last ?"),
    Mutant("one row too many, element by element", "tile.h", "row < last &&", "row <= last &&"),
    Mutant("a: chunks of other lanes", "tile.h", "2 * k + (lane >> 4)", "2 * k + (lane >> 3 & 1)"),
    Mutant("b: chunks of other lanes", "tile.h", "2 * k + (lane >> 3 & 1)", "2 * k + (lane >> 4)"),
    Mutant("V is not transposed", "tile.h", "ldmatrix_x4_transposed(r, chunk(", "ldmatrix_x4(r, chunk("),
    Mutant(
        "half of the swizzle",
        "tile.h",
        "(c ^ (row & 7))",
        "(c ^ (row & 3))",
        "both sides of a tile use it, so all is right; bank conflicts are not modelled",
    ),
    Mutant("causal by one", "scores.h", "i + p.window_end, 0", "i + p.window_end - 1, 0"),
    Mutant("window by one", "scores.h", "i + p.window_begin, 0", "i + p.window_begin + 1, 0"),
    Mutant("queries of keys by one", "scores.h", "+ 1 - p.window_end", "+ 2 - p.window_end"),
    Mutant("ALiBi to the other side", "scores.h", "s.value -= alibi", "s.value += alibi"),
    Mutant("softcap has slope 1", "scores.h", "1.0f - t * t", "1.0f"),
    Mutant("the mask of another row", "scores.h", "i * p.mask.stride[2]", "(i + 1) * p.mask.stride[2]"),
    Mutant("draws of four keys", "scores.h", "static_cast<uint32_t>(j) / 8", "static_cast<uint32_t>(j) / 4"),
    Mutant("halves of a draw", "philox.h", "words.x[3] : words.x[2]", "words.x[2] : words.x[3]"),
    Mutant("nine rounds", "philox.h", "n < 10", "n < 9"),
    Mutant("the heads of another group", FORWARD, "h / static_cast<int>(p.Hq / p.Hkv)", "h % static_cast<int>(p.Hkv)"),
    Mutant("keys change while they are read", BACKWARD, "__syncthreads();  // the keys before", "// the keys before"),
    Mutant("queries change while they are read", BACKWARD, "__syncthreads();  // the queries before", "// the queries before"),
    Mutant("dK is not scaled", BACKWARD, "column0, dk, p.scale_float", "column0, dk, 1.0f"),
    Mutant("d lse has the wrong sign", "attention_rows.h", "-static_cast<float>(p.grad_lse", "static_cast<float>(p.grad_lse"),
    Mutant("large scores lose their sum", "attention_rows.h", "fabs(lse) > kExact", "false"),
    Mutant("weights of a block too few", WEIGHTS, "j0 >= visible_to_block.end", "j0 + kKeys >= visible_to_block.end"),
    Mutant("a sum of one row", WEIGHTS, "sums_rows ? kQueries : r + 1", "r + 1"),
    Mutant("splits keep their own maximum", "memory_hops_stream.h", "(partial_of(hops, n)[width] - m) * kLog2e", "partial_of(hops, n)[width] * 0.0f", table="memory_hops"),
    Mutant("the last split is whole", "memory_hops_stream.h", "sum += factor(n) * partial_of(hops, n)[d]", "sum += partial_of(hops, n)[d]", table="memory_hops"),
    Mutant("one delta", "memory_hops_stream.h", "delta += partial_of(hops, n)[width]", "delta = partial_of(hops, n)[width]", table="memory_hops"),
    Mutant("depths are mixed up", "product.h", "rest / p.depth[1] * stride[0]", "rest / p.depth[1] * stride[1]", table="memory_hops"),
    Mutant("groups are not added", "columns.h", "int m = lanes; m < 32", "int m = 32; m < 32", table="memory_hops"),
    Mutant("infinity times nothing", "product.h", "__syncthreads_or(kMarked && odd)", "__syncthreads_or(false)", table="additive"),
    *(
        Mutant(name, f"{table}.h", old, new, table=table)
        for table, mutants in OPERATORS.items()
        for name, old, new in mutants
    ),
]  # fmt: skip

# Prints the first thing that is wrong, or "survived".
JUDGE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from emulator import build
from fastattn.testing import CASES, Case, check
from test_cuda import Emulated
adapter = build.load_from(Path(sys.argv[2]))
if sys.argv[3] != "attention":
    import test_cuda_operators as operators
    table = operators.TABLES[sys.argv[3]]
    cases = sorted(filter(lambda case: not table.long(case), table.cases), key=lambda c: "poison" in c.name)
    for n, case in enumerate(cases):
        try:
            faults = table.check(case, torch.bfloat16, operators.Emulated(adapter, 5 + n)).faults
            faults += table.check(case, torch.bfloat16, operators.Emulated(adapter, 0)).faults
        except RuntimeError as error:
            faults = [str(error)]
        if faults:
            print(f"caught by {case.name}: {faults[0]}")
            sys.exit()
    print("survived")
    sys.exit()
table = {case.name: case for case in CASES["scaled_dot_product_attention"]}
table["window-dropout"] = Case("window-dropout", q_len=100, k_len=200, window=(20, 5), dropout_p=0.3)
names = '''head_dim-64 gqa-causal gqa-mask everything window-3-5-65x65-full mask-padding-poison
mask-tril-poison mask-nothing softcap-0.5-mask alibi-bh-causal dropout-0.5-causal window-narrow-long
mask-finfo-min mask-float-qk mask-float-k mask-float-one layout-transposed dropout-long
results-1-out-lse-weights-mask gqa-decode lengths-128x129-upper_left lengths-64x300-upper_left
window-1000-1000-40x130-bottom_right results-2-out-lse-weights window-dropout'''.split()
for seed in (0, 5, 9):
    for name in names:
        try:
            faults = check(table[name], torch.bfloat16, Emulated(adapter, seed)).faults
        except RuntimeError as error:
            faults = [str(error)]
        if faults:
            print(f"caught by {name}: {faults[0]}")
            sys.exit()
print("survived")
"""


def judged(library: Path, table: str) -> str:
    folder = str(Path(__file__).parent)
    try:
        child = subprocess.run(
            [sys.executable, "-c", JUDGE, folder, str(library), table],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "caught: it never ends"
    last = child.stdout.strip().splitlines()[-1:]
    return last[0] if last else f"caught: it died, {child.stderr[-300:]}"


def test_every_mutant_changes_the_source() -> None:
    for mutant in MUTANTS:
        assert mutant.old in (KERNELS / mutant.file).read_text(), mutant.name
    assert len([m for m in MUTANTS if m.survives]) <= len(MUTANTS) * 0.05


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [None, *MUTANTS], ids=lambda m: m.name if m else "none")
def test_a_mutant_is_caught(mutant: Mutant | None, tmp_path: Path) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(build.ROOT / "csrc/cuda", csrc / "cuda")
    shutil.copy2(build.ROOT / "csrc/params.h", csrc)
    if mutant is not None:
        file = csrc / "cuda/kernels" / mutant.file
        file.write_text(file.read_text().replace(mutant.old, mutant.new, 1))
    table = mutant.table if mutant else "attention"
    only = "" if table == "attention" else table
    verdict = judged(build.build_changed(csrc, tmp_path / "out", "Bf16", only), table)
    print(verdict)
    if mutant is None or mutant.survives:
        assert verdict == "survived"
    else:
        assert verdict.startswith("caught"), verdict
