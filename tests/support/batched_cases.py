"""Small float64 calls of each operator, to be differentiated, mapped and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn import flash_attn, masks
from fastattn.bias import T5, Decomposed2d, Disentangled, Window2d

Case = tuple[Callable[..., Any], tuple[Tensor, ...]]  # a function, and its differentiable inputs
sdpa, packed_sdpa = fastattn.scaled_dot_product_attention, fastattn.varlen_attention


def tupled(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def qkv(heads: int = 2, key_heads: int = 2, keys: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return rand(2, heads, 3, 4), rand(2, key_heads, keys, 4), rand(2, key_heads, keys, 5)


def lower(rows: int, columns: int) -> Tensor:
    """A causal mask."""
    return torch.ones(rows, columns, dtype=torch.bool).tril()


def of(
    function: Callable[..., Any], tensors: Sequence[Tensor], names: str = "", **options: Any
) -> Case:
    """A call with these options; the last tensors have these names."""
    last = names.split()

    def call(*x: Tensor) -> Any:
        first = len(x) - len(last)
        return function(*x[:first], **dict(zip(last, x[first:], strict=True)), **options)

    return call, tuple(tensors)


def drawn(function: Callable[..., Any], *args: Any, **options: Any) -> Case:
    """The same draws in every call."""

    def again(*x: Tensor, **more: Any) -> Any:
        return function(*x, **more, generator=torch.Generator().manual_seed(3))

    return of(again, *args, **options)


def seeded(case: Case) -> Case:
    """The case with the same draws in every call, for an operator that takes no generator."""
    call, tensors = case

    def again(*x: Tensor) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return call(*x)

    return again, tensors


DOCUMENTS = torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1, 1])  # of queries, and of keys
TOKENS = torch.tensor([[[1, 2, 0], [3, 0, 0], [0, 0, 0]], [[4, 4, 1], [2, 3, 1], [1, 0, 0]]])
PADDED = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]]).bool()
SLOPES = torch.tensor([0.5, 0.25]).double()
LOWER = lower(2, 4)


def packed(rows: int = 5) -> dict[str, Any]:
    """Where packed sequences begin."""
    starts = torch.tensor([0, 2, 2, rows]), torch.tensor([0, 3, 5, 6])
    return {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Packed queries, keys and values."""
    return rand(6, 2, 4), rand(7, 2, 4), rand(7, 2, 3)  # one row more than the sequences


