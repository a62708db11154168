"""The tests of operators: the tables of cases, the exact results and the error bound."""

from fastattn.testing.cases import CASES, Case
from fastattn.testing.compare import Deviation, assert_right, assert_within_bound, deviation
from fastattn.testing.inputs import Inputs, make_inputs
from fastattn.testing.oracle import check
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
    "assert_right",
    "assert_within_bound",
    "check",
    "deviation",
    "make_inputs",
    "targets",
]
