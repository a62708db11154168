"""What depends on PyTorch's internals: its private names, which no other file uses, and whether a
call may skip its dispatcher and read memory.

PyTorch 2.6 to 2.15 have every name of `NAMES`: these versions were checked. If another version
lacks one, `MISSING` lists it and the fast route is off: every call goes through the public
operators of ``torch.library``, with correct results, and `import fastattn` warns once. `OPTIONAL`
lists what some of the checked versions or builds lack; each such name has an alternative here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn import _openmp
from fastattn._warning import warn

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

# PyTorch 2.6 to 2.15 have all of these. ``Class()`` is an instance of the class.
NAMES = """
    torch._C._are_functorch_transforms_active
    torch._C._len_torch_dispatch_stack
    torch._C._get_tracing_state
    torch.autograd.forward_ad._current_level
    torch.utils._python_dispatch.TorchDispatchMode
    torch._subclasses.fake_tensor.FakeTensorMode
    torch.autograd.function._SingleLevelFunction
    torch.autograd.Function._compiled_autograd_key
    torch._functorch.utils.enable_single_level_autograd_function
    torch._C._AutoDispatchBelowAutograd
    torch._C._ForceDispatchKeyGuard
    torch._C._dispatch_tls_local_include_set
    torch._C._dispatch_tls_local_exclude_set
    torch.Tensor()._base
    torch.Tensor()._make_wrapper_subclass
    torch._add_batch_dim
    torch._remove_batch_dim
    torch._C._functorch.is_legacy_batchedtensor
    torch.nn.Module()._parameters
    torch.nn.Module()._modules
    torch.nn.Module()._compiled_call_impl
    torch.nn.Module()._forward_hooks
    torch.nn.Module()._forward_pre_hooks
    torch.nn.modules.module._global_backward_pre_hooks
    torch.nn.modules.module._global_backward_hooks
    torch.nn.modules.module._global_forward_pre_hooks
    torch.nn.modules.module._global_forward_hooks
    torch.nn.TransformerDecoderLayer._ff_block
    torch.nn.TransformerEncoderLayer._ff_block
    torch.nn.TransformerEncoderLayer._sa_block
    torch.nn.functional._mha_shape_check
    torch.nn.functional._canonical_mask
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    torch.ops.aten._scaled_dot_product_flash_attention.default
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    torch._fused_sdp_choice
    torch.ops.aten.scaled_dot_product_attention.default._op_dk
    torch._C.DispatchKey.CompositeImplicitAutograd
