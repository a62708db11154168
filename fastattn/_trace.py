"""``trace``: counts the calls of fused attention, and says which kernel ran them."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn._table import as_html, as_text
from fastattn.compat import DispatchMode
from fastattn.explanation import explain_primitive
from fastattn.integrations.torch import STOCK, attend
from fastattn.library import operators, watchers

# PyTorch's own fused attention. Its unfused attention is a product, a softmax and another product,
# which no name distinguishes from others.
_FUSED = ("aten::_scaled_dot_product_", "aten::_native_multi_head_attention", "aten::_transformer_")


@dataclass
class Call:
    """All calls of one operator with the same shapes, dtype, backend and reason."""

    operator: str  # the name; that of a backward operator ends in "_backward"
    shapes: tuple[tuple[int, ...], ...]  # of the tensors given, in the order of the operator
    dtype: torch.dtype
    backend: str  # as in fastattn.use_backend; "" if PyTorch's own operator ran
    reason: str  # why no preferred backend ran; "" if the first one did
    count: int = 0
    seconds: float = 0.0  # of all calls together; 0 unless timed


@contextlib.contextmanager
def trace(timed: bool = False) -> Iterator[Calls]:
    """Count every call of fused attention within a ``with`` block, by kernel and shape.

    Each call of an operator of fastattn counts, forward and backward apart, and each call of
    PyTorch's own fused attention, whose ``backend`` is empty: that call did not reach fastattn.
    ``explain`` says why a call of fastattn takes its backend; ``trace`` says what a model calls.

    Results stay the same up to rounding. Within the block, each operator of PyTorch takes longer to
    call, and code compiled by ``torch.compile`` runs uncompiled. Only the calls of this thread
    count, with the backward of their results.

    PyTorch's unfused attention is not counted.

    Args:
        timed: measure the time of each call too. On a GPU this waits for each kernel.

    Yields:
        A sequence of :class:`Call`, in the order of first calls. ``print`` and notebooks show it as
        a table.

    >>> import torch, fastattn
    >>> x = torch.ones(1, 2, 5, 8)
    >>> with fastattn.trace() as calls:
    ...     for _ in range(3):
    ...         out = fastattn.scaled_dot_product_attention(x, x, x)
    >>> [(call.operator, call.shapes[0], call.count) for call in calls]
    [('scaled_dot_product_attention', (1, 2, 5, 8), 3)]
    """
    if not isinstance(timed, bool):
        raise TypeError(f"trace: timed must be a bool, got {type(timed).__name__}")
    calls = Calls(timed)
    token = watchers.set((*watchers.get(), calls.count))
    try:
        with _uncompiled(), calls:
            yield calls
    finally:
        watchers.reset(token)


_lock = threading.Lock()
_traces = 0  # the number of traces in effect, in all threads
_stance = contextlib.ExitStack()  # of the compiler, during all of them


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled code uncompiled; the compiler's stance is global to all threads."""
    global _traces
    with _lock:
        _traces += 1
        if _traces == 1 and "torch._dynamo" in sys.modules:  # the import takes a second
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            _traces -= 1
            if _traces == 0:
                _stance.close()


class Calls(DispatchMode):
    """The result of :func:`trace`: a mode of PyTorch's dispatcher, and the counted calls."""

    supports_higher_order_operators = True

    def __init__(self, timed: bool) -> None:
        super().__init__()
        self._timed = timed
        self._calls: dict[Any, Call] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is STOCK:  # in inference mode, whose kernel would run below this mode, unseen
            with self:
                return attend(*args, **kwargs)
        if not hasattr(func, "overloadpacket"):  # such as flex_attention
            return func(*args, **kwargs)
        if func not in operators and not func.name().startswith(_FUSED):
            return func(*args, **kwargs)
        return self.count(func, args, lambda: func(*args, **kwargs))

    def count(self, func: Any, args: Sequence[Any], run: Callable[[], Any]) -> Any:
        """Return ``run()``, which calls an operator, and count that call."""
        call = self._record_of(func, args)
        call.count += 1
        if not self._timed:
            return run()
        _wait_for_gpu(args)
        start = time.perf_counter()
        results = run()
        _wait_for_gpu(args)
        call.seconds += time.perf_counter() - start
        return results

    def _record_of(self, func: Any, args: Sequence[Any]) -> Call:
        tensors = [x for x in args if isinstance(x, Tensor)]
        name = func.overloadpacket.__name__
        shapes = tuple(tuple(x.shape) for x in tensors)
        # The dtype of the largest floating tensor: lse is float64, and tables may be of integers.
        floating = [x for x in tensors if x.is_floating_point()] or tensors
        dtype = max(floating, key=Tensor.numel).dtype
        key = (name, shapes, dtype, *_backend(func, args))
        return self._calls.setdefault(key, Call(*key))

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls.values())

    def __getitem__(self, index: int) -> Call:
        return list(self)[index]

    def __repr__(self) -> str:
        return as_text(self._rows())

    def _repr_html_(self) -> str:
        return as_html(self._rows())

    def _rows(self) -> list[list[str]]:
        """The table, its header first; times in ms."""
        header = ["calls", "operator", "shapes", "dtype", "backend", "reason"]
        rows = [
            [
                str(call.count),
                call.operator,
                " ".join("×".join(map(str, shape)) or "scalar" for shape in call.shapes),
                str(call.dtype).removeprefix("torch."),
                call.backend or "not fastattn",
                call.reason,
            ]
            for call in self
        ]
        if self._timed:
            header.insert(1, "ms")
            for row, call in zip(rows, self, strict=True):
                row.insert(1, f"{call.seconds * 1e3:.3g}")
        return [header, *rows]


def _backend(func: Any, args: Sequence[Any]) -> tuple[str, str]:
    """Which backend runs this operator, and why no preferred backend does."""
    operator = operators.get(func)
    if operator is None:
        return "", ""
    *_, backend = args
    if backend:  # a backward runs on the backend of its forward
        return backend, ""
    tensors, options = operator.split(args)
    explanation = explain_primitive(operator, (*tensors, options))
    return explanation.runs or "", explanation.passed_over


def _wait_for_gpu(args: Sequence[Any]) -> None:
    for x in args:
        if isinstance(x, Tensor) and x.is_cuda:
            torch.cuda.synchronize(x.device)
            return
