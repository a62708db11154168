"""Attention after fork, in worker processes, in threads, and for any number of threads."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from child_process import in_fork, run_python
from torch import Tensor

import fastattn
from fastattn import use_backend
from fastattn.testing import Target
from fastattn.testing.memories import draw_sentences

attention = fastattn.scaled_dot_product_attention

# Large enough for the kernels to use more than one thread.
SIZE = (2, 8, 256, 64)


def qkv(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Random queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator).to(dtype) for _ in range(3)]


def results_and_gradients(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Every result of a call, and every gradient."""
    inputs = [x.clone().requires_grad_() for x in tensors]
    mask = torch.linspace(-1, 1, SIZE[2] * SIZE[2]).view(1, 1, SIZE[2], SIZE[2]).clone()
    mask.requires_grad_()
    results = attention(
        *inputs, mask, window=(100, 50), return_lse=True, need_weights=True, **options
    )
    seeds = [torch.linspace(-1, 1, x.numel()).view_as(x).to(x.dtype) for x in results]
    gradients = torch.autograd.grad(results, [*inputs, mask], seeds)
    return [x.detach() for x in (*results, *gradients)]


def assert_bitwise_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


# --- processes -------------------------------------------------------------------------------


@pytest.mark.complete
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.complete)])
def test_dataloader_workers(method: str, tmp_path: Any) -> None:
    program = tmp_path / "workers.py"
    program.write_text(
        textwrap.dedent("""
        import sys, torch, fastattn

        class Attended(torch.utils.data.Dataset):
            def __len__(self):
                return 6

            def __getitem__(self, n):
                x = torch.randn(4, 256, 32, generator=torch.Generator().manual_seed(n))
                return fastattn.scaled_dot_product_attention(x, x, x, is_causal=True)

        if __name__ == "__main__":
            torch.set_num_threads(2)
            data = Attended()
            expected = torch.stack([data[n] for n in range(6)])
            loader = torch.utils.data.DataLoader(
                data, batch_size=2, num_workers=2, multiprocessing_context=sys.argv[1])
            assert torch.equal(torch.cat(list(loader)), expected)
        """)
    )
    run_python(str(program), method, timeout=170)


LARGE = {  # for more than one thread
    "additive_attention": ((4, 70, 33), (4, 90, 33), (4, 90, 20), (33,), (33,)),
    "encode_memory": (),
    "memory_hop_attention": ((40, 20), (40, 50, 20)),
    "sinusoidal_encoding": ((8, 300, 512),),
}


@pytest.mark.parametrize("name", LARGE)
def test_other_operators_compute_after_a_fork(
    target: Target, name: str, generator: torch.Generator
) -> None:
    call = getattr(fastattn, name)
    tensors = [torch.randn(shape, generator=generator) for shape in LARGE[name]]
    if name == "encode_memory":
        tensors += draw_sentences((64, 20, 9, 60, 50, 4), torch.float32, generator)[:2]
    want = call(*tensors)  # starts the threads

    def child() -> bool:
        got = call(*tensors)
        torch.set_num_threads(1)  # PyTorch's own operators would wait for those threads
        return torch.equal(got, want)

    in_fork(child)


def test_concurrent_threads_compute_the_results_of_one(backend: str) -> None:
    inputs = [qkv(seed=n) for n in range(4)]
    expected = [results_and_gradients(x) for x in inputs]
    actual: list[Any] = [None] * len(inputs)

    def work(n: int) -> None:
        with use_backend(backend):  # a choice belongs to its thread
            for _ in range(3):
                actual[n] = results_and_gradients(inputs[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    for a, b in zip(actual, expected, strict=True):
        assert_bitwise_equal(a, b)


def test_backward_in_another_thread_than_forward(backend: str) -> None:
    inputs = [x.requires_grad_() for x in qkv()]
    out = attention(*inputs)
    grad = torch.linspace(-1, 1, out.numel()).view_as(out)
    expected = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(out, inputs, grad)))
    thread.start()
    thread.join(timeout=120)
    assert_bitwise_equal(found, list(expected))


# --- modes of PyTorch ------------------------------------------------------------------------


