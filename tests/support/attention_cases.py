"""The complete tables of the forms of attention: cases worked out for one option or kernel.

They come before the cases of ``fastattn.testing``, which any machine verifies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Any

import more_masks  # noqa: F401  (its kinds of masks)
import torch
from sequence_cases import decoding, packed_sequences

from fastattn import testing
from fastattn.testing import cases, decode, packed
from fastattn.testing.around_attention import MergeCase, SinusoidalCase
from fastattn.testing.cases import SCALED, Case
from fastattn.testing.memories import HopCase, HopfieldCase
from fastattn.testing.recurrent import AdditiveCase


def _head_dims() -> Iterator[Case]:
    """Head dims around all tile sizes, also with another width of values."""
    for d in (1, 2, 3, 5, 8, 16, 31, 32, 33, 48, 64, 80, 96, 100, 128, 160, 192, 256, 512, 1024):
        yield Case(f"head_dim-{d}", head_dim=d, batch=1 if d > 256 else 2)
    pairs = [(64, 1), (1, 64), (33, 48), (48, 33), (64, 128), (128, 64), (192, 128), (7, 200)]
    for d, dv in [*pairs, (256, 5), (5, 256), (576, 512), (24, 1024)]:
        yield Case(f"head_dim-{d}-value-{dv}", head_dim=d, value_dim=dv, causal="upper_left")


# fmt: off
_LENGTHS = (0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129, 192, 193, 257, 300,
            513)
# fmt: on


def _lengths() -> Iterator[Case]:
    """All pairs of lengths; except for five per length, they are slow."""
    rules = (None, "upper_left", "bottom_right")
    count = len(_LENGTHS)
    for (a, q_len), (b, k_len) in product(enumerate(_LENGTHS), repeat=2):
        case = Case("lengths", batch=1, q_len=q_len, k_len=k_len, head_dim=8, grads=SCALED)
        for n, causal in enumerate(rules):
            name = f"lengths-{q_len}x{k_len}-{causal or 'full'}"
            slow = (b - a) % count not in (0, 1, 5, 9, 17) or (a + b) % 3 != n
            yield replace(case, name=name, causal=causal, slow=slow)
    yield Case("empty-batch", batch=0)
    yield Case("empty-heads", heads=0)
    yield Case("empty-batch-masked", batch=0, mask="bool", weights=2, mask_dims="qk")
    yield Case("no-keys-masked", k_len=0, mask="float", mask_grad=True, weights=1)
    yield Case("no-queries-masked", q_len=0, mask="float", mask_grad=True, weights=2)


def _heads() -> Iterator[Case]:
    """Heads that share keys and values."""
    yield Case("heads-4-2", heads=4, kv_heads=2, q_len=17)
    grouped = Case("gqa", heads=6, kv_heads=2, k_len=70)
    yield replace(grouped, name="gqa-causal", causal="bottom_right", weights=1)
    yield replace(grouped, name="gqa-mask", mask="float", mask_grad=True, weights=2)
    yield replace(grouped, name="gqa-mask-heads", mask="bool", mask_dims="hqk", causal="upper_left")
    yield replace(grouped, name="gqa-alibi", alibi="bh", dropout_p=0.25)
    yield replace(grouped, name="gqa-decode", q_len=1, k_len=257, batch=3, head_dim=64)


_ALL_MASK_DIMS = tuple(
    "".join(dim for dim, present in zip("bhqk", bits, strict=True) if present)
    for bits in product((False, True), repeat=4)
)


def _masks() -> Iterator[Case]:
    """Masks of every broadcast shape, boolean and floating."""
    for dims in _ALL_MASK_DIMS:
        shape = dims or "one"
        yield Case(f"mask-bool-{shape}", mask="bool", mask_dims=dims, head_dim=32)
        added = Case(f"mask-float-{shape}", mask="float", mask_dims=dims, mask_grad=True, k_len=130)
        added = replace(added, grads=SCALED)
        yield added
        added = replace(added, mask_float32=True, dtypes=(torch.bfloat16, torch.float16))
        yield replace(added, name=f"mask-float32-{shape}", mask="float_inf", q_len=65)
    kinds = ("bool_rows", "padding", "left_padding", "blocks", "tril", "nothing", "one_key")
    for kind in kinds:
        q_len, k_len = (150, 260) if kind == "blocks" else (66, 100)
        dims = "bk" if "padding" in kind else "bhqk"
        case = Case(f"mask-{kind}", mask=kind, mask_dims=dims, q_len=q_len, k_len=k_len)
        case = replace(case, grads=SCALED)
        added = replace(case, mask=f"{kind}_inf", mask_grad=True)
        yield replace(case, weights=1)
        yield replace(case, name=f"{case.name}-poison", poison=True)
        yield replace(added, name=f"{case.name}-added", weights=2)
        yield replace(added, name=f"{case.name}-added-full", mask_dims="bhqk", poison=True)
    yield Case("mask-nan-queries", mask="bool_rows", poison_queries=True, q_len=66, weights=1)
    yield Case("mask-finfo-min", mask="finfo_min", mask_grad=True, weights=1)
    yield Case("mask-steep", mask="steep", mask_grad=True, grads=SCALED)
    for causal in ("upper_left", "bottom_right"):
        yield Case(f"mask-bool-{causal}", mask="bool_rows", causal=causal, q_len=70, k_len=50)
        yield Case(f"mask-float-{causal}", mask="float_inf", causal=causal, mask_grad=True)
        yield Case(f"mask-padding-{causal}", mask="padding", causal=causal, k_len=200, poison=True)


def _windows() -> Iterator[Case]:
    """Windows with and without limits, causal too."""
    sides = [(0, -1), (-1, 0), (0, 0), (3, -1), (-1, 3), (3, 5), (16, 0), (64, 64), (1000, 1000)]
    for left, right in sides:
        for q_len, k_len in ((65, 65), (40, 130), (130, 40)):
            name = f"window-{left}-{right}-{q_len}x{k_len}"
            case = Case(name, window=(left, right), q_len=q_len, k_len=k_len, grads=SCALED)
            yield replace(case, name=f"{name}-full", poison=True)
            yield replace(case, name=f"{name}-bottom_right", causal="bottom_right", weights=1)
    yield Case("window-narrow-long", window=(20, 10), q_len=400, k_len=400, batch=1)
    yield Case("window-sees-nothing", window=(2, 2), q_len=200, k_len=20, weights=2,
               grads=SCALED)  # fmt: skip


_EVERYTHING = Case("everything", heads=6, kv_heads=3, q_len=97, k_len=131, head_dim=40)
_EVERYTHING = replace(_EVERYTHING, mask="float_inf", mask_dims="hqk", mask_grad=True, alibi="bh")
_EVERYTHING = replace(_EVERYTHING, causal="bottom_right", window=(90, -1), softcap=4.0, weights=1)
_EVERYTHING = replace(_EVERYTHING, value_dim=24, dropout_p=0.15, grads=("out", "lse", "weights"))


def _options() -> Iterator[Case]:
    """Softcap, ALiBi and dropout."""
    for softcap in (0.5, 5.0, 50.0):
        yield Case(f"softcap-{softcap}", softcap=softcap, head_dim=64, grads=SCALED)
        yield Case(f"softcap-{softcap}-mask", softcap=softcap, mask="float_inf", mask_grad=True)
        yield Case(f"softcap-{softcap}-causal", softcap=softcap, causal="upper_left")
    for dims in ("h", "bh"):
        yield Case(f"alibi-{dims}-causal", alibi=dims, heads=4, causal="bottom_right", k_len=150)
        yield Case(f"alibi-{dims}-window", alibi=dims, window=(7, 9), weights=1)
    for p in (0.1, 0.5, 0.99, 1.0):
        yield Case(f"dropout-{p}", dropout_p=p, k_len=130, weights=1)
        yield Case(f"dropout-{p}-causal", dropout_p=p, heads=4, kv_heads=2, causal="upper_left")
        yield Case(f"dropout-{p}-mask", dropout_p=p, mask="float_inf", mask_grad=True, weights=2)
    yield Case("dropout-long", dropout_p=0.2, q_len=200, k_len=300, batch=1, grads=SCALED)
    yield _EVERYTHING


def _sinks() -> Iterator[Case]:
    """Attention sinks, also as the only entry of a row."""
    base = Case("sinks", heads=4, kv_heads=2, sinks="h")
    yield replace(base, name="sinks-h")
    yield replace(base, name="sinks-bh", sinks="bh", grads=SCALED)
    yield replace(base, name="sinks-lse", grads=("lse",), causal="upper_left")
    for q_len, k_len in ((1, 1), (1, 700), (3, 0), (40, 1), (70, 600), (300, 300)):
        case = replace(base, q_len=q_len, k_len=k_len, grads=SCALED)
        yield replace(case, name=f"sinks-{q_len}x{k_len}")
        yield replace(case, name=f"sinks-{q_len}x{k_len}-causal", causal="bottom_right")
    hidden = replace(base, mask="bool_rows", q_len=66, grads=SCALED)
    yield replace(hidden, name="sinks-nan-queries", poison_queries=True)
    yield replace(hidden, name="sinks-nan-queries-long", poison_queries=True, k_len=700)
    yield replace(_EVERYTHING, name="sinks-everything", sinks="h")


def _parts() -> Iterator[Case]:
    """Parts of a larger call: dropout's draws, backward passes with out and lse of more keys."""
    part = Case("first", heads=4, kv_heads=2, dropout_p=0.3, k_len=130, weights=1)
    for first in ((3, 0, 0), (0, 8, 5), (70, 13, 1), (2**20 + 7, 2**20 + 6, 0)):
        yield replace(part, name=f"first-{'-'.join(map(str, first))}", first=first)
    yield replace(part, name="first-long", first=(9, 11, 2), q_len=100, k_len=600, weights=0)
    base = Case("partial", heads=4, kv_heads=2, partial=True, grads=SCALED)
    for q_len, k_len in ((1, 1), (3, 0), (0, 3), (40, 1), (33, 65), (1, 700), (70, 600)):
        case = replace(base, q_len=q_len, k_len=k_len, slow=k_len not in (1, 65, 700))
        yield replace(case, name=f"partial-{q_len}x{k_len}")
        case = replace(case, name=f"partial-{q_len}x{k_len}-causal", causal="bottom_right")
        yield replace(case, slow=True)
    yield replace(base, name="partial-program", program="documents", poison=True)


