"""The layers of an encoder in one native call, on rows without padding.

    post-norm:  h = norm1(x + A(x)),     y = norm2(h + B(h))
    pre-norm:   h = x + A(norm1(x)),     y = h + B(norm2(h))

A is self-attention between its projections, B the MLP. In eager mode such a layer takes a dozen
operators, each with a pass over its result; for one short text they cost more than the arithmetic.

:class:`Names` says where a class of layers keeps its parts. They are compared in every call,
because users may exchange any of them; a part of another class, with a hook or without a plain
weight, sends the call to the layer's own ``forward``.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fastattn import compat, dispatch, evidence
from fastattn.compat import runs_eagerly
from fastattn.nn._leaf import call_as_leaf, is_symbolic
from fastattn.nn.linear import PACKED, Linear
from fastattn.nn.mha import keep_forward_called


class Names(NamedTuple):
    """Where a layer keeps its parts: dotted names of modules and attributes inside the layer."""

    linear: str  # of query, key, value, output, and the two of the MLP; or "joint" for the first 3
    norms: str  # the first and the second, LayerNorm or RMSNorm
    heads: str  # the number of heads, an attribute of the attention
    activation: str
    norm_first: bool = False
    scales: str = ""  # of the two outputs before their residuals: modules with `lambda1`

    @property
    def attention(self) -> str:
        return self.heads.rpartition(".")[0]


PYTORCH = Names(  # the layer itself has `norm_first`
    linear="joint self_attn.out_proj linear1 linear2",
    norms="norm1 norm2",
    heads="self_attn.num_heads",
    activation="activation",
)

_RELU, _GELU, _GELU_TANH, _SILU = 1, 2, 3, 4  # MlpActivation in csrc/params.h
# Functions, and classes of modules by their names.
_ACTIVATIONS: dict[Any, int] = {
    F.relu: _RELU,
    torch.relu: _RELU,
    F.gelu: _GELU,
    F.silu: _SILU,
    "ReLU": _RELU,
    "SiLU": _SILU,
    "GELUActivation": _GELU,
    "NewGELUActivation": _GELU_TANH,
    "FastGELUActivation": _GELU_TANH,
    "GELUTanh": _GELU_TANH,
    "SiLUActivation": _SILU,
}
_KNOWN_PACKAGES = ("torch.", "transformers.")
_NORMS = (nn.LayerNorm, nn.RMSNorm)
LINEAR = (nn.Linear, Linear, NonDynamicallyQuantizableLinear)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def part_of(layer: nn.Module, path: str) -> Any:
    """Return a module inside a layer by its dotted name; "" is the layer itself."""
    part: Any = layer
    for name in filter(None, path.split(".")):
        part = compat.children_of(part)[name]
    return part


def _find_attribute(layer: nn.Module, path: str) -> Any:
    """Return an attribute inside a layer by its dotted name."""
    owner, _, name = path.rpartition(".")
    return getattr(part_of(layer, owner), name)


class Plan:
    """What a native call needs of modules, and the state on which it depends.

    ``facts`` records the state of the modules, such as tensors and hooks; each call compares it.
    """

    native: Any = None  # the native plan; None if the modules' own forwards must run

    def __init__(self, inside: Iterable[nn.Module], state: Iterable[dict[str, Any]]) -> None:
        native: Any = dispatch.load("cpu")
        modules = [*inside]
        module_state = [x for module in modules for x in compat.state_of(module)]
        self.facts = native.Facts([*module_state, *state], modules)

    def holds(self) -> bool:
        """Whether nothing that the plan depends on has changed."""
        facts_hold: bool = self.facts.hold()
        return facts_hold


class _LayerPlan(Plan):
    """The plan of an encoder layer."""

    is_usual = False  # whether all parts are of known classes, without hooks or unusual options

    def __init__(self, layer: nn.Module, names: Names) -> None:
        inside = [x for x in layer.modules() if x is not layer]
        super().__init__(inside, compat.state_of(layer))  # its class is the caller's
        options = None
        with contextlib.suppress(AttributeError, KeyError):  # not what `names` describes
            options = self._read(layer, names, inside)
        if options is not None:
            native: Any = dispatch.load("cpu")
            self.native = native.EncoderPlan(self.facts, *options)

    def _read(self, layer: nn.Module, names: Names, inside: list[nn.Module]) -> Any:
        """Return the arguments of the native plan; None if the layer cannot have one."""
        linear = [None if x == "joint" else part_of(layer, x) for x in names.linear.split()]
        norms = [part_of(layer, path) for path in names.norms.split()]
        attention, heads = part_of(layer, names.attention), _find_attribute(layer, names.heads)
        activation_function = _find_attribute(layer, names.activation)
        activation = _activation_code(activation_function)
        packed = [x.__dict__.get(PACKED) for x in linear if x is not None]
        parameters: list[Any] = [(x.weight, x.bias) for x in linear if x is not None]
        parameters += [(x.weight, getattr(x, "bias", None)) for x in norms]
        has_joint_weight = linear[0] is None
        if has_joint_weight:
            parameters[:0] = [(attention.in_proj_weight, attention.in_proj_bias), None, None]
        scales = [part_of(layer, path) for path in names.scales.split()]
        parameters += [(x.lambda1, None) for x in scales] or [None, None]
        parts = (*linear, *norms, *scales, activation_function)
        eps = [x.eps for x in norms]
        self.weight: Tensor = parameters[3][0]  # of the output projection
        width = self.weight.shape[0]
        self.is_usual = (
            not compat.have_hooks(inside, does_nothing)
            and activation > 0
            and all(
                _drops_in_training(x) or type(x) is nn.Identity or any(x is y for y in parts)
                for x in inside
                if not compat.children_of(x)
            )
            and all(x is None or type(x) in LINEAR for x in linear)
            and type(norms[0]) is type(norms[1])
            and all(type(x) in _NORMS and len(x.normalized_shape) == 1 for x in norms)
            and all(x is None or type(x) is float for x in eps)
            and all(x is None or x[0] is not None for x in parameters)
            and type(heads) is int
            and heads > 0
            and width % heads == 0
            and self.weight.shape == (width, width)
            and not (has_joint_weight and not _has_no_options(attention, width))
            and not (names is PYTORCH and compat.has_own_blocks(layer))
        )
        dropouts = [x for x in inside if _drops_in_training(x)]
        # Every module has a training mode of its own.
        if not self.is_usual or any(x.training for x in (layer, attention, *dropouts)):
            return None
        # An RMSNorm without eps uses that of float32; in 16 bits it depends on PyTorch's version.
        dtypes = _DTYPES[:1] if None in eps else _DTYPES
        eps = [torch.finfo(torch.float32).eps if x is None else x for x in eps]
        norm_first = bool(getattr(layer, "norm_first", names.norm_first))
        options = (heads, norm_first, type(norms[0]) is nn.RMSNorm, *eps, activation)
        limits = [_size_limits(x) if x in dtypes else (0, 0, 0, 0) for x in _DTYPES]
        start = 3 if has_joint_weight else 0  # the place in `parameters` of the first of `packed`
        for n, packed_copy in enumerate(packed, start):
            parameters[n] = (*parameters[n], packed_copy)
        return (tuple(parameters), *options, limits)


def _drops_in_training(module: nn.Module) -> bool:
    """Whether a module drops numbers in training mode, and does nothing in eval mode."""
    return "Drop" in type(module).__name__  # Dropout, DropPath


def _has_no_options(attention: Any, width: int) -> bool:
    """Whether an attention is a ``MultiheadAttention`` of this width without options."""
    absent = ("bias_k", "bias_v", "head_network", "relative_bias", "_watch", "_context")
    usual = {
        **dict.fromkeys(absent),
        "batch_first": True,
        "_qkv_same_embed_dim": True,
        "add_zero_attn": False,
        "embed_dim": width,
    }
    is_usual = all(getattr(attention, name, None) == value for name, value in usual.items())
    return is_usual and isinstance(attention, nn.MultiheadAttention)


_plans: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
AnyPlan = TypeVar("AnyPlan", bound=Plan)


def cached_plan(module: nn.Module) -> Any:
    """Return the last plan of a module, which may no longer hold; None if it had none."""
    return _plans.get(module)


def plan_of(module: nn.Module, make: Callable[..., AnyPlan], *arguments: Any) -> AnyPlan | None:
    """Return the plan of a module, made by ``make(module, *arguments)`` if it has none that holds.

    None if no module can have a plan here.
    """
    plan: AnyPlan | None = _plans.get(module)
    if plan is None or not plan.holds():
        if isinstance(dispatch.load("cpu"), str) or compat.MISSING:
            return None
        plan = _plans[module] = make(module, *arguments)
    return plan


def layer_plan(layer: nn.Module, names: Names) -> _LayerPlan | None:
    """The plan of an encoder layer."""
    return plan_of(layer, _LayerPlan, names)


class Native(nn.Module):
    """A module whose call may be native."""

    NAMES: Names
    WHAT = "an encoder layer"

    def native_layers(self) -> Collection[nn.Module]:
        """The layers that ``NAMES`` describes."""
        return [self]

    def why_not_native(self) -> str:
        """Why no call is native; "" if small calls in eval mode are native."""
        reasons = (_explain_layer(layer, self.NAMES) for layer in self.native_layers())
        return next(filter(None, reasons), "")


class FusedEncoderLayer(Native):
    """The forward of ``torch.nn.TransformerEncoderLayer`` in one native call, where it can be."""

    NAMES = PYTORCH

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As ``torch.nn.TransformerEncoderLayer``."""
        if is_symbolic(src):
            return call_as_leaf(self, src, src_mask, src_key_padding_mask, is_causal)
        if src_mask is None and src_key_padding_mask is None and not is_causal:
            y = run_native((self,), self.NAMES, src)
            if y is not None:
                return y
        stock: Any = super()
        return stock.forward(src, src_mask, src_key_padding_mask, is_causal)


