"""The shapes of real models.

A preset is a list of templates: an operator, a shape, a mask and the weights that are returned. The
command line chooses dtypes and passes; a template has defaults for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastattn.bench import ops
from fastattn.bench.cells import DTYPES, PASSES, Cell
from fastattn.bench.shapes import parse_shapes


@dataclass(frozen=True)
class Template:
    """A cell without dtype and pass; `dtypes` and `passes` are the defaults.

    The shape has the notation of `--shapes`.
    """

    label: str
    op: str
    shape: str
    mask: str = "none"
    weights: str = "none"
    dtypes: Sequence[str] = ("fp32", "bf16")
    passes: Sequence[str] = ("fwd", "fwd+bwd")
    option: str = "none"


@dataclass(frozen=True)
class Preset:
    """`by_dtype`: fp32 first, and in each dtype the forward passes first; then what is `rarer`.

    For runs in little time, which may end after any cell.
    """

    about: str
    templates: list[Template]
    rarer: Sequence[Template] = ()
    by_dtype: bool = False


def template_cells(
    template: Template, dtypes: Sequence[str] = (), passes: Sequence[str] = (), preset: str = ""
) -> list[Cell]:
    """Every combination of the template's shapes with dtypes and passes (default: its own).

    Passes that the operator does not have are left out.
    """
    operator = ops.get(template.op)
    return [
        Cell(
            op=template.op,
            sizes=sizes,
            dtype=dtype,
            passes=direction,
            mask=template.mask,
            weights=template.weights,
            option=template.option,
            preset=preset,
            label=template.label,
        )
        for sizes in parse_shapes(template.shape, operator.SIZES)
        for dtype in dtypes or template.dtypes
        for direction in passes or template.passes
        if direction in operator.PASSES
    ]


# Devlin et al. 2019, BERT-base: width 768, 12 heads; batch 8.
_BERT = {
    length: Template(f"BERT-base MHA, {length} tokens", "mha", f"B=8,L={length},E=768,H=12")
    for length in (128, 512)
}
_BERT_CORE = {
    length: Template(f"BERT-base SDPA, {length} tokens", "sdpa", f"B=8,H=12,L={length},D=64")
    for length in (128, 512)
}
_BERT_WEIGHTS = Template(
    "BERT-base MHA, 512 tokens, weights returned",
    "mha",
    "B=8,L=512,E=768,H=12",
    weights="average",
)
# Dosovitskiy et al. 2021, ViT-B/16 at 224 pixels: 14·14 patches and a class token.
_VIT = Template("ViT-B/16 MHA, 197 patches", "mha", "B=8,L=197,E=768,H=12")
_VIT_CORE = Template("ViT-B/16 SDPA, 197 patches", "sdpa", "B=8,H=12,L=197,D=64")
# Radford et al. 2019, GPT-2 small at its full context; later models have longer ones.
_GPT2 = Template("GPT-2 SDPA, causal, 1024 tokens", "sdpa", "B=1,H=12,L=1024,D=64", "causal")
_GPT_2K = Template("GPT SDPA, causal, 2048 tokens", "sdpa", "B=1,H=16,L=2048,D=64", "causal")
_GPT_STATS = Template(
    "GPT attention_stats, causal, 2048 tokens",
    "attention_stats",
    "B=1,H=16,L=2048,D=64",
    "causal",
    passes=("fwd",),
)
_GPT_MERGE = Template("GPT prefix and suffix, 2048 tokens", "merge_states", "B=1,H=16,L=2048,D=64")
_GPT_8K = Template("GPT SDPA, causal, 8192 tokens", "sdpa", "B=1,H=8,L=8192,D=64", "causal")
# One new token against a cache of 4096: Llama 3 8B has 8 key heads for 32 heads, Llama 2 7B has 32.
_DECODE_GQA = Template(
    "Llama 3 8B SDPA, next token, cache 4096",
    "sdpa",
    "B=1,H=32,Hkv=8,Lq=1,Lk=4096,D=128",
    passes=("fwd",),
)
_DECODE = Template(
    "Llama 2 7B SDPA, next token, cache 4096",
    "sdpa",
    "B=1,H=32,Lq=1,Lk=4096,D=128",
    passes=("fwd",),
)
_DECODE_CACHE = Template(
    "Llama 3 8B decode_attention, cache 4096", "decode", "B=1,H=32,Hkv=8,Lk=4096,D=128"
)


def _serving(
    shape: str,
    mask: str = "none",
    model: str = "Llama 3 8B",
    heads: str = "H=32,Hkv=8",
    dtypes: Sequence[str] = ("fp32", "bf16"),
) -> list[Template]:
    """A step of a server, on caches of `dtypes`, int8 and fp8."""
    label = f"{model}, {'prompt' if mask == 'causal' else 'next token'}"
    shape = f"{shape},{heads},D=128"
    return [
        Template(label, "decode", shape, mask, dtypes=dtypes),
        *(
            Template(f"{label}, {kind}", "decode", shape, mask, dtypes=("bf16",), option=kind)
            for kind in ("int8", "fp8")
        ),
    ]


# One query head a key head: reading limits these steps, not arithmetic.
_SERVING_UNSHARED = [
    template
    for shape in ("B=1,Lk=4096|32768", "B=8,Lk=4096")
    for template in _serving(shape, "none", "Llama 2 7B", "H=32,Hkv=32", dtypes=("bf16",))
]
# DeepSeek V3 has 128 heads on one key head, whose rows have 576 elements; 512 of them are the value
# (https://arxiv.org/abs/2412.19437, section 2.1.1). Each of 8 devices has 16 of the heads.
_LATENT = "B=8,Hkv=1,Lk=4096,D=576,Dv=512"
_ON_8 = "DeepSeek V3 on 8 devices"
_SERVING_LATENT = [
    Template("DeepSeek V3, next token", "decode", f"{_LATENT},H=128", option="latent"),
    Template(f"{_ON_8}, next token", "decode", f"{_LATENT},H=16", option="latent"),
    # Speculative decoding: the newest token and three drafts.
    Template(f"{_ON_8}, 4 tokens", "decode", f"{_LATENT},H=16,Lq=4", "causal", option="latent"),
]


# The base model of Vaswani et al. 2017, width 512 and 8 heads; sentences are half as long as the
# longest of their batch.
_PADDED_SHAPE = "B=16,L=256,E=512,H=8"
_PADDED = Template("Transformer MHA, half padding", "mha", _PADDED_SHAPE, "padding")
_PADDED_WEIGHTS = Template(
    "Transformer MHA, half padding, weights returned",
    "mha",
    _PADDED_SHAPE,
    "padding",
    "average",
)
_PADDED_CORE = Template("Transformer SDPA, half padding", "sdpa", "B=16,H=8,L=256,D=64", "padding")
_PACKED = Template("the same sentences packed, not padded", "varlen", "B=16,H=8,L=256,D=64")
_PADDED_LAYER = Template(
    "Transformer encoder layer, half padding",
    "encoder_layer",
    "B=16,L=256,E=512,H=8,F=2048",
    "padding",
)
# Vaswani et al. 2017, the base model's two stacks of six layers.
_STACKS = [
    Template("Transformer encoder, six layers", "encoder", "B=4,L=128,E=512,H=8,F=2048"),
    Template("Transformer decoder layer", "decoder_layer", "B=4,L=128,E=512,H=8,F=2048"),
    Template("Transformer decoder, six layers", "decoder", "B=4,L=128,E=512,H=8,F=2048"),
    Template("Transformer, six and six layers", "transformer", "B=4,L=128,E=512,H=8,F=2048"),
    Template("HeadNetwork, a network per head", "head_network", "B=4,H=8,L=128,D=64,F=64"),
]
_SINUSOIDS = [
    Template("Transformer position encoding", "sinusoidal", "B=16,L=256,E=512"),
    Template("Position encoding, width 768", "sinusoidal", "B=8,L=512,E=768"),
]
_POSITIONS = [
    *_SINUSOIDS,
    Template("the same as a module", "positional", "B=16,L=256,E=512"),
    Template("the table alone", "sinusoidal_table", "L=512,E=768", passes=("fwd",)),
    Template("BERT-base learnt positions", "learned", "B=8,L=512,E=768"),
]
# Bahdanau et al. 2015: 1000 hidden units, sentences of up to 30 or 50 words; Luong et al. 2015:
# 1000 cells and windows of D = 10. Half as wide here, to limit the time of a cell.
_SEQ2SEQ = [
    Template("Bahdanau scores, all steps", "additive", "B=32,L=30,A=512"),
    Template("Bahdanau scores, one step", "additive", "B=64,Lq=1,Lk=50,A=512"),
    Template("Bahdanau module, all steps", "bahdanau", "B=32,L=30,E=512,A=512"),
    Template("Luong general, global", "luong", "B=64,L=50,D=512"),
    Template("Luong general, local-m", "luong", "B=16,L=512,D=512,W=10"),
    Template("Luong general, local-p", "luong", "B=16,L=512,D=512,W=10,P=1"),
    Template("Luong module, all steps", "luong_module", "B=64,L=50,D=512"),
    Template("OpenNMT's layer, all steps", "global_attention", "B=64,L=50,D=512"),
    Template("Keras' layer, all steps", "additive_module", "B=32,L=30,A=512"),
    # Xu et al. 2015: each word attends to one of the 14·14 positions of an image.
    Template("hard attention, 196 positions of an image", "hard", "B=16,H=1,Lq=20,Lk=196,D=512"),
]
# Sukhbaatar et al. 2015: bAbI trained jointly, 50 sentences of at most 11 of 175 words, width 50;
# and larger memories.
_MEMORY = [
    # Ramsauer et al. 2021: at most three steps; a batch of bags with 128 patterns.
    Template("Hopfield retrieval, 3 steps", "hopfield", "B=4,H=8,L=128,N=128,D=64,K=3"),
    Template("Hopfield energy of the same", "hopfield_energy", "B=4,H=8,L=128,N=128,D=64"),
    Template("Hopfield module, 3 steps", "hopfield_module", "B=4,L=128,N=128,E=512,H=8,K=3"),
    Template("Hopfield lookup, 128 patterns", "hopfield_layer", "B=4,L=128,N=128,E=512,H=8,K=3"),
    Template("Hopfield pooling of 32 bags", "hopfield_pooling", "B=32,N=128,E=512,H=8,K=3"),
    Template("bAbI encoding of a memory", "encode_memory", "B=32,N=50,J=11,V=175,D=50"),
    Template("bAbI hops", "memory_hops", "B=32,N=50,D=50,K=3"),
    Template("one memory per query", "memory_hops", "B=256,N=1000,D=128,K=3"),
    Template("one memory for all queries", "memory_hops", "B=256,S=1,N=10000,D=128,K=3"),
    # Miller et al. 2016 read tens to thousands of slots that a hash selects.
    Template("1024 slots of keys and values", "key_value_memory", "B=32,L=1,N=1024,D=128"),
    Template("bAbI, the complete network", "memn2n", "B=32,N=50,J=11,V=175,D=50,K=3"),
]

# Whole models, by their names in `bench model`. Other sizes are those of BERT-base, DistilBERT,
# ViT-B/16, the encoder of Whisper small, GPT-2, TinyLlama, DeiT-S (which is ViT-S/16) and DiT-B/2.
_TRAINED = ("fwd", "fwd+bwd")
_FORWARD = ("fwd",)
WHOLE_MODELS: dict[str, list[Template]] = {
    "bert-base": [Template("BERT-base, 128 tokens", "bert", "B=8,L=128", passes=_TRAINED)],
    "distilbert": [Template("DistilBERT, 128 tokens", "distilbert", "B=8,L=128", passes=_FORWARD)],
    # Wang et al. 2020, https://arxiv.org/abs/2002.10957: MiniLM-L6-H384, which embeds sentences.
    "minilm": [
        Template(
            "MiniLM, half padding",
            "bert",
            "B=32,L=128,N=6,E=384,H=12,F=1536",
            "padding",
            passes=_FORWARD,
        )
    ],
    "vit-b16": [Template("ViT-B/16, 224 pixels", "vit", "B=8,I=224", passes=_FORWARD)],
    "whisper-small": [
        Template("Whisper small's encoder, 30 s", "whisper_encoder", "B=1,L=1500", passes=_FORWARD)
    ],
    "gpt2": [Template("GPT-2, prompt of 1024", "gpt2", "B=1,L=1024", passes=_FORWARD)],
    # Zhang et al. 2024, https://arxiv.org/abs/2401.02385: the shape of Llama with 1.1 billion.
    "llama-1b": [
        Template("TinyLlama 1.1B, prompt of 512", "llama", "B=1,L=512", passes=_FORWARD),
        Template("TinyLlama 1.1B, next token, cache 2048", "llama_decode", "B=1,L=2048"),
    ],
    "vit-s16-timm": [
        Template("timm's ViT-S/16, 224 pixels", "timm_vit", "B=8,I=224", passes=_TRAINED)
    ],
    # A latent image has an eighth of the pixels on each side.
    "dit-b2-diffusers": [
        Template("diffusers' DiT-B/2, 512 pixels", "diffusers_dit", "B=1,I=64", passes=_FORWARD)
    ],
    "whisper-openai": [
        Template(
            "OpenAI's Whisper small, encoder, 30 s",
            "openai_whisper",
            "B=1,L=1500",
            dtypes=("fp32",),
            passes=_FORWARD,
        )
    ],
}

PRESETS: dict[str, Preset] = {
    "quick": Preset(
        "one cell of each kind, about a minute",
        [_BERT[128], _BERT_CORE[512], _GPT2, _DECODE_GQA],
        by_dtype=True,
    ),
    "dropin": Preset(
        "nn.MultiheadAttention replaced, and the attention inside it; the most common cells first",
        [_BERT[128], _BERT_CORE[512], _PADDED, _GPT_2K, _DECODE_GQA, _VIT],
        rarer=[_BERT[512], _BERT_WEIGHTS],
        by_dtype=True,
    ),
    "bert": Preset(
        "BERT-base: batch 8, 12 heads of 64, 128 or 512 tokens",
        [_BERT[128], _BERT[512], _BERT_WEIGHTS, _BERT_CORE[128], _BERT_CORE[512]],
    ),
    "vit": Preset("ViT-B/16 at 224 pixels: batch 8, 12 heads of 64", [_VIT, _VIT_CORE]),
    "gpt": Preset(
        "GPT-2 and larger GPTs: causal, 1024 and 2048 tokens",
        [_GPT2, _GPT_2K, _GPT_STATS, _GPT_MERGE],
    ),
    "decode": Preset(
        "the next token on a cache of 4096: Llama 3 8B and Llama 2 7B",
        [_DECODE_GQA, _DECODE, _DECODE_CACHE],
    ),
    "serving": Preset(
        "the next token at batch 1 to 64 and prompts, caches of up to 32768 keys: Llama 3 8B, "
        "Llama 2 7B, DeepSeek V3",
        [
            *_serving("B=1,Lk=1024:32768:x32"),
            *_serving("B=8,Lk=4096"),
            *_serving("B=64,Lk=1024"),
            *_serving("B=1|8,Lq=512,Lk=512", "causal"),
            *_serving("B=1,Lq=128,Lk=32768", "causal"),
            *_SERVING_UNSHARED,
            *_SERVING_LATENT,
        ],
    ),
    "padded": Preset(
        "16 sentences padded to 256 tokens, half of them padding: width 512, 8 heads",
        [_PADDED, _PADDED_WEIGHTS, _PADDED_CORE, _PACKED, _PADDED_LAYER],
    ),
    "transformer": Preset("the base Transformer and its parts, width 512", _STACKS),
    "long": Preset("one causal sequence of 8192 tokens, 8 heads of 64", [_GPT_8K]),
    "encoding": Preset("position encodings, width 512 and 768", _POSITIONS),
    "seq2seq": Preset(
        "the attentions of recurrent translation: Bahdanau, Luong; hard attention", _SEQ2SEQ
    ),
    "memory": Preset("memories: Hopfield retrieval, end-to-end memory networks", _MEMORY),
    "models": Preset(
        f"whole models: {', '.join(WHOLE_MODELS)} (one alone: `bench model NAME`)",
        [template for templates in WHOLE_MODELS.values() for template in templates],
    ),
}
MODEL_PRESETS = tuple(
    name for name in PRESETS if name not in ("quick", "dropin", "serving", "models")
)


def model_cells(
    names: Sequence[str], dtypes: Sequence[str] = (), passes: Sequence[str] = ()
) -> list[Cell]:
    """The cells of whole models; `all` is every one. Raises ValueError for an unknown name."""
    for name in names:
        if name not in (*WHOLE_MODELS, "all"):
            raise ValueError(f"model {name!r}: known are {', '.join([*WHOLE_MODELS, 'all'])}")
    cells = [
        cell
        for name in (WHOLE_MODELS if "all" in names else dict.fromkeys(names))
        for template in WHOLE_MODELS[name]
        for cell in template_cells(template, dtypes, passes, "models")
    ]
    if not cells:
        raise ValueError(f"--pass {','.join(passes)}: {', '.join(names)} has no such pass")
    return cells


def preset_cells(name: str, dtypes: Sequence[str] = (), passes: Sequence[str] = ()) -> list[Cell]:
    """The cells of presets, such as "a,b" or "all"; dtypes and passes replace their defaults."""
    for one in name.split(","):
        if one not in (*PRESETS, "all"):
            raise ValueError(f"--preset {one!r}: allowed are {', '.join([*PRESETS, 'all'])}")
    chosen = MODEL_PRESETS if name == "all" else name.split(",")
    cells = []
    for preset in chosen:
        for templates in (PRESETS[preset].templates, PRESETS[preset].rarer):
            of = [c for t in templates for c in template_cells(t, dtypes, passes, preset)]
            if PRESETS[preset].by_dtype:
                of.sort(key=lambda cell: (DTYPES.index(cell.dtype), PASSES.index(cell.passes)))
            cells += of
    return cells
