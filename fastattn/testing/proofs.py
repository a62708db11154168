"""The proofs of all operators, by the name of the operator."""

from __future__ import annotations

from fastattn.testing.additive import check_additive
from fastattn.testing.append import check_append
from fastattn.testing.decode import check_decode
from fastattn.testing.encode_memory import check_encoding
from fastattn.testing.hopfield import check_hopfield
from fastattn.testing.inputs import check
from fastattn.testing.luong import check_luong
from fastattn.testing.memory_hops import check_hops
from fastattn.testing.merge_states import check_merge
from fastattn.testing.sinusoidal import check_sinusoidal
from fastattn.testing.varlen import check_varlen

__all__ = ["PROOFS"]

_ALL = (
    *(check, check_additive, check_append, check_decode, check_encoding, check_hopfield),
    *(check_luong, check_hops, check_merge, check_sinusoidal, check_varlen),
)
PROOFS = {proof.operator: proof for proof in _ALL}
