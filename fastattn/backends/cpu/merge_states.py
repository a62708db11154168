"""The adapter of merged states."""

from __future__ import annotations

from fastattn import _cpu
from fastattn.backends._states import operators

merge_states, merge_states_backward = operators(_cpu.merge_states, _cpu.merge_states_backward)
