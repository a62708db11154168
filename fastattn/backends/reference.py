"""The oracle: every primitive as its definition, in plain PyTorch.

Nothing here is fast. Everything here is differentiable as often as wanted, runs in any floating
dtype on any device, and works under ``vmap``, ``torch.func`` and ``torch.compile``: no Python
branch looks at a tensor's values, but for the steps of Hopfield retrieval, which are counted.

``scaled_dot_product_attention`` (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), for query
i and key j of one head, with d_ij = i + offset - j:

    s_ij = scale * q_i . k_j
    s_ij = softcap * tanh(s_ij / softcap)      if softcap > 0
    s_ij = s_ij + mask_ij                      if the mask is floating
    s_ij = s_ij - slope * |d_ij|               ALiBi, https://arxiv.org/abs/2108.12409
    s_ij = -inf                                unless -window_right <= d_ij <= window_left,
                                               and mask_ij is neither False nor -inf
    lse_i = log sum_j exp(s_ij)
    w_ij = exp(s_ij - lse_i)                   0 where s_ij = -inf, even if all of the row is
    w_ij = w_ij * kept_ij * 65536 / T          T = round((1 - dropout_p) * 65536)
    o_i  = sum_j w_ij v_j

A window of -1 is unlimited on that side. kept_ij, 0 or 1, is drawn by Philox4x32-10 (Salmon et al.
2011, https://doi.org/10.1145/2063384.2063405), see :func:`dropout_keep`; T = 0 keeps nothing.

**Excluded pairs contribute nothing**: a pair with s_ij = -inf is left out of every sum, not
multiplied by zero. So NaN and inf in a key or value reach only the queries that see it, in the
results and in every gradient. A query that sees nothing has o = 0, w = 0, lse = -inf, and passes
on no gradient.

**Precision**: 16-bit inputs are computed in float32 and rounded once, at the end. lse is returned
in float64, see ``docs/design.md``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.primitives import (
    AdditiveBackwardOptions,
    AdditiveOptions,
    AttentionBackwardOptions,
    AttentionOptions,
    SinusoidalOptions,
)
from fastattn.sinusoids import encode_positions

__all__ = [
    "additive_attention",
    "additive_attention_backward",
    "append_to_cache",
    "decode_attention",
    "dropout_keep",
    "encode_memory",
    "encode_memory_backward",
    "hop_states",
    "hopfield_retrieve",
    "hopfield_retrieve_backward",
    "hopfield_states",
    "local_attention",
    "local_attention_backward",
    "memory_hop_attention",
    "memory_hop_attention_backward",
    "philox4x32",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_backward",
    "sinusoidal_encoding",
    "varlen_attention",
    "varlen_attention_backward",
    "why_not",
]

_INF = float("inf")
_WORD = 0xFFFFFFFF  # the low 32 bits of an int64


def why_not(op: str, *args: Any, **kwargs: Any) -> list[str]:
    """Return the reasons why this backend cannot run ``op``: there are none."""
    return []


def scaled_dot_product_attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lk, D]
    value: Tensor,  # [B, Hkv, Lk, Dv]
    attn_mask: Tensor
    | None = None,  # [B|1, Hq|1, Lq|1, Lk|1], bool (True sees) or floating (added)
    alibi_slopes: Tensor | None = None,  # [B|1, Hq]
    seed: Tensor | None = None,  # [] int64
    *,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out [B, Hq, Lq, Dv], lse [B, Hq, Lq], weights)``, see the equations of the module.

    The weights are those asked for, none being an empty tensor: one matrix a head [B, Hq, Lq, Lk],
    or their mean over the heads [B, Lq, Lk]. They are the w that multiply v, after dropout, in the
    dtype of the query.
    """
    out, lse, applied = attend(
        query,
        key,
        value,
        attn_mask,
        alibi_slopes,
        seed,
        options,
    )
    applied = requested_weights(applied, options.weights).to(query.dtype)
    return out.to(query.dtype), lse.double(), applied


