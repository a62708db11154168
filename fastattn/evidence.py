"""Which choice is fastest on which processor, and the source of this information.

``evidence.json`` next to this file has the measured choices, each with its source. ``fastattn
tune`` writes the user's own, in the same format, to a file in their cache folder; those come first.
The first entry that matches the processor decides.

An entry has the fields

- ``choice``: what it decides,
    - ``"backends"``: the order of backends, ``use`` is a list of names;
    - ``"isa"``: the instruction set of the CPU's kernels, ``use`` is its name;
    - ``"gemm"``: which GEMM ``fastattn.nn`` uses for its projections, ``use`` is a
      :class:`Gemm`;
- ``device``: ``"cpu"`` or ``"cuda"``; ``vendor``, ``name``: the processor's, as
  :func:`processor` says; ``has``, ``lacks``: its features;
- ``op``, ``dtype``: the calls it applies to; ``least_queries``: their minimum number of queries;
- ``source``: a file of this repository, or another source; ``commit``: that of the kernels which
  were measured; ``version``: that of fastattn, in the user's entries.

All fields except ``choice``, ``use`` and ``source`` are optional: a missing field matches anything.
``vendor``, ``name`` and ``dtype`` are lists.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastattn._version import __version__
from fastattn._warning import warn

__all__ = [
    "Choice",
    "Gemm",
    "Processor",
    "choose",
    "cpuinfo",
    "forget",
    "has_tiles",
    "isa",
    "on_change",
    "own_file",
    "processor",
    "remove_own",
    "replace_file",
    "set_own",
]

FORMAT = 1
_STRINGS = ("choice", "source", "device", "op", "date", "commit", "version")
_LISTS = ("vendor", "name", "has", "lacks", "dtype")  # of strings
_FIELDS = {"use", "least_queries", *_STRINGS, *_LISTS}
_BACKENDS = ("torch", "cpu", "cuda", "triton")
_GEMMS = ("torch", "onednn")
_DTYPES = ("float32", "float64", "bfloat16", "float16")


class Processor(NamedTuple):
    device: str  # "cpu" or "cuda"
    vendor: str = ""  # "Intel", "AMD", "ARM", "NVIDIA", another vendor's string, or ""
    name: str = ""
    features: frozenset[str] = frozenset()  # the relevant ones, with Linux's names


class Choice(NamedTuple):
    use: Any
    source: str
    least_queries: int = 0
    is_own: bool = False  # from the user's `fastattn tune`
    is_measured: bool = False  # the entry names the processor, so the choice was measured on it


class Gemm(NamedTuple):
    """Which GEMM computes the projections, see ``fastattn/nn/_linear.py``."""

    forward: str  # of large products: "torch" (F.linear) or "onednn"
    weight_grad: str  # of large products: "torch" (mm) or "onednn"
    ours_up_to: int = 0  # the largest M·N·K for our own GEMM
    small_up_to: int = 0  # the same for a whole layer in one native call, see nn/_small.py


@functools.cache
def processor(device: str = "cpu", index: int = 0) -> Processor:
    """Describe this processor, or a GPU. No other code does; tests replace it."""
    if device == "cuda" and torch.cuda.is_available():
        vendor = "AMD" if torch.version.hip else "NVIDIA"
        return Processor(device, vendor, torch.cuda.get_device_name(index))
    if device != "cpu":
        return Processor(device)
    try:
        native = importlib.import_module("fastattn._cpu").processor()
    except Exception:  # not built, or broken: `fastattn info` says which
        native = _processor_by_linux()
    vendor, name = _VENDORS.get(native["vendor"], native["vendor"]), native["brand"]
    if native["family"]:  # a hypervisor may hide the name
        name = f"{name} (family {native['family']}, model {native['model']})".strip()
    return Processor("cpu", vendor, name, frozenset(native["features"]))


_VENDORS = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD", "aarch64": "ARM", "0x41": "ARM"}


def cpuinfo() -> dict[str, str]:
    """The fields that Linux lists for the first core; empty on other systems."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    return fields


