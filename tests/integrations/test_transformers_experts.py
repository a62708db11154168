"""Mixtures of experts of transformers on our linear layers: as stock, and undone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers_runs import assert_same

import fastattn

transformers = pytest.importorskip("transformers")
moe = pytest.importorskip("transformers.integrations.moe")
if not hasattr(moe, "ExpertsInterface"):
    pytest.skip("transformers has no registry of experts", allow_module_level=True)

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 50}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 5},
    "GptOss": {"num_local_experts": 5, "head_dim": 8},  # transposed, with biases
    "Qwen3Moe": {"num_experts": 5, "moe_intermediate_size": 24},
}
IDS = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    return getattr(transformers, f"{name}Model")(config).double().eval()


def experts_of(model: nn.Module) -> list[Any]:
    """The modules of experts in a model."""
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def results(model: Any) -> dict[str, Tensor]:
    """The output and the gradients of all parameters."""
    model.zero_grad()
    out = model(IDS).last_hidden_state
    out.square().sum().backward()
    grads = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {"out": out.detach()} | {name: g for name, g in grads.items() if g is not None}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name: str) -> None:
    model = model_of(name)
    stock = copy.deepcopy(model)
    stock.set_experts_implementation("eager")  # the default takes no float64
    before = model.config._experts_implementation
    fastattn.accelerate(model)
    fastattn.accelerate(model)
    assert model.config._experts_implementation == "fastattn"
    assert_same(results(model), results(stock))
    fastattn.restore(model)
    assert model.config._experts_implementation == before
    fastattn.accelerate(model, linear=False)
    assert model.config._experts_implementation == before
    fastattn.restore(model)


def test_tokens_of_no_expert_and_experts_without_a_token() -> None:
    model = model_of("Mixtral")
    fastattn.accelerate(model)
    experts = experts_of(model)[0]
    x = torch.randn(7, 32, dtype=torch.float64)
    index = torch.tensor([[0, 5], [5, 5], [0, 3]]).repeat(3, 1)[:7]  # 5 is no expert
    weights = torch.rand(7, 2, dtype=torch.float64)
    got = experts(x, index, weights)
    experts.config._experts_implementation_internal = "eager"
    assert torch.allclose(got, experts(x, index, weights), rtol=0, atol=1e-14)
    assert not got[1].any()
    experts.config._experts_implementation_internal = "fastattn"
    assert experts(x[:0], index[:0], weights[:0]).shape == (0, 32)
    fastattn.restore(model)


def test_compiled_as_stock() -> None:
    """A compiler traces transformers' function, whose sizes do not depend on the router."""
    model = model_of("Mixtral").float()
    experts = experts_of(model)[0]
    x, weights = torch.randn(6, 32), torch.rand(6, 2)
    index = torch.randint(0, 5, (6, 2))
    want = experts(x, index, weights)
    fastattn.accelerate(model)
    got = torch.compile(experts, backend="eager")(x, index, weights)
    assert torch.allclose(got, want, atol=1e-5)
    fastattn.restore(model)
