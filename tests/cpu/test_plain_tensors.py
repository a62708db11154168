"""Plain calls, whose tensors the native core reads itself: by DLPack's exchange interface where
PyTorch has it, else by the methods of the tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn

attention = fastattn.scaled_dot_product_attention


def by_the_general_path(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """Run without plans, so on the general path."""
    with monkeypatch.context() as patch, fastattn.use_backend("cpu"):
        patch.setattr("fastattn.call.may_plan", lambda: False)
        return run()


def heads(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random queries, keys and values."""
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randn(sizes, generator=generator).to(dtype) for _ in range(3)]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "blhd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "transposed": lambda x: x.mT.contiguous().mT,
    "every_second": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "expanded": lambda x: x[:, :1].expand_as(x),
    "reversed": lambda x: x.flip(0),
}


def with_gradients(layout: str, causal: bool, tensors: list[Tensor]) -> list[Tensor]:
    """The output and the gradients with operands in a layout."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = attention(*map(LAYOUTS[layout], leaves), is_causal=causal)
    grad_out = LAYOUTS[layout](torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))
    return [out, *torch.autograd.grad(out, leaves, grad_out)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_attention_has_the_bits_of_the_general_path(
    dtype: torch.dtype, layout: str, causal: bool, way: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = heads(2, 4, 17, 16, dtype=dtype)

    def run() -> list[Tensor]:
        plain = attention(*map(LAYOUTS[layout], tensors), is_causal=causal)
        return [plain, *with_gradients(layout, causal, tensors)]

    for got, want in zip(run(), by_the_general_path(monkeypatch, run), strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()


class _Own(Tensor):
    pass


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda q: q.to(torch.complex64), id="complex"),
        pytest.param(lambda q: q[:, :, :0], id="no-queries"),
        pytest.param(lambda q: q[None], id="dimensions"),
        pytest.param(lambda q: q.to("meta"), id="device"),
        pytest.param(lambda q: q.to_sparse(), id="sparse"),
        pytest.param(lambda q: q.as_subclass(_Own), id="subclass"),
        pytest.param(lambda q: torch.complex(q, q).conj().imag, id="lazy-negation"),
        pytest.param(lambda q: torch._efficientzerotensor(q.shape), id="without-memory"),
        pytest.param(lambda q: q.tolist(), id="list"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_tensors_without_a_signature(
    place: int, wrong: Callable[[Tensor], Any], way: None, native: ModuleType
) -> None:
    tensors: list[Any] = list(heads(1, 4, 16, 16))
    assert native.signature(tuple(tensors), 3, ()) is not None
    tensors[place] = wrong(tensors[place])
    assert native.signature(tuple(tensors), 3, ()) is None


# -- the interface ---------------------------------------------------------------------------------

_kept: list[Any] = []  # what capsules point to, but do not own


def capsule(name: bytes, *words: int) -> Any:
    """A PyCapsule of the given name, with a table of words."""
    table = (ctypes.c_uint64 * 8)(*words)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    _kept.append((table, name))
    return make(ctypes.addressof(table), name, None)


def test_an_interface_of_another_version_is_not_used(
    exchange: Callable[[Any], bool], native: ModuleType
) -> None:
    signature = native.signature(tuple(heads(1, 4, 16, 16)), 3, ())
    for words in ((2, 0, 1, 1, 1, 1), (1, 0, 1, 1, 1, 0)):  # the next major version; no reader
        assert not exchange(capsule(b"dlpack_exchange_api", *words))
        assert native.signature(tuple(heads(1, 4, 16, 16)), 3, ()) == signature


def test_a_capsule_of_another_name_is_refused(exchange: Callable[[Any], bool]) -> None:
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        exchange(capsule(b"another", 1, 0, 1, 1, 1, 1))
