"""What Triton's kernels refuse of merged states; their cases run in ``test_triton_cases.py``."""

from __future__ import annotations

import pytest
import torch

from fastattn import dispatch
from fastattn.backends.primitives import NoOptions
from fastattn.testing import Target

pytestmark = pytest.mark.usefixtures("triton_interpreter")


def test_outputs_in_float64_are_declined_whatever_lse_is() -> None:
    backend = Target("triton").module
    out, lse = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2)
    for op, given in (("merge_states", ()), ("merge_states_backward", (None, lse))):
        tensors = dispatch.named(op, (*given, out, lse, out, lse))
        (reason,) = backend.why_not(op, tensors, NoOptions())
        assert "float64 is not one of" in reason
        args = (*given, out.float(), lse.double(), out.float(), lse.double())
        assert backend.why_not(op, dispatch.named(op, args), NoOptions()) == []