def scaled_dot_product_attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    options: AttentionBackwardOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value, and of the mask in its own, unexpanded shape.

    They are the vector-Jacobian product of the forward, taken by ``torch.func.vjp``, and so are
    themselves differentiable in everything. ``out`` and ``lse`` are recomputed, not read.
    """
    given = [
        (n, grad) for n, grad in enumerate((grad_out, grad_lse, grad_weights)) if grad is not None
    ]
    leaves = [query, key, value]
    if options.needs_mask_grad:
        assert attn_mask is not None
        leaves.append(attn_mask)

    def forward(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> tuple[Tensor, ...]:
        results = scaled_dot_product_attention(
            query,
            key,
            value,
            mask[0] if mask else attn_mask,
            alibi_slopes,
            seed,
            options=options,
        )
        return tuple(results[n] for n, _ in given)

    if given:
        vjp = torch.func.vjp(forward, *leaves)[1]
        grads = vjp(tuple(grad for _, grad in given))
    else:
        grads = tuple(torch.zeros_like(leaf) for leaf in leaves)
    return grads[0], grads[1], grads[2], grads[3] if options.needs_mask_grad else None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    options: AttentionOptions,
    *,
    distance: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, lse, w)`` in the dtype of the computation.

    Where sequences have lengths of their own, ``distance`` is d_ij of every pair, ``keep`` is what
    dropout keeps, and ALiBi has a slope a row, [B, Hq, Lq].
    """
    batch, q_heads, q_len, _ = query.shape
    k_len = key.shape[-2]
    compute = _compute_dtype(query.dtype)
    q, k, v = query.to(compute), key.to(compute), value.to(compute)
    if distance is None:
        distance = _distance(q_len, k_len, options.offset, query.device)
    visible = _visible(distance, attn_mask, options.window_left, options.window_right)
    guarded = (
        visible is not None
    )  # without exclusions, plain products are right, NaN and inf included

    with _without_autocast(query.device.type):
        s = _dot_products(q, k, guarded)  # [B, Hq, Lq, Lk]
        if visible is not None:
            s = torch.where(visible, s, 0.0)  # no NaN may reach the derivative of what follows
        s = s * options.scale
        if options.softcap > 0:
            s = options.softcap * torch.tanh(s / options.softcap)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            s = s + attn_mask.to(compute)
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.dim() == 3 else alibi_slopes[:, :, None]
            s = s - slopes.to(compute)[..., None] * distance.abs()
        if visible is not None:
            s = torch.where(visible, s, -_INF)

        w, lse = _softmax(s)
        if options.dropout_p > 0:
            if keep is None:
                assert seed is not None
                keep = dropout_keep((batch, q_heads, q_len, k_len), options.dropout_p, seed)
            w = torch.where(keep, w * _kept_scale(options.dropout_p), 0.0)
        if not guarded:
            return _matmul(w, v), lse, w
        out = _weighted_sum(w, v, s != -_INF)
        # The row of a query that sees nothing is 0 already. Its gradient, even inf, must end here.
        out = torch.where(lse[..., None] == -_INF, 0.0, out)
        return out, lse, w


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _visible(distance: Tensor, mask: Tensor | None, left: int, right: int) -> Tensor | None:
    """Return which pairs take part, broadcastable to [B, Hq, Lq, Lk]; None if all of them do."""
    parts: list[Tensor] = []
    parts += [distance <= left] if left >= 0 else []
    parts += [distance >= -right] if right >= 0 else []
    if mask is not None:
        parts += [mask if mask.dtype == torch.bool else mask != -_INF]
    if not parts:
        return None
    visible = parts[0]
    for part in parts[1:]:
        visible = visible & part
    return visible


