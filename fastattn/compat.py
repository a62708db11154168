"""The private names of PyTorch that the package uses: which versions have each, and the fallback
for the others.

No other file uses private names. Each is looked up once, at import, so the choice costs nothing
per call. If a name is missing, a correct but slower fallback replaces it. `NAMES` lists which were
found. The versions next to a name are those that were checked: 2.6 to 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn import _openmp

# The supported versions; pyproject.toml says the same (tests/core/test_compat.py).
OLDEST, BELOW = (2, 6), (3, 0)
NEWEST_TESTED = (2, 15)
RANGE = f">={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}"


def _version() -> tuple[int, int] | None:
    """Major and minor version of PyTorch; None for a custom build without a number."""
    number = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(number[1]), int(number[2])) if number else None


def _check_version() -> None:
    version = _version()
    if version is not None and not OLDEST <= version < BELOW:
        raise ImportError(
            f"fastattn needs torch{RANGE}, but torch {torch.__version__} is installed "
            f"in {torch.__path__[0]}: pip install 'torch{RANGE}'"
        )


def is_untested() -> bool:
    """Whether this PyTorch is newer than every tested version."""
    version = _version()
    return version is None or version > NEWEST_TESTED


_check_version()

# Before the native module is loaded. PyTorch's wheels keep their bundled libraries here.
_folder = Path(torch.__path__[0])
_openmp.share([_folder / "lib", _folder.with_name("torch.libs")])

NAMES: dict[str, bool] = {}  # every private name, and whether this PyTorch has it
_ABSENT = object()


def _find(path: str) -> Any:
    """The object of that name, or `_ABSENT`. ``Class()`` means an instance of the class."""
    found: Any = torch
    for part in path.split(".")[1:]:
        found = getattr(found, part.removesuffix("()"), _ABSENT)
        if found is not _ABSENT and part.endswith("()"):
            found = found()
    NAMES[path] = found is not _ABSENT
    return found


def _or(path: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    found = _find(path)
    return otherwise if found is _ABSENT else found


def _attribute_or(path: str, otherwise: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that reads the attribute of an instance, or the fallback."""
    name = path.rpartition(".")[2]
    return (
        otherwise if _find(path) is _ABSENT else lambda x: getattr(x, name)
    )  # Dynamo can trace this


# --- what intercepts calls: compilers, transforms, modes, tracers ---------------------------------


class _OldStyle(torch.autograd.Function):
    """Rejected under a transform of ``torch.func``, because it has no ``setup_context``."""

    @staticmethod
    def forward(ctx: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any) -> None:
        pass


def _old_style_is_refused() -> bool:
    try:
        _OldStyle.apply()
    except RuntimeError:
        return True
    return False


# Whether a transform of torch.func is active. 2.6 to 2.15. Without: try an operation it forbids.
transforms_active: Callable[[], bool] = _or(
    "torch._C._are_functorch_transforms_active", _old_style_is_refused
)

# The base class for modes, which intercept the dispatcher's calls. 2.6 to 2.15. Without: every
# call goes through the dispatcher, and the classes derived from it here cannot be used.
_dispatch_mode = _find("torch.utils._python_dispatch.TorchDispatchMode")
# The number of modes below the dispatcher. 2.6 to 2.15. Without: assume one, so every call goes
# through the dispatcher.
_dispatch_modes: Callable[[], int] = _or("torch._C._len_torch_dispatch_stack", lambda: 1)
if _dispatch_mode is _ABSENT:
    _dispatch_modes = lambda: 1  # noqa: E731

# The state of torch.jit.trace, None outside. 2.6 to 2.15. Without: the public function, which costs
# one more Python call.
_jit_trace: Callable[[], Any] = _or(
    "torch._C._get_tracing_state",
    lambda: torch.jit.is_tracing() or None,  # type: ignore[attr-defined]
)
# Whether autocast is on for any device. 2.6 to 2.13. Without: the public function for the CPU,
# which takes twice as long.
any_autocast: Callable[[], bool] = _or(
    "torch._C._is_any_autocast_enabled", lambda: torch.is_autocast_enabled("cpu")
)
_compiling = torch.compiler.is_compiling
_ZERO = torch.zeros(())


