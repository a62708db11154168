"""Options go from their record to a kernel by name, and an error names the field."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from new_option import Extended, assert_declined, assert_tensor_declined

from fastattn import dispatch
from fastattn.backends import torch as by_torch
from fastattn.backends.primitives import AttentionOptions, MemoryHopOptions

cpu = pytest.importorskip("fastattn.backends.cpu")


def _attend(options: Any) -> None:
    x = torch.ones(1, 1, 2, 4)
    cpu.scaled_dot_product_attention(x, x, x, options=options)


def test_a_missing_field_is_an_error_that_names_it() -> None:
    fields = vars(AttentionOptions(scale=1.0))
    _attend(SimpleNamespace(**fields))
    options = SimpleNamespace(**fields)
    del options.softcap
    with pytest.raises(TypeError, match=r"fastattn\._cpu: softcap of .*SimpleNamespace is missing"):
        _attend(options)


@pytest.mark.parametrize(
    ("field", "value"), [("softcap", "hard"), ("window_left", 1.5), ("scale", None)]
)
def test_a_field_of_another_type_is_an_error_that_names_it(field: str, value: Any) -> None:
    options = replace(AttentionOptions(scale=1.0), **{field: value})
    wrong = re.escape(f"fastattn._cpu: {field} of AttentionOptions cannot be {value!r}")
    with pytest.raises(TypeError, match=wrong):
        _attend(options)


def test_a_field_that_is_no_choice_is_an_error_that_names_it() -> None:
    options = MemoryHopOptions(activation="gelu")
    wrong = r"fastattn\._cpu: activation of MemoryHopOptions cannot be 'gelu'"
    x = torch.ones(1, 4)
    with pytest.raises(TypeError, match=wrong):
        cpu.memory_hop_attention(x, x[None], None, None, None, None, options=options)


def test_a_backend_declines_an_option_that_it_does_not_know() -> None:
    assert_declined(cpu, torch.float32)
    assert_declined(by_torch, torch.bfloat16)


def test_a_backend_declines_a_tensor_that_it_does_not_take() -> None:
    assert_tensor_declined(cpu, torch.float32)
    assert_tensor_declined(by_torch, torch.bfloat16)


def test_the_reference_runs_an_option_that_no_kernel_knows() -> None:
    x, options = torch.ones(1, 1, 2, 4), Extended(scale=1.0, sharpness=2.0)
    tensors = (x, x, x, None, None, None)
    with pytest.warns(dispatch.FallbackWarning, match="cpu: has no sharpness"):
        assert dispatch.choose("scaled_dot_product_attention", tensors, options) == "reference"
    out, _, _ = dispatch.run_reference("scaled_dot_product_attention", tensors, options)
    assert torch.equal(out, x)
