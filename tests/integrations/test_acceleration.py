"""``accelerate`` and ``restore`` on modules of PyTorch's and of one's own. Models of libraries:
tests/models/test_other_libraries.py."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as renamed

import fastattn
from fastattn.integrations import acceleration
from fastattn.integrations import torch as integration
from fastattn.integrations.acceleration import Part, Report, accelerate, restore

WIDTH = 16


@pytest.fixture(autouse=True)
def nothing_stays_active() -> Iterator[None]:
    """Check after each test that no integration is left active."""
    yield
    if integration._active:
        gc.collect()
    assert not integration._active


def as_heads(x: Tensor) -> Tensor:
    """Split the last dimension into two heads."""
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def function_of_the_file(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(as_heads(self.projection(x))).transpose(1, 2).flatten(2)

    def attend(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Calls(Base):
    def attend(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class CallsByAnotherName(Base):
    def attend(self, x: Tensor) -> Tensor:
        return renamed(x, x, x)


class CallsAFunction(Base):
    def attend(self, x: Tensor) -> Tensor:
        return function_of_the_file(x)


class KeepsTheFunction(Base):
    def __init__(self) -> None:
        super().__init__()
        self.run = functools.partial(F.scaled_dot_product_attention, is_causal=True)

    def attend(self, x: Tensor) -> Tensor:
        return self.run(x, x, x)


class Processor:
    def __call__(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class HasAProcessor(Base):
    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()

    def attend(self, x: Tensor) -> Tensor:
        return self.processor(x)


def calling(function: Any) -> Any:
    """A function of one tensor that calls another one with it three times."""

    def call(x: Tensor) -> Tensor:
        return function(x, x, x)

    return call


class KeepsAClosure(Base):
    def __init__(self) -> None:
        super().__init__()
        self.run = calling(F.scaled_dot_product_attention)

    def attend(self, x: Tensor) -> Tensor:
        return self.run(x)


class Switched(Base):
    fused_attn = True

    def attend(self, x: Tensor) -> Tensor:
        if self.fused_attn:
            return F.scaled_dot_product_attention(x, x, x)
        return (x @ x.mT / x.shape[-1] ** 0.5).softmax(-1) @ x


class InSteps(Base):
    def attend(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class InStepsWithModules(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Softmax(-1)

    def attend(self, x: Tensor) -> Tensor:
        return torch.matmul(self.weights(torch.matmul(x, x.mT)), x)


class LinearAttention(Base):
    def attend(self, x: Tensor) -> Tensor:
        return x.relu() * x.mean(-2, keepdim=True)


class Block(nn.Module):
    """What contains attention and also has a product and a softmax is no attention."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attn = attention
        self.gate = nn.Parameter(torch.ones(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        gate = (x @ self.gate).softmax(-1)
        return x + self.attn(x) * gate[..., :1]


class SelfAttends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x)[0]


SERVED = [Calls, CallsByAnotherName, CallsAFunction, KeepsTheFunction, KeepsAClosure]
SERVED += [HasAProcessor, Switched]
STEPS = [InSteps, InStepsWithModules]


def inputs() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


def backends(model: nn.Module, *args: Any) -> set[str]:
    """The backends that a call of the model really takes."""
    with fastattn.trace() as calls, torch.no_grad():
        model(*(args or (inputs(),)))
    return {call.backend for call in calls}


# --- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*SERVED, SelfAttends], ids=lambda kind: kind.__name__)
def test_served(kind: type[nn.Module]) -> None:
    model = nn.Sequential(Block(kind()), Block(kind())).eval()
    want = model(inputs())
    before = backends(model)
    report = accelerate(model)
    (part,) = report.parts
    assert report.served == (part,)
    assert set(part.modules) <= {f"{n}.attn{more}" for n in (0, 1) for more in ("", ".attn")}
    assert len(part.modules) == 2
    assert backends(model) == {part.backend}
    torch.testing.assert_close(model(inputs()), want)
    restore(model)
    assert backends(model) == before
    assert "" in before or kind is SelfAttends  # with weights it is a product and a softmax


@pytest.mark.parametrize("kind", [*STEPS, LinearAttention], ids=lambda kind: kind.__name__)
def test_half_of_a_model_is_not_served(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"known": Calls(), "unknown": kind()})
    report = accelerate(model)
    assert [part.modules for part in report.served] == [("known",)]
    (part,) = report.unserved
    assert (part.modules, part.kind, part.backend) == (("unknown",), kind.__name__, "")
    assert part.calls == ("nothing known" if kind is LinearAttention else "a product and a softmax")
    assert part.reason
    restore(model)


def test_a_module_that_is_switched_off() -> None:
    model = Switched()
    model.fused_attn = False
    (part,) = accelerate(model).unserved
    assert part.reason == "its fused_attn is False, so it computes attention step by step"
    assert not integration._active


def test_nothing_is_activated_without_need() -> None:
    for kind in (*STEPS, LinearAttention, SelfAttends):
        accelerate(kind())
        assert not integration._active


