"""Float32 by tf32 products on the CUDA kernels, where PyTorch allows tf32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_cases import ATTENTION_CASES, VARLEN_CASES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn.testing import Case, deviation, make_inputs
from fastattn.testing.calls import Operands
from fastattn.testing.packed import make_varlen
from fastattn.testing.rounding import Noise

ATTENTION = {case.name: case for case in ATTENTION_CASES}
PACKED = {case.name: case for case in VARLEN_CASES}
aten = torch.ops.aten


@contextlib.contextmanager
def allowed(setting: str = "allow_tf32") -> Iterator[None]:
    """PyTorch's products of float32 may be rounded to tf32."""
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    # PyTorch's own testing module, which another test imports, freezes its flags.
    with torch.backends.__allow_nonbracketed_mutation():
        try:
            if setting == "allow_tf32":
                matmul.allow_tf32 = True
            elif setting == "set_float32_matmul_precision":
                torch.set_float32_matmul_precision("high")
            elif setting == "matmul.fp32_precision":
                matmul.fp32_precision = "tf32"
            else:
                matmul.fp32_precision, torch.backends.fp32_precision = "none", "tf32"
            yield
        finally:
            if hasattr(torch.backends, "fp32_precision"):
                torch.backends.fp32_precision = matmul.fp32_precision = "none"
            torch.set_float32_matmul_precision(before)


def tf32(x: Tensor) -> Tensor:
    """x rounded to 10 bits of fraction."""
    words = x.float().contiguous().view(torch.int32)
    rounded = ((words + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded.to(x.dtype), x)


class Tf32Products(TorchDispatchMode):
    """Rounds the factors of every matrix product, as a GPU with tf32 allowed does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.mm.default, aten.bmm.default):
            args = tuple(tf32(x) for x in args)
        return func(*args, **(kwargs or {}))


def judged(inputs: Operands, found: dict[str, Tensor]) -> list[str]:
    """The faults, by the common bound with the eps of tf32, which equals float16's."""

    def rounded() -> dict[str, Tensor]:
        with Tf32Products():
            return inputs.definition()

    want = inputs.definition()
    moved = Noise(rounded, want, torch.float32)
    measured = [deviation(x, want[n], moved[n], n, torch.float16) for n, x in found.items()]
    return [str(m) for m in measured if not m.ok]


SMALL = Case("small", batch=1, heads=1, q_len=9, k_len=9)
SOME = ("head_dim-64", "mask-padding-poison", "everything")
MORE = """head_dim-128-value-64 head_dim-7-value-200 gqa-causal mask-float-bhqk mask-finfo-min
results-1-out-lse-weights-mask layout-transposed mask-one_key""".split()


@pytest.mark.complete
@pytest.mark.parametrize("name", [*SOME, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_errors_are_tf32_errors(adapter: ModuleType, name: str) -> None:
    inputs = make_inputs(ATTENTION[name], torch.float32)
    with allowed():
        found = inputs.results(adapter)
    faults = judged(inputs, found)
    assert not faults, "\n".join(faults)


SETTINGS = ["allow_tf32", "set_float32_matmul_precision"]
if hasattr(torch.backends, "fp32_precision"):
    SETTINGS += ["matmul.fp32_precision", "fp32_precision"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_pytorchs_settings_allow_tf32(adapter: ModuleType, setting: str) -> None:
    inputs = make_inputs(SMALL, torch.float32)
    full = inputs.results(adapter)
    with allowed(setting):
        rounded = inputs.results(adapter)
    again = inputs.results(adapter)
    for name, x in full.items():
        assert torch.equal(again[name], x), name
        assert not torch.equal(rounded[name], x), name


def test_packed_sequences_may_be_rounded_too(adapter: ModuleType) -> None:
    inputs = make_varlen(PACKED["causal-bottom-right"], torch.float32)
    full = inputs.results(adapter)
    with allowed():
        rounded = inputs.results(adapter)
    for name, x in full.items():
        seen = x.isfinite()  # the lse of a fully masked row is not
        off = (rounded[name] - x)[seen].abs().max()
        assert 0 < off < 2**-8 * x[seen].abs().max(), name


def test_16_bit_results_do_not_depend_on_tf32(adapter: ModuleType) -> None:
    inputs = make_inputs(SMALL, torch.bfloat16)
    full = inputs.results(adapter)
    with allowed():
        again = inputs.results(adapter)
    for name, x in full.items():
        assert torch.equal(again[name], x), name
