"""The launches of attention for a batch [B, H, L, D] and for packed sequences [T, H, D]."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.backends._alloc import empty_output, summed_to
from fastattn.backends.primitives import AttentionOptions, DecodeOptions, VarlenOptions
from fastattn.backends.triton._core import Gradients, Operand, Options, Statistics
from fastattn.backends.triton._launch import block_of, launch, operand, plan, precision
from fastattn.backends.triton._sdpa_backward import (
    attention_backward_key_value,
    attention_backward_query,
    attention_backward_statistics,
)
from fastattn.backends.triton._sdpa_backward_biases import attention_backward_table
from fastattn.backends.triton._sdpa_forward import attention_forward
from fastattn.backends.triton._table import Launch

_UNLIMITED = 2**30  # larger than any distance of two positions, and an int32
_PARTS = 64  # partial gradients of a table, among which packed sequences are divided


class Biases(NamedTuple):
    """The tensors of a call that change its scores, as in ``docs/design.md``."""

    attn_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    seed: Tensor | None = None
    sinks: Tensor | None = None
    relative_bias: Tensor | None = None
    positions: Tensor | None = None
    mask_program: Tensor | None = None


class Attention(NamedTuple):
    """A call of attention."""

    query: Tensor  # [B, Hq, Lq, D], or [Tq, Hq, D] for packed sequences
    key: Tensor  # [B, Hkv, Lk, D], [Tk, Hkv, D]
    value: Tensor  # [B, Hkv, Lk, Dv], [Tk, Hkv, Dv]
    options: Options
    batch: int  # the number of sequences

    @property
    def entry_suffix(self) -> str:
        """The suffix of the entries for this call in the table of launches."""
        return "" if self.options.excludes is None else "_masked"

    def operands(self) -> dict[str, Any]:
        """The arguments of the kernels that describe the call."""
        return {
            "q": _rows(self.query),
            "k": _rows(self.key),
            "v": _rows(self.value),
            "opt": self.options,
            **widths_of(self.query, self.value),
        }

    def plan(self, entry: str) -> Launch:
        """The launch of an entry in the table, with smaller tiles if options need registers."""
        widths = block_of(self.query.shape[-1]), block_of(self.value.shape[-1])
        launch_plan = plan(entry, self.query, *widths)
        opt = self.options
        return launch_plan if opt.table is None and opt.p_program is None else launch_plan.halved()

    def run(self, kernel: Any, entry: str, *, of_keys: bool = False, **arguments: Any) -> None:
        """Launch a kernel with one program for each tile of queries or keys of each head."""
        launch_plan = self.plan(entry)
        programs = _program_count(launch_plan, self.options, self.batch, of_keys=of_keys)
        launch(kernel, launch_plan, programs, self.query.device, **self.operands(), **arguments)


class Cotangents(NamedTuple):
    """The gradients of the results of a call; None for a result without a gradient."""

    out: Tensor | None = None  # [B, Hq, Lq, Dv], [Tq, Hq, Dv]
    lse: Tensor | None = None  # [B, Hq, Lq], [Hq, Tq]
    weights: Tensor | None = None  # [B, Hq, Lq, Lk], a dimension of size 1 is repeated
    weight_share: float = 1.0  # of one head's weights in the returned weights

    def operands(self) -> Gradients:
        """The gradients in the form of the kernels."""
        lse = self.lse
        if lse is not None:
            lse = lse.unsqueeze(3) if lse.ndim == 3 else lse.mT.unsqueeze(2)
        return Gradients(
            out=None if self.out is None else _rows(self.out),
            lse=None if lse is None else _rows(lse),
            weights=None if self.weights is None else matrix_operand(self.weights),
            weight_share=self.weight_share,
        )


def attend(call: Attention) -> tuple[Tensor, Tensor]:
    """Return the output, in the query's memory order, and lse [B, Hq, Lq], or [Hq, T]."""
    query = call.query
    out = empty_output(query, call.value.shape[-1])
    lse = query.new_empty(
        query.shape[:3] if query.ndim == 4 else query.shape[1::-1], dtype=torch.float64
    )
    call.run(attention_forward, "forward" + call.entry_suffix, out=_rows(out), p_lse=lse)
    return out, lse


