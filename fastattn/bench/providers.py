"""The implementations that are compared. Each is imported in its own process.

A provider is a module, or an object, with

    ABOUT                                one line for `bench list`
    VARIANTS                             the suffixes that may follow an @ in its name; optional
    select(variant)                      called first, once, if the name has an @
    THREADS_OF_TORCH = False             if its threads are not PyTorch's
    versions() -> dict[str, str]         versions of its packages; ImportError if not installed
    why_not(cell) -> list[str]           reasons why it cannot run the cell; empty if it can
    prepare(cell, inputs) -> callable    everything that is not timed: layouts, modules, sessions

The callable is timed. It returns the arrays of `cells.output_names(cell)` in that order, as torch
tensors or numpy arrays.

Any importable module is a provider. If it has no `prepare`, its functions and modules are called
that have the names and arguments of this library's.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn import dispatch, evidence
from fastattn.bench import ops
from fastattn.bench.cells import TORCH_DTYPES, Cell
from fastattn.bench.ops._base import messages
from fastattn.bench.ops.transformer import Twin
from fastattn.dispatch import BACKENDS, PRIORITY
from fastattn.evidence import ATTENTION

Outputs = tuple[Tensor, ...]
# The contexts in which a provider runs, which are entered outside the timing. The stack keeps a
# reference; an unreferenced context manager would exit immediately.
entered = contextlib.ExitStack()


def run_passes(cell: Cell, forward: ops.Forward, x: ops.Inputs) -> Callable[[], Outputs]:
    """A callable that runs the cell's passes; the first output is differentiated.

    Gradients are returned, not accumulated: `torch.autograd.grad` allocates new ones in every
    call, like the first backward after `zero_grad`.
    """
    if cell.passes == "fwd":

        def run_forward() -> Outputs:
            with torch.no_grad():
                out = forward()
            return out if type(out) is tuple else (out,)

        return run_forward

    leaves, grad_out = [x[name] for name in ops.get(cell.op).leaf_names(cell)], x.grad_out
    for leaf in leaves:
        leaf.requires_grad_()
    if cell.passes == "bwd":
        kept = ops.as_tuple(forward())[0]
        return lambda: torch.autograd.grad(kept, leaves, grad_out, retain_graph=True)

    def run_both() -> Outputs:
        outputs = ops.as_tuple(forward())
        gradients = torch.autograd.grad(outputs[0], leaves, grad_out)
        return (*(output.detach() for output in outputs), *gradients)

    return run_both


DEFAULT = ("torch", "fastattn")
_NAMES = ("query", "key", "value", "attn_mask")  # the inputs of sdpa
ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16")  # selected when the process starts


class Provider:
    """A provider, and its packages, which are imported to name their versions."""

    ABOUT: str
    PACKAGES: Sequence[str] = ("torch",)
    VARIANTS: Sequence[str] = ()
    THREADS_OF_TORCH = True

    def versions(self) -> dict[str, str]:
        modules = ((name, importlib.import_module(name)) for name in self.PACKAGES)
        return {name: str(getattr(of, "__version__", "of no version")) for name, of in modules}


class Stock(Provider):
    """PyTorch's functions and modules, as a call of the operator."""

    variant = ""  # what follows the @ in its name

    def why_not(self, cell: Cell) -> list[str]:
        return ops.get(cell.op).why_not_stock(cell)

    def prepare(self, cell: Cell, inputs: ops.Inputs) -> Callable[[], Outputs]:
        return run_passes(cell, self.forward(cell, inputs), inputs)

    def forward(self, cell: Cell, inputs: ops.Inputs) -> ops.Forward:
        """The forward pass that is timed."""
        return ops.get(cell.op).stock(cell, inputs)


