"""The definition of Hopfield retrieval.

``hopfield_retrieve`` (Ramsauer et al. 2021, https://arxiv.org/abs/2008.02217), for the queries of a
head, with x_n the rows of ``stored``:

    f(xi) = sum_n p_n x_n,    p = softmax(scale keys xi + bias)      without excluded rows
    xi_0 = state,    xi_{t+1} = f(xi_t)

until a step is not longer than eps or the rounding error (four units in the last place of the new
xi), or until ``steps_max`` steps. The derivative is one of

    unroll     through the steps taken
    implicit   through the solution of xi = f(xi): (1 - J) dxi = df, J = df/dxi, if the query rests
               at a strict minimum of the energy (1 - J is positive definite); else unroll
    one_step   through the last step only: the state before it is a constant
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.primitives import HopfieldBackwardOptions, HopfieldOptions
from fastattn.backends.reference._masked import compute_dtype, replace_nonfinite
from fastattn.backends.reference._vjp import gradients
from fastattn.backends.reference.memory_hops import _attend

_ULPS = 4


def hopfield_retrieve(
    state: Tensor,  # [G, Q, D]
    stored: Tensor,  # [G, N, D]
    keys: Tensor | None,  # [G, N, D], a multiple of stored for each g; None: stored itself
    mask: Tensor | None,  # [G|1, Q|1, N|1] bool, True takes part
    bias: Tensor | None,  # [G|1, Q|1, N|1], added to the scores
    *,
    options: HopfieldOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(xi [G, Q, D], taken [G, Q], ends [G, Q, 2, D])``.

    ``taken`` is the number of steps, negative if the query has not come to rest. ``ends`` holds the
    last two states in the dtype of the computation. ``crowded`` is a hint to the kernels.
    """
    out, taken, ends = hopfield_states(state, stored, keys, mask, bias, options)
    return out.to(state.dtype), taken, ends


