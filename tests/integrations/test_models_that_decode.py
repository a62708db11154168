"""Models that generate on our caches give the text of transformers' own attention and cache.

The attention of each layer is replaced by the projections and one call of `decode_attention`:
grouped heads with the rotation on append (Llama), and all heads on the latent rows of multi-head
latent attention, whose values are the first columns of their keys (DeepSeek, arXiv 2405.04434).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers_models import ENTRIES

from fastattn import decode_attention

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [20]]
STEPS, ROWS, PAGE = 8, 20, 4  # tokens to generate, rows of a sequence, keys of a page


@dataclass
class Caches:
    """The caches of all layers, and which part of them a call uses."""

    tensors: dict[Any, tuple[Tensor, Tensor]]
    table: Tensor | None  # [B, P]
    padding: Tensor  # [B] rows before the first key
    lengths: Tensor  # [B]
    entries: Tensor  # [B]

    def attend(self, module: Any, *tensors: Tensor, **options: Any) -> Tensor:
        """The rows of query, key, value [B, H, L, D] at the ends of their sequences."""
        query, key, value = tensors
        if module not in self.tensors:
            shape = (len(PROMPTS), key.shape[1], ROWS)
            if self.table is not None:
                shape = (self.table.numel(), key.shape[1], PAGE)
            keys = torch.full((*shape, key.shape[3]), torch.nan)
            of_key = value.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
            values = keys if of_key else torch.full((*shape, value.shape[3]), torch.nan)
            self.tensors[module] = keys, values[..., : value.shape[3]]
        where: dict[str, Any] = {"cache_batch_idx": self.entries, "cache_leftpad": self.padding}
        if self.table is not None:
            where = {"block_table": self.table[self.entries]}
        return decode_attention(
            query, *self.tensors[module], self.lengths, key=key, value=value, is_causal=True,
            **where, **options,
        )  # fmt: skip


def llama(model: Any, module: Any, caches: Caches, hidden: Tensor, **given: Any) -> Any:
    """`decode_attention` rotates queries and keys."""
    heads = (*hidden.shape[:2], -1, module.head_dim)
    projections = (module.q_proj, module.k_proj, module.v_proj)
    q, k, v = (project(hidden).view(heads).transpose(1, 2) for project in projections)
    tables = model.model.rotary_emb(hidden, torch.arange(ROWS)[None])
    cos, sin = (x[0, :, : module.head_dim // 2] for x in tables)
    new = torch.arange(hidden.shape[1])
    positions = caches.lengths[:, None] - caches.padding[:, None] + new
    out = caches.attend(module, q, k, v, rotary_cos=cos, rotary_sin=sin, rotary_positions=positions)
    return module.o_proj(out.transpose(1, 2).flatten(2)), None


def deepseek(model: Any, module: Any, caches: Caches, hidden: Tensor, **given: Any) -> Any:
    """A row of the cache is the latent c and the rotated key that all heads share.

    With W_k and W_v of `kv_b_proj`, q (W_k c) = (W_k^T q) c and sum p (W_v c) = W_v (sum p c).
    """
    batch, length, _ = hidden.shape
    rotate = transformers.models.deepseek_v3.modeling_deepseek_v3.apply_rotary_pos_emb_interleave
    q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden)))
    q = q.view(batch, length, -1, module.qk_head_dim).transpose(1, 2)
    q, q_rotary = q.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    latent, k_rotary = module.kv_a_proj_with_mqa(hidden)[:, None].split(
        [module.kv_lora_rank, module.qk_rope_head_dim], -1
    )
    q_rotary, k_rotary = rotate(q_rotary, k_rotary, *given["position_embeddings"])
    w = module.kv_b_proj.weight.view(module.num_heads, -1, module.kv_lora_rank)
    w_k, w_v = w.split([module.qk_nope_head_dim, module.v_head_dim], 1)
    query = torch.cat([q @ w_k, q_rotary], -1)
    key = torch.cat([module.kv_a_layernorm(latent), k_rotary], -1)
    value = key[..., : module.kv_lora_rank]
    out = caches.attend(module, query, key, value, scale=module.scaling) @ w_v.mT
    return module.o_proj(out.transpose(1, 2).flatten(2)), None


MODELS: dict[str, Callable[..., Any]] = {
    "LlamaForCausalLM": llama,
    "DeepseekV3ForCausalLM": deepseek,
}


def generated(model: Any, caches: Caches, attention: Callable[..., Any]) -> list[list[int]]:
    """The prompts one by one, then a token of all of them at a time."""
    for layer in model.model.layers:
        module = layer.self_attn

        def forward(hidden_states: Tensor, module: Any = module, **given: Any) -> Any:
            return attention(model, module, caches, hidden_states, **given)

        module.forward = forward
    ends = caches.lengths.clone()

    def step(entries: Tensor, tokens: Tensor) -> Tensor:
        """The next token of each."""
        whole = caches.padding, caches.entries
        caches.lengths = ends[entries]
        caches.padding, caches.entries = caches.padding[entries], entries
        positions = (caches.lengths - caches.padding)[:, None] + torch.arange(tokens.shape[1])
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        ends[entries] += tokens.shape[1]
        caches.padding, caches.entries = whole
        return logits[:, -1].argmax(-1)

    everyone = torch.arange(len(PROMPTS))
    last = torch.cat([step(everyone[b : b + 1], torch.tensor([p])) for b, p in enumerate(PROMPTS)])
    found = [last]
    for _ in range(STEPS - 1):
        found.append(step(everyone, found[-1][:, None]))
    return torch.stack(found, 1).tolist()


@functools.cache
def expected(name: str) -> tuple[Any, list[list[int]]]:
    """A tiny model with random weights, and the text it generates by itself."""
    model = next(entry for entry in ENTRIES if entry.name == name).build().float()
    settings = transformers.GenerationConfig(
        max_new_tokens=STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    texts = [model.generate(torch.tensor([p]), generation_config=settings)[0] for p in PROMPTS]
    return model, [x[len(p) :].tolist() for x, p in zip(texts, PROMPTS, strict=True)]


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_generates_the_same_text(name: str, paged: bool) -> None:
    """In pages shorter than a prompt, or in entries with padding in front."""
    model, want = expected(name)
    assert len({tuple(text) for text in want}) == len(PROMPTS), "the texts should differ"
    padding = torch.tensor([0, 0, 0] if paged else [6, 0, 8])
    pages = torch.randperm(len(PROMPTS) * ROWS // PAGE, generator=torch.Generator().manual_seed(0))
    table = pages.view(len(PROMPTS), -1) if paged else None
    caches = Caches({}, table, padding, padding.clone(), torch.arange(len(PROMPTS)))
    assert generated(model, caches, MODELS[name]) == want
