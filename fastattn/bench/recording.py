"""What a program calls: the fused operators of the library, seen where the compiler sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

OnCall = Callable[[str, Sequence[Any], Mapping[str, Any]], None]


class OperatorCalls(TorchDispatchMode):
    """Tells `on_call` of every operator of fastattn: its name, its tensors, its keywords."""

    def __init__(self, on_call: OnCall) -> None:
        super().__init__()
        self.on_call = on_call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "fastattn":
            given = func._schema.arguments
            count = sum("Tensor" in str(argument.type) for argument in given)
            names = [argument.name for argument in given[count:-1]]  # the last names the backend
            keywords = dict(zip(names, args[count:], strict=False))
            self.on_call(func._opname, args[:count], keywords)
        return func(*args, **(kwargs or {}))
