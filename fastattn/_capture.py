"""``capture``: records the attention weights of every attention layer while a model runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as stock_function
from torch.overrides import TorchFunctionMode

from fastattn import compat
from fastattn.nn import GlobalAttention
from fastattn.nn._nested import nested_attention
from fastattn.nn.mha import MultiheadAttention, keep_forward_called
from fastattn.ops.sdpa import scaled_dot_product_attention

# How to request a layer's weights: keyword arguments of its forward, with their values.
_REQUESTS: tuple[dict[str, bool], ...] = (
    {"need_weights": True, "average_attn_weights": False},  # torch.nn.MultiheadAttention
    {"need_weights": True},
    {"return_attention_scores": True},  # Keras
)


@contextlib.contextmanager
def capture(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the attention weights of every attention layer that runs within the block.

    An attention layer is a ``torch.nn.MultiheadAttention`` (stock, replaced or fastattn's); any
    module whose ``forward`` takes ``need_weights`` or ``return_attention_scores`` and then returns
    a tuple with the weights last, as all attention modules of :mod:`fastattn.nn` do; and any other
    module that calls ``torch.nn.functional.scaled_dot_product_attention``, as timm's modules do,
    and that contains none of the former. Of a module's methods, only its call is recorded, but the
    modules that other methods call are recorded, too.

    The results of the model stay bitwise the same. A layer whose weights the model itself does not
    request runs a second time for them, without gradient and with the same random numbers, so they
    are the weights of this call after dropout. For a call of PyTorch's function they are the
    weights before dropout, and only that call is computed again. This costs time and memory. The
    model is restored when the block ends. Two things differ inside the block: a *stock*
    ``torch.nn.TransformerEncoderLayer`` calls its attention instead of its fast path, which agrees
    with it up to rounding, and a compiled model runs uncompiled.

    Args:
        model: any module; it may itself be the attention layer.

    Yields:
        A dictionary from the name of a layer, as in ``model.named_modules()``, to its weights,
        detached, one tensor for each call: [N, H, L, S] of multi-head attention, for every head
        ([H, L, S] unbatched; padded with 0 for a NestedTensor), [B, K, N] of ``MemN2N``,
        [B, Tq, Tk] of ``BahdanauAttention`` ([B, Tk] for one step), [N, H, L, S] of the
        ``association_core`` in ``Hopfield`` and its kin, [..., L, S] of PyTorch's function. Layers
        are in the order of their first call.

    Raises:
        TypeError: ``model`` is not a module, a layer does not return its weights as expected, or a
            call of PyTorch's function has no weights, as with NestedTensors.
        ValueError: it has a stock layer whose own ``forward`` does not take ``need_weights``, or it
            has no attention layer, which may only be known when the block ends.
        RuntimeError: a layer is already being captured.

    Examples:
        >>> import torch, fastattn
        >>> encoder = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
        >>> fastattn.replace_mha(encoder)
        ['self_attn']
        >>> with fastattn.capture(encoder) as weights:
        ...     out = encoder(torch.ones(2, 5, 16))
        >>> [(name, each.shape) for name, (each,) in weights.items()]
        [('self_attn', torch.Size([2, 4, 5, 5]))]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    layers = {
        name: (module, request)
        for name, module in model.named_modules()
        if (request := _request(name, module)) is not None
    }
    recorder = _Recorder()
    with contextlib.ExitStack() as undo:
        if any(_is_compiled(module) for module in model.modules()):
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        for name, (module, request) in layers.items():
            recorder.watch(name.replace("_orig_mod.", ""), module, request, undo)
        calls = _FunctionCalls(recorder, model)
        undo.callback(calls.leave)
        for module in _modules_beside(model, {module for module, _ in layers.values()}):
            undo.callback(module.register_forward_pre_hook(calls.begin, prepend=True).remove)
            undo.callback(module.register_forward_hook(calls.end, always_call=True).remove)
        yield recorder.weights
    if not layers and not recorder.weights:
        raise ValueError(
            "capture: no attention layer of the model ran: none returns its weights, and none "
            "called torch.nn.functional.scaled_dot_product_attention. For a model of transformers "
            "whose attention fastattn computes, call fastattn.restore(model) before, or take its "
            "weights by model(..., output_attentions=True)"
        )


class _Recorder:
    def __init__(self) -> None:
        self.weights: dict[str, list[Tensor]] = {}  # by the name of the layer, one for each call
        # True during the second run of a layer, whose inner layers are recorded already.
        self.paused = False

    def watch(
        self, name: str, module: nn.Module, request: dict[str, bool], undo: contextlib.ExitStack
    ) -> None:
        """Replace the layer's forward by `run_and_record`, until `undo` closes."""
        run = functools.partial(self.run_and_record, name, request)
        if isinstance(module, MultiheadAttention):  # calls `_watch(forward, module, ...)`
            attribute = "_watch"
        else:
            attribute, run = "forward", functools.partial(run, type(module).forward, module)
            if isinstance(module, nn.MultiheadAttention):
                undo.callback(module.register_forward_pre_hook(keep_forward_called).remove)
        if attribute in module.__dict__:
            raise RuntimeError(
                f"{name or 'the model'} is being captured already, or has its own forward"
            )
        module.__dict__[attribute] = run
        undo.callback(module.__dict__.pop, attribute)

    def run_and_record(
        self,
        name: str,
        request: dict[str, bool],
        forward: Callable[..., Any],
        module: nn.Module,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        """Return the output of ``forward``; run it again for the weights if it lacks them."""
        with _unwatched(module):
            if self.paused:
                return forward(module, *args, **keywords)
            state = _random_state() if module.training else None
            out = forward(module, *args, **keywords)
            bound = inspect.signature(forward).bind(module, *args, **keywords)
            bound.apply_defaults()
            result = out
            if any(bound.arguments[key] != value for key, value in request.items()):
                bound.arguments.update(request)
                result = self._run_for_weights(forward, bound, state)
        weights = result[-1] if isinstance(result, tuple) else None
        if not isinstance(weights, Tensor):
            raise TypeError(
                f"{name or 'the model'} ({type(module).__name__}) must return a tuple with its "
                f"weights last when called with {request}"
            )
        self.record(name, weights.detach().clone())
        return out

    def record(self, name: str, weights: Tensor) -> None:
        self.weights.setdefault(name, []).append(weights)

    def _run_for_weights(
        self, forward: Callable[..., Any], bound: inspect.BoundArguments, state: Any
    ) -> Any:
        """Run ``forward`` without gradients, from this state of the random number generators."""
        self.paused = True
        try:
            with torch.no_grad(), _random_numbers_from(state):
                query = bound.arguments.get("query")
                if isinstance(query, Tensor) and query.is_nested:
                    module, _, key, value = bound.args[:4]
                    if not isinstance(module, MultiheadAttention):  # the stock class has no weights
                        arguments = (module, query, key, value, None, None)  # no masks
                        return nested_attention(
                            *arguments, need_weights=True, average_attn_weights=False
                        )
                return forward(*bound.args, **bound.kwargs)
        finally:
            self.paused = False


class _FunctionCalls(TorchFunctionMode):
    """Records the weights of PyTorch's function, by the module that calls it.

    In effect only within the parts of a model without another attention layer: under such a mode
    PyTorch does not take its fast path of encoder layers.
    """

    def __init__(self, recorder: _Recorder, model: nn.Module) -> None:
        super().__init__()
        self._recorder = recorder
        self._names = {module: name for name, module in model.named_modules()}
        self._running = _RunningModules()

    # The hooks of each module; the outermost call turns the mode on and off.
    def begin(self, module: nn.Module, *_: Any) -> None:
        if not self._running.modules:
            self.__enter__()
        self._running.modules.append(module)

    def end(self, *_: Any) -> None:
        self._running.modules.pop()
        if not self._running.modules:
            self.__exit__(None, None, None)

    def leave(self) -> None:
        """Clean up at the end of the block, because no hook runs after an interrupt."""
        if self._running.modules:
            self._running.modules.clear()
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is stock_function and not self._recorder.paused:
            name = self._names[self._running.modules[-1]].replace("_orig_mod.", "")
            try:
                weights = _weights_of_call(args, kwargs)
            except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                raise TypeError(
                    f"{name or 'the model'}: a call of scaled_dot_product_attention has no weights "
                    f"to capture: {error}"
                ) from error
            self._recorder.record(name, weights)
        return out


class _RunningModules(threading.local):
    """The modules whose calls are in progress, for each thread, because modes are per thread."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []


def _modules_beside(module: nn.Module, layers: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of a model that neither contain nor belong to one of these layers."""
    if layers.isdisjoint(module.modules()):
        yield from module.modules()  # all: some, such as a ModuleList, are never called
    elif module not in layers:
        for child in module.children():
            yield from _modules_beside(child, layers)


def _weights_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The weights of a call of PyTorch's function, before dropout."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    arguments: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    with torch.no_grad():
        return scaled_dot_product_attention(**{**arguments, "dropout_p": 0.0}, need_weights=True)[1]


def _request(name: str, module: nn.Module) -> dict[str, bool] | None:
    """The arguments that make a layer return its weights; None: not an attention layer."""
    if isinstance(module, MultiheadAttention):
        return _REQUESTS[0]  # whatever the forward of a subclass accepts, because it calls this one
    if isinstance(module, GlobalAttention):
        return {}  # it always returns them
    try:
        parameters = inspect.signature(type(module).forward).parameters
    except (TypeError, ValueError):  # not written in Python
        return None
    request = next((each for each in _REQUESTS if parameters.keys() >= each.keys()), None)
    if request is None and isinstance(module, nn.MultiheadAttention):
        raise ValueError(
            f"{name or 'the model'}: the forward of {type(module).__name__} takes no need_weights; "
            "its weights can be captured after fastattn.replace_mha(model)"
        )
    return request


@contextlib.contextmanager
def _unwatched(module: nn.Module) -> Iterator[None]:
    """Keep a forward of fastattn's class from calling `run_and_record` again."""
    watch = module.__dict__.get("_watch")
    if watch is None:
        yield
        return
    module.__dict__["_watch"] = None
    try:
        yield
    finally:
        module.__dict__["_watch"] = watch


def _is_compiled(module: nn.Module) -> bool:
    return compat.may_be_compiled(module) or type(module).__name__ == "OptimizedModule"


def _random_state() -> tuple[Tensor, list[Tensor]]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


@contextlib.contextmanager
def _random_numbers_from(state: tuple[Tensor, list[Tensor]] | None) -> Iterator[None]:
    """Rewind the random number generators to `state`; afterwards, restore where they were."""
    if state is None:
        yield
        return
    cpu, gpus = state
    with torch.random.fork_rng(range(len(gpus))):
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
        yield
