"""What a user may import: none of these names goes away, and none comes without a line here."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

NAMES = {
    "fastattn": """
        FallbackWarning MultiheadAttention __version__ accelerate additive_attention
        attention_stats bias capture decode_attention distributed encode_memory explain
        hard_attention hopfield_energy hopfield_retrieve luong_attention masks memory_hop_attention
        merge_states nn plot replace_mha restore restore_mha scaled_dot_product_attention
        sinusoidal_encoding sinusoidal_table trace use_backend varlen_attention""",
    "fastattn.nn": """
        AdditiveAttention BahdanauAttention GlobalAttention HeadNetwork Hopfield HopfieldLayer
        HopfieldPooling KeyValueMemory LearnedPositionalEncoding LuongAttention MemN2N
        MultiheadAttention RelativeBias SinusoidalPositionalEncoding T5RelativeBias Transformer
        TransformerDecoder TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer
        WindowRelativeBias insert_empty_memories""",
    "fastattn.bias": "T5 Window2d",
    "fastattn.distributed": """
        Layout Plan Share attention decode_attention hopfield_retrieve memory_hop_attention plan""",
    "fastattn.flash_attn": """
        flash_attn_func flash_attn_qkvpacked_func flash_attn_varlen_func flash_attn_with_kvcache""",
    "fastattn.integrations": "accelerate replace_mha restore restore_mha",
    "fastattn.integrations.acceleration": "Part Report accelerate restore",
    "fastattn.integrations.diffusers": "Registration register",
    "fastattn.integrations.sentence_transformers": "Registration unpad_inputs",
    "fastattn.integrations.torch": "Activation activate",
    "fastattn.integrations.transformers": """
        CompactBiases Registration compact_relative_bias context_parallel register""",
    "fastattn.masks": """
        Mask causal chunked document draft_tree from_block_mask from_function prefix_lm
        sliding_window""",
    "fastattn.plot": "heatmap hops html",
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(NAMES[module].split())
    assert all(hasattr(found, name) for name in found.__all__)


def test_the_reference_has_every_module() -> None:
    pages = "".join(page.read_text() for page in ROOT.glob("docs/reference/*.md"))
    assert sorted(re.findall(r"automodule:: (\S+)", pages)) == sorted(NAMES)
