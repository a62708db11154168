"""Attention with processes, signals and threads, on vectors and on the tiles of AMX."""

from __future__ import annotations

import os
import textwrap

import pytest
from child_process import run_python
from tile_attention import EMULATED, REAL, on

# PyTorch's own parallel loops hang in a child forked after others: only ours may run there. So the
# gradients of the results are given, and results are compared as bytes.
PRELUDE = """
import faulthandler, os, signal, sys, threading, torch, fastattn
from child_process import in_fork
torch.set_num_threads(2)
dtype = getattr(torch, sys.argv[1])
tensors = [torch.randn(2, 8, 256, 64).to(dtype).requires_grad_() for _ in range(3)]
grads = torch.randn(2, 8, 256, 64).to(dtype), torch.randn(2, 256, 256).to(dtype)

def compute():
    results = fastattn.scaled_dot_product_attention(
        *tensors, is_causal=True, need_weights=True, average_weights=True)
    found = *results, *torch.autograd.grad(results, tensors, grads)
    plain = fastattn.scaled_dot_product_attention(*tensors, is_causal=True, return_lse=True)
    found += *plain, *torch.autograd.grad(plain[0], tensors, grads[0])
    return [x.detach().view(torch.uint8).numpy().tobytes() for x in found]

with fastattn.use_backend("cpu"):
"""

PROGRAMS = {
    "a child of fork": """
        expected = compute()
        in_fork(lambda: compute() == expected)
        assert compute() == expected
        in_fork(lambda: in_fork(lambda: compute() == expected) is None)  # a grandchild
    """,
    "a child of fork before any call": """
        in_fork(lambda: compute() == compute())
        compute()
    """,
    "a child of fork while other threads compute": """
        expected, stop = compute(), threading.Event()
        def busy():
            with fastattn.use_backend("cpu"):
                while not stop.is_set():
                    assert compute() == expected
        threads = [threading.Thread(target=busy) for _ in range(2)]
        for thread in threads: thread.start()
        try:
            for _ in range(3):
                in_fork(lambda: compute() == expected)
        finally:
            stop.set()
            for thread in threads: thread.join()
    """,
    "threads of Python, each with a team": """
        expected, failed = compute(), []
        def work():
            with fastattn.use_backend("cpu"):
                failed.extend(n for n in range(5) if compute() != expected)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not failed
    """,
    "signals, also on an alternate stack": """
        expected, count = compute(), [0]
        def handler(*_):
            count[0] += 1
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        faulthandler.register(signal.SIGUSR1, file=open(os.devnull, "w"))
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert compute() == expected
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert count[0] > 0
    """,
}


@pytest.mark.complete
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("isa", ["", on(EMULATED), on(REAL)])
def test_robust(isa: str, program: str) -> None:
    """A hang is a failure, not a hang of the tests."""
    if "fork while" in program and "libasan" in os.environ.get("LD_PRELOAD", ""):
        # https://github.com/llvm/llvm-project/pull/75290
        pytest.skip("a lock of AddressSanitizer that another thread holds stays locked")
    code = PRELUDE + textwrap.indent(textwrap.dedent(PROGRAMS[program]), "    ")
    dtype, environment = ("bfloat16", {"FASTATTN_CPU_ISA": isa}) if isa else ("float32", {})
    run_python("-c", code, dtype, timeout=200, **environment)


def test_a_forked_child_computes_after_a_parallel_parent() -> None:
    test_robust("", "a child of fork")
