"""examples/long_context.py and sharded_memory.py in a small form, on one rank and on several."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_group
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--length", "60", "--width", "8", "--layers", "1", "--steps", "3"]


def run_small() -> dict[str, Any]:
    """Both examples, on the ranks of this group."""
    import long_context
    import sharded_memory

    links = ["--rows", "500", "--width", "64", "--queries", "7", "--hops", "5"]
    return {"losses": long_context.main(SMALL), "memory": sharded_memory.main(links)}


@pytest.mark.slow
def test_results_are_equal_on_one_and_three_ranks(tmp_path: Path) -> None:
    job = "test_sharded_examples:run_small"
    (one,), *others = (x for x in rank_group.run(tmp_path, [(job, 1), (job, 3)]))
    for found in [one, *others[0]]:
        torch.testing.assert_close(found["losses"], one["losses"], rtol=1e-5, atol=1e-5)
        assert found["memory"]["followed"] == 1.0
        assert found["memory"]["recalled"] == 1.0
    assert one["losses"][2] < one["losses"][0]


def command(ranks: int, *arguments: str) -> list[str]:
    """The example as a user starts it."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    return [
        sys.executable,
        *(torchrun if ranks > 1 else []),
        str(EXAMPLES / "long_context.py"),
        *arguments,
    ]


ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(EXAMPLES.parent),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def started(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example on several ranks."""
    return subprocess.run(
        command(ranks, *arguments),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def losses(output: str) -> list[float]:
    """The losses that an example printed."""
    return [float(x) for x in re.findall(r"loss (\S+)", output)]


@pytest.mark.slow
def test_a_sequence_that_one_rank_cannot_hold(tmp_path: Path) -> None:
    sizes = ["--length", "8192", "--width", "32"]
    limit = ["--limit", "48"]
    whole = started(1, *sizes, "--steps", "3")
    alone = started(1, *sizes, "--steps", "3", *limit)
    assert alone.returncode != 0
    assert "cannot hold its rows in 48 MiB: start more ranks" in alone.stderr
    kept = [*limit, "--checkpoint", str(tmp_path / "run.pt")]
    first = started(4, *sizes, "--steps", "2", *kept)
    second = started(4, *sizes, "--steps", "3", *kept)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    found = losses(first.stdout) + losses(second.stdout)
    assert "2 steps done" in second.stdout
    torch.testing.assert_close(found, losses(whole.stdout), rtol=1e-4, atol=1e-4)
    peaks = re.search("peak resident memory: (.*)", second.stdout)
    assert peaks is not None
    assert len(re.findall(r"\d+ MiB", peaks[1])) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_run_leaves_no_process(name: str) -> None:
    process = subprocess.Popen(
        [*command(3, *SMALL[:-1], "100000")],
        env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert any("step    2" in line for line in process.stdout)  # in the middle of its calls
        process.send_signal(getattr(signal, name))
        process.stdout.read()  # ends with the last rank
        assert process.wait(60) != 0
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