class Torch(Stock):
    """The best that PyTorch has: its fused attention, its module, or the plain equation."""

    ABOUT = "PyTorch: F.scaled_dot_product_attention, nn.MultiheadAttention, else the equation"
    VARIANTS = ("math", "flash", "efficient", "cudnn")  # kernels of its attention

    def select(self, variant: str) -> None:
        self.variant, suffix = variant, "" if variant == "math" else "_ATTENTION"
        entered.close()
        entered.enter_context(sdpa_kernel(getattr(SDPBackend, variant.upper() + suffix)))

    def why_not(self, cell: Cell) -> list[str]:
        if self.variant and cell.op not in ("sdpa", "mha"):
            return ["it does not call scaled_dot_product_attention"]
        if self.variant in ("efficient", "cudnn") and cell.device == "cpu":
            return [f"PyTorch has its {self.variant} kernel on GPUs only"]
        return super().why_not(cell)


class Eager(Stock):
    ABOUT = "PyTorch, the plain equation: softmax(Q Kᵀ) V with the scores in memory"

    def why_not(self, cell: Cell) -> list[str]:
        return []

    def forward(self, cell: Cell, inputs: ops.Inputs) -> ops.Forward:
        return ops.get(cell.op).eager(cell, inputs)


class Compiled(Stock):
    ABOUT = "PyTorch: what the provider torch runs, under torch.compile; models with frozen weights"

    def forward(self, cell: Cell, inputs: ops.Inputs) -> ops.Forward:
        torch.compiler.reset()  # earlier cells would count against the limit of recompilations
        if cell.op in ops.MODELS:
            op: Any = ops.get(cell.op)
            model, arguments = op.with_arguments(cell, inputs)
            options: Any = {"freezing": cell.passes == "fwd"}
            compiled = torch.compile(model, dynamic=False, options=options)
            return op.bind(cell, compiled, arguments)
        return torch.compile(super().forward(cell, inputs), dynamic=False)


_PLAIN = {
    "weights != 'none'": "it returns no weights",
    "option != 'none'": "no {option} is supported here",
}
_FORWARD_IN_FP32 = _PLAIN | {
    "device != 'cpu'": "it runs on cpu",
    "dtype != 'fp32'": "it takes fp32",
    "passes != 'fwd'": "it has no backward",
}


class Flex(Stock):
    """FlexAttention; each cell gets its own graph, compiled for its exact sizes."""

    ABOUT = "PyTorch: FlexAttention, torch.compile (on CPUs only the forward)"

    def why_not(self, cell: Cell) -> list[str]:
        if cell.op not in ("sdpa", "flex"):
            return ["only sdpa and flex are supported here"]
        refused = {"device == 'cpu' and passes != 'fwd'": "it has no backward"}
        return messages(refused | (_PLAIN if cell.op == "sdpa" else {}), cell)

    def forward(self, cell: Cell, inputs: ops.Inputs) -> ops.Forward:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask, options = inputs.get("attn_mask", torch.empty(0)), dict[str, Any]()
        q_ids, k_ids = map(cell.documents, cell.lengths)
        visible: dict[str, Callable[..., Tensor]] = {
            "bool": lambda b, h, i, j: mask[i, j],
            "causal": lambda b, h, i, j: i >= j,
            "padding": lambda b, h, i, j: mask[b, 0, 0, j],
            "documents": lambda b, h, i, j: q_ids[i] == k_ids[j],
        }
        if cell.op == "flex":
            op: Any = ops.get("flex")
            options["score_mod"] = op.score_mod(cell, inputs)
        if cell.mask == "bias":
            options["score_mod"] = lambda score, b, h, i, j: score + mask[h, i, j]
        elif cell.mask != "none":
            batch = cell["B"] if cell.mask == "padding" else None
            sizes = batch, None, cell["Lq"], cell["Lk"]
            seen = create_block_mask(visible[cell.mask], *sizes, device=inputs.query.device)
            options["block_mask"] = seen
        options["enable_gqa"] = cell["H"] != cell["Hkv"]
        leaves = [inputs[name] for name in _NAMES[:3]]
        torch.compiler.reset()
        attend: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return lambda: attend(*leaves, **options)