def _dual_can_be_made() -> bool:
    try:
        forward_ad.make_dual(_ZERO, _ZERO)
    except RuntimeError:
        return False
    return True


# The nesting of forward-mode differentiation, -1 outside. 2.6 to 2.15. Without: try to create a
# dual tensor, which fails outside.
if _find("torch.autograd.forward_ad._current_level") is not _ABSENT:

    def forward_mode() -> bool:
        """Whether forward-mode differentiation is active."""
        return forward_ad._current_level >= 0

    def nothing_watches() -> bool:
        """Whether no compiler, transform, mode or tracer has to see the calls made now."""
        if _compiling() or transforms_active() or _dispatch_modes():
            return False
        return forward_ad._current_level < 0 and _jit_trace() is None

else:
    forward_mode = _dual_can_be_made

    def nothing_watches() -> bool:
        """Whether no compiler, transform, mode or tracer has to see the calls made now."""
        if _compiling() or transforms_active() or _dispatch_modes():
            return False
        return not forward_mode() and _jit_trace() is None


def records_trace() -> bool:
    """Whether torch.jit.trace records the calls made now. It keeps every int as a constant."""
    return _jit_trace() is not None


def sizes_may_change() -> bool:
    """Whether the calls made now become a graph that may get tensors of other sizes."""
    return _compiling() or records_trace()


def _onnx_exports() -> bool:
    return torch.onnx.is_in_onnx_export()


# If torch.onnx.export fails without the compiler, it tries again with it. The compiler assumes that
# PyTorch's function returns False, but calls a function with this attribute. 2.13 to 2.13; other
# versions were not checked. Without: the export ends with an error about our operators.
_onnx_exports._dynamo_marked_constant = True  # type: ignore[attr-defined]


def exports_onnx() -> bool:
    """Whether torch.onnx.export records the calls made now."""
    return sizes_may_change() and _onnx_exports()


def not_in_onnx(call: str, reason: str) -> RuntimeError:
    return RuntimeError(
        f"torch.onnx.export cannot record {call}: {reason}. fastattn.restore(model) gives a model "
        "its own attention back"
    )


def watched_by_modes_alone(count: int) -> bool:
    """Whether nothing but at most this number of modes has to see the calls made now."""
    if _compiling() or transforms_active() or _dispatch_modes() > count:
        return False
    return not forward_mode() and _jit_trace() is None


if _dispatch_mode is not _ABSENT:

    class _Onlooker(_dispatch_mode):  # type: ignore[misc, valid-type]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))


def _no_dispatch_mode(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        f"torch {torch.__version__} has no modes of its dispatcher to check results by"
    )


DispatchMode: Any = _dispatch_mode
if _dispatch_mode is _ABSENT:
    DispatchMode = type("DispatchMode", (), {"__init__": _no_dispatch_mode})


def through_the_dispatcher() -> contextlib.AbstractContextManager[Any]:
    """A context in which no call skips the dispatcher."""
    return contextlib.nullcontext() if _dispatch_mode is _ABSENT else _Onlooker()


def _traced_graph() -> Any:
    """The graph of a forward and its backward that is being traced, None if there is none.

    2.13 to 2.13; other versions were not checked. Without: None, and a seed may be drawn twice.
    """
    tracer: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    mode = tracer.get_proxy_mode() if hasattr(tracer, "get_proxy_mode") else None
    graph = getattr(getattr(mode, "tracer", None), "graph", None)
    inputs = [] if graph is None else graph.find_nodes(op="placeholder")
    return graph if any("tangents" in node.name for node in inputs) else None


def forward_may_run_again() -> bool:
    """Whether the backward of the graph that is being traced may compute parts of its forward.

    It may by the compiler's configuration, or by a region's own budget. 2.13 to 2.13; other
    versions were not checked. Without: it may by the configuration, and regions have no budget.
    """
    if _traced_graph() is None:
        return False
    config = sys.modules["torch._functorch.config"]
    annotations = torch.fx.traceback.current_meta.get("custom", {})
    budget = getattr(config, "activation_memory_budget", 0)
    budget = annotations.get("_region_activation_memory_budget", budget)
    return budget < 1 or getattr(config, "aggressive_recomputation", True)


