"""The shapes of real models, in the notation of `--shapes`; the command line chooses dtypes and
passes, a line has the defaults.

Runs in little time may end after any cell, so in `quick` and `dropin` the common cells come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fastattn.bench import ops
from fastattn.bench.cells import DTYPES, PASSES, Cell
from fastattn.bench.shapes import Line, parse_line, parse_shapes

# Whole models, by their names in `bench model`. Other sizes are those of BERT-base, DistilBERT,
# ViT-B/16, the encoder of Whisper small, GPT-2, TinyLlama, DeiT-S (which is ViT-S/16) and DiT-B/2.
# MiniLM is Wang et al. 2020, https://arxiv.org/abs/2002.10957, which embeds sentences; TinyLlama
# Zhang et al. 2024, https://arxiv.org/abs/2401.02385. A latent image of DiT has an eighth of the
# pixels on each side.
WHOLE_MODELS = {
    "bert-base": ["bert B=8,L=128 # BERT-base, 128 tokens"],
    "distilbert": ["distilbert B=8,L=128 pass=fwd # DistilBERT, 128 tokens"],
    "minilm": [
        "bert B=32,L=128,N=6,E=384,H=12,F=1536 mask=padding pass=fwd # MiniLM, half padding"
    ],
    "vit-b16": ["vit B=8,I=224 # ViT-B/16, 224 pixels"],
    "whisper-small": ["whisper_encoder B=1,L=1500 # Whisper small's encoder, 30 s"],
    "gpt2": ["gpt2 B=1,L=1024 pass=fwd # GPT-2, prompt of 1024"],
    "llama-1b": [
        "llama B=1,L=512 # TinyLlama 1.1B, prompt of 512",
        "llama_decode B=1,L=2048 # TinyLlama 1.1B, next token, cache 2048",
    ],
    "vit-s16-timm": ["timm_vit B=8,I=224 # timm's ViT-S/16, 224 pixels"],
    "dit-b2-diffusers": ["diffusers_dit B=1,I=64 # diffusers' DiT-B/2, 512 pixels"],
    "whisper-openai": [
        "openai_whisper B=1,L=1500 dtype=fp32 # OpenAI's Whisper small, encoder, 30 s"
    ],
}

# Devlin et al. 2019, BERT-base: width 768, 12 heads; batch 8. Dosovitskiy et al. 2021, ViT-B/16 at
# 224 pixels: 14·14 patches and a class token. Radford et al. 2019, GPT-2 small at its full context;
# later models have longer ones. One new token against a cache of 4096: Llama 3 8B has 8 key heads
# for 32 heads, Llama 2 7B has 32. Vaswani et al. 2017, the base model: width 512 and 8 heads;
# padded sentences are half as long as the longest of their batch. Bahdanau et al. 2015: 1000 hidden
# units, sentences of up to 30 or 50 words; Luong et al. 2015: 1000 cells and windows of D = 10,
# here half as wide. Xu et al. 2015: each word attends to one of the 14·14 positions of an image.
# Ramsauer et al. 2021: at most three steps; a batch of bags with 128 patterns. Sukhbaatar et
# al. 2015: bAbI trained jointly, 50 sentences of at most 11 of 175 words, width 50; and larger
# memories. Miller et al. 2016 read tens to thousands of slots that a hash selects.
_BERT_128 = "mha B=8,L=128,E=768,H=12 # BERT-base MHA, 128 tokens"
_BERT_512 = "mha B=8,L=512,E=768,H=12 # BERT-base MHA, 512 tokens"
_BERT_WEIGHTS = (
    "mha B=8,L=512,E=768,H=12 weights=average # BERT-base MHA, 512 tokens, weights returned"
)
_BERT_CORE = "sdpa B=8,H=12,L=512,D=64 # BERT-base SDPA, 512 tokens"
_VIT = "mha B=8,L=197,E=768,H=12 # ViT-B/16 MHA, 197 patches"
_GPT2 = "sdpa B=1,H=12,L=1024,D=64 mask=causal # GPT-2 SDPA, causal, 1024 tokens"
_GPT_2K = "sdpa B=1,H=16,L=2048,D=64 mask=causal # GPT SDPA, causal, 2048 tokens"
_GQA = "sdpa B=1,H=32,Hkv=8,Lq=1,Lk=4096,D=128 pass=fwd # Llama 3 8B SDPA, next token, cache 4096"
_PADDED = "mha B=16,L=256,E=512,H=8 mask=padding # Transformer MHA, half padding"
_RARER = ("BERT-base MHA, 512 tokens", "BERT-base MHA, 512 tokens, weights returned")


def _serving() -> Iterator[str]:
    """Steps of a server: on caches in fp32 or bf16, int8 and fp8; and on latent ones."""
    for model, heads, dtypes, steps in (
        (
            *("Llama 3 8B", "H=32,Hkv=8", "fp32,bf16"),
            "B=1,Lk=1024:32768:x32; B=8,Lk=4096; B=64,Lk=1024; B=1|8,Lq=512,Lk=512 mask=causal; "
            "B=1,Lq=128,Lk=32768 mask=causal",
        ),
        # One query head a key head: reading limits these steps, not arithmetic.
        ("Llama 2 7B", "H=32,Hkv=32", "bf16", "B=1,Lk=4096|32768; B=8,Lk=4096"),
    ):
        for step in steps.split("; "):
            label = f"{model}, {'prompt' if 'causal' in step else 'next token'}"
            yield f"decode {heads},D=128,{step} dtype={dtypes} # {label}"
            for kind in ("int8", "fp8"):
                yield f"decode {heads},D=128,{step} dtype=bf16 option={kind} # {label}, {kind}"
    # DeepSeek V3 has 128 heads on one key head, whose rows have 576 elements; 512 of them are the
    # value (https://arxiv.org/abs/2412.19437, section 2.1.1). Each of 8 devices has 16 heads.
    for heads, words in (
        ("H=128 option=latent", "next token"),
        ("H=16 option=latent", "on 8 devices, next token"),
        # Speculative decoding: the newest token and three drafts.
        ("H=16,Lq=4 mask=causal option=latent", "on 8 devices, 4 tokens"),
    ):
        yield f"decode B=8,Hkv=1,Lk=4096,D=576,Dv=512,{heads} # DeepSeek V3 {words}"


class Preset(NamedTuple):
    about: str
    lines: Sequence[str]


def _preset(about: str, *lines: str) -> Preset:
    return Preset(about, lines)


PRESETS = {
    "quick": _preset("one cell of each kind, about a minute", _BERT_128, _BERT_CORE, _GPT2, _GQA),
    "dropin": _preset(
        "nn.MultiheadAttention replaced, and the attention inside it; the most common cells first",
        *(_BERT_128, _BERT_CORE, _PADDED, _GPT_2K, _GQA, _VIT, _BERT_512, _BERT_WEIGHTS),
    ),
    "bert": _preset(
        "BERT-base: batch 8, 12 heads of 64, 128 or 512 tokens",
        *(_BERT_128, _BERT_512, _BERT_WEIGHTS, _BERT_CORE),
        "sdpa B=8,H=12,L=128,D=64 # BERT-base SDPA, 128 tokens",
    ),
    "vit": _preset(
        "ViT-B/16 at 224 pixels: batch 8, 12 heads of 64",
        *(_VIT, "sdpa B=8,H=12,L=197,D=64 # ViT-B/16 SDPA, 197 patches"),
    ),
    "gpt": _preset(
        "GPT-2 and larger GPTs: causal, 1024 and 2048 tokens",
        *(_GPT2, _GPT_2K),
        "attention_stats B=1,H=16,L=2048,D=64 mask=causal # GPT attention_stats, 2048 tokens",
        "merge_states B=1,H=16,L=2048,D=64 # GPT prefix and suffix, 2048 tokens",
    ),
    "decode": _preset(
        "the next token on a cache of 4096: Llama 3 8B and Llama 2 7B",
        _GQA,
        "sdpa B=1,H=32,Lq=1,Lk=4096,D=128 pass=fwd # Llama 2 7B SDPA, next token, cache 4096",
        "decode B=1,H=32,Hkv=8,Lk=4096,D=128 # Llama 3 8B decode_attention, cache 4096",
    ),
    "serving": _preset(
        "the next token at batch 1 to 64 and prompts, caches of up to 32768 keys: Llama 3 8B, "
        "Llama 2 7B, DeepSeek V3",
        *_serving(),
    ),
    "padded": _preset(
        "16 sentences padded to 256 tokens, half of them padding: width 512, 8 heads",
        _PADDED,
        "mha B=16,L=256,E=512,H=8 mask=padding weights=average # Transformer MHA, weights returned",
        "sdpa B=16,H=8,L=256,D=64 mask=padding # Transformer SDPA, half padding",
        "varlen B=16,H=8,L=256,D=64 # the same sentences packed, not padded",
        "encoder_layer B=16,L=256,E=512,H=8,F=2048 mask=padding # Transformer encoder layer",
    ),
    "transformer": _preset(
        "the base Transformer and its parts, width 512",
        "encoder B=4,L=128,E=512,H=8,F=2048 # Transformer encoder, six layers",
        "decoder_layer B=4,L=128,E=512,H=8,F=2048 # Transformer decoder layer",
        "decoder B=4,L=128,E=512,H=8,F=2048 # Transformer decoder, six layers",
        "transformer B=4,L=128,E=512,H=8,F=2048 # Transformer, six and six layers",
        "head_network B=4,H=8,L=128,D=64,F=64 # HeadNetwork, a network per head",
    ),
    "long": _preset(
        "one causal sequence of 8192 tokens, 8 heads of 64",
        "sdpa B=1,H=8,L=8192,D=64 mask=causal # GPT SDPA, causal, 8192 tokens",
    ),
    "encoding": _preset(
        "position encodings, width 512 and 768",
        "sinusoidal B=16,L=256,E=512 # Transformer position encoding",
        "sinusoidal B=8,L=512,E=768 # Position encoding, width 768",
        "positional B=16,L=256,E=512 # the same as a module",
        "sinusoidal_table L=512,E=768 # the table alone",
        "learned B=8,L=512,E=768 # BERT-base learnt positions",
    ),
    "seq2seq": _preset(
        "the attentions of recurrent translation: Bahdanau, Luong; hard attention",
        "additive B=32,L=30,A=512 # Bahdanau scores, all steps",
        "additive B=64,Lq=1,Lk=50,A=512 # Bahdanau scores, one step",
        "bahdanau B=32,L=30,E=512,A=512 # Bahdanau module, all steps",
        "luong B=64,L=50,D=512 # Luong general, global",
        "luong B=16,L=512,D=512,W=10 # Luong general, local-m",
        "luong B=16,L=512,D=512,W=10,P=1 # Luong general, local-p",
        "luong_module B=64,L=50,D=512 # Luong module, all steps",
        "global_attention B=64,L=50,D=512 # OpenNMT's layer, all steps",
        "additive_module B=32,L=30,A=512 # Keras' layer, all steps",
        "hard B=16,H=1,Lq=20,Lk=196,D=512 # hard attention, 196 positions of an image",
    ),
    "memory": _preset(
        "memories: Hopfield retrieval, end-to-end memory networks",
        "hopfield B=4,H=8,L=128,N=128,D=64,K=3 # Hopfield retrieval, 3 steps",
        "hopfield_energy B=4,H=8,L=128,N=128,D=64 # Hopfield energy of the same",
        "hopfield_module B=4,L=128,N=128,E=512,H=8,K=3 # Hopfield module, 3 steps",
        "hopfield_layer B=4,L=128,N=128,E=512,H=8,K=3 # Hopfield lookup, 128 patterns",
        "hopfield_pooling B=32,N=128,E=512,H=8,K=3 # Hopfield pooling of 32 bags",
        "encode_memory B=32,N=50,J=11,V=175,D=50 # bAbI encoding of a memory",
        "memory_hops B=32,N=50,D=50,K=3 # bAbI hops",
        "memory_hops B=256,N=1000,D=128,K=3 # one memory per query",
        "memory_hops B=256,S=1,N=10000,D=128,K=3 # one memory for all queries",
        "key_value_memory B=32,L=1,N=1024,D=128 # 1024 slots of keys and values",
        "memn2n B=32,N=50,J=11,V=175,D=50,K=3 # bAbI, the complete network",
    ),
    "models": _preset(
        f"whole models: {', '.join(WHOLE_MODELS)} (one alone: `bench model NAME`)",
        *(line for lines in WHOLE_MODELS.values() for line in lines),
    ),
}
_COMMON_FIRST = ("quick", "dropin")
_ALL = tuple(name for name in PRESETS if name not in (*_COMMON_FIRST, "serving", "models"))


def line_cells(
    line: Line, dtypes: Sequence[str], passes: Sequence[str], op: str = "", preset: str = ""
) -> list[Cell]:
    """Every combination of the line's shapes with dtypes and passes.

    Passes that the operator does not have are left out.
    """
    operator = ops.get(op := op or line.op)
    options = {
        key: line.options[key] for key in ("mask", "weights", "option") if key in line.options
    }
    return [
        Cell(op, sizes, dtype, direction, preset=preset, label=line.label, **options)
        for sizes in parse_shapes(line.shape, operator.SIZES)
        for dtype in dtypes
        for direction in passes
        if direction in operator.PASSES
    ]


def _cells(
    lines: Sequence[str], dtypes: Sequence[str], passes: Sequence[str], preset: str
) -> list[Cell]:
    cells = []
    for line in map(parse_line, lines):
        of_line = dtypes or line.listed("dtype") or ("fp32", "bf16")
        directions = passes or line.listed("pass") or ("fwd", "fwd+bwd")
        cells += line_cells(line, of_line, directions, preset=preset)
    return cells


def model_cells(
    names: Sequence[str], dtypes: Sequence[str] = (), passes: Sequence[str] = ()
) -> list[Cell]:
    """The cells of whole models; `all` is every one. Raises ValueError for an unknown name."""
    for name in names:
        if name not in (*WHOLE_MODELS, "all"):
            raise ValueError(f"model {name!r}: known are {', '.join([*WHOLE_MODELS, 'all'])}")
    chosen = WHOLE_MODELS if "all" in names else dict.fromkeys(names)
    lines = [line for name in chosen for line in WHOLE_MODELS[name]]
    cells = _cells(lines, dtypes, passes, "models")
    if not cells:
        raise ValueError(f"--pass {','.join(passes)}: {', '.join(names)} has no such pass")
    return cells


def preset_cells(name: str, dtypes: Sequence[str] = (), passes: Sequence[str] = ()) -> list[Cell]:
    """The cells of presets, such as "a,b" or "all"; dtypes and passes replace their defaults."""
    cells = []
    for preset in _ALL if name == "all" else name.split(","):
        if preset not in PRESETS:
            raise ValueError(f"--preset {preset!r}: allowed are {', '.join([*PRESETS, 'all'])}")
        of_preset = _cells(PRESETS[preset].lines, dtypes, passes, preset)
        if preset in _COMMON_FIRST:
            of_preset.sort(key=_rarity)
        cells += of_preset
    return cells


def _rarity(cell: Cell) -> tuple[bool, int, int]:
    return cell.label in _RARER, DTYPES.index(cell.dtype), PASSES.index(cell.passes)
