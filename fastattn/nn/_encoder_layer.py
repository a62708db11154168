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

import functools
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fastattn import compat, dispatch, evidence
from fastattn.eager import runs_eagerly
from fastattn.nn.linear import Linear
from fastattn.nn.mha import keep_forward_called

__all__ = [
    "FusedEncoder",
    "FusedEncoderLayer",
    "Names",
    "does_nothing",
    "is_served",
    "joined",
    "known",
    "part_of",
    "served",
    "why_not",
]


class Names(NamedTuple):
    """Where a layer keeps its parts: dotted names of modules, from the layer on."""

    linear: str  # of query, key, value, output, and the two of the MLP; or "joint" for the first 3
    norms: str  # the first and the second, LayerNorm or RMSNorm
    attention: str  # the module with the number of heads
    heads: str  # the attribute of that number
    activation: str  # "" where the next is an attribute of the layer
    function: str  # the attribute of the activation
    norm_first: bool
    scales: str = ""  # of the two outputs before their residuals: modules with `lambda1`


PYTORCH = Names(
    linear="joint self_attn.out_proj linear1 linear2",
    norms="norm1 norm2",
    attention="self_attn",
    heads="num_heads",
    activation="",
    function="activation",
    norm_first=False,  # the layer says so itself
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
_LIBRARIES = ("torch.", "transformers.")
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_LINEAR = (nn.Linear, Linear, NonDynamicallyQuantizableLinear)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def part_of(layer: nn.Module, path: str) -> Any:
    """A module inside a layer, by its dotted name."""
    found: Any = layer
    for name in path.split("."):
        found = compat.children_of(found)[name]
    return found


class _Layer:
    """The native plan of a layer: its parts, and the facts that each call checks."""

    def __init__(self, layer: nn.Module, names: Names) -> None:
        """Raise ``KeyError`` or ``AttributeError`` for another layer than ``names`` describes."""
        self._places: list[tuple[dict[str, Any], str, Any]] = []  # a dictionary, a key, its value
        inside = [x for x in layer.modules() if x is not layer]

        def module(path: str) -> Any:
            found: Any = layer
            for name in path.split("."):
                found = self._at(compat.children_of(found), name)
            return found

        def pair(owner: Any, weight: str = "weight", bias: str = "bias") -> tuple[Any, Any]:
            own = compat.parameters_of(owner)
            return self._at(own, weight), self._at(own, bias)

        linear = [None if path == "joint" else module(path) for path in names.linear.split()]
        norms = [module(path) for path in names.norms.split()]
        attention = module(names.attention)
        function = module(names.activation) if names.activation else layer
        activation = _activation(self._of(function, names.function))
        pairs: list[Any] = [pair(x) for x in (*linear, *norms) if x is not None]
        joint = linear[0] is None
        if joint:
            pairs[:0] = [pair(attention, "in_proj_weight", "in_proj_bias"), None, None]
        scales = [module(path) for path in names.scales.split()]
        pairs += [(pair(x, "lambda1", "lambda1")[0], None) for x in scales] or [None, None]
        heads = self._of(attention, names.heads)
        eps = [self._of(x, "eps") for x in norms]
        norm_first = bool(self._of(layer, "norm_first", names.norm_first))
        self.weight: Tensor = pairs[3][0]
        width = self.weight.shape[0]
        self.is_usual = (
            not compat.are_watched(inside, does_nothing)
            and activation > 0
            and all(x is None or type(x) in _LINEAR for x in linear)
            and type(norms[0]) is type(norms[1])
            and all(type(x) in _NORMS and len(x.normalized_shape) == 1 for x in norms)
            and all(x is None or type(x) is float for x in eps)
            and all(x is None or x[0] is not None for x in pairs)
            and type(heads) is int
            and heads > 0
            and width % heads == 0
            and self.weight.shape == (width, width)
            and not (joint and not self._is_usual_attention(attention))
        )
        drawing = [x for x in inside if "Drop" in type(x).__name__]  # Dropout, DropPath
        # Each by itself: one may be in training mode alone.
        modes = [self._at(vars(x), "training") for x in (layer, attention, *drawing)]
        self._is_training = any(modes)
        for each in inside:
            for name in compat.WATCHED:
                self._at(vars(each), name, ...)
        # Of an RMSNorm without one: float32's, in 16 bits a version's choice.
        dtypes = _DTYPES[:1] if None in eps else _DTYPES
        eps = [torch.finfo(torch.float32).eps if x is None else x for x in eps]
        options = (heads, norm_first, type(norms[0]) is nn.RMSNorm, *eps, activation)
        sizes = [_most(x) if x in dtypes else (0, 0) for x in _DTYPES]
        self._inside, self._options = inside, (tuple(pairs), *options, sizes)

    def prepared(self) -> _Layer:
        native: Any = dispatch.load("cpu")
        hooks = [hooks for x in self._inside for hooks in compat.hooks_of(x)]
        facts = native.Facts(self._places, self._inside, hooks)
        self.holds: Callable[[], bool] = facts.hold
        is_native = self.is_usual and not self._is_training
        self.plan = native.EncoderPlan(facts, *self._options) if is_native else None
        return self

    def _at(self, owner: dict[str, Any], name: str, default: Any = None) -> Any:
        self._places.append((owner, name, owner.get(name, ...)))
        return owner.get(name, default)

    def _of(self, module: Any, name: str, default: Any = None) -> Any:
        """An attribute of a module, wherever it is."""
        for owner in (vars(module), compat.parameters_of(module), compat.children_of(module)):
            value = self._at(owner, name, ...)
            if value is not ...:
                return value
        return getattr(type(module), name, default)

    def _is_usual_attention(self, attention: Any) -> bool:
        """Whether a ``MultiheadAttention`` has none of its options."""
        given = {name: self._of(attention, name) for name in _OPTIONS_OF_ATTENTION}
        usual: dict[str, Any] = {
            "batch_first": True,
            "_qkv_same_embed_dim": True,
            "add_zero_attn": False,
        }
        usual["embed_dim"] = self.weight.shape[0]
        is_usual = all(given[name] == usual.get(name) for name in given)
        return is_usual and isinstance(attention, nn.MultiheadAttention)


_OPTIONS_OF_ATTENTION = (
    "batch_first embed_dim _qkv_same_embed_dim bias_k bias_v add_zero_attn head_network "
    "relative_bias _watch _context"
).split()
_known: weakref.WeakKeyDictionary[nn.Module, _Layer] = weakref.WeakKeyDictionary()


def known(layer: nn.Module, names: Names) -> _Layer | None:
    """What a layer has for a native call; None if its own forward must run."""
    kept = _known.get(layer)
    if kept is None or not kept.holds():
        if isinstance(dispatch.load("cpu"), str) or compat.MISSING:
            return None
        try:
            kept = _Layer(layer, names)
        except (AttributeError, KeyError, ValueError):
            return None
        _known[layer] = kept.prepared()
    return kept if kept.is_usual else None


class FusedEncoderLayer(nn.Module):
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
        if src_mask is None and src_key_padding_mask is None and not is_causal:
            y = served((self,), self.NAMES, src)
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
        if src.is_nested or compat.are_watched(layers, does_nothing):
            return None
        if any(type(layer).forward.__module__ not in _FORWARDS for layer in layers):
            return None
        if padding is None:
            return served(layers, PYTORCH, src)
        if src.dim() != 3 or padding.shape != src.shape[:2] or padding.dtype != torch.bool:
            return None
        if not is_served(layers, PYTORCH, src) or not runs_eagerly(padding):
            return None
        rows, starts, back = joined(src, padding)
        return back(served(layers, PYTORCH, rows, starts))


# Of the layers whose own forward computes what `PYTORCH` describes.
_FORWARDS = ("torch.nn.modules.transformer", "fastattn.nn.transformer", __name__)


def served(
    layers: Collection[nn.Module],
    names: Names,
    x: Tensor,
    starts: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> Any:
    """The layers on ``x``, one after the other, in one native call; None if their own forwards must
    run.

    ``x`` is [B, L, E], or [rows, E] of sequences one after the other, which begin at ``starts``
    [B + 1], in int32. ``relative_bias`` [heads, distances] of the scores, in float32, has distance
    0 in the middle. Hooks of the layers themselves are the caller's to look for.
    """
    if not layers or not compat.nothing_intercepts() or compat.is_any_watched():
        return None
    kept = [_known.get(layer) for layer in layers]
    plans = tuple([each.plan for each in kept if each is not None])
    if len(plans) == len(layers) and None not in plans:
        run: Any = dispatch.load("cpu").encoder_layers  # type: ignore[union-attr]
        wants_gradients = torch.is_grad_enabled()
        y = run(x, starts, relative_bias, plans=plans, wants_gradients=wants_gradients)
        if y is not None:
            return y
    if all(each is not None and each.holds() for each in kept):
        return None
    kept = [known(layer, names) for layer in layers]
    if any(each is None or each.plan is None for each in kept):
        return None
    return served(layers, names, x, starts, relative_bias)


def is_served(layers: Collection[nn.Module], names: Names, x: Tensor) -> bool:
    """Whether :func:`served` would run the layers on the rows of ``x``."""
    if not layers or not compat.nothing_intercepts() or compat.is_any_watched():
        return False
    for kept in (known(layer, names) for layer in layers):
        if kept is None or kept.plan is None or not kept.plan.serves(x, torch.is_grad_enabled()):
            return False
    return True


def why_not(module: nn.Module) -> str:
    """Why no call of a layer with ``NAMES``, or of a stack of such, is native; "" if small ones in
    eval mode are."""
    layers: Any = module.native_layers() if hasattr(module, "native_layers") else [module]  # type: ignore[operator]
    return next(filter(None, (_why_not(layer, module.NAMES) for layer in layers)), "")


def _why_not(layer: nn.Module, names: Any) -> str:
    kept = known(layer, names)
    if kept is None:
        return "a part of it is of another class, is watched by a hook, or has unusual options"
    weight = kept.weight
    if weight.dtype not in _DTYPES or not weight.is_cpu:
        return f"it is in {str(weight.dtype).removeprefix('torch.')} on {weight.device}"
    if not _most(weight.dtype)[0]:
        return "its operators are faster on this processor"
    return ""


def joined(x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """The rows [T, E] of x [B, L, E] that are no padding, where each sequence begins, [B + 1] in
    int32, and how to put rows back.

    ``padding`` [B, L] is True at padding, where the result is 0.
    """
    kept = padding.logical_not()
    places = kept.flatten().nonzero().flatten()
    width = x.shape[-1]

    def back(rows: Tensor) -> Tensor:
        return rows.new_zeros(*x.shape).view(-1, width).index_copy_(0, places, rows).view(x.shape)

    starts = F.pad(kept.sum(1), (1, 0)).cumsum(0, dtype=torch.int32)
    return x.reshape(-1, width).index_select(0, places), starts, back


@functools.cache
def _most(dtype: torch.dtype) -> tuple[int, int]:
    """The largest rows·E·F for which the native layer is faster than its operators, and the most
    rows for which it is at any width."""
    native = dispatch.load("cpu")
    if isinstance(native, str):
        return 0, 0
    gemm = native.rule(dtype)
    return gemm.layer_up_to, gemm.few if gemm.layer_up_to else 0


def _forget() -> None:
    _most.cache_clear()
    _known.clear()


evidence.on_change(_forget)


def does_nothing(hook: Any) -> bool:
    """Whether a hook changes and records nothing in a call that reaches the native layer.

    transformers leaves hooks behind that record outputs on demand; callers look for that demand.
    """
    return hook is keep_forward_called or hook.__module__ == "transformers.utils.output_capturing"


def _activation(function: Any) -> int:
    if isinstance(function, nn.GELU):
        return _GELU_TANH if function.approximate == "tanh" else _GELU
    if isinstance(function, nn.Module):
        kind = type(function)
        is_named = kind.__module__.startswith(_LIBRARIES)
        return _ACTIVATIONS.get(kind.__name__, 0) if is_named else 0
    try:
        return _ACTIVATIONS.get(function, 0)
    except TypeError:  # it has no hash
        return 0
