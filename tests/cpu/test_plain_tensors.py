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
from fastattn.backends.primitives import (
    AdditiveBackwardOptions,
    AttentionBackwardOptions,
    LocalOptions,
    MemoryHopBackwardOptions,
    MemoryHopOptions,
)

attention = fastattn.scaled_dot_product_attention


def by_the_general_path(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch, fastattn.use_backend("cpu"):
        patch.setattr("fastattn.call.may_plan", lambda: False)
        return run()


def heads(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
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


def added(biased: bool, differentiable: bool, dtype: torch.dtype) -> list[Tensor]:
    query, key, value = (torch.randn(2, 12, n, dtype=dtype).mT for n in (5, 40, 40))
    given = [query, key[..., ::2], value, torch.randn(6, dtype=dtype), torch.randn(6, dtype=dtype)]
    given[0] = query[..., 1::2]
    leaves = [x.requires_grad_(differentiable) for x in given[: 5 if biased else 4]]
    out = fastattn.additive_attention(*leaves)
    if not differentiable:
        return [out]
    return [out, *torch.autograd.grad(out, leaves, torch.randn_like(out))]


def retrieved(projected: bool, differentiable: bool, dtype: torch.dtype) -> list[Tensor]:
    state, stored, value = (
        torch.randn(2, n, 3, 20, dtype=dtype).transpose(1, 2) for n in (7, 9, 9)
    )
    given = [state[..., 1::2], stored[..., :10], value[..., ::2]]
    leaves = [x.requires_grad_(differentiable) for x in given[: 3 if projected else 2]]
    out = fastattn.hopfield_retrieve(*leaves, update_steps_max=2)
    if not differentiable:
        return [out]
    return [out, *torch.autograd.grad(out, leaves, torch.randn_like(out))]


def near(padded: bool, differentiable: bool, dtype: torch.dtype) -> list[Tensor]:
    query, key, value = (torch.randn(2, n, 10, dtype=dtype)[..., :6] for n in (7, 9, 9))
    positions = torch.rand(2, 7, dtype=torch.promote_types(dtype, torch.float32)) * 9
    leaves = [x.requires_grad_(differentiable) for x in (query, key, value, positions)]
    padding = torch.arange(18).view(2, 9) % 5 == 1 if padded else None
    *rows, at = leaves
    out = fastattn.luong_attention(
        *rows, window="local-p", D=2, positions=at, key_padding_mask=padding
    )
    if not differentiable:
        return [out]
    return [out, *torch.autograd.grad(out, leaves, torch.randn_like(out))]


def encoded(scaled: bool, differentiable: bool, dtype: torch.dtype) -> list[Tensor]:
    x = torch.randn(2, 40, 5, dtype=dtype).mT.requires_grad_(differentiable)
    out = fastattn.sinusoidal_encoding(x[..., 1::2], scale=1.5 if scaled else None)
    return [out, *torch.autograd.grad(out, x, torch.randn_like(out))] if differentiable else [out]


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("option", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("run", [added, near, retrieved, encoded])
def test_others_have_the_bits_of_the_general_path(
    run: Callable[[bool, bool, torch.dtype], list[Tensor]],
    dtype: torch.dtype,
    option: bool,
    differentiable: bool,
    way: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seeded() -> list[Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return run(option, differentiable, dtype)

    seeded()  # keeps a plan
    for got, want in zip(seeded(), by_the_general_path(monkeypatch, seeded), strict=True):
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


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("query", lambda x: x[0], "query is not valid: it must have 4 dimensions, got float32"),
        ("key", lambda x: x.double(), "key is not valid: it must be float32"),
        ("key", lambda x: x[:, :3], "value is not valid: it must be float32"),
        ("value", lambda x: x[:, :, :15], "value is not valid: it must be float32"),
        ("value", lambda x: torch.cat([x, x]), "value is not valid: it must be float32"),
        ("value", lambda x: x.tolist(), "value must be a tensor"),
        ("value", lambda x: x.to("meta"), "in the memory of the CPU"),
        ("attn_mask", lambda x: torch.ones(15), "attn_mask is not valid: it must broadcast to"),
        ("attn_mask", lambda x: torch.ones(16, dtype=torch.bfloat16), "bool or float32"),
        ("alibi_slopes", lambda x: torch.ones(1), "alibi_slopes must have an element"),
        ("sinks", lambda x: torch.ones(4).double(), "sinks is not valid: it must be float32"),
        ("relative_bias", lambda x: torch.ones(1, 4, 29), "at least 31"),
        ("positions", lambda x: torch.ones(16), "positions is not valid"),
        ("mask_program", lambda x: torch.ones(1, dtype=torch.int32), "mask_program is not valid"),
    ],
)
def test_native_attention_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], message: str, way: None, native: ModuleType
) -> None:
    q, k, v = heads(1, 4, 16, 16)
    biases = ("attn_mask", "alibi_slopes", "seed", "sinks", "relative_bias", "positions")
    tensors = {"query": q, "key": k, "value": v, **dict.fromkeys((*biases, "mask_program"))}
    options = AttentionBackwardOptions(scale=0.25)
    _, lse, weights = native.scaled_dot_product_attention(*tensors.values(), options=options)
    assert weights is None
    torch.testing.assert_close(lse.float(), (q @ k.mT * 0.25).logsumexp(-1))
    tensors[name] = wrong(tensors[name])
    with pytest.raises((TypeError, ValueError), match=message):
        native.scaled_dot_product_attention(*tensors.values(), options=options)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("grad_out", lambda x: x[:, :, :15]),
        ("grad_out", lambda x: x.double()),
        ("grad_lse", lambda x: x[:, :3]),
        ("grad_weights", lambda x: x),
        ("out", lambda x: x[:, :3]),
        ("lse", lambda x: x[:, :, :15]),
        ("lse", lambda x: None),
    ],
)
def test_native_attention_backward_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], way: None, native: ModuleType
) -> None:
    q, k, v = heads(1, 4, 16, 16)
    options = AttentionBackwardOptions(scale=0.25)
    out, lse, _ = native.scaled_dot_product_attention(q, k, v, options=options)
    tensors = {"grad_out": out, "grad_lse": lse, "grad_weights": None}
    tensors |= {"query": q, "key": k, "value": v, "attn_mask": None, "alibi_slopes": None}
    tensors |= {"seed": None, "out": out, "lse": lse}
    derive = native.scaled_dot_product_attention_backward
    assert len(derive(*tensors.values(), options=options)) == 6
    tensors[name] = wrong(out if tensors[name] is None else tensors[name])
    with pytest.raises((TypeError, ValueError), match=name):
        derive(*tensors.values(), options=options)