def _distance(q_len: int, k_len: int, offset: int, device: torch.device) -> Tensor:
    """d_ij = i + offset - j, [Lq, Lk]."""
    return torch.arange(q_len, device=device)[:, None] + offset - torch.arange(k_len, device=device)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """[B, Hq, M, N] @ [B, Hkv, N, P]: query head h meets key head h // (Hq // Hkv).

    The heads of a group share b, so they are stacked as rows instead of repeating b.
    """
    batch, q_heads, m, n = a.shape
    kv_heads, p = b.shape[1], b.shape[3]
    if q_heads == kv_heads:
        return a @ b
    return (a.reshape(batch, kv_heads, q_heads // kv_heads * m, n) @ b).reshape(
        batch, q_heads, m, p
    )


def _finite(x: Tensor) -> Tensor:
    """x with 0 for NaN and inf: what may be multiplied by a zero weight, or by a zero gradient."""
    return torch.where(torch.isfinite(x), x, 0.0)


def _dot_products(q: Tensor, k: Tensor, guarded: bool) -> Tensor:
    """q_i . k_j [B, Hq, Lq, Lk].

    Excluded products are dropped later by selection. Their derivatives, dq_i = sum_j ds_ij k_j and
    dk_j = sum_i ds_ij q_i, cannot be: there an excluded pair has ds_ij = 0, and 0 * NaN is NaN. So
    what is differentiated is the product of finite operands, and NaN and inf are added to it.
    """
    dots = _matmul(q, k.mT)
    if not guarded:
        return dots
    not_finite = torch.where(torch.isfinite(dots), 0.0, dots).detach()
    return _matmul(_finite(q), _finite(k).mT) + not_finite


def _softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax(s) and logsumexp(s) over the last dimension; 0 and -inf for a row of -inf."""
    if s.shape[-1] == 0:
        return s, s.sum(-1) - _INF  # amax needs an element
    # The results are the same for any m, so m is a constant. In a row of -inf, -inf - m must not
    # be NaN.
    m = s.detach().amax(-1, keepdim=True)
    m = torch.where(m == -_INF, 0.0, m)
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True)
    # Selected before the division and the logarithm too: their derivatives at 0 are not finite.
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -_INF, m + torch.log(total))
    return e / total, lse.squeeze(-1)


def _weighted_sum(w: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """sum_j w_ij v_j over the seen pairs only [B, Hq, Lq, Dv].

    The finite elements of v go through an ordinary product. The others cannot: 0 * inf is NaN. What
    they make of a sum is found by counting: +inf and NaN push it up, -inf and NaN push it down,
    and what is pushed both ways is NaN.
    """
    nan = torch.isnan(v)
    pushes = torch.cat([(v == _INF) | nan, (v == -_INF) | nan], dim=-1)  # [B, Hkv, Lk, 2 * Dv]
    up, down = (_matmul(seen.to(w.dtype), pushes.to(w.dtype)) > 0).chunk(2, dim=-1)
    infinite = torch.where(up, _INF, 0.0) - torch.where(down, _INF, 0.0)
    # The weights add up to 1: the product keeps the value, and hands the row a non-finite gradient.
    poison = torch.where(infinite == 0, 0.0, infinite.to(w.dtype) * w.sum(-1, keepdim=True))
    return _matmul(w, _finite(v)) + poison


def requested_weights(w: Tensor, weights: int) -> Tensor:
    if weights == 0:
        return w.new_empty(0)
    return w if weights == 1 else w.sum(1) / max(w.shape[1], 1)


def _keep_threshold(dropout_p: float) -> int:
    return round((1.0 - dropout_p) * 65536)


def _kept_scale(dropout_p: float) -> float:
    threshold = _keep_threshold(dropout_p)
    return 65536 / threshold if threshold else 0.0


def dropout_keep(shape: tuple[int, int, int, int], dropout_p: float, seed: Tensor) -> Tensor:
    """Return which pairs dropout keeps, bool [B, Hq, Lq, Lk].

    The pair (i, j) of query head h in batch b takes the 16-bit draw j % 8 of the Philox4x32-10
    block with counter (i, j // 8, h, b) and key (low, high word of the seed). It is kept iff
    draw < T = round((1 - dropout_p) * 65536), a half rounded to even. The four words of a block
    give its eight draws, the low half of each word first.
    """
    batch, heads, q_len, k_len = shape
    blocks = (k_len + 7) // 8
    sizes = (q_len, blocks, heads, batch)
    views = ((-1, 1), (-1,), (-1, 1, 1), (-1, 1, 1, 1))
    i, j8, h, b = (
        torch.arange(n, device=seed.device).view(v) for n, v in zip(sizes, views, strict=True)
    )
    words = philox4x32((i, j8, h, b), (seed & _WORD, (seed >> 32) & _WORD))
    draws = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)
    draws = draws.expand(batch, heads, q_len, blocks, 8).flatten(-2)[..., :k_len]
    return draws < _keep_threshold(dropout_p)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of Philox4x32 for every broadcast (counter, key): uint32 held in int64.

    A round is (c0, c1, c2, c3) <- (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)),
    and between rounds a constant is added to each key word. The 64-bit products wrap in int64,
    which leaves all of their bits right.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for n in range(rounds):
        if n > 0:
            k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        hi0, lo0, hi1, lo1 = (p0 >> 32) & _WORD, p0 & _WORD, (p1 >> 32) & _WORD, p1 & _WORD
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
    return c0, c1, c2, c3


def sinusoidal_encoding(
    x: Tensor,  # [..., L, D]
    positions: Tensor | None,  # [..., L] int64, broadcasts; None: offset, offset + 1, ...
    *,
    options: SinusoidalOptions,
) -> Tensor:
    """Return ``x * scale + PE(positions)`` [..., L, D], see :mod:`fastattn.sinusoids` for PE."""
    if positions is None:
        positions = torch.arange(options.offset, options.offset + x.shape[-2], device=x.device)
    encoding = encode_positions(positions, x.shape[-1], options.layout, options.max_timescale)
    if options.padding_idx is not None:
        encoding = torch.where((positions == options.padding_idx).unsqueeze(-1), 0.0, encoding)
    compute = _compute_dtype(x.dtype)
    return (x.to(compute) * options.scale + encoding.to(compute)).to(x.dtype)


def additive_attention(
    query: Tensor,  # [B, Tq, A]
    key: Tensor,  # [B, Tk, A]
    value: Tensor,  # [B, Tk, Dv]
    v: Tensor,  # [A]
    bias: Tensor | None,  # [A]
    attn_mask: Tensor | None,  # [B|1, Tq|1, Tk|1], bool (True sees) or floating (added)
    seed: Tensor | None,  # [] int64
    *,
    options: AdditiveOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out [B, Tq, Dv], w [B, Tq, Tk])``, w being empty unless ``weights``.

    Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473:

        e_ij = sum_a v_a tanh(query_ia + key_ja + bias_a)
        w_i  = softmax over j of e_ij + mask_ij, excluded pairs left out; then dropout, of head 0
        o_i  = sum_j w_ij value_j
    """
    out, applied = attend_additively(query, key, value, v, bias, attn_mask, seed, options)
    applied = applied if options.weights else applied.new_empty(0)
    return out.to(query.dtype), applied.to(query.dtype)


def additive_attention_backward(
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    v: Tensor,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    *,
    options: AdditiveBackwardOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of query, key, value, v, bias and the mask, in its own shape.

    They are the vector-Jacobian product of the forward, and so are themselves differentiable.
    """
    given = [(n, grad) for n, grad in enumerate((grad_out, grad_weights)) if grad is not None]
    leaves = [query, key, value, v]
    if bias is not None:
        leaves.append(bias)
    if options.needs_mask_grad:
        assert attn_mask is not None
        leaves.append(attn_mask)

    def forward(query: Tensor, key: Tensor, value: Tensor, v: Tensor, *more: Tensor) -> Any:
        added = None if bias is None else more[0]
        mask = more[-1] if options.needs_mask_grad else attn_mask
        results = additive_attention(query, key, value, v, added, mask, seed, options=options)
        return tuple(results[n] for n, _ in given)

    if given:
        vjp = torch.func.vjp(forward, *leaves)[1]
        grads = vjp(tuple(grad for _, grad in given))
    else:
        grads = tuple(torch.zeros_like(leaf) for leaf in leaves)
    grad_bias = None if bias is None else grads[4]
    return *grads[:4], grad_bias, grads[-1] if options.needs_mask_grad else None


def attend_additively(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    v: Tensor,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    options: AdditiveOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, w)`` in the dtype of the computation."""
    (batch, q_len, _), k_len = query.shape, key.shape[1]
    compute = _compute_dtype(query.dtype)
    distance = _distance(q_len, k_len, 0, query.device)
    visible = _visible(distance, attn_mask, -1, 0 if options.causal else -1)
    with _without_autocast(query.device.type):
        x = query.to(compute)[:, :, None] + key.to(compute)[:, None]  # [B, Tq, Tk, A]
        if bias is not None:
            x = x + bias.to(compute)
        if visible is not None:
            x = torch.where(visible[..., None], x, 0.0)  # no NaN may reach the derivative of tanh
        e = (torch.tanh(x) * v.to(compute)).sum(-1)  # [B, Tq, Tk]
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            e = e + attn_mask.to(compute)
        if visible is not None:
            e = torch.where(visible, e, -_INF)

        w, lse = _softmax(e)
        if options.dropout_p > 0:
            assert seed is not None
            keep = dropout_keep((batch, 1, q_len, k_len), options.dropout_p, seed)[:, 0]
            w = torch.where(keep, w * _kept_scale(options.dropout_p), 0.0)
        if visible is None:
            return w @ value.to(compute), w
        out = _weighted_sum(w[:, None], value.to(compute)[:, None], (e != -_INF)[:, None])[:, 0]
        # A query that sees nothing hands on no gradient, even of inf.
        return torch.where(lse[..., None] == -_INF, 0.0, out), w


# Last: it builds on what is above.
from fastattn.backends._reference_encode import (  # noqa: E402
    encode_memory,
    encode_memory_backward,
)
from fastattn.backends._reference_hopfield import (  # noqa: E402
    hopfield_retrieve,
    hopfield_retrieve_backward,
    hopfield_states,
)
from fastattn.backends._reference_hops import (  # noqa: E402
    hop_states,
    memory_hop_attention,
    memory_hop_attention_backward,
)
from fastattn.backends._reference_local import (  # noqa: E402
    local_attention,
    local_attention_backward,
)
from fastattn.backends._reference_sequences import (  # noqa: E402
    append_to_cache,
    decode_attention,
    varlen_attention,
    varlen_attention_backward,
)
