"""Records the attention calls of a program, by overriding PyTorch's functions.

    with fastattn.bench.record("shapes.txt"):
        model(batch)

Results do not change. During a recording, `nn.MultiheadAttention` does not take its fused inference
path, and the library's operators go through the dispatcher.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastattn import compat
from fastattn.bench import ops
from fastattn.bench.cells import DTYPES, TORCH_DTYPES, shape_text
from fastattn.bench.ops._base import Intercepting
from fastattn.library import operators

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Recording(Intercepting):
    """The recorded lines of `--shapes` and their counts."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.lines: Counter[str] = Counter()

    def _note(self, func: Any, args: Any, kwargs: Any) -> Any:
        operator = operators.get(func)
        if func in _FUNCTIONS:
            self.lines.update(_FUNCTIONS[func](*args, **kwargs))
        elif operator is not None and operator.name in _PRIMITIVES:
            self.lines.update(_primitive(*_PRIMITIVES[operator.name], *operator.split(args)))
        return func(*args, **kwargs)

    def text(self) -> str:
        """The contents of a file for `--shapes @FILE`, the most frequent lines first."""
        head = "# recorded by fastattn bench record; run: fastattn bench run --shapes @THIS_FILE\n"
        width = max(map(len, self.lines), default=0)
        calls = self.lines.most_common()
        return head + "".join(f"{line:<{width}}  # {count} calls\n" for line, count in calls)


@contextlib.contextmanager
def record(path: str | Path | None = None) -> Iterator[Recording]:
    """Record the attention calls in the `with` block, on this thread.

    At its end, the shapes are written to the file, one per line with the number of calls. Recorded
    are PyTorch's `scaled_dot_product_attention` and `nn.MultiheadAttention`, and the attentions,
    memory hops and encodings of this library, also inside its modules.
    """
    recording = Recording()
    try:
        with compat.through_the_dispatcher(), recording:
            yield recording
    finally:
        if path is not None:
            Path(path).write_text(recording.text())