class Fastattn(Stock):
    """This library with one backend forced, so that no call falls back silently.

    No backend is forced where evidence prefers PyTorch's own kernel, and for modules and models, as
    for users: forced, their linear layers would run on our kernel for vectors.
    """

    ABOUT = "fastattn: its native kernels; @reference: plain PyTorch, as without a native build"
    PACKAGES = ("fastattn", "torch")
    SM_80 = "sm_80"  # the CUDA kernels without those for Hopper
    VARIANTS = (*BACKENDS, SM_80, *ISAS)

    def select(self, variant: str) -> None:
        """Selects a backend; an instruction set is selected when the process starts."""
        self.variant = "cuda" if variant == self.SM_80 else variant if variant in BACKENDS else ""
        if variant == self.SM_80 and not isinstance(dispatch.load("cuda"), str):
            importlib.import_module("fastattn._cuda").allow_hopper(False)

    def why_not(self, cell: Cell) -> list[str]:
        backend = dispatch.load(name := self._backend(cell))
        return [f"the backend {name} is {backend}"] if isinstance(backend, str) else []

    def forward(self, cell: Cell, inputs: ops.Inputs) -> ops.Forward:
        row = evidence.choose("backends", cell.device, ATTENTION, TORCH_DTYPES[cell.dtype])
        is_module = "." in ops.get(cell.op).FUNCTION
        entered.close()
        if self.variant or not (is_module or "torch" in row.use[:1]):
            entered.enter_context(fastattn.use_backend(self._backend(cell)))
        return ops.get(cell.op).ours(cell, inputs)

    def _backend(self, cell: Cell) -> str:
        """The first backend of the device; a missing one is reported, not replaced."""
        return self.variant or PRIORITY[cell.device][0]


class Functions(Stock):
    """A module with functions and modules of the names and arguments of this library."""

    def __init__(self, module: Any) -> None:
        self.module, self.PACKAGES = module, [module.__name__.partition(".")[0]]
        self.ABOUT = (module.__doc__ or module.__name__).strip().splitlines()[0]

    def why_not(self, cell: Cell) -> list[str]:
        op = ops.get(cell.op)
        name = op.FUNCTION.removeprefix("nn.")
        if op.FUNCTION.startswith("nn.") and not isinstance(op, Twin):
            return [f"{op.FUNCTION} has no counterpart whose parameters could be set"]
        return [] if hasattr(self.module, name) else [f"{self.module.__name__} has no {name}"]

    def forward(self, cell: Cell, inputs: ops.Inputs) -> ops.Forward:
        return ops.get(cell.op).ours(cell, inputs, self.module)


class Runtime(Provider):
    """Another runtime, which gets sdpa as its own operator, and whole models in ONNX's format."""

    THREADS_OF_TORCH = False
    REFUSED: Mapping[str, str]  # cells of sdpa
    # (cell, inputs) -> a model of one operator; it may change the inputs to what the operator takes
    attention: Any
    call_of: Any  # (a model, or the file of one; inputs) -> a call that returns its outputs

    def why_not(self, cell: Cell) -> list[str]:
        if cell.op not in ("sdpa", *ops.MODELS):
            return ["only sdpa and whole models are supported here"]
        refused = messages(_FORWARD_IN_FP32, cell)
        return refused + (messages(self.REFUSED, cell) if cell.op == "sdpa" else [])

    def prepare(self, cell: Cell, inputs: ops.Inputs) -> Callable[[], list[Any]]:
        if cell.op == "sdpa":
            arguments = {name: inputs[name] for name in _NAMES if name in inputs}
            return self.call_of(self.attention(cell, arguments), arguments)
        op: Any = ops.get(cell.op)
        model, arguments = op.with_arguments(cell, inputs)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "model.onnx"))
            options: dict[str, Any] = {"input_names": list(arguments), "external_data": True}
            call = _Call(cell, model).eval()
            torch.onnx.export(call, (), path, kwargs=dict(arguments), verbose=False, **options)
            return self.call_of(path, arguments)


class _Call(nn.Module):
    """A whole model as a function of only its arguments, for an export."""

    def __init__(self, cell: Cell, model: nn.Module) -> None:
        super().__init__()
        self.cell, self.model = cell, model

    def forward(self, **arguments: Tensor) -> Tensor:
        op: Any = ops.get(self.cell.op)
        return op.bind(self.cell, self.model, ops.Inputs(arguments))()