def _relative_biases() -> Iterator[Case]:
    """A bias for each distance."""
    base = Case("relative", heads=4, kv_heads=2, relative_bias="h", grads=SCALED)
    yield replace(base, name="relative-h")
    yield replace(base, name="relative-bh", relative_bias="bh", weights=2)
    for q_len, k_len in ((1, 1), (3, 0), (0, 3), (40, 1), (65, 16), (130, 130)):
        case = replace(base, q_len=q_len, k_len=k_len)
        yield replace(case, name=f"relative-{q_len}x{k_len}")
        yield replace(case, name=f"relative-{q_len}x{k_len}-causal", causal="bottom_right")
    masked = replace(base, mask="float_inf", mask_grad=True, weights=1)
    yield replace(masked, name="relative-mask-float_inf")
    yield replace(base, name="relative-softcap", softcap=2.0, weights=1, sinks="h")
    long = replace(base, heads=2, kv_heads=1, q_len=34, k_len=600)
    for kind in ("grid", "any"):
        case = replace(base, positions=kind, q_len=49, k_len=49)
        yield replace(case, name=f"relative-{kind}")
        yield replace(case, name=f"relative-{kind}-mask", mask="float_inf", mask_grad=True)
        yield replace(case, name=f"relative-{kind}-decode", q_len=2, causal="bottom_right")
        yield replace(long, name=f"relative-{kind}-long", positions=kind, weights=1)
    yield replace(_EVERYTHING, name="relative-everything", relative_bias="h", sinks="h")


