"""The tests of operators: the tables of cases, the exact results and the error bound."""

from fastattn.testing.around_attention import check_merge, check_sinusoidal
from fastattn.testing.cases import Case
from fastattn.testing.decode import check_append, check_decode
from fastattn.testing.inputs import check, make_inputs
from fastattn.testing.judge import Deviation, Proof, Verdict, deviation
from fastattn.testing.memories import check_encoding, check_hopfield, check_hops
from fastattn.testing.packed import check_varlen
from fastattn.testing.recurrent import check_additive, check_luong
from fastattn.testing.rounding import Noise
from fastattn.testing.targets import OnGpu, Target, targets

__all__ = [
    "PROOFS",
    "Case",
    "Deviation",
    "Noise",
    "OnGpu",
    "Proof",
    "Target",
    "Verdict",
    "check",
    "deviation",
    "make_inputs",
    "targets",
]

_ALL = (
    *(check, check_additive, check_append, check_decode, check_encoding, check_hopfield),
    *(check_luong, check_hops, check_merge, check_sinusoidal, check_varlen),
)
PROOFS = {proof.operator: proof for proof in _ALL}