HOPS = ("query", "in_memory", "out_memory", "hop_proj", "memory_mask", "memory_bias")


def of_hops() -> dict[str, Tensor]:
    memories = torch.randn(2, 4, 2, 9, 12)[..., ::2]  # its columns are copied
    mask, bias = torch.ones(4, 9, dtype=torch.bool), torch.randn(9)
    tensors = (torch.randn(4, 12)[:, 1::2], *memories, torch.randn(6, 6).mT, mask, bias)
    return dict(zip(HOPS, tensors, strict=True))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("query", lambda x: x[0], r"query is not valid: it must be float32 \(6, 0\), got"),
        ("query", lambda x: x.bool(), "query is not valid"),
        ("in_memory", lambda x: x.double(), r"in_memory is not valid: it must be float32"),
        ("in_memory", lambda x: x[0, 0], "in_memory is not valid"),
        ("in_memory", lambda x: x[:3], r"must be float32 \(4, 2, 9, 6\), got"),
        ("in_memory", lambda x: x[:, :1], r"must be float32 \(4, 2, 9, 6\), got"),
        ("in_memory", lambda x: x[..., :5], "in_memory is not valid"),
        ("out_memory", lambda x: x[:, :, :8], "out_memory is not valid"),
        (
            "out_memory",
            lambda x: None,
            r"in_memory is not valid: it must be float32 \(4, 3, 9, 6\)",
        ),
        ("hop_proj", lambda x: x[:5], r"hop_proj is not valid: it must be float32 \(6, 6\)"),
        ("hop_proj", lambda x: x[None], r"hop_proj is not valid: it must be float32 \(2, 6, 6\)"),
        ("memory_mask", lambda x: x[:, :8], r"memory_mask is not valid: it must broadcast to"),
        ("memory_mask", lambda x: x.float(), "memory_mask is not valid: it must be bool"),
        ("memory_bias", lambda x: x.bool(), "memory_bias is not valid: it must be float32"),
        ("memory_bias", lambda x: x.tolist(), "memory_bias must be a tensor"),
    ],
)
def test_native_memory_hops_check_every_tensor(
    name: str, wrong: Callable[[Any], Any], message: str, way: None, native: ModuleType
) -> None:
    tensors: dict[str, Any] = of_hops()
    options = MemoryHopOptions(hops=2, scale=0.5)
    out, trace, stats, weights = native.memory_hop_attention(**tensors, options=options)
    assert (trace.shape, stats.shape, weights) == ((4, 5, 6), (4, 2, 2), None)
    want = fastattn.memory_hop_attention(**tensors, hops=2, scale=0.5)
    torch.testing.assert_close(out, want)
    tensors[name] = wrong(tensors[name])
    with pytest.raises((TypeError, ValueError), match=message):
        native.memory_hop_attention(**tensors, options=options)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("grad_out", lambda x: x[:3]),
        ("grad_out", lambda x: x.double()),
        ("grad_weights", lambda x: x[:, :1]),
        ("trace", lambda x: x[:, :4]),
        ("trace", lambda x: x.double()),
        ("stats", lambda x: x[..., :1]),
        ("stats", lambda x: x.double()),
    ],
)
def test_native_memory_hops_backward_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], way: None, native: ModuleType
) -> None:
    tensors: dict[str, Any] = of_hops()
    options = MemoryHopBackwardOptions(hops=2, weights=True, needed=31)
    out, trace, stats, weights = native.memory_hop_attention(**tensors, options=options)
    given: dict[str, Any] = {"grad_out": out.mT.contiguous().mT, "grad_weights": weights, **tensors}
    given |= {"trace": trace.mT.contiguous().mT, "stats": stats, "kept": None}
    grads = native.memory_hop_attention_backward(**given, options=options)
    assert [x.shape for x in grads[:4]] == [tensors[x].shape for x in HOPS[:4]]
    assert grads[4].shape == (9,)
    given[name] = wrong(given[name])
    with pytest.raises((TypeError, ValueError), match=name):
        native.memory_hop_attention_backward(**given, options=options)


