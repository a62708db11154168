"""`fastattn verify` with the native core in another process: verify.py FOLDER COMMAND... -- ARGS"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from remote_core import install


def main() -> int:
    end = sys.argv.index("--")
    folder, *command = sys.argv[1:end]
    core = install(command, Path(folder))
    print(core.build_info())

    # After the core is in place.
    from fastattn.backends.cpu import sinusoidal
    from fastattn.cli import main as run

    of_encoding = sinusoidal._columns

    def noted_columns(*args: Any) -> Any:
        """The columns of the sinusoidal encoding, which are arrays: noted as tensors are."""
        table, addresses = of_encoding(*args)
        for array in (table.frequency, table.phase, table.pairs):
            if array:
                torch.frombuffer(array, dtype=torch.uint8).data_ptr()
        return table, addresses

    vars(sinusoidal)["_columns"] = noted_columns
    return run(["verify", *sys.argv[end + 1 :]])


sys.exit(main())
