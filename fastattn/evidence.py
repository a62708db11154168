"""Which choice is fastest on which processor: a table with one row per choice, and its source.

The first row that matches the processor, the operator and the dtype decides; the last ones match
all. The rows that ``fastattn tune`` measured on this machine come first; they are in the user's
cache folder.
"""

# ruff: noqa: E501  (one row per line)
from __future__ import annotations

import functools
import json
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastattn._processor import Processor as Processor
from fastattn._processor import processor as processor
from fastattn._version import __version__
from fastattn._warning import warn


class Gemm(NamedTuple):
    """Which GEMM computes the products of a linear layer, see ``fastattn/backends/cpu/linear.py``.

    Sizes are numbers of multiplications, M·N·K.
    """

    y: str  # the GEMM of large products, see GEMMS
    dx: str
    dw: str
    few: int = 0  # "ours" computes y for up to this many rows of x
    min_one_row_weight: int = 0  # the smallest weight, in elements, for "ours" with one row
    least: int = 0  # PyTorch computes y of smaller products
    least_grad: int = 0  # PyTorch computes dx and dw of smaller products
    ours_up_to: int = 0  # "ours" computes y of products up to this size
    small_up_to: int = 0  # the largest attention in one native call, see nn/_small.py
    layer_up_to: int = 0  # the largest rows·E·F of a layer in one call, see nn/_encoder_layer.py
    min_few_rows: int = 0  # the least number of rows for `few`, besides one row
    min_few_rows_weight: int = 0  # the smallest weight, in elements, for `few`
    min_tile_rows: int = 96  # the least rows of x for "tiles", in native layers and for dw
    min_tile_rows_alone: int = 96  # for y and dx of a single layer, which packs in each call


class Row(NamedTuple):
    """One choice."""

    choice: str  # "backends": their order; "isa": the CPU's instruction set; "gemm": a Gemm
    on: str  # words that must all match: device, vendor, family_N, feature, -FEATURE; or a key
    dtypes: str  # "" matches all
    use: Any
    source: str  # a result file, or a page of docs
    op: str = ""  # "" matches all
    least_queries: int = 0  # calls of fewer queries do not run on PyTorch's kernel
    version: str = ""  # of fastattn, in the user's rows

    @property
    def because(self) -> str:
        own = f"your `fastattn tune`, with version {self.version}: " if self.version else ""
        return own + self.source


