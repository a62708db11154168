"""The operators that can be measured: one file for each operator and module of the library.

A file `fastattn/bench/ops/<name>.py` defines OP, an instance of `_base.Operator`; OPS lists the
names. MODELS lists those of whole models, in `fastattn/bench/models/<name>.py`. Any importable
module with an OP can be measured too: `--op mypackage.myoperator`.
"""

from __future__ import annotations

import functools
import importlib

from fastattn.bench.ops._base import Operator

OPS = (
    *("sdpa", "mha", "encoder_layer", "encoder", "decoder_layer", "decoder", "transformer"),
    *("varlen", "decode", "merge_states", "attention_stats", "hard", "head_network"),
    *("additive", "additive_module", "bahdanau", "luong", "luong_module", "global_attention"),
    *("hopfield", "hopfield_energy", "hopfield_module", "hopfield_layer", "hopfield_pooling"),
    *("memory_hops", "encode_memory", "memn2n", "key_value_memory"),
    *("sinusoidal", "sinusoidal_table", "positional", "learned"),
)
LOOPS = ("bahdanau_decoder",)  # around modules of the library
# Whole models; their library is imported when one is built. The first are of transformers.
MODELS = (
    *("bert", "distilbert", "vit", "whisper_encoder", "gpt2", "llama", "llama_decode"),
    *("timm_vit", "diffusers_dit", "openai_whisper"),
)
_MODULES = {name: f"{__name__}.{name}" for name in (*OPS, *LOOPS)} | {
    name: f"fastattn.bench.models.{name}" for name in MODELS
}

__all__ = ["LOOPS", "MODELS", "OPS", "Operator", "get", "missing", "names_of", "resolve"]


@functools.cache
def get(name: str) -> Operator:
    """The operator of this name. Raises ValueError for an unknown one."""
    if name not in _MODULES and "." not in name:
        raise ValueError(f"--op {name!r}: known are {', '.join(_MODULES)}, or an importable module")
    try:
        module = importlib.import_module(_MODULES.get(name, name))
    except ImportError as error:
        raise ValueError(f"--op {name!r} cannot be imported: {error}") from error
    operator = getattr(module, "OP", None)
    if not isinstance(operator, Operator):
        raise ValueError(f"--op {name!r} has no OP that is a fastattn.bench.ops.Operator")
    return operator


def missing(name: str) -> str:
    """What to install before an operator can be measured; "" if it has all that it needs."""
    try:
        get(name).require()
    except ImportError as error:
        return str(error)
    return ""


def resolve(name: str) -> str:
    """The name in OPS or MODELS of an operator, also given by its name in the library."""
    for op in _MODULES:
        if name in names_of(op):
            return op
    get(name)
    return name


def names_of(op: str) -> tuple[str, ...]:
    """The name in OPS, the one in the library, and that without its module."""
    function = get(op).FUNCTION
    return op, function, function.removeprefix("nn.")
