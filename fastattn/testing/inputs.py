"""The tensors of the cases of attention, and their proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn import masks
from fastattn.backends import reference
from fastattn.backends.primitives import AttentionOptions, NoOptions
from fastattn.backends.reference._mask_program import visible_by_program
from fastattn.backends.reference._masked import distances, visible_pairs
from fastattn.testing.calls import Operands, Results, declared
from fastattn.testing.cases import ATTENTION_CASES, Case, Draw, place
from fastattn.testing.judge import Proof

_INF = float("inf")


@dataclass(frozen=True)
class _Operands(Operands):
    # out and lse of other keys, which are merged into the out and lse of the backward.
    elsewhere: tuple[Tensor, Tensor] | None = None

    def saved(self, results: Results) -> Results:
        if self.elsewhere is None:
            return results
        out, lse = results["out"], results["lse"]
        others = (self.elsewhere[0].to(out.dtype), self.elsewhere[1])
        out, lse = reference.merge_states(out, lse, *others, options=NoOptions())
        return {"out": out, "lse": lse}


def attention_operands(options: AttentionOptions, elsewhere: Any = None, **named: Any) -> Operands:
    """The operands of attention by name; gradients of results begin with ``grad_``."""
    operator = "scaled_dot_product_attention"
    tensors, grads = map(dict.fromkeys, (declared(operator).names, declared(operator).results))
    operands = _Operands(operator, tensors, options, grads, elsewhere=elsewhere)
    return operands.changed(**named)


def make_inputs(case: Case, dtype: torch.dtype) -> Operands:
    draw = Draw(case, dtype)
    normal, placed = draw.normal, draw.placed
    b, h, d, (hkv, dv) = case.batch, case.heads, case.head_dim, case.of_values
    options = _options(case)
    query = placed(case.spreads[0] * normal(b, h, case.q_len, d), case.layouts[0])
    made: dict[str, Any] = {
        "query": query,
        "key": placed(case.spreads[1] * normal(b, hkv, case.k_len, d), case.layouts[1]),
        "value": placed(normal(b, hkv, case.k_len, dv), case.layouts[2]),
        "attn_mask": _make_mask(case, (b, h, case.q_len, case.k_len), draw),
    }
    if (slopes := draw.slopes(case.alibi, b, h)) is not None:
        made["alibi_slopes"] = placed(slopes, dtype=draw.wide)
    made["seed"] = draw.seed(case.dropout_p)
    if "out" in case.grads:
        made["grad_out"] = placed(normal(b, h, case.q_len, dv), case.grad_layout)
    if "lse" in case.grads:
        # Positive: the gradient of a shared bias is a sum over all pairs, which must not cancel.
        values = normal(b, h, case.q_len, 1).abs().to(draw.wide)
        made["grad_lse"] = placed(values, "every_second", torch.float64)[..., 0]
    if "weights" in case.grads:
        heads = h if case.weights == 1 else 1
        of_weights = placed(normal(b, heads, case.q_len, case.k_len), case.grad_layout)
        made["grad_weights"] = of_weights if case.weights == 1 else of_weights[:, 0]
    if case.partial:
        made["elsewhere"] = normal(b, h, case.q_len, dv).to(dtype), 3 + normal(b, h, case.q_len)
    if case.sinks is not None:
        sinks = 2 * normal(b if case.sinks == "bh" else 1, h)
        made["sinks"] = placed(sinks, "every_second", draw.wide)
    if case.relative_bias is not None:
        most = max(case.q_len - 1 + options.offset, case.k_len - 1 - options.offset, 0)
        if case.positions is not None:
            positions = made["positions"] = POSITIONS[case.positions](case.k_len, draw.generator)
            most = int(positions.max() - positions.min())
        table = normal(b if case.relative_bias == "bh" else 1, h, 2 * most + 1)
        made["relative_bias"] = placed(table, dtype=draw.wide)
    if case.terms is not None:
        most = max(case.q_len - 1 + options.offset, case.k_len - 1 - options.offset, 0) + 2
        buckets = BUCKETS[case.buckets](torch.arange(-most, most + 1), draw.generator).int()
        rows = int(buckets.max()) + 2
        made["distance_buckets"] = placed(buckets, dtype=torch.int32)
        if case.terms != "key":
            made["position_query"] = placed(normal(b, h, case.q_len, d), case.layouts[1])
            made["query_table"] = placed(normal(1, h, rows, d), case.layouts[0])
        if case.terms != "query":
            made["key_table"] = placed(normal(b, h, rows, d), case.layouts[0])
    if case.image is not None:
        sizes = {"row_bias": case.k_len // case.image, "column_bias": case.image}
        for name, size in sizes.items():
            made[name] = placed(normal(b, h, case.q_len, size), case.layouts[0], draw.wide)
    if case.program is not None:
        mask = PROGRAMS[case.program](case, draw.generator)
        program = masks.program("testing", mask, query, case.k_len, options.offset)
        made["mask_program"] = placed(program, dtype=torch.int32)
    of_backward = {"needs_mask_grad": case.mask_grad, "partial": case.partial}
    inputs = attention_operands(options, **made, **of_backward)
    return _poisoned(case, inputs) if case.poison or case.poison_queries else inputs


def of_one_head(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Remove the dimension of heads from tensors [B, 1, ...]; leave others unchanged."""
    return {n: x if x is None or x.ndim < 4 else x[:, 0] for n, x in tensors.items()}