GEMMS = ("torch", "onednn", "ours", "tiles")
ATTENTION = "scaled_dot_product_attention"
ANY = 2**62
_AMX = "benchmarks/results/intel-xeon-emerald-rapids-amx_bf16/figures.json"
_AVX2 = "benchmarks/results/amd-epyc-zen4-avx512_bf16/isas.json, with AVX2 forced"
_ZEN4 = "benchmarks/results/amd-epyc-zen4-avx512_bf16/figures.json"
_PAGE = "docs/performance.md"
_BORROWED = "not measured on this processor: what is fastest on an AMD EPYC"
_UNMEASURED = "not measured on this processor"
UNVERIFIED = "our kernels are unverified on this GPU; run `fastattn tune`"
_OURS = Gemm("ours", "ours", "ours", 32, 0, 2**14, 2**14, 0, ANY, ANY)
_FLOAT16 = _OURS._replace(min_one_row_weight=ANY)
_AMD_FLOAT32 = Gemm("onednn", "onednn", "torch", 32, 2**21, 2**18, 2**22, 2**25, 2**22, 2**29)
_AMD_BFLOAT16 = Gemm("onednn", "torch", "torch", 32, 0, 2**14, 0, 2**25, 2**25, 2**31)
# fmt: off
# choice, on, dtypes, use, source, op, least_queries
ROWS = (
    Row("backends", "cpu amx_bf16", "bfloat16", ["cpu"], _AMX),
    Row("backends", "cpu amx_fp16", "float16", ["torch", "cpu"], "not measured: PyTorch multiplies float16 on tiles", ATTENTION, 16),
    Row("backends", "cpu amx_bf16", "float16", ["cpu"], _AMX),
    Row("backends", "cpu Intel", "float32", ["cpu"], f"with AMX {_AMX}; on vectors {_PAGE}: ours 1.1 to 1.4 times PyTorch"),
    Row("backends", "cpu AMD -avx512f", "", ["cpu"], _AVX2),
    Row("backends", "cpu AMD", "", ["cpu"], _ZEN4),
    Row("backends", "cpu", "", ["cpu"], _UNMEASURED),
    Row("backends", "cuda", "", ["torch"], UNVERIFIED),
    Row("backends", "", "", [], "not measured: fastattn has no kernels for this device"),

    Row("isa", "cpu amx_bf16", "bfloat16 float32", "amx_bf16", f"{_AMX}; small calls run on vectors"),
    Row("isa", "cpu amx_bf16 -amx_fp16", "float16", "amx_bf16", f"{_PAGE}: linear layers run on tiles, attention on vectors"),
    Row("isa", "cpu Intel avx512_bf16", "bfloat16", "avx512", f"{_PAGE}: avx512 139 GFLOP/s, avx512_bf16 95"),
    Row("isa", "cpu AMD avx512_bf16", "", "avx512_bf16", _ZEN4),
    Row("isa", "cpu amx_bf16", "", "avx512_bf16", f"float16: {_AMX}; float64 is not measured"),
    Row("isa", "", "", "the strongest", _UNMEASURED),

    Row("gemm", "cpu amx_bf16", "bfloat16", Gemm("onednn", "onednn", "torch", 4, 0, 2**14, small_up_to=2**20, layer_up_to=2**20), f"{_PAGE}: oneDNN 970 GFLOP/s, ours 98; for one to four rows ours 1.0 to 1.9 times PyTorch"),
    Row("gemm", "cpu amx_bf16", "float32", Gemm("tiles", "tiles", "tiles", 95, ANY, 2**22, 2**26, small_up_to=2**22, layer_up_to=ANY, min_few_rows=4, min_few_rows_weight=2**19, min_tile_rows_alone=2**10), f"{_PAGE}: tiles 1.4 to 1.8 times MKL from 1024 rows on, and as fast where a core executes them slowly; ours 1.1 to 2.5 times MKL for 4 to 64 rows"),
    Row("gemm", "cpu Intel -avx512_bf16", "float32", Gemm("torch", "torch", "torch", 32, ANY, 2**24, small_up_to=2**22, layer_up_to=2**26, min_few_rows=8, min_few_rows_weight=2**21), f"{_PAGE}: MKL as fast as oneDNN; ours 1.0 to 1.9 times MKL for 8 to 32 rows"),
    Row("gemm", "cpu Intel", "float32", Gemm("torch", "torch", "torch", small_up_to=2**22, layer_up_to=2**26), f"{_PAGE}: MKL 161 GFLOP/s, oneDNN 158"),
    Row("gemm", "cpu AMD -avx512_bf16", "bfloat16", _OURS, f"{_PAGE}: ours 147 GFLOP/s, PyTorch 18"),
    Row("gemm", "cpu Intel -avx512_bf16", "bfloat16", _OURS, f"{_PAGE}, on an AMD EPYC: ours 147 GFLOP/s, PyTorch 18"),
    Row("gemm", "cpu AMD -avx512f", "float32", Gemm("torch", "torch", "torch", 128, ANY, 2**18, small_up_to=2**22, layer_up_to=ANY, min_few_rows=2, min_few_rows_weight=2**15), f"{_PAGE}: MKL 138 GFLOP/s, oneDNN 121; ours 1.0 to 3.9 times MKL for 2 to 128 rows; whole layers 1.1 to 1.3 times PyTorch"),
    Row("gemm", "cpu AMD avx512f family_25", "float32", _AMD_FLOAT32._replace(y="ours", few=128, layer_up_to=ANY), f"{_PAGE}: Zen 4, ours as fast as oneDNN, 1.0 to 1.3 times MKL; whole layers 1.1 to 1.4 times PyTorch"),
    Row("gemm", "cpu AMD", "float32", _AMD_FLOAT32, f"{_PAGE}: oneDNN 101 GFLOP/s, MKL 75"),
    Row("gemm", "cpu AMD", "bfloat16", _AMD_BFLOAT16, f"{_PAGE}: oneDNN and PyTorch 157 to 188 GFLOP/s"),
    Row("gemm", "cpu amx_fp16", "float16", Gemm("torch", "torch", "torch", small_up_to=2**22), "not measured: PyTorch multiplies float16 on tiles"),
    Row("gemm", "cpu amx_bf16", "float16", _FLOAT16._replace(y="tiles", dx="tiles", dw="tiles", few=95, ours_up_to=2**22), f"{_PAGE}: tiles 2.0 to 3.1 times oneDNN from 96 rows on; ours 1.1 to 1.5 times for 2 to 64"),
    Row("gemm", "cpu AMD", "float16", _FLOAT16, f"{_PAGE}: ours 94 GFLOP/s, PyTorch 17"),
    Row("gemm", "", "float32", _AMD_FLOAT32, _BORROWED),
    Row("gemm", "", "bfloat16", _AMD_BFLOAT16, _BORROWED),
    Row("gemm", "", "float16", _FLOAT16, _BORROWED),
    Row("gemm", "", "float64", Gemm("torch", "torch", "torch", small_up_to=2**20), "not measured: PyTorch, and ours for small layers"),
    Row("gemm", "", "", Gemm("torch", "torch", "torch"), _UNMEASURED),
)
# fmt: on


