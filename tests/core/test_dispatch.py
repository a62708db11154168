"""The choice of the backend: order, forcing, falling back, and what `explain` says about it."""

from __future__ import annotations

import contextvars
import dataclasses
import importlib.machinery
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from child_process import run_python
from torch import Tensor

import fastattn
from fastattn import FallbackWarning, dispatch, explain, library, use_backend
from fastattn.backends import reference
from fastattn.backends.primitives import AttentionOptions, SinusoidalOptions
from fastattn.call import Plans
from fastattn.explanation import explanation
from fastattn.ops import sdpa

attention = fastattn.scaled_dot_product_attention
OP = "scaled_dot_product_attention"


class Recorder(ModuleType):
    """A backend named "cpu" that computes with the reference, and records its calls."""

    def __init__(self, reasons: list[str] | None = None) -> None:
        super().__init__("recorder")
        self.reasons = reasons or []
        self.calls: list[str] = []

    def why_not(self, op: str, *args: Any, **kwargs: Any) -> list[str]:
        return self.reasons

    def scaled_dot_product_attention(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("forward")
        return reference.scaled_dot_product_attention(*args, **kwargs)

    def scaled_dot_product_attention_backward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("backward")
        return reference.scaled_dot_product_attention_backward(*args, **kwargs)


@pytest.fixture
def replace_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let a test replace the CPU backend by a module, or by the reason why it is missing."""

    def replace(backend: ModuleType | str) -> Any:
        load = dispatch.load.__wrapped__
        monkeypatch.setattr(dispatch, "load", lambda n: backend if n == "cpu" else load(n))
        monkeypatch.setattr(sdpa, "plans", Plans(rows=3))
        dispatch._warn_once.cache_clear()
        return backend

    yield replace
    dispatch._warn_once.cache_clear()


def qkv(**options: Any) -> list[Tensor]:
    return [torch.randn(1, 2, 3, 4, **options) for _ in range(3)]


# --- order and fall-back ---------------------------------------------------------------------


def test_the_first_backend_without_a_reason_runs(replace_cpu: Any) -> None:
    cpu = replace_cpu(Recorder())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*qkv())
        attention(*qkv(), attn_mask=torch.ones(3, 3))
    assert cpu.calls == ["forward", "forward"]


def test_a_backend_that_is_not_built_is_skipped_without_a_warning(replace_cpu: Any) -> None:
    replace_cpu("not built (no compiler)")
    q, k, v = qkv()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = attention(q, k, v)
    with use_backend("reference"):
        assert torch.equal(out, attention(q, k, v))


@pytest.mark.parametrize("broken", [False, True], ids=["absent", "broken"])
def test_a_native_module_that_cannot_be_loaded_is_reported(broken: bool, tmp_path: Path) -> None:
    """A missing module is a choice and silent; a broken one is reported."""
    package = Path(fastattn.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "_build.json")
    shutil.copytree(package, tmp_path / "fastattn", ignore=ignored)
    if broken:
        suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
        (tmp_path / "fastattn" / f"_cpu{suffix}").write_bytes(b"not a library")
    code = f"""
import sys, torch, warnings
# An editable install would find the module of the source tree.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import fastattn
assert fastattn.__file__.startswith({str(tmp_path)!r}), fastattn.__file__
x = torch.ones(1, 1, 2, 4)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        assert torch.equal(fastattn.scaled_dot_product_attention(x, x, x), x)
messages = [str(w.message) for w in caught if w.category is fastattn.FallbackWarning]
assert len(messages) == {int(broken)}, messages
assert all("'cpu' is built but cannot be used" in m for m in messages), messages
assert "not built: " in str(fastattn.explain("scaled_dot_product_attention", x, x, x))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=tmp_path)


@pytest.mark.complete
@pytest.mark.parametrize("version", ["0.0.1", fastattn.__version__])
def test_cuda_kernels_of_another_version_are_refused(version: str) -> None:
    """They are a package of their own, which pip can leave behind at an upgrade of fastattn."""
    same = version == fastattn.__version__
    code = f"""
import sys, warnings
from importlib.machinery import ModuleSpec
from unittest.mock import Mock
import fastattn
from fastattn import builds, dispatch
kernels = Mock(__spec__=ModuleSpec("fastattn._cuda", None), max_hop_width=1)
kernels.build_info.return_value = {{"device": "cuda", "version": {version!r}, "widths": [64]}}
sys.modules["fastattn._cuda"] = kernels
record = {{"modules": {{"cuda": {{"built": False, "reason": "not installed"}}}}}}
builds.build_record = lambda: record
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loaded = dispatch.load("cuda")
assert isinstance(loaded, str) != {same}, loaded
assert [w.category for w in caught] == [fastattn.FallbackWarning] * {int(not same)}, caught
print(*(w.message for w in caught), builds.backend("cuda")["reason"], sep="\\n")
"""
    done = run_python("-c", code, timeout=120)
    if not same:
        assert done.stdout.count(f"version 0.0.1 and fastattn has {fastattn.__version__}") == 2
        assert f"pip install fastattn-cuda=={fastattn.__version__}" in done.stdout
        assert "not installed" not in done.stdout


