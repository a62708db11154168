"""The native core in another process: its kernels on another processor, judged here.

A call of ``fastattn._cpu`` is sent to :mod:`core_server` with the memory of its tensors; what it
wrote and made comes back. So the operators, the case tables and their judges run in this process,
as always, and only the native code runs on the other processor, which needs a Python but no
PyTorch.
"""

from __future__ import annotations

import builtins
import ctypes
import dataclasses
import functools
import pickle
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SERVER = Path(__file__).with_name("core_server.py")


class RemoteCore(types.ModuleType):
    """``fastattn._cpu`` whose functions run in ``command``, a Python that can import it from
    ``folder``.
    """

    def __init__(self, command: list[str], folder: Path) -> None:
        super().__init__("fastattn._cpu")
        self.__spec__ = ModuleSpec("fastattn._cpu", None)
        self._server = subprocess.Popen(
            [*command, str(SERVER), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("use_torch", "use_rules", "signature", "are_plain"):
            # The other process has its own, and its calls take the general path.
            return lambda *args: None
        return functools.partial(self._call, name)

    def _call(self, name: str, *args: Any, **named: Any) -> Any:
        regions: dict[tuple[int, int], int] = {}  # address and size of each storage: its number
        sent = tuple(self._portable(arg, regions) for arg in args)
        by_name = {key: self._portable(arg, regions) for key, arg in named.items()}
        memory = [(start % 4096, ctypes.string_at(start, size)) for start, size in regions]
        stream = self._server.stdin
        assert stream is not None
        assert self._server.stdout is not None
        pickle.dump((name, sent, by_name, memory), stream)
        stream.flush()
        try:
            error, result, written = pickle.load(self._server.stdout)
        except EOFError:
            raise RuntimeError(
                f"{name} ended the process of the native core with code {self._server.wait()}"
            ) from None
        for (start, size), content in zip(regions, written, strict=True):
            ctypes.memmove(start, content, size)
        if error is not None:
            raise getattr(builtins, error, RuntimeError)(result)
        return _made(result)

    def _portable(self, value: Any, regions: dict[tuple[int, int], int]) -> Any:
        """The value without tensors, records and functions of this process."""
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            start = storage.data_ptr()
            number = regions.setdefault((start, storage.nbytes()), len(regions))
            dtype = str(value.dtype).removeprefix("torch.")
            place = value.data_ptr() - start
            how = (dtype, tuple(value.shape), value.stride(), value.requires_grad)
            return ("tensor", number, place, *how)
        if isinstance(value, tuple):
            return ("tuple", *(self._portable(item, regions) for item in value))
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return types.SimpleNamespace(**{f.name: getattr(value, f.name) for f in fields})
        return ("answer", value()) if callable(value) else value


def _made(value: Any) -> Any:
    """The tensors in a result of the other process."""
    if not isinstance(value, tuple):
        return value
    kind, *rest = value
    if kind != "tensor":
        return tuple(_made(item) for item in rest)
    dtype, shape, content = rest
    if not content:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).view(shape)


def install(command: list[str], folder: Path) -> RemoteCore:
    """Make every later ``import fastattn._cpu`` find the remote core."""
    core = RemoteCore(command, folder)
    sys.modules["fastattn._cpu"] = core
    return core