ATTENTION: dict[str, Callable[[], Case]] = {
    "plain": lambda: of(sdpa, qkv()),
    "causal": lambda: of(sdpa, qkv(), is_causal=True),
    "grouped": lambda: of(sdpa, qkv(heads=4), enable_gqa=True),
    "bool-mask": lambda: of(sdpa, qkv(), attn_mask=lower(3, 4)),
    "padding": lambda: of(sdpa, qkv(), attn_mask=PADDED[:, None, None]),
    "float-mask": lambda: of(sdpa, (*qkv(), rand(3, 4))),
    "bias-of-each": lambda: of(sdpa, (*qkv(), rand(2, 2, 3, 4)), need_weights=True),
    "bias-of-a-head": lambda: of(sdpa, (*qkv(), rand(1, 2, 1, 4)), return_lse=True),
    "bias-of-an-example": lambda: of(sdpa, (*qkv(), rand(2, 1, 3, 1))),
    "weights": lambda: of(sdpa, qkv(), need_weights=True, average_weights=True),
    "lse-window-softcap": lambda: of(sdpa, qkv(), window=(1, 1), softcap=1.5, return_lse=True),
    "alibi": lambda: of(sdpa, qkv(), alibi_slopes=SLOPES),
    "unbatched": lambda: of(sdpa, (rand(3, 4), rand(4, 4), rand(4, 5))),
    "3d": lambda: of(sdpa, (rand(2, 3, 4), rand(2, 4, 4), rand(2, 4, 5))),
    "5d": lambda: of(sdpa, (*(rand(1, *x.shape) for x in qkv()), rand(2, 1, 3, 4))),
    "broadcast": lambda: of(sdpa, (rand(2, 2, 3, 4), rand(1, 1, 4, 4), rand(1, 2, 4, 5))),
    "transposed": lambda: (
        lambda x: sdpa(*[x.transpose(1, 2)] * 3),
        (rand(2, 3, 2, 4),),
    ),
    "no-keys": lambda: of(sdpa, qkv(keys=0)),
    "no-queries": lambda: of(sdpa, (rand(2, 2, 0, 4), *qkv()[1:])),
    "no-batch": lambda: of(sdpa, (rand(0, 2, 3, 4), rand(0, 2, 4, 4), rand(0, 2, 4, 5))),
    "alibi-learned": lambda: of(sdpa, (*qkv(), rand(2)), "alibi_slopes"),
    "biases": lambda: of(
        *(sdpa, (*qkv(), rand(2), rand(2, 9)), "sinks relative_bias"),
        mask=masks.document(*DOCUMENTS) | masks.causal(),
        softcap=2.0,
        return_lse=True,
        need_weights=True,
    ),
    "t5": lambda: (
        lambda q, k, v, table: sdpa(q, k, v, relative_bias=T5(table, True, 6)),
        (*qkv(), rand(8, 2)),
    ),
    "window2d": lambda: (
        lambda x, table: sdpa(x, x, x, relative_bias=Window2d(table, (2, 2))),
        (rand(2, 2, 4, 4), rand(9, 2)),
    ),
    "disentangled": lambda: (
        lambda q, k, v, *terms: sdpa(q, k, v, relative_bias=Disentangled(*terms)),
        (*qkv(), rand(5, 2, 4), rand(5, 2, 4), rand(2, 4), rand(2, 4)),
    ),
    "decomposed2d": lambda: (
        lambda q, k, v, *sides: sdpa(q, k, v, relative_bias=Decomposed2d(*sides)),
        (*qkv(), rand(2, 2, 3, 2), rand(2, 2, 3, 2)),
    ),
    "dropout": lambda: drawn(sdpa, qkv(), dropout_p=0.5, need_weights=True),
    "dropout-bias": lambda: drawn(sdpa, (*qkv(), rand(3, 4)), "attn_mask", dropout_p=0.5),
}


def flex(q: Tensor, k: Tensor, v: Tensor, table: Tensor, factor: Tensor) -> Any:
    """flex_attention with captured tensors and a mask."""

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.tanh(score * factor) + table[h, i - j + 3] * DOCUMENTS[1][j]

    mask = masks.document(*DOCUMENTS) | masks.causal()
    return fastattn.flex_attention(q, k, v, mod, mask, return_lse=True)


def stats_of(q: Tensor, k: Tensor) -> Any:
    """The differentiable statistics of attention."""
    stats = fastattn.attention_stats(q, k, top_k=2, rows=(0, 2))
    return stats.entropy, stats.column_sums, stats.rows


def varlen_biases() -> Case:
    """Packed sequences with sinks, a relative bias and a mask."""
    starts = {
        "cu_seqlens_q": torch.tensor([0, 2, 2, 6]),
        "cu_seqlens_k": torch.tensor([0, 3, 5, 7]),
    }
    mask = masks.document(torch.arange(6) % 2, torch.arange(7) % 2) | masks.causal()
    tensors = (*rows(), rand(2), rand(2, 9))
    return of(packed_sdpa, tensors, "sinks relative_bias", mask=mask, return_lse=True, **starts)


def varlen_disentangled() -> Case:
    """Packed sequences with disentangled attention."""
    starts = packed()

    def function(q: Tensor, k: Tensor, v: Tensor, *terms: Tensor) -> Any:
        return packed_sdpa(q, k, v, **starts, relative_bias=Disentangled(*terms, 5))

    return function, (*rows(), rand(7, 2, 4), rand(7, 2, 4), rand(2, 4), rand(2, 4))


