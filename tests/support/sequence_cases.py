"""The complete tables of packed sequences and of decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fastattn.testing.cases import FLOATS
from fastattn.testing.decode import DecodeCase
from fastattn.testing.packed import PROGRAMS, VarlenCase


def packed_sequences() -> Iterator[VarlenCase]:
    """Packed sequences, with empty ones."""
    base = VarlenCase("plain")
    yield base
    causal = replace(base, window=(-1, 0))
    yield replace(causal, name="causal")
    cross: dict[str, Any] = {"q_lengths": (33, 0, 70, 1, 20, 9), "k_lengths": (65, 4, 0, 129, 5, 9)}
    for name, bottom_right in (("upper-left", False), ("bottom-right", True)):
        yield replace(causal, name=f"causal-{name}", bottom_right=bottom_right, **cross)
        case = replace(base, window=(9, 4), bottom_right=bottom_right, **cross)
        yield replace(case, name=f"window-{name}", kv_heads=1)
        yield replace(case, name=f"alibi-{name}", alibi="bh", softcap=3.0)
    for name, lengths in (("none", ()), ("all-empty", (0, 0, 0)), ("one-long", (270,))):
        yield replace(causal, name=f"lengths-{name}", q_lengths=lengths, heads=3)
    yield replace(base, name="after", after=(7, 3))
    yield replace(base, name="after-causal", window=(-1, 0), after=(2, 40), **cross)
    # Sequences of one query use the kernel of decoding, others that of panels.
    mixed: dict[str, Any] = {
        "q_lengths": (1, 2, 1, 50, 1, 1),
        "k_lengths": (530, 1030, 1, 70, 0, 9),
    }
    for heads, kv_heads in ((2, 2), (8, 2), (3, 1)):
        case = replace(causal, name=f"mixed-{heads}-{kv_heads}", heads=heads, kv_heads=kv_heads)
        yield replace(case, bottom_right=True, head_dim=64, **mixed)
    yield replace(causal, name="head_dim-33-48", head_dim=33, value_dim=48)
    yield replace(causal, name="dropout-0.5", dropout_p=0.5, heads=4, kv_heads=2, **cross)
    for layout in ("transposed", "expanded_heads"):
        yield replace(causal, name=f"layout-{layout}", layouts=(layout,) * 3, head_dim=24)
    yield replace(causal, name="grads-lse", grads=("lse",))
    long = replace(causal, name="long", q_lengths=(2100, 3, 500), head_dim=64, slow=True)
    yield replace(long, dtypes=(torch.float32, torch.bfloat16))
    yield from _packed_with_biases(replace(base, heads=4, kv_heads=2), cross, mixed)


def _packed_with_biases(
    base: VarlenCase, cross: dict[str, Any], mixed: dict[str, Any]
) -> Iterator[VarlenCase]:
    """Relative biases and masks of fastattn.masks, with each other option."""
    relative = replace(base, relative_bias=True)
    yield replace(relative, name="relative")
    yield replace(relative, name="relative-cross", window=(9, 4), **cross)
    yield replace(relative, name="relative-bottom-right", bottom_right=True, softcap=3.0, **cross)
    yield replace(relative, name="relative-mixed", bottom_right=True, after=(7, 3), **mixed)
    split = replace(relative, q_lengths=(200, 20), k_lengths=(1300, 30), heads=2, kv_heads=1)
    yield replace(split, name="relative-split")
    for program in PROGRAMS:
        case = replace(base, program=program, bottom_right=program != "causal", after=(7, 3))
        yield replace(case, name=f"program-{program}", **cross)
    both = replace(relative, program="many", sinks=True, softcap=3.0, alibi="bh", **cross)
    yield replace(both, name="relative-everything", dropout_p=0.2, window=(50, -1))
    nothing = replace(both, q_lengths=(), k_lengths=(), alibi="h")
    yield replace(nothing, name="relative-no-sequences", after=(3, 3))


def decoding() -> Iterator[DecodeCase]:
    """Decoding with contiguous and paged caches."""
    base = DecodeCase("plain")
    paged = replace(base, page=16)
    yield base
    yield replace(paged, name="paged")
    yield replace(base, name="entries", shuffled=True)
    for page in (1, 7, 64, 100, 256):
        yield replace(paged, name=f"page-{page}", page=page)
    for case in (base, paged):
        label = "paged-" if case.page else ""
        for heads, kv_heads in ((1, 1), (3, 1), (8, 2), (6, 3), (40, 2)):
            name = f"{label}heads-{heads}-{kv_heads}"
            yield replace(case, name=name, heads=heads, kv_heads=kv_heads)
        for d, dv in ((1, 1), (5, 40), (64, 64), (100, 33), (128, 128), (600, 20), (24, 520)):
            yield replace(case, name=f"{label}head_dim-{d}-{dv}", head_dim=d, value_dim=dv)
        for queries in (0, 2, 4, 5, 40):
            some = replace(case, queries=queries, window=(-1, 0), lengths=(70, 3, 40, 129))
            yield replace(some, name=f"{label}queries-{queries}-causal")
        for queries in (5, 8):
            some = replace(case, queries=queries, window=(-1, 0), lengths=(70, 8, 63, 129, 64))
            yield replace(some, name=f"{label}few-{queries}", head_dim=64, capacity=140)
        # Sixteen rows of a key head are a tile; 32 are a panel.
        for heads in (15, 16, 33):
            yield replace(case, name=f"{label}rows-{heads}", heads=heads, kv_heads=1)
        latent = replace(case, heads=128, kv_heads=1, head_dim=576, value_dim=512)
        latent = replace(latent, dtypes=(torch.float32, torch.bfloat16), lengths=(70, 0, 129))
        yield replace(latent, name=f"{label}latent-128", window=(90, 0))
        grouped = replace(latent, heads=130, kv_heads=2, head_dim=40, value_dim=24)
        yield replace(grouped, name=f"{label}rows-65", leftpad=(9, 0, 50), softcap=4.0)
        many = replace(case, heads=16, kv_heads=1, lengths=(1100, 513, 512), capacity=1100)
        yield replace(many, name=f"{label}stacked-long", sinks=True)
        many = replace(many, dtypes=(torch.float32, torch.bfloat16))
        yield replace(many, name=f"{label}stacked-long-inf", values="inf", window=(500, 0),
                      lengths=(1100, 1100))  # fmt: skip
        # Whatever the scores' rounding, the weights sum to 1.
        yield replace(many, name=f"{label}stacked-long-ones", values="ones", spread=2000.0)
        yield replace(case, name=f"{label}window", window=(20, 0), queries=3)
        yield replace(case, name=f"{label}softcap-alibi", softcap=4.0, alibi="bh", queries=2)
        yield replace(case, name=f"{label}alibi", alibi="h", window=(-1, 0))
        long = replace(case, lengths=(2000, 513, 512, 1), capacity=2050, kv_heads=1)
        yield replace(long, name=f"{label}long")
        for layout in ("blhd", "unaligned", "sliced", "every_second", "transposed"):
            yield replace(case, name=f"{label}layout-{layout}", layouts=(layout, layout))
        padded = replace(case, leftpad=(9, 0, 1, 128), sinks=True)
        yield replace(padded, name=f"{label}leftpad")
        padded = replace(padded, dtypes=(torch.float32, torch.bfloat16))
        yield replace(padded, name=f"{label}leftpad-everything", queries=3, alibi="bh", tree="b",
                      program="many", window=(100, -1), relative_bias=True)  # fmt: skip
        yield from _quantised(replace(case, quantised=torch.int8), f"{label}int8")
        yield from _quantised(replace(case, quantised=torch.float8_e4m3fn), f"{label}fp8")
    # So many key heads that a thread takes all chunks of one, up to four threads.
    yield replace(base, name="stacked-long-heads", heads=64, kv_heads=4, head_dim=16, capacity=1030,
                  lengths=(1030, 900, 1024, 700), dtypes=(torch.bfloat16,))  # fmt: skip
    yield replace(base, name="no-sequences", lengths=())
    yield replace(paged, name="paged-no-sequences", lengths=())
    for case in (base, paged):
        yield from _decoding_with_biases(case, "paged-" if case.page else "")


def _quantised(case: DecodeCase, label: str) -> Iterator[DecodeCase]:
    """Decoding with caches of 8 bits."""
    yield replace(case, name=label)
    # For queries of 16 bits, products with int8 can be integer products.
    integers = case.quantised is torch.int8
    case = replace(case, dtypes=(torch.float32, torch.bfloat16)[: 1 + integers])
    if integers:
        zeros = replace(case, spread=0.0, dtypes=(torch.bfloat16,))
        yield replace(zeros, name=f"{label}-queries-of-zero")
        large = replace(case, spread=50.0, head_dim=128, dtypes=(torch.bfloat16, torch.float16))
        large = replace(large, lengths=(600, 3), capacity=610)
        yield replace(large, name=f"{label}-large-scores")
    # Rows are widened up to the longest sequence; masks cover the whole cache.
    spare = replace(case, capacity=400, tree="b", program="many", dtypes=(torch.float32,))
    yield replace(spare, name=f"{label}-spare-queries", queries=40)
    yield replace(spare, name=f"{label}-spare-heads", heads=66, kv_heads=1, leftpad=(9, 0, 1, 128))


def _decoding_with_biases(base: DecodeCase, label: str) -> Iterator[DecodeCase]:
    """Relative biases and masks of fastattn.masks, with the other options."""
    relative = replace(base, relative_bias=True, queries=2)
    yield replace(relative, name=f"{label}relative", window=(20, 0))
    yield replace(relative, name=f"{label}relative-rows", queries=9)  # enough for tiles
    long = replace(base, lengths=(2000, 513, 512, 1), capacity=2050, kv_heads=1)
    yield replace(long, name=f"{label}relative-long", relative_bias=True, window=(-1, 0))
    for program in PROGRAMS:
        case = replace(base, program=program, queries=3, lengths=(70, 1, 40, 129), alibi="h")
        yield replace(case, name=f"{label}program-{program}")
    yield replace(long, name=f"{label}program-long", program="documents")
    for tree, queries in (("b", 3), ("all", 12), ("b", 70)):
        case = replace(base, tree=tree, queries=queries, lengths=(70, 2, 129, 75))
        dtypes = FLOATS if queries == 3 else (torch.float32,)
        yield replace(case, name=f"{label}tree-{queries}", dtypes=dtypes)
    single = (torch.float32,)
    yield replace(base, name=f"{label}tree-one", tree="all", dtypes=single)
    yield replace(long, name=f"{label}tree-long", tree="b", queries=6, heads=2, dtypes=single)
    stacked = replace(base, tree="b", queries=5, heads=12, kv_heads=2)
    yield replace(stacked, name=f"{label}tree-everything", program="chunks", alibi="bh", sinks=True)
    both = replace(relative, program="many", sinks=True, softcap=3.0)
    yield replace(both, name=f"{label}relative-everything")
    yield replace(both, name=f"{label}relative-gathered", queries=40, lengths=(70, 3, 40, 129))
    spare = replace(both, tree="b", queries=40, capacity=400, lengths=(70, 41, 129), dtypes=single)
    yield replace(spare, name=f"{label}spare-gathered")
    yield replace(both, name=f"{label}relative-no-sequences", lengths=())