""".split()

# The versions that have each name.
OPTIONAL = {
    "torch._C._any_requires_grad": "2.8 to 2.15",
    "torch._C._is_any_autocast_enabled": "2.6 to 2.13; later versions were not checked",
    # Under this name since December 2025.
    "torch.Tensor.__dlpack_c_exchange_api__": "2.13; other versions were not checked",
    "torch.ops.mkldnn._linear_pointwise.default": "2.6 to 2.15, where built with oneDNN",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "2.6 to 2.15, where built with oneDNN",
    "torch.ops.mkldnn._is_mkldnn_fp16_supported": "2.6 to 2.15, where built with oneDNN",
}


def _find(path: str) -> Any:
    """The object at a path of NAMES or OPTIONAL; None if PyTorch lacks it, True if it is None."""
    owner: Any = torch
    for part in path.split(".")[1:]:
        if not hasattr(owner, part.removesuffix("()")):
            return None
        owner = getattr(owner, part.removesuffix("()"))
        owner = owner() if part.endswith("()") else owner
    return True if owner is None else owner


_objects = {path: _find(path) for path in (*NAMES, *OPTIONAL)}
LACKING = [path for path, value in _objects.items() if value is None]
MISSING = [path for path in LACKING if path in NAMES]
if MISSING:
    warn(
        f"torch {torch.__version__} lacks {', '.join(MISSING)}, which fastattn's fast route needs. "
        "Results are right, but calls are slower. A later fastattn may support this version.",
        RuntimeWarning,
    )


# --- interceptors of calls: compilers, transforms, modes, tracers ---------------------------------


def _is_function_refused() -> bool:
    """Whether a ``torch.func`` transform is active: it refuses functions without setup_context."""
    try:
        torch.autograd.Function.apply()
    except NotImplementedError:  # its forward, which no transform refused
        return False
    except RuntimeError:  # the transform's refusal
        return True
    raise AssertionError("a function without a forward ran")


_ZERO = torch.zeros(())
_compiling = torch.compiler.is_compiling
_jit_trace: Callable[[], Any] = _objects["torch._C._get_tracing_state"]
# Whether a transform of torch.func is active.
transforms_active: Callable[[], bool] = _objects["torch._C._are_functorch_transforms_active"]
# The number of modes below the dispatcher.
_dispatch_modes: Callable[[], int] = _objects["torch._C._len_torch_dispatch_stack"]
if MISSING:
    transforms_active = _is_function_refused
    _dispatch_modes = lambda: sys.maxsize  # noqa: E731  (no call skips the dispatcher)

# Whether autocast is on for any device; the alternative for the CPU is slower.
any_autocast: Callable[[], bool] = _objects["torch._C._is_any_autocast_enabled"] or (
    lambda: torch.is_autocast_enabled("cpu")
)


def forward_mode() -> bool:
    """Whether forward-mode differentiation is active."""
    if not MISSING:
        return forward_ad._current_level >= 0
    if _compiling():
        return False
    try:  # make_dual() raises outside of a level of forward mode
        forward_ad.make_dual(_ZERO, _ZERO)
    except RuntimeError:
        return False
    return True


def is_unintercepted(modes: int = 0) -> bool:
    """Whether no compiler, transform, tracer or mode intercepts calls.

    Up to ``modes`` modes are allowed.
    """
    if _compiling() or _dispatch_modes() > modes or transforms_active():
        return False
    return forward_ad._current_level < 0 and _jit_trace() is None


def may_plan() -> bool:
    """Whether a call may run a plan of fastattn.call: ``is_unintercepted()``, and no autocast.

    Every call checks this, so it is written out as one expression.
    """
    return not (
        _compiling()
        or _dispatch_modes()
        or transforms_active()
        or any_autocast()
        or forward_ad._current_level >= 0
        or _jit_trace() is not None
    )


def records_trace() -> bool:
    """Whether torch.jit.trace is recording, which keeps every int as a constant."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def sizes_may_change() -> bool:
    """Whether a graph is being recorded that may later get tensors of other sizes."""
    return _compiling() or records_trace()


Function = TypeVar("Function", bound=Callable[..., Any])


def constant_for_compiler(function: Function) -> Function:
    """Let the compiler call a function while it traces, and keep the answer.

    ``torch.compiler.assume_constant_result`` does the same, but its call imports the compiler.
    Checked with PyTorch 2.13 only; another version may ignore it, and trace the function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_symbolic_number(x: int) -> bool:
    """Whether the compiler keeps this number as a symbol; checked with PyTorch 2.13 only."""
    if not torch.compiler.is_dynamo_compiling():
        return False
    return not torch.fx.experimental.symbolic_shapes.has_static_value(x)


# Whether the compiler can trace the recorders of a score_mod; checked with PyTorch 2.13 only.
COMPILES_RECORDERS = (_version() or OLDEST) >= (2, 13)


# If torch.onnx.export fails without the compiler, it tries again with it. The compiler assumes that
# PyTorch's function returns False, but calls a marked function. Without the mark the export ends
# with an error about fastattn's operators.
@constant_for_compiler
def _onnx_exports() -> bool:
    return torch.onnx.is_in_onnx_export()


def exports_onnx() -> bool:
    """Whether torch.onnx.export is recording."""
    return sizes_may_change() and _onnx_exports()


def not_in_onnx(call: str, reason: str) -> RuntimeError:
    return RuntimeError(
        f"torch.onnx.export cannot record {call}: {reason}. fastattn.restore(model) gives a model "
        "its own attention back"
    )


# Whether torch.export is recording. 2.7 to 2.15.
is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


class _NoDispatchMode:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"torch {torch.__version__} lacks the modes that this needs")


# The base class for modes, which intercept the dispatcher's calls.
DispatchMode: Any = _objects["torch.utils._python_dispatch.TorchDispatchMode"] or _NoDispatchMode


class _PassiveMode(DispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def through_the_dispatcher() -> contextlib.AbstractContextManager[Any]:
    """A context in which no call skips the dispatcher."""
    return contextlib.nullcontext() if MISSING else _PassiveMode()


def tensors_without_memory() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors have no memory and calls compute nothing."""
    mode: Any = _objects["torch._subclasses.fake_tensor.FakeTensorMode"] or _NoDispatchMode
    context: contextlib.AbstractContextManager[Any] = mode(allow_non_fake_inputs=True)
    return context


