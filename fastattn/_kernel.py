"""`fastattn kernel`: flash-attn's functions as a local kernel of the `kernels` package.

transformers loads an attention named "org/name" through `kernels`, and takes one with "flash" in
its name for flash attention: it unpads inputs for it and batches continuously without a mask.
`kernels` looks for a name in the variable LOCAL_KERNELS, as name=folder, before it asks the hub,
and reads from the folder (https://github.com/huggingface/kernels):

    build/torch-cpu/__init__.py      the functions; torch-cuda for PyTorch's builds with CUDA
    build/torch-cpu/metadata.json

The folder holds no copy of this package: it imports the functions of the installed package.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

NAME = "fastattn/flash-attn"
BACKENDS = ("cpu", "cuda")  # the installed PyTorch has one of them

MODULE = '''\
"""fastattn.flash_attn, written by `fastattn kernel`."""

from fastattn import flash_attn
from fastattn.flash_attn import *  # noqa: F403

__all__ = flash_attn.__all__
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the folder to write, created if missing")


def run(args: argparse.Namespace) -> int:
    folder = args.folder.absolute()
    write(folder)
    print(f"wrote {folder}. For transformers, after `pip install kernels`:")
    print(f"  export LOCAL_KERNELS={shlex.quote(f'{NAME}={folder}')}")
    print(f'  model.set_attn_implementation("{NAME}")')
    return 0


def write(folder: Path) -> None:
    """Write the kernel; it imports the functions of the installed package.

    Raises:
        ValueError: the path has a colon, which separates the entries of LOCAL_KERNELS.
    """
    if ":" in str(folder):
        raise ValueError(f"folder must have no ':', which LOCAL_KERNELS splits at, got {folder}")
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        variant.mkdir(parents=True, exist_ok=True)
        (variant / "__init__.py").write_text(MODULE, encoding="utf-8")
        metadata = {
            "id": f"fastattn_flash_attn_{backend}",
            "name": "flash-attn",
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2), encoding="utf-8")
