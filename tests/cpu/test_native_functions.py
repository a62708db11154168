"""The native functions have the signatures that the operators declare and the stub lists."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fastattn
from fastattn import dispatch, library
from fastattn.backends.primitives import NoOptions


def test_native_functions_take_the_tensors_of_their_operators_in_order(native: ModuleType) -> None:
    compared = 0
    for operator in library.operators.values():
        function = getattr(native, operator.name, None)
        if function is None:
            continue
        parameters = inspect.signature(function).parameters.values()
        tensors = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        kept = tensors[len(operator.names) :]  # saved by the forward kernel
        assert kept == (["kept"] if operator.name == "memory_hop_attention_backward" else [])
        assert tensors == [*operator.names, *kept], operator.name
        if operator.name != "linear":  # one of three GEMMs, which the backend chooses
            assert "options" in inspect.signature(function).parameters
        compared += 1
    assert compared > 14


def test_the_stub_lists_the_functions_of_the_module(native: ModuleType) -> None:
    stub = Path(fastattn.__file__).with_name("_cpu.pyi").read_text()
    nodes = ast.parse(stub).body
    listed = {node.name for node in nodes if isinstance(node, ast.FunctionDef)} - {"__getattr__"}
    listed |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign)}
    listed |= {operator.name for operator in library.operators.values()} & {*vars(native)}
    assert listed == {name for name in vars(native) if name[0] != "_"}


@pytest.mark.parametrize(
    ("tensors", "named", "message"),
    [
        (5, {}, r"merge_states\(\) takes 4 tensors, got 5"),
        (4, {"out_c": None}, r"merge_states\(\) takes no out_c by name"),
        (4, {"out_a": None}, r"merge_states\(\) takes no out_a by name"),
        (3, {}, "lse_b must be a tensor, got NoneType"),
    ],
)
def test_arguments_that_a_native_function_does_not_take_are_errors(
    tensors: int, named: dict[str, Any], message: str, native: ModuleType
) -> None:
    states = [torch.ones(2, 3), torch.ones(2)] * 3
    with pytest.raises(TypeError, match=message):
        native.merge_states(*states[:tensors], options=NoOptions(), **named)


def test_tensors_may_be_given_by_name(native: ModuleType) -> None:
    states = {"out_a": torch.ones(2, 3), "lse_a": torch.ones(2)}
    states |= {"out_b": torch.zeros(2, 3), "lse_b": torch.ones(2)}
    backend: Any = dispatch.load("cpu")
    out, _ = native.merge_states(**states, options=NoOptions())
    assert torch.equal(out, backend.merge_states(*states.values(), options=NoOptions())[0])
    assert torch.equal(out, torch.full((2, 3), 0.5))