def _content_terms() -> Iterator[Case]:
    """Content terms: the distance meets queries, keys, or both."""
    base = Case("terms", heads=4, kv_heads=2, terms="both", grads=SCALED)
    for terms in ("query", "key", "both"):
        for buckets in ("every", "clipped", "log", "any"):
            case = replace(base, terms=terms, buckets=buckets)
            yield replace(case, name=f"terms-{terms}-{buckets}")
            long = replace(case, heads=2, kv_heads=1, q_len=300, k_len=290, batch=1)
            yield replace(long, name=f"terms-{terms}-{buckets}-long", causal="upper_left")
    for q_len, k_len in ((1, 1), (3, 0), (0, 3), (1, 40), (40, 1), (65, 16), (17, 600), (5, 1100)):
        case = replace(base, q_len=q_len, k_len=k_len, buckets="log")
        yield replace(case, name=f"terms-{q_len}x{k_len}")
        yield replace(case, name=f"terms-{q_len}x{k_len}-causal", causal="bottom_right")
    masked = replace(base, mask="float_inf", mask_grad=True, weights=1)
    yield replace(masked, name="terms-mask-float_inf")
    yield replace(base, name="terms-relative", relative_bias="h", window=(20, 9))
    yield replace(base, name="terms-softcap", softcap=2.0, weights=1, sinks="h")
    yield replace(base, name="terms-averaged", weights=2, grads=("out", "weights"), k_len=130)
    yield replace(base, name="terms-weights-long", weights=1, q_len=40, k_len=1100)
    yield replace(base, name="terms-dropout", dropout_p=0.2, weights=1, program="documents_b")
    yield replace(base, name="terms-poison", mask="padding", mask_dims="bk", poison=True)
    yield replace(base, name="terms-poison-keys", program="groups", poison=True)
    yield replace(base, name="terms-poison-queries", mask="bool_rows", poison_queries=True)
    yield replace(base, name="terms-partial", partial=True)
    for name in ("transposed", "every_second", "blhd", "expanded_heads"):
        case = replace(base, layouts=(name,) * 3, head_dim=23, value_dim=40)
        yield replace(case, name=f"terms-{name}")
    yield replace(_EVERYTHING, name="terms-everything", terms="both", sinks="h", buckets="log")


