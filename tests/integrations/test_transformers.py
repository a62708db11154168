"""Models of transformers on our attention against the same models on its eager one.

Both run in float64, so that a difference is a wrong mask, scale or gradient and not rounding. The
table of models is tests/support/transformers_models.py: a few run in `make test`, all in `make
test-slow`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers_inputs import LENGTH, PAD, Inputs, text
from transformers_models import Entry, params, released
from transformers_runs import InDouble, assert_same, compared, fused, gradients, outputs, tensors

every_model = pytest.mark.parametrize("entry", params())


def padded(inputs: Inputs, side: str | None, rows: int = 4) -> Inputs:
    """The inputs with the first ``rows`` positions of the first sequence, or the last, padding."""
    mask = torch.ones_like(inputs["input_ids"])
    if side is not None:
        mask[0, slice(None, rows) if side == "left" else slice(-rows, None)] = 0
    tokens = inputs["input_ids"].masked_fill(mask == 0, PAD)
    return inputs | {"input_ids": tokens, "attention_mask": mask}


@every_model
def test_outputs_and_attention_weights(entry: Entry) -> None:
    model, inputs = entry.build(), entry.example()
    compared(model, lambda m: outputs(m, inputs))
    if released(entry.weights_since):
        compared(model, lambda m: outputs(m, inputs | {"output_attentions": True}))


@every_model
def test_gradients_of_all_parameters(entry: Entry) -> None:
    inputs = entry.example()
    compared(entry.build(), lambda m: gradients(m, inputs))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("entry", params("pads"))
def test_padding(entry: Entry, side: str) -> None:
    inputs = padded(entry.example(), side)
    real = inputs["attention_mask"].bool()
    compared(entry.build(), lambda m: gradients(m, inputs, real))


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
    "beams": {"num_beams": 2},
}
SLOW = ("none", "beams")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize(
    "cache", [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in CACHES]
)
@pytest.mark.parametrize("entry", params("generates"))
def test_generate(entry: Entry, cache: str, side: str | None) -> None:
    """The prompt is longer than the window of those models that have one, or grows beyond it."""
    inputs = {k: x for k, x in entry.example().items() if k != "decoder_input_ids"}
    for length in (LENGTH, 3):
        if "input_ids" in inputs:
            prompt = padded({"input_ids": inputs["input_ids"][:, :length]}, side, rows=2)
        elif side is None and length == LENGTH:
            prompt = inputs
        else:
            continue

        def run(model: nn.Module, prompt: Inputs = prompt) -> dict[str, Tensor]:
            with InDouble():
                found = model.generate(
                    **prompt,
                    max_new_tokens=5,
                    do_sample=False,
                    return_dict_in_generate=True,
                    output_logits=True,
                    **CACHES[cache],
                )
            return dict(tensors({"logits": found.logits, "tokens": found.sequences.double()}))

        compared(entry.build(), run)


SEQUENCES = (4, 7)


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "both"])
@pytest.mark.parametrize("entry", params("packed"))
def test_packed_sequences(entry: Entry, how: str) -> None:
    """Each sequence of a packed row has the results that it has alone."""
    if how not in entry.packed:
        pytest.skip(f"{entry} does not take packed sequences by {how}")
    model = entry.build()
    tokens = text(entry.generator(), batch=1)["input_ids"]
    want = [outputs(model, {"input_ids": x})["logits"] for x in tokens.split(SEQUENCES, 1)]
    ends = torch.tensor([0, *SEQUENCES]).cumsum(0, dtype=torch.int32)
    packed: dict[str, Any] = {
        "input_ids": tokens,
        "position_ids": torch.cat([torch.arange(n) for n in SEQUENCES])[None],
        "use_cache": False,
    }
    if how != "position_ids":
        longest = max(SEQUENCES)
        packed |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        packed |= {"max_length_q": longest, "max_length_k": longest}
    if how == "cu_seq_lens":  # with a mask, positions are ignored
        packed["attention_mask"] = torch.ones_like(tokens)
    with fused(model):
        got = outputs(model, packed)["logits"]
    assert_same({"logits": got}, {"logits": torch.cat(want, 1)})
