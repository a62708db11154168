"""Records the attention calls of a program, by overriding PyTorch's functions.

    with fastattn.bench.record("shapes.txt"):
        model(batch)

Results do not change. During a recording, `nn.MultiheadAttention` does not take its fused inference
path, and the library's operators go through the dispatcher.
"""

from __future__ import annotations

import contextlib
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
from fastattn.backends.primitives import (
    AdditiveOptions,
    AttentionOptions,
    HopfieldOptions,
    MemoryHopOptions,
    VarlenOptions,
)
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
        if (note := _PRIMITIVES.get(op)) is not None and (line := note(*tensors, options=options)):
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


# Each of these returns a call as a line of --shapes, or None if the benchmark has no such cell.


def _line(op: str, sizes: Mapping[str, int], x: Tensor, grad: bool, **options: str) -> str | None:
    if _DTYPE_NAMES.get(x.dtype) not in DTYPES or min(sizes.values()) < 1:
        return None
    words = [op, shape_text(sizes, ops.get(op).SIZES), f"dtype={_DTYPE_NAMES[x.dtype]}"]
    words.append(f"pass={'fwd+bwd' if grad else 'fwd'}")
    words += [f"{name}={value}" for name, value in options.items() if value != "none"]
    return " ".join(words)


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


def _attention_sizes(query: Tensor, key: Tensor, value: Tensor) -> dict[str, int]:
    """[..., H, L, D]; all dimensions before the heads are the batch."""
    heads, kv_heads = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key))
    batch = query.shape[:-3].numel()
    lengths = {"Lq": query.shape[-2], "Lk": key.shape[-2]}
    widths = {"D": query.shape[-1], "Dv": value.shape[-1]}
    return {"B": batch, "H": heads, "Hkv": kv_heads, **lengths, **widths}


def _note_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> str | None:
    sizes = _attention_sizes(query, key, value)
    mask = _mask_kind(attn_mask, is_causal)
    return _line("sdpa", sizes, query, _wants_grad(query, key, value), mask=mask)


def _note_module(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    *args: Any,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **options: Any,
) -> str | None:
    """`F.multi_head_attention_forward`: [L, B, E], and True in a mask is ignored."""
    length, batch = query.shape[0], query.shape[1] if query.dim() == 3 else 1
    grad = _wants_grad(query, key, value, *args)
    weights = ("average" if average_attn_weights else "per-head") if need_weights else "none"
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = ~attn_mask
    mask = "padding" if key_padding_mask is not None else _mask_kind(attn_mask, is_causal)
    if query.shape == key.shape == value.shape:
        sizes = {"B": batch, "L": length, "E": query.shape[-1], "H": num_heads}
        return _line("mha", sizes, query, grad, mask=mask, weights=weights)
    head_dim = query.shape[-1] // num_heads  # cross-attention: without the projections
    lengths = {"Lq": length, "Lk": key.shape[0]}
    sizes = {"B": batch, "H": num_heads, "Hkv": num_heads, **lengths, "D": head_dim, "Dv": head_dim}
    return _line("sdpa", sizes, query, grad, mask=mask, weights=weights)


def _primitive_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *rest: Any,
    options: AttentionOptions,
) -> str | None:
    causal = options.window_right == 0 and options.window_left < 0
    weights = ("none", "per-head", "average")[options.weights]
    sizes = _attention_sizes(query, key, value)
    kind = _mask_kind(mask, causal)
    return _line("sdpa", sizes, query, _wants_grad(query, key, value), mask=kind, weights=weights)


def _primitive_additive(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, options: AdditiveOptions
) -> str | None:
    lengths = {"Lq": query.shape[1], "Lk": key.shape[1]}
    sizes = {"B": query.shape[0], **lengths, "A": query.shape[2], "Dv": value.shape[2]}
    kind = _mask_kind(rest[2] if len(rest) > 2 else None, options.causal)
    return _line("additive", sizes, query, _wants_grad(query, key, value), mask=kind)


def _primitive_hops(
    query: Tensor, in_memory: Tensor, *rest: Any, options: MemoryHopOptions
) -> str | None:
    batch = query.shape[:-1].numel()
    stories = batch if in_memory.shape[0] > 1 or batch == 1 else 1
    sizes = {"B": batch, "S": stories, "N": in_memory.shape[-2], "D": query.shape[-1]}
    sizes["K"] = options.hops
    return _line("memory_hops", sizes, query, _wants_grad(query, in_memory))


def _primitive_encode(tokens: Tensor, weight: Tensor, *rest: Any, **_: Any) -> str | None:
    batch, sentences, words = tokens.shape[-3:]
    sizes = {"B": batch, "N": sentences, "J": words, "V": weight.shape[-2], "D": weight.shape[-1]}
    return _line("encode_memory", sizes, weight, _wants_grad(weight))


def _primitive_varlen(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *rest: Any, options: VarlenOptions
) -> str | None:
    """L is twice the mean length: in the benchmark's cells, L is the length and the mean is L/2."""
    batch = max(ends.numel() - 1, 1)
    sizes = {"B": batch, "H": query.shape[-2], "Hkv": key.shape[-2]}
    sizes |= {"L": -(-2 * query.shape[0] // batch), "D": query.shape[-1]}
    causal = options.window_right == 0 and options.window_left < 0
    mask = "causal" if causal else "none"
    return _line("varlen", sizes, query, _wants_grad(query, key, value), mask=mask)


def _primitive_decode(
    query: Tensor, keys: Tensor, values: Tensor, seqlens: Tensor, table: Any, *rest: Any, **_: Any
) -> str | None:
    if table is not None:  # paged: the shapes do not include the length of the cache
        return None
    narrower = values.shape[-1] < keys.shape[-1]
    latent = narrower and values.data_ptr() == keys.data_ptr()  # the first columns of the keys
    option = "latent" if latent else "none"
    return _line("decode", _attention_sizes(query, keys, values), query, False, option=option)


def _primitive_hopfield(
    state: Tensor, stored: Tensor, *rest: Any, options: HopfieldOptions
) -> str | None:
    sizes = {"B": state.shape[:-2].numel(), "H": 1, "L": state.shape[-2]}  # heads are in the batch
    sizes |= {"N": stored.shape[-2], "D": state.shape[-1], "K": options.steps_max}
    return _line("hopfield", sizes, state, _wants_grad(state, stored))


def _primitive_sinusoidal(x: Tensor, *rest: Any, **_: Any) -> str | None:
    length = x.shape[-2] if x.dim() > 1 else 1
    sizes = {"B": x.shape[:-2].numel(), "L": length, "E": x.shape[-1]}
    return _line("sinusoidal", sizes, x, _wants_grad(x))


_NOTES: dict[Any, Callable[..., str | None]] = {
    functional.scaled_dot_product_attention: _note_sdpa,
    functional.multi_head_attention_forward: _note_module,
}
_PRIMITIVES: dict[str, Callable[..., str | None]] = {
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
