"""TabPFN: attention over the features and the rows of tables on fused kernels.

Every architecture of TabPFN looks up the backend of its attention in one registry.
:func:`register` adds fastattn to it; tabpfn is imported only then.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import compat, dispatch
from fastattn.integrations._registration import Registration, Registry, check_version
from fastattn.nn._encoder_layer import (
    LINEAR,
    Native,
    Plan,
    does_nothing,
    is_exact_gelu,
    largest_layer,
    part_of,
    plan_of,
)
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
    heads are not repeated. Models on GPUs keep TabPFN's own choice. :func:`fastattn.accelerate`
    calls this function, and also serves the layers and linear layers of one model.

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


class _Registry(Registry[str]):
    """TabPFN's registry of attention backends; the latest registration has priority."""

    def __init__(self) -> None:
        super().__init__()
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


# The architectures whose layers have the equation of csrc/cpu/bind_table_layer.cpp.
_ARCHITECTURES = [f"tabpfn.architectures.tabpfn_{version}" for version in ("v2", "v2_5", "v2_6")]
_PROJECTIONS = [f"{x}_projection" for x in ("q", "k", "v", "out")]
_ATTENTIONS = ("per_sample_attention_between_features", "per_column_attention_between_cells")
_NORMS = ("layernorm_mha1", "layernorm_mha2", "layernorm_mlp")
_CELLS = 256  # the least number of cells that the kernel multiplies by a weight at a time


class FusedBlock(Native):
    """The forward of TabPFN's layer in one native call, where it can be.

    .. math::

        a = norm_1(x + A(x)), \\quad b = norm_2(a + B(a)), \\quad y = norm_3(b + MLP(b))

    A is attention within each row, B within each column. Beside y it needs little memory.
    """

    WHAT = "a layer of tables"

    def forward(
        self,
        x_BRCE_container: list[Tensor] | Tensor,
        single_eval_pos: int,
        save_peak_memory_factor: int | None,
        *,
        cached_kv: Any = None,
        return_kv: bool = False,
    ) -> tuple[Tensor, Any]:
        """As ``TabPFNBlock``: takes x [B, R, C, E] out of a list, if it is in one, and writes the
        result in the place of x if there is a ``save_peak_memory_factor``."""
        x = x_BRCE_container[0] if isinstance(x_BRCE_container, list) else x_BRCE_container
        in_place = save_peak_memory_factor is not None
        results = self._try_native(x, single_eval_pos, cached_kv, in_place, return_kv)
        if results is None:
            stock: Any = super()
            args = (x_BRCE_container, single_eval_pos, save_peak_memory_factor)
            result: tuple[Tensor, Any] = stock.forward(
                *args, cached_kv=cached_kv, return_kv=return_kv
            )
            return result
        y, key, value = results
        if isinstance(x_BRCE_container, list):
            del x_BRCE_container[0]
        return y, _cache_entry()(key=key, value=value) if return_kv else None

    def _try_native(self, x: Any, known: int, cached: Any, in_place: bool, keeps: bool) -> Any:
        """The output, and the keys and values of the ``known`` rows; None without a plan."""
        if not compat.may_plan() or compat.has_global_hook():
            return None
        plan = plan_of(self, _BlockPlan)
        if plan is None or plan.options is None or plan.why_not(x.dtype):
            return None
        table_layer: Any = dispatch.load("cpu").table_layer  # type: ignore[union-attr]
        keys, values = (None, None) if cached is None else (cached.key, cached.value)
        eps = tuple(_default_eps(x.dtype) if each is None else each for each in plan.eps)
        options = {**plan.options, "in_place": in_place, "keeps": keeps}
        options["wants_gradients"] = torch.is_grad_enabled()
        return table_layer(x, keys, values, eps=eps, known=known, **options)

    def why_not_native(self) -> str:
        plan = plan_of(self, _BlockPlan)
        if plan is None or plan.options is None:
            return "a part of it is of another class, is watched by a hook, or has unusual options"
        weight = plan.options["parts"][0][0]
        if not weight.is_cpu:
            return f"it is on {weight.device}"
        return plan.why_not(weight.dtype)


class _BlockPlan(Plan):
    """The native plan of a layer: the options of its call, None if it can have none."""

    options: dict[str, Any] | None = None

    def __init__(self, block: nn.Module) -> None:
        inside = [x for x in block.modules() if x is not block]
        super().__init__(inside, compat.state_of(block))
        with contextlib.suppress(AttributeError, KeyError):  # the layer lacks a usual part
            self.options = self._native_options(block, inside)

    def _native_options(self, block: nn.Module, inside: list[nn.Module]) -> dict[str, Any] | None:
        """The options of a native call; None if a part of the layer is unusual."""
        attentions = [part_of(block, name) for name in _ATTENTIONS]
        projections = [part_of(x, name) for x in attentions for name in _PROJECTIONS]
        linear = [*projections, part_of(block, "mlp.0"), part_of(block, "mlp.2")]
        norms = [part_of(block, name) for name in _NORMS]
        self.width, self.hidden = linear[-1].weight.shape
        classes = {type(x) for x in (*attentions, *norms)}
        is_usual = (
            not compat.have_hooks(inside, does_nothing)
            and all(type(x) in LINEAR for x in linear)
            and all(each.__module__ == type(block).__module__ for each in classes)
            and len({type(x) for x in norms}) == 1
            and all(x.normalized_shape == (self.width,) for x in norms)
            and all(x.num_heads == attentions[0].num_heads for x in attentions)
            and all(x.weight.shape == (self.width, self.width) for x in projections)
            and type(block.mlp) is nn.Sequential
            and len(block.mlp) == 3
            and is_exact_gelu(part_of(block, "mlp.1"))
        )
        if not is_usual:
            return None
        self.eps = [x.eps for x in norms]
        return {
            "parts": tuple((x.weight, getattr(x, "bias", None)) for x in (*linear, *norms)),
            "num_heads": attentions[0].num_heads,
            "rms": isinstance(norms[0], nn.RMSNorm),
        }

    def why_not(self, dtype: torch.dtype) -> str:
        """Why a native call would be slower in this dtype; "" if it is not."""
        if _CELLS * self.width * self.hidden <= largest_layer(dtype):
            return ""
        name = str(dtype).removeprefix("torch.")
        return f"its operators are faster in {name} on this processor, or it has no such kernel"


@functools.cache
def _default_eps(dtype: torch.dtype) -> float:
    """The eps of an RMSNorm whose eps is None, which differs between versions of PyTorch."""
    # The candidate that is nearest to the eps of y = x / sqrt(x^2 + eps), the norm of one number.
    x = torch.full((1,), 2.0**-10, dtype=dtype)
    measured = float((x / F.rms_norm(x, (1,))).double().square() - x.double().square())
    candidates = [torch.finfo(each).eps for each in (torch.float32, dtype)]
    return min(candidates, key=lambda eps: abs(math.log(max(measured, 1e-30) / eps)))


@functools.cache
def _cache_entry() -> Any:
    return importlib.import_module("tabpfn.architectures.kv_cache").KVCacheEntry


def block_class(module: nn.Module) -> type | None:
    """The class with a native forward for a layer of TabPFN, None if it has none."""
    kind = type(module)
    has_native = kind.__name__ == "TabPFNBlock" and kind.__module__ in _ARCHITECTURES
    return FusedBlock if has_native else None


def is_of_tabpfn(module: nn.Module) -> bool:
    """Whether the class of a module is of TabPFN's architectures."""
    return type(module).__module__.startswith("tabpfn.architectures.")
