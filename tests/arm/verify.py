"""`fastattn verify` with the native core in another process: verify.py FOLDER COMMAND... -- ARGS"""

from __future__ import annotations

import sys
from pathlib import Path

from remote_core import install


def main() -> int:
    """Run `fastattn verify` with the core of another machine."""
    end = sys.argv.index("--")
    folder, *command = sys.argv[1:end]
    core = install(command, Path(folder))
    print(core.build_info())

    from fastattn.cli import main as run  # after the core is in place

    return run(["verify", *sys.argv[end + 1 :]])


sys.exit(main())
