"""A layer of an encoder in one native call, on rows without padding.

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
from collections.abc import Callable, Sequence
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
    "fused",
    "joined",
    "known",
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


class Parts(NamedTuple):
    """What the native function takes besides rows."""

    tensors: tuple[Any, ...]  # pairs of weight and bias
    heads: int
    norm_first: bool
    rms: bool
    eps: tuple[float, float]
    activation: int
    width: int  # E
    hidden: int  # F


class _Layer:
    """The parts of a layer, and where they were found: to look again takes as long as a kernel."""

    def __init__(self, layer: nn.Module, names: Names) -> None:
        """Raise ``KeyError`` or ``AttributeError`` for another layer than ``names`` describes."""
        self._places: list[tuple[dict[str, Any], str, Any]] = []  # a dictionary, a key, its value
        self._inside = [x for x in layer.modules() if x is not layer]
        self._layer = weakref.ref(layer)

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
        self.attention = module(names.attention)
        # None: the layer, which must not be kept alive here.
        self._function = (module(names.activation) if names.activation else None, names.function)
        self._activation = getattr(self._function[0] or layer, names.function)
        dropouts = [x for x in self._inside if "Drop" in type(x).__name__]  # Dropout, DropPath
        self._random = (self.attention, *dropouts)
        pairs: list[Any] = [pair(x) for x in (*linear, *norms) if x is not None]
        joint = linear[0] is None
        if joint:
            pairs[:0] = [pair(self.attention, "in_proj_weight", "in_proj_bias"), None, None]
        scales = [module(path) for path in names.scales.split()]
        pairs += [(pair(x, "lambda1", "lambda1")[0], None) for x in scales] or [None, None]
        self._heads = names.heads
        heads = getattr(self.attention, names.heads)
        self.tensors = tuple(t for x in pairs if x is not None for t in x if t is not None)
        self._norms = norms
        self._eps = _eps(norms)
        self._norm_first = names.norm_first
        self._is_joint = joint
        width, hidden = pairs[5][0].shape
        self.is_usual = (
            _activation(self._activation) > 0
            and all(x is None or type(x) in _LINEAR for x in linear)
            and type(norms[0]) is type(norms[1])
            and all(type(x) in _NORMS and len(x.normalized_shape) == 1 for x in norms)
            and all(type(eps) is float for eps in self._eps)
            and all(x is None or x[0] is not None for x in pairs)
            and type(heads) is int
            and heads > 0
            and width % heads == 0
            and pairs[3][0].shape == (width, width)
        )
        norm_first = bool(getattr(layer, "norm_first", names.norm_first))
        self.parts = Parts(
            *(tuple(pairs), heads, norm_first, type(norms[0]) is nn.RMSNorm, self._eps),
            *(_activation(self._activation), width, hidden),
        )

    def _at(self, owner: dict[str, Any], name: str) -> Any:
        value = owner.get(name)
        self._places.append((owner, name, value))
        return value

    def holds(self) -> bool:
        """Whether all is still where it was, and nothing watches."""
        layer: Any = self._layer()
        for owner, name, value in self._places:
            if owner.get(name) is not value:
                return False
        parts, norms = self.parts, self._norms
        return (
            getattr(self._function[0] or layer, self._function[1]) is self._activation
            and getattr(self.attention, self._heads) == parts.heads
            and _eps(norms) == self._eps
            and getattr(layer, "norm_first", self._norm_first) == parts.norm_first
            and not compat.are_watched(self._inside, does_nothing)
            and not (self._is_joint and not _is_usual(self.attention))
        )

    def is_training(self) -> bool:
        """Whether a module that draws random numbers is in training mode, itself alone perhaps."""
        return any(module.training for module in self._random)


_known: weakref.WeakKeyDictionary[nn.Module, _Layer] = weakref.WeakKeyDictionary()


def known(layer: nn.Module, names: Names, x: Tensor | None = None) -> _Layer | None:
    """What a layer has for a native call, on ``x`` if given; None if its own forward must run."""
    kept = _known.get(layer)
    # A size that a compiler traces would become a guard.
    sized = kept is not None and x is not None and compat.nothing_intercepts()
    if sized and not _is_small(x, kept.parts):  # type: ignore[arg-type,union-attr]
        return None  # without a look at all its places
    if kept is None or not kept.holds():
        try:
            kept = _known[layer] = _Layer(layer, names)
        except (AttributeError, KeyError, ValueError):
            return None
        if not kept.holds():
            return None
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
            y = fused(self, self.NAMES, src)
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
        if mask is None and src_key_padding_mask is not None and not is_causal:
            y = self._packed(src, src_key_padding_mask)
            if y is not None:
                return y
        stock: Any = super()
        return stock.forward(src, mask, src_key_padding_mask, is_causal)

    def _packed(self, src: Tensor, padding: Tensor) -> Tensor | None:
        layers: Any = self.layers
        if src.dim() != 3 or src.is_nested or padding.shape != src.shape[:2]:
            return None
        if padding.dtype != torch.bool or compat.are_watched(layers, does_nothing):
            return None
        if not all(isinstance(layer, nn.TransformerEncoderLayer) for layer in layers):
            return None
        found = [serves(layer, known(layer, PYTORCH, src), src) for layer in layers]
        if None in found or not runs_eagerly(padding):
            return None
        rows, lengths, back = joined(src, padding)
        for parts in found:
            assert parts is not None
            rows = run(parts, rows, lengths)
        y, norm = back(rows), self.norm
        return y if norm is None else norm(y)  # type: ignore[operator]


def fused(layer: nn.Module, names: Names, x: Tensor) -> Tensor | None:
    """The layer on x [B, L, E] or [L, E] without a mask; None if its own forward must run."""
    if x.is_nested or x.dim() not in (2, 3):
        return None
    parts = serves(layer, known(layer, names, x), x)
    if parts is None:
        return None
    count = 1 if x.dim() == 2 else x.shape[0]
    return run(parts, x.reshape(-1, x.shape[-1]).contiguous(), [x.shape[-2]] * count).view(x.shape)


def serves(layer: nn.Module, kept: _Layer | None, x: Tensor) -> Parts | None:
    """The parts of a layer, or None if its own forward must run on ``x`` [..., E]."""
    if kept is None or layer.training or kept.is_training() or not compat.nothing_intercepts():
        return None
    if x.dtype not in _DTYPES or not x.is_cpu:
        return None
    parts, width = kept.parts, x.shape[-1]
    if x.numel() == 0 or width != parts.width or not _is_small(x, parts):
        return None
    tensors = (x, *kept.tensors)
    if torch.is_grad_enabled() and compat.any_requires_grad(*tensors):
        return None
    if not runs_eagerly(*tensors) or any(t.dtype is not x.dtype for t in kept.tensors):
        return None
    return parts


def why_not(module: nn.Module) -> str:
    """Why no call of a layer with ``NAMES``, or of a stack of such, is native; "" if small ones in
    eval mode are."""
    layers: Any = module.native_layers() if hasattr(module, "native_layers") else [module]  # type: ignore[operator]
    return next(filter(None, (_why_not(layer, module.NAMES) for layer in layers)), "")


def _why_not(layer: nn.Module, names: Any) -> str:
    kept = known(layer, names)
    if kept is None:
        return "a part of it is of another class, is watched by a hook, or has unusual options"
    weight = kept.tensors[0]
    if weight.dtype not in _DTYPES or not weight.is_cpu:
        return f"it is in {str(weight.dtype).removeprefix('torch.')} on {weight.device}"
    if not _most(weight.dtype)[0]:
        return "its operators are faster on this processor"
    return ""


def run(
    parts: Parts, x: Tensor, lengths: Sequence[int], relative_bias: Tensor | None = None
) -> Tensor:
    """The layer on the rows of sequences, one after the other: x [rows, E], contiguous.

    ``relative_bias`` [heads, distances] of the scores, in float32, has distance 0 in the middle.
    """
    native: Any = dispatch.load("cpu")
    y: Tensor = native.encoder_layer(
        x,
        lengths,
        parts.tensors,
        parts.heads,
        parts.norm_first,
        parts.rms,
        *parts.eps,
        parts.activation,
        relative_bias,
    )
    return y


def joined(x: Tensor, padding: Tensor) -> tuple[Tensor, list[int], Callable[[Tensor], Tensor]]:
    """The rows [T, E] of x [B, L, E] that are no padding, the lengths, and how to put rows back.

    ``padding`` [B, L] is True at padding, where the result is 0.
    """
    kept = padding.logical_not()
    places = kept.flatten().nonzero().flatten()
    width = x.shape[-1]

    def back(rows: Tensor) -> Tensor:
        return rows.new_zeros(*x.shape).view(-1, width).index_copy_(0, places, rows).view(x.shape)

    return x.reshape(-1, width).index_select(0, places), kept.sum(1).tolist(), back


@functools.cache
def _most(dtype: torch.dtype) -> tuple[int, int]:
    """The largest rows·E·F for which the native layer is faster than its operators, and the most
    rows for which it is at any width."""
    native = dispatch.load("cpu")
    if isinstance(native, str):
        return 0, 0
    gemm = native.rule(dtype)
    return gemm.layer_up_to, gemm.few if gemm.layer_up_to else 0


evidence.on_change(_most.cache_clear)


def _is_small(x: Tensor, parts: Parts) -> bool:
    """Whether the native layer is faster than its operators on x [..., E]."""
    work, rows = _most(x.dtype)
    size = x.numel()
    return size * parts.hidden <= work or size <= rows * parts.width


def does_nothing(hook: Any) -> bool:
    """Whether a hook changes and records nothing in a call that reaches the native layer.

    transformers leaves hooks behind that record outputs on demand; callers look for that demand.
    """
    return hook is keep_forward_called or hook.__module__ == "transformers.utils.output_capturing"


def _eps(norms: Sequence[Any]) -> tuple[float, float]:
    """Of both norms. An RMSNorm without one has float32's there, in 16 bits a version's choice."""
    default = torch.finfo(torch.float32).eps
    first, second = (
        default if x.eps is None and x.weight.dtype is torch.float32 else x.eps for x in norms
    )
    return first, second


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


def _is_usual(attention: Any) -> bool:
    """Whether a ``MultiheadAttention`` has none of its options."""
    return (
        isinstance(attention, nn.MultiheadAttention)
        and attention.batch_first
        and attention.embed_dim == attention.out_proj.weight.shape[0]
        and attention._qkv_same_embed_dim
        and attention.bias_k is None
        and attention.bias_v is None
        and not attention.add_zero_attn
        and getattr(attention, "head_network", None) is None
        and getattr(attention, "relative_bias", None) is None
        and getattr(attention, "_watch", None) is None
        and getattr(attention, "_context", None) is None
    )
