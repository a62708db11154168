"""Energy of the processor, from Linux's powercap interface (RAPL) if it is readable."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = Path("/sys/class/powercap")


def joules() -> float | None:
    """The energy used so far by all processor packages; None if it cannot be read."""
    try:
        used = [int((p / "energy_uj").read_text()) for p in _COUNTERS.glob("*-rapl:?")]
    except (OSError, ValueError):
        return None
    return sum(used) * 1e-6 if used else None
