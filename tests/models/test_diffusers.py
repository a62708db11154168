"""Models of diffusers on our attention against the same models on its "native" one."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers_models import Build, dit, draw, flux, qwen_image, unet, wan
from libraries import library
from library_runs import compared, initialized
from transformers_runs import InDouble

from fastattn import scaled_dot_product_attention
from fastattn.integrations import diffusers as integration
from fastattn.integrations.diffusers import _registry, register
from fastattn.integrations.torch import activate


@pytest.fixture(autouse=True)
def diffusers() -> Any:
    return library("diffusers")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the attention function; it runs in the precision that it is given."""
    made: list[Any] = []

    def attend(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        with InDouble.left():
            return scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(integration, "scaled_dot_product_attention", attend)
    return made


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [flux, qwen_image, wan])
def test_models_that_use_the_registry(build: Build, calls: list[Any]) -> None:
    model, inputs = build()
    initialized(model)
    compared(model, inputs, registered(model))
    assert calls


@contextlib.contextmanager
def registered(model: Any) -> Iterator[None]:
    """Run the model with fastattn's backend."""
    with register():
        model.set_attention_backend("fastattn")
        yield


@pytest.mark.parametrize("build", [dit, unet])
def test_models_that_call_pytorch_are_served_by_activate(build: Build) -> None:
    model, inputs = build()
    initialized(model)
    compared(model, inputs, activate())


def test_a_compiled_model(calls: list[Any]) -> None:
    model, inputs = flux()
    initialized(model)
    with register(), torch.no_grad():
        want = model(**inputs, return_dict=False)
        model.set_attention_backend("fastattn")
        torch._dynamo.reset()
        got = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs, return_dict=False)
    assert calls
    torch.testing.assert_close(got, want)


# --- the attention function -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.tensor([[True, True, False, True, True]] * 2)},
        {"attn_mask": draw(2, 5)},
        {"attn_mask": draw(4, 5)},
        {"attn_mask": draw(2, 1, 4, 5)},
    ],
    ids=["plain", "causal", "scale", "padding", "bias of keys", "bias", "bias of a batch"],
)
def test_arguments_of_the_dispatcher(options: dict[str, Any]) -> None:
    dispatch = library("diffusers.models.attention_dispatch").dispatch_attention_fn
    query, key, value = draw(2, 4, 2, 8), draw(2, 5, 2, 8), draw(2, 5, 2, 8)
    want = dispatch(query, key, value, **options, backend="native")
    with register():
        got = dispatch(query, key, value, **options, backend="fastattn")
    torch.testing.assert_close(got, want)


def test_grouped_queries_and_the_lse() -> None:
    dispatch = library("diffusers.models.attention_dispatch").dispatch_attention_fn
    query, key = draw(2, 4, 4, 8), draw(2, 5, 2, 8)
    want = dispatch(query, key, key, enable_gqa=True, backend="native")
    with register():
        out, lse = dispatch(
            query,
            key,
            key,
            enable_gqa=True,
            backend="fastattn",
            attention_kwargs={"return_lse": True},
        )
    torch.testing.assert_close(out, want)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key.repeat_interleave(2, 2)) / 8**0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_context_parallelism_is_refused() -> None:
    dispatch = library("diffusers.models.attention_dispatch").dispatch_attention_fn
    x = draw(2, 4, 2, 8)
    with register(), pytest.raises(ValueError, match="does not support context parallelism"):
        dispatch(x, x, x, backend="fastattn", parallel_config=object())


# --- the name -------------------------------------------------------------------------------------


def state() -> tuple[Any, ...]:
    """All tables of diffusers' registry of attention backends, copied."""
    dispatch = library("diffusers.models.attention_dispatch")
    registry, names = dispatch._AttentionBackendRegistry, dispatch.AttentionBackendName
    tables = registry._backends, registry._constraints, registry._supported_arg_names
    listed = list(names), dict(names.__members__), dict(names._value2member_map_)
    return *map(dict, tables), *listed, registry.get_active_backend()


@pytest.fixture(autouse=True)
def unchanged(diffusers: Any) -> Iterator[None]:
    """Each test ends with what diffusers itself had registered."""
    before = state()
    yield
    assert state() == before


def test_a_name_is_served_within_the_block() -> None:
    names = library("diffusers.models.attention_dispatch").AttentionBackendName
    before = state()
    with register() as registration:
        assert names("fastattn") is names["FASTATTN"] is list(names)[-1]
        assert isinstance(names("fastattn"), names)
        assert names("fastattn").value == "fastattn"
    assert state() == before
    registration.undo()
    with pytest.raises(ValueError, match="fastattn"):
        names("fastattn")


@pytest.mark.parametrize("order", list(itertools.permutations(range(2))))
def test_undo_in_any_order_any_number_of_times(order: tuple[int, ...]) -> None:
    before = state()
    left = [register(), register()]
    ours = state()
    for which, want in zip(order, (ours, before), strict=True):
        for _ in range(2):
            left[which].undo()
            assert state() == want


def test_a_global_choice_ends_with_the_registration(diffusers: Any) -> None:
    """``set_attention_backend`` also sets the backend of models without a choice."""
    model, _ = flux()
    before = state()
    with register():
        model.set_attention_backend("fastattn")
    assert state() == before
    with register(), diffusers.attention_backend("fastattn"):
        assert state()[-1][1] is integration.attention_forward


def test_after_undo_a_model_with_our_backend_raises() -> None:
    model, inputs = flux()
    model.double()
    with register():
        model.set_attention_backend("fastattn")
    with pytest.raises(KeyError, match="fastattn"):
        model(**inputs)
    model.reset_attention_backend()
    model(**inputs)


@pytest.fixture
def nothing_is_loaded() -> Iterator[None]:
    """Forget the registries of diffusers before and after a test."""
    _registry.cache_clear()
    yield
    _registry.cache_clear()


@pytest.mark.usefixtures("nothing_is_loaded")
def test_without_diffusers() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "diffusers", None)
        with pytest.raises(ImportError, match=r"(?s)diffusers>=0.37,<1.*fastattn\[diffusers\]"):
            register()


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("version", ["0.36.0", "1.0.0", "unknown"])
def test_a_version_out_of_range(version: str, diffusers: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusers, "__version__", version)
        with pytest.raises(ImportError, match=rf"{version} is installed.*fastattn\[diffusers\]"):
            register()
