"""The table of evidence: the choices for each processor, the user's own entries, and its reports.

No test asks what this processor is: ``be`` puts another one in its place.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from gemms import gemms
from processors import H200, be, on_a_gpu

import fastattn
from fastattn import __version__, cli, dispatch, evidence, info
from fastattn.backends import reference
from fastattn.backends.primitives import AttentionOptions, NoOptions
from fastattn.evidence import Gemm, Processor, Row
from fastattn.explanation import explanation
from fastattn.nn import _small

ATTENTION = "scaled_dot_product_attention"
ISAS = ["baseline", "avx2", "avx512", "avx512_bf16"]
BF16 = frozenset({"avx2", "avx512f", "avx512_bf16"})

AMD = Processor("cpu", "AMD", "AMD EPYC", BF16)
AMX = Processor("cpu", "Intel", "Xeon", BF16 | {"avx512_fp16", "amx_tile", "amx_bf16"})
AMX_FP16 = AMX._replace(name="newer Xeon", features=AMX.features | {"amx_fp16"})
INTEL = Processor("cpu", "Intel", "Xeon without AMX", BF16)
OLD_INTEL = Processor("cpu", "Intel", "Xeon without bf16", frozenset({"avx2", "avx512f"}))
OLD_AMD = Processor("cpu", "AMD", "AMD EPYC without AVX-512", frozenset({"avx2", "fma"}))
ARM = Processor("cpu", "ARM", "Neoverse", frozenset({"asimd", "bf16"}))
UNKNOWN = Processor("cpu")
EVERY = {
    "AMD": AMD,
    "old AMD": OLD_AMD,
    "AMX": AMX,
    "AMX-FP16": AMX_FP16,
    "Intel": INTEL,
    "old Intel": OLD_INTEL,
    "ARM": ARM,
    "?": UNKNOWN,
}


def order(dtype: torch.dtype, queries: int = 64, op: str = ATTENTION) -> tuple[str, ...]:
    """The backends that would run a call on the CPU, in order."""
    return dispatch._order("cpu", op, (torch.empty(1, 1, queries, 8, dtype=dtype),))


@pytest.mark.parametrize("name", EVERY)
def test_the_order_of_backends(name: str) -> None:
    with be(EVERY[name]):
        by_torch = ("torch",) if name == "AMX-FP16" else ()
        assert order(torch.float16) == (*by_torch, "cpu", "reference")
        assert order(torch.float16, op=f"{ATTENTION}_backward") == (*by_torch, "cpu", "reference")
        assert order(torch.float16, queries=15) == ("cpu", "reference")
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            assert order(dtype) == ("cpu", "reference")
        assert order(torch.bfloat16, op="memory_hop_attention") == ("cpu", "reference")


@pytest.mark.parametrize("name", EVERY)
def test_the_instruction_set(name: str) -> None:
    intel = "avx512_bf16,bfloat16=avx512"
    tiles = "amx_bf16,float64=avx512_bf16"
    on_vectors = f"{tiles},float16=avx512_bf16"
    with be(EVERY[name]):
        supported = [*ISAS, "amx_bf16"] if "AMX" in name else ISAS
        best = {"AMX": tiles, "AMX-FP16": on_vectors, "Intel": intel}
        assert evidence.isa(supported) == best.get(name, "avx512_bf16")
        assert evidence.isa(ISAS[:2]) == "avx2"  # not what the build or the processor lacks
        assert evidence.isa(["baseline"]) == "baseline"
        # A build for one machine lacks the others.
        of_one = evidence.isa(["baseline", "avx512_bf16", "amx_bf16"])
        assert of_one == (best[name] if "AMX" in name else "avx512_bf16")


@pytest.mark.parametrize("name", EVERY)
def test_the_gemm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field of the choice, on a processor for which it differs."""
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(gemms, "_IN_16_BITS", {})  # on any machine
    monkeypatch.setattr(gemms._cpu, "has_tiles", lambda dtype: True)
    tiles, old = name.startswith("AMX"), name in ("old AMD", "old Intel")
    with be(EVERY[name]):
        half = gemms.rule(torch.bfloat16)
        products = "ours" if old else "onednn"
        assert half[:3] == (
            products,
            products if tiles or old else "torch",
            "ours" if old else "torch",
        )
        assert half.ours_up_to == (0 if tiles or old else 2**25)
        library = "torch" if name == "old AMD" or "Intel" in name else "onednn"
        single = ("tiles",) * 3 if tiles else (library, library, "torch")
        assert gemms.rule(torch.float32)[:3] == single
        assert gemms.rule(torch.float16).y == (
            "torch" if name == "AMX-FP16" else "tiles" if tiles else "ours"
        )
        assert _small._work_limit(torch.bfloat16) == half.small_up_to
    with be(INTEL):
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
        evidence.forget()
        assert gemms.rule(torch.float32).y == "onednn"
    with be(AMX):  # another instruction set was requested
        monkeypatch.setattr(gemms._cpu, "has_tiles", lambda dtype: False)
        evidence.forget()
        assert gemms.rule(torch.float16)[:3] == ("torch",) * 3


