"""The tests of operators: the tables of cases, the exact results and the error bound."""

from fastattn.testing.cases import CASES, Case
from fastattn.testing.compare import Deviation, deviation
from fastattn.testing.inputs import Inputs, check, make_inputs
from fastattn.testing.rounding import Noise
from fastattn.testing.targets import OnGpu, Target, targets
from fastattn.testing.verdict import Proof, Verdict

__all__ = [
    "CASES",
    "Case",
    "Deviation",
    "Inputs",
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
