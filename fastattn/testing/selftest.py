"""The cases of the first-use check of a GPU's kernels, see ``fastattn/selftest.py``.

Few and small: for each operator a plain call on the sizes of models, whose kernels differ from the
others', and one with all options, whose lengths and widths fit no tile. :func:`faults` judges them
by the error bound of all tests.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fastattn import dispatch
from fastattn.selftest import Inconclusive
from fastattn.testing.additive import AdditiveCase
from fastattn.testing.append import AppendCase
from fastattn.testing.cases import Case
from fastattn.testing.decode import DecodeCase
from fastattn.testing.encode_memory import EncodeCase
from fastattn.testing.hopfield import HopfieldCase
from fastattn.testing.memory_hops import HopCase
from fastattn.testing.merge_states import MergeCase
from fastattn.testing.proofs import PROOFS
from fastattn.testing.sinusoidal import SinusoidalCase
from fastattn.testing.targets import OnGpu, moved, on_device
from fastattn.testing.varlen import VarlenCase
from fastattn.testing.verdict import AnyCase, Proof, Results

__all__ = ["SELFTESTS", "cases_of", "faults"]

_ATTENTION = "scaled_dot_product_attention"
_TALL: dict[str, Any] = {"batch": 1, "q_len": 150, "k_len": 150}
_SHORT: dict[str, Any] = {"batch": 1, "heads": 1, "q_len": 70, "k_len": 70}
_PACKED: dict[str, Any] = {"q_lengths": (3, 70), "heads": 1}
SELFTESTS: dict[str, tuple[AnyCase, ...]] = {
    _ATTENTION: (
        Case("first-use-64", head_dim=64, heads=2, kv_heads=1, **_TALL),
        Case("first-use-128-causal", head_dim=128, heads=1, causal="upper_left", **_TALL),
        Case(
            "first-use-mask",
            heads=4,
            kv_heads=2,
            q_len=150,
            k_len=85,
            head_dim=8,
            mask="bool_rows",
            weights=2,
            grads=("out", "lse", "weights"),
        ),
        Case(
            "first-use-options",
            heads=4,
            kv_heads=2,
            q_len=70,
            k_len=85,
            head_dim=24,
            value_dim=40,
            mask="float_inf",
            mask_grad=True,
            window=(60, 20),
            causal="bottom_right",
            softcap=8.0,
            alibi="bh",
            sinks="h",
            relative_bias="h",
            program="many",
            dropout_p=0.25,
            layouts=("blhd", "transposed", "unaligned"),
            weights=1,
            grads=("out", "lse", "weights"),
        ),
    ),
    "varlen_attention": (
        VarlenCase("first-use-64", head_dim=64, window=(-1, 0), q_lengths=(5, 130, 0, 17)),
        VarlenCase(
            "first-use-options",
            q_lengths=(33, 0, 70, 1, 9),
            k_lengths=(65, 4, 0, 90, 9),
            after=(2, 3),
            heads=4,
            kv_heads=2,
            head_dim=24,
            value_dim=40,
            bottom_right=True,
            window=(40, 10),
            softcap=8.0,
            alibi="bh",
            sinks=True,
            relative_bias=True,
            program="documents",
            dropout_p=0.25,
        ),
    ),
    "decode_attention": (
        DecodeCase("first-use-128", lengths=(300, 0, 65), capacity=320, head_dim=128),
        DecodeCase(
            "first-use-long",
            lengths=(9000,),
            capacity=9000,
            kv_heads=1,
            head_dim=16,
            window=(6500, 0),
        ),
        DecodeCase("first-use-rows", lengths=(70, 9), heads=20, kv_heads=1, queries=4),
        DecodeCase(
            "first-use-options",
            lengths=(70, 4, 129),
            page=16,
            shuffled=True,
            heads=6,
            kv_heads=2,
            queries=3,
            head_dim=40,
            value_dim=24,
            window=(50, 0),
            softcap=8.0,
            alibi="bh",
            sinks=True,
            relative_bias=True,
            program="documents",
        ),
    ),
    "append_to_cache": (
        AppendCase("first-use-pages", page=4, rows=11),
        AppendCase("first-use-entries", shuffled=True, head_dim=37, value_dim=20),
    ),
    "merge_states": (
        MergeCase("first-use-64", shape=(2, 2, 9, 64), grad_layout="contiguous"),
        MergeCase("first-use", shape=(2, 3, 21, 41), empty=("a", "b", "both"), poison=True),
    ),
    "additive_attention": (
        AdditiveCase("first-use-64", width=64, value_dim=64),
        AdditiveCase(
            "first-use-options",
            mask="float",
            mask_dims="qk",
            causal=True,
            dropout_p=0.25,
            weights=True,
        ),
    ),
    "memory_hop_attention": (
        HopCase(rows=50, width=20, hops=3, out_memory=None),
        HopCase(batch=20, rows=20, width=16, in_memory="1N", hop_proj="", activation="relu"),
        HopCase(
            queries=3,
            rows=40,
            width=65,
            in_memory="BKN",
            out_memory="BKN",
            hop_proj="K",
            mask="BQN",
            bias="BQKN",
            activation="tanh",
            weights=True,
        ),
        HopCase(batch=2, rows=520, width=21, activation="sigmoid", weights=True),
        HopCase(rows=50, width=20, mask="BN", normalize="none", scale=0.05, weights=True),
        HopCase(batch=2, rows=520, width=24, mask="BN", normalize="none", scale=0.02),
    ),
    "hopfield_retrieve": (
        HopfieldCase(queries=9, rows=70, width=40, mask="BHLN", beta="heads", projection=True),
        HopfieldCase(queries=3, rows=41, width=37, bias="BHLN", steps=2),
        HopfieldCase(queries=2, rows=30, width=12, mask="BHLN", grad="one_step"),
        HopfieldCase(queries=2, rows=30, width=9, bias="N", grad="one_step"),
    ),
    "encode_memory": (
        EncodeCase(2, 5, 6, 17, 64, None, "position"),
        EncodeCase(2, 5, 7, 13, 20, None, "position"),
        EncodeCase(2, 3, 5, 8, 67, 2, "own"),
    ),
    "sinusoidal_encoding": (
        SinusoidalCase("first-use-64", offset=99_990),
        SinusoidalCase("first-use-halves", shape=(2, 3, 20, 48), layout="marian"),
        SinusoidalCase("first-use", shape=(2, 3, 20, 37), positions="bl", padding_idx=1, scale=8.0),
    ),
}
# The CUDA kernels of attention are compiled once for each of some widths, without options and with
# them, and those for Hopper have other tiles at each. A mask program and queries that are expanded
# take the kernels of other GPUs on Hopper, too. Triton compiles the width of the call.
# A block of the kernels for Hopper takes several tiles. These cases have more tiles than the 132
# multiprocessors of an H100, and odd numbers of steps, so that rings carry over.
_MANY: dict[str, Any] = {"batch": 4, "heads": 70, "q_len": 2, "head_dim": 8}
_PLAIN_WIDTHS = ((96, 96), (192, 128), (192, 192), (256, 256))
_OF_CUDA: dict[str, tuple[AnyCase, ...]] = {
    _ATTENTION: (
        Case("first-use-many-tiles", k_len=390, causal="bottom_right", **_MANY),
        Case("first-use-many-tiles-alibi", k_len=170, alibi="bh", **_MANY),
        *(
            Case(f"first-use-width-{d}-{dv}", head_dim=d, value_dim=dv, heads=1, **_TALL)
            for d, dv in _PLAIN_WIDTHS
        ),
        *(
            Case(
                f"first-use-width-{d}-biases",
                head_dim=d,
                heads=1,
                alibi="h",
                relative_bias="h",
                **_TALL,
            )
            for d in (128, 192, 256)
        ),
        *(
            Case(f"first-use-width-{d}-program", head_dim=d, program="causal", **_SHORT)
            for d in (128, 256)
        ),
        *(
            Case(
                f"first-use-width-{d}-expanded",
                head_dim=d,
                layouts=("expanded_rows", "contiguous", "contiguous"),
                **_SHORT,
            )
            for d in (64, 128, 256)
        ),
    ),
    "varlen_attention": (
        VarlenCase(
            "first-use-many-tiles",
            q_lengths=(2, 1, 3, 2, 0, 2, 1, 2, 2),
            k_lengths=(390, 97, 290, 3, 70, 200, 480, 0, 130),
            heads=28,
            bottom_right=True,
            window=(-1, 0),
        ),
        *(
            VarlenCase(f"first-use-width-{d}-{dv}", head_dim=d, value_dim=dv, **_PACKED)
            for d, dv in ((128, 128), *_PLAIN_WIDTHS)
        ),
        *(
            VarlenCase(
                f"first-use-width-{d}-biases",
                head_dim=d,
                alibi="h",
                relative_bias=True,
                **_PACKED,
            )
            for d in (64, 128, 192, 256)
        ),
        *(
            VarlenCase(f"first-use-width-{d}-program", head_dim=d, program="causal", **_PACKED)
            for d in (128, 256)
        ),
        *(
            VarlenCase(
                f"first-use-width-{d}-expanded",
                head_dim=d,
                layouts=("expanded_rows", "blhd", "blhd"),
                **_PACKED,
            )
            for d in (64, 128, 256)
        ),
    ),
    "decode_attention": (
        DecodeCase("first-use-width-256", lengths=(70, 3), capacity=70, head_dim=256),
    ),
}


def cases_of(backend: str, op: str) -> tuple[AnyCase, ...]:
    """The cases of an operator on a backend."""
    return SELFTESTS.get(op, ()) + (_OF_CUDA.get(op, ()) if backend == "cuda" else ())


@dataclass(frozen=True)
class _Here(OnGpu):
    """A backend of the GPU as the library has it. Nothing that other threads use is replaced."""

    @contextlib.contextmanager
    def active(self) -> Iterator[Any]:
        yield on_device(dispatch.load(self.backend), self.device)

    def results(self, proof: Proof, backend: Any, inputs: Any) -> Results:
        if not proof.public:
            return proof.run(backend, inputs)
        with dispatch.use_backend(self.backend):
            results: Results = moved(proof.run(None, moved(inputs, self.device)), "cpu")
        return results


def faults(backend: str, op: str, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Compare this backend's kernels of an operator with the reference; return all mismatches.

    A kernel that ends the CUDA context, as by an illegal address, is a mismatch. Raises
    ``Inconclusive`` for another exception if there is no mismatch before it: the cause may be a
    lack of memory, a missing compiler, or an earlier error of the program.
    """
    found: list[str] = []
    target = _Here(backend, device=str(device))
    if before := _error_of(device):
        raise Inconclusive(f"the GPU reports an error, from before the check: {before}", True)
    with warnings.catch_warnings(), torch.autograd.set_multithreading_enabled(False):
        warnings.simplefilter("ignore")
        for case in cases_of(backend, op):
            PROOFS[op].expected(case, dtype)  # kept; an error of the reference is not the kernel's
            try:
                of_case = PROOFS[op](case, dtype, target).faults
            except torch.OutOfMemoryError as error:
                raise Inconclusive(f"not enough memory: {error}") from error
            except Exception as error:
                what = f"{type(error).__name__}: {error}".split("\n")[0]
                if _error_of(device):
                    return [*found, f"{op}, case {case.name}, {what}"]
                if found:
                    return found
                raise Inconclusive(f"{op}, case {case.name}, {what}", lasts=True) from error
            found += [f"{op}, case {case.name}, {fault}" for fault in of_case]
    return found


def _error_of(device: torch.device) -> str:
    """What the GPU reports; once its context has ended, it does so until the process ends."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            return str(error).split("\n")[0]
    return ""
