"""Which cases of the first-use check a backend takes."""

from __future__ import annotations

from typing import Any

import torch

from fastattn import dispatch
from fastattn.testing.proofs import PROOFS
from fastattn.testing.selftest import cases_of


def declined(name: str, backend: Any, op: str, dtype: torch.dtype) -> list[str]:
    """The cases of an operator that check nothing on this backend, with its reasons."""
    proof = PROOFS[op]
    assert proof.primitive is not None
    found = []
    for case in cases_of(name, op):
        reasons = dispatch.reasons_of(backend, op, *proof.primitive(proof.make(case, dtype)))
        found += [f"{case.name}: {reason}" for reason in reasons]
    return found
