"""``scan`` on a real pretrained encoder agrees with float64 entropies of its eager weights."""

from __future__ import annotations

import torch

import attemper
from tests.monitor.tiny_models import head_entropies
from tests.support import encoder

TEXTS = [
    "Attention is a weighted mean whose weights the tokens choose for themselves. " * 12,
    "How sharp should that choice be?",
    "If a head gives all its weight to a single token, it looks something up: the subject of the sentence, perhaps.",
]


def worst_error(texts: list[str]) -> float:
    model, tokenizer = encoder.loaded()
    batch = dict(tokenizer(texts, return_tensors="pt", padding=True))
    with torch.no_grad():
        layers = model(**batch, output_attentions=True).attentions
    scan = attemper.scan(model, [batch])
    assert scan.tokens == int(batch["attention_mask"].sum())
    worst = 0.0
    for site, weights in zip(scan.sites, layers, strict=True):
        expected = head_entropies(weights, batch["attention_mask"])
        for head, value in zip(site.heads, expected.tolist(), strict=True):
            assert head.entropy_nats is not None
            worst = max(worst, abs(head.entropy_nats - value))
    return worst


def test_one_text_agrees_to_5e_6_nats_per_head() -> None:
    assert worst_error(TEXTS[:1]) < 5e-6


def test_a_padded_batch_of_uneven_texts_agrees_to_5e_6_nats_per_head() -> None:
    assert worst_error(TEXTS) < 5e-6


def test_a_healthy_encoder_raises_nothing_above_a_notice() -> None:
    model, tokenizer = encoder.loaded()
    scan = attemper.scan(model, [dict(tokenizer(TEXTS, return_tensors="pt", padding=True))])
    assert {alarm.severity for alarm in scan.alarms} <= {"notice"}
