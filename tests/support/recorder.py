"""Records the operators of fastattn that a call runs, with their arguments."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """The calls of our operators, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "fastattn":
            self.calls[func] = args
        return func(*args, **(kwargs or {}))