def run_program(command: Sequence[str], path: Path) -> int:
    """Run and record `[python] script.py ...` or `[python] -m module ...`; return its exit code."""
    words = list(command[1:] if command[:1] == ["--"] else command)
    python = sys.executable  # a bare `python` may be another interpreter, without this package
    if words and Path(words[0]).name.startswith("python"):
        named = words.pop(0)
        python = named if "/" in named else python
    if not words or (words[0] != "-m" and not words[0].endswith(".py")) or words == ["-m"]:
        raise ValueError(
            f"record: {' '.join(command) or 'nothing'!r} is no Python program; give one as "
            "-- python train.py or -- python -m module"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()  # an unwritable path raises now, not after the program has run for hours
    program = "from fastattn.bench.recording import main; main()"
    return subprocess.run([python, "-c", program, str(path), *words], check=False).returncode


def main() -> None:
    path, *words = sys.argv[1:]
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    with contextlib.ExitStack() as stack:
        stack.callback(print, f"Written: {path}")
        stack.enter_context(record(path))
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")


# A call as a line of --shapes, or no line if the benchmark has no such cell.


def _line(op: str, sizes: Mapping[str, int], tensors: Sequence[Any], **options: str) -> list[str]:
    """The lines of a call; `tensors` may require a gradient."""
    dtype = next(_DTYPE_NAMES.get(x.dtype) for x in tensors if x.is_floating_point())
    if dtype not in DTYPES or min(sizes.values()) < 1:
        return []
    wants = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    grad = wants and "fwd+bwd" in ops.get(op).PASSES
    words = [op, shape_text(sizes, ops.get(op).SIZES), f"dtype={dtype}"]
    words.append(f"pass={'fwd+bwd' if grad else 'fwd'}")
    words += [f"{name}={x}" for name, x in options.items() if x != "none"]
    return [" ".join(words)]


def _sizes(shapes: str, tensors: Sequence[Tensor]) -> dict[str, int]:
    """The sizes that `shapes` names, such as "B L D, B N D"; the first occurrence of a name counts.

    The first name of a tensor stands for all of its leading dimensions; `_` is not recorded.
    """
    sizes: dict[str, int] = {}
    for keys, x in zip((text.split() for text in shapes.split(",")), tensors, strict=True):
        inner = len(keys) - 1
        shape = [1] * (inner - x.dim()) + [*x.shape]
        split = len(shape) - inner
        sizes = dict(zip(keys, (math.prod(shape[:split]), *shape[split:]), strict=True)) | sizes
    return {key: size for key, size in sizes.items() if key != "_"}


def _mask_kind(mask: Tensor | None, causal: bool) -> str:
    """The kind of a mask, from its shape and dtype, and its contents if it is a matrix."""
    if causal or mask is None:
        return "causal" if causal else "none"
    if mask.dim() < 2 or mask.shape[-2] == 1:
        return "padding"
    visible = mask if mask.dtype == torch.bool else mask == 0
    if mask.dim() == 2 and torch.equal(visible, torch.ones_like(visible).tril()):
        return "causal"
    return "bool" if mask.dtype == torch.bool else "bias"


_HEADS = "B H Lq D, B Hkv Lk D, B Hkv Lk Dv"
# The operator of the benchmark and the sizes of the first tensors.
_PRIMITIVES = {
    "scaled_dot_product_attention": ("sdpa", _HEADS),
    "additive_attention": ("additive", "B Lq A, B Lk A, B Lk Dv"),
    "memory_hop_attention": ("memory_hops", "B D, _ N D"),
    "encode_memory": ("encode_memory", "_ B N J, _ V D"),
    "sinusoidal_encoding": ("sinusoidal", "B L E"),
    "varlen_attention": ("varlen", "T H D, _ Hkv D, _ Hkv D"),
    "decode_attention": ("decode", _HEADS),
    "hopfield_retrieve": ("hopfield", "B L D, _ N D"),
}


def _primitive(op: str, shapes: str, tensors: Sequence[Any], options: Any) -> list[str]:
    """A call of a primitive, with all of its tensors and its record of options."""
    used, words = tensors[: shapes.count(",") + 1], {}
    sizes = _sizes(shapes, used)
    if op in ("sdpa", "varlen"):
        mask = tensors[3] if op == "sdpa" else None
        words["mask"] = _mask_kind(mask, options.window_right == 0 and options.window_left < 0)
    if op == "sdpa":
        words["weights"] = ("none", "per-head", "average")[options.weights]
    elif op == "additive":
        words["mask"] = _mask_kind(tensors[5], options.causal)
    elif op == "memory_hops":
        own = used[1].shape[0] > 1 or sizes["B"] == 1
        sizes |= {"K": options.hops, "S": sizes["B"] if own else 1}
    elif op == "varlen":
        # In the benchmark's cells L is the length, and the mean is L / 2.
        sizes["B"] = max(tensors[3].numel() - 1, 1)
        sizes["L"] = -(-2 * sizes.pop("T") // sizes["B"])
    elif op == "decode":
        _, keys, values, _, table = tensors[:5]
        if table is not None:  # paged: the shapes do not include the length of the cache
            return []
        if values.shape[-1] < keys.shape[-1] and values.data_ptr() == keys.data_ptr():
            words["option"] = "latent"  # the first columns of the keys
    elif op == "hopfield":
        sizes |= {"H": 1, "K": options.steps_max}  # heads are in the batch
    return _line(op, sizes, used, **words)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> list[str]:
    tensors = [query, key, value]
    return _line("sdpa", _sizes(_HEADS, tensors), tensors, mask=_mask_kind(attn_mask, is_causal))


_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)


def _module(*args: Any, **kwargs: Any) -> list[str]:
    """A call of nn.MultiheadAttention: tensors are [L, B, E], and True in a mask is ignored."""
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    arguments = call.arguments
    query, key, mask = arguments["query"], arguments["key"], arguments["attn_mask"]
    weights = "average" if arguments["average_attn_weights"] else "per-head"
    weights = weights if arguments["need_weights"] else "none"
    mask = ~mask if mask is not None and mask.dtype == torch.bool else mask
    is_padded = arguments["key_padding_mask"] is not None
    kind = "padding" if is_padded else _mask_kind(mask, arguments["is_causal"])
    batch, heads = query.shape[1] if query.dim() == 3 else 1, arguments["num_heads"]
    op, sizes = "mha", {"B": batch, "L": len(query), "E": query.shape[-1], "H": heads}
    if not query.shape == key.shape == arguments["value"].shape:  # cross-attention: no projections
        width = query.shape[-1] // heads
        op, sizes = "sdpa", {"B": batch, "H": heads, "Hkv": heads, "Lq": len(query)}
        sizes |= {"Lk": key.shape[0], "D": width, "Dv": width}
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    return _line(op, sizes, tensors, mask=kind, weights=weights)


_FUNCTIONS: dict[Any, Callable[..., list[str]]] = {
    functional.scaled_dot_product_attention: _sdpa,
    functional.multi_head_attention_forward: _module,
}