def _processor_by_linux() -> dict[str, Any]:
    """The same as ``_cpu.processor``, as far as Linux provides it."""
    fields = cpuinfo()
    return {
        "vendor": fields.get("vendor_id") or fields.get("CPU implementer", ""),
        "brand": fields.get("model name", ""),
        "family": int(fields.get("cpu family", 0)),
        "model": int(fields.get("model", 0)),
        "features": (fields.get("flags") or fields.get("Features") or "").split(),
    }


def choose(
    choice: str,
    device: str,
    op: str = "",
    dtype: torch.dtype | None = None,
    *,
    index: int = 0,
    own: bool = True,
) -> Choice | None:
    """Return the choice of the first matching entry, None if there is none.

    ``index`` says which GPU; ``own=False`` ignores the user's entries.
    """
    return _choose(choice, processor(device, index), op, dtype, own)


@functools.cache
def _choose(
    choice: str, on: Processor, op: str, dtype: torch.dtype | None, own: bool
) -> Choice | None:
    kind = str(dtype).removeprefix("torch.")
    for entries, is_own in ((_own() if own else [], True), (_shipped(), False)):
        for entry in entries:
            if entry["choice"] == choice and _fits(entry, on, op, kind):
                source = entry["source"]
                if is_own:
                    date = entry.get("date", "unknown date")
                    version = entry.get("version", "unknown")
                    source = f"your `fastattn tune` of {date}, measured with version {version}"
                least, measured = entry.get("least_queries", 0), bool(entry.get("name"))
                return Choice(entry["use"], source, least, is_own, measured)
    return None


def unmeasured(device: str) -> str:
    """What `info` and `explain` say of a choice that no entry makes."""
    if device == "cuda":
        return "unmeasured on this GPU; run `fastattn tune`"
    return "not measured on this processor"


def _fits(entry: dict[str, Any], on: Processor, op: str, dtype: str) -> bool:
    return (
        entry.get("device", on.device) == on.device
        and on.vendor in entry.get("vendor", (on.vendor,))
        and on.name in entry.get("name", (on.name,))
        and on.features.issuperset(entry.get("has", ()))
        and on.features.isdisjoint(entry.get("lacks", ()))
        and entry.get("op", op) == op
        and dtype in entry.get("dtype", (dtype,))
    )


def has_tiles(isa: str) -> bool:
    """Whether this instruction set of the CPU's kernels has tiles."""
    return isa.startswith("amx_")


def isa(supported: Sequence[str]) -> str:
    """The instruction set of each dtype, as ``_cpu.set_isa`` takes it.

    ``supported``: those that build and processor have, the strongest last. Tiles are used only
    where an entry chooses them, since they serve some dtypes alone.
    """
    strongest = [name for name in supported if not has_tiles(name)][-1]
    chosen = {}
    for name in _DTYPES:
        found = choose("isa", "cpu", dtype=getattr(torch, name))
        chosen[name] = found.use if found and found.use in supported else strongest
    most = chosen.pop("float32")
    return ",".join([most, *(f"{name}={isa}" for name, isa in chosen.items() if isa != most)])


# -- the two files --------------------------------------------------------------------------------


def own_file() -> Path:
    """Where the user's own entries are. ``FASTATTN_CACHE_DIR`` names another folder."""
    if folder := os.environ.get("FASTATTN_CACHE_DIR"):
        return Path(folder, "evidence.json")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "fastattn", "evidence.json")


def set_own(entries: Sequence[dict[str, Any]]) -> Path:
    """Put entries, with this version, into the user's file, replacing those for the same calls;
    return it."""
    path = own_file()
    replaced = [_calls_of(entry) for entry in entries]
    kept = [entry for entry in _own() if _calls_of(entry) not in replaced]
    new = [{"version": __version__, **entry} for entry in entries]
    table = {"format": FORMAT, "entries": [*new, *kept]}
    _checked(table, str(path))
    replace_file(path, json.dumps(table, indent=1) + "\n")
    forget()
    return path


