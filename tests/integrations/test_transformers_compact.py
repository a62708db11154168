"""Tables of relative position biases instead of a bias of all pairs, in tiny T5 and Swin."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers_models import ENTRIES
from transformers_runs import assert_same, fused, gradients, outputs, with_gradients

import fastattn
from fastattn import bias
from fastattn.integrations.transformers import _attention, _compact, compact_relative_bias

pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning")

ENTRY = {entry.name: entry for entry in ENTRIES}
T5, SWIN = "T5ForConditionalGeneration", "SwinModel"


def biases_of(calls: Any) -> list[Any]:
    """The relative biases of recorded calls."""
    return [call.kwargs["relative_bias"] for call in calls.call_args_list]


@pytest.mark.parametrize("name", [T5, "MT5ForConditionalGeneration", SWIN])
def test_outputs_and_gradients_equal_eagers(name: str) -> None:
    entry = ENTRY[name]
    model, inputs = entry.build(), entry.example()
    if name != SWIN:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][1, -3:] = 0
    want = gradients(model, inputs)
    attend = _attention.scaled_dot_product_attention
    with (
        compact_relative_bias(model),
        fused(model),
        mock.patch.object(_attention, "scaled_dot_product_attention", wraps=attend) as calls,
    ):
        got = gradients(model, inputs)
    assert_same(got, want)
    used = [bias is not None for bias in biases_of(calls)]
    cross = 0 if name == SWIN else 2
    assert sum(used) == len(used) - cross
    assert any("relative" in name for name in got if name.startswith("gradient"))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", [T5, "MT5ForConditionalGeneration", SWIN])
def test_gradients_of_tables_with_checkpoints(name: str, reentrant: bool) -> None:
    """A recomputed layer passes gradients to the table of its first run."""
    entry = ENTRY[name]
    model, inputs = entry.build().train(), entry.example()
    with compact_relative_bias(model), fused(model):
        want = with_gradients(model, inputs)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        got = with_gradients(model, inputs)
    assert any("relative" in name for name in got if name.startswith("gradient"))
    assert_same(got, {name: want[name] for name in got})


def test_a_sharded_table_is_refused_in_a_recomputed_layer() -> None:
    embedding = torch.nn.Embedding(32, 4)
    compact = _compact.CompactBias(bias.T5(embedding.weight.detach() + 0), embedding=embedding)
    assert compact.with_gradient().relative_bias.table.requires_grad
    embedding.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        compact.with_gradient()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generated_tokens_equal_eagers(cache: str) -> None:
    entry = ENTRY[T5]
    model, inputs = entry.build(), entry.example()
    inputs.pop("decoder_input_ids", None)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    options |= {"cache_implementation": "static"} if cache == "static" else {}

    def tokens() -> Tensor:
        return model.generate(**inputs, **options)

    want = tokens()
    with compact_relative_bias(model), fused(model):
        assert torch.equal(tokens(), want)


@pytest.mark.parametrize("name", [T5, SWIN])
def test_other_implementations_get_the_bias_of_all_pairs(name: str) -> None:
    entry = ENTRY[name]
    model, inputs = entry.build(), entry.example()
    want, before = outputs(model, inputs), [vars(module).keys() for module in model.modules()]
    before = [set(names) for names in before]
    changed = compact_relative_bias(model)
    assert_same(outputs(model, inputs), want)
    twin = copy.deepcopy(model)
    with fused(twin):
        assert_same(outputs(twin, inputs), want)
    changed.undo()
    changed.undo()
    assert [set(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize(("name", "replaced"), [(T5, "compute_bias"), (SWIN, "forward")])
def test_accelerate_and_restore(name: str, replaced: str) -> None:
    entry = ENTRY[name]
    model, inputs = entry.build(), entry.example()
    before = [set(vars(module)) for module in model.modules()]
    want = outputs(model, inputs)
    attend = _attention.scaled_dot_product_attention
    for _ in range(2):
        fastattn.accelerate(model)
        changed = [m for m in model.modules() if replaced in vars(m)]
        # The first layers of encoder and decoder of T5; all of Swin.
        assert len(changed) == (2 if name == T5 else 4)
        with mock.patch.object(_attention, "scaled_dot_product_attention", wraps=attend) as calls:
            assert_same(outputs(model, inputs), want)
        assert sum(bias is not None for bias in biases_of(calls)) == 4
    fastattn.restore(model)
    assert [set(vars(module)) for module in model.modules()] == before
    own = compact_relative_bias(model)
    fastattn.accelerate(model)
    fastattn.restore(model)
    assert all(replaced in vars(module) for module in changed)
    own.undo()


def test_models_without_such_a_bias() -> None:
    model = ENTRY["ViTModel"].build()
    with pytest.raises(ValueError, match="ViTModel has no relative position bias of T5, MT5 or S"):
        compact_relative_bias(model)