def test_a_backend_without_the_function_is_passed_over(replace_cpu: Any) -> None:
    empty = ModuleType("empty")
    replace_cpu(empty)
    with pytest.warns(FallbackWarning, match=f"cpu: has no {OP}"):
        attention(*qkv())


def test_falling_back_warns_once_for_each_list_of_reasons(replace_cpu: Any) -> None:
    cpu = replace_cpu(Recorder(["it is Sunday"]))
    with pytest.warns(FallbackWarning, match=r"slow reference \(cpu: it is Sunday\)") as caught:
        attention(*qkv())
    assert caught[0].filename == __file__
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*qkv())
        attention(*qkv(requires_grad=True)).sum().backward()
    cpu.reasons = ["it rains", "it is cold"]
    with pytest.warns(FallbackWarning, match="cpu: it rains, it is cold"):
        attention(*qkv())
    assert cpu.calls == []


def test_learnable_slopes_run_on_the_reference_and_warn(replace_cpu: Any) -> None:
    cpu = replace_cpu(Recorder())
    slopes = torch.ones(2, requires_grad=True)
    with pytest.warns(FallbackWarning, match="alibi_slopes requires a gradient") as caught:
        out = attention(*qkv(), alibi_slopes=slopes)
    assert caught[0].filename == __file__
    (grad,) = torch.autograd.grad(out.sum(), slopes)
    assert grad.abs().sum() > 0
    assert cpu.calls == []
    with use_backend("cpu"), pytest.raises(RuntimeError, match="alibi_slopes requires a gradient"):
        attention(*qkv(), alibi_slopes=slopes)
    with torch.no_grad():
        attention(*qkv(), alibi_slopes=slopes)
    assert cpu.calls == ["forward"]


def test_a_device_without_kernels_of_its_own_runs_on_the_reference() -> None:
    assert explanation(OP, (torch.ones(1, device="meta"),), {}).runs == "reference"


# --- forcing ---------------------------------------------------------------------------------


def test_a_forced_backend_runs_alone(replace_cpu: Any) -> None:
    cpu = replace_cpu(Recorder())
    with use_backend("reference"):
        attention(*qkv())
        with use_backend("cpu"):
            attention(*qkv())
        attention(*qkv())
    assert cpu.calls == ["forward"]


def test_a_forced_backend_never_falls_back(replace_cpu: Any) -> None:
    replace_cpu(Recorder(["it is Sunday", "it rains"]))
    with use_backend("cpu"):
        with pytest.raises(RuntimeError, match=f"'cpu' cannot run {OP}: it is Sunday; it rains"):
            attention(*qkv())
        with pytest.raises(RuntimeError, match="it is Sunday"):
            attention(*qkv(), need_weights=True)


def test_an_unknown_or_unbuilt_backend_is_a_clear_error(replace_cpu: Any) -> None:
    with (
        pytest.raises(ValueError, match="cpu, cuda, triton, reference, got 'gpu'"),
        use_backend("gpu"),
    ):
        pass
    replace_cpu("not built (no compiler)")
    with (
        pytest.raises(RuntimeError, match=r"'cpu' is not built \(no compiler\)"),
        use_backend("cpu"),
    ):
        pass
    assert dispatch.forced.get() == ""


def test_a_backend_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load = dispatch.load.__wrapped__
    monkeypatch.setattr(dispatch, "load", lambda n: Recorder() if n == "cuda" else load(n))
    with use_backend("cuda"), pytest.raises(RuntimeError, match="does not run on cpu tensors"):
        attention(*qkv())


def test_the_choice_ends_with_its_block_and_stays_in_its_thread() -> None:
    seen: list[str] = []
    with use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(dispatch.forced.get()))
        thread.start()
        thread.join()
        inherited = contextvars.copy_context().run(dispatch.forced.get)
    assert dispatch.forced.get() == ""
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert seen == [""]
    assert inherited == "reference"
    assert dispatch.forced.get() == ""


def test_the_choice_decorates_a_function(replace_cpu: Any) -> None:
    cpu = replace_cpu(Recorder())

    @use_backend("reference")
    def run() -> Tensor:
        return attention(*qkv())

    run()
    run()
    assert cpu.calls == []


@pytest.mark.parametrize("masked", [False, True])
def test_backward_runs_on_the_backend_of_the_forward(replace_cpu: Any, masked: bool) -> None:
    cpu = replace_cpu(Recorder())
    mask = torch.zeros(3, 3) if masked else None
    with use_backend("cpu"):
        out = attention(*qkv(requires_grad=True), attn_mask=mask)
    with use_backend("reference"):
        out.sum().backward()
    assert cpu.calls == ["forward", "backward"]

    with use_backend("reference"):
        out = attention(*qkv(requires_grad=True), attn_mask=mask)
    out.sum().backward()
    assert cpu.calls == ["forward", "backward"]