def _images() -> Iterator[Case]:
    """A bias for the two distances in an image."""
    base = Case("image", heads=4, kv_heads=2, k_len=63, image=7, grads=SCALED)
    yield base
    for q_len, k_len, width in ((1, 1, 1), (0, 6, 3), (1, 40, 8), (65, 16, 16), (65, 16, 1),
                                (70, 600, 20), (5, 1156, 34), (40, 1200, 100)):  # fmt: skip
        case = replace(base, q_len=q_len, k_len=k_len, image=width)
        yield replace(case, name=f"image-{q_len}x{k_len}-{width}")
    yield replace(base, name="image-mask", mask="float_inf", mask_grad=True, weights=1, q_len=70)
    yield replace(base, name="image-padding", mask="padding", mask_dims="bk", poison=True)
    yield replace(base, name="image-softcap", softcap=2.0, sinks="h", relative_bias="h", weights=2)
    yield replace(base, name="image-terms", terms="both", dropout_p=0.2, program="not_window")
    for name in ("transposed", "every_second"):
        yield replace(base, name=f"image-{name}", layouts=(name,) * 3, q_len=50)


def _programs() -> Iterator[Case]:
    """Masks of fastattn.masks, with each other option."""
    names = ("causal", "not_causal", "window", "not_window", "prefix", "chunks", "documents",
             "documents_b", "not_documents", "groups", "function", "not_function", "block_mask",
             "heads", "nothing", "many")  # fmt: skip
    base = Case("program", heads=4, kv_heads=2, q_len=70, k_len=130, grads=SCALED)
    wide = replace(base, batch=1, heads=2, kv_heads=1, k_len=1100, poison=True)
    for name in names:
        case = replace(base, name=f"program-{name}", program=name)
        yield replace(case, weights=1, poison=True)
    for name in ("causal", "not_window", "documents", "function", "many"):
        causal = "bottom_right" if name == "many" else None
        yield replace(wide, name=f"program-{name}-long", program=name, causal=causal)
    yield replace(wide, name="program-documents-queries", program="documents", q_len=600, k_len=300)
    for q_len, k_len in ((1, 1), (3, 0), (40, 1), (1, 700), (2, 1500)):
        for name in ("documents_b", "function", "not_window"):
            yield replace(base, name=f"program-{name}-{q_len}x{k_len}", program=name, q_len=q_len,
                          k_len=k_len, poison=True)  # fmt: skip
    yield replace(base, name="program-groups-1x700", program="groups", q_len=1, k_len=700)
    yield replace(base, name="program-gap-1x700", program="gap", q_len=1, k_len=700,
                  causal="bottom_right")  # fmt: skip
    hidden = replace(base, name="program-nan-queries", program="not_window", q_len=90, k_len=60)
    hidden = replace(hidden, poison_queries=True, causal="upper_left")
    yield hidden
    yield replace(hidden, name="program-sinks-nan-queries", sinks="h")
    base = replace(base, program="documents", k_len=100)
    yield replace(base, name="program-mask-finfo-min", mask="finfo_min", grads=("out",))
    yield replace(base, name="program-sinks", sinks="h", program="groups")
    yield replace(base, name="program-sinks-nothing", sinks="bh", program="nothing", weights=1)
    for weights in (0, 1, 2):
        case = replace(base, dropout_p=0.3, weights=weights)
        yield replace(case, name=f"program-dropout-weights-{weights}", program="many")
    yield replace(_EVERYTHING, name="program-everything", sinks="h", program="many")


