"""The deviation of a result by rounding only, measured by Monte Carlo arithmetic.

A definition is evaluated several times in float64. In every evaluation each operation adds an error
as large as rounding to the judged dtype, with a random sign and size. The deviation of the results
estimates the error of an implementation in that dtype. docs/numerics.md has the rule of each
operation, its reason, and the symbols that the comments here use: u, u_acc, s, t_i, n.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastattn.compat import DispatchMode, written_as_steps

aten = torch.ops.aten

# The evaluation in float64 has rounding errors itself. For float64 candidates the simulated unit is
# magnified, and the deviations, which are linear in it, are divided by the same factor.
_MAGNIFIED = 2.0**12
_LONGEST_CHAIN = 256
_POOL = 2**20
# With few elements all errors may be small by chance: (minimum number of elements, draws).
_DRAWS = ((64, 4), (0, 8))


class Noise:
    """The largest deviation from ``exact`` by rounding to ``dtype``, for each result.

    ``definition`` computes the results in float64 on the CPU, deterministically. Elements whose
    reference is not finite are ignored. ``noise[name]`` is the maximum over all draws; ``largest``
    is the maximum over the draws so far.
    """

    def __init__(
        self,
        definition: Callable[[], Mapping[str, Tensor]],
        exact: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        self._definition = definition
        self._exact = exact
        self._dtype = dtype
        self._magnified = _MAGNIFIED if dtype == torch.float64 else 1.0
        self._center: Mapping[str, Tensor] | None = None
        self.drawn = 0
        fewest = min((x.numel() for x in exact.values() if x.numel()), default=0)
        self._draws = next(draws for results, draws in _DRAWS if fewest >= results)
        self.largest = dict.fromkeys(exact, 0.0)

    def __getitem__(self, name: str) -> float:
        while self.draw():
            pass
        return self.largest[name]

    def draw(self) -> bool:
        """Evaluate the definition once more; return False if all draws are done."""
        if self.drawn == self._draws:
            return False
        if self._center is None:
            self._center = self._definition() if self._dtype == torch.float64 else self._exact
        with RandomRounding(self._dtype, self.drawn, self._magnified):
            results = self._definition()
        if results.keys() != self._exact.keys():
            raise ValueError(f"the definition gives {sorted(results)}, want {sorted(self._exact)}")
        for name, x in results.items():
            off = (x.detach() - self._center[name].detach().double()).abs()
            off = torch.where(torch.isfinite(self._exact[name]), off, 0.0)
            if off.numel():
                self.largest[name] = max(self.largest[name], float(off.max()) / self._magnified)
        self.drawn += 1
        return True


class RandomRounding(DispatchMode):
    """Adds the error of rounding to ``dtype`` to each floating-point operation in float64.

    Raises NotImplementedError for an operation without a rule.
    """

    def __init__(self, dtype: torch.dtype, draw: int = 0, magnified: float = 1.0) -> None:
        super().__init__()
        limits = torch.finfo(dtype)
        accumulator = torch.finfo(torch.promote_types(dtype, torch.float32))
        self._unit = limits.eps / 2 * magnified
        self._unit_of_sums = accumulator.eps / 2 * magnified
        # Subnormal numbers of float16 have an absolute error. The ranges of the other dtypes are
        # large enough.
        self._tiny = limits.smallest_normal * self._unit if dtype == torch.float16 else 0.0
        self._random = random.Random(draw)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = func.overloadpacket
        if func.is_view or operation in _EXACT:
            return func(*args, **kwargs)
        if operation in _UNITS or operation in _TERMS:
            smaller = None
            if operation in _ADDITIONS and not kwargs and len(args) == 2:
                smaller = torch.minimum(*(torch.as_tensor(x).abs() for x in args))
            result = func(*args, **kwargs)
            if result.dtype != torch.float64:
                return result
            if operation in _TERMS:
                return self._summed(result, *_squares(func, result, args, kwargs))
            if smaller is None:
                rounded = self._rounded(result, _UNITS[operation])
            else:
                rounded = self._added(result, smaller)
            in_place = operation.__name__.endswith("_")
            return result.copy_(rounded) if in_place else rounded
        if operation in _BACKWARD_STABLE:  # the exact result of slightly perturbed arguments
            return func(*(self._rounded(x) if _is_double(x) else x for x in args), **kwargs)
        with self:  # a composite operation: each step has its own error
            if operation in _COMPOSITES:
                return written_as_steps(func)(*args, **kwargs)
            result = _STEPS.get(operation, func.decompose)(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not result.is_floating_point():
            return result
        raise NotImplementedError(f"{func} has no rule for its rounding error")

    def _rounded(self, x: Tensor, units: int = 1) -> Tensor:
        result = torch.add(1.0, self._errors(x), alpha=units * self._unit).mul_(x)
        return result.add_(self._tiny * self._errors(x) * (x != 0)) if self._tiny else result

    def _added(self, x: Tensor, smaller: Tensor) -> Tensor:
        error = torch.minimum(x.abs().mul_(self._unit), smaller).mul_(self._errors(x))
        return error.nan_to_num_(0.0, 0.0, 0.0).add_(x)

    def _summed(self, x: Tensor, squares: Tensor, terms: int) -> Tensor:
        chain = math.sqrt(min(terms, _LONGEST_CHAIN)) / 2
        error = squares.addcmul_(x, x).sqrt_().mul_(self._unit_of_sums * chain)
        # Inf and NaN stay: sums may have them before hidden terms are removed.
        result = error.mul_(self._errors(x)).nan_to_num_(0.0, 0.0, 0.0).add_(x)
        return self._rounded(result) if self._unit != self._unit_of_sums else result

    def _errors(self, x: Tensor) -> Tensor:
        """s for each element of x: a random slice of a pool, because drawing is slow."""
        pool, count = _pool_of_errors(), x.numel()
        start = self._random.randrange(_POOL // 2)
        part = pool[start : start + min(count, _POOL // 2 - 1)]
        if count > len(part):
            part = part.repeat(-(-count // len(part)))[:count]
        return part.view(x.shape)


@functools.cache
def _pool_of_errors() -> Tensor:
    # Not only signs: errors of equal size would cancel exactly in half of all pairs, so two equal
    # keys would seem to have no error.
    draw = torch.Generator().manual_seed(0)
    s = torch.rand(_POOL, generator=draw, dtype=torch.float64, device="cpu") * 2 - 1
    return s + s.sign() / 2


def _is_double(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float64


def _packets(names: str) -> list[Any]:
    """The operators of these names; some versions of PyTorch lack some of them."""
    return [getattr(aten, name) for name in names.split() if hasattr(aten, name)]


# The number of terms of each element of a sum, from the result and the arguments.
_ACCUMULATIONS = _packets("index_put index_put_ index_add scatter_add")
_TERMS: dict[Any, Callable[..., int]] = {
    **dict.fromkeys(_packets("mm bmm mv dot"), lambda _, a, b: a.shape[-1]),
    **dict.fromkeys(_packets("sum mean"), lambda y, x, *_: x.numel() // max(y.numel(), 1)),
    **dict.fromkeys(_ACCUMULATIONS, lambda *_: 2),  # the old value and the added one
    aten.cumsum: lambda _, x, dim: x.shape[dim] if x.ndim else 1,
    aten.convolution: lambda _, x, weight, *__: weight[0].numel() + 1,  # and the bias
    # Each row is a sum of rows of the gradient.
    aten.embedding_dense_backward: lambda _, grad, indices, *__: (
        int(indices.flatten().bincount().max()) if indices.numel() else 1
    ),
}


def _squares(func: Any, result: Tensor, args: Any, kwargs: Any) -> tuple[Tensor, int]:
    """The sum of the squares of the terms of each result, and the number of terms."""
    operation = func.overloadpacket
    terms = _TERMS[operation](result, *args)
    if operation in _ACCUMULATIONS:
        return result * result, terms
    squares = func(*(x * x if _is_double(x) else x for x in args), **kwargs)
    return (squares / terms if operation is aten.mean else squares), terms


# Operators that PyTorch decomposes, some with factors of 1 or into private operators.
_COMPOSITES = frozenset(
    _packets(
        "_softmax _safe_softmax _softmax_backward_data _log_softmax logsumexp logaddexp silu"
        " silu_backward gelu gelu_backward native_layer_norm native_layer_norm_backward"
    )
)


def _add_product(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    product = a @ b if alpha == 1 else (a @ b) * alpha
    return product + (added if beta == 1 else added * beta)


def _var_mean(
    x: Tensor, dims: Any, unbiased: bool = False, keepdim: bool = False, *, correction: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Variance and mean without a correction, as normalisation needs them."""
    assert not unbiased
    assert not correction
    mean = x.mean(dims, keepdim=True)
    centered = x - mean
    return (centered * centered).mean(dims, keepdim=keepdim), mean


