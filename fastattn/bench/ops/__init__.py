"""The operators that can be measured: every operator and module of the library, and whole models.

`_FILES` has the operators of each file; there, an operator is a constant with its name in capitals.
Any importable module with an OP can be measured too: `--op mypackage.myoperator`.
"""

from __future__ import annotations

import functools
import importlib

from fastattn.bench.ops._base import Forward, Inputs, Operator, Twin, as_tuple

_FILES = {
    "ops.attention": "sdpa",
    "ops.transformer": "linear mha encoder_layer encoder decoder_layer decoder transformer",
    "ops.packed": "varlen decode",
    "ops.around_attention": "merge_states attention_stats hard head_network sinusoidal "
    "sinusoidal_table positional learned",
    "ops.recurrent": "additive additive_module bahdanau luong luong_module global_attention "
    "bahdanau_decoder",
    "ops.memories": "hopfield hopfield_energy hopfield_module hopfield_layer hopfield_pooling "
    "memory_hops encode_memory memn2n key_value_memory",
    # Whole models; their library is imported when one is built. The first are of transformers.
    "models": "bert distilbert vit whisper_encoder gpt2 llama llama_decode "
    "timm_vit diffusers_dit openai_whisper",
}
_FILE_OF = {
    name: f"fastattn.bench.{file}" for file, names in _FILES.items() for name in names.split()
}
MODELS = tuple(_FILES["models"].split())
LOOPS = ("bahdanau_decoder",)  # around modules of the library
OPS = tuple(name for name in _FILE_OF if name not in MODELS + LOOPS)

__all__ = ["LOOPS", "MODELS", "OPS", "Forward", "Inputs", "Operator", "Twin"]
__all__ += ["as_tuple", "get", "missing", "names_of", "resolve"]


@functools.cache
def get(name: str) -> Operator:
    """The operator of this name. Raises ValueError for an unknown one."""
    if name not in _FILE_OF and "." not in name:
        raise ValueError(f"--op {name!r}: known are {', '.join(_FILE_OF)}, or an importable module")
    try:
        module = importlib.import_module(_FILE_OF.get(name, name))
    except ImportError as error:
        raise ValueError(f"--op {name!r} cannot be imported: {error}") from error
    operator = getattr(module, name.upper() if name in _FILE_OF else "OP", None)
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
    for op in _FILE_OF:
        if name in names_of(op):
            return op
    get(name)
    return name


def names_of(op: str) -> tuple[str, ...]:
    """The name in OPS, the one in the library, and that without its module."""
    function = get(op).FUNCTION
    return op, function, function.removeprefix("nn.")
