"""Plans of attention over a cache, as tests/ops/test_sdpa_plan.py of dense attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planned import count, fresh
from torch import Tensor

import fastattn
from fastattn import decode_attention as attend
from fastattn.call import Plans

pytestmark = pytest.mark.usefixtures("seeded", "native")


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return fresh(monkeypatch, "decode")


SLOPES, SINKS = torch.rand(4), torch.randn(4)
LENGTHS = torch.tensor([5, 11])
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"cache_seqlens": LENGTHS},
    "int32": {"cache_seqlens": LENGTHS.int()},
    "int": {"cache_seqlens": 7},
    "full": {},
    "several": {"cache_seqlens": LENGTHS, "window": (4, 0), "softcap": 3.0, "sinks": SINKS},
    "slopes": {"cache_seqlens": LENGTHS, "alibi_slopes": SLOPES, "return_lse": True},
    "padding": {"cache_seqlens": LENGTHS, "cache_leftpad": torch.tensor([2, 0])},
    "entries": {"cache_seqlens": LENGTHS, "cache_batch_idx": torch.tensor([1, 0])},
    "pages": {"cache_seqlens": LENGTHS, "block_table": torch.tensor([[0], [1]]).int()},
    "long-pages": {"cache_seqlens": LENGTHS, "block_table": torch.tensor([[0], [1]])},
}


def results(options: dict[str, Any], dtype: torch.dtype, appended: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    caches = [torch.randn(2, 2, 16, 8, generator=generator).to(dtype) for _ in range(2)]
    query = torch.randn(2, 4, 1, 8, generator=generator).to(dtype)
    new = [torch.randn(2, 2, 1, 8, generator=generator).to(dtype) for _ in range(2)]
    given = dict(options)
    if given.get("layout") == "bnhd":
        query, *rest = (x.transpose(1, 2) for x in (query, *caches, *new))
        caches, new = rest[:2], rest[2:]
    if appended:
        given |= {"key": new[0], "value": new[1]}
    versions = [x._version for x in caches]
    found = attend(query, *caches, **given)
    assert ([x._version for x in caches] != versions) == appended
    return [*(found if isinstance(found, tuple) else (found,)), *caches]


@pytest.mark.parametrize("appended", [False, True])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_hit_has_the_bits_of_the_complete_path(
    name: str,
    dtype: torch.dtype,
    layout: str,
    appended: bool,
    plans: Plans,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = OPTIONS[name] | {"layout": layout}
    for key in ("alibi_slopes", "sinks"):
        if key in options:
            options[key] = options[key].to(torch.promote_types(dtype, torch.float32))
    if appended and name == "full":
        options["cache_seqlens"] = 15
    complete = results(options, dtype, appended)
    planned = count(plans)
    assert planned == (name != "long-pages" and not (appended and name == "entries"))
    hit = results(options, dtype, appended)
    assert count(plans) == planned
    for got, want in zip(hit, complete, strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()


def test_a_growing_cache_shares_a_plan(plans: Plans) -> None:
    keys, values = torch.zeros(2, 1, 2, 64, 8)
    for n in range(60):
        query, key, value = torch.randn(3, 1, 2, 1, 8)
        out = attend(query, keys, values, n, key=key, value=value)
        with fastattn.use_backend("reference"):
            torch.testing.assert_close(out, attend(query, keys, values, n + 1))
    assert count(plans) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cache_seqlens": torch.tensor([5, 17])}, "at most 16 keys per sequence, got 17"),
        ({"cache_seqlens": torch.tensor([-1, 3])}, "at least 0.*got -1"),
        ({"cache_seqlens": 17}, "at most 16"),
        ({"cache_seqlens": 2**70}, "at most 16"),
        ({"cache_seqlens": True}, "cache_seqlens"),
    ],
)
def test_wrong_lengths_are_named_by_every_call(
    wrong: dict[str, Any], message: str, plans: Plans
) -> None:
    caches, query = torch.randn(2, 2, 2, 16, 8), torch.randn(2, 4, 1, 8)
    for right in (LENGTHS, 5):
        attend(query, *caches, right)
    before = caches.clone()
    new = torch.ones(2, 2, 2, 1, 8)
    attend(query, *caches, torch.tensor([5, 5]), key=new[0], value=new[1])
    caches.copy_(before)
    for more in ({}, {"key": new[0], "value": new[1]}):
        with pytest.raises((TypeError, ValueError), match=f"decode_attention.*{message}|{message}"):
            attend(query, *caches, **wrong, **more)
    assert torch.equal(caches, before)


def test_rows_are_not_appended_to_an_expanded_cache() -> None:
    caches, query = torch.randn(2, 2, 2, 16, 8), torch.randn(2, 4, 1, 8)
    new = torch.ones(2, 2, 2, 1, 8)
    attend(query, *caches, LENGTHS, key=new[0], value=new[1])
    expanded = caches[:, :1].expand(2, 2, 2, 16, 8)
    with pytest.raises(ValueError, match="must have memory for each row"):
        attend(query, *expanded, LENGTHS, key=new[0], value=new[1])


def test_a_gradient_is_refused_by_every_call(plans: Plans) -> None:
    caches, query = torch.randn(2, 2, 2, 16, 8), torch.randn(2, 4, 1, 8, requires_grad=True)
    with torch.no_grad():
        attend(query, *caches, LENGTHS)
    assert count(plans) == 0
    with pytest.raises(RuntimeError, match="requires a gradient"):
        attend(query, *caches, LENGTHS)