def run_again_with_same_state() -> None:
    """Mark the random operator traced last as one of a checkpointed region.

    2.13 to 2.13; other versions were not checked. Without: the mark has no effect.
    """
    node = next(iter(reversed(_traced_graph().nodes)))
    policy = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
    node.meta.setdefault("recompute", policy)
    node.meta.setdefault("ac_graph_id", 0)


_fake_tensor_mode = _find("torch._subclasses.fake_tensor.FakeTensorMode")


def tensors_without_memory() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors have no memory and calls compute nothing.

    ``FakeTensorMode``: 2.6 to 2.15. Without: real tensors, and everything is computed.
    """
    if _fake_tensor_mode is _ABSENT:
        return through_the_dispatcher()
    mode: contextlib.AbstractContextManager[Any] = _fake_tensor_mode(allow_non_fake_inputs=True)
    return mode


# --- autograd below the dispatcher ----------------------------------------------------------------

# Single-level autograd functions, the permission to call one under a transform, and the call to the
# level below. 2.6 to 2.15, all three. Without one of them: calls through the dispatcher use the
# reference, which PyTorch can differentiate.
SingleLevelFunction: Any = _find("torch.autograd.function._SingleLevelFunction")
single_level: Any = _find("torch._functorch.utils.enable_single_level_autograd_function")
below_autograd: Any = _find("torch._C._AutoDispatchBelowAutograd")
autograd_obstacles: list[str] = []
if _ABSENT in (SingleLevelFunction, single_level, below_autograd):
    SingleLevelFunction = torch.autograd.Function  # the same, except under torch.func
    autograd_obstacles = [f"torch {torch.__version__} lacks what our derivatives need in a graph"]
elif _find("torch.autograd.Function._compiled_autograd_key") is not _ABSENT:

    class SingleLevelFunction(SingleLevelFunction):  # type: ignore[no-redef]
        """Adds the key with which PyTorch compiles a backward: that of ``autograd.Function``.

        2.6 to 2.15. Without: the backward is not compiled.
        """

        _compiled_autograd_key = torch.autograd.Function._compiled_autograd_key


def _any_of_them_requires_grad(*args: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in args)


# Whether an argument is a tensor that requires a gradient. 2.8 to 2.15. Without: ask each.
any_requires_grad: Callable[..., bool] = _or(
    "torch._C._any_requires_grad", _any_of_them_requires_grad
)

_key_guard = _find("torch._C._ForceDispatchKeyGuard")
_included = _find("torch._C._dispatch_tls_local_include_set")
_excluded = _find("torch._C._dispatch_tls_local_exclude_set")

# Restores the dispatcher's state outside all modes and transforms: below a mode, torch.func is
# switched off. 2.6 to 2.15, all three. Without one of them: run in a new thread with that state.
if _ABSENT not in (_key_guard, _included, _excluded):
    _outside = _included(), _excluded()

    def run_outside(function: Callable[..., Any], *args: Any) -> Any:
        """Call the function where no mode, transform or tracer is at work."""
        with _key_guard(*_outside):
            return function(*args)

else:

    def run_outside(function: Callable[..., Any], *args: Any) -> Any:
        """Call the function where no mode, transform or tracer is at work."""
        grad = torch.is_grad_enabled()

        def call() -> Any:
            with torch.set_grad_enabled(grad):
                return function(*args)

        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(call).result()


# DLPack's table of functions that read tensors in C. 2.13 to 2.13; PyTorch has it under this name
# since December 2025, and other versions were not checked. Without: None, and the core reads the
# tensors of plain calls by their methods.
_exchange = _find("torch.Tensor.__dlpack_c_exchange_api__")
exchange_interface: Any = None if _exchange is _ABSENT else _exchange

# Whether memory may be shared with another tensor. ``_base``: 2.6 to 2.15. Without: it may be.
_base_of = _attribute_or("torch.Tensor()._base", lambda x: x)


def may_be_view(x: Tensor) -> bool:
    """Whether memory may be shared with another tensor."""
    return _base_of(x) is not None


# --- a tensor without memory of its own -----------------------------------------------------------

# A tensor of a subclass with this size, dtype and device; all its operators call
# ``__torch_dispatch__``. 2.6 to 2.15. Without: None, and the tensor is created with its memory.
_wrapper = _find("torch.Tensor()._make_wrapper_subclass")
wrapper_tensor: Callable[..., Any] | None = None if _wrapper is _ABSENT else _wrapper

# --- the legacy vmap ------------------------------------------------------------------------------

# PyTorch's legacy ``vmap``, which torch.autograd.grad(is_grads_batched=True) uses: one function
# hides a dimension of a tensor as a level, the other restores it. 2.6 to 2.15, both. Without: there
# is no such ``vmap``.
_add_level = _find("torch._add_batch_dim")
_remove_level = _find("torch._remove_batch_dim")


def with_vmap_level(x: Tensor, dim: int, level: int) -> Tensor:
    """Hide a dimension of a tensor; it must have no higher level."""
    hidden: Tensor = _add_level(x, dim, level)
    return hidden


def without_vmap_level(x: Tensor, level: int) -> Tensor | None:
    """The tensor with its hidden dimension in front; None if it has no such level."""
    # A tensor without this level is expanded to the size given here; others keep their own.
    one, two = (_remove_level(x, level, size, 0) for size in (1, 2))
    return one if one.shape[0] == two.shape[0] else None


def _hides_a_level(x: Tensor) -> bool:
    try:
        x.data_ptr()
    except RuntimeError:
        return any(without_vmap_level(x, level) is not None for level in range(1, 65))
    return False


# Whether a tensor hides a dimension this way. 2.6 to 2.15. Without: try all possible levels.
is_first_vmap: Callable[[Tensor], bool] = _or(
    "torch._C._functorch.is_legacy_batchedtensor", _hides_a_level
)
if _ABSENT in (_add_level, _remove_level):
    is_first_vmap = lambda _: False  # noqa: E731


# --- modules --------------------------------------------------------------------------------------


def _parameters_by_name(module: torch.nn.Module) -> dict[str, Any]:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def _children_by_name(module: torch.nn.Module) -> dict[str, Any]:
    return dict(module.named_children())


# The parameters and the children of a module, without the lookup by `__getattr__`, which takes as
# long as a product of small matrices. 2.6 to 2.15. Without: the public iterators.
parameters_of: Callable[[torch.nn.Module], Any] = _attribute_or(
    "torch.nn.Module()._parameters", _parameters_by_name
)
children_of: Callable[[torch.nn.Module], Any] = _attribute_or(
    "torch.nn.Module()._modules", _children_by_name
)
# Set by `Module.compile`, None before. 2.6 to 2.15. Without: assume it is compiled.
compiled_call_of: Callable[[torch.nn.Module], Any] = _attribute_or(
    "torch.nn.Module()._compiled_call_impl", lambda module: module.__call__
)

# The feed-forward block of a decoder layer, which a subclass may have replaced. 2.6 to 2.15.
# Without: its public parts.
_has_ff_block = _find("torch.nn.TransformerDecoderLayer._ff_block") is not _ABSENT


def feed_forward(layer: torch.nn.TransformerDecoderLayer, x: Tensor) -> Tensor:
    """The output of a decoder layer's feed-forward block."""
    if _has_ff_block:
        return layer._ff_block(x)
    hidden = layer.dropout(layer.activation(layer.linear1(x)))
    return layer.dropout3(layer.linear2(hidden))