def _layouts() -> Iterator[Case]:
    """Operands with all kinds of strides."""
    names = ("unaligned", "blhd", "lbhd", "packed", "transposed", "every_second", "sliced",
             "expanded_batch", "expanded_heads", "expanded_rows", "expanded_dims")  # fmt: skip
    for name in names:
        same = (name, name, name)
        grads = SCALED if name == "expanded_rows" else ("out",)
        case = Case(f"layout-{name}", layouts=same, grads=grads, grad_layout=name)
        yield replace(case, head_dim=24, k_len=100)
        wide = replace(case, name=f"{case.name}-causal-wide", head_dim=67, value_dim=70)
        yield replace(wide, causal="upper_left", weights=1)


def _results() -> Iterator[Case]:
    """All combinations of returned results and of those with a gradient."""
    for weights in (0, 1, 2):
        names = ("out", "lse", "weights") if weights else ("out", "lse")
        for bits in product((False, True), repeat=len(names)):
            given = tuple(name for name, bit in zip(names, bits, strict=True) if bit)
            label = "-".join(given) or "none"
            case = Case(f"results-{weights}-{label}", weights=weights, grads=given, q_len=40)
            yield case
            yield replace(case, name=f"{case.name}-causal", causal="upper_left", dropout_p=0.3)
            if len(given) != 1:
                yield replace(case, name=f"{case.name}-mask", mask="float_inf", mask_grad=True)


def _long() -> Iterator[Case]:
    """Many queries or keys, so that sums have several parts."""
    float32 = (torch.float32, torch.bfloat16, torch.float16)
    for q_len, k_len in ((1, 2048), (2, 2500), (5, 4099), (17, 2049), (2048, 1), (2100, 17)):
        name, grads = f"long-{q_len}x{k_len}-heads", SCALED if k_len == 1 else ("out",)
        case = Case(name, batch=1, q_len=q_len, k_len=k_len, kv_heads=2, head_dim=64, grads=grads)
        case = replace(case, dtypes=float32)
        yield replace(case, name=f"{name}-2-2")
        yield replace(case, name=f"{name}-8-2", heads=8, causal="bottom_right")
    decode = Case("decode", q_len=1, k_len=3000, head_dim=32, dtypes=float32)
    yield replace(decode, name="decode-padding", mask="padding", poison=True)
    yield replace(decode, name="decode-float", mask="float_inf", mask_grad=True, weights=2)
    yield replace(decode, name="decode-window", window=(100, 0), causal="bottom_right")
    yield replace(decode, name="decode-alibi-dropout", alibi="h", dropout_p=0.1, softcap=8.0)
    yield replace(decode, name="decode-lse", grads=SCALED, causal="bottom_right", heads=4)
    # Every remainder of a vector, in keys, in columns, and in the rows that share a key head.
    remainders = [(5, 1, 1, 1, 1), (72, 40, 2, 1, 77), (100, 33, 3, 1, 130), (40, 100, 5, 1, 66)]
    remainders += [(33, 65, 7, 1, 515), (129, 136, 8, 1, 63), (200, 72, 2, 2, 90)]
    for d, dv, group, q_len, k_len in [*remainders, (17, 24, 1, 3, 129)]:
        name = f"decode-{q_len}x{k_len}-group-{group}-head_dim-{d}-value-{dv}"
        case = Case(name, heads=2 * group, kv_heads=2, q_len=q_len, k_len=k_len)
        yield replace(case, head_dim=d, value_dim=dv)
    # Up to eight queries on enough keys are decoded on some processors, and with what else they ask
    # for they are a panel.
    few = Case("few", heads=4, kv_heads=2, q_len=8, k_len=70, head_dim=64)
    yield few
    yield replace(few, name="few-causal", causal="bottom_right", q_len=6, k_len=130)
    yield replace(few, name="few-window", window=(40, 2), heads=16, head_dim=72, sinks="h")
    yield replace(few, name="few-keys", k_len=63)
    yield replace(few, name="few-rows-65", q_len=5, heads=26, causal="bottom_right")
    yield replace(few, name="few-padding", mask="padding", poison=True)
    yield replace(few, name="few-softcap-weights", softcap=2.0, weights=1, alibi="h")
    square = Case("long-square", batch=1, q_len=1100, k_len=1100, head_dim=64, dtypes=float32)
    yield replace(square, name="long-square-padding", mask="padding", poison=True, batch=2)
    yield replace(square, name="long-square-blocks", mask="blocks", slow=True)
    yield replace(square, name="long-square-window", window=(128, 0))