# -- choosing --------------------------------------------------------------------------------------


@functools.cache
def choose(
    choice: str,
    device: str,
    op: str = "",
    dtype: torch.dtype | None = None,
    *,
    index: int = 0,
    own: bool = True,
) -> Row:
    """Return the first row that matches.

    ``index`` says which GPU; ``own=False`` ignores the user's rows.
    """
    on = processor(device, index)
    if choice == "gemm":
        on = on.as_limited()
    kind = str(dtype).removeprefix("torch.")
    return next(
        row
        for row in (*(_own() if own else ()), *ROWS)
        if row.choice == choice
        and on.is_like(row.on)
        and row.op in ("", op)
        and (not row.dtypes or kind in row.dtypes.split())
        # Changed kernels of a GPU are as unverified as new ones.
        and not (on.device == "cuda" and row.version not in ("", __version__))
    )


def isa(supported: Sequence[str]) -> str:
    """The instruction set of each dtype, in the syntax of ``_cpu.set_isa``.

    ``supported``: the instruction sets of both build and processor, the strongest last. Tiles are
    used only where a row chooses them, since they serve only some dtypes.
    """
    strongest = [name for name in supported if not name.startswith("amx_")][-1]
    chosen = {}
    for name in ("float32", "float64", "bfloat16", "float16"):
        measured = choose("isa", "cpu", dtype=getattr(torch, name)).use
        chosen[name] = measured if measured in supported else strongest
    most = chosen.pop("float32")
    return ",".join([most, *(f"{name}={isa}" for name, isa in chosen.items() if isa != most)])


# -- the user's rows -------------------------------------------------------------------------------

_FORMAT = 3
_IS_VALID: dict[str, Callable[[Any], bool]] = {  # whether `use` of a choice in JSON is valid
    "backends": lambda use: type(use) is list and {*use} <= {"torch", "cpu", "cuda", "triton"},
    "isa": lambda use: isinstance(use, str),
    "gemm": lambda use: {*use[:3]} <= {*GEMMS} and all(isinstance(x, int) for x in use[3:]),
}


def own_file() -> Path:
    """The file of the user's rows. ``FASTATTN_CACHE_DIR`` names another folder."""
    if folder := os.environ.get("FASTATTN_CACHE_DIR"):
        return Path(folder, "evidence.json")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "fastattn", "evidence.json")


def set_own(rows: Sequence[Row]) -> Path:
    """Put rows, with this version, before the user's other rows; return their file."""
    path, replaced = own_file(), {(*row[:3], row.op) for row in rows}
    kept = [row for row in _own() if (*row[:3], row.op) not in replaced]
    new = [row._replace(version=__version__) for row in rows]
    text = json.dumps({"format": _FORMAT, "rows": [row._asdict() for row in [*new, *kept]]})
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # containers may share the folder
    try:
        temporary.write_text(text.replace("}, {", "},\n {"))
        temporary.replace(path)  # in one step, so that no other process reads a part of it
    finally:
        temporary.unlink(missing_ok=True)
    forget()
    return path


@functools.cache
def _own() -> tuple[Row, ...]:
    path = None
    try:
        path = own_file()
        if not path.exists():
            return ()
        table = json.loads(path.read_text())
        if table["format"] != _FORMAT:
            raise ValueError(f"its format is {table['format']!r}, not {_FORMAT}")
        return tuple(_checked(Row(**row)) for row in table["rows"])
    except (OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
        reset = "`fastattn tune` replaces them, `fastattn tune --reset` removes them"
        warn(f"your measurements ({path}) are not used: {error!r}; {reset}", UserWarning)
        return ()


def _checked(row: Row) -> Row:
    """Check a row that was read from JSON; ``ValueError`` if it is not valid."""
    texts = row.choice, row.on, row.dtypes, row.source, row.op, row.version
    typed = all(isinstance(x, str) for x in texts) and isinstance(row.least_queries, int)
    if not (typed and row.version and _IS_VALID[row.choice](row.use)):
        raise ValueError(f"{row} is not valid")
    return row._replace(use=Gemm(*row.use)) if row.choice == "gemm" else row


# -- caches ----------------------------------------------------------------------------------------

_caches: list[Callable[[], Any]] = [processor.cache_clear, choose.cache_clear, _own.cache_clear]
on_change = _caches.append  # registers a function that is called when cached choices become invalid


def forget() -> None:
    """Clear all caches, so the user's file is read and every choice is made again."""
    for clear in _caches:
        clear()