def _traced_graph() -> Any:
    """The joint graph of a forward and its backward that is being traced, or None.

    Checked with PyTorch 2.13 only. If None, a backward may draw its seed again.
    """
    tracer: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    mode = tracer.get_proxy_mode() if hasattr(tracer, "get_proxy_mode") else None
    graph = getattr(getattr(mode, "tracer", None), "graph", None)
    inputs = [] if graph is None else graph.find_nodes(op="placeholder")
    # The gradients of the outputs are inputs of a joint graph, named tangents.
    return graph if any("tangents" in node.name for node in inputs) else None


def may_recompute_forward() -> bool:
    """Whether the backward of the graph that is being traced may recompute parts of its forward.

    The compiler's configuration allows it, or the memory budget of a region. Checked with PyTorch
    2.13 only: where a region has no budget, only the configuration counts.
    """
    if _traced_graph() is None:
        return False
    config = sys.modules["torch._functorch.config"]
    annotations = torch.fx.traceback.current_meta.get("custom", {})
    budget = getattr(config, "activation_memory_budget", 0)
    budget = annotations.get("_region_activation_memory_budget", budget)
    return budget < 1 or getattr(config, "aggressive_recomputation", True)


def keep_random_state_of_last_node() -> None:
    """Mark the random operator traced last as part of a checkpointed region.

    If the backward recomputes it, the compiler then restores the generator's state of the forward.
    Checked with PyTorch 2.13 only: a version that does not read these marks ignores them.
    """
    node = next(iter(reversed(_traced_graph().nodes)))
    policy = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
    # A user's checkpoint has set both marks; its regions are numbered from 1, so 0 is a new one.
    node.meta.setdefault("recompute", policy)
    node.meta.setdefault("ac_graph_id", 0)


# --- tensors that a kernel may read ---------------------------------------------------------------

# A tensor whose storage was freed, as FSDP does, has the address 0, or, if it is a view, its offset
# in bytes. So a tensor below this address may be freed; `was_freed` tells.
_LOWEST_ADDRESS = 2**32
_EXACT_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None)})


def has_strided_memory(x: Tensor) -> bool:
    """Whether the values of a tensor are stored in strided memory at its address.

    False for a lazy negation, a gradient without memory, a tensor wrapped by a transform (batched
    gradients; a tensor that outlived ``torch.func``), or a sparse tensor.
    """
    try:
        return not x.is_neg() and (x.data_ptr() >= _LOWEST_ADDRESS or x.numel() == 0)
    except RuntimeError:  # it has no address
        return False


def was_freed(x: Tensor) -> bool:
    """Whether a tensor that is not empty has no memory."""
    return x.numel() > 0 and x.data_ptr() == x.storage_offset() * x.element_size()


