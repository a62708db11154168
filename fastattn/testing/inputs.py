"""Makes the tensors of a case, equal from call to call, in poisoned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from fastattn import masks
from fastattn.backends import reference
from fastattn.backends.primitives import (
    AttentionBackwardOptions,
    AttentionOptions,
    NoOptions,
    extended,
)
from fastattn.backends.reference._mask_program import visible_by_program
from fastattn.testing.cases import Case
from fastattn.testing.draws import dropout_seed, numbers_of
from fastattn.testing.memory import place

__all__ = ["MASKS", "PROGRAMS", "Inputs", "make_inputs", "poison"]

_INF = float("inf")


@dataclass(frozen=True)
class Inputs:
    """The arguments of the primitive, and of its backward."""

    query: Tensor
    key: Tensor  # like value, with NaN and inf where no query can see it, if the case has poison
    value: Tensor
    options: AttentionOptions
    attn_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    seed: Tensor | None = None
    sinks: Tensor | None = None
    relative_bias: Tensor | None = None
    positions: Tensor | None = None
    mask_program: Tensor | None = None
    grad_out: Tensor | None = None
    grad_lse: Tensor | None = None
    grad_weights: Tensor | None = None
    needs_mask_grad: bool = False
    # out and lse of other keys, which those that the backward gets include.
    elsewhere: tuple[Tensor, Tensor] | None = None
    # For the references: finite versions of the tensors above.
    clean_query: Tensor | None = None
    clean_key: Tensor | None = None
    clean_value: Tensor | None = None
    clean_grad_out: Tensor | None = None

    def forward_args(self, *, clean: bool = False) -> tuple[Tensor | None, ...]:
        given = [self.query, self.key, self.value]
        if clean:
            finite = (self.clean_query, self.clean_key, self.clean_value)
            given = [x if y is None else y for x, y in zip(given, finite, strict=True)]
        tensors = (*given, self.attn_mask, self.alibi_slopes, self.seed)
        more = [self.sinks, self.relative_bias, self.positions, self.mask_program]
        while more and more[-1] is None:  # a backend need not take tensors that no case has
            more.pop()
        return *tensors, *more

    def cotangents(self, *, clean: bool = False) -> tuple[Tensor | None, ...]:
        poisoned = self.clean_grad_out is not None
        grad_out = self.clean_grad_out if clean and poisoned else self.grad_out
        return grad_out, self.grad_lse, self.grad_weights

    def backward_args(
        self, out: Tensor, lse: Tensor, *, clean: bool = False
    ) -> tuple[Tensor | None, ...]:
        seen = self.forward_args(clean=clean)
        if self.elsewhere is not None:
            others = (self.elsewhere[0].to(out.dtype), self.elsewhere[1])
            out, lse = reference.merge_states(out, lse, *others, options=NoOptions())
        return (*self.cotangents(clean=clean), *seen[:6], out, lse, *seen[6:])

    def backward_options(self) -> AttentionBackwardOptions:
        return extended(
            AttentionBackwardOptions,
            self.options,
            needs_mask_grad=self.needs_mask_grad,
            partial=self.elsewhere is not None,
        )

    def gradients(self, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """The results of the backward by name, without those that are None."""
        names = "grad_query grad_key grad_value grad_mask grad_sinks grad_relative_bias".split()
        given = zip(names, grads, strict=False)
        return {name: grad for name, grad in given if grad is not None}

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of the results that are not of query's dtype."""
        dtypes = {"lse": torch.promote_types(self.query.dtype, torch.float32)}
        own = {
            "grad_mask": self.attn_mask,
            "grad_sinks": self.sinks,
            "grad_relative_bias": self.relative_bias,
        }
        return dtypes | {name: x.dtype for name, x in own.items() if x is not None}

    def tensors(self) -> dict[str, Tensor | None]:
        names = "query key value attn_mask alibi_slopes sinks relative_bias positions".split()
        grads = ("grad_out", "grad_lse", "grad_weights")
        return {name: getattr(self, name) for name in (*names, *grads)}


