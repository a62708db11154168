"""What a user meets on a new GPU: the first-use check, `fastattn verify` and `fastattn tune`.

What they keep for the GPU is written to the folder of the step of `make gpu-day`. A rehearsal takes
the CPU for a GPU, as tests/core and tests/triton do.
"""

from __future__ import annotations

import functools
import itertools
import timeit
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from gpu_device import DEVICE, REHEARSED, skip_without_gpu
from processors import be, on_a_gpu

import fastattn
from fastattn import cli, dispatch, evidence, selftest, tune_gpu, verify
from fastattn.evidence import Processor
from fastattn.testing import OnGpu
from fastattn.testing.selftest import SELFTESTS

skip_without_gpu()
pytestmark = pytest.mark.gpu

DTYPES = ("bfloat16", "float16", "float32")
TINY = {"merge_states": "B=1,H=1,L=4,D=8", "sinusoidal_encoding": "B=1,L=4,E=8"}
backends = pytest.mark.parametrize("backend", selftest.CHECKED)
operators = pytest.mark.parametrize("op", SELFTESTS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The GPU; in a rehearsal the CPU passes for one."""
    if not REHEARSED:
        yield
        return
    cuda, triton = map(dispatch.load, selftest.CHECKED)
    order = tune_gpu.order

    def once(what: str, candidates: dict[str, Callable[[], Any]]) -> dict[str, float]:
        return {name: timeit.timeit(call, number=1) for name, call in candidates.items()}

    def on_cpu(op: str, dtype: torch.dtype, *_: Any) -> Any:
        return order(op, dtype, once, torch.device(DEVICE))

    rehearsed = Processor("cuda", "", "the CPU in a rehearsal")
    with on_a_gpu(cuda, monkeypatch, "cuda", triton=triton), be(rehearsed):
        monkeypatch.setattr(verify, "OnGpu", functools.partial(OnGpu, device=DEVICE))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(tune_gpu, "order", on_cpu)
        for op, sizes in TINY.items():
            stem, _, mask = tune_gpu.MEASURED[op]
            monkeypatch.setitem(tune_gpu.MEASURED, op, (stem, sizes, mask))
        yield


@pytest.fixture
def kept(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None
) -> Iterator[Path]:
    """The folder of what is kept for the GPU: that of the step, if one runs this."""
    record: Path | None = request.config.getoption("record", None)
    folder = record.with_suffix("") if record else tmp_path
    folder.mkdir(exist_ok=True)
    yield from keeping(folder, monkeypatch)


def keeping(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(folder))
    monkeypatch.setenv("FASTATTN_SELFTEST", "1")
    evidence.forget()  # and the verdicts
    yield folder
    evidence.forget()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None) -> Iterator[Path]:
    """An empty folder."""
    yield from keeping(tmp_path, monkeypatch)


def skip_if_not_built(backend: str) -> None:
    if isinstance(reason := dispatch.load(backend), str):
        pytest.skip(f"{backend}: {reason}")


def verdicts(backend: str, op: str, dtype: str) -> list[list[str]]:
    """The faults in each verdict that is kept about these kernels."""
    about = {"backend": backend, "op": op, "dtype": dtype}
    return [entry["faults"] for entry in selftest.stored() if about.items() <= entry.items()]


def test_first_call_is_checked_and_runs_a_kernel(fresh: Path) -> None:
    x = torch.linspace(-2, 2, 2 * 5 * 8, device=DEVICE).view(2, 5, 8)
    built = [name for name in selftest.CHECKED if not isinstance(dispatch.load(name), str)]
    if not built:
        pytest.skip("neither CUDA nor Triton is there")
    first = built[0]
    assert f"the first call checks {first}" in str(fastattn.explain("sinusoidal_encoding", x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", selftest.SelfTestWarning)
        checked = fastattn.sinusoidal_encoding(x)
    assert fastattn.explain("sinusoidal_encoding", x).runs == first
    assert [entry["backend"] for entry in selftest.stored()] == [first]
    with fastattn.use_backend(first), selftest.switched_off():
        assert torch.equal(fastattn.sinusoidal_encoding(x), checked)


@backends
@operators
@dtypes
def test_first_use_finds_right_kernels(backend: str, op: str, dtype: str, kept: Path) -> None:
    skip_if_not_built(backend)
    first = [torch.empty(1, dtype=getattr(torch, dtype), device=DEVICE)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", selftest.SelfTestWarning)
        reasons = selftest.why_not(backend, op, first, dispatch.load)
    found = verdicts(backend, op, dtype)
    assert not reasons, "\n".join([*itertools.chain(*found), *reasons])
    assert found == [[]]


@backends
@operators
@dtypes
def test_verify(backend: str, op: str, dtype: str, kept: Path) -> None:
    skip_if_not_built(backend)
    found = kept / f"{op}-{dtype}.xml"
    new = found.with_suffix(".new")
    chosen = ["--backend", backend, "--op", op, "--dtype", dtype, "--junit", str(new)]
    with selftest.switched_off():  # else a rehearsal, on tensors of the CPU, would run it, too
        code = cli.main(["verify", *chosen])
    new.replace(found)  # the report reads whole files
    failures = [one.get("message", "") for one in ElementTree.parse(found).iter("failure")]
    assert code == 0, "\n".join(failures)
    assert verdicts(backend, op, dtype) == [[]]


@pytest.mark.parametrize("op", tune_gpu.MEASURED)
@dtypes
def test_tune(op: str, dtype: str, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["tune", "--device", "cuda", "--op", op, "--dtype", dtype])
    said = capsys.readouterr().out.partition("\n")[2]  # without the name of the GPU
    with (kept / "said.txt").open("a") as file:
        file.write(said)
    assert code == 0, said
    found = evidence.choose("backends", "cuda", op, getattr(torch, dtype))
    assert found is not None
    assert found.is_own
