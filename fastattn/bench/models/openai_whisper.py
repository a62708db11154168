"""The encoder of Whisper in OpenAI's package (Radford et al. 2022), in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastattn.bench.cells import Cell
from fastattn.bench.models._importing import imported
from fastattn.bench.models._library import LibraryModel
from fastattn.bench.models._model import Call
from fastattn.bench.models.whisper_encoder import WhisperEncoder
from fastattn.bench.ops._base import Inputs


class OpenaiWhisper(LibraryModel, WhisperEncoder):
    FUNCTION = "whisper.model.AudioEncoder"
    ABOUT = "N layers of width E, H heads, 4 E hidden units, on B sounds of L places, M mel bands"
    PACKAGE = "whisper"
    INSTALL = "pip install openai-whisper"
    CALLER = "whisper.model"

    def make(self, cell: Cell) -> nn.Module:
        encoder = imported("whisper").model.AudioEncoder
        model: nn.Module = encoder(cell["M"], cell["L"], cell["E"], cell["H"], cell["N"])
        return model

    def bind(self, cell: Cell, model: Any, given: Inputs) -> Call:
        return lambda: model(given["input_features"])

    @contextlib.contextmanager
    def exactly(self, model: Any) -> Iterator[None]:
        with super().exactly(model), _InDouble():
            yield


class _InDouble(TorchFunctionMode):
    """Lets norms, which convert their inputs to float32, keep the float64 of the reference."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        return func(*args, **(kwargs or {}))


OP = OpenaiWhisper()