def replace_file(path: Path, text: str) -> None:
    """Write a file in one step, so that no other process reads a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # containers may share the folder
    try:
        new.write_text(text)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _calls_of(entry: dict[str, Any]) -> list[Any]:
    fields = ("choice", "device", "vendor", "name", "has", "lacks", "op", "dtype")
    return [entry.get(field) for field in fields]


def remove_own() -> Path | None:
    """Remove the user's file; return where it was, None if there was none."""
    path = own_file()
    if not path.exists():
        return None
    path.unlink()
    forget()
    return path


@functools.cache
def _shipped() -> list[dict[str, Any]]:
    path = Path(__file__).with_name("evidence.json")
    return _checked(json.loads(path.read_text()), str(path))


@functools.cache
def _own() -> list[dict[str, Any]]:
    try:
        path = own_file()
        if not path.exists():
            return []
        try:
            table = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error
        return _checked(table, str(path))
    except (OSError, ValueError, RuntimeError) as error:
        reset = "`fastattn tune --reset` removes them"
        warn(f"your measurements are not used: {error}; {reset}", UserWarning)
        return []


def _checked(table: Any, where: str) -> list[dict[str, Any]]:
    """The entries of a table; ``ValueError`` names what is wrong."""
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ValueError(f"{where} is no table of evidence of format {FORMAT}")
    entries: list[dict[str, Any]] = table.get("entries", [])
    if not isinstance(entries, list):
        raise ValueError(f"{where}: entries must be a list, got {entries!r}")
    for n, entry in enumerate(entries):
        wrong = _wrong(entry)
        if wrong:
            raise ValueError(f"{where}: entry {n}: {wrong}")
    return entries


def _wrong(entry: Any) -> str | None:
    if not isinstance(entry, dict) or not {"choice", "use", "source"} <= set(entry):
        return "it needs choice, use and source"
    if unknown := sorted(set(entry) - _FIELDS):
        return f"unknown field {unknown[0]!r}; allowed are {', '.join(sorted(_FIELDS))}"
    for name in _STRINGS:
        if not isinstance(entry.get(name, ""), str):
            return f"{name} must be a string, got {entry[name]!r}"
    for name in _LISTS:
        if not _are_strings(entry.get(name, [])):
            return f"{name} must be a list of strings, got {entry[name]!r}"
    if not isinstance(entry.get("least_queries", 0), int):
        return f"least_queries must be an integer, got {entry['least_queries']!r}"
    use, choice = entry["use"], entry["choice"]
    if choice == "backends":
        ok = _are_strings(use) and bool(use) and set(use) <= set(_BACKENDS)
        return None if ok else f"use must be a list of {', '.join(_BACKENDS)}, got {use!r}"
    if choice == "isa":
        return None if isinstance(use, str) else f"use must be an instruction set, got {use!r}"
    if choice == "gemm":
        try:
            gemm = Gemm(**use)
            ok = gemm.forward in _GEMMS and gemm.weight_grad in _GEMMS
            ok = ok and isinstance(gemm.ours_up_to, int) and isinstance(gemm.small_up_to, int)
        except TypeError:
            ok = False
        return None if ok else f"use must be the fields of a Gemm, got {use!r}"
    return f"choice must be backends, isa or gemm, got {choice!r}"


def _are_strings(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(x, str) for x in found)


# -- caches ---------------------------------------------------------------------------------------

_listeners: list[Callable[[], Any]] = []


def on_change(clear: Callable[[], Any]) -> None:
    """Register a function that is called when cached choices become invalid."""
    _listeners.append(clear)


def forget() -> None:
    """Clear all caches, so the user's file is read and every choice is made again."""
    for cached in (processor, _choose, _own):
        if hasattr(cached, "cache_clear"):  # missing if a test has replaced it
            cached.cache_clear()
    for clear in _listeners:
        clear()
