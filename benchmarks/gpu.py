"""A few minutes of a GPU, well spent: are the kernels right there, and how fast are they?

    make build FASTATTN_CUDA=1
    .venv/bin/python benchmarks/gpu.py
    .venv/bin/python benchmarks/gpu.py --backend triton     # needs no build

In this order, the results written after each step, so that nothing is lost when time runs out, to
benchmarks/results/GPU/BACKEND.json:
  conformance  every PTX wrapper against the manual's tables, for CUDA only (test_emulator.py)
  correctness  the case tables of attention against the oracle, in hostile memory layouts
  races        the same bits in 1,000 runs, forward and backward, packed sequences and decoding too
  hopper       of CUDA on compute capability 9.0: that the kernels for Hopper run, and that those
               for sm_80 are right there, too
  operators    the same for the operators beside attention, with plain PyTorch beside them
  speed        side by side with every backend of PyTorch's SDPA, FlexAttention and our other
               kernels, interleaved; then dense biases, with a gradient too, and averaged weights
  serving      packed sequences beside each of them padded; decoding beside SDPA and a plain copy
Without a GPU it says so and ends; --plan tells what it would do. A speed is reported only of a
kernel that was right.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_hopper
import torch
from gpu_hopper import SM_80, is_hopper, kernels_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn import dispatch, info
from fastattn.bench.environment import processor_slug
from fastattn.testing import Case, check
from fastattn.testing.decode import DecodeCase, check_decode, make_decode
from fastattn.testing.inputs import make_inputs
from fastattn.testing.varlen import VarlenCase, check_varlen, make_varlen, run_varlen

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("conformance", "correctness", "races", "hopper", "operators", "speed", "serving")
SPEEDS = ("speed", "serving")
PROOFS = (check, check_varlen, check_decode)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [  # batch, heads, kv_heads, length, head_dim, causal
    *((2, 16, 16, n, d, c) for n in (1024, 4096, 16384) for d in (64, 128) for c in (False, True)),
    (4, 32, 8, 4096, 128, True),
]


def environment(backend: str) -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "fastattn": fastattn.__version__,
        "backend": backend,
        "kernels": info.collect()["backends"][backend],
        "date": time.strftime("%Y-%m-%d"),
    }


def on_gpu(x: Any) -> Any:
    """A tensor with the same strides, in a copy of all of its memory."""
    if isinstance(x, tuple):
        return tuple(map(on_gpu, x))
    if not isinstance(x, Tensor):
        return x
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).cuda()
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def on_cpu(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(on_cpu, x))
    return x.cpu() if isinstance(x, Tensor) else x


class OnGpu:
    """A target of `fastattn.testing.check`: CPU tensors in and out, a backend's kernels between."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        module = dispatch.load(backend)

        def moved(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                return on_cpu(function(*map(on_gpu, args), **options))

            return call

        def why_not(op: str, *args: Any, **options: Any) -> list[str]:
            return module.why_not(op, *map(on_gpu, args), **options)

        self.adapter = SimpleNamespace()
        for name in filter(str.islower, module.__all__):
            setattr(self.adapter, name, moved(getattr(module, name)))
        self.adapter.why_not = why_not

    @contextmanager
    def active(self) -> Iterator[Any]:
        yield self.adapter


def conformance(args: argparse.Namespace) -> dict[str, Any]:
    if args.backend != "cuda":
        return {"ok": True, "told": "these kernels have no PTX of their own"}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", "tests/cuda/test_emulator.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {"ok": done.returncode == 0, "told": done.stdout[-4000:]}


def correctness(args: argparse.Namespace) -> dict[str, Any]:
    target, faults, ran = OnGpu(args.backend), [], {proof.operator: 0 for proof in PROOFS}
    for proof in PROOFS:
        op = proof.operator
        for case in proof.cases:
            for dtype in DTYPES:
                if case.slow or dtype not in case.dtypes:
                    continue
                verdict = proof(case, dtype, target)
                ran[op] += not verdict.declined
                faults += [f"{op} {case.name} {dtype}: {fault}" for fault in verdict.faults]
    return {"ok": not faults, "cases": ran, "faults": faults[:100]}


def races(args: argparse.Namespace) -> dict[str, Any]:
    module = dispatch.load(args.backend)
    plain = Case("races", heads=8, q_len=500, k_len=500, head_dim=128, causal="upper_left")
    masked = replace(plain, name="races-mask", mask="float_inf", mask_grad=True, dropout_p=0.1)
    faults = []
    for case in (plain, masked):
        for dtype in DTYPES:
            inputs = make_inputs(case, dtype)
            forward = tuple(map(on_gpu, inputs.forward_args()))
            given = tuple(map(on_gpu, inputs.cotangents()))
            first: list[Tensor] | None = None
            for n in range(args.repeats):
                out, lse, _ = module.scaled_dot_product_attention(*forward, options=inputs.options)
                grads = module.scaled_dot_product_attention_backward(
                    *given, *forward, out, lse, options=inputs.backward_options()
                )
                found = [out, lse, *(grad for grad in grads if grad is not None)]
                first = first or found
                if not all(torch.equal(a, b) for a, b in zip(first, found, strict=True)):
                    faults.append(f"{case.name} {dtype}: run {n} differs from the first")
                    break
    for dtype in DTYPES:
        for name, run in serving_calls(module, dtype).items():
            once = run()
            for n in range(args.repeats):
                if not all(torch.equal(a, b) for a, b in zip(once, run(), strict=True)):
                    faults.append(f"{name} {dtype}: run {n} differs from the first")
                    break
    return {"ok": not faults, "repeats": args.repeats, "faults": faults}


def hopper(args: argparse.Namespace) -> dict[str, Any]:
    if not is_hopper(args.backend):
        return {"ok": True, "told": "there is one kernel for each call here"}
    faults = gpu_hopper.faults_of_choice()
    with kernels_of(SM_80):
        others = correctness(args)
    return {"ok": others["ok"] and not faults, "faults": faults, SM_80: others}


def serving_calls(module: Any, dtype: torch.dtype) -> dict[str, Callable[[], list[Tensor]]]:
    """Packed sequences, forward and backward, and decoding in pages."""
    case = VarlenCase("races", (300, 1, 0, 700), window=(-1, 0), heads=8, head_dim=128)
    made = make_varlen(case, dtype)
    packed = replace(made, args=on_gpu(made.args), given=on_gpu(made.given))
    cache = make_decode(DecodeCase("races", (900, 40), 1024, page=64, head_dim=128), dtype)
    args = on_gpu(cache.args)
    return {
        "varlen_attention": lambda: list(run_varlen(module, packed).values()),
        "decode_attention": lambda: list(module.decode_attention(*args, options=cache.options)),
    }


def operators(args: argparse.Namespace) -> dict[str, Any]:
    import gpu_operators  # beside this file

    correct = gpu_operators.correctness(args.backend, on_gpu)
    race = gpu_operators.races(args.backend, args.repeats)
    ok = not correct["faults"] and not race["faults"]
    rows = gpu_operators.speed(args.backend, args.rounds, milliseconds) if ok else []
    return {"ok": ok, "correctness": correct, "races": race, "rows": rows}


def other_than(backend: str) -> str:
    """Of our own backends."""
    return "triton" if backend == "cuda" else "cuda"


def candidates(
    backend: str, length: int, causal: bool, gqa: bool
) -> dict[str, Callable[..., Tensor]]:
    """Name -> f(q, k, v) -> out."""

    def stock(kind: SDPBackend) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(kind):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=gqa
                )

        return call

    def ours(backend: str) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with fastattn.use_backend(backend):
                return fastattn.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=gqa
                )

        return call

    other = other_than(backend)
    found: dict[str, Callable[..., Tensor]] = {"fastattn": ours(backend), other: ours(other)}
    if is_hopper(backend):
        found[f"fastattn, {SM_80}"] = ours(backend)
    for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION,
                 SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):  # fmt: skip
        found[kind.name.lower()] = stock(kind)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, block_mask=mask, enable_gqa=gqa)

    found["flex"] = flex
    return found


