"""The tests of tests/gpu: they run every kernel of a GPU, and find wrong ones. No GPU is needed."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import dispatch
from fastattn.backends import reference
from fastattn.testing import OnGpu
from fastattn.testing.append import APPEND_CASES, AppendCase, check_append
from fastattn.testing.judge import Verdict

ROOT = Path(__file__).resolve().parents[2]


def of_gpus(backend: str) -> set[str]:
    """The functions of a backend, by its source: its module may not be built."""
    tree = ast.parse((ROOT / f"fastattn/backends/{backend}/__init__.py").read_text())
    (names,) = (
        ast.literal_eval(one.value)
        for one in tree.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "__all__"
    )
    return set(names) - {"why_not", "INTERPRETED"}


KERNELS = of_gpus("cuda") | of_gpus("triton")


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of tests/gpu as a rehearsal does."""
    monkeypatch.setenv("FASTATTN_REHEARSAL", "/nonexistent")
    monkeypatch.syspath_prepend(str(ROOT / "tests/gpu"))
    names = ("gpu_device", "test_cases_on_gpu", "test_races_on_gpu")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_the_case_tables_of_all_kernels_run_on_a_gpu(rehearsed: Callable[[str], Any]) -> None:
    module = rehearsed("test_cases_on_gpu")
    params = {mark.args[0]: mark.args[1] for mark in module.test_case.pytestmark}
    found: dict[str, set[str]] = {}
    for proof, case in (param.values for param in params["proof", "case"]):
        found.setdefault(proof.operator, set()).add(case.name)
    assert set(found) == {name for name in KERNELS if not name.endswith("_backward")}
    assert found["append_to_cache"] == {case.name for case in APPEND_CASES}


def test_repeats_run_all_kernels_forward_and_backward(
    rehearsed: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    races = rehearsed("test_races_on_gpu")
    ran: set[str] = set()

    class Watched(ModuleType):
        def __getattr__(self, name: str) -> Any:
            function = getattr(reference, name)

            @functools.wraps(function)
            def call(*args: Any, **options: Any) -> Any:
                ran.add(name)
                return function(*args, **options)

            return call

    watched, load = Watched("reference"), dispatch.load
    monkeypatch.setattr(dispatch, "load", lambda n: watched if n == "reference" else load(n))
    monkeypatch.setattr(fastattn, "use_backend", lambda name: dispatch.use_backend("reference"))
    for name in races.CALLS:
        races.test_a_race_would_show_in_some_of_many_runs("reference", name, torch.float32)
    assert ran & KERNELS == KERNELS


@pytest.mark.parametrize("name", ["attention-causal", "attention-masked", "packed"])
def test_repeats_of_attention_have_several_tiles_for_a_block_and_grouped_heads(
    name: str, rehearsed: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    races = rehearsed("test_races_on_gpu")
    monkeypatch.setattr(sys.modules["gpu_device"], "REHEARSED", False)

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    _, (query, key, *_) = races.CALLS[name](draw)
    if name == "packed":  # [L, H, D]
        query, key = (x.transpose(0, 1)[None] for x in (query, key))
    group = query.shape[1] // key.shape[1]
    assert group > 1
    for rows in (query.shape[2] * group, key.shape[2]):  # a tile has the heads of a group
        tiles = key.shape[0] * key.shape[1] * -(-rows // 128)
        assert tiles > 132, "no more than the multiprocessors of an H200"


def nothing(*args: Tensor | None, options: Any) -> None:
    pass


def elsewhere(*args: Tensor | None, options: Any) -> None:
    reference.append_to_cache(*args, options=options)
    args[1][-1, -1, -1, -1] = 0.0  # type: ignore[index]


def into_the_keys(*args: Tensor | None, options: Any) -> None:
    reference.append_to_cache(*args, options=options)
    args[2].neg_()  # type: ignore[union-attr]


def a_row_later(*args: Tensor | None, options: Any) -> None:
    key_cache, value_cache, key, value, lengths, *others = args
    given = (key_cache, value_cache, key, value, lengths + 1, *others)  # type: ignore[operator]
    reference.append_to_cache(*given, options=options)


def before_the_cache(*args: Tensor | None, options: Any) -> None:
    reference.append_to_cache(*args, options=options)
    cache: Any = args[1]
    cache.as_strided((1,), (1,), cache.storage_offset() - 1).zero_()


def appended(
    kernel: Callable[..., None], case: AppendCase, monkeypatch: pytest.MonkeyPatch
) -> Verdict:
    """The verdict on a case of a kernel for GPUs."""
    backend = ModuleType("fastattn.backends.triton")
    backend.__dict__.update(
        __all__=["append_to_cache"], append_to_cache=kernel, why_not=lambda *_: []
    )
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    return check_append(case, torch.float32, OnGpu("triton", device="cpu"))


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (reference.append_to_cache, None),
        (nothing, "key"),
        (elsewhere, "changed"),
        (into_the_keys, "key was written to"),
        (a_row_later, "changed"),
        (before_the_cache, "changed"),
    ],
)
def test_a_wrong_append_is_found_on_a_device(
    kernel: Callable[..., None], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = AppendCase("sliced", layouts=("sliced", "sliced"))
    found = appended(kernel, case, monkeypatch).faults
    assert bool(found) == (words is not None)
    assert any(words in fault for fault in found) if words else not found


@pytest.mark.parametrize(
    "case",
    [
        AppendCase("half", rotary=32),
        AppendCase("int8", quantised=torch.int8),
        AppendCase("fp8", quantised=torch.float8_e4m3fn),
        AppendCase("half-int8", rotary=32, quantised=torch.int8),
    ],
    ids=lambda case: case.name,
)
def test_a_kernel_without_an_option_is_not_called(
    case: AppendCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(key_cache: Tensor, value_cache: Tensor, key: Tensor, *, options: Any) -> None:
        pytest.fail("it was called")

    verdict = appended(plain, case, monkeypatch)
    assert verdict.declined
    assert not verdict.faults
