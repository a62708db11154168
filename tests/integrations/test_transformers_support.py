"""Models that support eager attention only stay right under ``attn_implementation="fastattn"``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

transformers = pytest.importorskip("transformers")

from fastattn.integrations.transformers import _support, register  # noqa: E402
from fastattn.integrations.transformers._attention import attention_forward  # noqa: E402

SIZES = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def bloom():  # type: ignore[no-untyped-def]
    """Computes attention itself and adds the mask to the scores."""
    config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **SIZES)
    return transformers.BloomForCausalLM, config


def bigbird_pegasus():  # type: ignore[no-untyped-def]
    """Uses the registry in the decoder, whose layers are not marked as causal."""
    config = transformers.BigBirdPegasusConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        attention_type="original_full",
        decoder_start_token_id=2,
        **SIZES,
    )
    return transformers.BigBirdPegasusForCausalLM, config


def deepseek_v4():  # type: ignore[no-untyped-def]
    """Uses the registry, and appends columns of scores to the mask."""
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("this transformers has no DeepSeek-V4")
    config = transformers.DeepseekV4Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=16,
        o_lora_rank=16,
        o_groups=2,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=2,
        layer_types=["compressed_sparse_attention"] * 2,
        mlp_layer_types=["moe"] * 2,
        sliding_window=4,
        **SIZES,
    )
    return transformers.DeepseekV4ForCausalLM, config


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with register():
        yield


def logits(model_class, config, implementation: str, mask):  # type: ignore[no-untyped-def]
    """The logits of a new model with the given attention implementation."""
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=implementation).eval()
    ids = torch.arange(3, 3 + mask.numel()).view(mask.shape)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.filterwarnings("ignore:attn_implementation='fastattn'")
@pytest.mark.parametrize("model", [bloom, bigbird_pegasus, deepseek_v4])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_eager(model: Callable[[], tuple], padded: bool) -> None:  # type: ignore[type-arg]
    model_class, config = model()
    mask = torch.ones(2, 9, dtype=torch.long)
    if padded:
        mask[0, -3:] = 0
    eager = logits(model_class, config, "eager", mask)
    ours = logits(model_class, config, "fastattn", mask)
    torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()])


def test_warns_once_that_attention_is_not_replaced() -> None:
    _, config = bloom()
    config._attn_implementation = "fastattn"
    _support._takes_any_mask.pop(transformers.BloomConfig, None)
    with pytest.warns(UserWarning, match="the models of BloomConfig support eager attention only"):
        assert not _support.takes_any_mask(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _support.takes_any_mask(config)


@pytest.mark.parametrize("name", ["Llama", "Bert", "Gemma2"])
def test_models_that_use_the_registry_take_any_mask(name: str) -> None:
    getattr(transformers, f"{name}Model")  # transformers imports it now
    config = getattr(transformers, f"{name}Config")()
    config._attn_implementation = "fastattn"
    assert _support.takes_any_mask(config)


@pytest.mark.filterwarnings("ignore:attn_implementation='fastattn'")
def test_no_mask_is_full_attention_in_eager_only_models() -> None:
    """BridgeTower's layers are not marked as not causal."""
    assert transformers.BloomModel  # transformers imports it now
    module = torch.nn.Module()
    _, module.config = bloom()
    module.config._attn_implementation = "fastattn"
    query, key, value = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    out, _ = attention_forward(module, query, key, value, None)
    reference = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(out, reference.transpose(1, 2))
