"""The first-use check of the Triton kernels, interpreted: right ones pass, mutants are not used."""

from __future__ import annotations

import functools
import importlib
import shutil
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from check_cases import declined
from processors import on_a_gpu
from test_triton_mutants import MUTANTS, PACKAGE, Mutant

import fastattn
from fastattn import backends, cli, dispatch, selftest, verify
from fastattn.backends.triton import _launch, _table
from fastattn.selftest import SelfTestWarning
from fastattn.testing import OnGpu
from fastattn.testing.proofs import PROOFS
from fastattn.testing.selftest import SELFTESTS, _Here, cases_of, faults
from fastattn.testing.verdict import AnyCase

pytestmark = pytest.mark.usefixtures("triton_interpreter")

ENCODE, SINUSOIDAL = "encode_memory", "sinusoidal_encoding"
X = torch.linspace(-2, 2, 2 * 5 * 8).view(2, 5, 8)
QUICK = ("append_to_cache", "encode_memory", "merge_states", "sinusoidal_encoding")
CPU = torch.device("cpu")
BF16 = torch.bfloat16


def changed(mutant: Mutant, folder: Path) -> Any:
    """The Triton backend with a bug, beside the real one."""
    shutil.copytree(PACKAGE / "backends/triton", folder / "triton")
    mutant.put_into(folder / "triton")

    def ours(name: str) -> bool:
        return f"{name}.".startswith("fastattn.backends.triton.")

    before = {name: sys.modules.pop(name) for name in list(sys.modules) if ours(name)}
    backends.__path__.insert(0, str(folder))
    try:
        module = importlib.import_module("fastattn.backends.triton")
        assert Path(str(module.__file__)).is_relative_to(folder)
        return module
    finally:
        backends.__path__.remove(str(folder))
        for name in filter(ours, list(sys.modules)):
            del sys.modules[name]
        sys.modules.update(before)
        vars(backends).pop("triton", None)
        if "fastattn.backends.triton" in before:
            vars(backends)["triton"] = before["fastattn.backends.triton"]