_STEPS: dict[Any, Callable[..., Any]] = {
    aten.addmm: _add_product,
    aten.baddbmm: _add_product,
    aten.var_mean: _var_mean,
}

_ADDITIONS = frozenset(_packets("add sub rsub add_ sub_"))
_ROUNDED_ONCE = "add sub rsub mul div add_ sub_ mul_ div_ reciprocal sqrt square frac remainder"
_ELEMENTARY = (
    "exp exp2 expm1 log log1p log2 tanh sigmoid pow rsqrt sin cos tan asin acos atan atan2"
    " sinh cosh erf special_entr sigmoid_ tanh_"
    " tanh_backward sigmoid_backward norm linalg_vector_norm"
)
_UNITS = dict.fromkeys(_packets(_ROUNDED_ONCE), 1) | dict.fromkeys(_packets(_ELEMENTARY), 2)
_BACKWARD_STABLE = frozenset(_packets("_linalg_solve_ex linalg_lu_solve convolution_backward"))
# Moving, selecting and comparing numbers has no rounding error.
_EXACT = frozenset(
    _packets(
        # copies, indices, shapes
        "_unsafe_view _reshape_alias alias clone copy_ _to_copy to detach lift_fresh expand_copy"
        " repeat cat stack split unsafe_split split_with_sizes unbind flip roll triu tril"
        " constant_pad_nd"
        " index gather index_select embedding scatter slice_scatter select_scatter slice_backward"
        " select_backward value_selecting_reduction_backward"
        # selections
        " where masked_fill masked_fill_ neg abs sign sgn amax amin aminmax max min maximum minimum"
        " clamp clamp_ clamp_min clamp_max relu threshold_backward nan_to_num sort argsort argmax"
        " topk nonzero native_dropout native_dropout_backward"
        # new tensors
        " zeros ones empty full eye arange linspace scalar_tensor tril_indices zeros_like ones_like"
        " empty_like full_like new_empty new_zeros new_ones new_full new_empty_strided zero_ fill_"
        " rand randn randint bernoulli"
        # integers, booleans, predicates
        " eq ne lt le gt ge logical_not logical_and logical_or logical_and_ logical_or_"
        " bitwise_not bitwise_and bitwise_or bitwise_xor bitwise_and_ bitwise_or_"
        " bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __iand__ __ior__"
        " __lshift__ __rshift__ floor ceil round trunc floor_divide isnan isinf isfinite any all"
        " count_nonzero bincount is_same_size promote_types result_type _local_scalar_dense"
        # whether a matrix is positive definite, and whether a solution was found
        " linalg_cholesky_ex _linalg_check_errors"
    )
)
