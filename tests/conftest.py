"""Fixtures of all tests: the available backends, and reproducible random numbers."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

# Triton reads it once, when it is imported: its kernels are interpreted where there is no GPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Ignore the evidence that `fastattn tune` has stored for the user.
os.environ["FASTATTN_CACHE_DIR"] = "/nonexistent"

import extended  # noqa: F401  the exact results of float64
from required import REQUIRE_NATIVE
from tile_attention import EMULATED, REAL, on

import fastattn
from fastattn import dispatch, info
from fastattn.testing import Target, targets
from fastattn.testing.targets import fresh_memory_is_nan

pytest_plugins = ["sample"]  # which tests `make test` leaves to the complete run

# pytest puts this folder on the path, where its `triton` would pass for the package of that name.
sys.path.remove(os.path.dirname(__file__))


def pytest_report_header() -> list[str]:
    """Say which build, processor and PyTorch the tests run on."""
    facts = info.collect()
    library = getattr(sys.modules.get("fastattn._cpu"), "__file__", None)
    isa = facts["isa"]["isa"] if facts["isa"] else "none"
    stale = ", OLDER THAN csrc" if facts["backends"]["cpu"].get("stale") else ""
    return [
        f"fastattn {facts['fastattn']} from {os.path.dirname(fastattn.__file__)}",
        f"native core {library}, instruction set {isa}{stale}",
        f"torch {facts['torch']}, {facts['threads']} threads, {facts['cpu']['model']}",
    ]


def available_backends() -> list[str]:
    """The backends of this machine and build, the reference last."""
    return [name for name in dispatch.PRIORITY["cpu"] if info.collect()["backends"][name]["built"]]


@pytest.fixture(params=available_backends())
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each available backend in turn, forced: the test runs inside `use_backend`."""
    with fastattn.use_backend(request.param):
        yield request.param


@pytest.fixture(params=["unforced", *available_backends()])
def choice(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each available backend, forced; and the first, not forced: plain calls take the fast path."""
    if request.param == "unforced":
        yield available_backends()[0]
        return
    with fastattn.use_backend(request.param):
        yield request.param


@pytest.fixture(params=targets(), ids=str)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Each native backend on each of its instruction sets in turn, active within the test."""
    with request.param.active():
        yield request.param


@pytest.fixture(params=[*targets(), Target("reference")], ids=str)
def engine(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Each native backend on each of its instruction sets, and the reference, forced in turn.

    Fresh memory is NaN, which shows an element that is never written.
    """
    target = request.param
    with fastattn.use_backend(target.backend), target.active(), fresh_memory_is_nan():
        yield target


@pytest.fixture(params=[on(EMULATED), on(REAL)])
def chosen_tiles(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[str]:
    """The instruction set of the tiles, with no backend forced."""
    isa: str = request.param
    with Target("cpu", isa).active():
        yield isa


@pytest.fixture
def tiles(chosen_tiles: str) -> Iterator[str]:
    """Our kernels on tiles, whichever this processor prefers."""
    with fastattn.use_backend("cpu"):
        yield chosen_tiles


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads of PyTorch; the test leaves it as it was."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def same_for_any_threads(threads: Callable[[int], None]) -> Callable[[Callable[[], Any]], Any]:
    """Runs a function with several numbers of threads, and checks that no bit differs."""

    def check(run: Callable[[], Any]) -> Any:
        """Run with several numbers of threads; all results must have the same bits."""
        threads(1)
        want = run()
        for count in (2, 3, 7, 2):
            threads(count)
            torch.testing.assert_close(run(), want, rtol=0, atol=0)
        return want

    return check


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of every instruction set; order cases to reuse exact results."""
    for item in items:
        if "target" in getattr(item, "fixturenames", ()):
            item.add_marker("every_isa")

    # One case on all targets, then the next case: the exact results of the last cases are cached.
    first: dict[tuple[Any, ...], int] = {}
    places = [first.setdefault(_case_of(item), n) for n, item in enumerate(items)]
    items[:] = [items[n] for n in sorted(range(len(items)), key=places.__getitem__)]


def _case_of(item: pytest.Item) -> tuple[Any, ...]:
    """The test and its parameters but for the target."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return (item.nodeid,)
    # The values are the same objects for each target.
    others = [(k, id(x)) for k, x in callspec.params.items() if k not in ("target", "engine")]
    return (item.nodeid.partition("[")[0], *others)


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The native module of the CPU."""
    try:
        return importlib.import_module("fastattn._cpu")
    except ImportError as error:
        if REQUIRE_NATIVE:
            pytest.fail(f"FASTATTN_REQUIRE_NATIVE is set, but there is no native core: {error}")
        pytest.skip(f"no native core: {error}")


@pytest.fixture(scope="session")
def adapter() -> ModuleType:
    """The adapter of the CUDA kernels, which run under the emulator."""
    import emulator

    return emulator.load()


@pytest.fixture
def seeded() -> None:
    """The generator of PyTorch begins at the same seed."""
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """PyTorch's compiler without the graphs of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """Random numbers that depend on the test's file and name: not on its folder, nor on which tests
    ran before."""
    name = request.node.nodeid.partition("::")[2]
    return torch.Generator().manual_seed(zlib.crc32(f"tests/{request.path.name}::{name}".encode()))


@pytest.fixture
def normal(generator: torch.Generator) -> Callable[..., torch.Tensor]:
    """Draws normal numbers of a shape from the test's generator, in float64."""
    return functools.partial(torch.randn, dtype=torch.float64, generator=generator)


@pytest.fixture
def triton_interpreter() -> Iterator[None]:
    """Triton's kernels on the CPU, interpreted; on the GPU where there is one."""
    if importlib.util.find_spec("triton") is None:
        if REQUIRE_NATIVE:
            pytest.fail("FASTATTN_REQUIRE_NATIVE is set, but triton is not installed")
        pytest.skip("triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's kernels run on the GPU here: see tests/gpu")
    import triton_interpreter

    triton_interpreter.mend()
    with triton_interpreter.quiet():
        yield
