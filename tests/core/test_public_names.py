"""The public names: none goes away, and none is added without a line here."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from child_process import run_python

import fastattn

ROOT = Path(__file__).resolve().parents[2]

NAMES = {
    "fastattn": """
        FallbackWarning MultiheadAttention __version__ accelerate additive_attention
        attention_stats bias capture decode_attention distributed encode_memory explain
        flex_attention hard_attention hopfield_energy hopfield_retrieve luong_attention masks
        memory_hop_attention merge_states nn plot replace_mha restore restore_mha
        scaled_dot_product_attention sinusoidal_encoding sinusoidal_table trace use_backend
        varlen_attention""",
    "fastattn.nn": """
        AdditiveAttention BahdanauAttention DisentangledBias GlobalAttention HeadNetwork Hopfield
        HopfieldLayer HopfieldPooling KeyValueMemory LearnedPositionalEncoding Linear LuongAttention
        MemN2N MultiheadAttention RelativeBias SinusoidalPositionalEncoding
        T5RelativeBias Transformer
        TransformerDecoder TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer
        WindowRelativeBias insert_empty_memories""",
    "fastattn.nn.functional": "linear",
    "fastattn.bias": "Decomposed2d Disentangled T5 Window2d",
    "fastattn.distributed": """
        Layout Plan Share attention decode_attention hopfield_retrieve memory_hop_attention plan""",
    "fastattn.flash_attn": """
        flash_attn_func flash_attn_qkvpacked_func flash_attn_varlen_func flash_attn_with_kvcache""",
    "fastattn.integrations": "accelerate replace_mha restore restore_mha",
    "fastattn.integrations.acceleration": "Part Report accelerate restore",
    "fastattn.integrations.diffusers": "Registration register",
    "fastattn.integrations.sentence_transformers": "Registration unpad_inputs",
    "fastattn.integrations.tabpfn": "Registration register",
    "fastattn.integrations.torch": "Activation activate",
    "fastattn.integrations.transformers": """
        CompactBiases Registration compact_relative_bias context_parallel register""",
    "fastattn.masks": """
        Mask causal chunked document draft_tree from_block_mask from_function prefix_lm
        sliding_window""",
    "fastattn.plot": "heatmap hops html",
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(NAMES[module].split())
    assert all(hasattr(found, name) for name in found.__all__)


def test_the_reference_has_every_module() -> None:
    pages = "".join(page.read_text() for page in ROOT.glob("docs/reference/*.md"))
    assert sorted(re.findall(r"automodule:: (\S+)", pages)) == sorted(NAMES)


# --- what is imported on first use ----------------------------------------------------------------

_LOADED = """if True:
    import sys, torch, fastattn

    def print_loaded():
        names = [name.removeprefix("fastattn.") for name in sys.modules]
        packages = {name.split(".")[0] for name in names}
        print(*sorted(packages & set(sys.argv[1:])))

    print_loaded()
    x = torch.ones(1, 2, 3, 4, requires_grad=True)
    fastattn.scaled_dot_product_attention(x, x, x).sum().backward()
    print_loaded()
    fastattn.nn.TransformerEncoderLayer(8, 2)(torch.ones(3, 1, 8)).sum().backward()
    print_loaded()
"""
_LATER = """
    bench distributed integrations matplotlib nn plot testing _capture _trace explanation tune
""".split()


def _lines_of(script: str, *arguments: str) -> list[str]:
    done = run_python("-c", script, *arguments)
    return done.stdout.splitlines()


def test_a_call_loads_what_it_needs() -> None:
    assert _lines_of(_LOADED, *_LATER) == ["", "", "nn"]


_FROM_THREADS = """if True:
    import importlib, pickle, sys, threading
    import torch, fastattn

    names = sorted({*fastattn.__all__, *fastattn._MODULES})
    assert set(names) <= set(dir(fastattn))
    results = {name: [] for name in names}
    start = threading.Barrier(8)

    def read():
        start.wait()
        for name in names:
            results[name].append(getattr(fastattn, name))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, values in results.items():
        assert len(values) == 8 and len(set(map(id, values))) == 1, name
        if name in fastattn._MODULES:
            assert importlib.import_module(f"fastattn.{name}") is values[0]
        elif callable(values[0]):
            assert pickle.loads(pickle.dumps(values[0])) is values[0]
    namespace = {}
    exec("from fastattn import *", namespace)
    assert all(namespace[name] is getattr(fastattn, name) for name in fastattn.__all__)
"""


def test_names_that_are_imported_on_first_use() -> None:
    _lines_of(_FROM_THREADS)
    with pytest.raises(AttributeError, match="module 'fastattn' has no attribute 'no_such_name'"):
        fastattn.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_see_what_is_imported_on_first_use() -> None:
    tree = ast.parse(Path(fastattn.__file__).read_text())
    block = next(x for x in tree.body if isinstance(x, ast.If) and "TYPE" in ast.unparse(x.test))
    imports = [x for x in block.body if isinstance(x, ast.ImportFrom)]
    declared = {name.name: x.module for x in imports for name in x.names}
    modules = dict.fromkeys(fastattn._MODULES, "fastattn")
    assert declared == {**modules, **fastattn._MODULE_OF}
