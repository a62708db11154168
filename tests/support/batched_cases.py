"""Small float64 calls of each operator, to be differentiated, mapped and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn import flash_attn, masks
from fastattn.bias import T5, Window2d

Case = tuple[Callable[..., Any], tuple[Tensor, ...]]  # a function, and its differentiable inputs
OPERATORS: dict[str, Callable[[], Case]] = {}


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def qkv(heads: int = 2, key_heads: int = 2, keys: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return rand(2, heads, 3, 4), rand(2, key_heads, keys, 4), rand(2, key_heads, keys, 5)


def lower(rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).tril()


DOCUMENTS = torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1, 1])  # of queries, and of keys


def in_table(table: dict[str, Callable[[], Case]]) -> Callable[[Callable[[], Case]], None]:
    def add(make: Callable[[], Case]) -> None:
        table[make.__name__.replace("_", "-")] = make

    return add


# --- attention -------------------------------------------------------------------------------


def sdpa(tensors: tuple[Tensor, ...], *args: Any, **options: Any) -> Case:
    return lambda *x: fastattn.scaled_dot_product_attention(*x, *args, **options), tensors


def seeded(case: Case) -> Case:
    """The case with the same draws in every call, for an operator that takes no generator."""
    call, tensors = case

    def again(*x: Tensor) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return call(*x)

    return again, tensors


def drawn(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The same draws in every call."""
    return call(*args, **options, generator=torch.Generator().manual_seed(3))


ATTENTION: dict[str, Callable[[], Case]] = {
    "plain": lambda: sdpa(qkv()),
    "causal": lambda: sdpa(qkv(), is_causal=True),
    "grouped": lambda: sdpa(qkv(heads=4), enable_gqa=True),
    "bool-mask": lambda: sdpa(qkv(), lower(3, 4)),
    "padding": lambda: sdpa(
        qkv(), torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]]).bool()[:, None, None]
    ),
    "float-mask": lambda: sdpa((*qkv(), rand(3, 4))),
    "bias-of-each": lambda: sdpa((*qkv(), rand(2, 2, 3, 4)), need_weights=True),
    "bias-of-a-head": lambda: sdpa((*qkv(), rand(1, 2, 1, 4)), return_lse=True),
    "bias-of-an-example": lambda: sdpa((*qkv(), rand(2, 1, 3, 1))),
    "weights": lambda: sdpa(qkv(), need_weights=True, average_weights=True),
    "lse-window-softcap": lambda: sdpa(qkv(), window=(1, 1), softcap=1.5, return_lse=True),
    "alibi": lambda: sdpa(qkv(), alibi_slopes=torch.tensor([0.5, 0.25]).double()),
    "unbatched": lambda: sdpa((rand(3, 4), rand(4, 4), rand(4, 5))),
    "no-keys": lambda: sdpa(qkv(keys=0)),
    "no-queries": lambda: sdpa((rand(2, 2, 0, 4), *qkv()[1:])),
    "no-batch": lambda: sdpa((rand(0, 2, 3, 4), rand(0, 2, 4, 4), rand(0, 2, 4, 5))),
}
OPERATORS.update({f"sdpa-{name}": make for name, make in ATTENTION.items()})


@in_table(OPERATORS)
def sdpa_alibi_learned() -> Case:
    def call(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Any:
        return fastattn.scaled_dot_product_attention(q, k, v, alibi_slopes=slopes)

    return call, (*qkv(), rand(2))


@in_table(OPERATORS)
def sdpa_biases() -> Case:
    options: dict[str, Any] = {"mask": masks.document(*DOCUMENTS) | masks.causal(), "softcap": 2.0}

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, table: Tensor) -> Any:
        given = {"sinks": sinks, "relative_bias": table, "return_lse": True, "need_weights": True}
        return fastattn.scaled_dot_product_attention(q, k, v, **given, **options)

    return call, (*qkv(), rand(2), rand(2, 9))


