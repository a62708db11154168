"""TabPFN: attention over the features and the rows of tables on fused kernels.

Every architecture of TabPFN looks up the backend of its attention in one registry.
:func:`register` adds fastattn to it; tabpfn is imported only then.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

from fastattn.integrations._registration import Counted, Registration, check_version
from fastattn.ops import scaled_dot_product_attention

__all__ = ["Registration", "register"]

NAME = "fastattn"
# The supported versions; the extra in pyproject.toml says the same.
OLDEST, BELOW = (9, 0), (10, 0)


def register() -> Registration:
    """Serve attention of TabPFN's models on CPUs, until it is undone.

    It affects every estimator and model of the process, of all versions of the architecture,
    forward and backward, with and without a cache of the training rows, whose quantised form TabPFN
    dequantises before. Queries, keys and values [B, S, H, D] are read in place, and grouped key
    heads are not repeated. Models on GPUs keep TabPFN's own choice. The linear layers stay
    PyTorch's: :func:`fastattn.accelerate` replaces them, for each model of an estimator.

    Returns:
        A :class:`Registration`: ``undo()`` restores the previous state; so does the end of a
        ``with`` block.

    Raises:
        ImportError: tabpfn is not installed, or its version is out of the range.

    >>> from fastattn.integrations.tabpfn import register
    >>> with register():
    ...     pass  # classifier.fit(x, y).predict(more)
    """
    return Registration(_registry(), (NAME,))


class _Backend:
    """A backend by TabPFN's protocol, see ``tabpfn.architectures.shared.attention_backends``."""

    name = NAME

    def is_preferred(self, spec: Any) -> bool:
        """Whether TabPFN should choose this backend for tensors of ``spec``."""
        is_served: bool = spec.device.type == "cpu" and spec.dtype.is_floating_point
        return is_served

    def run(
        self,
        query: Tensor,  # [B, Lq, Hq, D]
        key: Tensor,  # [B, Lk, Hkv, D]
        value: Tensor,  # [B, Lk, Hkv, D]
        **_: Any,
    ) -> Tensor:  # [B, Lq, Hq, D]
        """Attention of [B, L, H, D], read in place."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out: Tensor = scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return out.transpose(1, 2)


class _Registry(Counted[str]):
    """TabPFN's registry of attention backends; the latest registration has priority."""

    def __init__(self) -> None:
        self._backends: Any = importlib.import_module(
            "tabpfn.architectures.shared.attention_backends"
        )
        self._backend = _Backend()

    def add(self, name: str) -> None:
        """Register the backend; the latest has priority."""
        self._backends.register_attention_backend(self._backend)

    def remove(self, name: str) -> None:
        """Remove the backend by its name."""
        self._backends.unregister_attention_backend(name)


@functools.cache
def _registry() -> _Registry:
    """The registry, once tabpfn is imported and its version checked."""
    check_version("tabpfn", OLDEST, BELOW)
    return _Registry()