FORMS: dict[str, Callable[[], Case]] = {
    "varlen": lambda: of(packed_sdpa, rows(), return_lse=True, **packed(rows=6)),
    "varlen-biases": varlen_biases,
    "varlen-causal-alibi": lambda: of(
        packed_sdpa, rows(), is_causal=True, alibi_slopes=SLOPES, **packed()
    ),
    "varlen-disentangled": varlen_disentangled,
    "varlen-dropout": lambda: drawn(packed_sdpa, rows(), dropout_p=0.5, **packed()),
    "flash-attention": lambda: of(
        *(flash_attn.flash_attn_func, (rand(2, 3, 2, 4), rand(2, 4, 2, 4), rand(2, 4, 2, 4))),
        causal=True,
        window_size=(2, 0),
    ),
    "flash-attention-packed": lambda: of(
        flash_attn.flash_attn_qkvpacked_func, (rand(2, 3, 3, 2, 4),)
    ),
    "flash-attention-varlen": lambda: of(
        *(flash_attn.flash_attn_varlen_func, rows()),
        max_seqlen_q=3,
        max_seqlen_k=3,
        causal=True,
        **packed(),
    ),
    "attention-stats": lambda: (stats_of, qkv()[:2]),
    "hard-attention-reinforce": lambda: drawn(fastattn.hard_attention, qkv()),
    "hard-attention-gumbel": lambda: drawn(
        fastattn.hard_attention, qkv(), estimator="gumbel", temperature=0.7
    ),
}


def hops(names: str, *tensors: Tensor, **options: Any) -> Case:
    """Memory hops with the optional tensors `names`."""
    return of(fastattn.memory_hop_attention, tensors, names, **options)


HOPS: dict[str, Callable[[], Case]] = {
    "plain": lambda: hops("out_memory", rand(2, 3), rand(2, 4, 3), rand(2, 4, 3), hops=2),
    "stack-masked": lambda: hops(
        *("", rand(2, 3), rand(2, 3, 4, 3)),
        hops=2,
        memory_mask=torch.tensor([[1, 0, 1, 1], [0] * 4]) > 0,
    ),
    "of-many-queries": lambda: hops(
        "out_memory hop_proj memory_bias",
        *(rand(2, 3, 3), rand(1, 4, 3), rand(2, 4, 3), rand(3, 3), rand(2, 3, 1, 4)),
        hops=2,
        activation="tanh",
        need_weights=True,
    ),
    "shared": lambda: hops("", rand(3, 3), rand(1, 4, 3), hops=2),
    "linear": lambda: hops("", rand(2, 3), rand(2, 4, 3), hops=2, normalize="none"),
    "no-memory": lambda: hops("", rand(2, 3), rand(2, 0, 3)),
    "no-batch": lambda: hops("", rand(0, 3), rand(0, 4, 3)),
    "expanded": lambda: (
        lambda u, memory: fastattn.memory_hop_attention(u, memory.expand(3, 4, 3), hops=2),
        (rand(3, 3), rand(1, 4, 3)),
    ),
}


def encode(names: str, *tensors: Tensor, **options: Any) -> Case:
    """Sentence encoding with the optional tensors `names`."""
    function = fastattn.encode_memory
    return of(lambda weight, **more: function(TOKENS, weight, **more), tensors, names, **options)


ENCODE: dict[str, Callable[[], Case]] = {
    "memory": lambda: encode("temporal", rand(5, 4), rand(3, 4)),
    "memory-tables": lambda: encode("", rand(2, 5, 4), encoding="bow"),
    "memory-all-words": lambda: encode("", rand(5, 4), padding_idx=None),
    "memory-learned-factors": lambda: encode("encoding", rand(5, 4), rand(3, 4)),
}


def additive(names: str = "", **options: Any) -> Case:
    """Additive attention with the optional tensors `names`."""
    shapes = {"bias": (5,), "attn_mask": (2, 1, 4)}
    tensors = rand(2, 3, 5), rand(2, 4, 5), rand(2, 4, 2), rand(5)
    tensors = (*tensors, *(rand(*shapes[name]) for name in names.split()))
    return of(fastattn.additive_attention, tensors, names, **options)


def luong(*weights: Tensor, **options: Any) -> Case:
    """Luong attention with the given weights."""

    def call(q: Tensor, k: Tensor, v: Tensor, *x: Tensor) -> Any:
        weight = None if not x else x[0] if len(x) == 1 else x
        return fastattn.luong_attention(q, k, v, weight=weight, **options)

    return call, (rand(2, 3, 4), rand(2, 6, 4), rand(2, 6, 2), *weights)