def _make_mask(case: Case, sizes: tuple[int, ...], draw: Draw) -> Tensor | None:
    """Return the mask of a case, [B|1, H|1, Lq|1, Lk|1]."""
    if case.mask is None:
        return None
    pairs = zip("bhqk", sizes, strict=True)
    shape = tuple(size if dim in case.mask_dims else 1 for dim, size in pairs)
    dtype = torch.float32 if case.mask_float32 else draw.dtype
    values = MASKS[case.mask](shape, draw.generator, dtype)
    values = values if values.dtype == torch.bool else values.to(dtype)
    return place(values, case.mask_layout)


def _poisoned(case: Case, inputs: Operands) -> Operands:
    """The inputs with NaN and inf in all elements that no visible pair needs."""
    pairs, groups = _visible(inputs), (inputs.key.shape[1], -1)
    hidden_keys = ~pairs.any(2).unflatten(1, groups).any(2)
    parts = []
    if case.poison:
        parts += [("key", case.layouts[1], hidden_keys), ("value", case.layouts[2], hidden_keys)]
    if case.poison_queries:
        parts += [("query", case.layouts[0], ~pairs.any(3))]
        parts += [("grad_out", case.grad_layout, ~pairs.any(3))] * ("out" in case.grads)
        parts += [("position_query", case.layouts[1], ~pairs.any(3))] * (
            case.terms in ("query", "both")
        )
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
    options, mask, program = inputs.options, inputs.attn_mask, inputs.mask_program
    shape = (*inputs.query.shape[:3], inputs.key.shape[2])
    distance = distances(shape[2], shape[3], options.offset, inputs.query.device)
    pairs = torch.ones(shape, dtype=torch.bool)
    seen = visible_pairs(distance, mask, options.window_left, options.window_right)
    if seen is not None:
        pairs &= seen
    if program is not None:
        pairs &= visible_by_program(program, shape[0], shape[2], shape[3])
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

# Buckets of distances d [n].
BUCKETS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "every": lambda d, draw: d - d[0],
    "clipped": lambda d, draw: d.clamp(-5, 5) + 5,
    "log": lambda d, draw: d.sign() * (4 * (d.abs() + 1.0).log()).long() + 40,
    "any": lambda d, draw: torch.randint(0, 50, d.shape, generator=draw),
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


