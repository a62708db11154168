"""The tiles of AMX with processes, signals and threads."""

from __future__ import annotations

import os
import textwrap

import pytest
from child_process import run_python
from tile_attention import EMULATED, REAL, on

PRELUDE = """
import faulthandler, os, signal, sys, threading, torch, fastattn
from child_process import in_fork
torch.set_num_threads(2)
tensors = [torch.randn(1, 4, 200, 64).bfloat16().requires_grad_() for _ in range(3)]
upstream = torch.ones(1, 4, 200, 64).bfloat16()

def compute():
    results = fastattn.scaled_dot_product_attention(*tensors, is_causal=True, return_lse=True)
    results += torch.autograd.grad(results[0], tensors, upstream)
    return [x.detach().view(torch.uint8).numpy().tobytes() for x in results]

with fastattn.use_backend("cpu"):
"""

PROGRAMS = {
    "a child of fork": """
        expected = compute()
        in_fork(lambda: compute() == expected)
        assert compute() == expected
        in_fork(lambda: in_fork(lambda: compute() == expected) is None)  # a grandchild
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
@pytest.mark.parametrize("isa", [on(EMULATED), on(REAL)])
def test_robust(isa: str, program: str) -> None:
    if "fork while" in program and "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("a lock of AddressSanitizer stays locked in the child")
    code = PRELUDE + textwrap.indent(textwrap.dedent(PROGRAMS[program]), "    ")
    done = run_python("-c", code, timeout=200, FASTATTN_CPU_ISA=isa)
    assert done.returncode == 0, done.stdout + done.stderr
