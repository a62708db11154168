"""Records the attention calls of a program, by overriding PyTorch's functions.

    with fastattn.bench.record("shapes.txt"):
        model(batch)

Results do not change. During a recording, `nn.MultiheadAttention` does not take its fused inference
path, and the library's operators go through the dispatcher.
"""

from __future__ import annotations

import contextlib
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
from torch.overrides import TorchFunctionMode

from fastattn import compat
from fastattn.bench import ops
from fastattn.bench.cells import DTYPES
from fastattn.bench.inputs import TORCH_DTYPES
from fastattn.bench.shapes import shape_text
from fastattn.library import operators

OnCall = Callable[[str, Sequence[Any], Any], None]
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Calls(TorchFunctionMode):
    """Reports every call of a PyTorch function, and of every operator of fastattn that goes through
    the dispatcher, with its name, tensors and options.
    """

    def __init__(self, on_operator: OnCall, on_function: Callable[..., None] | None = None) -> None:
        super().__init__()
        self.on_operator = on_operator
        self.on_function = on_function

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (operator := operators.get(func)) is not None:
            self.on_operator(operator.name, *operator.split(args))
        elif self.on_function is not None:
            self.on_function(func, args, kwargs)
        return func(*args, **kwargs)


class Recording:
    """The recorded lines of `--shapes` and their counts."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()

    def note_operator(self, op: str, tensors: Sequence[Any], options: Any) -> None:
        if (note := _PRIMITIVES.get(op)) is not None and (line := note(tensors, options)):
            self.lines[line] += 1

    def note_function(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if (note := _NOTES.get(func)) is not None and (line := note(*args, **kwargs)):
            self.lines[line] += 1

    def text(self) -> str:
        """The contents of a file for `--shapes @FILE`, the most frequent lines first."""
        head = "# recorded by fastattn bench record; run: fastattn bench run --shapes @THIS_FILE\n"
        calls = self.lines.most_common()
        width = max((len(line) for line, _ in calls), default=0)
        return head + "".join(f"{line:<{width}}  # {count} calls\n" for line, count in calls)


@contextlib.contextmanager
def record(path: str | Path | None = None) -> Iterator[Recording]:
    """Record the attention calls in the `with` block, on this thread.

    At its end, the shapes are written to the file, one per line with the number of calls. The
    yielded recording has them too. Recorded are PyTorch's `scaled_dot_product_attention` and
    `nn.MultiheadAttention`, and the attentions, memory hops and encodings of this library, also
    inside its modules.
    """
    recording = Recording()
    try:
        with (
            compat.through_the_dispatcher(),
            Calls(recording.note_operator, recording.note_function),
        ):
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
    command = [python, "-m", "fastattn.bench.recording", str(path), *words]
    done = subprocess.run(command, check=False)
    if path.exists():
        print(f"Written: {path}")
    return done.returncode


# A call as a line of --shapes, or None if the benchmark has no such cell.


def _line(op: str, sizes: Mapping[str, int], x: Tensor, grad: bool, **options: str) -> str | None:
    if _DTYPE_NAMES.get(x.dtype) not in DTYPES or min(sizes.values()) < 1:
        return None
    words = [op, shape_text(sizes, ops.get(op).SIZES), f"dtype={_DTYPE_NAMES[x.dtype]}"]
    words.append(f"pass={'fwd+bwd' if grad else 'fwd'}")
    words += [f"{name}={value}" for name, value in options.items() if value != "none"]
    return " ".join(words)


def _sizes(shapes: str, *tensors: Tensor) -> dict[str, int]:
    """The sizes that `shapes` names, such as "B L D, B N D"; the first of a name counts.

    The first of a tensor is all of its leading dimensions; `_` is not recorded.
    """
    sizes: dict[str, int] = {}
    for keys, x in zip((text.split() for text in shapes.split(",")), tensors, strict=True):
        inner = len(keys) - 1
        shape = [1] * (inner - x.dim()) + [*x.shape]
        split = len(shape) - inner
        sizes = dict(zip(keys, (math.prod(shape[:split]), *shape[split:]), strict=True)) | sizes
    return {key: size for key, size in sizes.items() if key != "_"}


def _wants_grad(*tensors: Any) -> bool:
    found = (x.requires_grad for x in tensors if isinstance(x, Tensor))
    return torch.is_grad_enabled() and any(found)


def _mask_kind(mask: Tensor | None, causal: bool) -> str:
    """The kind of a mask, from its shape and dtype, and its contents if it is a matrix."""
    if causal:
        return "causal"
    if mask is None:
        return "none"
    if mask.dim() < 2 or mask.shape[-2] == 1:
        return "padding"
    if mask.dim() == 2:
        visible = mask if mask.dtype == torch.bool else mask == 0
        if torch.equal(visible, torch.ones_like(visible).tril()):
            return "causal"
    return "bool" if mask.dtype == torch.bool else "bias"


_HEADS = "B H Lq D, B Hkv Lk D, B Hkv Lk Dv"


def _note_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    weights: str = "none",
    **options: Any,
) -> str | None:
    tensors = (query, key, value)
    words = {"mask": _mask_kind(attn_mask, is_causal), "weights": weights}
    return _line("sdpa", _sizes(_HEADS, *tensors), query, _wants_grad(*tensors), **words)


def _note_module(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    *args: Any,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **options: Any,
) -> str | None:
    """`F.multi_head_attention_forward`: [L, B, E], and True in a mask is ignored."""
    length, batch = query.shape[0], query.shape[1] if query.dim() == 3 else 1
    weights = ("average" if average_attn_weights else "per-head") if need_weights else "none"
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = ~attn_mask
    mask = "padding" if key_padding_mask is not None else _mask_kind(attn_mask, is_causal)
    op, sizes = "mha", {"B": batch, "L": length, "E": query.shape[-1], "H": num_heads}
    if not query.shape == key.shape == value.shape:  # cross-attention: without the projections
        width = query.shape[-1] // num_heads
        op, sizes = "sdpa", {"B": batch, "H": num_heads, "Hkv": num_heads, "Lq": length}
        sizes |= {"Lk": key.shape[0], "D": width, "Dv": width}
    grad = _wants_grad(query, key, value, *args)
    return _line(op, sizes, query, grad, mask=mask, weights=weights)


def _primitive_sdpa(tensors: Sequence[Any], options: Any) -> str | None:
    causal = options.window_right == 0 and options.window_left < 0
    weights = ("none", "per-head", "average")[options.weights]
    query, key, value, mask = tensors[:4]
    return _note_sdpa(query, key, value, mask, is_causal=causal, weights=weights)


def _primitive_additive(tensors: Sequence[Any], options: Any) -> str | None:
    sizes = _sizes("B Lq A, B Lk A, B Lk Dv", *tensors[:3])
    kind = _mask_kind(tensors[5], options.causal)
    return _line("additive", sizes, tensors[0], _wants_grad(*tensors[:3]), mask=kind)


def _primitive_hops(tensors: Sequence[Any], options: Any) -> str | None:
    query, memory = tensors[:2]
    sizes = _sizes("B D, _ N D", query, memory) | {"K": options.hops}
    sizes["S"] = sizes["B"] if memory.shape[0] > 1 or sizes["B"] == 1 else 1
    return _line("memory_hops", sizes, query, _wants_grad(query, memory))


def _primitive_encode(tensors: Sequence[Any], options: Any) -> str | None:
    sizes = _sizes("_ B N J, _ V D", tensors[0], tensors[1])
    return _line("encode_memory", sizes, tensors[1], _wants_grad(tensors[1]))


def _primitive_varlen(tensors: Sequence[Any], options: Any) -> str | None:
    """L is twice the mean length: in the benchmark's cells, L is the length and the mean is L/2."""
    query, key, value, ends = tensors[:4]
    sizes = _sizes("T H D, _ Hkv D", query, key) | {"B": max(ends.numel() - 1, 1)}
    sizes["L"] = -(-2 * sizes.pop("T") // sizes["B"])
    mask = "causal" if options.window_right == 0 and options.window_left < 0 else "none"
    return _line("varlen", sizes, query, _wants_grad(query, key, value), mask=mask)


def _primitive_decode(tensors: Sequence[Any], options: Any) -> str | None:
    query, keys, values, _, table = tensors[:5]
    if table is not None:  # paged: the shapes do not include the length of the cache
        return None
    narrower = values.shape[-1] < keys.shape[-1]
    latent = narrower and values.data_ptr() == keys.data_ptr()  # the first columns of the keys
    option = "latent" if latent else "none"
    return _line("decode", _sizes(_HEADS, query, keys, values), query, False, option=option)


def _primitive_hopfield(tensors: Sequence[Any], options: Any) -> str | None:
    sizes = _sizes("B L D, _ N D", tensors[0], tensors[1])  # heads are in the batch
    sizes |= {"H": 1, "K": options.steps_max}
    return _line("hopfield", sizes, tensors[0], _wants_grad(*tensors[:2]))


def _primitive_sinusoidal(tensors: Sequence[Any], options: Any) -> str | None:
    return _line("sinusoidal", _sizes("B L E", tensors[0]), tensors[0], _wants_grad(tensors[0]))


_NOTES: dict[Any, Callable[..., str | None]] = {
    functional.scaled_dot_product_attention: _note_sdpa,
    functional.multi_head_attention_forward: _note_module,
}
_PRIMITIVES: dict[str, Callable[[Sequence[Any], Any], str | None]] = {
    "scaled_dot_product_attention": _primitive_sdpa,
    "additive_attention": _primitive_additive,
    "memory_hop_attention": _primitive_hops,
    "encode_memory": _primitive_encode,
    "sinusoidal_encoding": _primitive_sinusoidal,
    "varlen_attention": _primitive_varlen,
    "decode_attention": _primitive_decode,
    "hopfield_retrieve": _primitive_hopfield,
}


def main() -> None:
    path, *words = sys.argv[1:]
    sys.argv = words[1:] if words[0] == "-m" else words
    if words[0] != "-m":
        sys.path[0] = str(Path(words[0]).resolve().parent)
    with record(path):
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
