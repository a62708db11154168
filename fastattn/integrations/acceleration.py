"""One call for any model: :func:`accelerate` uses what fits, :func:`restore` undoes it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastattn import dispatch, evidence
from fastattn._table import as_html, as_text
from fastattn.explanation import explain
from fastattn.integrations import diffusers, tabpfn, transformers
from fastattn.integrations._code import calls_of
from fastattn.integrations._registration import Registration, lock
from fastattn.integrations.torch import Activation, activate
from fastattn.nn._encoder_layer import Native, forget_plans
from fastattn.nn._replacement import (
    LINEAR,
    replace,
    replace_encoders,
    replace_linear,
    replace_mha,
)
from fastattn.nn._replacement import restore as restore_class
from fastattn.nn.linear import pack_weights as pack_linear_weights
from fastattn.nn.linear import unpack_weights
from fastattn.nn.mha import MultiheadAttention

__all__ = ["Part", "Report", "accelerate", "restore"]

_NAME = "fastattn"  # in the registries of transformers and diffusers
# transformers' own implementations of experts, for any weights.
_STOCK_EXPERTS = (None, "eager", "grouped_mm", "batched_mm")

# Attributes by which a module turns off its own use of PyTorch's function, in timm, x-transformers,
# open_clip, Whisper and others.
_SWITCHES = ("fused_attn", "flash", "flash_attn", "use_sdpa", "use_fsdpa", "use_flash")


@dataclass(frozen=True)
class Part:
    """The modules of a model that compute attention in the same way, or are linear."""

    modules: tuple[str, ...]  # as in model.named_modules(); "" is the model itself
    kind: str  # the name of the modules' class
    calls: str  # what they call for attention, as far as it is known
    backend: str  # as in fastattn.use_backend; "" if fastattn does not serve them
    reason: str  # why not, or why no preferred backend runs; "" if there is nothing to say


@dataclass(frozen=True)
class Report:
    """What :func:`accelerate` found. ``print`` and notebooks show it as a table."""

    parts: tuple[Part, ...]  # modules that compute attention
    linear: tuple[Part, ...] = ()  # linear layers
    layers: tuple[Part, ...] = ()  # layers of encoders that run as one native call each

    @property
    def served(self) -> tuple[Part, ...]:
        """The parts whose attention now runs on fastattn."""
        return tuple(part for part in self.parts if part.backend)

    @property
    def unserved(self) -> tuple[Part, ...]:
        """The parts whose attention runs as before."""
        return tuple(part for part in self.parts if not part.backend)

    def __str__(self) -> str:
        return as_text(self._rows())

    def _repr_html_(self) -> str:
        return as_html(self._rows())

    def _rows(self) -> list[list[str]]:
        """The table, its header first."""
        rows = [["count", "modules", "class", "calls", "backend", "reason"]]
        for part in (*self.parts, *self.layers, *self.linear):
            names = list(dict.fromkeys(map(_without_numbers, part.modules)))
            names_shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            backend = part.backend or "not fastattn"
            rows.append(
                [str(len(part.modules)), names_shown, part.kind, part.calls, backend, part.reason]
            )
        if len(rows) == 1:
            rows.append(["0", "", "", "", "", "no attention and no linear layer was found"])
        return rows


def accelerate(
    model: nn.Module, *, linear: bool = True, unpad: bool = True, pack_weights: bool = False
) -> Report:
    """Run the attention and the linear layers of a model on the fastest kernels, where possible.

    Each kind of attention in the model, and in what it wraps or contains, is served by what fits:

    - ``torch.nn.MultiheadAttention``: by :func:`fastattn.replace_mha`.
    - models of transformers: by ``attn_implementation="fastattn"``, as after
      :func:`fastattn.integrations.transformers.register`; T5 and Swin also pass their tables, as by
      :func:`fastattn.integrations.transformers.compact_relative_bias`.
    - mixtures of experts of transformers: by ``experts_implementation="fastattn"``;
    - DeBERTa v2 and v3, Wav2Vec2-Conformer and Parakeet: by :class:`fastattn.bias.Disentangled`;
      image encoders of SAM and SAM-HQ: by :class:`fastattn.bias.Decomposed2d`; BLIP's image
      encoder: by :func:`fastattn.scaled_dot_product_attention`. Their classes change.
    - processors of diffusers that ask its registry: by the backend ``"fastattn"``, as after
      :func:`fastattn.integrations.diffusers.register`.
    - layers of TabPFN, by its registry, as after :func:`fastattn.integrations.tabpfn.register`,
      which **holds for the whole process**; layers of versions 2 to 2.6 are one native call each.
    - code that calls ``torch.nn.functional.scaled_dot_product_attention``: by
      :func:`fastattn.integrations.torch.activate`. **This one holds for the whole process**, not
      for this model alone, and for the CPU only. It is used if the model has such code.

    Linear layers on the CPU (``torch.nn.Linear``, transformers' ``Conv1D``, a ``torch.nn.Conv2d``
    whose stride is its kernel) run on :func:`fastattn.nn.functional.linear`: their class changes,
    as that of ``torch.nn.MultiheadAttention``, unless it has a ``forward`` of its own. The weights
    are read in every call. Quantise dynamically before this call: PyTorch finds what to quantise by
    its class.

    Parameters, buffers, hooks and ``state_dict`` stay the same objects, so models that are wrapped
    for LoRA, DDP or FSDP, before or after this call, keep working. Call it before
    ``torch.compile``. A second call changes only what is new in the model.

    Which code calls what is read from the code of each module, without running it: a branch that is
    never taken counts, and code that computes attention in an unusual way may not be recognized.
    :func:`fastattn.trace` says what a call of the model really ran.

    Args:
        model: any module.
        linear: False leaves linear layers alone.
        pack_weights: True keeps a copy of each weight of a linear layer in the layout of the
            processor's tiles, in float32 and float16 on AMX, of 1.5 and 2 times its bytes, which
            the report names. That is the fastest for inference; calls that need gradients read the
            weight itself. A weight that is replaced, moved, or written in place drops its copy,
            and a second call of ``accelerate`` makes a new one. A write through ``.data`` is not
            seen: call :func:`restore` before it.

    Returns:
        A :class:`~fastattn.integrations.acceleration.Report`: which modules compute attention or
        are linear, what they call, which backend serves them (for the dtype and device that they
        now have), and which are not served, and why. What is not served runs as before.

    :func:`restore` undoes it. A deep copy of an accelerated model shares its registrations but is
    not restored with it: copy before.

    >>> import torch, fastattn
    >>> model = torch.nn.TransformerEncoderLayer(32, 4)
    >>> report = fastattn.accelerate(model)
    >>> [(part.modules, part.calls) for part in report.served]
    [(('self_attn',), 'nn.MultiheadAttention')]
    >>> fastattn.restore(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate: model must be a torch.nn.Module, got {type(model).__name__}")
    for name, flag in (("linear", linear), ("unpad", unpad), ("pack_weights", pack_weights)):
        if not isinstance(flag, bool):
            raise TypeError(f"accelerate: {name} must be a bool, got {type(flag).__name__}")
    if pack_weights and not linear:
        raise ValueError("accelerate: pack_weights=True needs linear=True, got linear=False")
    with lock:
        changes = _changes.get(model)
        if changes is None:
            changes = _changes[model] = _Changes()
            weakref.finalize(model, changes.end).atexit = False
        why_not_served = changes.make(model, linear, unpad)
        packed = pack_linear_weights(model) if pack_weights else {}
        if packed:
            forget_plans()
        attention = tuple(_attention_parts(model, changes, why_not_served))
        linear_layers = tuple(_linear_parts(model, packed))
        return Report(attention, linear_layers, tuple(_encoder_parts(model)))


def restore(model: nn.Module) -> None:
    """Undo :func:`accelerate` for a model, and for the models that it contains or wraps.

    Models may be restored in any order, each any number of times, unless they share a configuration
    of transformers, which all of them then get back. What was replaced or registered before
    ``accelerate`` stays. Pass the model that was given to ``accelerate``, or one that contains or
    wraps it, and keep it alive as long as a part of it is used: what is served ends with it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"restore: model must be a torch.nn.Module, got {type(model).__name__}")
    with lock:
        unpack_weights(model)
        for module in list(model.modules()):
            changes = _changes.pop(module, None)
            if changes is not None:
                changes.undo()


class _Changes:
    """The changes that :func:`accelerate` made to one model, and how to undo them."""

    def __init__(self) -> None:
        self._replaced: list[weakref.ref[nn.Module]] = []  # modules whose class changed
        self._undo_settings: list[Callable[[], None]] = []
        self._registrations: dict[str, Registration] = {}  # by library
        self._activation: Activation | None = None

    def make(self, model: nn.Module, linear: bool, unpad: bool) -> dict[str, str]:
        """Change what is not changed yet; return why a library is not served, by its name."""
        self._replace(model, replace_mha)
        self._replace(model, replace_encoders)
        if linear:
            self._replace(model, replace_linear)
        why_not_served = {}
        for library, serve in (
            ("transformers", self._serve_transformers),
            ("diffusers", self._serve_diffusers),
            ("tabpfn", self._serve_tabpfn),
        ):
            if library in sys.modules:  # otherwise it has no module in the model
                try:
                    serve(model)
                except (ImportError, KeyError, ValueError) as error:
                    why_not_served[library] = f"{type(error).__name__}: {error}"
        if "transformers" in sys.modules and "transformers" not in why_not_served:
            if linear:
                self._serve_experts(model)
            # Not imported above, because it imports parts of transformers.
            relative = importlib.import_module("fastattn.integrations.transformers._relative")
            self._replace(model, replace, functools.partial(relative.native_class, unpad=unpad))
        return why_not_served

    def _replace(
        self, model: nn.Module, replace_in: Callable[..., list[str]], *arguments: Any
    ) -> None:
        """Call ``replace_in``, which changes classes of modules, and remember these modules."""
        modules = dict(model.named_modules())
        names = replace_in(model, *arguments)
        self._replaced += [weakref.ref(modules[name]) for name in names]

    def activate(self) -> None:
        """Serve PyTorch's own function, once for this model."""
        if self._activation is None:
            self._activation = activate()

    def undo(self) -> None:
        """Restore classes and settings, the latest setting first."""
        for reference in self._replaced:
            module = reference()
            if module is not None:
                restore_class(module)
        for undo_setting in reversed(self._undo_settings):
            undo_setting()
        self._replaced, self._undo_settings = [], []
        self.end()

    def end(self) -> None:
        """Undo the changes outside of the model, the only ones left when the model is deleted."""
        with lock:
            for registration in self._registrations.values():
                registration.undo()
            if self._activation is not None:
                self._activation.undo()
            self._registrations, self._activation = {}, None

    def _serve_transformers(self, model: nn.Module) -> None:
        """Set ``attn_implementation`` of each outermost model of transformers."""
        base = sys.modules["transformers.modeling_utils"].PreTrainedModel
        visited: set[int] = set()
        for module in model.modules():
            if not isinstance(module, base) or id(module) in visited:
                continue
            visited.update(map(id, module.modules()))
            self._register("transformers", transformers.register)
            configs = _configs_of(module)
            for config in configs:
                if config._attn_implementation != _NAME:
                    self._restore_later(config, "_attn_implementation_internal")
            module.set_attn_implementation(_NAME)
            # transformers skips a copy of a configuration that no model holds, as in X-CLIP.
            held = {id(part.config) for part in module.modules() if isinstance(part, base)}
            served_types = {type(x) for x in configs if x._attn_implementation == _NAME}
            for config in configs:
                if id(config) not in held and type(config) in served_types:
                    config._attn_implementation = {"": _NAME}  # the key "" is the config itself
            with contextlib.suppress(ValueError):  # the model has no bias to compact
                self._undo_settings.append(transformers.compact_relative_bias(module).undo)

    def _serve_experts(self, model: nn.Module) -> None:
        """Set the implementation of mixtures of experts, whose weights are in no linear layer."""
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            weight = getattr(module, "down_proj", None)
            if not hasattr(module, "is_transposed") or not isinstance(weight, torch.Tensor):
                continue
            is_stock = getattr(config, "_experts_implementation", _NAME) in _STOCK_EXPERTS
            if is_stock and weight.is_floating_point() and weight.itemsize > 1:
                self._register("transformers", transformers.register)
                self._restore_later(config, "_experts_implementation_internal")
                config._experts_implementation_internal = _NAME

    def _serve_diffusers(self, model: nn.Module) -> None:
        """Set the backend of each processor that has not chosen another."""
        for module in model.modules():
            processor: Any = getattr(module, "processor", None)
            if (
                getattr(processor, "_attention_backend", _NAME) in (None, "native")
                and getattr(processor, "_parallel_config", None) is None
            ):
                self._register("diffusers", diffusers.register)
                self._restore_later(processor, "_attention_backend")
                names = sys.modules["diffusers.models.attention_dispatch"].AttentionBackendName
                processor._attention_backend = names(_NAME)

    def _serve_tabpfn(self, model: nn.Module) -> None:
        """Register the backend of attention, and replace the layers."""
        if any(map(tabpfn.is_of_tabpfn, model.modules())):
            self._register("tabpfn", tabpfn.register)
            self._replace(model, replace, tabpfn.block_class)

    def _register(self, library: str, register: Callable[[], Registration]) -> None:
        """Register with a library, once for this model."""
        if library not in self._registrations:
            self._registrations[library] = register()

    def _restore_later(self, owner: Any, attribute: str) -> None:
        """Let :meth:`undo` restore an attribute, unless other code has changed it by then."""
        before = getattr(owner, attribute)

        def reset() -> None:
            if getattr(owner, attribute) == _NAME:
                setattr(owner, attribute, before)

        self._undo_settings.append(reset)


_changes: weakref.WeakKeyDictionary[nn.Module, _Changes] = weakref.WeakKeyDictionary()


def _configs_of(model: Any) -> list[Any]:
    """The configurations of all models of transformers in a model, each once."""
    by_id: dict[int, Any] = {}
    pending: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    while pending:
        config = pending.pop()
        if hasattr(config, "_attn_implementation") and id(config) not in by_id:
            by_id[id(config)] = config
            pending += [getattr(config, name, None) for name in config.sub_configs]
    return list(by_id.values())


def _attention_parts(
    model: nn.Module, changes: _Changes, why_not_served: dict[str, str]
) -> Iterator[Part]:
    """The modules that compute attention, in the order of the model; equal ones are one part."""
    named = dict(model.named_modules())
    cache: dict[Any, set[str]] = {}
    calls = {name: _call_of(module, cache) for name, module in named.items()}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, module in named.items():
        if calls[name] in _UNCERTAIN and any(
            other.startswith(f"{name}." if name else "") and calls[other]
            for other in named
            if other != name
        ):
            continue  # a module that contains attention, such as a layer, computes none itself
        if calls[name]:
            fields = _serve_module(name, named, calls[name], cache, changes, why_not_served)
            groups.setdefault((type(module).__name__, *fields), []).append(name)
    for key, names in groups.items():
        yield Part(tuple(names), *key)


def _linear_parts(model: nn.Module, packed: dict[str, int]) -> Iterator[Part]:
    """The linear layers, with their share of the weights; equal ones are one part.

    ``packed``: the bytes of packed copies by the names of modules, 0 for lack of memory.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding):
            parameters = module.parameters(recurse=False)
            initialized = (x for x in parameters if not isinstance(x, nn.UninitializedParameter))
            sizes[name] = sum(x.numel() for x in initialized if x.dim() > 1)
        if isinstance(module, LINEAR):
            weight: torch.Tensor = module.weight
            groups.setdefault((type(module).__name__, *_gemm_of_weight(weight)), []).append(name)
    for (kind, backend, reason), names in groups.items():
        share = sum(sizes[name] for name in names) / max(sum(sizes.values()), 1)
        if backend:
            reason += f"; {share:.0%} of the weights, embeddings apart"
        if any(name in packed for name in names):
            copies = [packed[name] for name in names if name in packed]
            reason += f"; packed copies of {sum(copies) / 1e6:.0f} MB"
            if 0 in copies:
                reason += f", {copies.count(0)} without: not enough memory"
        yield Part(tuple(names), kind, "linear", backend, reason)


def _encoder_parts(model: nn.Module) -> Iterator[Part]:
    """The layers of encoders with a native forward; equal ones are one part."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Native):
            reason = module.why_not_native()
            fields = (module.WHAT, "" if reason else "cpu", reason)
            groups.setdefault((type(module).__name__, *fields), []).append(name)
    for key, names in groups.items():
        yield Part(tuple(names), *key)


def _gemm_of_weight(weight: torch.Tensor) -> tuple[str, str]:
    """The backend of a linear layer and its GEMMs, by its weight; "" and why it is not served."""
    if weight.device.type != "cpu":
        return "", f"the module is on {weight.device}"
    if type(weight) not in (torch.Tensor, nn.Parameter):
        return "", f"its weight is a {type(weight).__name__}"
    dtype = str(weight.dtype).removeprefix("torch.")
    backend = dispatch.load("cpu")
    if isinstance(backend, str):
        return "", backend
    row = evidence.choose("gemm", "cpu", dtype=weight.dtype)
    gemm = backend.rule(weight.dtype)
    if {gemm.y, gemm.dx, gemm.dw} == {"torch"} and not gemm.few:
        return "", f"PyTorch's products are the fastest in {dtype} here ({row.because})"
    return "cpu", f"{dtype}: outputs by {gemm.y} ({row.because})"


# What a module calls for attention, in the words of the report.
_MHA = "nn.MultiheadAttention"
_SDPA = "scaled_dot_product_attention"
_FUNCTIONAL = "multi_head_attention_forward"
_TRANSFORMERS = "transformers' registry"
_DIFFUSERS = "diffusers' registry"
_FLEX = "flex_attention"
_RELATIVE = "relative attention"
_STEPS = "a product and a softmax"
_NOTHING = "nothing known"
_UNCERTAIN = (_STEPS, _NOTHING)  # a module with attention inside may look the same
_NEVER_SERVED = {
    _FLEX: "PyTorch generates its kernel",
    _STEPS: "no function to replace",
    _NOTHING: "no function to replace was found in its code",
}

_BY_NAME = {
    "ALL_ATTENTION_FUNCTIONS": _TRANSFORMERS,
    "dispatch_attention_fn": _DIFFUSERS,
    _SDPA: _SDPA,
    _FUNCTIONAL: _FUNCTIONAL,
    _FLEX: _FLEX,
}


def _call_of(module: nn.Module, cache: dict[Any, set[str]]) -> str:
    """What a module calls for attention; "" if it computes none."""
    is_mha = isinstance(module, nn.MultiheadAttention)
    if is_mha and _runs_our_forward(module):
        return _MHA
    if hasattr(type(module), "RELATIVE"):  # a class of integrations/transformers/_relative.py
        return _RELATIVE
    names = calls_of(module, cache)
    for name, call in _BY_NAME.items():
        if name in names:
            return call
    if {"product", "softmax"} <= names:
        return _STEPS
    if is_mha:
        return _MHA
    kind = type(module)
    is_named = "attention" in kind.__name__.lower() or "attn" in kind.__name__.lower()
    return _NOTHING if is_named and kind.__module__.partition(".")[0] != "fastattn" else ""


def _serve_module(
    name: str,
    named: dict[str, nn.Module],
    call: str,
    cache: dict[Any, set[str]],
    changes: _Changes,
    why_not_served: dict[str, str],
) -> tuple[str, str, str]:
    """Return what a module calls, the backend that serves it or "", and the reason.

    Activates fastattn for PyTorch's function if the module needs that.
    """
    module = named[name]
    processor: Any = getattr(module, "processor", None)
    why_not = ""
    if call == _MHA:
        if not _runs_our_forward(module):
            why_not = "its forward does not call that of nn.MultiheadAttention"
        elif _SDPA in calls_of(module, cache):
            changes.activate()  # for a branch of its own
    elif call == _TRANSFORMERS:
        chosen = _implementation_of(name, named)
        if chosen != _NAME:
            why_not = why_not_served.get("transformers", f"its attn_implementation is {chosen!r}")
    elif call == _DIFFUSERS and hasattr(processor, "_attention_backend"):
        chosen = processor._attention_backend
        if chosen != _NAME:
            why_not = why_not_served.get("diffusers", f"its attention backend is {chosen!r}")
    elif call in (_DIFFUSERS, _SDPA, _FUNCTIONAL):
        switched_off = [switch for switch in _SWITCHES if getattr(module, switch, None) is False]
        device = _example_query(module, named[""]).device
        if switched_off:
            why_not = f"its {switched_off[0]} is False, so it computes attention step by step"
        elif device.type != "cpu":
            why_not = f"activate serves the CPU only, the module is on {device}"
        else:
            changes.activate()
    elif call == _RELATIVE:
        device = _example_query(module, named[""]).device
        why_not = "" if device.type == "cpu" else f"its kernels are for the CPU, not {device}"
    else:
        why_not = _NEVER_SERVED[call]
    if why_not:
        return call, "", why_not
    return call, *_backend_of(_example_query(module, named[""]))


def _runs_our_forward(module: nn.Module) -> bool:
    """Whether the forward of fastattn's class runs, or a subclass's forward that calls it."""
    for kind in type(module).__mro__:
        if "forward" in kind.__dict__:
            if kind is MultiheadAttention:
                return True
            if not {"super", "forward"} <= set(kind.__dict__["forward"].__code__.co_names):
                return False
    return False


def _implementation_of(name: str, named: dict[str, nn.Module]) -> str | None:
    """The ``attn_implementation`` of the nearest configuration: of a module or what contains it."""
    while True:
        config = getattr(named.get(name), "config", None)
        chosen: str | None = getattr(config, "_attn_implementation", None)
        if chosen is not None or not name:
            return chosen
        name = name.rpartition(".")[0]


def _example_query(module: nn.Module, model: nn.Module) -> torch.Tensor:
    """A query [1, 1, 16, D] with the dtype, the device and the width of a module's queries."""
    parameters = (x for source in (module, model) for x in source.parameters())
    initialized = (x for x in parameters if not isinstance(x, nn.UninitializedParameter))
    parameter = next((x for x in initialized if x.is_floating_point()), torch.empty(()))
    width = getattr(module, "head_dim", 64)
    return parameter.new_empty(1, 1, 16, width if isinstance(width, int) else 64)


def _backend_of(query: torch.Tensor) -> tuple[str, str]:
    """The backend that runs attention of this query, and why not a preferred one."""
    try:
        explanation = explain(_SDPA, query, query, query)
    except (NotImplementedError, RuntimeError) as error:
        return "", str(error)
    return explanation.runs or "", explanation.passed_over


def _without_numbers(name: str) -> str:
    """The name of a module with its numbers of layers as "*"; "(model)" for the model itself."""
    return ".".join("*" if part.isdigit() else part for part in name.split(".")) or "(model)"