# --- explain ---------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [attention, OP], ids=["function", "name"])
def test_explain_lists_every_backend_and_runs_none(replace_cpu: Any, op: Any) -> None:
    cpu = replace_cpu(Recorder())
    q, k, v = qkv()
    found = explain(op, q, k, v, is_causal=True, dropout_p=0.5)
    assert (found.op, found.device, found.runs) == (OP, "cpu", "cpu")
    assert found.reasons == {"cpu": [], "reference": []}
    cpu.reasons = ["it is Sunday"]
    found = explain(op, q, k, v)
    assert found.runs == "reference"
    assert found.reasons["cpu"] == ["it is Sunday"]
    lines, _, order = str(found).partition("\n  order      ")
    assert lines == f"{OP} on cpu\n  cpu        it is Sunday\n  reference  runs"
    assert order.startswith("cpu, reference (")
    assert cpu.calls == []


def test_explain_knows_what_is_forced(replace_cpu: Any) -> None:
    replace_cpu(Recorder(["it is Sunday"]))
    q, k, v = qkv()
    with use_backend("cpu"):
        found = explain(attention, q, k, v)
    assert found.runs is None
    assert "it is Sunday" in str(found)
    assert "nothing runs" in str(found)
    with use_backend("reference"):
        assert explain(attention, q, k, v).runs == "reference"


X, STARTS = torch.zeros(2, 3, 4), torch.tensor([0, 1, 2])
EXPLAINED: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "additive_attention": ((X, X, X, torch.zeros(4)), {}),
    "attention_stats": ((X[None], X[None]), {}),
    "decode_attention": ((X[None],) * 3, {"cache_seqlens": torch.tensor([1]), "layout": "bnhd"}),
    "encode_memory": ((torch.zeros(1, 2, 3, dtype=torch.int64), torch.ones(4, 5)), {}),
    "memory_hop_attention": ((X[:, 0], X), {"hops": 2}),
    "merge_states": ((X, X[..., 0], X, X[..., 0]), {}),
    "sinusoidal_encoding": ((X,), {"offset": 3}),
    "varlen_attention": ((X, X, X, STARTS, STARTS), {}),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_explain_names_the_backend_of_every_operator(name: str, backend: str) -> None:
    operands, options = EXPLAINED[name]
    assert explain(name, *operands, **options).runs == backend
    assert explain(getattr(fastattn, name), *operands, **options).runs == backend


def test_explain_validates_as_the_function_does() -> None:
    with pytest.raises(RuntimeError, match="same dtype"):
        explain(attention, torch.ones(1, 2), torch.ones(1, 2).double(), torch.ones(1, 2))
    for op in ("softmax", torch.softmax, 3, explain):
        with pytest.raises(ValueError, match=r"op must be a function of fastattn\.ops"):
            explain(op, *qkv())


# --- import ----------------------------------------------------------------------------------


def test_importing_loads_no_backend_and_changes_nothing() -> None:
    code = """
import sys, torch
before = torch.nn.functional.scaled_dot_product_attention, torch.nn.MultiheadAttention.forward
import fastattn
assert before == (torch.nn.functional.scaled_dot_product_attention,
                  torch.nn.MultiheadAttention.forward)
loaded = {m for m in sys.modules if m.startswith("fastattn.backends.")}
used = ("_alloc", "_hopfield", "_lost", "_mask_program", "_partial", "_precision",
        "_score_program", "_sequences", "primitives")
loaded -= {f"fastattn.backends.{name}" for name in used}
assert not loaded, loaded
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
for name in fastattn.__all__:
    assert hasattr(fastattn, name), name
assert isinstance(fastattn.__version__, str)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


# --- what is remembered ----------------------------------------------------------------------


def test_the_cpu_has_no_reason_against_what_it_always_serves() -> None:
    cpu = pytest.importorskip("fastattn.backends.cpu")
    served = 0
    for operator in library.operators.values():
        if not hasattr(cpu, operator.name):
            continue
        names = dispatch.tensors_by_name(operator.name, [torch.ones(1)] * 20)
        kinds = dict.fromkeys(names, torch.float32) | {"alibi_slopes": None}
        if not cpu.serves_all(operator.name, kinds, operator.options):
            continue
        served += 1
        tensors = {n: None if kinds[n] is None else torch.ones(1) for n in names}
        for field in dataclasses.fields(operator.options):
            unusual = operator.options(**_unusual(operator.options, field.name))
            assert cpu.why_not(operator.name, tensors, unusual) == []
    assert served > 15


def _unusual(record: Any, name: str) -> dict[str, Any]:
    """The arguments of a record that has one option in use."""
    required = {f.name: 1.0 for f in dataclasses.fields(record) if f.default is dataclasses.MISSING}
    return required | {name: "unusual"}


@pytest.mark.parametrize("kind", [torch.int8, torch.device("meta")], ids=str)
def test_the_cpu_does_not_always_serve_other_tensors(kind: Any) -> None:
    cpu = pytest.importorskip("fastattn.backends.cpu")
    kinds = {"x": kind, "positions": None}
    assert not cpu.serves_all("sinusoidal_encoding", kinds, SinusoidalOptions)
    slopes = {"query": torch.float32, "alibi_slopes": torch.float32}
    assert not cpu.serves_all("scaled_dot_product_attention", slopes, AttentionOptions)
