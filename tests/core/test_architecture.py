"""Imports go down the layers of ``docs/design.md``, and never in a cycle."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lowest first. A module is in the layer of the longest name here that begins its own.
FLOORS = (
    "_version _cpu _cuda _table _untraced _warning compat _cgroup _openmp _processor builds bias",
    "sinusoids _flops _shapes _dtypes _seed backends.primitives backends._alloc "
    "backends._precision",
    "evidence backends",
    "dispatch batching checks",
    "explanation _derivative _gradient",
    "call library",
    "masks",
    "ops",
    "_capture _trace distributed flash_attn integrations nn plot",
    "fastattn",
    "testing",
    "bench info spelling",
    "_explain _kernel doctor tune verify",
    "cli __main__",
)
FLOOR = {name: n for n, names in enumerate(FLOORS) for name in names.split()}


def modules() -> dict[str, Path]:
    """All modules of fastattn with their files."""
    found = {}
    for path in (ROOT / "fastattn").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of the package that a source imports, wherever in it, but not for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in MODULES or inner in NATIVE else str(node.module)
        else:
            yield from imported(node)


NATIVE = ("fastattn._cpu", "fastattn._cuda")
GRAPH = {
    module: {
        name
        for name in imported(ast.parse(path.read_text()))
        if name.split(".")[0] == "fastattn" and name != module
    }
    for module, path in MODULES.items()
}


def layer(module: str) -> int:
    """The layer of a module: its own, or of the package that contains it."""
    name = module.removeprefix("fastattn.")
    while name not in FLOOR:
        name, dot, _ = name.rpartition(".")
        assert dot, f"{module} is in no layer"
    return FLOOR[name]


def test_imports_have_no_cycle() -> None:
    # A package's __init__ runs before its modules, but they do not need what it re-exports.
    try:
        list(TopologicalSorter(GRAPH).static_order())
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    up = [name for name in GRAPH[module] if layer(name) > layer(module)]
    assert not up, f"{module} imports {up} from a higher layer"
