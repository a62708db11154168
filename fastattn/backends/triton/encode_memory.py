"""Memory encoding on Triton: m_i = sum_j factors_j o weight[tokens_ij] + temporal_i.

The gradient of the table is summed in the order of the tokens, without atomics: the tokens are
sorted by their row, and each program sums the gradients of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.primitives import EncodeMemoryBackwardOptions, EncodeMemoryOptions
from fastattn.backends.triton._core import Operand, matrix_tile, row_tile
from fastattn.backends.triton._launch import launch, operand
from fastattn.backends.triton._table import Launch

_TILE = Launch(16, 64, 4, 1)  # sentences, or words at a time, and columns; memory bound


@triton.jit
def _is_word(token, rows, padding):
    """Whether a token is a word, neither padding nor outside the table, where nothing is read."""
    in_table = (token >= 0) & (token < rows)
    if padding is not None:
        in_table = in_table & (token != padding)
    return in_table


@triton.jit
def encode_sentences(
    tokens,  # [R, B, N, J] int64
    weight,  # [R, G, V, D]
    p_factors,  # [J, D] float32
    temporal,  # [R, G, N, D], or None
    p_out,  # [R, B, G, N, D]
    tables,
    batch,
    sentences,
    words,
    rows,
    width,
    padding,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The memories of one tile of sentences and columns, from one table."""
    i_rbg, begin, col = matrix_tile(sentences, width, BM, BN)
    o_n = begin + tl.arange(0, BM)
    o_d = col + tl.arange(0, BN)
    i_g = i_rbg % tables
    i_b = i_rbg // tables % batch
    i_r = i_rbg // tables // batch
    m_n = o_n < sentences
    m_d = (o_d < width)[None, :]

    total = tl.zeros([BM, BN], tl.float32)
    any_word = tl.zeros([BM], tl.int1)
    p_tokens = tokens.p + i_r * tokens.b + i_b * tokens.h + o_n.to(tl.int64) * tokens.l
    p_weight = weight.p + i_r * weight.b + i_g * weight.h + o_d.to(tl.int64)[None, :] * weight.d
    for j in range(words):
        token = tl.load(p_tokens + j * tokens.d, mask=m_n, other=0)
        is_word = m_n & _is_word(token, rows, padding)
        any_word = any_word | is_word
        inside = is_word[:, None] & m_d
        row = tl.load(p_weight + token[:, None] * weight.l, mask=inside, other=0.0)
        factor = tl.load(p_factors + j * width + o_d, mask=o_d < width, other=0.0)
        total += tl.where(inside, row.to(tl.float32) * factor[None, :], 0.0)
    if temporal is not None:
        p_t = temporal.p + i_r * temporal.b + i_g * temporal.h
        p_t = p_t + o_n.to(tl.int64)[:, None] * temporal.l + o_d.to(tl.int64)[None, :] * temporal.d
        total += tl.load(p_t, mask=any_word[:, None] & m_d, other=0.0).to(tl.float32)
    o_out = (i_rbg * sentences + o_n)[:, None] * width + o_d[None, :]
    tl.store(p_out + o_out, total.to(p_out.dtype.element_ty), mask=m_n[:, None] & m_d)


