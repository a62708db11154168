"""The first-use check: a kernel of a GPU is compared with the reference before its first call.

    reasons = why_not("triton", "varlen_attention", tensors, load)  # empty: it may run

The first call of an operator, on a backend of :data:`CHECKED`, in a dtype and on a device, runs
``fastattn.testing.selftest``: a few small cases, forward and backward. float32 with tf32 allowed
counts as a dtype of its own. The verdict is kept for the process, and in ``selftest.json`` in the
user's cache folder for this GPU, driver and build. A mismatch disables the backend for that
operator and dtype, with a warning and a report.

Not checked are a GPU that a record of the shipped table of ``fastattn.evidence`` names, tensors
that are not on a GPU (Triton's interpreter), and everything if ``FASTATTN_SELFTEST=0``. See
``docs/selftest.md``.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import hashlib
import importlib
import json
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fastattn import builds, evidence
from fastattn._version import __version__
from fastattn._warning import warn
from fastattn.backends._precision import allows_tf32

__all__ = [
    "CHECKED",
    "Inconclusive",
    "SelfTestWarning",
    "current",
    "forget",
    "gpu",
    "identity",
    "is_capturing",
    "known",
    "own_file",
    "record",
    "stored",
    "switched_off",
    "why_not",
]

CHECKED = ("cuda", "triton")
FORMAT = 1
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_LONG = 120.0  # seconds, after which a log message names a check that still runs
_Load = Callable[[str], Any]


class SelfTestWarning(UserWarning):
    """A kernel gave wrong results on this GPU, or could not be checked, and is not used."""


class Inconclusive(Exception):
    """A check could not run to its end, and what is kept would be no verdict on the kernel.

    ``lasts``: it would not run later in this process either.
    """

    def __init__(self, why: str, lasts: bool = False) -> None:
        super().__init__(why)
        self.lasts = lasts


_Key = tuple[str, str, torch.dtype, torch.device, bool]  # backend, operator, dtype, device, tf32
_verdicts: dict[_Key, list[str]] = {}  # reasons against the kernel; empty: it may run
_lock = threading.Lock()
_this_thread = threading.local()  # .checks: it runs a check
_warned: set[str] = set()


def why_not(backend: str, op: str, tensors: Sequence[Any], load: _Load) -> list[str]:
    """Return the reasons against this backend's kernels; run their check if they have had none."""
    for first in tensors:  # as _judged(), without its call
        if first is not None and first.dtype in _DTYPES:
            key = backend, op, first.dtype, first.device, _rounds_to_tf32(first.dtype)
            found = _verdicts.get(key)
            return _first_use(key, load) if found is None else found
    return []


def known(backend: str, op: str, tensors: Sequence[Any], load: _Load) -> list[str] | None:
    """Return the reasons that are known without a check; None if the next call runs it."""
    first = _judged(tensors)
    if backend not in CHECKED or first is None:
        return []
    key = backend, op, first.dtype, first.device, _rounds_to_tf32(first.dtype)
    if key in _verdicts:
        return _verdicts[key]
    entry = _known(key, load)
    return None if entry is None else _reasons(entry)


