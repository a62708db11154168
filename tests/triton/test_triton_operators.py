"""Operators on Triton beside attention and decoding, beyond ``test_triton_cases.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fastattn
from fastattn import dispatch
from fastattn.backends import reference
from fastattn.backends.primitives import HopfieldOptions, NoOptions
from fastattn.testing import OnGpu, Target
from fastattn.testing.memories import HOP_CASES, check_hops
from fastattn.testing.packed import VarlenCase, check_varlen, make_varlen

pytestmark = pytest.mark.usefixtures("triton_interpreter")

TRITON = Target("triton")


# --- packed sequences ----------------------------------------------------------------------------


@pytest.mark.complete
@pytest.mark.parametrize(
    ("dtype", "program"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "many")],
    ids=str,
)
def test_each_sequence_has_the_bits_that_it_has_alone(
    dtype: torch.dtype, program: str | None
) -> None:
    case = VarlenCase("alone", (40, 0, 33, 7), (70, 3, 33, 0), heads=2, kv_heads=1, dropout_p=0.2)
    case = replace(case, program=program)
    inputs = make_varlen(replace(case, window=(50, 3), bottom_right=True), dtype)
    module = TRITON.module
    expected = inputs.by_sequence(lambda alone: alone.results(module))
    found = inputs.results(module)
    for name, want in expected.items():
        assert torch.equal(found[name], want.to(found[name].dtype)), name


@pytest.mark.complete
def test_sequences_beyond_the_first_128_are_found() -> None:
    """The kernel searches 128 sequences at a time."""
    lengths = [0] * 130
    lengths[0], lengths[127], lengths[128], lengths[129] = 3, 5, 40, 2
    verdict = check_varlen(VarlenCase("many", tuple(lengths), heads=1), torch.float32, TRITON)
    assert verdict.ok, verdict.faults


def test_the_gradient_of_a_table_has_a_bounded_number_of_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that its memory does not grow with the number of sequences."""
    monkeypatch.setattr("fastattn.backends.triton._attend._PARTS", 2)
    case = VarlenCase("parts", (9, 2, 35, 0, 4), heads=1, relative_bias=True)
    verdict = check_varlen(case, torch.float32, TRITON)
    assert verdict.ok, verdict.faults


# --- memories ------------------------------------------------------------------------------------


def test_the_gpu_target_of_the_tests_runs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: copies to the device and back are no-ops."""
    backend, ran = TRITON.module, []
    for name in ("memory_hop_attention", "memory_hop_attention_backward"):
        function = getattr(backend, name)

        def noted(*args: Any, function: Any = function, **options: Any) -> Any:
            ran.append(function.__name__)
            return function(*args, **options)

        monkeypatch.setattr(backend, name, noted)
    verdict = check_hops(HOP_CASES[0], torch.float32, OnGpu("triton", device="cpu"))
    assert verdict.ok, verdict.faults
    assert not verdict.declined
    assert set(ran) == {"memory_hop_attention", "memory_hop_attention_backward"}


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_encoding_of_empty_memories(shape: tuple[int, int, int]) -> None:
    tokens, weight = torch.zeros(shape, dtype=torch.int64), torch.ones(4, 5, requires_grad=True)
    with fastattn.use_backend("triton"):
        out = fastattn.encode_memory(tokens, weight, padding_idx=None)
        (grad,) = torch.autograd.grad(out.sum(), weight)
    assert torch.equal(out, torch.zeros(*shape[:2], 5))
    assert torch.equal(grad, torch.zeros(4, 5))


def test_a_common_word_is_summed_in_one_order(generator: torch.Generator) -> None:
    """More positions than a program handles at once; the same bits in every run."""
    tokens = torch.randint(0, 3, (4, 9, 11), generator=generator)
    grad = torch.randn(4, 9, 6, generator=generator)
    weight = torch.randn(3, 6, generator=generator, requires_grad=True)
    found = []
    for name in ("triton", "triton", "reference"):
        with fastattn.use_backend(name):
            out = fastattn.encode_memory(tokens, weight)
            found.append(torch.autograd.grad(out, weight, grad)[0])
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=1e-5, atol=1e-5)


# --- Hopfield retrieval --------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 5])
@pytest.mark.parametrize("steps_max", [0, 3, -1])
def test_steps_of_each_query_equal_the_references(
    together: int, steps_max: int, generator: torch.Generator
) -> None:
    state = torch.randn(2, 35, 6, generator=generator)
    stored = 2 * torch.randn(2, 9, 6, generator=generator)
    options = HopfieldOptions(steps_max=steps_max, eps=1e-2, together=together)
    tensors = (state, stored, None, None, None)
    found = TRITON.module.hopfield_retrieve(*tensors, options=options)
    wanted = reference.hopfield_retrieve(*tensors, options=options)
    assert torch.equal(found[1], wanted[1])
    assert steps_max == 0 or wanted[1].unique().numel() > 1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_retrieval_over_several_launches(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit, each launch runs at most ROUND steps."""
    state, stored = (torch.randn(1, n, 4, generator=generator) for n in (20, 7))
    options = HopfieldOptions(steps_max=-1, eps=1e-4)
    found = []
    for steps in (256, 2):
        monkeypatch.setattr("fastattn.backends.triton.hopfield.ROUND", steps)
        tensors = (state, stored, None, None, None)
        found.append(TRITON.module.hopfield_retrieve(*tensors, options=options))
    assert found[0][1].max() > 4
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_too_many_queries_that_stop_together_are_declined() -> None:
    x = torch.ones(1, 1, 17, 4)
    with fastattn.use_backend("triton"), pytest.raises(RuntimeError, match="17 queries that stop"):
        fastattn.hopfield_retrieve(x, x, stop="head")


# --- merged states -------------------------------------------------------------------------------


def test_outputs_in_float64_are_declined_whatever_lse_is() -> None:
    backend = TRITON.module
    out, lse = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2)
    for op, given in (("merge_states", ()), ("merge_states_backward", (None, lse))):
        tensors = dispatch.tensors_by_name(op, (*given, out, lse, out, lse))
        (reason,) = backend.why_not(op, tensors, NoOptions())
        assert "float64 is not one of" in reason
        args = (*given, out.float(), lse.double(), out.float(), lse.double())
        assert backend.why_not(op, dispatch.tensors_by_name(op, args), NoOptions()) == []