@triton.jit
def sum_by_row(
    p_grad,  # [R, B, G, N, D]
    p_order,  # [R, B N J] int64: the positions of the words, sorted by their row of the table
    p_starts,  # [R, V + 1] int64: the first position of each row
    p_factors,  # [J, D] float32
    p_sums,  # [R, G, V, D]
    tables,
    batch,
    sentences,
    words,
    rows,
    width,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """d loss / d weight_v = sum of factors_j o grad_i over the positions (i, j) of the word v."""
    i_rgv, col = row_tile(width, BN)
    o_d = col + tl.arange(0, BN)
    i_v = i_rgv % rows
    i_g = i_rgv // rows % tables
    i_r = i_rgv // rows // tables
    m_d = (o_d < width)[None, :]
    begin = tl.load(p_starts + i_r * (rows + 1) + i_v)
    end = tl.load(p_starts + i_r * (rows + 1) + i_v + 1)

    total = tl.zeros([BN], tl.float32)
    for word in range(begin, end, BM):
        o_w = word + tl.arange(0, BM)
        inside = (o_w < end)[:, None] & m_d
        position = tl.load(p_order + i_r * batch * sentences * words + o_w, mask=o_w < end, other=0)
        i_j = position % words
        i_n = position // words % sentences
        i_b = position // words // sentences
        o_g = ((i_r * batch + i_b) * tables + i_g) * sentences + i_n
        p_g = p_grad + o_g[:, None] * width + o_d[None, :]
        grad = tl.load(p_g, mask=inside, other=0.0).to(tl.float32)
        p_f = p_factors + i_j[:, None] * width + o_d[None, :]
        total += tl.sum(grad * tl.load(p_f, mask=inside, other=0.0), axis=0)
    tl.store(p_sums + i_rgv * width + o_d, total.to(p_sums.dtype.element_ty), mask=o_d < width)


def encode_memory(
    tokens: Tensor,  # [R, B, N, J] int64
    weight: Tensor,  # [R, G, V, D]
    factors: Tensor,  # [J, D] float32
    temporal: Tensor | None,  # [R, G, N, D]
    *,
    options: EncodeMemoryOptions,
) -> Tensor:
    """Return the memories [R, B, G, N, D], see ``docs/design.md``."""
    models, batch, sentences, words = tokens.shape
    _, tables, rows, width = weight.shape
    out = weight.new_empty((models, batch, tables, sentences, width))
    launch(
        encode_sentences,
        _TILE,
        _TILE.tiles(sentences, width) * models * batch * tables,
        weight.device,
        tokens=Operand(tokens, *tokens.stride()),
        weight=operand(weight),
        p_factors=factors.contiguous(),
        temporal=None if temporal is None else operand(temporal),
        p_out=out,
        tables=tables,
        batch=batch,
        sentences=sentences,
        words=words,
        rows=rows,
        width=width,
        padding=options.padding_idx,
    )
    return out


def encode_memory_backward(
    grad: Tensor,  # [R, B, G, N, D]
    tokens: Tensor,
    factors: Tensor,
    *,
    options: EncodeMemoryBackwardOptions,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and temporal, see ``docs/design.md``."""
    models, batch, tables, sentences, width = grad.shape
    rows, words = options.rows, tokens.shape[3]
    is_word = (tokens >= 0) & (tokens < rows)
    if options.padding_idx is not None:
        is_word &= tokens != options.padding_idx
    row_of = torch.where(is_word, tokens, rows).flatten(1)  # padding is sorted last
    row_of, order = row_of.sort(dim=1, stable=True)
    bounds = torch.arange(rows + 1, device=tokens.device).expand(models, -1).contiguous()
    grad_weight = grad.new_empty((models, tables, rows, width))
    launch(
        sum_by_row,
        _TILE,
        _TILE.k_tiles(width) * models * tables * rows,
        grad.device,
        p_grad=grad.contiguous(),
        p_order=order,
        p_starts=torch.searchsorted(row_of, bounds),
        p_factors=factors.contiguous(),
        p_sums=grad_weight,
        tables=tables,
        batch=batch,
        sentences=sentences,
        words=words,
        rows=rows,
        width=width,
    )
    if not options.temporal:
        return grad_weight, grad.new_empty(0)
    any_word = is_word.any(-1)[:, :, None, :, None]  # [R, B, 1, N, 1]
    # Selected: the gradient of a sentence without words may be NaN.
    grad_memory = torch.where(any_word, grad, 0.0)
    return grad_weight, grad_memory.sum(1, dtype=torch.float32).to(grad.dtype)