def test_a_tensor_changed_before_backward_is_an_error(backend: str) -> None:
    query = torch.randn(1, 2, 3, 4, requires_grad=True)
    key = query * 2
    out = attention(query, key, key)
    key.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("backend", ["cpu", None])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 2, 2, 4), (1, 6, 8, 1)), ((1, 2, 2, 4), (6, 1, 1, 1)), ((2, 3, 2, 4), (1, 4, 12, 1))],
)
def test_queries_whose_rows_overlap(
    shape: tuple[int, ...], strides: tuple[int, ...], backend: str | None
) -> None:
    """Sliding windows over memory: several dimensions have the stride of the last one."""
    memory = torch.randn(64, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(*shape[:2], 5, 4, dtype=torch.float64) for _ in range(2))
    grad_out = torch.randn(shape, dtype=torch.float64)

    def results(backend: str | None) -> tuple[Tensor, ...]:
        leaves = [memory, key.requires_grad_(), value.requires_grad_()]
        with use_backend(backend) if backend else nullcontext():
            out = attention(memory.as_strided(shape, strides), key, value)
            return out.detach(), *torch.autograd.grad(out, leaves, grad_out)

    torch.testing.assert_close(results(backend), results("reference"), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_beyond_32_bits(dim: int) -> None:
    """Two slices 2**32 bytes and more apart; of the memory between them no page is ever touched."""
    shape, far = (2, 2, 2, 8), 2**31 + 3
    strides = [32, 16, 8, 1]
    strides[dim] = far
    try:
        memory = torch.empty(far + 64, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no address space for it: {error}")
    query = memory.as_strided(shape, strides)
    query.copy_(torch.randn(shape))
    near = query.contiguous()
    with use_backend("cpu"):
        assert torch.equal(attention(query, query, query), attention(near, near, near))
        distant, close = (x.detach().requires_grad_() for x in (query, near))
        (a,) = torch.autograd.grad(attention(distant, near, near).sum(), distant)
        (b,) = torch.autograd.grad(attention(close, near, near).sum(), close)
        assert torch.equal(a, b)


def freed(x: Tensor) -> Tensor:
    """A view at an offset, as FSDP leaves parameters between layers."""
    flat = torch.cat([x.new_zeros(8), x.flatten()])
    view = flat[8:].view(x.shape)
    flat.untyped_storage().resize_(0)
    return view


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
@pytest.mark.parametrize("options", [{}, {"window": (3, 3)}], ids=["plain", "window"])
def test_a_tensor_without_memory_is_named(name: str, options: dict[str, Any]) -> None:
    tensors = {n: torch.ones(1, 2, 8, 8) for n in ("query", "key", "value", "attn_mask")}
    tensors[name] = freed(tensors[name])
    with pytest.raises(RuntimeError, match=f"{name} has no memory"):
        fastattn.scaled_dot_product_attention(**tensors, **options)


@pytest.mark.parametrize("window", [None, (3, 3)])
def test_a_tensor_freed_after_the_forward_is_named(window: tuple[int, int] | None) -> None:
    q, k, v = (torch.ones(1, 2, 8, 8, requires_grad=n == 0) for n in range(3))
    out = fastattn.scaled_dot_product_attention(q, k, v, window=window)
    k.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="key has no memory"):
        out.sum().backward()


def test_operators_refuse_a_tensor_without_memory() -> None:
    rows, lengths = torch.ones(8, 2, 4), torch.tensor([0, 8])
    cache = torch.ones(1, 2, 8, 4)
    for call in (
        lambda: fastattn.varlen_attention(freed(rows), rows, rows, lengths, lengths),
        lambda: fastattn.varlen_attention(rows, rows, rows, lengths, freed(lengths)),
        lambda: fastattn.decode_attention(cache[:, :, :1], freed(cache), cache, 8),
        lambda: fastattn.hopfield_retrieve(rows, freed(rows)),
        lambda: fastattn.sinusoidal_encoding(freed(rows)),
        lambda: fastattn.memory_hop_attention(freed(rows[:, 0]), rows),
    ):
        # A view of it is refused by PyTorch.
        with pytest.raises(RuntimeError, match=r"has no memory|out of bounds for storage"):
            call()


ROWS = torch.randn(2, 4, 7, 8, generator=torch.Generator().manual_seed(0))
STARTS = torch.tensor([0, 3, 7])
SAVING: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: attention(x, ROWS, ROWS),
    "mask": lambda x: attention(x, ROWS, ROWS, mask=fastattn.masks.causal()),
    "sinks": lambda x: attention(x, ROWS, ROWS, sinks=torch.ones(4)),
    "window": lambda x: attention(x, ROWS, ROWS, window=(2, 2)),
    "packed": lambda x: fastattn.varlen_attention(*3 * [x[0].transpose(0, 1)], STARTS, STARTS),
    "hopfield": lambda x: fastattn.hopfield_retrieve(x, ROWS, update_steps_max=2),
}


@pytest.mark.parametrize("name", SAVING)
def test_hooks_may_save_all_tensors_in_float32(name: str) -> None:
    x = ROWS.clone().requires_grad_()
    (expected,) = torch.autograd.grad(SAVING[name](x).sin().sum(), x)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.float() if x.is_floating_point() else x, lambda x: x
    ):
        loss = SAVING[name](x).sin().sum()
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], expected)
