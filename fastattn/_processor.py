"""Identifies this processor, or a GPU."""

from __future__ import annotations

import functools
import importlib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

_TILES = "amx_bf16 amx_fp16 amx_int8"
# The features that oneDNN's environment variable hides, by its value.
_HIDDEN = {
    **dict.fromkeys(
        ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"),
        f"avx512f avx512_bf16 avx512_fp16 {_TILES}",
    ),
    **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), f"avx512_bf16 avx512_fp16 {_TILES}"),
    "AVX512_CORE_BF16": f"avx512_fp16 {_TILES}",
    "AVX512_CORE_FP16": _TILES,
}
# The features in `Processor.key`.
_DISTINGUISHING = ("avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")


class Processor(NamedTuple):
    device: str  # "cpu" or "cuda"
    vendor: str = ""  # "Intel", "AMD", "ARM", "NVIDIA", another vendor's string, or ""
    name: str = ""
    features: frozenset[str] = frozenset()  # the instruction sets that matter, with Linux's names

    def as_limited(self) -> Processor:
        """The processor as PyTorch's libraries see it.

        An environment variable of oneDNN may hide instruction sets from them.
        """
        limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
        hidden = _HIDDEN.get(limit.upper(), "")
        return self._replace(features=self.features - {*hidden.split()})

    @property
    def key(self) -> str:
        """The name of this processor in the rows of evidence that `fastattn tune` writes."""
        features = [name for name in _DISTINGUISHING if name in self.features]
        return ", ".join([self.device, self.vendor, self.name, *features])

    def is_like(self, on: str) -> bool:
        """Whether ``on`` of a row of evidence means this processor: its key, or words about it."""
        if on == self.key:
            return True
        family = re.search(r"family \d+", self.name)
        words = {self.device, self.vendor, *self.features, family and family[0].replace(" ", "_")}
        return "," not in on and all(
            word[1:] not in words if word.startswith("-") else word in words for word in on.split()
        )


@functools.cache
def processor(device: str = "cpu", index: int = 0) -> Processor:
    """Describe this processor, or a GPU; tests replace this function."""
    if device == "cuda" and torch.cuda.is_available():
        vendor = "AMD" if torch.version.hip else "NVIDIA"
        return Processor(device, vendor, torch.cuda.get_device_name(index))
    if device != "cpu":
        return Processor(device)
    native = described()
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


def described() -> dict[str, Any]:
    """The vendor, brand, family, model and features of this processor, with Linux's names.

    The features are the ones that this process may use; without the native core, all that Linux
    lists.
    """
    try:
        return dict(importlib.import_module("fastattn._cpu").processor())
    except Exception:  # not built, or broken: `fastattn info` says which
        fields = cpuinfo()
    return {
        "vendor": fields.get("vendor_id") or fields.get("CPU implementer", ""),
        "brand": fields.get("model name", ""),
        "family": int(fields.get("cpu family", 0)),
        "model": int(fields.get("model", 0)),
        "features": (fields.get("flags") or fields.get("Features") or "").split(),
    }
