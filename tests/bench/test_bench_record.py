"""Recording a program: its attention calls become shapes that the benchmark runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench_results import bench, parse
from child_process import run_python
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import fastattn
from fastattn.bench import cli, record, selection
from fastattn.bench.cells import Cell


def cells(path: Path) -> list[Cell]:
    return selection.cells_of(parse("run", "--shapes", f"@{path}"))


def recorded(path: Path) -> dict[str, str]:
    """The names of the cells, and how often each was called."""
    return {cell.name: cell.label for cell in cells(path)}


@pytest.mark.parametrize("module", [nn.MultiheadAttention, fastattn.MultiheadAttention])
def test_a_module_is_recorded(module: type[nn.MultiheadAttention], tmp_path: Path) -> None:
    path = tmp_path / "shapes.txt"
    layer = module(16, 2, batch_first=True)
    x, padding = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    want = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    with record(path):
        got = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        with torch.no_grad():
            layer.eval()(x, x, x)
    torch.testing.assert_close(got, want)
    names = list(recorded(path))
    if module is nn.MultiheadAttention:
        assert names == [
            "mha B=3,L=5,E=16,H=2 fp32 fwd+bwd padding",
            "mha B=3,L=5,E=16,H=2 fp32 fwd average weights",
        ]
    else:  # a composite of the library is recorded as the attention inside it
        assert names == [
            "sdpa B=3,H=2,L=5,D=8 fp32 fwd+bwd padding",
            "sdpa B=3,H=2,L=5,D=8 fp32 fwd average weights",
        ]


def test_calls_are_counted_by_mask_dtype_and_gradient(tmp_path: Path) -> None:
    path = tmp_path / "shapes.txt"
    q, kv = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 9, 8)
    square = torch.ones(6, 6, dtype=torch.bool)
    with record(path) as recording:
        for _ in range(3):
            scaled_dot_product_attention(q, kv, kv, enable_gqa=True)
        scaled_dot_product_attention(q, q, q, attn_mask=square.tril())
        scaled_dot_product_attention(q, q, q, is_causal=True)
        scaled_dot_product_attention(q, q, q, torch.randn(6, 6))
        half = q.bfloat16().requires_grad_()
        fastattn.scaled_dot_product_attention(half, half, half, square.tril(1)).sum().backward()
        scaled_dot_product_attention(q.double(), q.double(), q.double())  # has no cell: left out
    assert sum(recording.lines.values()) == 7
    assert recorded(path) == {
        "sdpa B=2,H=4,Hkv=2,Lq=6,Lk=9,D=8 fp32 fwd": "3 calls",
        "sdpa B=2,H=4,L=6,D=8 fp32 fwd causal": "2 calls",
        "sdpa B=2,H=4,L=6,D=8 fp32 fwd bias": "1 calls",
        "sdpa B=2,H=4,L=6,D=8 bf16 fwd+bwd bool": "1 calls",
    }


def test_the_other_operators_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "shapes.txt"
    network = fastattn.nn.MemN2N(9, 6, hops=2, memory_size=5)
    packed, ends = torch.randn(12, 4, 8), torch.tensor([0, 3, 7, 12])
    query, cache = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8)
    x, patterns = torch.randn(2, 3, 8), torch.randn(2, 3, 5, 8)
    with record(path):
        network(torch.randint(1, 9, (2, 5, 4)), torch.randint(1, 9, (2, 4))).sum().backward()
        fastattn.sinusoidal_encoding(x)
        fastattn.additive_attention(x, x, x, torch.ones(8), is_causal=True)
        fastattn.varlen_attention(packed, packed[:, :2], packed[:, :2], ends, ends, is_causal=True)
        for values in (cache, cache[..., :6], torch.randn(2, 2, 9, 6)):
            fastattn.decode_attention(query, cache, values)
        fastattn.hopfield_retrieve(patterns, patterns, update_steps_max=2)
    assert list(recorded(path)) == [
        "encode_memory B=2,N=5,J=4,V=9,D=6 fp32 fwd+bwd",
        "encode_memory B=2,N=1,J=4,V=9,D=6 fp32 fwd+bwd",
        "memory_hops B=2,N=5,D=6,K=2 fp32 fwd+bwd",
        "sinusoidal B=2,L=3,E=8 fp32 fwd",
        "additive B=2,L=3,A=8 fp32 fwd causal",
        "varlen B=3,H=4,Hkv=2,L=8,D=8 fp32 fwd causal",
        "decode B=2,H=4,Hkv=2,Lq=1,Lk=9,D=8 fp32 fwd",
        "decode B=2,H=4,Hkv=2,Lq=1,Lk=9,D=8,Dv=6 fp32 fwd latent",
        "decode B=2,H=4,Hkv=2,Lq=1,Lk=9,D=8,Dv=6 fp32 fwd",
        "hopfield B=6,H=1,L=5,N=5,D=8,K=2 fp32 fwd",
        "sdpa B=2,H=3,L=5,D=8 fp32 fwd",  # the final read after the steps
    ]


@pytest.mark.complete
def test_a_program_is_recorded_and_its_exit_code_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "helper.py").write_text("LENGTH = 7\n")
    program = tmp_path / "train.py"
    program.write_text(
        "import sys, torch, helper\n"
        "x = torch.randn(1, 2, helper.LENGTH, 4)\n"
        "torch.nn.functional.scaled_dot_product_attention(x, x, x)\n"
        "print(sys.argv[1:])\n"
        "sys.exit(3)\n"
    )
    path = tmp_path / "shapes.txt"
    command = ("-m", "fastattn", "bench", "record", "--out", str(path), "--", "python")
    done = run_python(*command, str(program), "--epochs", "2", timeout=120, status=3)
    assert done.stderr == ""
    assert "['--epochs', '2']" in done.stdout
    assert list(recorded(path)) == ["sdpa B=1,H=2,L=7,D=4 fp32 fwd"]


@pytest.mark.parametrize("words", [[], ["--"], ["--", "torchrun", "x"], ["--", "python", "-m"]])
def test_only_python_programs_are_recorded(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("record", *words) == cli.USAGE
    assert "is no Python program" in capsys.readouterr().err
