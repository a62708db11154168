"""Make the pictures of docs/seeing.md again: python docs/make_pictures.py

Trains the examples on what they make up, for some minutes, and draws into docs/images. The picture
of the page needs Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import babi
import translation

IMAGES = Path(__file__).parent / "images"


def main() -> None:
    """Draw all pictures of the documents."""
    hops = "--recipe single --restarts 3 --epochs 40 --linear-epochs 10 --timed-steps 0"
    babi.main([*hops.split(), "--questions", "1000", "--picture", str(IMAGES / "hops.png")])
    alignment = str(IMAGES / "alignment.png")
    translation.main(["--model", "bahdanau", "--epochs", "4", "--picture", alignment])
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        translation.main(["--model", "transformer", "--epochs", "4", "--page", str(page)])
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        if browser is None:
            print("No picture of the page: there is no Chromium")
            return
        options = "--headless=new --no-sandbox --disable-gpu --virtual-time-budget=2000"
        shot = [f"--screenshot={IMAGES / 'page.png'}", "--window-size=720,640"]
        profile = f"--user-data-dir={folder}/profile"
        command = [browser, *options.split(), profile, *shot, page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    main()