@pytest.mark.parametrize(
    ("limit", "gemm"), [("AVX2", "ours"), ("avx512_core", "ours"), ("AVX512_CORE_BF16", "onednn")]
)
def test_the_gemm_follows_onednns_instruction_sets(
    limit: str, gemm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemms, "_IN_16_BITS", {})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    with be(AMD):
        assert gemms.rule(torch.bfloat16).y == gemm


HALF = torch.empty(1, 1, 4, 8, dtype=torch.bfloat16)
RECORD = Row("backends", H200.key, "bfloat16", ["cuda", "torch"], "measured", ATTENTION)


@pytest.mark.parametrize("name", ["", "NVIDIA H200", "NVIDIA A100"])
def test_a_gpu_without_a_record_runs_none_of_our_kernels(name: str) -> None:
    with be(Processor("cuda", "NVIDIA" if name else "", name)):
        for op, tensor in ((ATTENTION, HALF), (ATTENTION, HALF.float()), ("merge_states", HALF)):
            assert dispatch._order("cuda", op, (tensor,)) == ("torch", "reference")


def test_a_record_admits_our_kernels_on_its_gpu_alone(own: Path) -> None:
    with be(H200):
        evidence.set_own([RECORD, RECORD._replace(dtypes="float16", use=["triton"])])
        assert dispatch._order("cuda", ATTENTION, (HALF,)) == ("cuda", "torch", "reference")
        assert dispatch._order("cuda", ATTENTION, (HALF.half(),)) == ("triton", "reference")
        evidence.set_own([RECORD._replace(use=["torch", "cuda"])])  # float16 stays
        assert dispatch._order("cuda", ATTENTION, (HALF,))[0] == "torch"
        assert len(json.loads(own.read_text())["rows"]) == 2
        assert dispatch._order("cuda", "merge_states", (HALF,)) == ("torch", "reference")
    with be(H200._replace(name="NVIDIA A100")):  # a home folder may be shared
        assert dispatch._order("cuda", ATTENTION, (HALF,)) == ("torch", "reference")


def test_appending_is_admitted_with_decoding(own: Path) -> None:
    with be(H200):
        evidence.set_own([RECORD._replace(op="decode_attention")])
        assert dispatch._order("cuda", "append_to_cache", (HALF,))[0] == "cuda"


