"""The arguments that models of transformers pass to their attention."""

from __future__ import annotations

import pytest
import torch
from packaging import version
from torch import Tensor

transformers = pytest.importorskip("transformers")

from fastattn.integrations.transformers import register  # noqa: E402
from fastattn.integrations.transformers._attention import attention_forward  # noqa: E402
from fastattn.integrations.transformers._masks import StructuredMask  # noqa: E402
from fastattn.integrations.transformers._patterns import Pattern  # noqa: E402


def query_key_value() -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, 4, 6, 8, generator=g).unbind()  # three times [B, H, L, D]


def test_labels_passed_to_attention_are_ignored() -> None:
    """PaliGemma passes them to its language model, down to the attention of Gemma."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    text = {
        **sizes,
        "model_type": "gemma",
        "vocab_size": 64,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    vision = {
        **sizes,
        "model_type": "siglip_vision_model",
        "num_hidden_layers": 1,
        "image_size": 16,
        "patch_size": 8,
    }
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision, projection_dim=32, image_token_index=60
    )
    ids = torch.tensor([[60, 60, 60, 60, 5, 6, 7, 8]])
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16),
        "token_type_ids": torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]]),
        "labels": ids,
    }
    states = []
    for implementation in ("eager", "fastattn"):
        torch.manual_seed(0)
        with register():
            model = transformers.PaliGemmaModel._from_config(
                config, attn_implementation=implementation
            ).eval()
            states.append(model(**inputs).last_hidden_state)
    torch.testing.assert_close(states[1], states[0])


@pytest.mark.parametrize("name", ["labels", "logits_to_keep", "token_type_ids", "position_ids"])
def test_irrelevant_arguments_have_no_effect(name: str) -> None:
    assert transformers.BertForMaskedLM  # transformers imports it now, and with it its inputs
    inputs = query_key_value()
    plain, _ = attention_forward(torch.nn.Identity(), *inputs, None)
    given, _ = attention_forward(torch.nn.Identity(), *inputs, None, **{name: torch.ones(2, 6)})
    assert torch.equal(given, plain)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [(6, 5), (6, 4), (5, 6), (7, 6)])
def test_a_mask_of_another_size_is_refused(
    size: tuple[int, int], packed: bool, padded: bool
) -> None:
    """A cache may give a layer more or fewer keys than the mask was made for."""
    pattern = Pattern(right=0, segments=torch.zeros(2, size[0]) if packed else None)
    padding = torch.ones(2, size[1], dtype=torch.bool) if padded else None
    mask = StructuredMask((2, 1, *size), pattern, 0, padding, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=f"mask has {size[0]} queries and {size[1]} keys, the"):
        attention_forward(torch.nn.Identity(), *query_key_value(), mask)


def test_indices_name_the_keys_of_each_query() -> None:
    query, key, value = query_key_value()
    indices = torch.tensor([[2, 0], [1, 1], [3, -1], [5, 4], [0, 5], [2, 3]]).expand(2, -1, -1)
    chosen = torch.zeros(6, 7, dtype=torch.bool).scatter(-1, indices[0] % 7, True)[:, :6]
    out, _ = attention_forward(
        torch.nn.Identity(), query, key, value, None, is_causal=False, indices=indices
    )
    reference = torch.nn.functional.scaled_dot_product_attention(query, key, value, chosen)
    torch.testing.assert_close(out, reference.transpose(1, 2))


def test_block_indices_name_blocks_of_keys_for_groups_of_heads() -> None:
    query, key, value = query_key_value()
    module = torch.nn.Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = 4  # type: ignore[assignment]  # keys 0, ..., 3 and 4, 5
    blocks = torch.tensor([[[0, -1]] * 5 + [[0, 1]], [[0, 1]] * 3 + [[1, -1]] * 3])  # [G, Lq, k]
    chosen = torch.zeros(4, 6, 6, dtype=torch.bool)
    chosen[:2, :, :4] = chosen[:2, 5] = True
    chosen[2:, :3] = chosen[2:, 3:, 4:] = True
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    out, _ = attention_forward(
        module, query, key, value, None, is_causal=True, block_indices=blocks.expand(2, -1, -1, -1)
    )
    scores = query @ key.mT * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~(chosen & causal), -torch.inf).softmax(-1).nan_to_num()
    torch.testing.assert_close(out, (weights @ value).transpose(1, 2))


def gpt2():  # type: ignore[no-untyped-def]
    """The class, configuration and inputs of a small GPT-2."""
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)
    return transformers.GPT2Model, config, {"input_ids": torch.arange(3, 15).view(2, 6)}


def siglip():  # type: ignore[no-untyped-def]
    """The class, configuration and inputs of a small SigLIP vision model."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.SiglipVisionConfig(
        num_hidden_layers=2, image_size=16, patch_size=4, **sizes
    )
    pixels = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)
    return transformers.SiglipVisionModel, config, {"pixel_values": pixels}


@pytest.mark.parametrize("model", [gpt2, siglip])
def test_weights_of_models_that_do_not_pass_the_flag_to_layers(model) -> None:  # type: ignore[no-untyped-def]
    if model is gpt2 and version.parse(transformers.__version__) < version.parse("5.4"):
        pytest.skip("GPT-2 of transformers before 5.4 does not show that it records weights")
    model_class, config, inputs = model()
    weights = []
    for implementation in ("eager", "fastattn"):
        torch.manual_seed(0)
        with register(), torch.no_grad():
            stack = model_class._from_config(config, attn_implementation=implementation).eval()
            weights.append(stack(**inputs, output_attentions=True).attentions)
            if implementation == "fastattn":
                assert stack(**inputs).attentions is None
    assert len(weights[1]) == 2
    torch.testing.assert_close(weights[1], weights[0])


def test_a_model_that_was_never_called_is_compiled_as_one_graph() -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    ids = torch.arange(3, 15).view(2, 6)
    with register(), torch.no_grad():
        model = transformers.LlamaModel._from_config(config, attn_implementation="fastattn").eval()
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        state = compiled(input_ids=ids, labels=ids, use_cache=False).last_hidden_state
        want = model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(state, want)
