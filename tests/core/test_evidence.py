"""The table of evidence: what each kind of processor gets, the user's own entries, and its reports.

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
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from processors import H200, be

import fastattn
from fastattn import __version__, cli, dispatch, evidence, info, selftest
from fastattn.backends.primitives import AttentionOptions
from fastattn.evidence import Gemm, Processor
from fastattn.nn import _linear, _small

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
    tiles = "amx_bf16,float64=avx512_bf16,float16=avx512_bf16"
    with be(EVERY[name]):
        supported = [*ISAS, "amx_bf16"] if "AMX" in name else ISAS
        best = {"AMX": tiles, "AMX-FP16": tiles, "Intel": intel}
        assert evidence.isa(supported) == best.get(name, "avx512_bf16")
        assert evidence.isa(ISAS[:2]) == "avx2"  # not what the build or the processor lacks
        assert evidence.isa(["baseline"]) == "baseline"
        # A build for one machine lacks the others.
        of_one = evidence.isa(["baseline", "avx512_bf16", "amx_bf16"])
        assert of_one == (tiles if "AMX" in name else "avx512_bf16")


MEASURED = Gemm("onednn", "torch", 2**24 - 1, 2**25)
GEMMS = {
    "AMX": Gemm("onednn", "torch", 0, 2**20),
    "AMX-FP16": Gemm("onednn", "torch", 0, 2**20),
    "old AMD": Gemm("torch", "torch", 2**62, 2**62),
}


@pytest.mark.parametrize("name", EVERY)
def test_the_gemm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    with be(EVERY[name]):
        assert _linear.rule(torch.bfloat16) == GEMMS.get(name, MEASURED)
        of_mkl = "Intel" in name or "AMX" in name or name == "old AMD"
        library = "torch" if of_mkl else "onednn"
        assert _linear.rule(torch.float32) == Gemm(library, library, 0, 2**22)
        assert _small._most_work(torch.bfloat16) == _linear.rule(torch.bfloat16).small_up_to
    with be(INTEL):
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
        _linear.rule.cache_clear()
        assert _linear.rule(torch.float32).forward == "onednn"


def test_the_projections_follow_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_linear, "_ONEDNN_DTYPES", {torch.float32, torch.bfloat16})
    monkeypatch.setattr(_linear, "_ONEDNN_LINEAR", object())
    monkeypatch.setattr(_linear, "_native", lambda: object())
    x, weight = torch.empty(512, 512), torch.empty(512, 512)
    narrow, small = x.bfloat16(), torch.empty(16, 512).bfloat16()
    with be(AMD):
        assert _linear._is_ours(x, weight, None)
        assert _linear._is_for_our_gemm(small, narrow, None)
    with be(AMX):
        assert not _linear._is_ours(x, weight, None)
        assert _linear._is_ours(narrow, narrow, None)
        assert not _linear._is_for_our_gemm(small, narrow, None)


@pytest.mark.parametrize("name", ["", "NVIDIA H200", "NVIDIA A100"])
def test_a_gpu_without_a_record_has_pytorch_first(name: str) -> None:
    half = torch.empty(1, 1, 4, 8, dtype=torch.bfloat16)
    with be(Processor("cuda", "NVIDIA" if name else "", name)):
        found = dispatch._order("cuda", ATTENTION, (half,))
        assert found == ("torch", "cuda", "triton", "reference")
        for op, tensor in ((ATTENTION, half.float()), ("additive_attention", half)):
            assert dispatch._order("cuda", op, (tensor,)) == ("cuda", "triton", "reference")


def test_a_gpu_with_a_record_has_ours_first_where_they_are_faster(own: Path) -> None:
    half = torch.empty(1, 1, 4, 8, dtype=torch.bfloat16)
    record = {
        "choice": "backends", "device": "cuda", "vendor": ["NVIDIA"], "name": [H200.name],
        "op": ATTENTION, "dtype": ["bfloat16"], "use": ["cuda", "torch"], "source": "measured",
        "commit": "ac7efaf",
    }  # fmt: skip
    with be(H200):
        evidence.set_own([record, {**record, "dtype": ["float16"], "use": ["torch", "cuda"]}])
        assert dispatch._order("cuda", ATTENTION, (half,))[0] == "cuda"
        assert dispatch._order("cuda", ATTENTION, (half.half(),))[0] == "torch"
        found = evidence.choose("backends", "cuda", ATTENTION, torch.bfloat16)
        assert found is not None
        assert found.is_measured
        evidence.set_own([{**record, "use": ["torch", "cuda"]}])  # float16 stays
        assert dispatch._order("cuda", ATTENTION, (half,))[0] == "torch"
        assert len(json.loads(own.read_text())["entries"]) == 2
    with be(H200._replace(name="NVIDIA A100")):
        found = evidence.choose("backends", "cuda", ATTENTION, torch.bfloat16)
        assert found is not None
        assert not found.is_measured
        assert dispatch._order("cuda", ATTENTION, (half,))[0] == "torch"


def test_every_gpu_of_a_machine_has_its_own_record(own: Path) -> None:
    record = {
        "choice": "backends", "device": "cuda", "vendor": ["NVIDIA"], "name": [H200.name],
        "op": ATTENTION, "dtype": ["bfloat16"], "use": ["cuda", "torch"], "source": "measured",
    }  # fmt: skip
    names = {0: "NVIDIA T4", 1: H200.name}
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_device_name", names.__getitem__),
    ):
        evidence.forget()
        evidence.set_own([record])
        for index, first in enumerate(("torch", "cuda")):
            device = torch.device("cuda", index)
            tensor = SimpleNamespace(dtype=torch.bfloat16, device=device, shape=(1, 1, 4, 8))
            assert dispatch._order("cuda", ATTENTION, (tensor,))[0] == first
            processor = selftest.gpu(device)
            assert processor is not None
            assert processor.name == names[index]
    evidence.forget()


def test_an_unmeasured_gpu_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    masked = "sdpa dtype=bf16 mask=bool"  # PyTorch's kernel declines it
    with be(H200):
        text = info.format_text(info.collect())
        for shapes in ("sdpa dtype=bf16,fp32", masked, "additive"):
            assert cli.main(["explain", "--device", "cuda", "--shapes", shapes]) == 0
    unmeasured = "unmeasured on this GPU; run `fastattn tune`"
    assert f"bfloat16, float16: torch, cuda, triton [{unmeasured}]" in text
    printed = capsys.readouterr().out.split("_attention on cuda\n")[1:]
    of_bf16, of_fp32, of_masked, of_additive = printed
    assert "torch      runs" in of_bf16
    for text in (of_bf16, of_masked):
        assert f"order      torch, cuda, triton, reference ({unmeasured})" in text
    for text in (of_fp32, of_additive):
        assert f"order      cuda, triton, reference ({unmeasured})" in text
    for text in (of_fp32, of_masked, of_additive):
        assert "torch      runs" not in text


def test_a_device_whose_backends_were_replaced_is_left_alone() -> None:
    with be(AMX), mock.patch.dict(dispatch.PRIORITY, {"cpu": ("cuda", "reference")}):
        assert order(torch.bfloat16) == ("cuda", "reference")


def test_every_source_is_named_and_every_file_exists() -> None:
    root = Path(fastattn.__file__).parent.parent
    for entry in evidence._shipped():
        named = [
            w.strip(":,;") for w in entry["source"].split() if w.startswith(("docs/", "bench"))
        ]
        assert named or "not measured" in entry["source"] or "unmeasured" in entry["source"]
        if entry.get("device") == "cuda" and entry.get("name"):  # a record
            assert named[0].startswith("benchmarks/results/")
            assert entry.get("commit")
        if (root / "docs").exists():  # a source tree
            assert all((root / path).exists() for path in named), named


def test_what_this_processor_is() -> None:
    found = evidence.processor()
    assert found.device == "cpu"
    assert evidence.processor("cuda").device == "cuda"
    features = info.collect()["cpu"]["features"]
    assert found.features & set(info.CPU_FEATURES) <= set(features)


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

OWN: dict[str, Any] = {
    "choice": "backends", "device": "cpu", "name": ["AMD EPYC"], "op": ATTENTION,
    "dtype": ["float16"], "use": ["torch", "cpu"], "source": "measured", "date": "2026-11-22",
}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path / "of" / "mine"))
    evidence.forget()
    yield tmp_path / "of" / "mine" / "evidence.json"
    monkeypatch.undo()
    evidence.forget()


def test_the_users_own_entries_come_first(own: Path) -> None:
    with be(AMD):
        assert order(torch.float16) == ("cpu", "reference")
        assert evidence.set_own([OWN]) == own
        assert order(torch.float16) == ("torch", "cpu", "reference")
        choice = dispatch.explanation(
            ATTENTION, (torch.empty(1, 1, 4, 8).half(),) * 3 + (None,) * 3,
            AttentionOptions(scale=1.0),
        )  # fmt: skip
        measured = f"your `fastattn tune` of 2026-11-22, measured with version {__version__}"
        assert measured in str(choice)
    with be(AMX):  # another processor: a home folder may be shared
        assert order(torch.float16) == ("cpu", "reference")
        evidence.set_own([{**OWN, "name": ["Xeon"]}])
    assert len(json.loads(own.read_text())["entries"]) == 2
    with be(AMD):
        evidence.set_own([{**OWN, "use": ["cpu"]}])  # in place of the one for this processor
        assert order(torch.float16) == ("cpu", "reference")
    assert len(json.loads(own.read_text())["entries"]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"evidence\.json: Expecting"),
        ("[]", "no table of evidence of format 1"),
        ('{"format": 2, "entries": []}', "no table of evidence of format 1"),
        ("[" * 100_000, r"evidence\.json: maximum recursion depth"),
        ('{"format": 1, "entries": null}', r"evidence\.json: entries must be a list, got None"),
        ('{"format": 1, "entries": [[]]}', "entry 0: it needs choice, use"),
        ('{"format": 1, "entries": [{"choice": "isa"}]}', "entry 0: it needs choice, use"),
    ],
)
def test_a_broken_user_file_is_reported_and_skipped(own: Path, text: str, message: str) -> None:
    own.parent.mkdir(parents=True)
    with be(AMX_FP16):
        own.write_text(text)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            evidence.forget()
            assert {order(torch.float16), order(torch.float16)} == {("torch", "cpu", "reference")}
        own.unlink()
    (warning,) = caught
    assert re.search(f"not used: .*{message}.*tune --reset", str(warning.message))
    assert warning.filename == __file__


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use": ["gpu"]}, "use must be a list of torch, cpu"),
        ({"use": "cpu"}, "use must be a list"),
        ({"choice": "isa"}, "use must be an instruction set"),
        ({"choice": "gemm", "use": {"forward": "ours"}}, "use must be the fields of a Gemm"),
        ({"choice": "colour"}, "choice must be backends, isa or gemm, got 'colour'"),
        ({"dtype": "float16"}, "dtype must be a list"),
        ({"has": [["avx2"]]}, "has must be a list of strings"),
        ({"use": [["cpu"]]}, "use must be a list of torch, cpu"),
        ({"op": ["merge_states"]}, "op must be a string"),
        ({"least_queries": "1"}, "least_queries must be an integer, got '1'"),
        ({"speed": 3}, "unknown field 'speed'"),
    ],
)
def test_a_wrong_entry_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evidence._checked({"format": 1, "entries": [{**OWN, **changed}]}, "here")


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
        assert "cpu, reference [not measured on this processor]" in info.format_text(info.collect())
        found = str(fastattn.explain(ATTENTION, x, x, x))
        assert "cpu, reference (not measured on this processor)" in found
        with fastattn.use_backend("reference"):
            assert "reference is forced" in str(fastattn.explain(ATTENTION, x, x, x))


# -- the instruction set of each dtype ------------------------------------------------------------


@pytest.fixture
def restored(native: Any) -> Iterator[Any]:
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


def test_a_choice_by_evidence_yields_to_one_that_was_asked_for(restored: Any) -> None:
    restored.set_isa("baseline")
    restored.set_default_isa(restored.build_info()["supported"][-1])
    assert restored.build_info()["isa"] == "baseline"


def test_a_write_that_fails_leaves_the_old_file(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence.set_own([OWN])
    before = own.read_text()

    def full(*paths: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        evidence.set_own([{**OWN, "use": ["torch"]}])
    assert own.read_text() == before
    assert list(own.parent.iterdir()) == [own]


def test_writers_of_the_same_number_do_not_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each container counts its processes from 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    replace, path = os.replace, tmp_path / "evidence.json"

    def interrupted(new: str, old: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        evidence.replace_file(path, "of another")
        replace(new, old)

    monkeypatch.setattr(os, "replace", interrupted)
    evidence.replace_file(path, "of this one")
    assert path.read_text() == "of this one"
    assert list(tmp_path.iterdir()) == [path]