@pytest.mark.complete
@pytest.mark.parametrize(
    "op", [op if op in QUICK else pytest.param(op, marks=pytest.mark.slow) for op in SELFTESTS]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_right_kernels_pass(op: str, dtype: torch.dtype) -> None:
    with selftest.switched_off():
        assert faults("triton", op, dtype, CPU) == []


@pytest.mark.parametrize("op", SELFTESTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_case_is_declined(op: str, dtype: torch.dtype) -> None:
    module = importlib.import_module("fastattn.backends.triton")
    assert declined("triton", module, op, dtype) == []


@pytest.mark.complete
def test_every_kernel_of_an_operator_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every kernel of the table of launches, but not at each width."""
    module = importlib.import_module("fastattn.backends.triton")
    found: dict[str, set[str]] = defaultdict(set)  # by operator: kernels, and names in the table

    def recorded(name: str) -> Any:
        function, op = getattr(module, name), name.removesuffix("_backward")

        def choose(architecture: str, kernel: str, bits: int, width: int) -> _table.Launch:
            found[op].add(f"{kernel} of the table")
            return _table.choose(architecture, kernel, bits, width)

        @functools.wraps(function)
        def call(*tensors: Any, **options: Any) -> Any:
            with _launch.recording("sm_90") as launches, monkeypatch.context() as patched:
                patched.setattr(_launch, "choose", choose)
                results = function(*tensors, **options)
            found[op].update(launch.kernel.fn.__name__ for launch in launches)
            return results

        return function if name == "why_not" else call

    names = [name for name in module.__all__ if callable(getattr(module, name))]
    backend = SimpleNamespace(**{name: recorded(name) for name in names}, INTERPRETED=True)

    def launched(op: str, cases: Sequence[AnyCase]) -> set[str]:
        found.clear()
        proof = PROOFS[op]
        for case in cases:
            if BF16 in case.dtypes and not case.slow:
                inputs = proof.make(case, BF16)
                assert proof.primitive is not None
                if not dispatch.reasons_of(module, op, *proof.primitive(inputs)):
                    _Here("triton", device="cpu").results(proof, backend, inputs)
        return found.pop(op)

    load = dispatch.load
    monkeypatch.setattr(dispatch, "load", lambda name: backend if name == "triton" else load(name))
    # What no kernel writes: a search of Hopfield then has taken one step.
    monkeypatch.setattr(torch, "empty", torch.ones)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_ones)
    with selftest.switched_off():
        for op in SELFTESTS:
            checked = launched(op, cases_of("triton", op))
            assert launched(op, PROOFS[op].cases) <= checked, op


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FASTATTN_SELFTEST")


def test_a_checked_call_has_the_bits_of_an_unchecked_one(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("fastattn.backends.triton")
    with on_a_gpu(module, monkeypatch, "triton"), warnings.catch_warnings():
        warnings.simplefilter("error")
        checked = fastattn.sinusoidal_encoding(X)
        assert fastattn.explain(SINUSOIDAL, X).runs == "triton"
        assert len(selftest.stored()) == 1
        monkeypatch.setenv("FASTATTN_SELFTEST", "0")
        selftest.forget()
        assert torch.equal(fastattn.sinusoidal_encoding(X), checked)


@pytest.mark.complete
def test_a_kernel_with_a_wrong_index_is_not_used(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Mutant(
        "the next word", "encode_memory.py", "i_j = place % words", "i_j = place * 0", "", ENCODE
    )
    tokens = torch.tensor([[[1, 2, 0], [3, 1, 2]]])
    weight = torch.arange(20.0).view(4, 5).requires_grad_()
    with on_a_gpu(changed(wrong, tmp_path), monkeypatch, "triton"):
        with pytest.warns(SelfTestWarning, match=f"triton kernels of {ENCODE} in float32 gave"):
            out = fastattn.encode_memory(tokens, weight, encoding="position")
        assert "failed its check" in fastattn.explain(ENCODE, tokens, weight).reasons["triton"][0]
        with fastattn.use_backend("reference"):
            assert torch.equal(fastattn.encode_memory(tokens, weight, encoding="position"), out)


def test_verify_keeps_its_verdict_in_place_of_the_checks(
    fresh: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("fastattn.backends.triton")
    command = ["verify", "--backend", "triton", "--op", SINUSOIDAL, "--dtype", "float32"]
    monkeypatch.setattr(verify, "OnGpu", functools.partial(OnGpu, device="cpu"))
    with on_a_gpu(module, monkeypatch, "triton", cuda="not built"):
        assert cli.main([*command, "--case", "memory-transposed"]) == 0
        assert selftest.stored() == []  # one case is not the whole table
        right = module.sinusoidal_encoding

        def wrong(*args: Any, **options: Any) -> Any:
            return right(*args, **options) + 1

        with monkeypatch.context() as patched:
            patched.setattr(module, SINUSOIDAL, wrong)
            assert cli.main([*command, "--case", "memory-transposed"]) == 1
        (entry,) = selftest.stored()
        assert "case memory-transposed" in entry["faults"][0]
        assert "failed its check" in fastattn.explain(SINUSOIDAL, X).reasons["triton"][0]
        few = replace(PROOFS[SINUSOIDAL], cases=PROOFS[SINUSOIDAL].cases[:3])
        monkeypatch.setitem(PROOFS, SINUSOIDAL, few)
        assert cli.main(command) == 0
        assert [entry["faults"] for entry in selftest.stored()] == [[]]
        assert fastattn.explain(SINUSOIDAL, X).runs == "triton"
        assert "kept for this GPU in" in capsys.readouterr().out


# The cases of attention take long to interpret: a few of its mutants stand for the others.
OF_ATTENTION = {
    "the_wrong_value_head",
    "a_diagonal_off_by_one",
    "a_row_of_the_mask_is_shifted",
    "dq_is_not_scaled",
    "a_tile_of_the_sequence_before",
}
# Those that one case finds and no other.
ONLY = {
    "a_row_of_a_boolean_mask_is_shifted": "first-use-mask",
    "averaged_weights_are_a_sum": "first-use-mask",
    "gradients_of_averaged_weights_are_a_sum": "first-use-mask",
    "the_bits_of_a_block_are_those_of_the_next_query": "first-use-options",
    "both_operands_are_needed": "first-use-options",
    "chunks_are_not_rescaled": "first-use-long",
    "all_tiles_have_the_first_chunks": "first-use-long",
    "chunks_before_a_window_count": "first-use-long",
    "a_sigmoid_has_slope_y": "batch=2-rows=520-width=21-activation=sigmoid-weights=True",
}
LONG = ("scaled_dot_product_attention", "varlen_attention")
CHOSEN = [m for m in MUTANTS if m.op not in LONG or m.name in OF_ATTENTION or m.name in ONLY]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", CHOSEN, ids=str)
def test_a_mutant_is_found(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = changed(mutant, tmp_path)
    monkeypatch.setattr("fastattn.dispatch.load", lambda name: module)
    with selftest.switched_off():
        try:
            found = faults("triton", mutant.op, getattr(torch, mutant.dtype), CPU)
        except selftest.Inconclusive as why:  # a kernel that raises
            found = [str(why)]
    assert found
    if mutant.name in ONLY:
        assert all(f", case {ONLY[mutant.name]}, " in fault for fault in found), found