def backward_statistics(
    call: Attention,
    out: Tensor,
    lse: Tensor,
    cotangents: Cotangents,
    *,
    exact: bool,
    grad_sinks: Tensor | None = None,
) -> Statistics:
    """Return the inputs of the backward kernels for each row: lse in two parts, and delta.

    They are float32 and shaped like lse. ``exact`` also corrects delta for the rounding of ``out``.
    ``grad_sinks``, of the same shape, receives the gradient of the sink of each row.
    """
    row_statistics = Statistics(*lse.new_empty((3, *lse.shape), dtype=torch.float32))
    call.run(
        attention_backward_statistics,
        "statistics",
        out=_rows(out),
        g=cotangents.operands(),
        p_lse=lse.contiguous(),
        stats=row_statistics,
        p_grad_sinks=grad_sinks,
        EXACT=exact,
    )
    return row_statistics


def differentiate(
    call: Attention,
    out: Tensor,
    lse: Tensor,
    cotangents: Cotangents,
    sign: int,  # of the scale, see `positive_scale`
    biases: Biases,
    needs_mask_grad: bool = False,
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """Return the gradients of query, key, value, sinks and relative bias.

    Also return the arguments that the kernel for the gradient of the mask takes from here.
    """
    sinks, relative_bias = biases.sinks, biases.relative_bias
    # The row sums of a bias's gradient equal the gradient of lse, so the rounding of out must not
    # appear in them.
    biased = needs_mask_grad or relative_bias is not None
    exact = biased or call.query.dtype == torch.float32
    tensors = call.query, call.key, call.value
    grad_query, grad_key, grad_value = (empty_output(x, x.shape[-1]) for x in tensors)
    if call.options.heads == 0:  # no program runs
        grad_key.zero_()
        grad_value.zero_()
    if cotangents.out is None:
        cotangents = cotangents._replace(out=out.new_zeros(1).expand(out.shape))
    row_grad_sinks = None if sinks is None else lse.new_zeros(lse.shape, dtype=torch.float32)
    row_statistics = backward_statistics(
        call, out, lse, cotangents, exact=exact, grad_sinks=row_grad_sinks
    )
    gradients = cotangents.operands()._replace(lse=None)  # delta contains it
    arguments: dict[str, Any] = {"g": gradients, "stats": row_statistics}
    call.run(
        attention_backward_query,
        "backward_query" + call.entry_suffix,
        **arguments,
        grad_q=_rows(grad_query),
    )
    call.run(
        attention_backward_key_value,
        "backward_key_value" + call.entry_suffix,
        of_keys=True,
        **arguments,
        grad_k=_rows(grad_key),
        grad_v=_rows(grad_value),
    )
    grad_sinks = None
    if row_grad_sinks is not None and sinks is not None:
        by_head = row_grad_sinks.sum(-1, dtype=torch.float64)  # [B, Hq], [Hq] for packed sequences
        grad_sinks = by_head.view(-1, sinks.shape[1]).sum_to_size(sinks.shape).to(sinks.dtype)
    if sign != 1:
        grad_query.mul_(sign)
    grad_table = None if relative_bias is None else _table_gradient(call, relative_bias, arguments)
    return (grad_query, grad_key, grad_value, grad_sinks, grad_table), arguments


def _table_gradient(call: Attention, relative_bias: Tensor, arguments: dict[str, Any]) -> Tensor:
    """The gradient of the relative bias [B|1, Hq, 2 M + 1], from ``g`` and ``stats``."""
    heads, entries = call.options.heads, relative_bias.shape[2]
    parts, launch_plan = call.batch, call.plan("backward_mask")
    if call.options.p_q_starts is not None:  # the location of a sequence takes registers, too
        parts = min(parts, _PARTS)
        launch_plan = launch_plan._replace(BM=max(launch_plan.BM // 2, 16))
    grads = call.query.new_empty((parts, heads, entries), dtype=torch.float32)
    launch(
        attention_backward_table,
        launch_plan,
        launch_plan.k_tiles(entries) * parts * heads,
        call.query.device,
        **call.operands(),
        **arguments,
        p_grad=grads,
        entries=entries,
        parts=parts,
    )
    return summed_to(relative_bias, grads)


def kernel_options(
    sizes: tuple[int, int, int, int],  # Hq, Hkv, Lq, Lk
    biases: Biases,
    options: AttentionOptions | VarlenOptions | DecodeOptions,
    scale: float,
    offset: int | None,  # None: the last query is at the last key
    dropout_p: float = 0.0,
) -> Options:
    """The options in the form of the kernels; ``scale`` is positive, see :func:`positive_scale`."""
    heads, kv_heads, q_len, k_len = sizes
    attn_mask, alibi_slopes, seed, sinks, relative_bias, positions, mask_program = biases
    left, right, softcap = options.window_left, options.window_right, options.softcap
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    mask = None if attn_mask is None else matrix_operand(attn_mask)
    alibi = None
    if alibi_slopes is not None:
        alibi = operand(alibi_slopes[:, :, None, None])
    added_mask = None if boolean else mask
    table = None
    if relative_bias is not None:
        table = operand(_with_contiguous_rows(relative_bias).unsqueeze(2))
    biased = any(x is not None for x in (added_mask, alibi, table))
    threshold = round((1.0 - dropout_p) * 65536) if dropout_p > 0 else None
    return Options(
        heads=heads,
        group=max(heads // max(kv_heads, 1), 1),
        q_len=q_len,
        k_len=k_len,
        scale=scale,
        offset=offset,
        left=None if left < 0 else min(left, _UNLIMITED),
        right=None if right < 0 else min(right, _UNLIMITED),
        bool_mask=mask if boolean else None,
        added_mask=added_mask,
        alibi=alibi,
        softcap=softcap if softcap > 0 else None,
        table=table,
        middle=None if relative_bias is None else relative_bias.shape[2] // 2,
        p_positions=None if positions is None else positions.contiguous(),
        p_program=None if mask_program is None else mask_program.contiguous(),
        excludes=1 if any(x is not None for x in (mask, table, mask_program)) else None,
        rescored=1 if softcap > 0 or biased else None,
        p_seed=seed if dropout_p > 0 else None,
        threshold=threshold,
        kept_scale=None if threshold is None else 65536 / threshold if threshold else 0.0,
        sinks=None if sinks is None else operand(sinks[:, :, None, None]),
    )


def widths_of(query: Tensor, value: Tensor) -> dict[str, Any]:
    """The widths of the rows, in elements and in columns of a tile, as arguments of a kernel."""
    width, value_width = query.shape[-1], value.shape[-1]
    return {
        "D": width,
        "DV": value_width,
        "BD": block_of(width),
        "BDV": block_of(value_width),
        "PRECISION": precision(),
    }


def matrix_operand(x: Tensor) -> Operand:
    """A tensor [B, H, Lq, Lk], with strides small enough for int32 offsets within a tile."""
    return operand(x if max(x.stride()[2:]) < 2**23 else x.contiguous())


def positive_scale(
    query: Tensor, options: AttentionOptions | VarlenOptions | DecodeOptions
) -> tuple[Tensor, float, int]:
    """Return (sign * query, |scale|, sign), which give the same scores; (0 * query, 1, 0) for 0.

    The kernels multiply by the scale after they have found the maximum of a row.
    """
    scale = options.scale
    if scale > 0:
        return query, scale, 1
    sign = -1 if scale < 0 else 0
    return query * sign, -scale if scale < 0 else 1.0, sign


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """Return x with contiguous rows. A copy of a broadcast batch has one entry."""
    if x.stride(-1) == 1 or x.shape[-1] <= 1:
        return x
    if x.stride(0) == 0 and x.shape[0] > 1:
        return x[:1].contiguous().expand(x.shape)
    return x.contiguous()


def _rows(x: Tensor) -> Operand:
    """The rows of [B, H, L, D] or of packed [T, H, D], as an operand."""
    if x.ndim == 4:
        return operand(x)
    row, head, column = (0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))
    return Operand(x, row, head, row, column)


def _program_count(launch_plan: Launch, options: Options, batch: int, *, of_keys: bool) -> int:
    """The number of programs for all tiles, which ``_core.locate`` gives to them."""
    length, block, heads = (
        (options.k_len, launch_plan.BN, options.heads // options.group)
        if of_keys
        else (options.q_len, launch_plan.BM, options.heads)
    )
    if options.p_q_starts is None:
        return -(-length // block) * heads * batch
    return (length // block + batch + 1) * heads