# nn.MultiheadAttention's checks of its arguments' shapes and masks. 2.6 to 2.15. Without: ours,
# with other messages.
_shape_check = _find("torch.nn.functional._mha_shape_check")
_canonical_mask = _find("torch.nn.functional._canonical_mask")


def mha_is_batched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    heads: int,
) -> bool:
    """Whether the arguments of `nn.MultiheadAttention` have a batch; AssertionError if they
    disagree.
    """
    if _shape_check is not _ABSENT:
        return bool(_shape_check(query, key, value, key_padding_mask, attn_mask, heads))
    dims = query.dim()
    if dims not in (2, 3):
        raise AssertionError(f"query must be 2-D or 3-D, got {dims}-D")
    allowed = [("key", key, (dims,)), ("value", value, (dims,)), ("attn_mask", attn_mask, (2, 3))]
    for name, x, ranks in [*allowed, ("key_padding_mask", key_padding_mask, (dims - 1,))]:
        if x is not None and x.dim() not in ranks:
            ranks_text = " or ".join(f"{rank}-D" for rank in ranks)
            raise AssertionError(
                f"{name} must be {ranks_text} for a {dims}-D query, got {x.dim()}-D"
            )
    if dims == 2 and attn_mask is not None and attn_mask.dim() == 3:
        expected = (heads, query.shape[0], key.shape[0])
        if attn_mask.shape != expected:
            raise AssertionError(
                f"attn_mask must have the shape {expected}, got {tuple(attn_mask.shape)}"
            )
    return dims == 3


