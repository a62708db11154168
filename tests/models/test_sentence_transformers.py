"""Models of sentence-transformers, with and without padding: embeddings and gradients."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from libraries import library
from library_models import WIDTH, sentence_modules
from library_runs import accelerated
from torch import Tensor, nn
from transformers_runs import assert_same

import fastattn
from fastattn.integrations.sentence_transformers import unpad_inputs

SENTENCES = ["one two", "three four five six seven", "two"]
REGISTRY = "transformers' registry"


def sentence_model(folder: Path, *args: Any, **settings: Any) -> Any:
    """A small model of sentence-transformers."""
    modules = sentence_modules(folder, *args, **settings)
    model = library("sentence_transformers").SentenceTransformer(modules=modules, device="cpu")
    return model.double()


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return sentence_model(tmp_path)


def embeddings(model: Any) -> dict[str, Tensor]:
    """The embeddings of the sentences."""
    return {"out": torch.tensor(model.encode(SENTENCES))}


def gradients(model: Any) -> dict[str, Tensor]:
    """The gradients of all parameters."""
    model.eval().zero_grad()
    found = model(model.preprocess(SENTENCES))["sentence_embedding"]
    (found * torch.arange(WIDTH)).sum().backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def is_packed(model: Any) -> bool:
    """Whether the model receives packed sentences instead of padded ones."""
    features = model.preprocess(SENTENCES)
    assert ("attention_mask" in features) != ("cu_seq_lens_q" in features)
    return "cu_seq_lens_q" in features


def operators(model: Any) -> set[tuple[str, str]]:
    """The operators that a call of the model runs, with their backends."""
    with fastattn.trace() as calls:
        model.encode(SENTENCES)
    return {(call.operator, call.backend) for call in calls}


def test_padded_sentences(model: Any) -> None:
    want = embeddings(model), gradients(model)
    with accelerated(model, REGISTRY):
        assert {backend for _, backend in operators(model)} == {"cpu"}
        assert not is_packed(model)
        got = embeddings(model), gradients(model)
    for ours, expected in zip(got, want, strict=True):
        assert_same(ours, expected, 1e-6)


@pytest.mark.parametrize(
    ("kind", "pooling", "settings"),
    [
        ("Bert", "mean", {}),
        ("Roberta", "cls", {}),  # positions that do not begin at 0
        ("ModernBert", "max", {"layers": 2, "local_attention": 4}),  # windows
        ("Qwen3", "lasttoken", {"head_dim": 8, "num_key_value_heads": 1}),  # causal
    ],
)
def test_packed_sentences(kind: str, pooling: str, settings: Any, tmp_path: Path) -> None:
    model = sentence_model(tmp_path, kind, pooling, **settings)
    want = embeddings(model), gradients(model)
    with accelerated(model, REGISTRY), unpad_inputs(model):
        assert is_packed(model)
        assert operators(model) == {("varlen_attention", "cpu")}
        got = embeddings(model), gradients(model)
    for ours, expected in zip(got, want, strict=True):
        assert_same(ours, expected, 1e-6)
    assert not is_packed(model)


def test_other_attention_receives_padded_sentences(model: Any) -> None:
    want = embeddings(model)
    with unpad_inputs(model):
        assert not is_packed(model)
        fastattn.accelerate(model)
        assert is_packed(model)
        model[0].unpad_inputs = False  # the user's own setting
        assert not is_packed(model)
        fastattn.restore(model)
        assert_same(embeddings(model), want, 0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_undo_in_any_order_any_number_of_times(model: Any, order: tuple[int, ...]) -> None:
    before = dict(vars(model[0]))
    fastattn.accelerate(model)
    registrations = [unpad_inputs(model) for _ in order]
    for n, which in enumerate(order, start=1):
        for _ in range(2):
            registrations[which].undo()
            assert is_packed(model) == (n < len(order))
    fastattn.restore(model)
    assert vars(model[0]) == before


# --- what cannot be packed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("transformer_task", "sequence-classification", "head of its task 'sequence-classif"),
        ("modality_config", {"image": {"method": "forward"}}, "it takes no texts"),
        ("modality_config", {"text": {"method": "get_text_features"}}, "its method 'get_text"),
        ("backend", "onnx", "its backend is 'onnx'"),
    ],
)
def test_modules_that_read_padded_sentences(
    model: Any, attribute: str, value: Any, reason: str
) -> None:
    setattr(model[0], attribute, value)
    with pytest.raises(ValueError, match=f"BertModel cannot take packed texts: .*{reason}"):
        unpad_inputs(model)


def test_a_model_with_attention_of_its_own(tmp_path: Path) -> None:
    model = sentence_model(tmp_path, "MPNet")
    with pytest.raises(ValueError, match=r"MPNetModel cannot .*: it has attention of its own"):
        unpad_inputs(model)


def test_no_model_of_sentence_transformers() -> None:
    library("sentence_transformers")
    with pytest.raises(ValueError, match="of sentence-transformers, Linear has none"):
        unpad_inputs(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got str"):
        unpad_inputs("all-MiniLM-L6-v2")  # type: ignore[arg-type]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    extra = r"(?s)sentence_transformers>=6.2,<7.*fastattn\[sentence_transformers\]"
    with pytest.raises(ImportError, match=extra):
        unpad_inputs(nn.Linear(2, 2))


@pytest.mark.parametrize("version", ["6.1.0", "7.0.0"])
def test_a_version_out_of_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library("sentence_transformers"), "__version__", version)
    with pytest.raises(ImportError, match=f"sentence_transformers {version} is installed"):
        unpad_inputs(nn.Linear(2, 2))
