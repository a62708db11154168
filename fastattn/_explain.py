"""Which backend would run a call, and why not the others: `python -m fastattn explain`."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import fastattn
from fastattn.bench.shapes import parse_shapes

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--op",
        default="scaled_dot_product_attention",
        choices=("additive_attention", "scaled_dot_product_attention", "sinusoidal_encoding"),
        help="default: %(default)s",
    )
    parser.add_argument(
        "--shapes",
        default="B=1,H=8,L=512,D=64",
        help="as `bench run` takes them; default: %(default)s",
    )
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--causal", action="store_true", help="with is_causal=True")
    parser.add_argument("--weights", action="store_true", help="with need_weights=True")
    parser.add_argument("--grad", action="store_true", help="inputs that require a gradient")


def run(args: argparse.Namespace) -> int:
    if args.op == "sinusoidal_encoding" and (args.causal or args.weights):
        raise ValueError("--causal and --weights belong to attention")
    for shape in parse_shapes(args.shapes):
        print(", ".join(f"{key}={value}" for key, value in shape.items()), f"{args.dtype}:")
        inputs, options = _call(args, shape)
        print(fastattn.explain(args.op, *inputs, **options))
    return 0


def _call(
    args: argparse.Namespace, shape: dict[str, int]
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The arguments of the call; the tensors' values are never looked at."""

    def tensor(*sizes: int) -> torch.Tensor:
        return torch.empty(
            sizes, dtype=DTYPES[args.dtype], device=args.device, requires_grad=args.grad
        )

    batch, heads, head_dim = shape["B"], shape["H"], shape["D"]
    if args.op == "sinusoidal_encoding":
        return [tensor(batch, shape["Lq"], heads * head_dim)], {}
    if args.op == "additive_attention":
        width = heads * head_dim
        lengths = (shape["Lq"], shape["Lk"], shape["Lk"])
        inputs = [tensor(batch, length, width) for length in lengths]
        return [*inputs, tensor(width)], {"is_causal": args.causal, "need_weights": args.weights}
    query = tensor(batch, heads, shape["Lq"], head_dim)
    key = tensor(batch, shape["Hkv"], shape["Lk"], head_dim)
    value = tensor(batch, shape["Hkv"], shape["Lk"], shape["Dv"])
    options = {
        "is_causal": args.causal,
        "need_weights": args.weights,
        "enable_gqa": shape["Hkv"] != heads,
    }
    return [query, key, value], options