class OnnxRuntime(Runtime):
    ABOUT = "onnxruntime: Attention of opset 23 (forward, fp32)"
    PACKAGES = ("onnxruntime", "onnx")
    REFUSED: Mapping[str, str] = {
        "mask == 'causal' and Lq != Lk": "it aligns the diagonal differently when Lq is not Lk"
    }

    def attention(self, cell: Cell, inputs: dict[str, Tensor]) -> bytes:
        """In ONNX's text format."""
        from onnx.parser import parse_model

        if (mask := inputs.get("attn_mask")) is not None:  # onnxruntime needs all of its rows
            shape = (*mask.shape[:-2], cell["Lq"], cell["Lk"])
            inputs["attn_mask"] = mask.expand(shape).contiguous()
        kinds = {torch.float32: "float", torch.bool: "bool"}
        typed = ", ".join(f"{kinds[x.dtype]}{list(x.shape)} {name}" for name, x in inputs.items())
        node = f"Attention <is_causal={int(cell.mask == 'causal')}> ({', '.join(inputs)})"
        head = '<ir_version: 11, opset_import: ["": 23]>'
        model = parse_model(f"{head} attention ({typed}) => (float[] out) {{ out = {node} }}")
        return model.SerializeToString()

    def call_of(self, model: Any, inputs: dict[str, Tensor]) -> Callable[[], list[Any]]:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        feed = {name: x.numpy() for name, x in inputs.items()}
        return lambda: list(session.run(None, feed))


class OpenVino(Runtime):
    ABOUT = "OpenVINO: scaled_dot_product_attention of opset 13 (forward, fp32)"
    PACKAGES = ("openvino",)
    REFUSED: Mapping[str, str] = {"H != Hkv": "it has no grouped heads"}

    def attention(self, cell: Cell, inputs: dict[str, Tensor]) -> Any:
        import openvino
        from openvino import opset13

        kinds = {torch.float32: openvino.Type.f32, torch.bool: openvino.Type.boolean}
        nodes = [opset13.parameter([*x.shape], kinds[x.dtype], name=n) for n, x in inputs.items()]
        node = opset13.scaled_dot_product_attention(*nodes, causal=cell.mask == "causal")
        return openvino.Model([node], nodes)

    def call_of(self, model: Any, inputs: dict[str, Tensor]) -> Callable[[], list[Any]]:
        import openvino

        options = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            # By default it computes fp32 models in bf16 if the processor supports bf16.
            "INFERENCE_PRECISION_HINT": "f32",
        }
        request = openvino.Core().compile_model(model, "CPU", options).create_infer_request()
        arrays = [x.numpy() for x in inputs.values()]
        return lambda: [request.infer(arrays, share_inputs=True, share_outputs=True)[0]]


PROVIDERS: dict[str, Any] = {
    "fastattn": Fastattn,
    "torch": Torch,
    "torch-eager": Eager,
    "torch-flex": Flex,
    "torch-compiled": Compiled,
    "onnxruntime": OnnxRuntime,
    "openvino": OpenVino,
}


def isa_of(name: str) -> str:
    """The instruction set that `name` forces, or an empty string."""
    provider, _, variant = name.partition("@")
    return variant if provider == "fastattn" and variant in ISAS else ""


def load(name: str) -> Any:
    """The provider. Raises ImportError if it is unknown or cannot be imported."""
    check_name(name)
    name, _, variant = name.partition("@")
    if name in PROVIDERS:
        provider = PROVIDERS[name]()
    else:
        provider = importlib.import_module(name)
        provider = provider if hasattr(provider, "prepare") else Functions(provider)
    if variant:
        provider.select(variant)
    return provider


def check_name(name: str) -> None:
    """Raises ValueError for an unknown provider or variant."""
    provider, _, variant = name.partition("@")
    if provider not in PROVIDERS and "." not in provider and find_spec(provider) is None:
        raise ValueError(
            f"--providers {name!r}: known are {', '.join(PROVIDERS)}, or an importable module"
        )
    allowed = PROVIDERS[provider].VARIANTS if provider in PROVIDERS else (variant,)
    if "@" in name and variant not in allowed:
        known = ", ".join(f"{provider}@{v}" for v in allowed) or "none"
        raise ValueError(f"--providers {name!r}: variants of {provider} are {known}")
