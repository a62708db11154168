"""Models of libraries that call PyTorch's own attention function, served by `activate`."""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn.bench.models._model import Model, widen
from fastattn.bench.models._watching import watching

_FUNCTION = "scaled_dot_product_attention"


class LibraryModel(Model):
    """`torch` runs the model as it is, fastattn within `activate`."""

    TORCH = "the model as it is, the same parameters"
    CALLER = "torch.nn.functional"  # the module in which layers find the function

    def choose(self, model: Any, attention: str) -> None:
        pass

    def serving(self, attention: str) -> contextlib.AbstractContextManager[Any]:
        from fastattn.integrations.torch import activate

        if attention == "eager":
            return sdpa_kernel(SDPBackend.MATH)
        return activate() if attention == "fastattn" else contextlib.nullcontext()

    def watching(self, attention: str) -> contextlib.AbstractContextManager[None]:
        caller = importlib.import_module(self.CALLER)
        function = getattr(caller, _FUNCTION)
        return watching(function, functools.partial(setattr, caller, _FUNCTION), self.stopwatch)

    def exactly(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return sdpa_kernel(SDPBackend.MATH)

    def widen(self, model: nn.Module) -> None:
        """Converts all parameters together: parts of a layer may be called on their own."""
        widen(list(model.parameters()))