class FusedEncoder(nn.Module):
    """The forward of ``torch.nn.TransformerEncoder``, whose native layers compute no padding."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As ``torch.nn.TransformerEncoder``, with 0 for padding before the last norm."""
        if mask is None and not is_causal:
            y = self._native(src, src_key_padding_mask)
            if y is not None:
                return y if self.norm is None else self.norm(y)  # type: ignore[operator]
        stock: Any = super()
        return stock.forward(src, mask, src_key_padding_mask, is_causal)

    def _native(self, src: Tensor, padding: Tensor | None) -> Tensor | None:
        layers: Any = self.layers
        if src.is_nested or compat.have_hooks(layers, does_nothing):
            return None
        if any(type(layer).forward.__module__ not in _FORWARD_MODULES for layer in layers):
            return None
        if padding is None:
            return run_native(layers, PYTORCH, src)
        if src.dim() != 3 or padding.shape != src.shape[:2] or padding.dtype != torch.bool:
            return None
        if not can_run_native(layers, PYTORCH) or not runs_eagerly(src, padding):
            return None
        rows, starts, restore = pack_rows(src, padding)
        y = run_native(layers, PYTORCH, rows, starts)
        return None if y is None else restore(y)


# The Python modules that define the forward of layers that `PYTORCH` describes.
_FORWARD_MODULES = ("torch.nn.modules.transformer", __name__)