def hopfield_states(
    state: Tensor,
    stored: Tensor,
    keys: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    options: HopfieldOptions,
    taken: Tensor | None = None,
    read: Callable[..., tuple[Tensor, Any, Any]] = _attend,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``hopfield_retrieve``, in the dtype of the computation.

    With ``taken``, each query takes that many steps. A step reads the patterns by the function
    ``read``, which must return the weights p of all patterns for the implicit derivative.
    """
    compute = compute_dtype(state.dtype)
    rows = stored.to(compute)
    key_rows = rows if keys is None else keys.to(compute)

    def update(xi: Tensor) -> tuple[Tensor, Tensor]:
        """Take one step from xi; return the new xi, and the weights p."""
        xi, _, p = read(xi, key_rows, rows, mask, bias, options.scale)
        return xi, p

    start = state.to(compute)
    unrolled, steps, before = _iterate(update, start, options, taken)
    last = unrolled.detach()
    ends = torch.stack([before, last], -2)
    if options.grad == "unroll":
        return unrolled, steps, ends
    if options.grad == "one_step":
        return _with_value(last, update(before)[0]), steps, ends

    # Newton's method from the solution: a step reduces the error from h to h^2, so two steps are
    # exact to third order.
    key_rows, rows = replace_nonfinite(key_rows), replace_nonfinite(rows)
    one = torch.eye(state.shape[-1], dtype=compute, device=state.device)

    def value_and_slope(xi: Tensor) -> tuple[Tensor, Tensor]:
        """f(xi) and its slope 1 - J, [G, Q, D] and [G, Q, D, D]."""
        o, p = update(xi)
        mean = p @ key_rows
        spread = (p.unsqueeze(-2) * rows.mT.unsqueeze(1)) @ key_rows.unsqueeze(1)
        return o, one - options.scale * (spread - o.unsqueeze(-1) * mean.unsqueeze(-2))  # f, 1 - J

    with torch.no_grad():
        matrix = value_and_slope(last)[1]
        minimum = torch.linalg.cholesky_ex((matrix + matrix.mT) / 2).info == 0
        minimum &= steps > 0
        # Newton's method solves f(xi) - xi = residual, so that `last` is its exact solution. The
        # residual is constant in forward mode, too.
        residual = (update(last)[0] - last).detach()
    xi = last
    for _ in range(2):
        o, matrix = value_and_slope(xi)
        matrix = torch.where(minimum[..., None, None], matrix, one)
        xi = xi + torch.linalg.solve(matrix, (o - xi - residual).unsqueeze(-1)).squeeze(-1)
    solved = torch.where(minimum[..., None], xi, unrolled)
    return _with_value(last, solved), steps, ends


def hopfield_retrieve_backward(
    grad_out: Tensor,
    state: Tensor,
    stored: Tensor,
    keys: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    taken: Tensor,
    ends: Tensor,
    *,
    options: HopfieldBackwardOptions,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of state, stored, keys and the bias, in their own shapes.

    Bit n of ``needed`` requests gradient n; the others may be None. ``ends`` is recomputed.
    """

    def forward(state: Tensor, stored: Tensor, keys: Any, mask: Any, bias: Any) -> tuple[Tensor]:
        """The retrieval with the step counts of the forward pass."""
        xi, *_ = hopfield_states(state, stored, keys, mask, bias, options, taken)
        return (xi.to(state.dtype),)

    # Of state, stored, keys and bias. With "one_step", the initial state is a constant.
    needed = [n for bit, n in enumerate((0, 1, 2, 4)) if n == 0 or options.needed >> bit & 1]
    needed = needed[1:] if options.grad == "one_step" else needed
    grads = gradients(forward, (state, stored, keys, mask, bias), needed, (grad_out,))
    grad_state = torch.zeros_like(state) if grads[0] is None else grads[0]
    return grad_state, grads[1], grads[2], grads[4]


def _iterate(
    update: Callable[[Tensor], tuple[Tensor, Tensor]],
    xi: Tensor,
    options: HopfieldOptions,
    taken: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last xi (differentiable), the steps of each query, and the xi before the last."""
    steps = torch.zeros(xi.shape[:-1], dtype=torch.int64, device=xi.device)
    before = xi.detach()
    tolerance = _ULPS * torch.finfo(xi.dtype).eps
    moving = steps == 0 if taken is None else taken != 0
    step, together = 0, options.together
    while step != options.steps_max and bool(_any_of_all(moving)):
        step += 1
        next_xi = update(xi)[0]
        with torch.no_grad():
            active = moving[..., None]
            before = torch.where(active, xi.detach(), before)
            if taken is None:
                grouped_shape = (-1, xi.shape[1] // together, together * xi.shape[2])
                moved_squared, length_squared = (
                    x.detach().double().reshape(grouped_shape).square().sum(-1)
                    for x in (next_xi - xi, next_xi)
                )
                moves = moved_squared > torch.clamp(
                    tolerance * tolerance * length_squared, min=options.eps * options.eps
                )
                moves = moves.repeat_interleave(together, 1)
                steps = torch.where(moving, torch.where(moves, -step, step), steps)
                next_moving = moving & moves
            else:
                next_moving = taken.abs() > step
        xi = torch.where(active, next_xi, xi)
        moving = next_moving
    return xi, steps if taken is None else taken, before


@torch.library.custom_op("fastattn::any_of_all", mutates_args=())
def _any_of_all(x: Tensor) -> Tensor:
    """Whether any element is True, of all examples under ``torch.vmap``; a condition of a loop."""
    return x.any()


@_any_of_all.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(())


@_any_of_all.register_vmap
def _(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, None]:
    return _any_of_all(x), None


def _with_value(value: Tensor, derivative: Tensor) -> Tensor:
    """Return ``value`` with the derivative of the tensor ``derivative``."""
    return value + (derivative - derivative.detach())
