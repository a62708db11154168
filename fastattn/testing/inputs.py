"""The tensors of the cases of attention, and their proof.

They are equal from call to call, and lie in poisoned memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from fastattn import dispatch, masks
from fastattn.backends import reference
from fastattn.backends.primitives import AttentionOptions, NoOptions
from fastattn.backends.reference._mask_program import visible_by_program
from fastattn.testing.calls import Operands, Results
from fastattn.testing.cases import ATTENTION_CASES, Case, alibi_slopes, dropout_seed, numbers_of
from fastattn.testing.judge import Proof
from fastattn.testing.memory import place, place_any

_INF = float("inf")


@dataclass(frozen=True)
class _Operands(Operands):
    # out and lse of other keys, which those that the backward gets include.
    elsewhere: tuple[Tensor, Tensor] | None = None

    def saved(self, results: Results) -> Results:
        if self.elsewhere is None:
            return results
        out, lse = results["out"], results["lse"]
        others = (self.elsewhere[0].to(out.dtype), self.elsewhere[1])
        out, lse = reference.merge_states(out, lse, *others, options=NoOptions())
        return {"out": out, "lse": lse}


def attention_operands(options: AttentionOptions, elsewhere: Any = None, **given: Any) -> Operands:
    """The operands of attention by name; gradients of results begin with ``grad_``."""
    operator = "scaled_dot_product_attention"
    tensors = dict.fromkeys(dispatch.named(operator, range(10)))
    grads = dict.fromkeys(("out", "lse", "weights"))
    found: Operands = _Operands(operator, tensors, options, grads, elsewhere=elsewhere)
    return found.changed(**given)


def make_inputs(case: Case, dtype: torch.dtype) -> Operands:
    """Return the tensors of ``case`` in ``dtype``; equal from call to call."""
    draw, normal = numbers_of(case.name)
    b, h, hkv = case.batch, case.heads, case.kv_heads or case.heads
    d, dv = case.head_dim, case.head_dim if case.value_dim is None else case.value_dim
    wide = torch.promote_types(dtype, torch.float32)
    options = _options(case)

    def placed(values: Tensor, layout: str = "contiguous", as_dtype: torch.dtype = dtype) -> Tensor:
        return place_any(values.to(as_dtype), layout)

    # Twice the usual spread: with nearly equal weights, errors would cancel in the mean.
    query = placed(2 * normal(b, h, case.q_len, d), case.layouts[0])
    made: dict[str, Any] = {
        "query": query,
        "key": placed(normal(b, hkv, case.k_len, d), case.layouts[1]),
        "value": placed(normal(b, hkv, case.k_len, dv), case.layouts[2]),
    }
    made["attn_mask"] = make_mask(case, (b, h, case.q_len, case.k_len), draw, dtype)
    slopes = alibi_slopes(draw, case.alibi, b, h, dtype)
    made["alibi_slopes"] = None if slopes is None else placed(slopes, as_dtype=wide)
    made["seed"] = dropout_seed(draw, case.dropout_p)
    if "out" in case.grads:
        made["grad_out"] = placed(normal(b, h, case.q_len, dv), case.grad_layout)
    if "lse" in case.grads:
        # Positive: the gradient of a shared bias is a sum over all pairs, which must not cancel.
        values = normal(b, h, case.q_len, 1).abs().to(wide)
        made["grad_lse"] = placed(values, "every_second", torch.float64)[..., 0]
    if "weights" in case.grads:
        heads = h if case.weights == 1 else 1
        of_weights = placed(normal(b, heads, case.q_len, case.k_len), case.grad_layout)
        made["grad_weights"] = of_weights if case.weights == 1 else of_weights[:, 0]
    if case.partial:
        made["elsewhere"] = normal(b, h, case.q_len, dv).to(dtype), 3 + normal(b, h, case.q_len)
    if case.sinks is not None:
        sinks = 2 * normal(b if case.sinks == "bh" else 1, h)
        made["sinks"] = placed(sinks, "every_second", wide)
    if case.relative_bias is not None:
        most = max(case.q_len - 1 + options.offset, case.k_len - 1 - options.offset, 0)
        if case.positions is not None:
            positions = made["positions"] = POSITIONS[case.positions](case.k_len, draw)
            most = int(positions.max() - positions.min())
        table = normal(b if case.relative_bias == "bh" else 1, h, 2 * most + 1)
        made["relative_bias"] = placed(table, as_dtype=wide)
    if case.program is not None:
        mask = PROGRAMS[case.program](case, draw)
        program = masks.program("testing", mask, query, case.k_len, options.offset)
        made["mask_program"] = placed(program, as_dtype=torch.int32)
    of_backward = {"needs_mask_grad": case.mask_grad, "partial": case.partial}
    inputs = attention_operands(options, **made, **of_backward)
    return _poisoned(case, inputs) if case.poison or case.poison_queries else inputs


def make_mask(
    case: Any, sizes: tuple[int, ...], draw: torch.Generator, dtype: torch.dtype
) -> Tensor | None:
    """Return the mask of a case, [B|1, H|1, Lq|1, Lk|1]."""
    if case.mask is None:
        return None
    pairs = zip("bhqk", sizes, strict=True)
    shape = tuple(size if dim in case.mask_dims else 1 for dim, size in pairs)
    dtype = torch.float32 if case.mask_float32 else dtype
    values = MASKS[case.mask](shape, draw, dtype)
    values = values if values.dtype == torch.bool else values.to(dtype)
    return place(values, getattr(case, "mask_layout", "contiguous"))


def _poisoned(case: Case, inputs: Operands) -> Operands:
    """The inputs with NaN and inf in what no pair needs."""
    pairs, groups = _visible(inputs), (inputs.key.shape[1], -1)
    hidden_keys = ~pairs.any(2).unflatten(1, groups).any(2)
    parts = []
    if case.poison:
        parts += [("key", case.layouts[1], hidden_keys), ("value", case.layouts[2], hidden_keys)]
    if case.poison_queries:
        parts += [("query", case.layouts[0], ~pairs.any(3))]
        parts += [("grad_out", case.grad_layout, ~pairs.any(3))] * ("out" in case.grads)
    clean = {name: getattr(inputs, name) for name, _, _ in parts}
    placed = {name: place(poison(clean[name], where), layout) for name, layout, where in parts}
    return replace(inputs.changed(**placed), clean=clean)


def _options(case: Case) -> AttentionOptions:
    left, right = case.window
    if case.causal is not None:
        right = 0 if right < 0 else min(right, 0)
    return AttentionOptions(
        case.head_dim**-0.5 if case.scale is None else case.scale,
        case.k_len - case.q_len if case.causal == "bottom_right" else 0,
        left,
        right,
        case.softcap,
        case.dropout_p,
        *case.first,
        case.weights,
    )


def _visible(inputs: Operands) -> Tensor:
    """Return the visible pairs, [B, Hq, Lq, Lk]."""
    options, mask = inputs.options, inputs.attn_mask
    shape = (*inputs.query.shape[:3], inputs.key.shape[2])
    d = torch.arange(shape[2])[:, None] + options.offset - torch.arange(shape[3])
    pairs = torch.ones(shape, dtype=torch.bool)
    if options.window_left >= 0:
        pairs &= d <= options.window_left
    if options.window_right >= 0:
        pairs &= d >= -options.window_right
    if mask is not None:
        pairs &= mask if mask.dtype == torch.bool else mask != -_INF
    if inputs.mask_program is not None:
        pairs &= visible_by_program(inputs.mask_program, shape[0], shape[2], shape[3])
    return pairs


def poison(x: Tensor, where: Tensor) -> Tensor:
    """Return x [..., L, D] with NaN, inf and -inf in turn in the rows of ``where`` [..., L]."""
    turn = torch.arange(x.shape[-2]) % 3
    fill = torch.tensor([float("nan"), _INF, -_INF], dtype=x.dtype)[turn]
    return torch.where(where[..., None], fill[:, None], x)


# Positions of keys [Lk]: tokens of a grid with rows of 7, or any.
POSITIONS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "grid": lambda n, draw: (torch.arange(n) // 7 * 13 + torch.arange(n) % 7).int(),
    "any": lambda n, draw: torch.randint(-n, n, (n,), generator=draw).int(),
}

# Masks. Each is made from a shape [B|1, H|1, Lq|1, Lk|1], a generator and a floating dtype.
_Shape = tuple[int, ...]
_Mask = Callable[[_Shape, torch.Generator, torch.dtype], Tensor]


def _index(shape: _Shape, dim: int) -> Tensor:
    view = [1, 1, 1, 1]
    view[dim] = shape[dim]
    return torch.arange(shape[dim]).view(view)


def _random(shape: _Shape, draw: torch.Generator, kept: float) -> Tensor:
    return torch.rand(shape, generator=draw) < kept


def _random_with_empty_rows(shape: _Shape, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    empty = (_index(shape, 2) + _index(shape, 1)) % 5 == 1
    return _random(shape, draw, 0.6) & ~empty


def _padding(shape: _Shape, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    """True below a random length of each sequence; the second sequence is all padding."""
    lengths = torch.randint(1, max(shape[3], 1) + 1, (shape[0], 1, 1, 1), generator=draw)
    lengths[1:2] = 0
    return (_index(shape, 3) < lengths).expand(shape).clone()


def _left_padding(shape: _Shape, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    return _padding(shape, draw, dtype).flip(-1)


def _blocks(shape: _Shape, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Blocks of 64 x 64, a third of them kept."""
    coarse = _random((shape[0], shape[1], shape[2] // 64 + 1, shape[3] // 64 + 1), draw, 0.33)
    fine = coarse.repeat_interleave(64, 2).repeat_interleave(64, 3)
    return fine[:, :, : shape[2], : shape[3]].clone()


def _one_key(shape: _Shape, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Query i can see only key 7 i % Lk."""
    return (_index(shape, 3) == 7 * _index(shape, 2) % max(shape[3], 1)).expand(shape).clone()


def _finfo_min(shape: _Shape, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    """0 or finfo.min, and rows of finfo.min only, which weight all keys equally."""
    kept = _random_with_empty_rows(shape, draw, dtype)
    return torch.full(shape, torch.finfo(dtype).min, dtype=dtype).masked_fill(kept, 0.0)


def _floats(shape: _Shape, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def _added(kept: _Mask) -> _Mask:
    """Random numbers where a boolean mask is True, else -inf."""

    def make(shape: _Shape, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
        return torch.where(kept(shape, draw, dtype), _floats(shape, draw, dtype), -_INF)

    return make


_BOOLEAN: dict[str, _Mask] = {
    "bool": lambda shape, draw, dtype: _random(shape, draw, 0.7),
    "bool_rows": _random_with_empty_rows,
    "padding": _padding,
    "left_padding": _left_padding,
    "blocks": _blocks,
    "tril": lambda shape, draw, dtype: torch.ones(shape, dtype=torch.bool).tril(3),
    "nothing": lambda shape, draw, dtype: torch.zeros(shape, dtype=torch.bool),
    "one_key": _one_key,
}
MASKS: dict[str, _Mask] = {
    **_BOOLEAN,
    **{f"{name}_inf": _added(kept) for name, kept in _BOOLEAN.items()},
    "float": _floats,
    "float_inf": _added(_random_with_empty_rows),
    "finfo_min": _finfo_min,
    "steep": lambda shape, draw, dtype: 1000 * _floats(shape, draw, dtype),
}


# Masks of fastattn.masks, made from a case and a generator.
def _documents(
    case: Case, draw: torch.Generator, rows: int = 1, *, returns: bool = False
) -> masks.Mask:
    """Up to five documents; those of queries and keys begin at about the same share.

    If one ``returns``, the last one has the number of the first.
    """
    starts = torch.rand((rows, 4), generator=draw).sort().values[:, :, None]
    of_queries, of_keys = ((torch.arange(n) >= starts * n).sum(1) for n in (case.q_len, case.k_len))
    numbers = 4 if returns else 5
    return masks.document(of_queries % numbers, of_keys % numbers)


def _groups(case: Case, draw: torch.Generator) -> masks.Mask:
    """Numbers in no order, of queries and keys; some occur on one side only."""
    ids = [torch.randint(n, n + 5, (case.batch, length), generator=draw)
           for n, length in ((0, case.q_len), (2, case.k_len))]  # fmt: skip
    return masks.document(*ids)


def _function(case: Case, draw: torch.Generator, mask_mod: masks.MaskMod) -> masks.Mask:
    return masks.from_function(mask_mod, case.batch, case.heads, case.q_len, case.k_len)


def _checkered(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Whole and empty blocks, and partial ones; other rows for each head and sequence."""
    return ((q // 150 + k // 256 + b) % 2 == 0) | ((q + h) % 7 == k % 7) & (k < 300)


def _striped(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The same for blocks of 40 queries and 24 keys."""
    return ((q // 40 + k // 48) % 2 == 0) | ((q + h) % 7 == k % 7) & (k < 90)


def _alternating(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Whole and empty blocks, of which each head has others."""
    return (q // 150 + k // 128 + h) % 2 == 0


def _block_mask(case: Case, draw: torch.Generator) -> masks.Mask:
    """A BlockMask whose blocks no vector of queries fits."""
    heads = case.heads if case.heads > 1 else None
    return masks.from_block_mask(
        create_block_mask(_striped, None, heads, case.q_len, case.k_len, device="cpu",
                          BLOCK_SIZE=(40, 24))
    )  # fmt: skip


PROGRAMS: dict[str, Callable[[Case, torch.Generator], masks.Mask]] = {
    "causal": lambda case, draw: masks.causal(),
    "not_causal": lambda case, draw: ~masks.causal(),
    "window": lambda case, draw: masks.sliding_window(20, 5),
    "not_window": lambda case, draw: ~masks.sliding_window(40, 5),
    "prefix": lambda case, draw: masks.prefix_lm(
        torch.randint(0, case.k_len + 1, (case.batch,), generator=draw)
    ),
    "chunks": lambda case, draw: masks.chunked(48) & masks.causal(),
    "documents": lambda case, draw: _documents(case, draw, returns=True) & masks.causal(),
    "documents_b": lambda case, draw: _documents(case, draw, case.batch),
    "not_documents": lambda case, draw: ~_documents(case, draw, returns=True),
    "groups": _groups,
    "gap": lambda case, draw: masks.sliding_window(5, 0) | ~masks.sliding_window(20, -1),
    "function": lambda case, draw: _function(case, draw, _checkered),
    "not_function": lambda case, draw: ~_function(case, draw, _checkered) & masks.causal(),
    "block_mask": _block_mask,
    "heads": lambda case, draw: _function(case, draw, _alternating),
    "nothing": lambda case, draw: masks.causal() & ~masks.causal(),
    "many": lambda case, draw: (
        ~(
            _groups(case, draw) & masks.sliding_window(60, -1)
            | _function(case, draw, _checkered) & ~masks.chunked(32)
        )
    ),
}

check = Proof(
    "scaled_dot_product_attention",
    ATTENTION_CASES,
    make=make_inputs,
    coarse=("lse",),  # for 16-bit inputs, lse is a sum of weights rounded to 16 bits
)
