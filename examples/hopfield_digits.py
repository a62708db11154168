"""Hide half of a digit, and retrieve it from a Hopfield network: recall against beta.

    pip install 'fastattn[digits]'
    python examples/hopfield_digits.py --picture digits.png
    python examples/hopfield_digits.py --made-up           # patterns drawn at random: no data

The patterns are scikit-learn's handwritten digits, 1797 pictures of 8 by 8, which come with that
package; their values are scaled to [-1, 1], and the mean picture is taken away. A query is a stored
picture whose lower half is 0, the mean. It takes steps until it converges
(`fastattn.hopfield_retrieve`, Ramsauer et al. 2021, https://arxiv.org/abs/2008.02217), and counts
as recalled if the stored picture nearest to the result is its own.

Each beta is a row of the table and of the results (--out); an interrupted run resumes after the
last row written.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastattn

BETAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
CURVE = 12  # steps of the energy curve
SHOWN = 8  # digits in the picture


def digits(made_up: bool, seed: int) -> Tensor:
    """The patterns [N, 64], their mean taken away."""
    if made_up:
        draw = torch.Generator().manual_seed(seed)
        patterns = torch.sign(torch.randn(300, 64, generator=draw))
    else:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise SystemExit(
                "the digits are scikit-learn's: pip install 'fastattn[digits]', or --made-up"
            ) from error
        patterns = torch.from_numpy(load_digits().data).float() / 8 - 1
    return patterns - patterns.mean(0)


def masked(patterns: Tensor) -> Tensor:
    """The lower half of each picture is unknown: 0."""
    half = patterns.clone()
    half[:, 32:] = 0
    return half


def measure(
    stored: Tensor, queries: Tensor, which: Tensor, beta: float, eps: float
) -> dict[str, Any]:
    """One row of the table: recall, distance to the pattern, steps and energies."""
    start = time.perf_counter()
    out, steps = fastattn.hopfield_retrieve(
        queries, stored, beta=beta, update_steps_eps=eps, need_steps=True
    )
    seconds = time.perf_counter() - start
    nearest = torch.cdist(out, stored).argmin(1)
    state, curve = queries, []
    for _ in range(CURVE + 1):
        curve.append(float(fastattn.hopfield_energy(state, stored, beta=beta).mean()))
        state = fastattn.hopfield_retrieve(state, stored, beta=beta, update_steps_max=0)
    return {
        "beta": beta,
        "recall": float((nearest == which).float().mean()),
        "error": float((out - stored[which]).square().mean().sqrt()),
        "steps": float(steps.float().mean()),
        "most": int(steps.max()),
        "seconds": seconds,
        "energy": curve,
    }


def draw(path: Path, rows: list[dict[str, Any]], stored: Tensor, which: Tensor, eps: float) -> None:
    """Recall, steps and energies; and some digits as they were, half hidden, and retrieved."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown_digits = stored[which[:SHOWN]]
    pictures = [("stored", shown_digits), ("half hidden", masked(shown_digits))]
    for row in rows:
        out = fastattn.hopfield_retrieve(
            masked(shown_digits), stored, beta=row["beta"], update_steps_eps=eps
        )
        pictures.append((f"β = {row['beta']:g}", out))
    figure = pyplot.figure(figsize=(11, 7), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.1])
    axes = left.subplots(len(pictures), SHOWN)
    for line, (name, images) in zip(axes, pictures, strict=True):
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
        for axis, image in zip(line, images, strict=True):
            axis.imshow(image.view(8, 8), cmap="gray_r", vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[])
    recall, steps, energy = right.subplots(3, 1)
    betas = [row["beta"] for row in rows]
    recall.semilogx(betas, [100 * row["recall"] for row in rows], "o-", base=2)
    recall.set(ylabel="recalled, %", ylim=(0, 102))
    steps.semilogx(betas, [row["steps"] for row in rows], "o-", base=2)
    steps.set(ylabel="steps to rest, mean", xlabel="β")
    for row in rows:
        energy.plot([e - row["energy"][-1] for e in row["energy"]], label=f"β = {row['beta']:g}")
    energy.set(ylabel="energy above the last", xlabel="step", yscale="symlog")
    energy.legend(fontsize="x-small", ncols=2)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure each beta, print the table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--betas", type=float, nargs="+", default=BETAS)
    parser.add_argument("--stored", type=int, default=0, help="how many patterns; 0: all")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--eps", type=float, default=1e-4, help="the length of a step at rest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--made-up", action="store_true", help="random patterns, not the digits")
    parser.add_argument("--out", type=Path, help="results as JSON; a run goes on from it")
    parser.add_argument("--picture", type=Path, help="draw the results there (needs matplotlib)")
    options = parser.parse_args(arguments)

    patterns = digits(options.made_up, options.seed)
    draws = torch.Generator().manual_seed(options.seed)
    order = torch.randperm(len(patterns), generator=draws)
    stored = patterns[order[: options.stored or len(order)]].contiguous()
    which = torch.randperm(len(stored), generator=draws)[: options.queries]
    recipe = {
        "stored": len(stored), "queries": len(which), "eps": options.eps,
        "seed": options.seed, "made_up": options.made_up,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    if options.out and options.out.exists():
        saved = json.loads(options.out.read_text())
        if saved["recipe"] != recipe:
            raise SystemExit(f"{options.out} is of another run: {saved['recipe']}")
        rows = saved["rows"]
    print(f"{len(stored)} patterns, {len(which)} queries, half of each hidden")
    print(f"{'beta':>6} {'recalled':>9} {'rms error':>10} {'steps':>7} {'most':>5} {'seconds':>8}")
    for n, beta in enumerate(options.betas, 1):
        done = [row for row in rows if row["beta"] == beta]
        row = done[0] if done else None
        if row is None:
            if sys.stderr.isatty():
                print(f"beta {beta:g}: {n} of {len(options.betas)}", end="\r", file=sys.stderr)
            row = measure(stored, masked(stored[which]), which, beta, options.eps)
            rows.append(row)
            if options.out:
                text = json.dumps({"recipe": recipe, "rows": rows}, indent=1)
                unfinished = options.out.with_suffix(".part")
                unfinished.write_text(text)
                unfinished.replace(options.out)
        print(
            f"{beta:6g} {row['recall']:9.1%} {row['error']:10.4f} {row['steps']:7.1f} "
            f"{row['most']:5} {row['seconds']:8.3f}",
            flush=True,
        )
    shown = sorted((row for row in rows if row["beta"] in options.betas), key=lambda r: r["beta"])
    if options.picture:
        draw(options.picture, shown, stored, which, options.eps)
    return shown


if __name__ == "__main__":
    main()
