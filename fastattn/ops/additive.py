"""Additive attention: a hidden layer computes the scores instead of a dot product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import checks
from fastattn._derivative import Derivative
from fastattn._flops import additive_flops, flops_of_pairs, visible_pairs
from fastattn._seed import draw_seed
from fastattn.backends.primitives import AdditiveBackwardOptions, AdditiveOptions
from fastattn.call import Plans, with_arguments_of, with_seed
from fastattn.checks import shape_of
from fastattn.library import Operator

_NAME = "additive_attention"
plans = Plans()


def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    need_weights: bool = False,
) -> Any:
    r"""Attend with additive scores, without storing a hidden layer for every pair.

    .. math:: e_{ij} = \sum_a v_a \tanh(query_{ia} + key_{ja} + bias_a), \qquad
              out_i = \sum_j dropout(softmax_j(e_{ij})) \, value_j

    (Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473, where query is :math:`W s_{i-1}` and
    key :math:`U h_j`. Both must already be projected; :class:`fastattn.nn.BahdanauAttention` holds
    the projections.) No tensor of size B * Tq * Tk * A is ever stored, forward or backward.

    A pair (i, j) is *excluded* if ``attn_mask`` is False or -inf there, if ``key_padding_mask`` is
    True for key j, or if ``is_causal`` and j > i. Softmax runs over the remaining keys. A fully
    masked row has ``out = 0`` and weights 0, and passes no gradient. NaN or inf in a key or value
    that no query can see never affects the result.

    Args:
        query: [B, Tq, A], float32, float64, bfloat16 or float16, any strides; sizes may be 0. If
            query has no batch dimension, [Tq, A], key and value must not have one either. 16-bit
            inputs are computed in float32.
        key: [B, Tk, A], of query's dtype and device.
        value: [B, Tk, Dv], of query's dtype and device.
        v: [A], of query's dtype and device.
        bias: None or [A], of query's dtype and device.
        attn_mask: broadcastable to [B, Tq, Tk]. bool: True takes part. Floating, of query's dtype
            or float32: added to the scores; differentiable.
        key_padding_mask: [B, Tk] bool, True is ignored (without batch: [Tk]).
        dropout_p: the probability of dropping a weight, in [0, 1]. Always applied: pass 0 in
            evaluation. The draws are a function of one 64-bit seed per call, from PyTorch's default
            generator: the same on every backend and for any number of threads. Without dropout no
            random number is consumed.
        is_causal: exclude the keys after the query's own position; query 0 is at key 0. Can be
            combined with masks.
        need_weights: also return the weights that are applied to value, after dropout.

    Returns:
        ``out`` [B, Tq, Dv] in query's dtype, or ``(out, weights [B, Tq, Tk])``. Both are
        differentiable in query, key, value, v, bias and a floating mask, any number of times:
        derivatives beyond the first, and forward mode, go through the reference backend.

    Under autocast all floating arguments are cast as PyTorch casts the arguments of attention.

    Raises:
        TypeError: an argument of the wrong type, or a tensor of a dtype other than those listed.
        ValueError: shapes or devices that do not match, ``dropout_p`` outside [0, 1].
        RuntimeError: a forced backend that cannot run the call.

    Examples:
        >>> import torch
        >>> from fastattn import additive_attention
        >>> query, key = torch.ones(2, 5, 16), torch.ones(2, 7, 16)
        >>> value, v = torch.ones(2, 7, 3), torch.ones(16)
        >>> out, weights = additive_attention(query, key, value, v, need_weights=True)
        >>> out.shape, weights.shape
        (torch.Size([2, 5, 3]), torch.Size([2, 5, 7]))
    """
    tensors = (query, key, value, v, bias, attn_mask, key_padding_mask)
    signature, plan = plans.find(tensors, dropout_p, is_causal, need_weights)
    if plan is not None:
        mask = _combine_masks(attn_mask, key_padding_mask)
        seed = draw_seed(query.device) if dropout_p else None
        run = plan.all if need_weights else plan.first
        return run((query, key, value, v, bias, mask, seed))
    operator, call = prepare(*tensors, dropout_p, is_causal, need_weights)
    if query is not call[0]:  # a query without a batch has no plan
        signature = None
    call = with_seed(operator, call)
    plan = plans.keep(signature, operator, call, originals=tensors[:5], inputs=tensors)
    out, weights = operator(*call) if plan is None else plan.all(call[:-1], call[-1])
    if query.ndim == 2:
        out, weights = out[0], weights[0] if need_weights else weights
    return (out, weights) if need_weights else out


def _validate(args: Any) -> tuple[Operator, tuple[Any, ...]]:
    """Validate the named arguments; return the operator and its arguments, without a seed."""
    attn_mask, key_padding_mask = args.attn_mask, args.key_padding_mask
    tensors: tuple[Any, ...] = (args.query, args.key, args.value, args.v)
    if args.bias is not None:
        tensors = (*tensors, args.bias)
    _check_tensors(tensors)
    checks.check_bool(f"{_NAME}: is_causal", args.is_causal)
    checks.check_bool(f"{_NAME}: need_weights", args.need_weights)
    dropout_p = _check_probability(args.dropout_p)
    tensors = checks.autocast(*tensors)
    _check_dtypes(tensors)
    _check_shapes(*tensors)
    query, key, value, v, *optional_bias = tensors
    bias = optional_bias[0] if optional_bias else None
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
    mask = seed = None  # the seed is drawn later, see with_seed
    if attn_mask is not None or key_padding_mask is not None:
        mask = _fold_masks(attn_mask, key_padding_mask, query, key, batched)
    options = AdditiveOptions(causal=args.is_causal, dropout_p=dropout_p, weights=args.need_weights)
    return additive, (query, key, value, v, bias, mask, seed, options)


prepare = with_arguments_of(additive_attention, _validate)


# --- validation ------------------------------------------------------------------------------


_ARGUMENTS = ("query", "key", "value", "v", "bias")


def _check_tensors(tensors: Sequence[Any]) -> None:
    device = getattr(tensors[0], "device", None)
    for name, x in zip(_ARGUMENTS, tensors):  # noqa: B905  (see checks.expands_to)
        checks.check_dense(_NAME, **{name: x})
        if x.device != device:
            raise ValueError(f"{_NAME}: {name} must be on query's device {device}, got {x.device}")


def _check_dtypes(tensors: Sequence[Tensor]) -> None:
    dtype = tensors[0].dtype
    checks.check_floating(f"{_NAME}: query", tensors[0])
    for name, x in zip(_ARGUMENTS, tensors):  # noqa: B905
        if x.dtype is not dtype:
            raise TypeError(f"{_NAME}: {name} must have query's dtype {dtype}, got {x.dtype}")


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, v: Tensor, bias: Tensor | None = None
) -> None:
    q, k, u = query.shape, key.shape, value.shape
    rank = len(q)
    if rank not in (2, 3):
        raise ValueError(f"{_NAME}: query must be [B, Tq, A] or [Tq, A], got {tuple(q)}")
    if len(k) != rank or k[-1] != q[-1] or (rank == 3 and k[0] != q[0]):
        want = "[B, Tk, A]" if rank == 3 else "[Tk, A]"
        raise ValueError(f"{_NAME}: key must be {want}, got {tuple(k)} with a query {tuple(q)}")
    if len(u) != rank or u[-2] != k[-2] or (rank == 3 and u[0] != k[0]):
        want = "[B, Tk, Dv]" if rank == 3 else "[Tk, Dv]"
        raise ValueError(f"{_NAME}: value must be {want}, got {tuple(u)} with a key {tuple(k)}")
    for name, x in (("v", v), ("bias", bias)):
        if x is not None and x.shape != q[-1:]:
            raise ValueError(f"{_NAME}: {name} must be [A] = {tuple(q)[-1:]}, got {shape_of(x)}")


def _check_probability(p: Any) -> float:
    checks.check_number(f"{_NAME}: dropout_p", p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{_NAME}: dropout_p must be between 0 and 1, got {p}")
    return float(p)


def _fold_masks(
    attn_mask: Any, padding: Any, query: Tensor, key: Tensor, batched: bool
) -> Tensor | None:
    """Check both masks, and return them as one [B|1, Tq|1, Tk|1]: True or finite takes part."""
    if padding is not None:
        shape = key.shape[:2] if batched else key.shape[1:2]
        _check_mask("key_padding_mask", padding, query, (torch.bool,))
        if padding.shape != shape:
            raise ValueError(
                f"{_NAME}: key_padding_mask must be {'[B, Tk]' if batched else '[Tk]'} = "
                f"{tuple(shape)}, got {shape_of(padding)}"
            )
        if not batched:
            padding = padding[None]
    if attn_mask is None:
        return _combine_masks(None, padding)
    attn_mask = checks.as_stored_mask(_NAME, attn_mask, query.device)
    if isinstance(attn_mask, Tensor):
        attn_mask = checks.autocast_bias(attn_mask)
    _check_mask("attn_mask", attn_mask, query, (torch.bool, query.dtype, torch.float32))
    scores = (query.shape[0], query.shape[1], key.shape[1])[0 if batched else 1 :]
    if not checks.expands_to(attn_mask.shape, scores):
        raise ValueError(
            f"{_NAME}: attn_mask must be broadcastable to the scores {tuple(scores)}, "
            f"got {shape_of(attn_mask)}"
        )
    return _combine_masks(attn_mask, padding)


def _combine_masks(attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """Return one mask [B|1, Tq|1, Tk|1]: True or finite takes part. ``padding`` is [B, Tk]."""
    if padding is not None:
        padding = padding[:, None]
    if attn_mask is None:
        return None if padding is None else ~padding
    if attn_mask.dim() < 3:
        attn_mask = attn_mask[(None,) * (3 - attn_mask.dim())]
    if padding is None:
        return attn_mask
    if attn_mask.dtype == torch.bool:
        return attn_mask & ~padding
    return torch.where(padding, float("-inf"), attn_mask)


def _check_mask(name: str, mask: Any, query: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    checks.check_dense(_NAME, **{name: mask})
    if mask.dtype not in dtypes:
        allowed = ", ".join(dict.fromkeys(str(dtype) for dtype in dtypes))
        raise TypeError(f"{_NAME}: {name} must be of dtype {allowed}, got {mask.dtype}")
    if mask.device != query.device:
        raise ValueError(
            f"{_NAME}: {name} must be on query's device {query.device}, got {mask.device}"
        )


# --- the operator -----------------------------------------------------------------------------


def _count_pairs(query: Tensor, key: Tensor, *others: Any) -> int:
    """Count the pairs of a query and a key that ``is_causal`` leaves; masks are not read."""
    *_, options = others
    keys_after = 0 if options.causal else -1
    return query.shape[0] * visible_pairs(query.shape[1], key.shape[1], right=keys_after)


additive = Operator(
    "additive_attention",
    "query: B Tq A; key: B Tk A; value: B Tk Dv; v: A; bias?: A; attn_mask?: B|1 Tq|1 Tk|1; seed?",
    "out: B Tq Dv; weights: B Tq Tk",
    options=AdditiveOptions,
    derivative=Derivative(
        grads="out weights",
        reads="query key value v bias attn_mask seed",  # no result: rows are recomputed
        gives="query key value v bias attn_mask",
        options=AdditiveBackwardOptions,
    ),
    flops=flops_of_pairs(_count_pairs, additive_flops),
    checked_by=("cpu",),
)