@in_table(OPERATORS)
def sdpa_t5() -> Case:
    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
        return fastattn.scaled_dot_product_attention(q, k, v, relative_bias=T5(table, True, 6))

    return call, (*qkv(), rand(8, 2))


@in_table(OPERATORS)
def sdpa_window2d() -> Case:
    def call(x: Tensor, table: Tensor) -> Any:
        bias = Window2d(table, (2, 2))
        return fastattn.scaled_dot_product_attention(x, x, x, relative_bias=bias)

    return call, (rand(2, 2, 4, 4), rand(9, 2))


@in_table(OPERATORS)
def sdpa_dropout() -> Case:
    def call(*x: Tensor) -> Any:
        return drawn(fastattn.scaled_dot_product_attention, *x, dropout_p=0.5, need_weights=True)

    return call, qkv()


@in_table(OPERATORS)
def sdpa_dropout_bias() -> Case:
    return lambda *x: drawn(fastattn.scaled_dot_product_attention, *x, 0.5), (*qkv(), rand(3, 4))


def packed(function: Callable[..., Any], rows: int = 5) -> Case:
    starts = torch.tensor([0, 2, 2, rows]), torch.tensor([0, 3, 5, 6])
    tensors = rand(6, 2, 4), rand(7, 2, 4), rand(7, 2, 3)  # one row more than the sequences
    return lambda *x: function(*x, *starts), tensors


@in_table(OPERATORS)
def varlen() -> Case:
    return packed(lambda *x: fastattn.varlen_attention(*x, return_lse=True), rows=6)


@in_table(OPERATORS)
def varlen_biases() -> Case:
    starts = torch.tensor([0, 2, 2, 6]), torch.tensor([0, 3, 5, 7])
    mask = masks.document(torch.arange(6) % 2, torch.arange(7) % 2) | masks.causal()

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, table: Tensor) -> Any:
        options = {"mask": mask, "sinks": sinks, "relative_bias": table, "return_lse": True}
        return fastattn.varlen_attention(q, k, v, *starts, **options)

    return call, (rand(6, 2, 4), rand(7, 2, 4), rand(7, 2, 3), rand(2), rand(2, 9))


@in_table(OPERATORS)
def varlen_causal_alibi() -> Case:
    slopes = torch.tensor([0.5, 0.25]).double()
    return packed(lambda *x: fastattn.varlen_attention(*x, is_causal=True, alibi_slopes=slopes))


@in_table(OPERATORS)
def varlen_dropout() -> Case:
    return packed(lambda *x: drawn(fastattn.varlen_attention, *x, dropout_p=0.5))


@in_table(OPERATORS)
def flash_attention() -> Case:
    tensors = rand(2, 3, 2, 4), rand(2, 4, 2, 4), rand(2, 4, 2, 4)
    return lambda *x: flash_attn.flash_attn_func(*x, causal=True, window_size=(2, 0)), tensors


@in_table(OPERATORS)
def flash_attention_packed() -> Case:
    return flash_attn.flash_attn_qkvpacked_func, (rand(2, 3, 3, 2, 4),)


@in_table(OPERATORS)
def flash_attention_varlen() -> Case:
    return packed(lambda *x: flash_attn.flash_attn_varlen_func(*x, 3, 3, causal=True))


@in_table(OPERATORS)
def attention_stats() -> Case:
    def call(q: Tensor, k: Tensor) -> Any:
        stats = fastattn.attention_stats(q, k, top_k=2, rows=(0, 2))
        return stats.entropy, stats.column_sums, stats.rows

    return call, qkv()[:2]


@in_table(OPERATORS)
def hard_attention_reinforce() -> Case:
    def call(*x: Tensor) -> Any:
        return drawn(fastattn.hard_attention, *x)

    return call, qkv()


@in_table(OPERATORS)
def hard_attention_gumbel() -> Case:
    def call(*x: Tensor) -> Any:
        return drawn(fastattn.hard_attention, *x, estimator="gumbel", temperature=0.7)

    return call, qkv()


