"""Memory hops: the specification of ``memory_hop_attention``, and its validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import checks
from fastattn._derivative import Derivative
from fastattn._flops import attention_flops, product_flops
from fastattn.backends.primitives import MemoryHopBackwardOptions, MemoryHopOptions
from fastattn.batching import fold, one_by_one, size_of_batch, unfold
from fastattn.call import Plan, Plans, with_arguments_of
from fastattn.checks import shape_of
from fastattn.compat import runs_eagerly
from fastattn.library import Operator

_NAME = "memory_hop_attention"
plans = Plans()
_ACTIVATIONS = ("none", "relu", "tanh", "sigmoid")
_NORMALIZATIONS = ("softmax", "none")
_MAX_HOPS = 65536  # sizes in bytes must fit 64 bits


def memory_hop_attention(
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None = None,
    *,
    hops: int = 1,
    hop_proj: Tensor | None = None,
    memory_mask: Tensor | None = None,
    memory_bias: Tensor | None = None,
    activation: str | None = None,
    normalize: str = "softmax",
    scale: float = 1.0,
    need_weights: bool = False,
) -> Any:
    r"""Read a memory ``hops`` times in one call; each hop's result updates the query of the next.

    .. math::
        p_k = softmax(scale \cdot M_k u_k + b_k), \quad o_k = C_k^T p_k, \quad
        u_{k+1} = \phi(H_k u_k + o_k), \qquad k = 1 \ldots K

    u_1 is the query and u_{K+1} the result (End-To-End Memory Networks, Sukhbaatar et al. 2015,
    https://arxiv.org/abs/1503.08895). M_k [N, D] is the input memory of hop k, which a query is
    compared with; C_k [N, D] is its output memory, which is read. Both have one row per stored
    item, such as a sentence.

    Args:
        query: [B, D], or [B, Q, D] for several queries on each memory; float32, float64, bfloat16
            or float16, any strides; sizes may be 0. 16-bit inputs use float32, and every u_k
            within the call stays float32.
        in_memory: [B, N, D], the same for all hops, or [B, K, N, D], one per hop. B may be 1: all
            queries share one memory, which is read once for all of them and whose gradient is
            summed in place. The same holds if the batch dimension is expanded (stride 0).
        out_memory: as ``in_memory``; the two shapes may differ. None: a 4-D ``in_memory`` is
            a stack of K + 1 memories in which each is the output of one hop and the input of the
            next, M_{k+1} = C_k (the paper's adjacent tying); a 3-D one is both input and output of
            every hop.
        hops: K, 1 to 65536.
        hop_proj: H, [D, D] for all hops or [K, D, D]. As with the weight of ``nn.Linear``, H u is
            ``u @ H.T``. None is the identity.
        memory_mask: bool, True takes part. [N], [B, N], [B, Q, N] (for a 3-D query), or, for each
            hop, [B, K, N] ([B, Q, K, N]); every size may be 1 instead. NaN or inf in a row that no
            query can see never affects the result.
        memory_bias: b, in one of the shapes of ``memory_mask``; floating, of query's dtype or
            float32. -inf excludes as the mask does.
        activation: phi, one of "relu", "tanh", "sigmoid"; None is the identity.
        normalize: "softmax", or "none": p = scale M u + b itself, the paper's linear start.
        scale: multiplies the dot products.
        need_weights: also return the p_k.

    Returns:
        u_{K+1} in the shape and dtype of ``query``; with ``need_weights`` a pair of it and the
        weights, [B, K, N] ([B, Q, K, N]). Both are differentiable any number of times; derivatives
        beyond the first, and forward mode, go through the reference backend. A fully masked query
        has p = 0 and o = 0, and passes no gradient to the memory.

    Under autocast, query, memories and hop_proj are cast as PyTorch casts them for attention.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes or devices that do not match, or invalid values.

    Examples:
        >>> import torch
        >>> from fastattn import memory_hop_attention
        >>> memory = torch.eye(3).expand(2, 3, 3)
        >>> query = torch.tensor([[100.0, 0.0, 0.0], [0.0, 100.0, 0.0]])
        >>> memory_hop_attention(query, memory, hops=2).round()
        tensor([[102.,   0.,   0.],
                [  0., 102.,   0.]])
        >>> u, weights = memory_hop_attention(query, memory, hops=2, need_weights=True)
        >>> weights.shape
        torch.Size([2, 2, 3])
    """
    tensors = (query, in_memory, out_memory, hop_proj, memory_mask, memory_bias)
    options = (hops, activation, normalize, scale, need_weights)
    signature, plan = plans.find(tensors, *options)
    if plan is not None:
        try:
            return _run_plan(plan, tensors, need_weights)
        except ValueError:  # the complete path, see fastattn.call, raises a better message
            pass
    biases = (hop_proj, memory_mask, memory_bias)
    operator, call = prepare(query, in_memory, out_memory, hops, *biases, *options[1:])
    plan = plans.keep(signature, operator, call, tensors)
    out, _, _, weights = operator(*call) if plan is None else plan.all(call[:-1], call[-1])
    if query.shape[-1] == 0:
        out = out[..., :0]
    return (out, weights) if need_weights else out


def _run_plan(plan: Plan, tensors: tuple[Any, ...], need_weights: bool) -> Any:
    """Run a call by its plan; return what :func:`memory_hop_attention` returns."""
    if plan.viewed:
        query, *memories, hop_proj, mask, bias = tensors
        memories = [x if x is None else share(x) for x in memories]
        if bias is not None and bias.requires_grad:
            bias = to_four_dimensions(bias, query)
        tensors = (query, *memories, hop_proj, mask, bias)
    if not need_weights:
        return plan.first(tensors)
    u, _, _, weights = plan.all(tensors)
    return u, weights


def _validate(args: Any) -> tuple[Operator, tuple[Any, ...]]:
    """Validate the named arguments; return the operator and its arguments."""
    query, in_memory, out_memory, hops, hop_proj, memory_mask, memory_bias, *options = args
    activation, normalize, scale, need_weights = options
    activation = "none" if activation is None else activation
    _check_options(hops, activation, normalize, scale, need_weights)
    query, in_memory = _check_and_cast("query", query), _check_and_cast("in_memory", in_memory)
    out_memory = None if out_memory is None else _check_and_cast("out_memory", out_memory)
    hop_proj = None if hop_proj is None else _check_and_cast("hop_proj", hop_proj)
    checks.check_floating(f"{_NAME}: query", query)
    if query.ndim not in (2, 3):
        raise ValueError(f"{_NAME}: query must be [B, D] or [B, Q, D], got shape {shape_of(query)}")
    memories = hops + 1 if out_memory is None else hops
    _check_memory("in_memory", in_memory, query, memories, "hops + 1" if out_memory is None else "")
    if out_memory is not None:
        _check_memory("out_memory", out_memory, query, hops)
        if out_memory.shape[-2] != in_memory.shape[-2]:
            raise ValueError(
                f"{_NAME}: in_memory and out_memory must have the same number of rows, got shapes "
                f"{shape_of(in_memory)} and {shape_of(out_memory)}"
            )
    if hop_proj is not None:
        _check_projection(hop_proj, query, hops)
    rows = in_memory.shape[-2]
    if memory_mask is not None:
        memory_mask = _check_hop_mask("memory_mask", memory_mask, query, hops, rows)
    if memory_bias is not None:
        memory_bias = _check_hop_mask("memory_bias", memory_bias, query, hops, rows)

    in_memory = share(in_memory)
    out_memory = None if out_memory is None else share(out_memory)
    if query.shape[-1] == 0:  # only the bias remains: a column of zeros adds 0 to the scores
        pad = torch.nn.functional.pad
        query, in_memory = pad(query, (0, 1)), pad(in_memory, (0, 1))
        out_memory = None if out_memory is None else pad(out_memory, (0, 1))
        hop_proj = None
    scale = checks.as_double(f"{_NAME}: scale", scale)
    record = MemoryHopOptions(hops, activation, normalize, scale, need_weights)
    tensors = (query, in_memory, out_memory, hop_proj, memory_mask, memory_bias)
    return hop_attention, (*tensors, record)


prepare = with_arguments_of(memory_hop_attention, _validate)


# --- validation ------------------------------------------------------------------------------


def _check_options(
    hops: Any, activation: Any, normalize: Any, scale: Any, need_weights: Any
) -> None:
    checks.check_int(f"{_NAME}: hops", hops)
    if hops < 1:
        raise ValueError(f"{_NAME}: hops must be at least 1, got {hops}")
    if hops > _MAX_HOPS:
        raise ValueError(f"{_NAME}: hops must be at most {_MAX_HOPS}, got {hops}")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{_NAME}: activation must be None, 'relu', 'tanh' or 'sigmoid', got {activation!r}"
        )
    if normalize not in _NORMALIZATIONS:
        raise ValueError(f"{_NAME}: normalize must be 'softmax' or 'none', got {normalize!r}")
    checks.check_number(f"{_NAME}: scale", scale)
    checks.check_bool(f"{_NAME}: need_weights", need_weights)


def _check_and_cast(name: str, x: Tensor) -> Tensor:
    """Check that a tensor is dense; return it as autocast casts it."""
    checks.check_dense(_NAME, **{name: x})
    return checks.autocast(x)[0]


def _check_memory(name: str, memory: Tensor, query: Tensor, hops: int, what: str = "") -> None:
    checks.check_alike(f"{_NAME}: {name}", memory, "query", query)
    if memory.ndim not in (3, 4):
        raise ValueError(
            f"{_NAME}: {name} must be [B, N, D] or [B, K, N, D], got shape {shape_of(memory)}"
        )
    if memory.ndim == 4 and memory.shape[1] != hops:
        stack = f" = {what} (a stack, since out_memory is None)" if what else " = hops"
        raise ValueError(
            f"{_NAME}: a 4-D {name} must hold {hops}{stack} memories in dimension 1, "
            f"got shape {shape_of(memory)}"
        )
    if memory.shape[0] != query.shape[0] and memory.shape[0] != 1:
        raise ValueError(
            f"{_NAME}: {name} must have the batch size of query, {query.shape[0]}, or 1, "
            f"got shape {shape_of(memory)}"
        )
    if memory.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{_NAME}: {name} must have the last dimension of query, {query.shape[-1]}, "
            f"got shape {shape_of(memory)}"
        )


def _check_projection(hop_proj: Tensor, query: Tensor, hops: int) -> None:
    checks.check_alike(f"{_NAME}: hop_proj", hop_proj, "query", query)
    width = query.shape[-1]
    square = hop_proj.ndim in (2, 3) and hop_proj.shape[-1] == hop_proj.shape[-2] == width
    if not square or (hop_proj.ndim == 3 and hop_proj.shape[0] != hops):
        raise ValueError(
            f"{_NAME}: hop_proj must be [D, D] = {(width, width)} or [K, D, D] = "
            f"{(hops, width, width)}, got shape {shape_of(hop_proj)}"
        )


def _check_hop_mask(name: str, x: Tensor, query: Tensor, hops: int, rows: int) -> Tensor:
    """Check ``memory_mask`` or ``memory_bias``; return it as [B|1, Q|1, K|1, N|1]."""
    checks.check_dense(_NAME, **{name: x})
    if name == "memory_mask":
        if x.dtype != torch.bool:
            raise TypeError(f"{_NAME}: memory_mask must be bool, got {x.dtype}")
    else:
        x = checks.autocast_bias(x)
        if x.dtype not in (query.dtype, torch.float32):
            raise TypeError(
                f"{_NAME}: memory_bias must be of query's dtype {query.dtype} or float32, "
                f"got {x.dtype}"
            )
    checks.check_same_device(f"{_NAME}: {name}", x, "query", query)
    batch = tuple(query.shape[:-1])  # [B] or [B, Q]
    original = x
    if 1 <= x.ndim <= len(batch) + 2:
        x = to_four_dimensions(x, query)
    full = (*batch, hops, rows) if len(batch) == 2 else (*batch, 1, hops, rows)
    if x.ndim != 4 or original.ndim > len(batch) + 2 or not checks.expands_to(x.shape, full):
        allowed = "[N], [B, N] or [B, K, N]"
        if len(batch) == 2:
            allowed = "[N], [B, N], [B, Q, N] or [B, Q, K, N]"
        sizes = ", ".join(f"{n} = {size}" for n, size in _sizes(batch, hops, rows))
        raise ValueError(
            f"{_NAME}: {name} must be {allowed} with {sizes} (or 1 for any of them), "
            f"got shape {shape_of(original)}"
        )
    return x


def _sizes(batch: Sequence[int], hops: int, rows: int) -> list[tuple[str, int]]:
    return [*zip("BQ", batch), ("K", hops), ("N", rows)]  # noqa: B905  (see checks.expands_to)


# --- memories that the batch shares -------------------------------------------------------------


class _UndoExpand(torch.autograd.Function):
    """Undo the expansion of a memory over its batch: [B, ...] with stride 0 -> [1, ...].

    The backward of ``expand()`` sums over the batch, so each of the B entries receives grad / B, as
    an expanded tensor that is not stored B times.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.batch = x.shape[0]
        return x[:1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad / ctx.batch).expand(ctx.batch, *grad.shape[1:])


def share(memory: Tensor) -> Tensor:
    """Undo a memory's expansion over its batch, unless a tracer, mode or transform is active."""
    if memory.shape[0] <= 1 or memory.stride(0) != 0 or not runs_eagerly(memory):
        return memory
    if memory.requires_grad and torch.is_grad_enabled():
        return _UndoExpand.apply(memory)
    return memory[:1]


# --- the operator -----------------------------------------------------------------------------


def _vmap_backward(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Fold the mapped dimension into the batch. Examples run one by one if a tensor that the batch
    shares needs a gradient for each, or if a memory without a batch would be repeated."""
    *tensors, options, backend = args
    n, needed = info.batch_size, options.needed
    _, _, query, in_memory, out_memory, hop_proj, _, bias, *_ = tensors
    batch = size_of_batch(query, in_dims[2])
    # Of each memory and the bias: the bit of its gradient in `needed`, and its place in `tensors`.
    folds_well = [
        x is None or (needed >> bit & 1 and size_of_batch(x, in_dims[place]) == batch)
        for bit, place, x in ((1, 3, in_memory), (2, 4, out_memory), (4, 7, bias))
    ]
    if hop_proj is not None or not all(folds_well):
        return one_by_one(hop_attention.backward, n, in_dims, args)
    folded = [fold(x, dim, n, batch) for x, dim in zip(tensors, in_dims, strict=True)]
    results = hop_attention.backward.dispatched(*folded, options, backend)
    inputs = (query, in_memory, out_memory, hop_proj, bias)
    pairs = zip(results, inputs, strict=True)
    return tuple(g.expand(n, 0) if x is None else unfold(g, n) for g, x in pairs), (0,) * 5


def _count_products(
    query: Tensor, in_memory: Tensor, hop_proj: Tensor | None, options: MemoryHopOptions
) -> tuple[int, int]:
    """Count the multiplications with the rows of one memory in each hop, and with ``hop_proj``."""
    states = query.numel() * options.hops  # [B, Q, K, D]
    return states * in_memory.shape[-2], 0 if hop_proj is None else states * query.shape[-1]


def _flops(
    _: Any,
    query: Tensor,
    in_memory: Tensor,
    out_memory: Any,
    hop_proj: Tensor | None,
    *others: Any,
    backward: bool = False,
) -> int:
    *_, options = others
    row_products, projection_products = _count_products(query, in_memory, hop_proj, options)
    projection_flops = product_flops(projection_products, backward=backward)
    return attention_flops(row_products, 1, 1, backward=backward) + projection_flops


class _Backward(Operator):
    def lifted(self, tensors: Sequence[Any]) -> list[Any]:
        """Add the dimensions that masks and biases of a plan may lack."""
        results = list(tensors)
        query = results[self.place_of("query")]
        for n in (self.place_of("memory_mask"), self.place_of("memory_bias")):
            if results[n] is not None:
                results[n] = to_four_dimensions(results[n], query)
        return results


def to_four_dimensions(x: Tensor, query: Tensor) -> Tensor:
    """Return a mask or a bias as [B|1, Q|1, K|1, N|1]."""
    if x.dim() == 4:
        return x
    if x.dim() == 3:
        return x.unsqueeze(2 if query.dim() == 3 else 1)
    return x[:, None, None] if x.dim() == 2 else x[None, None, None]


hop_attention = Operator(
    "memory_hop_attention",
    "query: B D / B Q D; in_memory: B|1 N D / B|1 * N D; out_memory?: B|1 N D / B|1 * N D; "
    "hop_proj?: D D / * D D; memory_mask?: B|1 Q|1 *|1 N|1; memory_bias?: B|1 Q|1 *|1 N|1",
    "out: B D / B Q D; trace: B * D / B Q * D; stats: B K 2 / B Q K 2; weights: B K N / B Q K N",
    options=MemoryHopOptions,
    sizes=lambda options, known: {"K": options.hops, "*": 2 * options.hops + 1, "2": 2},
    derivative=Derivative(
        grads="out weights",
        # Not the weights, so that the saved tensors do not grow with the memory.
        reads="query in_memory out_memory hop_proj memory_mask memory_bias trace stats",
        gives="query in_memory out_memory hop_proj memory_bias",
        options=MemoryHopBackwardOptions,
        vmap=_vmap_backward,
        operator=_Backward,
        keeps="kept",
    ),
    flops=_flops,
    checked_by=("cpu",),
)
