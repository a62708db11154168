"""Runs functions on groups of ranks: processes of one thread, forked from one that has imported.

    run(tmp_path, [("module:function", 3)])

gives the results of ``function()`` on each of three ranks, None for a rank that was killed.
Ranks meet in a file and talk through the loopback device, or each is in a network namespace and
talks through its device ``eth0``. No process outlives the call.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Job = tuple[str, int]  # "module:function", the number of ranks
_NAMESPACES = "RANK_GROUP_NAMESPACES"


def run(
    folder: Path, jobs: Sequence[Job], seconds: float = 30.0, namespaces: Sequence[str] = ()
) -> list[list[Any]]:
    """Run each job, one after the other; return the results by job and rank.

    A message may take so many ``seconds``, and a job four times as many. ``namespaces`` are the
    network namespaces of the ranks.
    """
    names = [f"{function}:{size}" for function, size in jobs]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0" if namespaces else "lo",
        _NAMESPACES: " ".join(namespaces),
    }
    launcher = subprocess.Popen(
        [sys.executable, __file__, str(folder), str(seconds), *names],
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = launcher.communicate(timeout=60 + 5 * seconds * len(jobs))
    finally:
        leftover = _kill_group(launcher.pid)
        launcher.wait()
    assert launcher.returncode == 0, output
    assert not leftover, "a process outlived the launcher"
    return [
        [_result(folder / f"{n}-{rank}.pt") for rank in range(size)]
        for n, (_, size) in enumerate(jobs)
    ]


def _put(path: Path, what: Any) -> None:
    """Write a file that appears complete or not at all."""
    torch.save(what, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def _kill_group(leader: int) -> bool:
    """Kill all processes of a session; return whether there were any besides its leader."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _result(path: Path) -> Any:
    """What a rank has written, None if nothing yet."""
    return torch.load(path, weights_only=False) if path.exists() else None


def _launch(folder: Path, seconds: float, names: Sequence[str]) -> int:
    """Fork the ranks of each job and wait for them."""
    failed = False
    for name in names:
        importlib.import_module(name.split(":")[0])
    for n, name in enumerate(names):
        module, function, size = name.split(":")
        work = getattr(importlib.import_module(module), function)
        children = set()
        for rank in range(int(size)):
            child = os.fork()
            if child == 0:
                os._exit(_rank(folder, n, rank, int(size), seconds, work))
            children.add(child)
        failed |= _wait(children, 4 * seconds)
    return int(failed)


def _rank(folder: Path, job: int, rank: int, size: int, seconds: float, work: Any) -> int:
    """The process of one rank: joins the group and runs the work."""
    try:
        if namespaces := os.environ[_NAMESPACES].split():
            _enter(namespaces[rank])
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store-{job}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )
        _put(folder / f"{job}-{rank}.pt", work())
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _enter(namespace: str) -> None:
    """Go into a network namespace, as ``ip netns exec`` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def _wait(children: set[int], limit: float) -> bool:
    """Wait for all; kill the ones still running after the limit. Return whether one failed."""
    end = time.monotonic() + limit
    failed = False
    while children and time.monotonic() < end:
        for child in list(children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                children.discard(child)
                failed |= os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0
        time.sleep(0.01)
    failed |= bool(children)
    for child in children:
        print(f"process {child} was still running and is killed", flush=True)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return failed


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(_launch(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
