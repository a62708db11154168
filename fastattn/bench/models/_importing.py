"""The import of a library of models."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

_declared: list[torch.library.Library] = []  # declarations end with their last reference


def imported(name: str) -> ModuleType:
    """Import a library of models."""
    _declare_operators()
    return importlib.import_module(name)


def _declare_operators() -> None:
    """Make torchvision importable, which timm, transformers and others import for their images.

    The import fails if torchvision was built for another PyTorch: operators that it extends do not
    exist then. Models call none of them, so they are only declared.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return  # those that need it say so
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
