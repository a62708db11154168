"""Luong attention: three scores and three windows, composed from the other operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import checks
from fastattn._derivative import Derivative
from fastattn._flops import flops_of_pairs
from fastattn.backends._lost import nan_where_lost
from fastattn.backends.primitives import LocalOptions
from fastattn.call import Plans
from fastattn.library import Operator
from fastattn.ops.additive import additive_attention
from fastattn.ops.sdpa import scaled_dot_product_attention

_NAME = "luong_attention"
plans = Plans()
METHODS = ("dot", "general", "concat")
WINDOWS = ("global", "local-m", "local-p")


def luong_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    method: str = "dot",
    weight: Tensor | tuple[Tensor, Tensor] | None = None,
    window: str = "global",
    D: int = 10,
    positions: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = False,
) -> Any:
    r"""Attend as Luong, Pham and Manning 2015 (https://arxiv.org/abs/1508.04025).

    ============ ======================================== ============================
    ``method``   score of query i and key j               ``weight``
    ============ ======================================== ============================
    ``dot``      :math:`q_i \cdot k_j`                    None; Dq = Dk
    ``general``  :math:`q_i^T W k_j`                      W [Dq, Dk]
    ``concat``   :math:`v^T \tanh(W [q_i; k_j])`          (W [A, Dq + Dk], v [A])
    ============ ======================================== ============================

    ============ ==========================================================================
    ``window``   which keys a query can see
    ============ ==========================================================================
    ``global``   all
    ``local-m``  keys with abs(j - p_i) <= D; p_i is ``positions``, i unless given
    ``local-p``  the same, with a predicted p_i; after the softmax the weights are multiplied by
                 exp(-(j - p_i)^2 / (2 s^2)), s = D / 2, and not normalised again
    ============ ==========================================================================

    Scores outside a local window are not computed, except within the blocks at its edges.

    Args:
        query: [B, Tq, Dq], float32, float64, bfloat16 or float16.
        key: [B, Tk, Dk], of query's dtype and device.
        value: [B, Tk, Dv], of query's dtype and device.
        method, weight, window: see above.
        D: half the width of a local window, a positive integer.
        positions: broadcastable to [B, Tq]: real numbers on the axis of the keys, in the paper
            Tk * sigmoid(...). Differentiable in ``local-p``, where it must be given.
        key_padding_mask: [B, Tk] bool, True is ignored.
        dropout_p: the probability of dropping a weight; pass 0 in evaluation.
        need_weights: also return the weights, [B, Tq, Tk], 0 outside a window.

    Returns:
        ``out`` [B, Tq, Dv], or ``(out, weights)``. A query with an empty window has out 0. A query
        whose position is NaN has NaN, and so have the gradients of all keys that it may have seen.

    Raises:
        TypeError, ValueError: an unknown ``method`` or ``window``, a ``weight`` or ``positions``
            that does not match them, ``D`` that is not a positive integer, and all errors of the
            underlying operators.

    Examples:
        >>> import torch
        >>> from fastattn import luong_attention
        >>> x = torch.ones(2, 30, 8)
        >>> luong_attention(x, x, x, window="local-m", D=2, need_weights=True)[1][0, 10, 7:14]
        tensor([0.0000, 0.2000, 0.2000, 0.2000, 0.2000, 0.2000, 0.0000])
    """
    tensors = (query, key, value, weight, positions, key_padding_mask)
    signature, plan = None, None
    if positions is not None:
        signature, plan = plans.find(tensors, method, window, D, dropout_p, need_weights)
    if plan is None:
        _check(query, key, value, method, window, D, positions, key_padding_mask)
    query, key, v = _project(query, key, method, weight)
    if window == "global" or (window == "local-m" and positions is None and v is None):
        width = None if window == "global" else (D, D)
        return _attend(query, key, value, v, key_padding_mask, dropout_p, need_weights, width)
    batch, queries, keys = *query.shape[:2], key.shape[1]
    if positions is None:
        positions = torch.arange(queries, device=query.device)
    p = positions.to(torch.promote_types(query.dtype, torch.float32)).expand(batch, queries)
    # No GPU kernel reads windows in place, so GPUs run attention over copies of the windows.
    if v is None and query.is_cpu:
        center, has_bell = (p, True) if window == "local-p" else (p.detach(), False)
        if plan is None:
            query, key, value = checks.autocast(query, key, value)
            checks.check_dtypes(_NAME, query, key, value)
            options = LocalOptions(reach=D, bell=has_bell)
            drop_p = checks.check_dropout(_NAME, dropout_p)
        else:
            options, drop_p = plan.options, dropout_p
        factor = None
        if drop_p > 0:
            ones = p.new_ones(batch, queries, options.window_size(keys))
            factor = torch.nn.functional.dropout(ones, drop_p)
        call = (query, key, value, center, key_padding_mask, factor)
        if plan is None:
            plan = plans.keep(signature, local_attention, (*call, options), (), tensors)
            out, weights = local_attention(*call, options) if plan is None else plan.all(call)
        elif need_weights:
            out, weights = plan.all(call)
        else:
            out = plan.first(call)
        if not need_weights:
            return out
        valid, index, bell = _find_windows(p, keys, D, window)
        weights = weights if factor is None else weights * factor
    else:
        valid, index, bell = _find_windows(p, keys, D, window)
        row = index + keys * torch.arange(batch, device=query.device)[:, None, None]
        if key_padding_mask is not None and keys > 0:
            valid = valid & ~_select_rows(key_padding_mask, row)
        out, weights = _attend_copy(query, key, value, v, row, valid, bell, dropout_p, need_weights)
        if positions.is_floating_point():
            out, weights = _add_nan(out, weights, p, key_padding_mask, query, key, value, v, window)
        if not need_weights:
            return out
    weights = (weights if bell is None else weights * bell).to(out.dtype)
    if keys == 0:
        return out, out.new_zeros((batch, queries, keys))
    full_weights = out.new_zeros((batch, queries, keys))
    full_weights = full_weights.scatter_add(2, index, torch.where(valid, weights, 0.0))
    # All keys may be in the window of a query at NaN.
    is_nan = p.detach().isnan()[..., None]
    if key_padding_mask is not None:
        is_nan = is_nan & ~key_padding_mask[:, None]
    return out, torch.where(is_nan, weights.sum(2, keepdim=True), full_weights)


def _find_windows(
    p: Tensor, keys: int, D: int, window: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return which of the W keys of each window are valid, their indices, and the bell or None.

    All are [B, Tq, W]; the index of a key that is not valid is 0.
    """
    first_key = torch.ceil(p.detach() - D).clamp(0, keys).long()[..., None]
    j = first_key + torch.arange(LocalOptions(reach=D).window_size(keys), device=p.device)
    valid = (j >= 0) & (j < keys) & (j <= p.detach()[..., None] + D)
    # A position that is not finite has no finite distance from any key.
    distance = torch.where(valid, j - p[..., None], 0.0)
    bell = torch.exp(-2 * (distance / D) ** 2) if window == "local-p" else None
    return valid, torch.where(valid, j, 0), bell


def _attend_copy(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    v: Tensor | None,
    row: Tensor,  # [B, Tq, W], the rows of the keys, counted through the batch
    valid: Tensor,  # [B, Tq, W] bool
    bell: Tensor | None,  # [B, Tq, W]
    dropout_p: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Attend to copies of the windows, where each query is its own sequence.

    Return the result, and the weights before the bell, which are empty if not needed.
    """
    batch, queries = query.shape[:2]
    if key.shape[1] == 0:
        return query.new_zeros((batch, queries, value.shape[2])), query.new_zeros(row.shape)
    keys, values = _select_rows(key, row), _select_rows(value, row)  # [B, Tq, W, ...]
    if bell is not None:
        # (weight * bell) * value = weight * (bell * value)
        values = values * bell.to(values.dtype)[..., None]
    result = _attend(
        query.flatten(0, 1).unsqueeze(1),
        keys.flatten(0, 1),
        values.flatten(0, 1),
        v,
        ~valid.flatten(0, 1),
        dropout_p,
        need_weights,
        window=None,
    )
    out, weights = result if need_weights else (result, result.new_empty(0))
    out = out.view(batch, queries, value.shape[2])
    return out, weights.view(row.shape) if need_weights else weights


def _add_nan(
    out: Tensor,
    weights: Tensor,
    position: Tensor,
    padding: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    v: Tensor | None,
    window: str,
) -> tuple[Tensor, Tensor]:
    """Set the results of :func:`_attend_copy` to NaN for queries at NaN, as the kernels do."""
    score_inputs = () if v is None else (v.sum(),)
    bell_inputs = (position,) if window == "local-p" else ()
    out_nan = nan_where_lost(position, padding, query, (key, value), *score_inputs, *bell_inputs)
    weights_nan = nan_where_lost(position, padding, query, (key,), *score_inputs)
    return out + out_nan.to(out.dtype), weights if weights.ndim == 1 else weights + weights_nan.to(
        weights.dtype
    )


def _select_rows(x: Tensor, row: Tensor) -> Tensor:
    """Return the given rows of x [B, Tk, ...], counted through the batch."""
    return x.flatten(0, 1).index_select(0, row.flatten()).view(*row.shape, *x.shape[2:])


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    v: Tensor | None,
    padding: Tensor | None,
    dropout_p: float,
    need_weights: bool,
    window: tuple[int, int] | None,
) -> Any:
    """Run additive attention if v is given, else dot-product attention."""
    if v is not None:
        return additive_attention(
            query,
            key,
            value,
            v,
            key_padding_mask=padding,
            dropout_p=dropout_p,
            need_weights=need_weights,
        )
    result = scaled_dot_product_attention(
        query[:, None],
        key[:, None],
        value[:, None],
        None if padding is None else ~padding[:, None, None],
        dropout_p,
        scale=1.0,
        window=window,
        need_weights=need_weights,
    )
    return tuple(x[:, 0] for x in result) if need_weights else result[:, 0]


def _project(
    query: Tensor, key: Tensor, method: str, weight: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return query, key and v, whose dot product, or additive score with v, is the score."""
    q, k = query.shape[2], key.shape[2]
    if method == "dot":
        if weight is not None:
            raise ValueError(f"{_NAME}: weight must be None with method='dot'")
        if q != k:
            raise ValueError(
                f"{_NAME}: method='dot' needs a query and a key of one width, got {q} and {k}"
            )
        return query, key, None
    if method == "general":
        if not isinstance(weight, Tensor):
            raise TypeError(
                f"{_NAME}: weight must be a Tensor [Dq, Dk] with method='general', "
                f"got {type(weight).__name__}"
            )
        if weight.shape != (q, k):
            raise ValueError(
                f"{_NAME}: weight must be [Dq, Dk] = {(q, k)}, got {tuple(weight.shape)}"
            )
        checks.check_same_device(f"{_NAME}: weight", weight, "query", query)
        return query @ weight, key, None
    is_pair = isinstance(weight, (tuple, list)) and len(weight) == 2
    if not is_pair or not all(isinstance(x, Tensor) for x in weight):
        raise TypeError(f"{_NAME}: weight must be (W [A, Dq + Dk], v [A]) with method='concat'")
    matrix, v = weight
    if matrix.ndim != 2 or matrix.shape[1] != q + k or v.shape != matrix.shape[:1]:
        raise ValueError(
            f"{_NAME}: weight must be (W [A, Dq + Dk = {q + k}], v [A]), "
            f"got {tuple(matrix.shape)} and {tuple(v.shape)}"
        )
    for x in weight:
        checks.check_same_device(f"{_NAME}: weight", x, "query", query)
    # W [q; k] = W_q q + W_k k
    return query @ matrix[:, :q].mT, key @ matrix[:, q:].mT, v


def _check(
    query: Any,
    key: Any,
    value: Any,
    method: Any,
    window: Any,
    width: Any,
    positions: Any,
    padding: Any,
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        checks.check_dense(_NAME, **{name: x})
        if x.ndim != 3:
            raise ValueError(f"{_NAME}: {name} must have 3 dimensions, got shape {tuple(x.shape)}")
        checks.check_same_device(f"{_NAME}: {name}", x, "query", query)
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        raise ValueError(
            f"{_NAME}: query, key and value must be [B, Tq, Dq], [B, Tk, Dk] and [B, Tk, Dv], got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    checks.check_choice(f"{_NAME}: method", method, METHODS)
    checks.check_choice(f"{_NAME}: window", window, WINDOWS)
    checks.check_int(f"{_NAME}: D", width, "an integer")
    if width < 1:
        raise ValueError(f"{_NAME}: D must be positive, got {width}")
    checks.check_int64(f"{_NAME}: D", width)
    if padding is not None:
        if not isinstance(padding, Tensor) or padding.dtype != torch.bool:
            raise TypeError(f"{_NAME}: key_padding_mask must be a Tensor of dtype torch.bool")
        checks.check_same_device(f"{_NAME}: key_padding_mask", padding, "query", query)
        if padding.shape != key.shape[:2]:
            raise ValueError(
                f"{_NAME}: key_padding_mask must be [B, Tk] = {tuple(key.shape[:2])}, "
                f"got {tuple(padding.shape)}"
            )
    if positions is None:
        if window == "local-p":
            raise ValueError(f"{_NAME}: window='local-p' needs positions")
        return
    if window == "global":
        raise ValueError(f"{_NAME}: positions need a local window, got window='global'")
    if not isinstance(positions, Tensor) or positions.is_complex():
        raise TypeError(f"{_NAME}: positions must be a real Tensor")
    checks.check_same_device(f"{_NAME}: positions", positions, "query", query)
    shape = query.shape[:2]
    if not checks.expands_to(positions.shape, shape):
        raise ValueError(
            f"{_NAME}: positions must be broadcastable to [B, Tq] = {tuple(shape)}, "
            f"got {tuple(positions.shape)}"
        )


# --- the operator -----------------------------------------------------------------------------


def _count_pairs(query: Tensor, key: Tensor, *others: Any) -> int:
    """Count the pairs of whole windows, because the existing keys depend on the positions."""
    *_, options = others
    return query.shape[0] * query.shape[1] * min(2 * options.reach + 1, key.shape[1])


local_attention = Operator(
    "local_attention",
    "query: B Lq D; key: B Lk D; value: B Lk Dv; positions: B Lq; padding?: B Lk; factor?: B Lq W",
    "out: B Lq Dv; weights: B Lq W",
    options=LocalOptions,
    sizes=lambda options, known: {"W": options.window_size(known["Lk"])},
    derivative=Derivative(
        grads="out weights",
        reads="query key value positions padding factor weights",
        gives="query key value positions",
        options=LocalOptions,
    ),
    flops=flops_of_pairs(_count_pairs),
    opaque=("factor",),
    checked_by=("cpu",),
)