def test_the_record_of_another_version_admits_nothing(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels may have changed since."""
    with be(H200):
        evidence.set_own([RECORD])
        monkeypatch.setattr(evidence, "__version__", "99.0")
        evidence.forget()
        assert dispatch._order("cuda", ATTENTION, (HALF,)) == ("torch", "reference")


def test_every_gpu_of_a_machine_has_its_own_record(own: Path) -> None:
    names = {0: "NVIDIA T4", 1: H200.name}
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_device_name", names.__getitem__),
    ):
        evidence.forget()
        evidence.set_own([RECORD])
        for index, first in enumerate(("torch", "cuda")):
            device = torch.device("cuda", index)
            tensor = SimpleNamespace(dtype=torch.bfloat16, device=device, shape=(1, 1, 4, 8))
            assert dispatch._order("cuda", ATTENTION, (tensor,))[0] == first
    evidence.forget()


class Kernels(ModuleType):
    """Merges states by the reference."""

    merge_states = staticmethod(reference.merge_states)

    def why_not(self, *args: Any) -> list[str]:
        return []


def test_unverified_kernels_warn_once_and_run_when_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(2, 5, 8), torch.randn(2, 5), torch.randn(2, 5, 8), torch.randn(2, 5)
    options = NoOptions()
    with on_a_gpu(Kernels("kernels"), monkeypatch, "triton", cuda="not built: no nvcc"):
        with pytest.warns(dispatch.FallbackWarning, match=r"\(triton\) are built, but unverified"):
            assert dispatch.choose("merge_states", states, options) == "reference"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert dispatch.choose("merge_states", states, options) == "reference"
            with fastattn.use_backend("triton"):
                assert dispatch.choose("merge_states", states, options) == "triton"
            found = explanation("merge_states", states, options)
        assert found.runs == "reference"
        assert found.reasons["triton"] == [evidence.UNVERIFIED]


def test_nothing_warns_where_no_kernel_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(2, 5, 8), torch.randn(2, 5), torch.randn(2, 5, 8), torch.randn(2, 5)
    with on_a_gpu("not built: no GPU", monkeypatch, "cuda", "triton"):
        assert dispatch.choose("merge_states", states, NoOptions()) == "reference"


def test_info_names_an_unverified_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with be(H200):
        text = info.format_text(info.collect())
        for shapes in ("sdpa dtype=bf16", "sdpa dtype=bf16 mask=bool", "additive"):
            assert cli.main(["explain", "--device", "cuda", "--shapes", shapes]) == 0
    unverified = evidence.UNVERIFIED
    assert f"bfloat16, float16: torch [{unverified}]" in text
    of_bf16, of_masked, of_additive = capsys.readouterr().out.split("_attention on cuda\n")[1:]
    assert "torch      runs" in of_bf16
    for text in (of_bf16, of_masked, of_additive):
        assert f"order      torch, reference ({unverified})" in text
        assert f"triton     {unverified}" in text
    for text in (of_masked, of_additive):
        assert "reference  runs" in text


def test_a_device_whose_backends_were_replaced_is_left_alone() -> None:
    with be(AMX), mock.patch.dict(dispatch.PRIORITY, {"cpu": ("cuda", "reference")}):
        assert order(torch.bfloat16) == ("cuda", "reference")


def test_the_processor_without_a_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastattn._cpu", None)
    intel = (
        "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\nmodel name : X\n"
        "flags : avx2 amx_bf16\n"
    )
    for text, want in (
        (
            intel,
            Processor("cpu", "Intel", "X (family 6, model 143)", frozenset({"avx2", "amx_bf16"})),
        ),
        (
            "CPU implementer : 0x41\nFeatures : asimd bf16\n",
            ARM._replace(name="", features=frozenset({"asimd", "bf16"})),
        ),
        ("", UNKNOWN),
    ):
        monkeypatch.setattr(Path, "read_text", lambda _, text=text: text)
        evidence.processor.cache_clear()
        assert evidence.processor() == want
    evidence.processor.cache_clear()


# -- the user's own -------------------------------------------------------------------------------

OWN = Row("backends", AMD.key, "float16", ["torch", "cpu"], "measured", ATTENTION)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's file of evidence, in a new folder."""
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path / "of" / "mine"))
    evidence.forget()
    yield tmp_path / "of" / "mine" / "evidence.json"
    monkeypatch.undo()
    evidence.forget()


def test_the_users_own_rows_come_first(own: Path) -> None:
    with be(AMD):
        assert order(torch.float16) == ("cpu", "reference")
        assert evidence.set_own([OWN]) == own
        assert order(torch.float16) == ("torch", "cpu", "reference")
        choice = explanation(
            ATTENTION, (torch.empty(1, 1, 4, 8).half(),) * 3 + (None,) * 3,
            AttentionOptions(scale=1.0),
        )  # fmt: skip
        assert f"your `fastattn tune`, with version {__version__}: measured" in str(choice)
    with be(AMX):  # another processor: a home folder may be shared
        assert order(torch.float16) == ("cpu", "reference")
        evidence.set_own([OWN._replace(on=AMX.key)])
    assert len(json.loads(own.read_text())["rows"]) == 2
    with be(AMD):
        evidence.set_own([OWN._replace(use=["cpu"])])  # in place of the one for this processor
        assert order(torch.float16) == ("cpu", "reference")
    assert len(json.loads(own.read_text())["rows"]) == 2
    with be(AMD):
        evidence.set_own(
            [Row("gemm", AMD.key, "float64", Gemm("onednn", "torch", "ours"), "measured")]
        )
        assert gemms.rule(torch.float64) == Gemm("onednn", "torch", "ours")


GOOD = {**OWN._asdict(), "version": "0.2.0"}


