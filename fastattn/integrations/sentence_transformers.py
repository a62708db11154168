"""Texts of sentence-transformers without padding, on the kernels of packed sequences.

sentence-transformers packs the texts of a batch only for attention that is named after
flash-attention. :func:`unpad_inputs` makes it do so for ``attn_implementation="fastattn"``.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from fastattn.integrations._registration import (
    ABSENT,
    Registration,
    Registry,
    check_version,
    restore,
)

__all__ = ["Registration", "unpad_inputs"]

_LIBRARY = "sentence_transformers"
# The supported versions; the extra in pyproject.toml says the same.
OLDEST, BELOW = (6, 2), (7, 0)

_NAME = "fastattn"  # in the registry of transformers
# The arguments that the model passes on to each attention layer.
_PACKED_ARGUMENTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


def unpad_inputs(model: nn.Module) -> Registration:
    """Pack the texts of each batch one after the other instead of padding them, until it is undone.

    No layer computes padding then, neither attention nor any other. Embeddings and gradients are
    the same up to rounding. Texts are packed while the model inside runs with
    ``attn_implementation="fastattn"``, as after :func:`fastattn.accelerate`; with another
    implementation they are padded as before, and so are images and sounds at all times.

    Args:
        model: a ``SentenceTransformer`` or ``SparseEncoder``, or any module that contains one.

    Returns:
        A :class:`Registration`: ``undo()`` restores the padding; so does the end of a ``with``
        block. Several may be undone in any order: the texts are padded again after the last one.

    Raises:
        ImportError: sentence-transformers is not installed, or its version is out of the range.
        TypeError: ``model`` is not a module.
        ValueError: ``model`` contains no model of sentence-transformers, or one that cannot take
            packed texts: it does not accept them, its head reads positions of padded texts, or its
            attention does not come from transformers' registry.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"unpad_inputs: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    modules = tuple(_transformers_in(model))
    if not modules:
        raise ValueError(
            "unpad_inputs: model must contain a Transformer module of sentence-transformers, "
            f"{type(model).__name__} has none"
        )
    for module in modules:
        if why_not := _why_not(module):
            name = type(module.model).__name__
            raise ValueError(f"unpad_inputs: {name} cannot take packed texts: {why_not}")
    return Registration(_packing_modules, modules)


def _transformers_in(model: nn.Module) -> Iterator[Any]:
    """The modules that tokenize texts and run a model of transformers on them."""
    check_version(_LIBRARY, OLDEST, BELOW)
    kind = importlib.import_module(f"{_LIBRARY}.base.modules.transformer").Transformer
    return (module for module in model.modules() if isinstance(module, kind))


def _why_not(module: Any) -> str:
    """Why packed texts would fail in a module or change its result; "" if they do neither."""
    methods = {call["method"] for call in module.modality_config.values()} - {"forward"}
    if "text" not in module.modality_config:
        return "it takes no texts"
    if module.transformer_task not in ("feature-extraction", "fill-mask"):
        return f"the head of its task {module.transformer_task!r} reads positions of padded texts"
    if methods:
        return f"it is called by its method {min(methods)!r}"
    if module.backend != "torch":
        return f"its backend is {module.backend!r}"
    if not module.model.is_backend_compatible():
        return "it has attention of its own"
    return ""


class _PackingModules(Registry[nn.Module]):
    """The modules that pack their texts."""

    def __init__(self) -> None:
        super().__init__(weakref.WeakKeyDictionary())
        self._before = weakref.WeakKeyDictionary[nn.Module, dict[str, Any]]()

    def add(self, module: Any) -> None:
        """Make a module pack its texts."""
        attributes = vars(module)
        # sentence-transformers sets the same attributes for flash-attention.
        packing = {
            "can_flatten_inputs": True,
            "data_collator": _collator(),
            "_flatten_position_offset": module._infer_flatten_position_offset(),
            "_should_flatten_inputs": functools.partial(_should_pack, module),
        }
        if module.model_forward_params is not None:
            packing["model_forward_params"] = module.model_forward_params | _PACKED_ARGUMENTS
        self._before[module] = {name: attributes.get(name, ABSENT) for name in packing}
        attributes.update(packing)

    def remove(self, module: Any) -> None:
        """Make a module pad its texts again."""
        for name, value in self._before.pop(module).items():
            restore(vars(module), name, value)


_packing_modules = _PackingModules()


def _collator() -> Any:
    """The collator that packs sequences and returns the start of each."""
    return importlib.import_module("transformers").DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_position_ids=True, return_seq_idx=True
    )


def _should_pack(module: Any, *args: Any, **kwargs: Any) -> bool:
    """Replaces ``Transformer._should_flatten_inputs``: whether this batch is packed."""
    if module.config._attn_implementation != _NAME:
        return False  # another attention function would not separate the texts
    should_pack: bool = type(module)._should_flatten_inputs(module, *args, **kwargs)
    return should_pack