# --- memories --------------------------------------------------------------------------------


def hops(*tensors: Tensor, names: tuple[str, ...] = (), **options: Any) -> Case:
    def call(*x: Tensor) -> Any:
        given = dict(zip(("query", "in_memory", *names), x, strict=True))
        return fastattn.memory_hop_attention(**given, **options)

    return call, tensors


HOPS: dict[str, Callable[[], Case]] = {
    "plain": lambda: hops(rand(2, 3), rand(2, 4, 3), rand(2, 4, 3), names=("out_memory",), hops=2),
    "stack-masked": lambda: hops(
        rand(2, 3), rand(2, 3, 4, 3), hops=2, memory_mask=torch.tensor([[1, 0, 1, 1], [0] * 4]) > 0
    ),
    "of-many-queries": lambda: hops(
        *(rand(2, 3, 3), rand(1, 4, 3), rand(2, 4, 3), rand(3, 3), rand(2, 3, 1, 4)),
        names=("out_memory", "hop_proj", "memory_bias"),
        hops=2,
        activation="tanh",
        need_weights=True,
    ),
    "shared": lambda: hops(rand(3, 3), rand(1, 4, 3), hops=2),
    "linear": lambda: hops(rand(2, 3), rand(2, 4, 3), hops=2, normalize="none"),
    "no-memory": lambda: hops(rand(2, 3), rand(2, 0, 3)),
    "no-batch": lambda: hops(rand(0, 3), rand(0, 4, 3)),
}
OPERATORS.update({f"hops-{name}": make for name, make in HOPS.items()})


@in_table(OPERATORS)
def hops_expanded() -> Case:
    def call(query: Tensor, memory: Tensor) -> Any:
        return fastattn.memory_hop_attention(query, memory.expand(3, 4, 3), hops=2)

    return call, (rand(3, 3), rand(1, 4, 3))


TOKENS = torch.tensor([[[1, 2, 0], [3, 0, 0], [0, 0, 0]], [[4, 4, 1], [2, 3, 1], [1, 0, 0]]])


@in_table(OPERATORS)
def encode_memory() -> Case:
    def call(weight: Tensor, temporal: Tensor) -> Any:
        return fastattn.encode_memory(TOKENS, weight, temporal=temporal)

    return call, (rand(5, 4), rand(3, 4))


@in_table(OPERATORS)
def encode_memory_tables() -> Case:
    return lambda w: fastattn.encode_memory(TOKENS, w, encoding="bow"), (rand(2, 5, 4),)


@in_table(OPERATORS)
def encode_memory_all_words() -> Case:
    return lambda w: fastattn.encode_memory(TOKENS, w, padding_idx=None), (rand(5, 4),)


@in_table(OPERATORS)
def encode_memory_learned_factors() -> Case:
    return lambda x, l_: fastattn.encode_memory(TOKENS, x, encoding=l_), (rand(5, 4), rand(3, 4))


# --- other scores ----------------------------------------------------------------------------


def additive(*names: str, **options: Any) -> Case:
    shapes = {"bias": (5,), "attn_mask": (2, 1, 4)}
    tensors = rand(2, 3, 5), rand(2, 4, 5), rand(2, 4, 2), rand(5)

    def call(*x: Tensor) -> Any:
        more = dict(zip(names, x[4:], strict=True))
        return fastattn.additive_attention(*x[:4], **more, **options)

    return call, (*tensors, *(rand(*shapes[name]) for name in names))


OPERATORS["additive"] = lambda: additive()
OPERATORS["additive-everything"] = lambda: additive(
    "bias", "attn_mask", is_causal=True, need_weights=True
)
OPERATORS["additive-dropout"] = lambda: seeded(additive("bias", dropout_p=0.5))
OPERATORS["additive-bool-mask"] = lambda: additive(attn_mask=lower(3, 4))
OPERATORS["additive-padding"] = lambda: additive(
    key_padding_mask=torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1]]).bool(), need_weights=True
)