@pytest.mark.parametrize(
    "table",
    [
        "{",
        [],
        {"format": 1, "entries": []},
        {"format": 3, "rows": None},
        {"format": 3, "rows": [[]]},
        {"format": 3, "rows": [{"choice": "isa"}]},
        *(
            {"format": 3, "rows": [{**GOOD, **changed}]}
            for changed in (
                {"use": "cpu"}, {"choice": "isa"}, {"choice": "gemm", "use": [1, 2, 3, 4, 5]},
                {"choice": "gemm", "use": ["torch", "mkl", "torch"]},
                {"choice": "colour"}, {"dtypes": ["float16"]}, {"op": ["merge_states"]},
                {"least_queries": "1"}, {"speed": 3}, {"version": ""}, {"use": ["gpu"]},
            )
        ),
    ],
)  # fmt: skip
def test_a_broken_user_file_is_reported_and_skipped(own: Path, table: Any) -> None:
    own.parent.mkdir(parents=True)
    with be(AMX_FP16):
        own.write_text(table if isinstance(table, str) else json.dumps(table))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            evidence.forget()
            assert {order(torch.float16), order(torch.float16)} == {("torch", "cpu", "reference")}
        own.unlink()
    (warning,) = caught
    assert re.search(r"evidence\.json\) are not used: .*tune --reset", str(warning.message))
    assert warning.filename == __file__


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FASTATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert evidence.own_file() == tmp_path / "fastattn" / "evidence.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert evidence.own_file() == tmp_path / ".cache" / "fastattn" / "evidence.json"


# -- info and explain --------------------------------------------------------------------------


def test_info_and_explain_name_choice_and_evidence() -> None:
    x = torch.empty(1, 1, 64, 8, dtype=torch.float16)
    with be(AMX_FP16):
        text = info.format_text(info.collect())
        assert "float16: torch, cpu (from 16 queries on) [not measured: PyTorch multiplies" in text
        found = str(fastattn.explain(ATTENTION, x.zero_(), x, x))
        assert "order      torch, cpu, reference (not measured: PyTorch multiplies" in found
    with be(UNKNOWN):
        assert "cpu [not measured on this processor]" in info.format_text(info.collect())
        found = str(fastattn.explain(ATTENTION, x, x, x))
        assert "cpu, reference (not measured on this processor)" in found
        with fastattn.use_backend("reference"):
            assert "reference is forced" in str(fastattn.explain(ATTENTION, x, x, x))


# -- the instruction set of each dtype ------------------------------------------------------------


@pytest.fixture
def restored(native: Any) -> Iterator[Any]:
    """Reset the instruction set after a test."""
    before = native.build_info()["isa"]
    yield native
    native.set_isa(before)


def test_each_dtype_has_its_own_instruction_set(restored: Any) -> None:
    strongest = restored.build_info()["supported"][-1]
    weakest = restored.build_info()["supported"][0]
    restored.set_isa(f"{strongest},bfloat16={weakest}")
    spelled = restored.build_info()["isa"]
    assert spelled == (strongest if strongest == weakest else f"{strongest},bfloat16={weakest}")
    x = torch.randn(1, 2, 40, 24)
    mixed = [
        fastattn.scaled_dot_product_attention(*[x.to(d)] * 3) for d in (x.dtype, torch.bfloat16)
    ]
    for isa, dtype, got in zip((strongest, weakest), (x.dtype, torch.bfloat16), mixed, strict=True):
        restored.set_isa(isa)
        assert torch.equal(fastattn.scaled_dot_product_attention(*[x.to(dtype)] * 3), got)
    restored.set_isa(spelled)
    assert restored.build_info()["isa"] == spelled


@pytest.mark.parametrize(
    ("spelled", "message"),
    [("mmx", '"mmx" is not available'), ("baseline,half=baseline", '"half" is no dtype'),
     ("baseline,bfloat16", "must be dtype=instruction set"), ("baseline,float16=mmx", '"mmx"')],
)  # fmt: skip
def test_a_wrong_instruction_set_is_named(restored: Any, spelled: str, message: str) -> None:
    before = restored.build_info()["isa"]
    with pytest.raises(ValueError, match=message):
        restored.set_isa(spelled)
    assert restored.build_info()["isa"] == before


def test_a_forced_instruction_set_overrides_evidence(restored: Any) -> None:
    restored.set_isa("baseline")
    restored.set_default_isa(restored.build_info()["supported"][-1])
    assert restored.build_info()["isa"] == "baseline"


def test_a_failed_write_keeps_the_old_file(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence.set_own([OWN])
    before = own.read_text()

    def full(*paths: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        evidence.set_own([OWN._replace(use=["torch"])])
    assert own.read_text() == before
    assert list(own.parent.iterdir()) == [own]
