"""Which masks and inputs the models of transformers accept."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch


@torch.compiler.assume_constant_result
def takes_any_mask(config: Any) -> bool:
    """Return whether the models of ``config`` read masks other than eager attention's.

    Eager attention adds its mask to the scores. Some models compute attention themselves in this
    way. Others use the registry but modify the mask as a matrix of scores, or do not say which of
    their layers are causal. transformers raises an error if ``"sdpa"`` is requested for them. Under
    any other registered name they run, and a boolean mask, or none, makes their results wrong.
    """
    if getattr(config, "_attn_implementation", None) != "fastattn":
        return True  # transformers has checked the other names
    config_class = type(config)
    if config_class not in _takes_any_mask:
        models = _models_of(config_class)
        if not models:  # the config of a model that is not part of transformers
            return True
        _takes_any_mask[config_class] = any(map(_reads_any_mask, models))
        if not _takes_any_mask[config_class]:
            warnings.warn(
                f"attn_implementation='fastattn': the models of {config_class.__name__} support "
                "eager attention only. Their masks stay those of eager attention; attention that "
                "they compute themselves is not replaced",
                stacklevel=2,
            )
    return _takes_any_mask[config_class]


_takes_any_mask: dict[type, bool] = {}  # by the class of the config


@torch.compiler.assume_constant_result
def is_model_input(name: str) -> bool:
    """Return whether any model class that is imported can be called with this argument."""
    if name not in _model_inputs:
        for model in _subclasses(_base_of_models()):
            _model_inputs.update(inspect.signature(model.forward).parameters)
    return name in _model_inputs


_model_inputs: set[str] = set()


def _models_of(config_class: type) -> list[Any]:
    """The model classes of a config; if it has none, the model classes in its package."""
    models = list(_subclasses(_base_of_models()))
    package = config_class.__module__.rpartition(".")[0]
    return [model for model in models if model.config_class is config_class] or [
        model for model in models if model.__module__.rpartition(".")[0] == package
    ]


def _reads_any_mask(model: Any) -> bool:
    """Whether a model class supports boolean masks through the registry."""
    return bool(model._supports_sdpa or model._supports_flex_attn) and _uses_registry(model)


def _uses_registry(model: Any) -> bool:
    """False if the module of a model class defines attention and does not use the registry."""
    try:
        code = inspect.getsource(sys.modules[model.__module__])
    except (KeyError, OSError, TypeError):  # no source to read
        return True
    defines_attention = re.search(r"^class \w*Attention\w*\(nn\.Module\)", code, re.MULTILINE)
    return defines_attention is None or "ALL_ATTENTION_FUNCTIONS" in code


def _base_of_models() -> Any:
    """transformers' base class of models."""
    return importlib.import_module("transformers.modeling_utils").PreTrainedModel


def _subclasses(base: type) -> Iterator[Any]:
    """All direct and indirect subclasses."""
    subclasses: list[type] = base.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from _subclasses(subclass)
