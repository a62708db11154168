"""Models of transformers on two ranks' rows of a sequence, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_group
import torch
import torch.distributed as dist
from distributed_faults import message_of
from torch import Tensor

from fastattn.distributed import Layout
from fastattn.integrations.transformers import context_parallel, register

transformers = pytest.importorskip("transformers")

L = 13
NAME = "fastattn_context_parallel"
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 19, "max_position_embeddings": 32,
}  # fmt: skip
# The class of the model, its configuration, the layout, and whether some rows are padding.
MODELS: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}, "contiguous", False),
    "llama-zigzag": ("LlamaForCausalLM", {"num_key_value_heads": 2}, "zigzag", True),
    "mistral": (
        "MistralForCausalLM",
        {"num_key_value_heads": 2, "sliding_window": 4},
        "contiguous",
        True,
    ),
    "bert": ("BertModel", {"hidden_dropout_prob": 0.0}, "contiguous", False),
    "bert-padded": ("BertModel", {"hidden_dropout_prob": 0.0}, "zigzag", True),
}


def run_models() -> dict[str, Any]:
    """Pairs of results of every model, and the errors of refused calls, on this rank."""
    found: dict[str, Any] = {}
    with register(), context_parallel(layout="contiguous"):
        for name, (kind, sizes, layout, padded) in MODELS.items():
            found[name] = compared(kind, sizes, layout, padded)
        found["refused"] = refused()
    return found


def compared(
    kind: str, sizes: dict[str, Any], layout: str, padded: bool
) -> list[tuple[Tensor, Tensor]]:
    """Pairs (on all ranks, on one rank) of the output and the gradients of a model."""
    torch.manual_seed(0)
    architecture = getattr(transformers, kind)
    model = architecture(architecture.config_class(**SIZES, **sizes)).double().train()
    model.config.attention_probs_dropout_prob = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    tokens = torch.randint(19, (2, L))
    mask = torch.ones(2, L, dtype=torch.int64)
    if padded:
        mask[0, 11:] = 0
    weight = torch.randn(2, L, 1, dtype=torch.float64) * mask[..., None]
    positions = torch.arange(L)[None]

    def computed(at: Tensor) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        given: dict[str, Any] = (
            {"attention_mask": mask[:, at]} if padded or layout == "zigzag" else {}
        )
        out = model(
            input_ids=tokens[:, at], position_ids=positions[:, at], use_cache=False, **given
        )[0]
        (out * weight[:, at]).sum().backward()
        return out.detach() * mask[:, at, None], [
            p.grad for p in model.parameters() if p.grad is not None
        ]

    model.set_attn_implementation("fastattn")
    want, wanted = computed(torch.arange(L))
    model.set_attn_implementation(NAME)
    rows = getattr(Layout, layout)([8, 5]).positions(dist.get_rank())
    with context_parallel(layout=layout):
        out, grads = computed(rows)
    for grad in grads:
        dist.all_reduce(grad)
    return [(out, want[:, rows]), *zip(grads, wanted, strict=True)]


def refused() -> dict[str, str]:
    """The errors of calls that context parallelism refuses, by name."""
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation(NAME)
    tokens = torch.ones(1, 4, dtype=torch.int64)
    calls: dict[str, dict[str, Any]] = {
        "packed": {"position_ids": torch.tensor([[0, 1, 6, 7]])},
        "weights": {"output_attentions": True},
    }
    return {
        name: message_of(lambda given=given: model(input_ids=tokens, use_cache=False, **given))
        for name, given in calls.items()
    }


@pytest.mark.slow
def test_models_on_two_ranks(tmp_path: Path) -> None:
    results = rank_group.run(tmp_path, [("test_transformers_context:run_models", 2)], seconds=120)
    for rank, found in enumerate(results[0]):
        assert found is not None
        for name in MODELS:
            for n, (got, want) in enumerate(found[name]):
                where = f"{name} {n} on rank {rank}"
                torch.testing.assert_close(
                    got, want, rtol=1e-9, atol=1e-9, msg=lambda text, at=where: f"{at}: {text}"
                )
        assert "pass attention_mask=torch.ones_like(input_ids)" in found["refused"]["packed"]
        assert "attention" in found["refused"]["weights"]
        assert not found["refused"]["weights"].startswith("no error")