def _one_key(shape: _Shape, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Query i can see only key 7 i % Lk."""
    return (_index(shape, 3) == 7 * _index(shape, 2) % max(shape[3], 1)).expand(shape).clone()


def _finfo_min(shape: _Shape, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    """0 or finfo.min, and rows of finfo.min only, which weight all keys equally."""
    kept = _random_with_empty_rows(shape, draw, dtype)
    return torch.full(shape, torch.finfo(dtype).min, dtype=dtype).masked_fill(kept, 0.0)


def _floats(shape: _Shape, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def added(kept: _Mask) -> _Mask:
    """Random numbers where a boolean mask is True, else -inf."""

    def make(shape: _Shape, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
        return torch.where(kept(shape, draw, dtype), _floats(shape, draw, dtype), -_INF)

    return make


_BOOLEAN: dict[str, _Mask] = {
    "bool": lambda shape, draw, dtype: _random(shape, draw, 0.7),
    "bool_rows": _random_with_empty_rows,
    "padding": _padding,
    "left_padding": lambda *args: _padding(*args).flip(-1),
    "nothing": lambda shape, draw, dtype: torch.zeros(shape, dtype=torch.bool),
    "one_key": _one_key,
}
MASKS: dict[str, _Mask] = {
    **_BOOLEAN,
    **{f"{name}_inf": added(kept) for name, kept in _BOOLEAN.items()},
    "float": _floats,
    "float_inf": added(_random_with_empty_rows),
    "finfo_min": _finfo_min,
    "steep": lambda shape, draw, dtype: 1000 * _floats(shape, draw, dtype),
}


# Masks of fastattn.masks, made from a case and a generator.
def of_documents(
    case: Case, draw: torch.Generator, rows: int = 1, *, returns: bool = False
) -> masks.Mask:
    """Up to five documents, which begin at about the same fraction of queries and keys.

    With ``returns``, the last document has the id of the first.
    """
    starts = torch.rand((rows, 4), generator=draw).sort().values[:, :, None]
    of_queries, of_keys = ((torch.arange(n) >= starts * n).sum(1) for n in (case.q_len, case.k_len))
    numbers = 4 if returns else 5
    return masks.document(of_queries % numbers, of_keys % numbers)


def _groups(case: Case, draw: torch.Generator) -> masks.Mask:
    """Unsorted ids of queries and keys; some occur on one side only."""
    ids = [torch.randint(n, n + 5, (case.batch, length), generator=draw)
           for n, length in ((0, case.q_len), (2, case.k_len))]  # fmt: skip
    return masks.document(*ids)


def of_function(case: Case, draw: torch.Generator, mask_mod: masks.MaskMod) -> masks.Mask:
    return masks.from_function(mask_mod, case.batch, case.heads, case.q_len, case.k_len)


def checkered(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Whole, empty and partial blocks; each head and sequence has different rows."""
    return ((q // 150 + k // 256 + b) % 2 == 0) | ((q + h) % 7 == k % 7) & (k < 300)


PROGRAMS: dict[str, Callable[[Case, torch.Generator], masks.Mask]] = {
    "not_window": lambda case, draw: ~masks.sliding_window(40, 5),
    "prefix": lambda case, draw: masks.prefix_lm(
        torch.randint(0, case.k_len + 1, (case.batch,), generator=draw)
    ),
    "chunks": lambda case, draw: masks.chunked(48) & masks.causal(),
    "documents": lambda case, draw: of_documents(case, draw, returns=True) & masks.causal(),
    "documents_b": lambda case, draw: of_documents(case, draw, case.batch),
    "groups": _groups,
    "function": lambda case, draw: of_function(case, draw, checkered),
    "many": lambda case, draw: (
        ~(
            _groups(case, draw) & masks.sliding_window(60, -1)
            | of_function(case, draw, checkered) & ~masks.chunked(32)
        )
    ),
}

check = Proof(
    "scaled_dot_product_attention",
    ATTENTION_CASES,
    make=make_inputs,
    coarse=("lse",),  # for 16-bit inputs, lse is a sum of weights rounded to 16 bits
)