def runs_eagerly(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors with strided memory, and no transform or mode is active.

    If False, the call goes through ``torch.ops``, where the tracer, the transform or the subclass
    intercepts it.
    """
    if not (is_unintercepted() and _EXACT_TYPES.issuperset(map(type, tensors))):
        return False
    try:  # has_strided_memory() of each tensor, inlined
        for x in tensors:
            if x is not None and (x.is_neg() or (x.data_ptr() < _LOWEST_ADDRESS and x.numel())):
                return False
    except RuntimeError:
        return False
    return True


def is_eager_on_cpu(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary CPU tensors, and no tracer, transform, compiler or mode is active.

    Only then may a branch depend on their values.
    """
    return runs_eagerly(*tensors) and all(x is None or x.is_cpu for x in tensors)


# --- autograd below the dispatcher ----------------------------------------------------------------

# Autograd functions of a single level, the permission to call one under a transform, and the call
# to the level below. Only the fast route uses them.
SingleLevelFunction: Any = torch.autograd.Function
single_level: Any = _objects["torch._functorch.utils.enable_single_level_autograd_function"]
below_autograd: Any = _objects["torch._C._AutoDispatchBelowAutograd"]
if not MISSING:
    _key = {"_compiled_autograd_key": torch.autograd.Function._compiled_autograd_key}
    _base: Any = _objects["torch.autograd.function._SingleLevelFunction"]
    # With the key by which PyTorch compiles a backward, which only autograd.Function has.
    SingleLevelFunction = type("SingleLevelFunction", (_base,), _key)


def _any_argument_requires_grad(*args: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in args)


# Whether an argument is a tensor that requires a gradient. The compiler cannot trace PyTorch's
# function, which is called in traced code if the fast route is off.
any_requires_grad: Callable[..., bool] = (
    _objects["torch._C._any_requires_grad"] or _any_argument_requires_grad
)

if MISSING:
    any_requires_grad = _any_argument_requires_grad

    def run_outside(function: Callable[..., Any], *args: Any) -> Any:
        """Call the function where no mode, transform or tracer is at work: in a new thread."""
        grad = torch.is_grad_enabled()

        def call() -> Any:
            with torch.set_grad_enabled(grad):
                return function(*args)

        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(call).result()

else:
    # The dispatcher's state outside all modes and transforms: below a mode, torch.func is off.
    _outside = (
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
    )

    def run_outside(function: Callable[..., Any], *args: Any) -> Any:
        """Call the function where no mode, transform or tracer is at work."""
        with torch._C._ForceDispatchKeyGuard(*_outside):
            return function(*args)


# DLPack's table of functions that read tensors in C; if None, the core calls the tensors' methods.
exchange_interface: Any = _objects["torch.Tensor.__dlpack_c_exchange_api__"]
# A tensor of a subclass with this size, dtype and device; all its operators call
# ``__torch_dispatch__``.
wrapper_tensor: Callable[..., Any] = _objects["torch.Tensor()._make_wrapper_subclass"]


def may_be_view(x: Tensor) -> bool:
    """Whether a tensor may share its memory with another one."""
    return bool(MISSING) or x._base is not None


# --- the legacy vmap ------------------------------------------------------------------------------

# PyTorch's legacy ``vmap``, which torch.autograd.grad(is_grads_batched=True) uses: one function
# hides a dimension of a tensor as a level, the other restores it. Without them, that ``vmap`` calls
# fastattn's operators once for each example.
is_first_vmap: Callable[[Tensor], bool] = _objects["torch._C._functorch.is_legacy_batchedtensor"]
if MISSING:
    is_first_vmap = lambda _: False  # noqa: E731


def with_vmap_level(x: Tensor, dim: int, level: int) -> Tensor:
    """Hide a dimension of a tensor; it must have no higher level."""
    hidden: Tensor = torch._add_batch_dim(x, dim, level)
    return hidden


def without_vmap_level(x: Tensor, level: int) -> Tensor | None:
    """The tensor with its hidden dimension in front; None if it has no such level."""
    # PyTorch expands a tensor without this level to the size of the call; others keep their size.
    of_one, of_two = (torch._remove_batch_dim(x, level, size, 0) for size in (1, 2))
    return of_one if of_one.shape[0] == of_two.shape[0] else None


# --- modules --------------------------------------------------------------------------------------


def parameters_of(module: torch.nn.Module) -> dict[str, Any]:
    """The parameters of a module by name.

    The lookup by ``__getattr__`` takes as long as multiplying small matrices.
    """
    if MISSING:
        return dict(module.named_parameters(recurse=False, remove_duplicate=False))
    return module._parameters


def children_of(module: torch.nn.Module) -> dict[str, Any]:
    """The children of a module by name, without the lookup by ``__getattr__``."""
    return dict(module.named_children()) if MISSING else module._modules


def have_hooks(
    modules: Iterable[torch.nn.Module], harmless: Callable[[Callable[..., Any]], bool]
) -> bool:
    """Whether one of these modules has a hook, or its own ``forward``, that must be called.

    ``harmless(hook)`` says whether a hook of a module does nothing.
    """
    if MISSING:
        return True
    for module in modules:
        for hooks in hooks_of(module):
            if hooks and not all(map(harmless, hooks.values())):
                return True
        if "forward" in module.__dict__ or module._compiled_call_impl is not None:
            return True
    return has_global_hook()


# The dictionaries of global hooks. PyTorch 2.6 has no function that looks into all of them.
_global_hooks = [value for path, value in _objects.items() if "._global_" in path]


def has_global_hook() -> bool:
    """Whether a global hook observes all modules."""
    return bool(MISSING) or any(_global_hooks)


def hooks_of(module: torch.nn.Module) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The pre-hooks and hooks of a module."""
    return module._forward_pre_hooks, module._forward_hooks


def state_of(module: torch.nn.Module) -> list[dict[str, Any]]:
    """The dictionaries that hold a module's parts and hooks; equal copies mean an equal module."""
    return [vars(module), module._parameters, module._buffers, module._modules, *hooks_of(module)]


def may_be_compiled(module: torch.nn.Module) -> bool:
    """Whether ``Module.compile`` may have changed the module."""
    return bool(MISSING) or module._compiled_call_impl is not None


def feed_forward(layer: torch.nn.TransformerDecoderLayer, x: Tensor) -> Tensor:
    """The output of a decoder layer's feed-forward block, which a subclass may have replaced."""
    if not MISSING:
        return layer._ff_block(x)
    hidden = layer.dropout(layer.activation(layer.linear1(x)))
    return layer.dropout3(layer.linear2(hidden))


def has_own_blocks(layer: torch.nn.Module) -> bool:
    """Whether a subclass, or the instance, replaces a block that the forward of an encoder layer
    calls."""
    stock = torch.nn.TransformerEncoderLayer
    return any(
        name in vars(layer) or getattr(type(layer), name) is not getattr(stock, name)
        for name in ("_sa_block", "_ff_block")
    )


# The checks of nn.MultiheadAttention's arguments. Without them, later code raises other errors.
mha_is_batched: Callable[..., bool] = _objects["torch.nn.functional._mha_shape_check"] or (
    lambda query, *_: query.dim() == 3
)
canonical_mask: Any = _objects["torch.nn.functional._canonical_mask"]

# --- PyTorch's kernels ----------------------------------------------------------------------------

# The fused attention of the CPU and of GPUs, and which kernel PyTorch would choose: the public
# function may silently choose the slow one. If one is None, the backend `torch` declines.
_FLASH = "torch.ops.aten._scaled_dot_product_flash_attention"
flash_cpu: Any = _objects[f"{_FLASH}_for_cpu.default"]
flash_cpu_backward: Any = _objects[f"{_FLASH}_for_cpu_backward.default"]
fused_choice: Any = _objects["torch._fused_sdp_choice"]
flash_cuda: Any = _objects[f"{_FLASH}.default"]
flash_cuda_backward: Any = _objects[f"{_FLASH}_backward.default"]

# The original implementation of `aten::scaled_dot_product_attention`, whatever is registered for
# it. `decompose` looks the kernel up in each call.
_attention = torch.ops.aten.scaled_dot_product_attention.default
stock_attention: Callable[..., Any] = _attention.decompose
if not MISSING:
    _composite = torch._C.DispatchKey.CompositeImplicitAutograd
    stock_attention = functools.partial(_attention._op_dk, _composite)


def written_as_steps(operation: Any) -> Callable[..., Any]:
    """The decomposition of an operation in PyTorch's tracers, which takes a second to import."""
    steps: Callable[..., Any] = importlib.import_module("torch._decomp").decomposition_table[
        operation
    ]
    return steps


# oneDNN's inner product (x, weight, bias, "none", [], ""); if None, the caller uses another GEMM.
onednn_linear: Any | None = None
if torch.backends.mkldnn.is_available():
    onednn_linear = _objects["torch.ops.mkldnn._linear_pointwise.default"]


def _is_true(path: str) -> bool:
    """Whether PyTorch has the function at this path, and it returns true."""
    try:
        return _objects[path] is not None and bool(_objects[path]())
    except RuntimeError:  # declared, but not built
        return False


# Whether oneDNN has 16-bit arithmetic on this processor.
onednn_has_bfloat16 = _is_true("torch.ops.mkldnn._is_mkldnn_bf16_supported")
onednn_has_float16 = _is_true("torch.ops.mkldnn._is_mkldnn_fp16_supported")