def test_only_kept_weights_that_fit_are_used(way: None, native: ModuleType) -> None:
    tensors = of_hops()
    options = MemoryHopBackwardOptions(hops=2, needed=15)
    hops = native.memory_hop_attention
    out, *states, weights, kept = hops(**tensors, options=options, keeps=True)
    assert weights is None
    assert kept.shape == (4, 2, 9)

    def gradients(kept: Any) -> Any:
        given = (out, None, *tensors.values(), *states, kept)
        return native.memory_hop_attention_backward(*given, options=options)[:4]

    for got, wanted in zip(gradients(kept), gradients(None), strict=True):
        assert torch.equal(got, wanted)
    for wrong in (kept[:, :1], kept.double(), kept.mT.contiguous().mT):
        with pytest.raises(ValueError, match="kept"):
            gradients(wrong)


def of_additive_attention() -> dict[str, Any]:
    sizes = {"query": (2, 5, 6), "key": (2, 9, 6), "value": (2, 9, 7), "v": (6,), "bias": (6,)}
    tensors = {name: torch.randn(size) for name, size in sizes.items()}
    return {**tensors, "attn_mask": torch.randn(1, 5, 9), "seed": None}


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("query", lambda x: x[0], "query is not valid: it must have 3 dimensions, got float32"),
        ("query", lambda x: x.int(), "query is not valid: it must be float32 or float64"),
        ("key", lambda x: x.double(), "key is not valid: it must be float32"),
        ("key", lambda x: x[..., :5], "key is not valid"),
        ("value", lambda x: x[:, :8], "value is not valid"),
        ("value", lambda x: x.tolist(), "value must be a tensor"),
        ("v", lambda x: x[:5], r"v is not valid: it must be float32 \(6\)"),
        ("v", lambda x: x.to("meta"), "v must be a tensor in the memory"),
        ("bias", lambda x: x[None], "bias is not valid"),
        ("attn_mask", lambda x: x[..., :8], "attn_mask is not valid: it must broadcast to"),
        ("attn_mask", lambda x: x.half(), "attn_mask is not valid: it must be bool or float32"),
    ],
)
def test_native_additive_attention_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], message: str, way: None, native: ModuleType
) -> None:
    tensors, options = of_additive_attention(), AdditiveBackwardOptions(needs_mask_grad=True)
    out, weights = native.additive_attention(**tensors, options=options)
    assert weights is None
    native.additive_attention_backward(out, None, *tensors.values(), options=options)
    tensors[name] = wrong(tensors[name])
    with pytest.raises((TypeError, ValueError), match=message):
        native.additive_attention(**tensors, options=options)
    with pytest.raises((TypeError, ValueError), match=message):
        native.additive_attention_backward(out, None, *tensors.values(), options=options)