def run_native(
    layers: Collection[nn.Module],
    names: Names,
    x: Tensor,
    starts: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> Any:
    """Apply the layers to ``x``, one after the other, in one native call; None if their own
    forwards must run.

    ``x`` is [B, L, E], or [rows, E] of sequences one after the other, which begin at ``starts``
    [B + 1], in int32. ``relative_bias`` [heads, distances] of the scores, in float32, has distance
    0 in the middle. The caller checks that the layers themselves have no hooks.
    """
    if not layers or not compat.may_plan() or compat.has_global_hook():
        return None
    plans = [_plans.get(layer) for layer in layers]
    native_plans = tuple([plan.native for plan in plans if plan is not None])
    if len(native_plans) == len(layers) and None not in native_plans:
        run: Any = dispatch.load("cpu").encoder_layers  # type: ignore[union-attr]
        wants_gradients = torch.is_grad_enabled()
        y = run(x, starts, relative_bias, plans=native_plans, wants_gradients=wants_gradients)
        if y is not None:
            return y
    if all(plan is not None and plan.holds() for plan in plans):
        return None
    if not can_run_native(layers, names):
        return None
    return run_native(layers, names, x, starts, relative_bias)


def can_run_native(layers: Collection[nn.Module], names: Names) -> bool:
    """Whether :func:`run_native` would apply the layers to some tensor."""
    if not layers or not compat.may_plan() or compat.has_global_hook():
        return False
    plans = [layer_plan(layer, names) for layer in layers]
    return all(plan is not None and plan.native is not None for plan in plans)


def _explain_layer(layer: nn.Module, names: Names) -> str:
    """Why no call of one layer is native, or ""."""
    plan = layer_plan(layer, names)
    if plan is None or not plan.is_usual:
        return "a part of it is of another class, is watched by a hook, or has unusual options"
    weight = plan.weight
    if weight.dtype not in _DTYPES or not weight.is_cpu:
        return f"it is in {str(weight.dtype).removeprefix('torch.')} on {weight.device}"
    if not _size_limits(weight.dtype)[0]:
        return "its operators are faster on this processor"
    return ""


def pack_rows(x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Pack the rows of x [B, L, E] that are not padding: ``(rows, starts, restore)``.

    ``padding`` [B, L] is True at padding. ``rows`` is [T, E], ``starts`` [B + 1] in int32 says
    where each sequence begins, and ``restore`` puts rows back in place, with 0 for padding.
    """
    is_row = padding.logical_not()
    places = is_row.flatten().nonzero().flatten()
    width = x.shape[-1]

    def restore(rows: Tensor) -> Tensor:
        return rows.new_zeros(*x.shape).view(-1, width).index_copy_(0, places, rows).view(x.shape)

    starts = F.pad(is_row.sum(1), (1, 0)).cumsum(0, dtype=torch.int32)
    return x.reshape(-1, width).index_select(0, places), starts, restore


@functools.cache
def _size_limits(dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return the sizes from which native layers beat their operators, and tiles beat vectors.

    The largest rows·E·F of a layer, and the most rows of a layer of any width; the least rows of a
    product on tiles, and its least M·N·K.
    """
    native = dispatch.load("cpu")
    if isinstance(native, str):
        return 0, 0, 0, 0
    gemm = native.rule(dtype)
    tile_rows = gemm.min_tile_rows if gemm.y == "tiles" else evidence.ANY
    few = gemm.few if gemm.layer_up_to else 0
    return gemm.layer_up_to, few, tile_rows, max(gemm.least, gemm.ours_up_to)


def forget_plans() -> None:
    """Drop all plans, so that the next calls make them again."""
    _size_limits.cache_clear()
    _plans.clear()


evidence.on_change(forget_plans)


def largest_layer(dtype: torch.dtype) -> int:
    """Return the largest rows·E·F for which a native layer's products are as fast as others."""
    return _size_limits(dtype)[0] if dtype in _DTYPES else 0


def is_exact_gelu(module: nn.Module) -> bool:
    """Whether a module is GELU without an approximation."""
    return type(module) is nn.GELU and _activation_code(module) == _GELU


def does_nothing(hook: Any) -> bool:
    """Whether a hook changes and records nothing in a call that reaches the native layer.

    transformers leaves hooks behind that record outputs on demand; callers look for that demand.
    """
    return hook is keep_forward_called or hook.__module__ == "transformers.utils.output_capturing"


def _activation_code(function: Any) -> int:
    """Return the number of an activation in native code; 0 if it has none."""
    if isinstance(function, nn.GELU):
        return _GELU_TANH if function.approximate == "tanh" else _GELU
    if isinstance(function, nn.Module):
        kind = type(function)
        is_named = kind.__module__.startswith(_KNOWN_PACKAGES)
        return _ACTIVATIONS.get(kind.__name__, 0) if is_named else 0
    try:
        return _ACTIVATIONS.get(function, 0)
    except TypeError:  # it has no hash
        return 0