def mha_check_mask(
    mask: Tensor | None, name: str, dtype: torch.dtype, other: Tensor | None, other_name: str
) -> Tensor | None:
    """Return a mask of `nn.MultiheadAttention` as an additive one of ``dtype``; AssertionError if
    it is none, a warning if its dtype is not that of the ``other`` mask.
    """
    other_type = None if other is None else other.dtype
    if _canonical_mask is not _ABSENT:
        found: Tensor | None = _canonical_mask(
            mask=mask,
            mask_name=name,
            other_type=other_type,
            other_name=other_name,
            target_type=dtype,
            check_other=other is not None,
        )
        return found
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise AssertionError(f"{name} must be boolean or floating-point, got {mask.dtype}")
    if other_type not in (None, mask.dtype):
        warnings.warn(f"{name} is {mask.dtype} but {other_name} {other_type}", stacklevel=3)
    return mask if mask.is_floating_point() else mask.to(dtype).masked_fill(mask, float("-inf"))


# --- PyTorch's fused attention kernels ------------------------------------------------------------


def _operator(path: str) -> Any | None:
    found = _find(path)
    return None if found is _ABSENT else found


# The fused kernels of the CPU, and which kernel PyTorch would choose: the public function may
# silently choose the slow one. 2.6 to 2.15, all three. Without: None; the backend `torch` declines.
flash_cpu = _operator("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default")
flash_cpu_backward = _operator(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
)
fused_choice = _operator("torch._fused_sdp_choice")
# FlashAttention on GPUs. 2.6 to 2.15, both. Without: None, and the backend `torch` declines.
flash_cuda = _operator("torch.ops.aten._scaled_dot_product_flash_attention.default")
flash_cuda_backward = _operator(
    "torch.ops.aten._scaled_dot_product_flash_attention_backward.default"
)

# What `aten::scaled_dot_product_attention` ran before anything was registered for it, for whatever
# keys. 2.6 to 2.15, both names. Without: `decompose`, which looks for the kernel in each call.
_attention = torch.ops.aten.scaled_dot_product_attention.default
_of_key = _find("torch.ops.aten.scaled_dot_product_attention.default._op_dk")
_composite = _find("torch._C.DispatchKey.CompositeImplicitAutograd")
stock_attention: Callable[..., Any] = _attention.decompose
if _ABSENT not in (_of_key, _composite):
    stock_attention = functools.partial(_of_key, _composite)

# --- oneDNN ---------------------------------------------------------------------------------------

_linear_pointwise = _find("torch.ops.mkldnn._linear_pointwise.default")
# oneDNN's inner product (x, weight, bias, "none", [], ""). 2.6 to 2.15, if PyTorch was built with
# oneDNN. Without: None, and the caller uses another GEMM.
onednn_linear: Any | None = None
if _linear_pointwise is not _ABSENT and torch.backends.mkldnn.is_available():
    onednn_linear = _linear_pointwise


def _answer(path: str) -> bool:
    found = _find(path)
    try:
        return found is not _ABSENT and bool(found())
    except RuntimeError:  # declared, but not built
        return False


# Whether oneDNN has 16-bit arithmetic on this processor. 2.6 to 2.15. Without: no.
onednn_has_bfloat16 = _answer("torch.ops.mkldnn._is_mkldnn_bf16_supported")
onednn_has_float16 = _answer("torch.ops.mkldnn._is_mkldnn_fp16_supported")