def test_native_additive_attention_checks_its_gradients(way: None, native: ModuleType) -> None:
    tensors, options = of_additive_attention(), AdditiveBackwardOptions(needs_mask_grad=True)

    def derive(grad_out: Any = None, grad_weights: Any = None) -> Any:
        given = (grad_out, grad_weights, *tensors.values())
        return native.additive_attention_backward(*given, options=options)

    assert len(derive(torch.ones(2, 5, 7), torch.ones(2, 5, 9))) == 6
    for wrong in (torch.ones(2, 5, 6), torch.ones(2, 5, 7).double()):
        with pytest.raises(ValueError, match="grad_out is not valid"):
            derive(wrong)
    with pytest.raises(ValueError, match="grad_weights is not valid"):
        derive(grad_weights=torch.ones(2, 5, 8))
    tensors["attn_mask"] = tensors["attn_mask"][0]
    with pytest.raises(ValueError, match="attn_mask must have three dimensions"):
        derive()


def of_local_attention() -> dict[str, Any]:
    sizes = {"query": (2, 7, 6), "key": (2, 9, 6), "value": (2, 9, 5), "positions": (2, 7)}
    tensors = {name: torch.randn(size) for name, size in sizes.items()}
    padding = torch.zeros(2, 9, dtype=torch.bool)
    return {**tensors, "padding": padding, "factor": torch.rand(2, 7, 5)}


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("query", lambda x: x[0], r"query is not valid: it must be float32 \(7, 6, 0\)"),
        ("query", lambda x: x.int(), "query is not valid: it must be float32 or float64"),
        ("key", lambda x: x.double(), "key is not valid: it must be float32"),
        ("value", lambda x: x[:, :8], "key is not valid"),
        ("value", lambda x: x[:1], "value is not valid"),
        ("positions", lambda x: x[:, :6], "positions is not valid"),
        ("padding", lambda x: x.float(), "padding is not valid: it must be bool"),
        ("padding", lambda x: x[:, :8], "padding is not valid"),
        ("factor", lambda x: x[..., :4], "factor is not valid"),
        ("factor", lambda x: 1.0, "factor must be a tensor"),
    ],
)
def test_native_local_attention_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], message: str, way: None, native: ModuleType
) -> None:
    tensors, options = of_local_attention(), LocalOptions(reach=2, bell=True)
    out, weights = native.local_attention(**tensors, options=options)

    def derive() -> Any:
        given = (out, weights, *tensors.values(), weights)
        return native.local_attention_backward(*given, options=options)

    derive()
    tensors[name] = wrong(tensors[name])
    with pytest.raises((TypeError, ValueError), match=message):
        native.local_attention(**tensors, options=options)
    with pytest.raises((TypeError, ValueError), match=message):
        derive()


def test_native_local_attention_checks_its_gradients(way: None, native: ModuleType) -> None:
    tensors, options = of_local_attention(), LocalOptions(reach=2, bell=True)
    out, kept = native.local_attention(**tensors, options=options)
    assert kept.shape == (2, 7, 5)

    def derive(
        grad_out: Any = out, grad_weights: Any = None, weights: Any = kept, reach: int = 2
    ) -> Any:
        how = LocalOptions(reach=reach, bell=True)
        given = (grad_out, grad_weights, *tensors.values(), weights)
        return native.local_attention_backward(*given, options=how)

    right = derive()
    assert len(right) == 4
    for same in (
        derive(grad_out=out.mT.contiguous().mT),
        derive(weights=kept.mT.contiguous().mT),
        derive(weights=kept.double()),
    ):
        assert all(map(torch.equal, same, right))
    for wrong in (out[:, :6], out.double()):
        with pytest.raises(ValueError, match="grad_out is not valid"):
            derive(grad_out=wrong)
    with pytest.raises(ValueError, match="grad_weights is not valid"):
        derive(grad_weights=kept[..., :4])
    for wrong in (kept[:, :, :4], kept.mT):
        with pytest.raises(ValueError, match="weights is not valid"):
            derive(weights=wrong)
    with pytest.raises(TypeError, match="weights must be a tensor"):
        derive(weights=None)
    with pytest.raises(ValueError, match="factor is not valid"):
        derive(reach=3)


# -- the interface ---------------------------------------------------------------------------------

_kept: list[Any] = []  # what capsules point to, but do not own


def capsule(name: bytes, *words: int) -> Any:
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