def test_a_subclass_with_a_forward_of_its_own() -> None:
    class Extends(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Replaces(nn.MultiheadAttention):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
            return value, None

    report = accelerate(nn.ModuleList([Extends(8, 2), Replaces(8, 2)]))
    assert [part.modules for part in report.served] == [("0",)]
    (part,) = report.unserved
    assert part.modules == ("1",)
    assert "does not call" in part.reason


def on_heads(*tensors: Tensor) -> Tensor:
    """Attention of two heads."""
    return F.scaled_dot_product_attention(*map(as_heads, tensors)).transpose(1, 2).flatten(2)


class AttendsByItself(nn.MultiheadAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        return on_heads(query, key, value), None


class AttendsByEither(nn.MultiheadAttention):
    """By a call of its own without weights, by that of nn.MultiheadAttention with them."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        if kwargs["need_weights"]:
            return super().forward(query, key, value, **kwargs)
        return on_heads(query, key, value), None


@pytest.mark.parametrize("kind", [AttendsByItself, AttendsByEither])
def test_a_subclass_that_calls_the_function_of_pytorch(kind: type[nn.MultiheadAttention]) -> None:
    model = kind(WIDTH, 2, batch_first=True)
    before = type(model)
    (part,) = accelerate(model).served
    calls = "scaled_dot_product_attention" if kind is AttendsByItself else "nn.MultiheadAttention"
    assert (part.kind, part.calls) == (kind.__name__, calls)
    for need_weights in (False, True):
        with fastattn.trace() as seen:
            model(*[inputs()] * 3, need_weights=need_weights)
        assert [call.backend for call in seen] == [part.backend]
    restore(model)
    assert type(model) is before
    assert not integration._active


def test_scripted_code() -> None:
    model = torch.jit.script(ScriptedAttention())
    heads = as_heads(inputs())
    assert backends(model, heads) == {""}
    (part,) = accelerate(model).served
    assert part.calls == "scaled_dot_product_attention"
    assert backends(model, heads) == {part.backend}
    restore(model)


class ScriptedAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_dtypes_and_devices_without_a_kernel_have_a_reason() -> None:
    (part,) = accelerate(nn.MultiheadAttention(8, 2).to(torch.float8_e5m2)).unserved
    assert "float8_e5m2" in part.reason
    (part,) = accelerate(Calls().to("meta")).unserved
    assert part.reason == "activate serves the CPU only, the module is on meta"


def test_a_part_runs_on_the_backend_of_its_dtype_or_the_forced_one() -> None:
    model = SelfAttends()
    with fastattn.use_backend("reference"):
        (part,) = accelerate(model).parts
    assert part.backend == "reference"
    assert (
        accelerate(model).parts[0].backend
        == fastattn.explain("scaled_dot_product_attention", *torch.ones(3, 1, 1, 16, 8)).runs
    )


def test_the_report_has_the_share_of_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceleration, "_gemm_of_weight", lambda weight: ("cpu", "why"))
    linear, others = nn.Linear(4, 6), (nn.Conv1d(2, 3, 4), nn.LazyConv1d(3, 4))
    model = nn.Sequential(nn.Embedding(9, 4), linear, *others)
    (part,) = accelerate(model).linear
    assert part.reason == "why; 50% of the weights, embeddings apart"


def test_a_model_without_attention() -> None:
    report = accelerate(nn.Sequential(nn.ReLU(), nn.Softmax(-1)))
    assert report.parts == report.linear == ()
    assert "no attention and no linear layer was found" in str(report)


def test_the_table() -> None:
    report = Report(
        (
            Part(("layers.0.attn", "layers.1.attn"), "Attn", "this", "cpu", ""),
            Part(("",), "<Odd>", "that", "", "a reason"),
        )
    )
    assert str(report).splitlines() == [
        "count  modules        class  calls  backend       reason",
        "2      layers.*.attn  Attn   this   cpu",
        "1      (model)        <Odd>  that   not fastattn  a reason",
    ]
    assert "<td>layers.*.attn</td>" in report._repr_html_()
    assert "<td>&lt;Odd&gt;</td>" in report._repr_html_()


@pytest.mark.parametrize("function", [accelerate, restore])
def test_not_a_module(function: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got function"):
        function(as_heads)


# --- undo -----------------------------------------------------------------------------------------


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Calls(), SelfAttends())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    @property
    def accelerated(self) -> bool:
        return type(self.layers[1].attn) is not nn.MultiheadAttention


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_different_changes_are_undone_in_any_order(order: tuple[int, ...]) -> None:
    model, other = Both(), Both()
    want = step(model)
    first = integration.activate()
    fastattn.replace_mha(other.layers[1])
    for each in (model, other):
        accelerate(each)
    last = integration.activate()
    undo = (
        lambda: restore(model),
        lambda: (restore(other), fastattn.restore_mha(other)),
        first.undo,
        last.undo,
    )
    for n, which in enumerate(order, start=1):
        for _ in range(2):
            undo[which]()
        done = order[:n]
        assert [model.accelerated, other.accelerated] == [0 not in done, 1 not in done]
        assert bool(integration._active) == (n < len(order))
        torch.testing.assert_close(step(model), want)


def test_accelerating_twice_has_no_further_effect() -> None:
    model = Both()
    first = accelerate(model)
    assert accelerate(model) == first
    restore(model)
    assert not model.accelerated
    assert not integration._active
    restore(model)


def test_a_model_that_has_grown() -> None:
    model = nn.Sequential(SelfAttends())
    accelerate(model)
    model.append(Calls())
    accelerate(model)
    assert backends(model) == {"cpu"}
    restore(model)
    assert not integration._active


def test_a_deleted_model_leaves_nothing_active() -> None:
    model = Both()
    accelerate(model)
    assert integration._active
    del model
    gc.collect()
    assert not integration._active


def test_what_the_user_did_stays() -> None:
    model = Both()
    fastattn.replace_mha(model)
    with integration.activate() as activation:
        accelerate(model)
        restore(model)
        assert model.accelerated
        assert integration._active == {activation}


def test_a_part_that_was_accelerated_is_restored_with_the_whole() -> None:
    model = Both()
    accelerate(model.layers)
    restore(model)
    assert not model.accelerated


def test_the_state_and_the_file_of_a_model_stay_the_same() -> None:
    model = Both()
    before = {name: (id(x), x.data_ptr()) for name, x in model.state_dict(keep_vars=True).items()}
    accelerate(model)
    after = {name: (id(x), x.data_ptr()) for name, x in model.state_dict(keep_vars=True).items()}
    assert before == after
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    torch.testing.assert_close(loaded(inputs()), model(inputs()))
    restore(model)


def at_once(function: Any, *args: Any) -> None:
    """Call a function in several threads at the same time."""
    start = threading.Barrier(4)

    def call() -> None:
        start.wait()
        function(*args)

    threads = [threading.Thread(target=call) for _ in range(start.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_that_accelerate_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(acceleration._Changes):
        def __init__(self) -> None:
            time.sleep(0.02)  # other threads run meanwhile
            super().__init__()

    monkeypatch.setattr(acceleration, "_Changes", Slow)
    model = Both()
    at_once(accelerate, model)
    assert model.accelerated
    assert len(integration._active) == 1
    at_once(restore, model)
    assert not model.accelerated
    assert not integration._active


# --- wrappers -------------------------------------------------------------------------------------


def step(model: nn.Module) -> list[Tensor]:
    """The loss and the gradients of a step."""
    model.zero_grad()
    loss = model(inputs().to(next(model.parameters()).dtype)).square().mean()
    loss.backward()
    return [loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrapped_first", [True, False])
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP", "FSDP2"])
def test_distributed_wrappers(wrapper: str, wrapped_first: bool) -> None:
    torch.manual_seed(0)
    model = Both()
    want = step(copy.deepcopy(model))
    if not wrapped_first:
        accelerate(model)
    if wrapper == "DDP":
        wrapped: Any = nn.parallel.DistributedDataParallel(model)
    elif wrapper == "FSDP":
        wrapped = torch.distributed.fsdp.FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=True
        )
    else:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        wrapped = torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    report = accelerate(wrapped)
    assert not report.unserved
    assert len(report.served) == 2
    got = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in step(wrapped)]
    torch.testing.assert_close(got, want)
    assert backends(wrapped) == {"cpu"}
    restore(wrapped)
    assert not model.accelerated


def test_quantized_projections() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    model = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.self_attn.dropout = 0.0
    assert "quantized" in type(model.linear1).__module__
    want = model(inputs())
    (part,) = accelerate(model).served
    assert part.modules == ("self_attn",)
    torch.testing.assert_close(model(inputs()), want)
    assert backends(model) == {"cpu"}
    restore(model)
    assert torch.equal(model(inputs()), want)


def test_quantized_attention_is_not_served() -> None:
    """It is a subclass that computes all by itself."""
    model = nn.Sequential(torch.ao.nn.quantizable.MultiheadAttention(WIDTH, 2, batch_first=True))
    (part,) = accelerate(model).unserved
    assert part.modules == ("0",)
    model[0](inputs(), inputs(), inputs())


def test_lora() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["attn", "projection"], init_lora_weights=False)
    model = peft.get_peft_model(Both(), config).double()
    want = step(model)
    assert len(want) > 4
    report = accelerate(model)
    assert not report.unserved
    torch.testing.assert_close(step(model), want)
    assert backends(model, inputs().double()) == {"cpu"}
    merged = model.merge_and_unload()
    assert backends(merged, inputs().double()) == {"cpu"}
    restore(model)
    assert not merged.accelerated


def test_a_compiled_model() -> None:
    model = Both()
    want = step(model)
    accelerate(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled), want)
    report = accelerate(compiled)
    assert {part.modules for part in report.served} >= {("_orig_mod.layers.0",)}
    restore(compiled)
    assert not model.accelerated
