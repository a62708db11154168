"""Tiny models of transformers with random weights, one line each, which test_transformers*.py
run with our attention and with transformers' own `eager` one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers_inputs import (
    EXPERTS,
    GROUPED,
    IMAGES,
    SEQ2SEQ,
    SPEECH,
    T5,
    TEXT,
    VOCABULARY,
    Inputs,
    boxed_text,
    image,
    image_and_points,
    image_and_text,
    image_with_border,
    spectrogram,
    speech,
    text,
    two_texts,
    video,
)

transformers.logging.set_verbosity_error()


@dataclass(frozen=True)
class Entry:
    """A class of transformers, its tiny configuration, and how to call it."""

    name: str  # of the class
    config: dict[str, Any]
    inputs: Callable[[torch.Generator], Inputs] = text
    since: str = "5.0.0"  # the first release in which the class asks the registry for its attention
    weights_since: str = "5.0.0"  # the first in which it shows that it wants attention weights
    sub: dict[str, dict[str, Any]] = field(default_factory=dict)  # configurations of its parts
    packed: tuple[str, ...] = ()  # the arguments by which a model takes packed sequences
    drops: bool = True  # can drop attention weights
    quick: bool = False  # runs in `make test`

    def __str__(self) -> str:
        return self.name

    def build(self, dropout: float = 0.0) -> Any:
        """The model with random weights in float64 and `eager` attention.

        ``dropout`` applies to the attention weights; there is no other.
        """
        if not released(self.since):
            pytest.skip(f"{self} asks the registry from transformers {self.since} on")
        model_class = getattr(transformers, self.name)
        config = model_class.config_class(**self.config | self.sub)
        _set_dropout(config, dropout)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"  # the one that takes float64
        model = model_class(config).double().eval()
        generator = self.generator()
        with torch.no_grad():
            for parameter in model.parameters():
                # A matrix keeps the scale of its input, so that attention is far from uniform.
                size = 1.2 / 32**0.5 if parameter.ndim > 1 else 0.1
                shift = parameter if parameter.ndim == 1 else 0
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.copy_(shift + size * noise)
        return model

    def example(self) -> Inputs:
        """The same inputs at every call; floating-point ones in float64."""
        found = self.inputs(self.generator())
        return {k: x.double() if x.is_floating_point() else x for k, x in found.items()}

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(self.name.encode()))

    @property
    def pads(self) -> bool:
        """Whether an attention_mask tells tokens from padding."""
        return self.inputs in (text, two_texts, boxed_text)

    @property
    def generates(self) -> bool:
        return self.name.endswith(("CausalLM", "LMHeadModel", "Generation", "MTModel"))


def released(version: str) -> bool:
    """Whether the installed transformers is as new as that."""
    return Version(version) <= Version(transformers.__version__)


def _set_dropout(config: Any, dropout: float) -> None:
    """Set the dropout of attention weights; all other dropout becomes 0."""
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            _set_dropout(value, dropout)
        elif "drop" in name and isinstance(value, (int, float)) and not isinstance(value, bool):
            of_weights = "att" in name or name == "dropout_rate"  # T5 has one for all
            setattr(config, name, dropout if of_weights else 0.0)


def params(*wanted: str, quick: Collection[str] | None = None) -> list[Any]:
    """The entries that have every named property; entries that are not quick are marked as slow.

    ``quick`` names the quick ones; the default is the table's own flag.
    """

    def marks(entry: Entry) -> list[Any]:
        is_quick = entry.quick if quick is None else entry.name in quick
        return [] if is_quick else [pytest.mark.slow]

    return [
        pytest.param(entry, id=entry.name, marks=marks(entry))
        for entry in ENTRIES
        if all(getattr(entry, name) for name in wanted)
    ]


def decoder(name: str, config: dict[str, Any], **options: Any) -> Entry:
    """An entry for a model that generates text; packed sequences are tested too."""
    return Entry(name, config, **{"packed": ("position_ids", "cu_seq_lens", "both")} | options)


SLIDING: dict[str, Any] = GROUPED | {"sliding_window": 5}
BOTH = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

ENTRIES = (
    # Encoders of text
    Entry("BertModel", TEXT, quick=True),
    Entry("BertForMaskedLM", TEXT),
    Entry("RobertaModel", TEXT),
    Entry("XLMRobertaModel", TEXT),
    Entry("CamembertModel", TEXT),
    Entry("ElectraModel", TEXT | {"embedding_size": 32}),
    Entry("AlbertModel", TEXT | {"embedding_size": 16}),
    Entry("ErnieModel", TEXT),
    Entry("EsmModel", TEXT | {"position_embedding_type": "rotary", "mask_token_id": 2}),
    Entry(
        "DistilBertModel",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    Entry(
        "ModernBertModel",
        TEXT | {"local_attention": 6, "global_attn_every_n_layers": 2},
        quick=True,
        since="5.1.0",
    ),
    Entry("EuroBertModel", GROUPED, since="5.3.0"),
    Entry(
        "LayoutLMModel",
        TEXT | {"max_2d_position_embeddings": 64},
        boxed_text,
        weights_since="5.4.0",
    ),
    # Decoders
    decoder(
        "GPT2LMHeadModel",
        TEXT | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        packed=("position_ids", "both"),
        weights_since="5.3.0",
    ),
    decoder("GPTNeoXForCausalLM", TEXT),
    Entry(
        "OPTForCausalLM", TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 32}, weights_since="5.4.0"
    ),
    Entry("BioGptForCausalLM", TEXT),
    decoder("LlamaForCausalLM", GROUPED, quick=True),
    decoder("MistralForCausalLM", SLIDING, quick=True),
    decoder("MixtralForCausalLM", GROUPED | EXPERTS),
    decoder("GemmaForCausalLM", GROUPED),
    decoder(
        "Gemma2ForCausalLM",
        GROUPED | {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
        quick=True,
    ),
    decoder("Gemma3ForCausalLM", GROUPED | BOTH | {"query_pre_attn_scalar": 8}),
    decoder("Qwen2ForCausalLM", GROUPED),
    decoder("Qwen3ForCausalLM", GROUPED),
    decoder("PhiForCausalLM", GROUPED),
    decoder("Phi3ForCausalLM", SLIDING),
    decoder("Olmo2ForCausalLM", GROUPED),
    decoder("Olmo3ForCausalLM", SLIDING),
    decoder("SmolLM3ForCausalLM", GROUPED),
    decoder("Starcoder2ForCausalLM", SLIDING),
    decoder(
        *("GptOssForCausalLM", GROUPED | EXPERTS | BOTH),
        packed=("cu_seq_lens", "both"),
        quick=True,
    ),
    decoder("CohereForCausalLM", GROUPED),
    decoder("Cohere2ForCausalLM", GROUPED | BOTH),
    decoder("GraniteForCausalLM", GROUPED | {"attention_multiplier": 0.3}),
    Entry("StableLmForCausalLM", GROUPED, weights_since="5.4.0"),
    decoder("Glm4ForCausalLM", GROUPED),
    decoder(
        "DeepseekV3ForCausalLM",
        TEXT
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 8,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    Entry(
        "Llama4ForCausalLM",
        GROUPED
        | EXPERTS
        | {
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 4,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "moe_layers": [],
        },
    ),
    # From text to text
    Entry("T5ForConditionalGeneration", T5, two_texts, since="5.15.0", quick=True),
    Entry("MT5ForConditionalGeneration", T5, two_texts, since="5.15.0"),
    Entry("BartForConditionalGeneration", SEQ2SEQ, two_texts, quick=True),
    Entry("MBartForConditionalGeneration", SEQ2SEQ, two_texts),
    Entry("PegasusForConditionalGeneration", SEQ2SEQ, two_texts),
    Entry("MarianMTModel", SEQ2SEQ, two_texts),
    Entry("M2M100ForConditionalGeneration", SEQ2SEQ, two_texts),
    # Speech
    Entry(
        "WhisperForConditionalGeneration",
        SEQ2SEQ
        | {
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        spectrogram,
    ),
    Entry("Wav2Vec2Model", SPEECH, speech),
    Entry("HubertModel", SPEECH, speech),
    # Images and video
    Entry("ViTModel", IMAGES, image, quick=True),
    Entry("DeiTModel", IMAGES, image),
    Entry("Dinov2Model", IMAGES, image),
    Entry(
        "DINOv3ViTModel",  # in training it moves its positions at random
        IMAGES | dict.fromkeys(("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")),
        image,
    ),
    Entry("IJepaModel", IMAGES, image),
    Entry("SiglipVisionModel", IMAGES, image),
    Entry("BeitModel", IMAGES | {"use_relative_position_bias": True}, image, since="5.9.0"),
    Entry("VideoMAEModel", IMAGES | {"num_frames": 4, "tubelet_size": 2}, video),
    Entry(
        "SwinModel",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        image,
        since="5.9.0",
        quick=True,
    ),
    Entry(
        "CLIPModel",
        {"projection_dim": 16},
        image_and_text,
        sub={"text_config": TEXT | {"eos_token_id": 2}, "vision_config": IMAGES},
        quick=True,
    ),
    Entry(
        "SiglipModel",
        {},
        image_and_text,
        sub={"text_config": TEXT | {"projection_size": 32}, "vision_config": IMAGES},
    ),
    Entry(
        "DetrModel",
        SEQ2SEQ
        | {
            "num_queries": 6,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 16],
                "depths": [1, 1],
                "layer_type": "basic",
                "out_features": ["stage2"],
            },
        },
        image_with_border,
        since="5.1.0",
    ),
    Entry(
        "SamModel",
        {},
        image_and_points,
        drops=False,
        sub={
            "vision_config": IMAGES
            | {
                "image_size": 64,
                "patch_size": 8,
                "output_channels": 32,
                "mlp_dim": 48,
                "window_size": 3,
                "global_attn_indexes": [1],
                "num_pos_feats": 16,
            },
            "prompt_encoder_config": {
                "hidden_size": 32,
                "image_size": 64,
                "patch_size": 8,
                "mask_input_channels": 4,
            },
            "mask_decoder_config": {
                "hidden_size": 32,
                "mlp_dim": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "iou_head_hidden_dim": 32,
            },
        },
    ),
)
