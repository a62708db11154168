"""The case table of attention, for tests and ``fastattn verify``.

A case is data: lengths, heads, mask, options, memory layout, which results carry a gradient.
``fastattn.testing.inputs`` makes its tensors. Add a line here to cover more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product

import torch

from fastattn.backends.primitives import Weights

__all__ = ["CASES", "FLOATS", "Case", "NamedByFields"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Cases whose gradients would be 0 up to rounding with a gradient of out alone also have one of lse:
# a query with one visible key has a constant weight, and a bias that is equal for all keys changes
# no weight. A relative bound cannot judge a gradient of 0.
SCALED = ("out", "lse")


@dataclass(frozen=True)
class NamedByFields:
    """A case whose name lists the fields that differ from their defaults."""

    @property
    def name(self) -> str:
        given = [(x.name, getattr(self, x.name), x.default) for x in fields(self)]
        changed = [f"{name}={value}" for name, value, default in given if value != default]
        return "-".join(changed) or "plain"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Case:
    """One call of ``scaled_dot_product_attention``."""

    name: str
    batch: int = 2
    heads: int = 2
    kv_heads: int | None = None  # None: equal to heads
    q_len: int = 33
    k_len: int = 65
    head_dim: int = 16
    value_dim: int | None = None  # None: as head_dim
    dtypes: tuple[torch.dtype, ...] = FLOATS
    mask: str | None = None  # a kind, see inputs.MASKS
    mask_dims: str = "bhqk"  # which of [B, H, Lq, Lk] the mask has; the others are 1
    mask_float32: bool = False  # a float32 mask for any dtype of the query
    mask_layout: str = "contiguous"
    mask_grad: bool = False
    causal: str | None = None  # upper_left | bottom_right
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    softcap: float = 0.0
    alibi: str | None = None  # h: one slope per head; bh: per sequence and head
    sinks: str | None = None  # h: one per head; bh: per sequence and head
    relative_bias: str | None = None  # a table; h: one per head; bh: per sequence and head
    positions: str | None = None  # of the relative bias, see inputs.POSITIONS; None: 0, 1, 2, ...
    program: str | None = None  # a mask of fastattn.masks, see inputs.PROGRAMS
    dropout_p: float = 0.0
    first: tuple[int, int, int] = (0, 0, 0)  # query, key and head of dropout's draws
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")  # of q, k, v
    weights: Weights = 0  # 0 none | 1 per head | 2 averaged
    grads: tuple[str, ...] = ("out",)  # the results whose gradient is given: out, lse, weights
    grad_layout: str = "contiguous"  # of the gradients of out and weights
    partial: bool = False  # the backward has out and lse of more keys
    poison: bool = False  # NaN and inf in every key and value that no query can see
    poison_queries: bool = False  # NaN and inf in fully masked queries and in their gradients
    slow: bool = False


def _head_dims() -> Iterator[Case]:
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
        for n, causal in enumerate(rules):
            yield Case(
                f"lengths-{q_len}x{k_len}-{causal or 'full'}",
                batch=1,
                q_len=q_len,
                k_len=k_len,
                head_dim=8,
                causal=causal,
                grads=SCALED,
                slow=(b - a) % count not in (0, 1, 5, 9, 17) or (a + b) % 3 != n,
            )
    yield Case("empty-batch", batch=0)
    yield Case("empty-heads", heads=0)
    yield Case("empty-batch-masked", batch=0, mask="bool", weights=2, mask_dims="qk")
    yield Case("no-keys-masked", k_len=0, mask="float", mask_grad=True, weights=1)
    yield Case("no-queries-masked", q_len=0, mask="float", mask_grad=True, weights=2)


def _heads() -> Iterator[Case]:
    for heads, kv_heads in ((1, 1), (4, 2), (6, 2), (8, 1), (3, 3), (12, 4), (5, 1)):
        yield Case(f"heads-{heads}-{kv_heads}", heads=heads, kv_heads=kv_heads, q_len=17)
    grouped = Case("gqa", heads=6, kv_heads=2, k_len=70)
    yield replace(grouped, name="gqa-causal", causal="bottom_right", weights=1)
    yield replace(grouped, name="gqa-mask", mask="float", mask_grad=True, weights=2)
    yield replace(grouped, name="gqa-mask-heads", mask="bool", mask_dims="hqk", causal="upper_left")
    yield replace(grouped, name="gqa-alibi", alibi="bh", dropout_p=0.25)
    yield replace(grouped, name="gqa-decode", q_len=1, k_len=257, batch=3, head_dim=64)
    yield replace(grouped, name="gqa-blhd", layouts=("blhd", "blhd", "blhd"), head_dim=48)
    yield replace(grouped, name="gqa-lse", grads=("lse",))


_ALL_MASK_DIMS = tuple(
    "".join(dim for dim, present in zip("bhqk", bits, strict=True) if present)
    for bits in product((False, True), repeat=4)
)


def _masks() -> Iterator[Case]:
    for dims in _ALL_MASK_DIMS:
        shape = dims or "one"
        yield Case(f"mask-bool-{shape}", mask="bool", mask_dims=dims, head_dim=32)
        added = Case(f"mask-float-{shape}", mask="float", mask_dims=dims, mask_grad=True, k_len=130)
        added = replace(added, grads=SCALED)
        yield added
        yield replace(
            added,
            name=f"mask-float32-{shape}",
            mask="float_inf",
            mask_float32=True,
            dtypes=(torch.bfloat16, torch.float16),
            q_len=65,
        )
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
    yield Case("mask-finfo-min-causal", mask="finfo_min", causal="upper_left", mask_float32=True)
    yield Case("mask-steep", mask="steep", mask_grad=True, grads=SCALED)
    for causal in ("upper_left", "bottom_right"):
        yield Case(f"mask-bool-{causal}", mask="bool_rows", causal=causal, q_len=70, k_len=50)
        yield Case(f"mask-float-{causal}", mask="float_inf", causal=causal, mask_grad=True)
        yield Case(f"mask-padding-{causal}", mask="padding", causal=causal, k_len=200, poison=True)
    for layout in ("unaligned", "transposed", "every_second", "sliced", "expanded_batch",
                   "expanded_heads", "expanded_rows", "expanded_dims"):  # fmt: skip
        yield Case(f"mask-bool-{layout}", mask="bool", mask_layout=layout)
        yield Case(f"mask-float-{layout}", mask="float_inf", mask_layout=layout, mask_grad=True)
    yield Case("mask-float-no-grad", mask="float_inf", q_len=100, k_len=200)


def _windows() -> Iterator[Case]:
    sides = [(0, -1), (-1, 0), (0, 0), (3, -1), (-1, 3), (3, 5), (16, 0), (64, 64), (1000, 1000)]
    for left, right in sides:
        for q_len, k_len in ((65, 65), (40, 130), (130, 40)):
            for causal in (None, "bottom_right"):
                yield Case(
                    f"window-{left}-{right}-{q_len}x{k_len}-{causal or 'full'}",
                    window=(left, right),
                    causal=causal,
                    q_len=q_len,
                    k_len=k_len,
                    poison=causal is None,
                    weights=1 if causal else 0,
                    grads=SCALED,
                )
    yield Case("window-narrow-long", window=(20, 10), q_len=400, k_len=400, batch=1)
    yield Case("window-sees-nothing", window=(2, 2), q_len=200, k_len=20, weights=2,
               grads=SCALED)  # fmt: skip
    yield Case("window-gqa-mask", window=(30, 4), heads=4, kv_heads=2, mask="float", mask_grad=True)


def _options() -> Iterator[Case]:
    for scale in (0.0, 1.0, -0.7, 0.01):
        yield Case(f"scale-{scale}", scale=scale, weights=1, grads=SCALED)
        yield Case(f"scale-{scale}-causal", scale=scale, causal="upper_left")
    for softcap in (0.5, 5.0, 50.0):
        yield Case(f"softcap-{softcap}", softcap=softcap, head_dim=64, grads=SCALED)
        yield Case(f"softcap-{softcap}-mask", softcap=softcap, mask="float_inf", mask_grad=True)
        yield Case(f"softcap-{softcap}-causal", softcap=softcap, causal="upper_left")
    yield Case("softcap-window", softcap=2.0, window=(7, 9), weights=1)
    for dims in ("h", "bh"):
        yield Case(f"alibi-{dims}", alibi=dims, heads=4)
        yield Case(f"alibi-{dims}-causal", alibi=dims, heads=4, causal="bottom_right", k_len=150)
        yield Case(f"alibi-{dims}-mask", alibi=dims, mask="float_inf", mask_grad=True, softcap=3.0)
        yield Case(f"alibi-{dims}-window", alibi=dims, window=(7, 9), weights=1)
    for p in (0.1, 0.5, 0.99, 1.0):
        yield Case(f"dropout-{p}", dropout_p=p, k_len=130, weights=1)
        yield Case(f"dropout-{p}-causal", dropout_p=p, heads=4, kv_heads=2, causal="upper_left")
        yield Case(f"dropout-{p}-mask", dropout_p=p, mask="float_inf", mask_grad=True, weights=2)
    yield Case("dropout-long", dropout_p=0.2, q_len=200, k_len=300, batch=1, grads=SCALED)
    yield Case(
        "everything",
        heads=6,
        kv_heads=3,
        q_len=97,
        k_len=131,
        head_dim=40,
        value_dim=24,
        mask="float_inf",
        mask_dims="hqk",
        mask_grad=True,
        causal="bottom_right",
        window=(90, -1),
        softcap=4.0,
        alibi="bh",
        dropout_p=0.15,
        weights=1,
        grads=("out", "lse", "weights"),
    )


def _sinks() -> Iterator[Case]:
    all_grads = ("out", "lse", "weights")
    base = Case("sinks", heads=4, kv_heads=2, sinks="h")
    yield replace(base, name="sinks-h")
    yield replace(base, name="sinks-bh", sinks="bh", grads=SCALED)
    yield replace(base, name="sinks-lse", grads=("lse",), causal="upper_left")
    for q_len, k_len in ((1, 1), (1, 700), (3, 0), (40, 1), (70, 600), (300, 300)):
        case = replace(base, q_len=q_len, k_len=k_len, grads=SCALED)
        yield replace(case, name=f"sinks-{q_len}x{k_len}")
        yield replace(case, name=f"sinks-{q_len}x{k_len}-causal", causal="bottom_right")
    for kind in ("bool_rows", "padding", "nothing", "float_inf", "finfo_min", "steep"):
        added = kind not in ("bool_rows", "padding", "nothing")
        case = replace(base, name=f"sinks-mask-{kind}", mask=kind, mask_grad=added, grads=SCALED)
        yield replace(case, weights=2 if added else 1, k_len=100)
        yield replace(case, name=f"{case.name}-long", k_len=700, poison=not added)
    hidden = replace(base, mask="bool_rows", q_len=66, grads=SCALED)
    yield replace(hidden, name="sinks-nan-queries", poison_queries=True)
    yield replace(hidden, name="sinks-nan-queries-long", poison_queries=True, k_len=700)
    yield replace(base, name="sinks-window", window=(2, 2), q_len=200, k_len=20, grads=SCALED)
    yield replace(base, name="sinks-softcap", softcap=2.0, weights=1, grads=all_grads)
    yield replace(base, name="sinks-alibi", alibi="bh", causal="upper_left", scale=-0.3)
    for weights in (0, 1, 2):
        grads = all_grads if weights else SCALED
        case = replace(base, dropout_p=0.3, weights=weights, grads=grads)
        yield replace(case, name=f"sinks-dropout-weights-{weights}")
        yield replace(case, name=f"sinks-dropout-weights-{weights}-long", k_len=600)
    yield replace(base, name="sinks-decode", q_len=1, k_len=1500, mask="padding", weights=1)
    yield replace(base, name="sinks-decode-window", q_len=2, k_len=1500, window=(70, 0),
                  causal="bottom_right", grads=SCALED)  # fmt: skip
    everything = next(case for case in _options() if case.name == "everything")
    yield replace(everything, name="sinks-everything", sinks="h")


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
    yield replace(base, name="partial-out", grads=("out",), head_dim=40, value_dim=24)
    yield replace(base, name="partial-lse", grads=("lse",), causal="upper_left", slow=True)
    for kind in ("bool_rows", "padding", "nothing", "float_inf"):
        case = replace(base, mask=kind, mask_grad="float" in kind, poison="float" not in kind)
        yield replace(case, name=f"partial-mask-{kind}", slow=kind in ("padding", "nothing"))
        yield replace(case, name=f"partial-mask-{kind}-long", k_len=600, slow=True)
    yield replace(base, name="partial-window", window=(2, 2), q_len=200, k_len=20, slow=True)
    yield replace(base, name="partial-softcap", softcap=2.0, scale=-0.7, slow=True)
    yield replace(base, name="partial-alibi", alibi="bh", dropout_p=0.3)
    yield replace(base, name="partial-relative", relative_bias="h", slow=True)
    yield replace(base, name="partial-program", program="documents", poison=True)


def _large_scores() -> Iterator[Case]:
    """Scores whose log-sum-exp has fewer digits in float32 than their differences."""
    for scale, dtypes in ((1e4, FLOATS), (1e9, (torch.float32,))):
        yield Case(f"scale-{scale:.0e}", scale=scale, causal="upper_left", dtypes=dtypes)


def _relative_biases() -> Iterator[Case]:
    base = Case("relative", heads=4, kv_heads=2, relative_bias="h", grads=SCALED)
    yield replace(base, name="relative-h")
    yield replace(base, name="relative-bh", relative_bias="bh", weights=2)
    for q_len, k_len in ((1, 1), (3, 0), (0, 3), (40, 1), (65, 16), (130, 130)):
        case = replace(base, q_len=q_len, k_len=k_len)
        yield replace(case, name=f"relative-{q_len}x{k_len}")
        yield replace(case, name=f"relative-{q_len}x{k_len}-causal", causal="bottom_right")
    for kind in ("bool_rows", "padding", "float_inf", "steep"):
        added = kind not in ("bool_rows", "padding")
        case = replace(base, name=f"relative-mask-{kind}", mask=kind, mask_grad=added, weights=1)
        yield replace(case, mask_dims="bk" if kind == "padding" else "bhqk")
    yield replace(base, name="relative-window", window=(9, 4), q_len=90, k_len=40, poison=True)
    yield replace(base, name="relative-softcap", softcap=2.0, weights=1, sinks="h")
    yield replace(base, name="relative-alibi", alibi="bh", causal="upper_left", scale=-0.3)
    for weights in (0, 1, 2):
        case = replace(base, dropout_p=0.3, weights=weights)
        yield replace(case, name=f"relative-dropout-weights-{weights}")
    decode = replace(base, q_len=1, k_len=700)
    yield replace(decode, name="relative-decode", mask="padding", weights=1)
    yield replace(decode, name="relative-decode-causal", q_len=3, causal="bottom_right", sinks="h")
    long = replace(base, heads=2, kv_heads=1, q_len=34, k_len=600)
    yield replace(long, name="relative-long")
    yield replace(long, name="relative-long-causal", causal="bottom_right", weights=1)
    yield replace(long, name="relative-long-mask", mask="bool_rows", poison=True)
    for kind in ("grid", "any"):
        case = replace(base, positions=kind, q_len=49, k_len=49)
        yield replace(case, name=f"relative-{kind}")
        yield replace(case, name=f"relative-{kind}-mask", mask="float_inf", mask_grad=True)
        yield replace(case, name=f"relative-{kind}-decode", q_len=2, causal="bottom_right")
        yield replace(long, name=f"relative-{kind}-long", positions=kind, weights=1)
    everything = next(case for case in _options() if case.name == "everything")
    yield replace(everything, name="relative-everything", relative_bias="h", sinks="h")


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
    for kind in ("padding", "bool_rows", "float_inf", "float"):
        added = kind.startswith("float")
        case = replace(base, name=f"program-mask-{kind}", mask=kind, mask_grad=added)
        yield replace(case, weights=2 if added else 1, poison=not added)
        yield replace(case, name=f"{case.name}-keys", mask_dims="bk", program="groups")
    for kind in ("bool_rows", "float"):
        yield replace(wide, name=f"program-mask-{kind}-long", mask=kind, program="function",
                      mask_grad=kind == "float", poison=False)  # fmt: skip
    yield replace(base, name="program-sinks", sinks="h", program="groups")
    yield replace(base, name="program-sinks-nothing", sinks="bh", program="nothing", weights=1)
    yield replace(base, name="program-and-window", window=(30, 4), causal="bottom_right")
    yield replace(base, name="program-softcap", softcap=2.0, weights=1)
    yield replace(base, name="program-alibi", alibi="bh", scale=-0.3)
    for weights in (0, 1, 2):
        case = replace(base, dropout_p=0.3, weights=weights)
        yield replace(case, name=f"program-dropout-weights-{weights}", program="many")
    yield replace(base, name="program-decode", q_len=1, k_len=1500, program="not_documents",
                  causal="bottom_right", weights=1, poison=True)  # fmt: skip
    everything = next(case for case in _options() if case.name == "everything")
    yield replace(everything, name="program-everything", sinks="h", program="many")
    both = replace(base, relative_bias="h", poison=True)
    yield replace(both, name="program-relative", program="many")
    yield replace(both, name="program-relative-padding", mask="padding", mask_dims="bk", sinks="h")
    yield replace(both, name="program-relative-decode", q_len=1, k_len=700, causal="bottom_right")


def _layouts() -> Iterator[Case]:
    names = ("unaligned", "blhd", "lbhd", "packed", "transposed", "every_second", "sliced",
             "expanded_batch", "expanded_heads", "expanded_rows", "expanded_dims")  # fmt: skip
    for name in names:
        same = (name, name, name)
        grads = SCALED if name == "expanded_rows" else ("out",)
        case = Case(f"layout-{name}", layouts=same, grads=grads, grad_layout=name)
        yield replace(case, head_dim=24, k_len=100)
        wide = replace(case, name=f"{case.name}-causal-wide", head_dim=67, value_dim=70)
        yield replace(wide, causal="upper_left", weights=1)
        for n, tensor in enumerate("qkv"):
            q, k, v = (name if m == n else "contiguous" for m in range(3))
            one = replace(case, name=f"layout-{tensor}-{name}", grad_layout="contiguous")
            yield replace(one, layouts=(q, k, v), q_len=19, head_dim=64)
    # The gradient of out.sum(): one number, expanded.
    yield Case("layout-grad-scalar", grad_layout="expanded_all", k_len=100)
    yield Case("layout-grad-scalar-weights", grad_layout="expanded_all", weights=2,
               grads=("out", "lse", "weights"))  # fmt: skip
    mixed = ("transposed", "expanded_heads", "every_second")
    yield Case("layout-mixed", layouts=mixed, mask="bool", mask_dims="bk", poison=False)
    yield Case("layout-decode", layouts=("blhd", "sliced", "blhd"), q_len=1, k_len=300, head_dim=64)


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
    yield Case("weights-averaged-many-heads", heads=16, kv_heads=4, weights=2, head_dim=64)
    yield Case("weights-long", q_len=150, k_len=600, batch=1, weights=2, grads=("out", "weights"))
    yield Case("weights-decode", q_len=1, k_len=700, weights=1, head_dim=64)


def _long() -> Iterator[Case]:
    float32 = (torch.float32, torch.bfloat16, torch.float16)
    for q_len, k_len in ((1, 2048), (2, 2500), (5, 4099), (17, 2049), (2048, 1), (2100, 17)):
        for heads, kv_heads in ((2, 2), (8, 2)):
            yield Case(
                f"long-{q_len}x{k_len}-heads-{heads}-{kv_heads}",
                batch=1,
                heads=heads,
                kv_heads=kv_heads,
                q_len=q_len,
                k_len=k_len,
                head_dim=64,
                dtypes=float32,
                causal="bottom_right" if heads == 8 else None,
                grads=SCALED if k_len == 1 else ("out",),
            )
    decode = Case("decode", q_len=1, k_len=3000, head_dim=32, dtypes=float32)
    yield replace(decode, name="decode-padding", mask="padding", poison=True)
    yield replace(decode, name="decode-float", mask="float_inf", mask_grad=True, weights=2)
    yield replace(decode, name="decode-window", window=(100, 0), causal="bottom_right")
    yield replace(decode, name="decode-alibi-dropout", alibi="h", dropout_p=0.1, softcap=8.0)
    yield replace(decode, name="decode-lse", grads=SCALED, causal="bottom_right", heads=4)
    # Every remainder of a vector, in keys, in columns, and in the rows that share a key head.
    for d, dv, group, q_len, k_len in (
        (5, 1, 1, 1, 1),
        (72, 40, 2, 1, 77),
        (100, 33, 3, 1, 130),
        (40, 100, 5, 1, 66),
        (33, 65, 7, 1, 515),
        (129, 136, 8, 1, 63),
        (200, 72, 2, 2, 90),
        (17, 24, 1, 3, 129),
    ):
        yield Case(
            f"decode-{q_len}x{k_len}-group-{group}-head_dim-{d}-value-{dv}",
            heads=2 * group,
            kv_heads=2,
            q_len=q_len,
            k_len=k_len,
            head_dim=d,
            value_dim=dv,
        )
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
    yield square
    yield replace(square, name="long-square-causal", causal="upper_left")
    yield replace(square, name="long-square-wide", head_dim=128, slow=True)
    yield replace(square, name="long-square-padding", mask="padding", poison=True, batch=2)
    yield replace(square, name="long-square-blocks", mask="blocks", slow=True)
    yield replace(square, name="long-square-window", window=(128, 0))


def _table(*groups: Iterator[Case]) -> tuple[Case, ...]:
    cases = tuple(case for group in groups for case in group)
    names = [case.name for case in cases]
    duplicates = {name for name in names if names.count(name) > 1}
    assert not duplicates, f"case names must be unique: {duplicates}"
    return cases


CASES: dict[str, tuple[Case, ...]] = {
    "scaled_dot_product_attention": _table(
        _head_dims(),
        _lengths(),
        _heads(),
        _masks(),
        _windows(),
        _options(),
        _sinks(),
        _relative_biases(),
        _programs(),
        _layouts(),
        _results(),
        _long(),
        _parts(),
        _large_scores(),
    ),
}
