"""Hopfield retrieval: the specification of ``hopfield_retrieve``, and its validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import checks, compat
from fastattn._derivative import Derivative
from fastattn._flops import attention_flops, values
from fastattn._gradient import in_one_node
from fastattn._seed import draw_seed
from fastattn.backends.primitives import HopfieldBackwardOptions, HopfieldOptions
from fastattn.call import Plan, Plans, only_viewed, plan_of, with_arguments_of
from fastattn.checks import shape_of
from fastattn.compat import any_requires_grad
from fastattn.library import Operator
from fastattn.ops import sdpa
from fastattn.ops._disentangled import NO_TERMS
from fastattn.ops.memory_hops import share
from fastattn.ops.sdpa import attention

_NAME = "hopfield_retrieve"
plans = Plans(rows=3)
_STOPS = ("query", "head")
_GRADS = ("unroll", "implicit", "one_step")
_SHAPES = {2: "[L, D]", 3: "[B, L, D]", 4: "[B, H, L, D]"}


def hopfield_retrieve(
    state: Tensor,
    stored: Tensor,
    projection: Tensor | None = None,
    *,
    beta: float | Tensor | None = None,
    update_steps_max: int | None = None,
    update_steps_eps: float = 1e-4,
    stop: str = "query",
    grad: str = "unroll",
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = False,
    need_steps: bool = False,
) -> Any:
    r"""Retrieve stored patterns: repeat attention until each query converges.

    .. math:: \xi \leftarrow X^T softmax(\beta X \xi), \qquad out = V^T softmax(\beta X \xi)

    (Hopfield Networks is All You Need, Ramsauer et al. 2021, https://arxiv.org/abs/2008.02217.)
    :math:`\xi` starts as a row of ``state``, the rows of X are the ``stored`` patterns, and the
    rows of V their ``projection``. A query takes at most ``update_steps_max`` steps. It *rests*
    (has converged) after a step not longer than ``update_steps_eps`` in the Euclidean norm, or not
    longer than the rounding error. One more attention then reads the result, so
    ``update_steps_max=0`` is ordinary attention.

    Args:
        state: [B, H, L, D], [B, L, D] or [L, D]; float32, float64, bfloat16 or float16. 16-bit
            inputs are computed in float32, and all states within the call stay in float32.
        stored: [B, H, N, D], with as many dimensions as ``state``. B may be 1: the whole batch then
            shares these patterns and is computed together.
        projection: [B, H, N, Dv], B may be 1; None is ``stored``.
        beta: positive; a tensor [] or [H] is differentiable. None is 1 / sqrt(D).
        update_steps_max: None: until every query rests.
        update_steps_eps: not negative.
        stop: "query": each query stops on its own, so its result never depends on other queries.
            "head": the queries of a head stop together, once the norm over all of their steps is
            at most eps.
        grad: how to differentiate the final state.

            * "unroll": through the steps taken. Backward recomputes them, unless there are at most
              four, and stores a row of D numbers for every step.
            * "implicit": through the fixed point :math:`\xi = X^T softmax(\beta X \xi)`, by
              conjugate gradients; the same memory for any number of steps, and no gradient for
              ``state``. A query that does not rest, or not at a strict minimum of the energy, is
              unrolled.
            * "one_step": through the last step only (Bolte et al. 2023,
              https://arxiv.org/abs/2305.13768); no gradient for ``state``.
        attn_mask: broadcastable to the scores [B, H, L, N]. bool: True takes part; floating: added
            to the scores, of the dtype of ``state`` or float32, differentiable. It applies to every
            step.
        dropout_p: the probability of dropping a weight in the final reading, not in the steps.
        need_weights: also return the weights of the final reading, [B, H, L, N].
        need_steps: also return how many steps each query took, int64 [B, H, L].

    Returns:
        ``out`` [B, H, L, Dv], or a tuple of it and the requested extras. All but the steps are
        differentiable, any number of times: derivatives beyond the first go through the reference
        backend. A fully masked row has out = 0.

    Under autocast, state, stored and projection are cast as PyTorch casts query, key and value.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes or devices that do not match, or invalid values.

    Examples:
        >>> import torch
        >>> from fastattn import hopfield_retrieve
        >>> stored = torch.tensor([[1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0]])
        >>> half = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
        >>> out, steps = hopfield_retrieve(half, stored, beta=4.0, need_steps=True)
        >>> out.round(), steps
        (tensor([[ 1.,  1., -1., -1.]]), tensor([3]))
    """
    tensors = (state, stored, projection, attn_mask)
    limits = (update_steps_max, update_steps_eps, stop, grad)
    signature, plan = plans.find(tensors, beta, *limits, dropout_p, need_weights, need_steps)
    if plan is not None and not _is_expanded(stored):
        steps_plan, reading_plan = plan
        return _run_plan(steps_plan, reading_plan, tensors, need_weights, need_steps)
    options = (beta, *limits, attn_mask, dropout_p, need_weights, need_steps)
    call: _Call = validate_call(state, stored, projection, *options)
    xi, steps_taken = call.state, None
    if update_steps_max != 0:
        arguments, restore = prepare_steps(call)
        if signature is not None and not (arguments[-1].crowded or _is_expanded(stored)):
            _, reading = _reading(call, dropout_p, need_weights)
            plan = _keep_plan(signature, tensors, arguments, reading)
            if plan is not None:
                return _run_plan(*plan, tensors, need_weights, need_steps)
        xi, steps_taken, _ = hopfield_states(*arguments)
        xi, steps_taken = restore(xi)[..., : call.state.shape[-1]], restore(steps_taken)
    elif need_steps:
        steps_taken = torch.zeros(xi.shape[:-1], dtype=torch.int64, device=xi.device)
    result = sdpa.scaled_dot_product_attention(
        *call.attention_operands(xi), dropout_p, scale=call.scale, need_weights=need_weights
    )
    return _public_results(result, steps_taken if need_steps else None, state.ndim)


def _keep_plan(
    signature: bytes,
    tensors: tuple[Any, ...],
    steps: tuple[Any, ...],  # the arguments of the operator of the steps
    reading: tuple[Any, ...],  # the arguments of the attention that reads the patterns at the end
) -> tuple[Plan, Plan] | None:
    """Keep the plans of both operators under the signature of the call, and return them.

    Return None if one operator has no plan, or if tensors of the caller were cast, scaled or
    padded, so that the operators do not read them.
    """
    state, stored, projection, mask = tensors
    originals = (state, stored, stored if projection is None else projection, mask)
    if not only_viewed(reading[:4], originals):
        return None
    steps_plan = plan_of(hopfield_states, steps, any_requires_grad(state, stored, mask))
    reading_plan = plan_of(attention, reading, any_requires_grad(*tensors))
    if steps_plan is None or reading_plan is None:
        return None
    plans.set(signature, (steps_plan, reading_plan))
    return steps_plan, reading_plan


def _run_plan(
    steps_plan: Plan,
    reading_plan: Plan,
    tensors: tuple[Any, ...],  # state, stored, projection, mask
    need_weights: bool,
    need_steps: bool,
) -> Any:
    """Run a call by the plans of its steps and of its final reading."""
    state, stored, projection, mask = tensors
    rank = state.dim()
    if rank < 4:
        state, stored = lift(state), lift(stored)
        projection = None if projection is None else lift(projection)
    biases: tuple[Tensor | None, Tensor | None] = None, None
    if mask is not None:
        mask = lift(mask[(None,) * (rank - mask.dim())])
        biases = _split_mask(_group_mask(mask, state))
    options = steps_plan.options
    if options.together > 1:
        options = steps_plan.with_option("together", max(state.shape[2], 1))
    steps_tensors, steps_taken = (state, stored, None, *biases), None
    value = stored if projection is None else projection
    # Both operators can share one node of autograd if the reading always runs the same kernel.
    shares_node = not (need_steps or need_weights) and type(reading_plan) is Plan
    if shares_node and steps_plan.requires_grad and torch.is_grad_enabled():
        seed = draw_seed(state.device) if reading_plan.options.dropout_p else None
        # The operands of attention after its query, in order; None for those that are not used.
        reading_tensors = (stored, value, mask, None, seed, None, None, None, None, *NO_TERMS)
        out = _in_one_node(*reading_tensors, *steps_tensors, options, reading_plan.options)
        return lower(out, rank)
    if need_steps:
        xi, steps_taken, _ = steps_plan.all(steps_tensors, options)
    else:
        xi = steps_plan.first(steps_tensors, options)
    result = sdpa.run_plan(
        reading_plan, xi, stored, value, mask, slopes=None, sinks=None, need_weights=need_weights
    )
    return _public_results(result, steps_taken, rank)


def _public_results(result: Any, taken: Tensor | None, rank: int) -> Any:
    """Return the results of :func:`hopfield_retrieve` for a state of ``rank`` dimensions.

    ``result`` is the output, or a tuple of it and the weights; ``taken`` are the numbers of steps,
    negative where a query does not rest, or None.
    """
    results = result if isinstance(result, tuple) else (result,)
    if taken is not None:
        results = (*results, taken.abs())
    if rank < 4:
        results = tuple(lower(x, rank) for x in results)
    return results if len(results) > 1 else results[0]


def _first_operator(args: Any) -> tuple[Operator, tuple[Any, ...]]:
    """Validate; return the operator that runs first and its arguments: without steps, attention."""
    call = _validate(args)
    if call.steps_max != 0:
        return hopfield_states, prepare_steps(call)[0]
    return _reading(call, args.dropout_p, False)


prepare = with_arguments_of(hopfield_retrieve, _first_operator)


def _reading(call: _Call, dropout_p: float, need_weights: bool) -> tuple[Operator, tuple[Any, ...]]:
    """Return the operator of the final reading, which is attention, and its arguments."""
    options = {"scale": call.scale, "need_weights": need_weights}
    return sdpa.prepare(*call.attention_operands(call.state), dropout_p, **options)[:2]


class _Call(NamedTuple):
    """The validated arguments of a call, all in four dimensions."""

    state: Tensor  # [B, H, L, D]
    stored: Tensor  # [B|1, H, N, D]
    keys: Tensor | None  # beta * stored, where beta is a tensor
    projection: Tensor | None  # [B|1, H, N, Dv]
    mask: Tensor | None  # [B|1, H|1, L|1, N|1]
    scale: float
    steps_max: int
    eps: float
    stop: str
    grad: str

    def attention_operands(self, xi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return query, key, value and mask of the final reading with the states ``xi``."""
        key = self.stored if self.keys is None else self.keys
        value = self.stored if self.projection is None else self.projection
        return xi, key, value, self.mask


def _validate(args: Any) -> _Call:
    """Validate the named arguments of a call, and bring them to four dimensions."""
    state, stored, projection, attn_mask = args.state, args.stored, args.projection, args.attn_mask
    steps_max, eps = args.update_steps_max, args.update_steps_eps
    _check_options(steps_max, eps, args.stop, args.grad)
    checks.check_bool(f"{_NAME}: need_weights", args.need_weights)
    checks.check_bool(f"{_NAME}: need_steps", args.need_steps)
    checks.check_dense(_NAME, state=state, stored=stored)
    state, stored = checks.autocast(state, stored)
    check_patterns(_NAME, state, stored)
    if projection is not None:
        checks.check_dense(_NAME, projection=projection)
        (projection,) = checks.autocast(projection)
        _check_projection(projection, stored)
    mask = None if attn_mask is None else lift_mask(_NAME, attn_mask, state, stored)
    scale, factor = check_beta(_NAME, args.beta, state)
    stored = share(lift(stored))
    keys = None
    if factor is not None:
        keys = stored * factor.to(stored.dtype).reshape(1, -1, 1, 1)
    if projection is not None:
        projection = share(lift(projection))
    return _Call(
        lift(state),
        stored,
        keys,
        projection,
        mask,
        scale,
        -1 if steps_max is None else steps_max,
        checks.as_double(f"{_NAME}: update_steps_eps", eps),
        args.stop,
        args.grad,
    )


validate_call = with_arguments_of(hopfield_retrieve, _validate)


def prepare_steps(call: _Call) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of the operator of the steps, and the inverse of its layout.

    The operator works on G groups of Q queries. A group is a head of one batch entry, or of all
    entries if they share the patterns ("crowded"). The inverse restores [B, H, L, ...].
    """
    batch, heads, queries, _ = call.state.shape
    mask, crowded = call.mask, call.stored.shape[0] == 1 != batch

    def group(x: Tensor) -> Tensor:  # [B, H, L, D] -> [G, Q, D]
        return x.transpose(0, 1).flatten(1, 2) if crowded else x.flatten(0, 1)

    def ungroup(x: Tensor) -> Tensor:  # [G, Q, ...] -> [B, H, L, ...]
        if crowded:
            return x.reshape(heads, batch, queries, *x.shape[2:]).transpose(0, 1)
        return x.reshape(batch, heads, *x.shape[1:])

    tensors = [None if x is None else x.flatten(0, 1) for x in (call.stored, call.keys)]
    state = group(call.state)
    if mask is not None:
        if crowded:
            if mask.shape[0] != 1 or mask.shape[2] != 1:
                mask = group(mask.expand(batch, -1, queries, -1))
            else:
                mask = mask[0]
        else:
            mask = _group_mask(mask, call.state)
    if state.shape[-1] == 0:  # only the bias remains: a column of zeros adds 0 to the scores
        pad = torch.nn.functional.pad
        state = pad(state, (0, 1))
        tensors = [None if x is None else pad(x, (0, 1)) for x in tensors]
    if call.stop == "head" and compat.records_trace():
        raise RuntimeError(
            f"{_NAME}: torch.jit.trace would keep the {queries} queries of this call with "
            "stop='head': use torch.export or torch.compile"
        )
    together = max(queries, 1) if call.stop == "head" else 1
    arguments = (
        state,
        *tensors,
        *_split_mask(mask),
        HopfieldOptions(call.scale, call.steps_max, call.eps, together, crowded, call.grad),
    )
    return arguments, ungroup


# --- dimensions --------------------------------------------------------------------------------


def lift(x: Tensor) -> Tensor:
    """[L, D], [B, L, D] or [B, H, L, D] -> [B, H, L, D]."""
    if x.ndim == 4:
        return x
    return x.unsqueeze(1) if x.ndim == 3 else x[(None,) * (4 - x.ndim)]


def lower(x: Tensor, rank: int) -> Tensor:
    """[B, H, L, D] -> as many dimensions as the caller's tensors had; undoes :func:`lift`."""
    if rank == 4:
        return x
    return x[:, 0] if rank == 3 else x[0, 0]


def _group_mask(mask: Tensor, state: Tensor) -> Tensor:
    """Return a mask [B|1, H|1, L|1, N|1] of a state [B, H, L, D] as [B H|1, L|1, N|1]."""
    if mask.shape[0] == mask.shape[1] == 1:
        return mask[0]
    return mask.expand(*state.shape[:2], -1, -1).flatten(0, 1)


def _split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask into the operator's boolean mask and its floating bias; one is None."""
    return (mask, None) if mask is None or mask.dtype is torch.bool else (None, mask)


def _is_expanded(stored: Tensor) -> bool:
    """Whether all batch entries share their patterns, by ``expand``."""
    return stored.shape[0] > 1 and stored.stride()[0] == 0


# --- validation, shared with hopfield_energy ---------------------------------------------------


def check_patterns(where: str, state: Tensor, stored: Tensor) -> None:
    """Check dtype, device and shapes of the state [B, H, L, D] and the patterns [B|1, H, N, D]."""
    checks.check_floating(f"{where}: state", state)
    if state.ndim not in _SHAPES:
        raise ValueError(
            f"{where}: state must be [L, D], [B, L, D] or [B, H, L, D], got {shape_of(state)}"
        )
    checks.check_alike(f"{where}: stored", stored, "state", state)
    batch, heads = lift(state).shape[:2]
    if (
        stored.ndim != state.ndim
        or stored.shape[-1] != state.shape[-1]
        or lift(stored).shape[0] not in (1, batch)
        or lift(stored).shape[1] != heads
    ):
        want = _SHAPES[state.ndim].replace("L", "N")
        raise ValueError(
            f"{where}: stored must be {want}{' (B may be 1)' if state.ndim > 2 else ''}, "
            f"got {shape_of(stored)} with a state {shape_of(state)}"
        )


def check_beta(where: str, beta: Any, state: Tensor) -> tuple[float, Tensor | None]:
    """Check beta; return (scale, factor): (beta, None) for a number, (1, beta) for a tensor."""
    if beta is None:
        return 1.0 / math.sqrt(max(state.shape[-1], 1)), None
    if isinstance(beta, Tensor):
        if not beta.is_floating_point():
            raise TypeError(f"{where}: beta must be floating, got {beta.dtype}")
        heads = lift(state).shape[1]
        if beta.ndim > 1 or (beta.ndim == 1 and beta.shape[0] != heads):
            raise ValueError(f"{where}: beta must be [] or [H] = ({heads},), got {shape_of(beta)}")
        checks.check_same_device(f"{where}: beta", beta, "state", state)
        return 1.0, beta
    checks.check_number(f"{where}: beta", beta, "a number or a Tensor")
    largest = torch.finfo(torch.promote_types(state.dtype, torch.float32)).max
    if not 0.0 < beta <= largest:
        raise ValueError(f"{where}: beta must be positive and at most {largest:.2g}, got {beta}")
    return float(beta), None


def lift_mask(where: str, mask: Any, state: Tensor, stored: Tensor) -> Tensor:
    """Check ``attn_mask``, and return it as [B|1, H|1, L|1, N|1]."""
    mask = checks.as_stored_mask(where, mask, state.device)
    checks.check_dense(where, attn_mask=mask)
    mask = checks.autocast_bias(mask)
    if mask.dtype not in (torch.bool, state.dtype, torch.float32):
        raise TypeError(
            f"{where}: attn_mask must be bool, of state's dtype {state.dtype} or float32, "
            f"got {mask.dtype}"
        )
    checks.check_same_device(f"{where}: attn_mask", mask, "state", state)
    scores = (*state.shape[:-1], stored.shape[-2])
    if not checks.expands_to(mask.shape, scores):
        raise ValueError(
            f"{where}: attn_mask must be broadcastable to the scores {scores}, got {shape_of(mask)}"
        )
    return lift(mask[(None,) * (len(scores) - mask.ndim)])


def _check_options(steps_max: Any, eps: Any, stop: Any, grad: Any) -> None:
    """Check ``update_steps_max`` and ``_eps``, ``stop`` and ``grad``."""
    if steps_max is not None:
        checks.check_int(f"{_NAME}: update_steps_max", steps_max, "an int or None")
        if steps_max < 0:
            raise ValueError(f"{_NAME}: update_steps_max must not be negative, got {steps_max}")
        checks.check_int64(f"{_NAME}: update_steps_max", steps_max)
    checks.check_number(f"{_NAME}: update_steps_eps", eps)
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"{_NAME}: update_steps_eps must not be negative, got {eps}")
    checks.check_choice(f"{_NAME}: stop", stop, _STOPS)
    checks.check_choice(f"{_NAME}: grad", grad, _GRADS)


def _check_projection(projection: Tensor, stored: Tensor) -> None:
    """Check that the projection has a row for each stored pattern."""
    checks.check_alike(f"{_NAME}: projection", projection, "state", stored)
    if projection.shape[:-1] != stored.shape[:-1]:
        raise ValueError(
            f"{_NAME}: projection must have the shape of stored, {shape_of(stored)}, except in "
            f"the last dimension, got {shape_of(projection)}"
        )


# --- the operator -----------------------------------------------------------------------------


def _count_products(state: Tensor, stored: Tensor, taken: Tensor, options: HopfieldOptions) -> int:
    """Count the multiplications of states with stored patterns in all steps."""
    steps = values(taken.flatten())
    if steps is not None:
        total = sum(map(abs, steps))
    else:  # all allowed steps; one step without a limit
        total = taken.numel() * (options.steps_max if options.steps_max >= 0 else 1)
    return total * stored.shape[1] * stored.shape[2]


def _flops(
    results: Sequence[Any], state: Tensor, stored: Tensor, *others: Any, backward: bool = False
) -> int:
    (_, taken, *_), (*_, options) = results, others
    products = _count_products(state, stored, taken, options)
    return attention_flops(products, width=1, value_width=1, backward=backward)


hopfield_states = Operator(
    "hopfield_retrieve",
    "state: G Q D; stored: G N D; keys?: G N D; mask?: G|1 Q|1 N|1; bias?: G|1 Q|1 N|1",
    "out: G Q D; taken: G Q; ends: G Q * D",  # the last two states, or all if they are kept
    options=HopfieldOptions,
    sizes=lambda options, known: {"*": 2},
    derivative=Derivative(
        grads="out",
        # Not the states: the backward repeats the steps.
        reads="state stored keys mask bias taken ends",
        gives="state stored keys bias",
        options=HopfieldBackwardOptions,
        keeps="trace stats",
    ),
    flops=_flops,
    not_in_onnx={"state": "the number of steps depends on values"},
)
_in_one_node = in_one_node(hopfield_states.gradient, attention.gradient)