def milliseconds(call: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def speed(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for batch, heads, kv_heads, length, width, causal, precision in speeds():
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        q = torch.randn(batch, heads, length, width, device="cuda", dtype=dtype)
        k, v = (
            torch.randn(batch, kv_heads, length, width, device="cuda", dtype=dtype)
            for _ in range(2)
        )
        flops = 4 * batch * heads * length * length * width * (0.5 if causal else 1.0)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        runs = candidates(args.backend, length, causal, heads != kv_heads)
        taken = both_ways(runs, [x.requires_grad_() for x in (q, k, v)], args.rounds)
        torch.set_float32_matmul_precision(before)
        rows.append(
            {
                "shape": [batch, heads, kv_heads, length, width],
                "causal": causal,
                "precision": precision,
                "tflops": {name: tflops(flops, ms) for name, ms in taken.items()},
            }
        )
    return {"ok": True, "rows": rows, "options": [options(args, d) for d in (64, 128)]}


def speeds() -> Iterator[tuple[Any, ...]]:
    """Shape, causal, and bfloat16, float32 or tf32."""
    for shape in SHAPES:
        yield *shape, "bfloat16"
        if shape[3] == 4096 and shape[1] == shape[2]:
            yield *shape, "float32"
            yield *shape, "tf32"


Times = dict[str, Any]  # milliseconds forward and backward, or why it was refused


def tflops(flops: float, ms: Times) -> Times:
    if "refused" in ms:
        return ms
    return {"forward": flops / ms["forward"] / 1e9, "backward": 2.5 * flops / ms["backward"] / 1e9}


def both_ways(
    runs: dict[str, Callable[..., Tensor]], leaves: list[Tensor], rounds: int
) -> dict[str, Times]:
    """Forward and backward of all that run on the leaves, one after the other in each round."""
    times: dict[str, dict[str, list[float]]] = {}
    told: dict[str, Times] = {}
    for round_ in range(rounds + 1):  # the first one warms up
        for name, run in list(runs.items()):
            try:
                with kernels_of(name):
                    with torch.no_grad():
                        forward = milliseconds(lambda run=run: run(*leaves))
                    out = run(*leaves)
                    needed = [x for x in leaves if x.requires_grad]
                    given = torch.ones_like(out)
                    backward = milliseconds(
                        lambda out=out, needed=needed, given=given: torch.autograd.grad(
                            out, needed, given, retain_graph=True
                        )
                    )
            except RuntimeError as error:
                told[name] = {"refused": str(error)[:200]}
                del runs[name]
                times.pop(name, None)
                continue
            if round_ > 0:
                of_name = times.setdefault(name, {"forward": [], "backward": []})
                of_name["forward"].append(forward)
                of_name["backward"].append(backward)
    for name, of_name in times.items():
        told[name] = {way: statistics.median(taken) for way, taken in of_name.items()}
    return told


def options(args: argparse.Namespace, width: int) -> dict[str, Any]:
    """Milliseconds with a dense bias, with one that has a gradient, and with averaged weights."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(2, 16, 4096, width, device="cuda").bfloat16() for _ in range(3))
    bias = torch.randn(1, 16, 4096, 4096, device="cuda").bfloat16()
    compiled = torch.compile(flex_attention)

    def ours(backend: str) -> Callable[..., Tensor]:
        def call(*tensors: Tensor, **more: bool) -> Any:
            with fastattn.use_backend(backend):
                return fastattn.scaled_dot_product_attention(*tensors, **more)

        return call

    def efficient(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*tensors)

    def flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return compiled(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[0, h, i, j])

    told: dict[str, Any] = {"shape": list(q.shape)}
    for name, learnable in (("bias", False), ("learnable bias", True)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        leaves.append(bias.detach().requires_grad_(learnable))
        other = other_than(args.backend)
        runs = {"fastattn": ours(args.backend), other: ours(other)}
        runs |= {"efficient_attention": efficient, "flex": flex}
        told[name] = both_ways(runs, leaves, args.rounds)
    averaged = {"need_weights": True, "average_weights": True}
    with torch.no_grad():
        weights = {
            "core": lambda: ours(args.backend)(q, k, v),
            "averaged": lambda: ours(args.backend)(q, k, v, **averaged),
        }
        told["weights"] = medians(weights, args.rounds)
    return told


def medians(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """Milliseconds of each that runs, one after the other in each round; the first one warms up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    told: dict[str, Any] = {}
    for round_ in range(rounds + 1):
        for name, run in list(runs.items()):
            try:
                with kernels_of(name):
                    taken = milliseconds(run)
            except RuntimeError as error:
                told[name] = {"refused": str(error)[:200]}
                del runs[name], times[name]
                continue
            if round_ > 0:
                times[name].append(taken)
    return told | {name: statistics.median(taken) for name, taken in times.items()}


@torch.no_grad()
def serving(args: argparse.Namespace) -> dict[str, Any]:
    return {"ok": True, "packed": packed(args), "decoding": decoding(args)}


def packed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Causal sequences of 128 to 4096 tokens, beside the same ones padded."""
    rows = []
    lengths = [128, 4096, 700, 1500, 256, 2048, 90, 3000]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    for width in (64, 128):
        total, longest = sum(lengths), max(lengths)
        q, k, v = (torch.randn(total, 16, width, device="cuda").bfloat16() for _ in range(3))
        padded = [
            torch.zeros(len(lengths), 16, longest, width, device="cuda").bfloat16()
            for _ in range(3)
        ]

        def ours(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            with fastattn.use_backend(args.backend):
                return fastattn.varlen_attention(q, k, v, ends, ends, is_causal=True)

        runs: dict[str, Callable[[], Any]] = {"fastattn": ours}
        if is_hopper(args.backend):
            runs[f"fastattn, {SM_80}"] = ours
        for name, run in candidates(args.backend, longest, True, False).items():
            runs[f"{name}, padded"] = lambda run=run, padded=padded: run(*padded)
        rows.append({"lengths": lengths, "head_dim": width, "ms": medians(runs, args.rounds)})
    return rows


def decoding(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One query a sequence; the cache's bytes a second, beside those of a copy."""
    rows = []
    for batch, heads, kv_heads, length in (
        (1, 32, 8, 8192), (16, 32, 8, 8192), (64, 32, 32, 2048), (8, 64, 8, 32768)
    ):  # fmt: skip
        query = torch.randn(batch, heads, 1, 128, device="cuda").bfloat16()
        keys, values = (
            torch.randn(batch, kv_heads, length, 128, device="cuda").bfloat16() for _ in range(2)
        )
        pages = batch * length // 64
        table = torch.randperm(pages, device="cuda").view(batch, -1).int()
        in_pages = [x.reshape(batch, kv_heads, -1, 64, 128).transpose(1, 2).flatten(0, 1)
                    for x in (keys, values)]  # fmt: skip
        ours: dict[str, Any] = {
            "fastattn": (query, keys, values),
            "fastattn, paged": (query, *in_pages),
        }
        runs: dict[str, Callable[[], Any]] = {"copy": lambda keys=keys: keys.clone()}
        for name, tensors in ours.items():
            blocks = table if "paged" in name else None

            def run(tensors: Any = tensors, blocks: Tensor | None = blocks) -> Tensor:
                with fastattn.use_backend(args.backend):
                    return fastattn.decode_attention(*tensors, block_table=blocks)

            runs[name] = run
        others = candidates(args.backend, length, False, heads != kv_heads)
        for name, other in others.items():
            if not name.startswith("fastattn"):
                runs[name] = lambda f=other, x=(query, keys, values): f(*x)
        taken = medians(runs, args.rounds)
        read = 2 * keys.nbytes  # a copy reads and writes as much
        speeds = {k: read / v / 1e6 if isinstance(v, float) else v for k, v in taken.items()}
        rows.append({"shape": [batch, heads, kv_heads, length, 128], "gb_per_s": speeds})
    return rows


def plan(args: argparse.Namespace) -> dict[str, list[str]]:
    """What each step would do, in lines."""
    import gpu_operators

    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    peers = ", ".join(candidates(args.backend, 1024, False, False))
    return {
        "conformance": ["every PTX wrapper of csrc/cuda/ptx: tests/cuda/test_emulator.py"],
        "correctness": [
            f"{proof.operator}: {sum(not case.slow for case in proof.cases)} cases in {dtypes}"
            for proof in PROOFS
        ],
        "races": [
            f"{args.repeats} runs each, in {dtypes}: attention forward and backward without and "
            "with a mask, packed sequences, decoding"
        ],
        "hopper": [
            "of CUDA on compute capability 9.0: which kernel runs; correctness without those for "
            f"Hopper, too, which speed and serving call 'fastattn, {SM_80}'"
        ],
        "operators": [
            *(f"{proof.operator}: {len(proof.cases)} cases" for proof in gpu_operators.PROOFS),
            f"{args.repeats} runs each, then {args.rounds} rounds beside plain PyTorch",
        ],
        "speed": [
            f"{args.rounds} rounds of {peers}",
            *(
                f"[B, Hq, Hkv, L, D] = {shape}, {'causal' if causal else 'full'}, {precision}"
                for *shape, causal, precision in speeds()
            ),
            "[2, 16, 4096, 64 and 128]: a bias, a learnable bias, averaged weights",
        ],
        "serving": [f"{args.rounds} rounds of packed sequences, padded ones, decoding and a copy"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=("cuda", "triton"), default="cuda")
    parser.add_argument("--out", type=Path, help="benchmarks/results/GPU/BACKEND.json")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--repeats", type=int, default=1000, help="of each call, for races")
    parser.add_argument("--rounds", type=int, default=10, help="of all candidates, for speed")
    parser.add_argument("--plan", action="store_true", help="tell what would be done, and end")
    args = parser.parse_args()
    if args.plan:
        told = plan(args)
        for name in args.steps:
            print(name, *told[name], sep="\n  ")
        return 0
    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing to measure", file=sys.stderr)
        return 2
    backend = dispatch.load(args.backend)
    if isinstance(backend, str):
        print(f"the backend {args.backend} is {backend}", file=sys.stderr)
        return 2
    results: dict[str, Any] = {"environment": environment(args.backend)}
    folder = ROOT / "benchmarks/results" / processor_slug(results["environment"])
    args.out = args.out or folder / f"{args.backend}.json"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    steps = {
        "conformance": conformance,
        "correctness": correctness,
        "races": races,
        "hopper": hopper,
        "operators": operators,
        "speed": speed,
        "serving": serving,
    }
    for name in args.steps:
        if name in SPEEDS and not all(step.get("ok", True) for step in results.values()):
            print("not right, so no speed is measured", file=sys.stderr)
            break
        began = time.monotonic()
        results[name] = steps[name](args) | {"seconds": time.monotonic() - began}
        verdict = "ok" if results[name]["ok"] else "FAILED"
        print(f"{name}: {verdict}, {results[name]['seconds']:.0f} s")
        args.out.write_text(json.dumps(results, indent=1, default=str) + "\n")
    return 0 if all(step.get("ok", True) for step in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