def _small_heads() -> Iterator[Case]:
    """Heads that a thread takes in order, around the tiles of scores and of outputs."""
    base = Case("small", batch=3, heads=6, kv_heads=6)
    sizes = ((16, 16, 64, 64), (49, 49, 32, 32), (8, 24, 64, 64), (32, 33, 16, 48))
    options: list[dict[str, Any]] = [
        {"layouts": ("blhd",) * 3, "grad_layout": "blhd"},
        {"kv_heads": 2, "layouts": ("packed",) * 3},
        {"causal": "bottom_right", "weights": 1},
        {"poison": True, "mask": "bool_rows", "mask_dims": "bhqk"},
        {"mask": "padding", "mask_dims": "bk", "sinks": "h", "dropout_p": 0.2},
        {"layouts": ("unaligned", "every_second", "expanded_heads"), "grads": ("out", "lse")},
        {"mask": "one_key", "grads": SCALED},
    ]
    for n, (q_len, k_len, d, dv) in enumerate([*sizes, (65, 95, 32, 16)]):
        changes = {"q_len": q_len, "k_len": k_len, "head_dim": d, "value_dim": dv}
        for m in (n % len(options), (n + 3) % len(options)):
            name = f"small-{q_len}x{k_len}-{m}"
            yield replace(base, name=name, **changes, **options[m])  # type: ignore[arg-type]


# Of other operators. Each once was the only case to find a bug put into the kernels.
OTHERS: dict[str, list[Any]] = {
    "additive_attention": [
        AdditiveCase("mask-bool_rows", mask="bool_rows", mask_dims="qk"),
        AdditiveCase("mask-nothing", mask="nothing", mask_dims="k"),
        AdditiveCase("poison-padding", mask="padding", poison=True, weights=1),
        AdditiveCase("causal-mask", causal="upper_left", mask="float_inf", q_len=40),
        AdditiveCase("dropout-mask", dropout_p=0.3, mask="float_inf", causal="upper_left"),
        AdditiveCase("mask-float32", mask="float", mask_float32=True),
        AdditiveCase("no-key", q_len=3, k_len=0),
        AdditiveCase("saturated", spreads=(1e4, 1e4), q_len=30, k_len=60),
    ],
    "hopfield_retrieve": [
        HopfieldCase("bias", q_len=4, k_len=40, head_dim=65, steps=2, mask="float"),
    ],
    "memory_hop_attention": [
        HopCase("shared", batch=5, rows=20, width=12, in_memory="1N"),
        HopCase("linear", normalize="none", scale=0.2),
        HopCase("relu", rows=17, width=15, in_memory="BKN", hop_proj="", activation="relu"),
        HopCase("sigmoid", rows=17, width=31, activation="sigmoid", weights=True),
        HopCase("per-hop", rows=64, width=16, hops=3, in_memory="BKN", out_memory="BKN"),
        *(
            HopCase(f"shape-{dims}", queries=3, mask=dims, bias=dims, weights=True)
            for dims in ("1N", "1QN", "B1N", "B1KN", "1QK1")
        ),
    ],
    "merge_states": [MergeCase("empty", empty=("a",), poison=True)],
    "sinusoidal_encoding": [SinusoidalCase("negative", offset=-7, scale=8.0, padding_idx=-3)],
}
_MORE = {
    "scaled_dot_product_attention": [
        *(_head_dims(), _lengths(), _heads(), _masks(), _windows(), _options(), _sinks()),
        *(_relative_biases(), _programs(), _layouts(), _results(), _long(), _parts()),
        *(cases.mixed("more", 120), _small_heads()),
    ],
    "varlen_attention": [packed_sequences(), packed.mixed("more", 30)],
    "decode_attention": [decoding(), decode.mixed("more", 100)],
    **{op: [cases] for op, cases in OTHERS.items()},
}
# Last: the place of a case chooses its dtype and instruction set. No kernel of a GPU has them.
_LAST = {"scaled_dot_product_attention": (*_content_terms(), *_images())}
PROOFS = {
    op: replace(proof, cases=(*chain(*_MORE.get(op, ())), *proof.cases, *_LAST.get(op, ())))
    for op, proof in testing.PROOFS.items()
}
ATTENTION_CASES: Any = PROOFS["scaled_dot_product_attention"].cases
GPU_CASES: Any = ATTENTION_CASES[: -len(_LAST["scaled_dot_product_attention"])]
DECODE_CASES: Any = PROOFS["decode_attention"].cases
VARLEN_CASES: Any = PROOFS["varlen_attention"].cases
