"""Take the CUDA kernels out of wheels, into wheels of their own, which the CPU does not need.

    python .ci/split_wheel.py build/wheels/raw

Of each ``fastattn-*.whl`` with ``fastattn/_cuda.*.so`` that file goes to ``fastattn_cuda-*.whl``,
which installs it into the folder of fastattn and requires the same version of it.
"""

import email
import json
import re
import shutil
import sys
from pathlib import Path

from auditwheel.wheeltools import InWheel

sys.path.insert(0, str(Path(__file__).parents[1] / "csrc"))
sys.dont_write_bytecode = True  # a new file in csrc would mean that the build is stale

from plans.cuda import NOT_INSTALLED  # noqa: E402  (the lines above make it importable)

SUMMARY = "The CUDA kernels of fastattn"


def split(wheel: Path) -> None:
    with InWheel(wheel) as root:
        if not [*root.glob("fastattn/_cuda.*.so")]:
            return
    with InWheel(wheel, wheel.with_name(wheel.name.replace("fastattn-", "fastattn_cuda-"))) as root:
        keep_cuda_alone(root)
    with InWheel(wheel, wheel.with_suffix(".new")) as root:
        leave_cuda_out(root)
    wheel.with_suffix(".new").replace(wheel)


def leave_cuda_out(root: Path) -> None:
    (library,) = root.glob("fastattn/_cuda.*.so")
    library.unlink()
    file = root / "fastattn/_build.json"
    record = json.loads(file.read_text())
    record["modules"]["cuda"] |= {"built": False, "reason": NOT_INSTALLED}
    file.write_text(json.dumps(record, indent=2) + "\n")


def keep_cuda_alone(root: Path) -> None:
    (library,) = root.glob("fastattn/_cuda.*.so")
    (about,) = root.glob("fastattn-*.dist-info")
    record = json.loads((root / "fastattn/_build.json").read_text())
    kernels = library.read_bytes()
    shutil.rmtree(library.parent)
    library.parent.mkdir()
    library.write_bytes(kernels)
    for file in about.iterdir():
        if file.is_file() and file.name not in ("METADATA", "WHEEL", "RECORD"):
            file.unlink()

    version = about.name.removeprefix("fastattn-").removesuffix(".dist-info")
    metadata = email.message_from_string((about / "METADATA").read_text())
    for field in ("Requires-Dist", "Provides-Extra"):
        del metadata[field]
    metadata.replace_header("Name", "fastattn-cuda")
    metadata.replace_header("Summary", SUMMARY)
    metadata["Requires-Dist"] = f"fastattn=={version}"
    metadata.set_payload(f"{SUMMARY}. Install this package, and fastattn finds them.\n")
    (about / "METADATA").write_text(metadata.as_string())

    file = about / "sboms/fastattn.cdx.json"
    bill = json.loads(file.read_text())
    bill["metadata"]["component"] |= {
        "name": "fastattn-cuda",
        "purl": f"pkg:pypi/fastattn-cuda@{version}",
    }
    # Such as "Cuda compilation tools, release 13.0, V13.0.48".
    (toolkit,) = re.findall(r"V([\d.]+)", record["modules"]["cuda"]["compiler"])
    runtime = {"type": "library", "name": "cudart_static", "version": toolkit}
    runtime["licenses"] = [{"license": {"name": "NVIDIA CUDA Toolkit End User License Agreement"}}]
    bill["components"].append(runtime)
    file.write_text(json.dumps(bill, indent=2) + "\n")
    about.rename(root / f"fastattn_cuda-{version}.dist-info")


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("fastattn-*.whl")):
        split(path)
