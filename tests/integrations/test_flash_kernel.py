"""`fastattn kernel`: the folder it writes, and the flash features of transformers that run on it.

transformers loads the folder through the package `kernels`. Where that is not installed, in a
version that this transformers takes, the tests load it themselves, as `kernels` does.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers_inputs import GROUPED, LENGTH, text
from transformers_models import released

from fastattn import _kernel, cli, flash_attn

transformers.logging.set_verbosity_error()

hub_kernels = importlib.import_module("transformers.integrations.hub_kernels")
flash_utils = importlib.import_module("transformers.modeling_flash_attention_utils")


def load(folder: Path, backend: str = "cpu") -> ModuleType:
    """Import the module of a folder as `kernels` does."""
    variant = folder / "build" / f"torch-{backend}"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# transformers loads this kernel for GPT-OSS, whatever other name with "flash" is asked for.
_OF_GPT_OSS = "kernels-community/vllm-flash-attn3"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that `fastattn kernel` writes."""
    assert cli.main(["kernel", str(tmp_path / "kernel")]) == 0
    return tmp_path / "kernel"


@pytest.fixture(params=["as kernels does", "kernels"])
def name(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The name of the attention for transformers, which can load it."""
    if request.param == "kernels":
        if not hub_kernels.is_kernels_available():
            pytest.skip("no version of kernels is installed that this transformers takes")
        monkeypatch.setenv("LOCAL_KERNELS", f"{_kernel.NAME}={folder}:{_OF_GPT_OSS}={folder}")
    else:
        monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
        folders = {_kernel.NAME: folder, _OF_GPT_OSS: folder}
        monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **_: load(folders[name]))
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    yield _kernel.NAME
    sys.modules.pop("fastattn_flash_attn_cpu", None)


def model_of(kind: str, **config: Any) -> Any:
    """A tiny model with random weights whose attention is far from uniform."""
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    config = GROUPED | {"eos_token_id": None, "attn_implementation": "eager"} | config
    model = model_class(model_class.config_class(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.2 / 32**0.5)
    return model


@pytest.mark.parametrize("backend", _kernel.BACKENDS)
def test_the_folder_has_the_functions_of_this_package(folder: Path, backend: str) -> None:
    module = load(folder, backend)
    for name in flash_attn.__all__:
        assert getattr(module, name) is getattr(flash_attn, name)
    metadata = json.loads((folder / "build" / f"torch-{backend}" / "metadata.json").read_text())
    assert metadata["backend"] == {"type": backend}


def test_the_command_prints_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # again into the same folder
        assert cli.main(["kernel", str(tmp_path)]) == 0
    assert f"LOCAL_KERNELS=fastattn/flash-attn={tmp_path}\n" in capsys.readouterr().out
    assert cli.main(["kernel", str(tmp_path / "a:b")]) == 2
    assert "folder must have no ':'" in capsys.readouterr().err


def test_the_package_kernels_loads_the_folder(folder: Path) -> None:
    kernels = pytest.importorskip("kernels")
    module = kernels.get_local_kernel(folder, backend="cpu")
    assert module.flash_attn_varlen_func is flash_attn.flash_attn_varlen_func


def test_transformers_finds_its_arguments() -> None:
    """By name: transformers drops arguments that it does not find, or raises an error."""
    wanted = {
        "flash_attn_varlen_func": "causal softmax_scale dropout_p window_size deterministic "
        "softcap s_aux max_seqlen_q max_seqlen_k cu_seqlens_q cu_seqlens_k block_table",
        "flash_attn_func": "causal softmax_scale dropout_p window_size deterministic softcap s_aux",
        "flash_attn_with_kvcache": "causal softmax_scale window_size softcap s_aux block_table "
        "cache_seqlens",
    }
    for function, names in wanted.items():
        found = inspect.signature(getattr(flash_attn, function)).parameters
        assert not set(names.split()) - set(found)


MODELS = {
    "LlamaForCausalLM": {},
    "Gemma2ForCausalLM": {"sliding_window": 4, "query_pre_attn_scalar": 8},  # with a softcap
    "GptOssForCausalLM": {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_inputs_are_unpadded(kind: str, side: str, name: str) -> None:
    model = model_of(kind, **MODELS[kind])
    inputs = text(torch.Generator().manual_seed(1))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :4] = 0
    mask = mask if side == "left" else mask.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"input_ids": inputs["input_ids"], "attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        want = model(**given).logits[mask.bool()]
        model.set_attn_implementation(name)
        got = model(**given).logits[mask.bool()]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [20], [30, 31, 3, 4, 2]]


@pytest.mark.skipif(not released("5.17.0"), reason="until then it asks for 'paged|...'")
@pytest.mark.parametrize(
    "kind", ["LlamaForCausalLM", pytest.param("Gemma2ForCausalLM", marks=pytest.mark.slow)]
)
def test_continuous_batching_generates_the_text_of_eager(kind: str, name: str) -> None:
    model = model_of(kind, **MODELS[kind])
    settings = transformers.GenerationConfig(
        max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    want = [
        model.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :]
        for prompt in PROMPTS
    ]
    model.set_attn_implementation(name)
    # So few blocks that requests wait for each other and a prompt is computed in parts.
    memory = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=8)
    found = model.generate_batch(PROMPTS, settings, memory)
    assert [x.generated_tokens for x in found.values()] == [x.tolist() for x in want]


def test_a_step_on_pages_equals_transformers(name: str) -> None:
    """As transformers calls it on a GPU: one token each, unused pages -1, and rows of any page."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 1, h, 8, generator=generator) for h in (4, 2, 2))
    k_cache, v_cache = (torch.randn(9, 4, 2, 8, generator=generator) for _ in range(2))
    table = torch.tensor([[3, 1, -1], [5, -1, -1], [0, 8, 2]], dtype=torch.int32)
    lengths = torch.tensor([6, 3, 8], dtype=torch.int32)
    given = {"causal": True, "softmax_scale": None, "window_size": (3, 3)}
    module = hub_kernels.get_kernel(name, version=1)
    before = k_cache.clone()
    out = module.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, block_table=table, cache_seqlens=lengths, **given
    )
    for b, length in enumerate(lengths.tolist()):
        rows = [(int(table[b, n // 4]), n % 4) for n in range(length + 1)]
        assert torch.equal(k_cache[rows[-1]], k[b, 0])
        keys, values = (torch.stack([x[at] for at in rows]) for x in (k_cache, v_cache))
        want = module.flash_attn_func(q[b : b + 1], keys[None], values[None], **given)
        torch.testing.assert_close(out[b : b + 1], want)
    assert int((before != k_cache).any(-1).any(-1).sum()) == 3