def luong(*weights: Tensor, **options: Any) -> Case:
    def call(q: Tensor, k: Tensor, v: Tensor, *x: Tensor) -> Any:
        weight = None if not x else x[0] if len(x) == 1 else x
        return fastattn.luong_attention(q, k, v, weight=weight, **options)

    return call, (rand(2, 3, 4), rand(2, 6, 4), rand(2, 6, 2), *weights)


OPERATORS["luong-dot"] = lambda: luong()
OPERATORS["luong-general"] = lambda: luong(rand(4, 4), method="general", need_weights=True)
OPERATORS["luong-concat"] = lambda: luong(rand(5, 8), rand(5), method="concat")
OPERATORS["luong-monotonic"] = lambda: luong(window="local-m", D=1, need_weights=True)
OPERATORS["luong-dropout"] = lambda: seeded(luong(window="local-m", D=1, dropout_p=0.5))


@in_table(OPERATORS)
def luong_predictive() -> Case:
    def call(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Any:
        return fastattn.luong_attention(
            q, k, v, window="local-p", D=2, positions=5 * positions.sigmoid()
        )

    return call, (rand(2, 3, 4), rand(2, 6, 4), rand(2, 6, 2), rand(2, 3))


def hopfield(*tensors: Tensor, names: tuple[str, ...] = (), **options: Any) -> Case:
    def call(*x: Tensor) -> Any:
        given = dict(zip(("state", "stored", *names), x, strict=True))
        return fastattn.hopfield_retrieve(**given, **options)

    return call, tensors


for _grad in ("unroll", "implicit", "one_step"):
    OPERATORS[f"hopfield-{_grad}"] = lambda grad=_grad: hopfield(  # type: ignore[misc]
        rand(1, 2, 3), rand(1, 4, 3), beta=0.7, grad=grad, update_steps_max=3
    )
OPERATORS["hopfield-settled"] = lambda: hopfield(
    rand(1, 2, 3), rand(1, 4, 3), beta=4.0, grad="implicit", update_steps_eps=1e-12
)
OPERATORS["hopfield-projected"] = lambda: hopfield(
    *(rand(1, 2, 2, 3), rand(1, 2, 4, 3), rand(1, 2, 4, 2), rand(2)),
    names=("projection", "beta"),
    update_steps_max=2,
    attn_mask=lower(2, 4),
)
OPERATORS["hopfield-bias"] = lambda: hopfield(
    *(rand(1, 2, 3), rand(1, 4, 3), rand(2, 4)), names=("attn_mask",), beta=0.5, update_steps_max=2
)


@in_table(OPERATORS)
def hopfield_energy() -> Case:
    def call(state: Tensor, stored: Tensor, beta: Tensor) -> Any:
        return fastattn.hopfield_energy(state, stored, beta=beta.exp(), attn_mask=lower(2, 4))

    return call, (rand(1, 2, 2, 3), rand(1, 2, 4, 3), rand(2))


def sinusoids(**options: Any) -> Case:
    return lambda x: fastattn.sinusoidal_encoding(x, **options), (rand(2, 3, 5),)


OPERATORS["sinusoidal-plain"] = lambda: sinusoids()
OPERATORS["sinusoidal-from-five"] = lambda: sinusoids(offset=5)
OPERATORS["sinusoidal-encoding"] = lambda: sinusoids(scale=2.0)
OPERATORS["sinusoidal-offset"] = lambda: sinusoids(offset=torch.tensor([2, 70]))
OPERATORS["sinusoidal-positions"] = lambda: sinusoids(
    positions=torch.tensor([[4, 1, 1], [9, 0, 1]]), scale=0.5, padding_idx=1
)


@in_table(OPERATORS)
def merge_states() -> Case:
    return fastattn.merge_states, (rand(2, 3, 4), rand(2, 3), rand(2, 3, 4), rand(2, 3))
