"""Models of transformers in training on our attention, and in the precisions of training, against
the same models on its eager attention. See test_transformers.py.
"""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers_models import Entry, params
from transformers_runs import (
    Results,
    assert_same,
    fused,
    gradients,
    tensors,
    with_gradients,
)

from fastattn.testing.judge import deviations
from fastattn.testing.rounding import Noise

pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning")

every_model = pytest.mark.parametrize("entry", params())


@pytest.mark.parametrize("reentrant", [False, True])
@every_model
def test_gradient_checkpointing(entry: Entry, reentrant: bool) -> None:
    """Results equal the model without it, up to the order of sums of gradients."""
    inputs = entry.example()
    model = entry.build().train()
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"{entry} has no gradient checkpointing")
    with fused(model) as once:
        want = with_gradients(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with fused(model) as calls:
        got = with_gradients(model, inputs)
    if reentrant:  # layers whose inputs need no gradient do not run again and get none
        want = {name: want[name] for name in got}
    elif entry.quick:  # in all of these the layers that run again ask for attention
        assert len(calls) > len(once)
    assert any("gradient of" in name for name in got)
    assert_same(got, want)


@every_model
def test_lora(entry: Entry) -> None:
    inputs = entry.example()
    if entry.name == "DeepseekV3ForCausalLM" and transformers.__version__ == "5.0.0":
        pytest.skip("peft hides an attribute of the router that this version reads")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(entry.build(), config, autocast_adapter_dtype=False).double()
    base = adapted.get_base_model()
    want = gradients(adapted, inputs)
    assert any("lora_A" in name for name in want)
    with fused(base):
        got = gradients(adapted, inputs)
    assert_same(got, want)


@pytest.mark.parametrize("entry", params("drops"))
def test_dropout_of_weights(entry: Entry) -> None:
    """Each call draws other weights, and PyTorch's seed reproduces them."""
    inputs = entry.example()
    model = entry.build(dropout=0.3).train()

    def after(seed: int) -> Results:
        torch.manual_seed(seed)
        return gradients(model, inputs)

    with fused(model) as calls:
        first = after(0)
        assert any(call.get("dropout") == 0.3 for call in calls)
        assert_same(after(0), first, 0.0)
        second = after(1)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert all(bool(x.isfinite().all()) for x in first.values())


# One of each kind: a mask, a window, a softcap, an added bias, no mask; and those whose operations
# all have a rule in fastattn.testing.rounding.
JUDGED = "BertModel ModernBertModel LlamaForCausalLM MistralForCausalLM Gemma2ForCausalLM "
JUDGED += "T5ForConditionalGeneration ViTModel"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("entry", [p for p in params() if p.id in JUDGED.split()])
def test_lower_precision(entry: Entry, precision: str) -> None:
    """Outputs and gradients are within the bound of docs/numerics.md for the whole model."""
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    model = entry.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    inputs = {
        k: x.to(dtype).double() if x.is_floating_point() else x for k, x in entry.example().items()
    }

    def definition() -> Results:
        return gradients(model, inputs)

    exact = definition()
    held = torch.float32 if precision == "autocast" else dtype
    lower = copy.deepcopy(model).to(held)
    inputs_held = {k: x.to(held) if x.is_floating_point() else x for k, x in inputs.items()}
    with torch.autocast("cpu", dtype, enabled=precision == "autocast"), fused(lower):
        got = with_gradients(lower, inputs_held)
    found = deviations(got, exact, Noise(definition, exact, dtype), dict.fromkeys(got, dtype))
    wrong = [str(d) for d in found if not d.ok]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@every_model
def test_compiled(entry: Entry) -> None:
    """As without compiling, and as one graph where the model with eager attention is one."""
    model, inputs = entry.build(), entry.example()
    whole = _compiles_whole(model, inputs)
    with fused(model), torch.no_grad():
        want = dict(tensors(model(**inputs)))
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=whole)
        got = dict(tensors(compiled(**inputs)))
    assert_same(got, want)


def _compiles_whole(model: nn.Module, inputs: dict[str, Any]) -> bool:
    """Whether torch.compile captures the model in one graph."""
    torch.compiler.reset()
    try:
        with torch.no_grad():
            torch.compile(model, backend="eager", fullgraph=True)(**inputs)
    except Exception:
        return False
    return True