def _judged(tensors: Sequence[Any]) -> Any:
    """The tensor whose dtype and device are those of the kernel; None if there is none."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype in _DTYPES:
            return tensor
    return None


def _rounds_to_tf32(dtype: torch.dtype) -> bool:
    """Whether the kernels of this dtype are those of products that are rounded to tf32."""
    return dtype == torch.float32 and allows_tf32()


def _first_use(key: _Key, load: _Load) -> list[str]:
    if getattr(_this_thread, "checks", False):  # the check itself calls the kernel
        return []
    backend, op, dtype, *_ = key
    with _lock:  # the first of several threads checks, the others wait for it
        if key in _verdicts:
            return _verdicts[key]
        try:
            entry = _known(key, load)
            if entry is None:
                entry = _kept(_about_key(key, load), _checked(*key[:-1]))
        except Inconclusive as why:
            reasons = [f"not checked yet on this GPU: {why}"]
            message = f"the {backend} kernels of {op} in {_name(dtype)} are {reasons[0]}"
            if why.lasts:
                _verdicts[key] = reasons
        else:
            reasons = _verdicts[key] = _reasons(entry)
            message = _message(entry)
    if message and message not in _warned:
        _warned.add(message)
        warn(message, SelfTestWarning)
    return reasons


_EXEMPT: dict[str, Any] = {"faults": []}


def _known(key: _Key, load: _Load) -> dict[str, Any] | None:
    """The verdict that is in the file, :data:`_EXEMPT` without need of one, else None."""
    backend, _, dtype, device, _ = key
    if gpu(device) is None or not _is_wanted():
        return _EXEMPT
    about = _about_key(key, load)
    kept = next((entry for entry in stored() if _about(entry) == about), None)
    if kept is None and _has_record(backend, about["op"], dtype, device):
        return _EXEMPT
    return kept


def _is_wanted() -> bool:
    """Whether ``FASTATTN_SELFTEST`` leaves the check on; empty is as good as not set."""
    value = os.environ.get("FASTATTN_SELFTEST") or "1"
    if value not in ("0", "1"):
        raise ValueError(
            f"FASTATTN_SELFTEST must be 0 (no check) or 1 (the default), got {value!r}"
        )
    return value == "1"


def _about_key(key: _Key, load: _Load) -> dict[str, Any]:
    backend, op, dtype, device, _ = key
    processor = gpu(device)
    assert processor is not None
    return identity(backend, op.removesuffix("_backward"), dtype, processor, load(backend))


def _has_record(backend: str, op: str, dtype: torch.dtype, device: torch.device) -> bool:
    # The user's own entries may be of other kernels, before an update.
    found = evidence.choose("backends", "cuda", op, dtype, index=device.index or 0, own=False)
    return found is not None and found.is_measured and backend in found.use


def gpu(device: torch.device) -> evidence.Processor | None:
    """The GPU of this device, None for another kind of device. Tests replace it."""
    return evidence.processor("cuda", device.index or 0) if device.type == "cuda" else None


# -- running the check ----------------------------------------------------------------------------


def _checked(backend: str, op: str, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Run the check in a thread, which has no mode, transform, autocast or stream of the caller."""
    if is_capturing(device):
        raise Inconclusive(
            "a CUDA graph is being captured. Call it once before the capture, as PyTorch's warm-up "
            "does, or set FASTATTN_SELFTEST=0"
        )
    faults: list[str] = []
    stopped: list[BaseException] = []

    def run() -> None:
        _this_thread.checks = True
        try:
            cases = importlib.import_module("fastattn.testing.selftest")  # above, and rarely needed
            faults.extend(cases.faults(backend, op.removesuffix("_backward"), dtype, device))
        except BaseException as error:  # is the caller's
            stopped.append(error)

    thread = threading.Thread(
        target=contextvars.Context().run, args=(run,), name="fastattn-selftest", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as error:  # the interpreter is shutting down
        raise Inconclusive(str(error)) from error
    thread.join(_LONG)
    if thread.is_alive():
        # Not a warning: the check ignores them, in all threads.
        logging.getLogger(__name__).warning(
            "The check of the %s kernels of %s in %s has taken %.0f s. If it does not end, a "
            "kernel hangs: end the program, and take another backend with fastattn.use_backend.",
            *(backend, op, _name(dtype), _LONG),
        )
        thread.join()
    for why in stopped:
        if isinstance(why, Inconclusive):
            raise why
        raise Inconclusive(f"the check stopped: {type(why).__name__}: {why}", True) from why
    return faults


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream records a CUDA graph: a check would be part of it."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


# -- what is kept ---------------------------------------------------------------------------------


def own_file() -> Path:
    """Where the verdicts are, beside the measurements of ``fastattn tune``."""
    return evidence.own_file().with_name("selftest.json")


def identity(
    backend: str, op: str, dtype: torch.dtype, processor: evidence.Processor, module: Any
) -> dict[str, Any]:
    """What a verdict is about: with any other value here, the check runs again."""
    return {
        "backend": backend,
        "op": op,
        "dtype": _name(dtype),
        "tf32": _rounds_to_tf32(dtype),
        "device": f"{processor.vendor} {processor.name}".strip(),
        "driver": _driver(),
        "torch": torch.__version__,
        "toolkit": torch.version.hip or torch.version.cuda,
        "triton": builds.version_of("triton") if backend == "triton" else None,
        "fastattn": __version__,
        "kernels": _fingerprint(backend, module),
    }


def _driver() -> str:
    """The version of the GPU's driver as Linux tells it, "" elsewhere."""
    for name in ("nvidia", "amdgpu"):
        with contextlib.suppress(OSError):
            return Path(f"/sys/module/{name}/version").read_text().strip()
    return ""


def _fingerprint(backend: str, module: ModuleType) -> str:
    """The sizes and times of the files that a backend's kernels are in, in one number."""
    files = list(Path(getattr(module, "__file__", None) or "-").parent.glob("*.py"))
    native = getattr(module, "_cuda", None)  # of the emulator
    if backend == "cuda":
        native = native or sys.modules.get("fastattn._cuda")
    others = (getattr(native, "__file__", None), os.environ.get("FASTATTN_TRITON_TABLE"))
    digest = hashlib.sha256()
    for path in sorted([*files, *(Path(name) for name in others if name)]):
        with contextlib.suppress(OSError):
            found = path.stat()
            digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def stored() -> list[dict[str, Any]]:
    """The kept verdicts; an unreadable file has none, so the checks run again."""
    try:
        table = json.loads(own_file().read_text())
        entries: list[dict[str, Any]] = table["entries"] if table["format"] == FORMAT else []
        return [entry for entry in entries if _is_verdict(entry)]
    except (OSError, RuntimeError, ValueError, LookupError, TypeError):
        return []


def _is_verdict(entry: dict[str, Any]) -> bool:
    return (
        isinstance(entry["faults"], list)
        and isinstance(entry["op"], str)
        and entry["backend"] in CHECKED
        and entry["dtype"] in map(_name, _DTYPES)
    )


def current(load: _Load) -> list[dict[str, Any]]:
    """The kept verdicts about this GPU, driver and build."""
    processor = evidence.processor("cuda")
    return [
        entry
        for entry in stored()
        if _about(entry)
        == identity(
            entry["backend"],
            entry["op"],
            getattr(torch, entry["dtype"]),
            processor,
            load(entry["backend"]),
        )
    ]


def record(about: dict[str, Any], faults: Sequence[str]) -> None:
    """Keep the verdict of a longer test, of ``fastattn verify``, in place of the check's."""
    _kept(about, list(faults))
    forget()


def _kept(about: dict[str, Any], faults: list[str]) -> dict[str, Any]:
    """Write a verdict to the user's file if that can be written; return its entry."""
    entry = {**about, "faults": faults, "date": datetime.date.today().isoformat()}
    if faults:
        entry["report"] = _report(entry)
    others = [e for e in stored() if _about(e) != about]
    text = json.dumps({"format": FORMAT, "entries": [entry, *others]}, indent=1) + "\n"
    with contextlib.suppress(OSError, RuntimeError):  # read-only: once for each process
        evidence.replace_file(own_file(), text)
    return entry


def _about(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in entry.items() if name not in ("faults", "date", "report")}


def _report(entry: dict[str, Any]) -> str:
    """Write the report of a mismatch; return where it is, "" if nothing can be written."""
    backend, op, dtype = entry["backend"], entry["op"], entry["dtype"]
    facts = [f"{name}: {x}" for name, x in _about(entry).items()]
    text = "\n".join(
        [
            f"fastattn: {backend} gives wrong results for {op} in {dtype} on this GPU.",
            "Please send this file with an issue: it names the GPU and the versions, no data.",
            "",
            *facts,
            f"date: {entry['date']}",
            f"build: {json.dumps(builds.backend(backend))}",
            "",
            *entry["faults"],
            "",
            "All cases of this operator:",
            "  "
            + "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 " * entry["tf32"]
            + f"python -m fastattn verify --backend {backend} --op {op} --dtype {dtype}",
            "",
        ]
    )
    name = f"selftest-{backend}-{op}-{dtype}.txt"
    for folder in (own_file().parent, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError, RuntimeError):
            evidence.replace_file(folder / name, text)
            return str(folder / name)
    return ""


def _reasons(entry: dict[str, Any]) -> list[str]:
    if not entry["faults"]:
        return []
    report = f", see {entry['report']}" if entry.get("report") else ""
    return [f"failed its check on this GPU{report}; FASTATTN_SELFTEST=0 runs it all the same"]


def _message(entry: dict[str, Any]) -> str:
    faults = entry["faults"]
    if not faults:
        return ""
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    send = f" Please send {entry['report']} with an issue." if entry.get("report") else ""
    return (
        f"the {entry['backend']} kernels of {entry['op']} in {entry['dtype']} gave a wrong result "
        f"on this GPU ({entry['device']}) and are not used: {faults[0]}{more}.{send} After an "
        "update they are checked again; FASTATTN_SELFTEST=0 switches the check off."
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- caches ---------------------------------------------------------------------------------------


def forget() -> None:
    """Forget the verdicts of this process; those in the file stay."""
    _verdicts.clear()
    _warned.clear()


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Check nothing within the block, in this thread: for tests and measurements of kernels."""
    before = getattr(_this_thread, "checks", False)
    _this_thread.checks = True
    try:
        yield
    finally:
        _this_thread.checks = before


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may hold the old one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
evidence.on_change(forget)