SCORES: dict[str, Callable[[], Case]] = {
    "additive": additive,
    "additive-everything": lambda: additive("bias attn_mask", is_causal=True, need_weights=True),
    "additive-dropout": lambda: seeded(additive("bias", dropout_p=0.5)),
    "additive-bool-mask": lambda: additive(attn_mask=lower(3, 4)),
    "additive-padding": lambda: additive(key_padding_mask=~PADDED, need_weights=True),
    "luong-dot": luong,
    "luong-general": lambda: luong(rand(4, 4), method="general", need_weights=True),
    "luong-concat": lambda: luong(rand(5, 8), rand(5), method="concat"),
    "luong-monotonic": lambda: luong(window="local-m", D=1, need_weights=True),
    "luong-dropout": lambda: seeded(luong(window="local-m", D=1, dropout_p=0.5)),
    "luong-predictive": lambda: (
        lambda q, k, v, at: fastattn.luong_attention(
            q, k, v, window="local-p", D=2, positions=5 * at.sigmoid()
        ),
        (rand(2, 3, 4), rand(2, 6, 4), rand(2, 6, 2), rand(2, 3)),
    ),
}


def hopfield(names: str, *tensors: Tensor, **options: Any) -> Case:
    """Hopfield retrieval with the optional tensors `names`."""
    return of(fastattn.hopfield_retrieve, tensors, names, **options)


def converging(**options: Any) -> Case:
    """Hopfield retrieval that ends before its limit of steps, or at it."""
    return hopfield("", rand(1, 2, 3), rand(1, 4, 3), **options)


HOPFIELD: dict[str, Callable[[], Case]] = {
    "unroll": lambda: converging(beta=0.7, update_steps_max=3, grad="unroll"),
    "implicit": lambda: converging(beta=0.7, update_steps_max=3, grad="implicit"),
    "one_step": lambda: converging(beta=0.7, update_steps_max=3, grad="one_step"),
    "settled": lambda: converging(beta=4.0, grad="implicit", update_steps_eps=1e-12),
    "projected": lambda: hopfield(
        "projection beta",
        *(rand(1, 2, 2, 3), rand(1, 2, 4, 3), rand(1, 2, 4, 2), rand(2)),
        update_steps_max=2,
        attn_mask=LOWER,
    ),
    "bias": lambda: hopfield(
        *("attn_mask", rand(1, 2, 3), rand(1, 4, 3), rand(2, 4)), beta=0.5, update_steps_max=2
    ),
    "energy": lambda: (
        lambda state, stored, beta: fastattn.hopfield_energy(
            state, stored, beta=beta.exp(), attn_mask=LOWER
        ),
        (rand(1, 2, 2, 3), rand(1, 2, 4, 3), rand(2)),
    ),
}


def sinusoids(**options: Any) -> Case:
    return of(fastattn.sinusoidal_encoding, (rand(2, 3, 5),), **options)


SINUSOIDS: dict[str, Callable[[], Case]] = {
    "plain": sinusoids,
    "from-five": lambda: sinusoids(offset=5),
    "encoding": lambda: sinusoids(scale=2.0),
    "offset": lambda: sinusoids(offset=torch.tensor([2, 70])),
    "positions": lambda: sinusoids(
        positions=torch.tensor([[4, 1, 1], [9, 0, 1]]), scale=0.5, padding_idx=1
    ),
}

OPERATORS: dict[str, Callable[[], Case]] = {
    "flex": lambda: (flex, (*qkv(), rand(2, 6), rand())),
    **{f"sdpa-{name}": make for name, make in ATTENTION.items()},
    **FORMS,
    **{f"hops-{name}": make for name, make in HOPS.items()},
    **{f"encode-{name}": make for name, make in ENCODE.items()},
    **SCORES,
    **{f"hopfield-{name}": make for name, make in HOPFIELD.items()},
    **{f"sinusoidal-{name}": make for name, make in SINUSOIDS.items()},
    "merge-states": lambda: (
        fastattn.merge_states,
        (rand(2, 3, 4), rand(2, 3), rand(2, 3, 4), rand(2, 3)),
    ),
}