def make_inputs(case: Case, dtype: torch.dtype, *, fence: bool = False) -> Inputs:
    """Return the tensors of ``case`` in ``dtype``; equal from call to call.

    With ``fence`` they end at an inaccessible page, see ``memory.place``.
    """
    draw, normal = numbers_of(case.name)

    b, h, hkv = case.batch, case.heads, case.heads if case.kv_heads is None else case.kv_heads
    d, dv = case.head_dim, case.head_dim if case.value_dim is None else case.value_dim
    q_layout, k_layout, v_layout = case.layouts

    def placed(values: Tensor, layout: str, as_dtype: torch.dtype = dtype) -> Tensor:
        return place(values.to(as_dtype), layout, fence=fence)

    # Twice the usual spread: with nearly equal weights, errors would cancel in the mean.
    query = placed(2 * normal(b, h, case.q_len, d), q_layout)
    key = placed(normal(b, hkv, case.k_len, d), k_layout)
    value = placed(normal(b, hkv, case.k_len, dv), v_layout)

    attn_mask = None
    if case.mask is not None:
        sizes = zip("bhqk", (b, h, case.q_len, case.k_len), strict=True)
        shape = tuple(size if dim in case.mask_dims else 1 for dim, size in sizes)
        mask_dtype = torch.float32 if case.mask_float32 else dtype
        values = MASKS[case.mask](shape, draw, mask_dtype)
        as_dtype = torch.bool if values.dtype == torch.bool else mask_dtype
        attn_mask = placed(values, case.mask_layout, as_dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    slopes = None
    if case.alibi is not None:
        slope_shape = (1, 1, b if case.alibi == "bh" else 1, h)
        slopes = placed(torch.rand(slope_shape, generator=draw), "contiguous", wide)[0, 0]
    seed = dropout_seed(draw, case.dropout_p)

    grad_out = grad_lse = grad_weights = None
    if "out" in case.grads:
        grad_out = placed(normal(b, h, case.q_len, dv), case.grad_layout)
    if "lse" in case.grads:
        # Positive: the gradient of a shared bias is a sum over all pairs, which must not cancel.
        values = normal(b, h, case.q_len, 1).abs().to(wide)
        grad_lse = placed(values, "every_second", torch.float64)[..., 0]
    if "weights" in case.grads:
        heads = h if case.weights == 1 else 1
        grad_weights = placed(normal(b, heads, case.q_len, case.k_len), case.grad_layout)
        grad_weights = grad_weights if case.weights == 1 else grad_weights[:, 0]

    elsewhere = None
    if case.partial:
        elsewhere = normal(b, h, case.q_len, dv).to(dtype), 3 + normal(b, h, case.q_len)
    sinks = None
    if case.sinks is not None:
        rows = b if case.sinks == "bh" else 1
        sinks = placed(2 * normal(1, 1, rows, h), "every_second", wide)[0, 0]

    options = _options(case)
    relative_bias = positions = None
    if case.relative_bias is not None:
        if case.positions is not None:
            positions = POSITIONS[case.positions](case.k_len, draw)
        most = _largest_distance(positions, case, options.offset)
        rows = b if case.relative_bias == "bh" else 1
        relative_bias = placed(normal(1, rows, h, 2 * most + 1), "contiguous", wide)[0]
    program = None
    if case.program is not None:
        mask = PROGRAMS[case.program](case, draw)
        given = masks.program("testing", mask, query, case.k_len, options.offset)
        program = placed(given[None, None, None], "contiguous", torch.int32)[0, 0, 0]
    poisoned_key, poisoned_value = key, value
    if case.poison or case.poison_queries:
        pairs = _visible(attn_mask, program, (b, h, case.q_len, case.k_len), options)
    if case.poison:
        hidden = ~pairs.any(2).view(b, hkv, h // hkv, case.k_len).any(2)
        poisoned_key = placed(poison(key, hidden), k_layout)
        poisoned_value = placed(poison(value, hidden), v_layout)
    poisoned_query, poisoned_grad = query, grad_out
    if case.poison_queries:
        poisoned_query = placed(poison(query, ~pairs.any(3)), q_layout)
        if grad_out is not None:
            poisoned_grad = placed(poison(grad_out, ~pairs.any(3)), case.grad_layout)
    return Inputs(
        query=poisoned_query,
        key=poisoned_key,
        value=poisoned_value,
        clean_query=query,
        clean_key=key,
        clean_value=value,
        attn_mask=attn_mask,
        alibi_slopes=slopes,
        seed=seed,
        sinks=sinks,
        relative_bias=relative_bias,
        positions=positions,
        mask_program=program,
        grad_out=poisoned_grad,
        clean_grad_out=grad_out if case.poison_queries else None,
        grad_lse=grad_lse,
        grad_weights=grad_weights,
        options=options,
        needs_mask_grad=case.mask_grad,
        elsewhere=elsewhere,
    )


def _options(case: Case) -> AttentionOptions:
    left, right = case.window
    if case.causal is not None:
        right = 0 if right < 0 else min(right, 0)
    return AttentionOptions(
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        offset=case.k_len - case.q_len if case.causal == "bottom_right" else 0,
        window_left=left,
        window_right=right,
        softcap=case.softcap,
        dropout_p=case.dropout_p,
        first_query=case.first[0],
        first_key=case.first[1],
        first_head=case.first[2],
        weights=case.weights,
    )


def _largest_distance(positions: Tensor | None, case: Case, offset: int) -> int:
    if positions is None:
        return max(case.q_len - 1 + offset, case.k_len - 1 - offset, 0)
    return int(positions.max() - positions.min())


def _visible(
    mask: Tensor | None,
    program: Tensor | None,
    shape: tuple[int, ...],
    options: AttentionOptions,
) -> Tensor:
    """Return the visible pairs, [B, Hq, Lq, Lk]."""
    d = torch.arange(shape[2])[:, None] + options.offset - torch.arange(shape[3])
    pairs = torch.ones(shape, dtype=torch.bool)
    if options.window_left >= 0:
        pairs &= d <= options.window_left
    if options.window_right >= 0:
        pairs &= d >= -options.window_right
    if mask is not None:
        pairs &= mask if mask.dtype == torch.bool else mask != -_INF
    if program is not None:
        pairs &= visible_by_program(program, shape[0], shape[2], shape[3])
    return pairs


def poison(x: Tensor, where: Tensor) -> Tensor:
    """Return x [..., L, D] with the rows of ``where`` [..., L] set to NaN, inf and -inf in turn."""
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
