"""Scores of roles on models: against TransformerLens' definitions in float64 code, on trained heads, where tokens are
not known.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper import InputError
from attemper.monitor.head_roles import MOST_TOKENS, repeated_text
from attemper.readings.roles import FEWEST_ROWS, ROLE_OF
from tests.monitor.test_pattern import eager_weights
from tests.support.encoder import loaded
from tests.support.induction_model import VOCABULARY, trained

# --- TransformerLens' head detector, as its documentation defines it, in float64 ---


def detection_pattern(name: str, ids: Tensor) -> Tensor:
    """[Q, K] of 0 and 1: the pairs that a head of this name attends to."""
    tokens = len(ids)
    found = torch.zeros(tokens, tokens, dtype=torch.float64)
    for query in range(tokens):
        for key in range(query):
            if name == "previous token":
                found[query, key] = query - key == 1
            elif name == "duplicate token":
                found[query, key] = ids[query] == ids[key]
            elif ids[query] == ids[key]:
                found[query, key + 1] = 1  # induction: the token that followed
    return found


def detector_score(weights: Tensor, pattern: Tensor) -> float:
    """The share of all weight [Q, K] that lies on the pairs of the pattern: its measure "mul"."""
    return float((weights * pattern).sum() / weights.sum())


def gpt2(seed: int = 0, sharpness: float = 1.0) -> Any:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(seed)
    sizes: Any = {"vocab_size": 60, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}
    config = GPT2Config(**sizes | {"attn_implementation": "eager"})
    model: Any = GPT2Model(config).double().eval()
    with torch.no_grad():
        for block in model.h:
            block.attn.c_attn.weight.mul_(sharpness)
    return model


def scores(scan: attemper.Scan, site: int, head: int) -> dict[str, float | None]:
    found = scan.sites[site].heads[head].roles
    assert found is not None
    return dict(found)


@pytest.mark.quick("30.0")
@pytest.mark.parametrize("sharpness", [1.0, 30.0])
def test_scores_are_those_of_the_head_detector_per_row_that_has_such_a_key(
    monkeypatch: pytest.MonkeyPatch, sharpness: float
) -> None:
    """The detector divides by all rows; a row without such a key, which no head can attend to, does not count here."""
    pytest.importorskip("transformers")
    model = gpt2(sharpness=sharpness)
    ids = torch.randint(60, (1, 90))
    weights = eager_weights(monkeypatch, model, {"input_ids": ids}).attentions
    scan = attemper.scan(model, [{"input_ids": ids}])
    for layer in range(2):
        for head in range(4):
            found = scores(scan, layer, head)
            for name in ("previous token", "duplicate token", "induction"):
                pattern = detection_pattern(name, ids[0])
                rows = int(pattern.any(1).sum())
                assert rows > FEWEST_ROWS
                value = found[name]
                assert value is not None
                expected = detector_score(weights[layer][0, head].double(), pattern)
                assert value * rows / len(ids[0]) == pytest.approx(expected, abs=1e-5), name


@pytest.mark.quick("left")
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_every_score_follows_from_the_pattern_of_its_head(padding: str | None) -> None:
    """Of weights that attemper.pattern gives, by loops over rows."""
    pytest.importorskip("transformers")
    from tests.monitor.tiny_models import TINY, inputs, sharpened

    model = sharpened(TINY["bert"].build()).double()
    batch = {name: part[1:2] for name, part in inputs("encoder", padding, 40).items()}

    def names(ids: list[int]) -> list[str]:
        return ["." if number % 5 == 0 else "word" for number in ids]

    scan = attemper.scan(model, [batch], tokenizer=names)
    for site in scan.sites:
        for head in site.heads:
            found = attemper.pattern(model, batch, site=site.name, head=head.head)
            ids = [int(token) for token in found.tokens]
            # Layers between are in float32, and a scan computes their input by another kernel.
            assert head.roles == pytest.approx(by_loops(found.weights.tolist(), ids), abs=1e-6)


def by_loops(weights: list[list[float]], ids: list[int]) -> dict[str, float | None]:
    """Scores of an encoder's head, in which every token sees every token."""
    many = range(len(ids))
    keys: dict[str, list[list[int]]] = {
        "previous token": [[k for k in many if k == q - 1] for q in many],
        "next token": [[k for k in many if k == q + 1] for q in many],
        "own token": [[q] for q in many],
        "first token": [[0] for _ in many],
        "separator": [[k for k in many if k and ids[k] % 5 == 0] for _ in many],
        "duplicate token": [[k for k in range(q) if ids[k] == ids[q]] for q in many],
        "induction": [[k + 1 for k in range(q) if ids[k] == ids[q]] for q in many],
    }
    found: dict[str, float | None] = {}
    for name, of_row in keys.items():
        rows = [q for q in many if of_row[q]]
        sums = [math.fsum(weights[q][k] for k in of_row[q]) for q in rows]
        found[name] = math.fsum(sums) / len(rows) if len(rows) >= FEWEST_ROWS else None
    far = math.fsum(weights[q][k] * abs(q - k) for q in many for k in many)
    found["local"] = 1 - far / (math.fsum(abs(q - k) for q in many for k in many) / len(ids))
    entropies = [-math.fsum(p * math.log(p) for p in row if p > 0) / math.log(len(ids)) for row in weights]
    found["diffuse"] = math.fsum(entropies) / len(ids)
    return found


# --- heads that were trained ---


def test_a_pass_over_repeated_tokens_finds_induction_heads_where_the_text_repeats_nothing() -> None:
    text = torch.arange(40)[None]
    without = attemper.scan(trained(), [text])
    assert scores(without, 1, 0)["induction"] is None  # not known, and never guessed
    scan = attemper.scan(trained(), [{"input_ids": text}], roles="repeated")
    assert [head.role for head in scan.sites[1].heads] == ["induction", "induction"]
    assert "previous token" in [head.role for head in scan.sites[0].heads]
    others = set(ROLE_OF) - {"induction", "duplicate token"}
    for name in others:
        assert scores(scan, 1, 0)[name] == scores(without, 1, 0)[name]
    assert scan.tokens == 40  # the second pass counts in nothing else
    assert scan.sites[0].heads[0].rows == 40


def test_the_repeated_text_is_like_the_first_batch() -> None:
    ids, mask = torch.randint(VOCABULARY, (3, 40)), torch.ones(3, 40)
    made = repeated_text(trained(), {"input_ids": ids, "attention_mask": mask, "flag": True})
    assert set(made) == {"input_ids", "flag"}
    text = made["input_ids"]
    assert text.shape == (1, 39)
    assert text[0, 0] == ids[0, 0]
    assert text[0, 1:20].equal(text[0, 20:])
    assert len(text[0, 1:20].unique()) == 19
    assert repeated_text(trained(), ids).equal(text)
    assert repeated_text(trained(), (ids,))[0].equal(text)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (torch.zeros(1, 40, 8), "needs ids of tokens"),
        ({"inputs_embeds": torch.zeros(1, 40, 8)}, "needs ids of tokens"),
        (torch.zeros(1, 4, dtype=torch.long), "4 tokens of a vocabulary of 64 are too few"),
    ],
)
def test_what_cannot_be_repeated_is_refused(batch: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        repeated_text(trained(), batch)
    with pytest.raises(InputError, match="has no get_input_embeddings"):
        repeated_text(nn.Linear(2, 2), torch.zeros(1, 40, dtype=torch.long))


# --- what is not known ---


def of_vectors() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 40, 32)


def of_embeddings() -> tuple[nn.Module, Any]:
    pytest.importorskip("transformers")
    model = gpt2()
    return model, {"inputs_embeds": model.wte(torch.randint(60, (1, 40))).detach()}


def of_two_texts() -> tuple[nn.Module, Any]:
    pytest.importorskip("transformers")
    from tests.monitor.tiny_models import TINY, inputs

    return TINY["t5"].build().eval(), inputs("encoder-decoder", None, 24)


OF_TOKENS = {"separator", "duplicate token", "induction"}
UNKNOWN: dict[str, tuple[Any, str, set[str]]] = {
    "vectors": (of_vectors, "self", OF_TOKENS),
    "embedded tokens": (of_embeddings, "self", OF_TOKENS | {"next token"}),  # which no causal row sees
    "a short text": (lambda: (trained(), torch.arange(FEWEST_ROWS)[None]), "self", set(ROLE_OF)),
    "other tokens than its own": (of_two_texts, "cross", set(ROLE_OF) - {"first token", "separator", "diffuse"}),
}
"""A model and a batch, the kind of a site, and the roles that nobody can tell of its heads."""


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_score_that_nothing_tells_is_not_known(name: str) -> None:
    made, kind, unknown = UNKNOWN[name]
    model, batch = made()
    scan = attemper.scan(model, [batch], tokenizer=lambda ids: ["."] * len(ids))
    found = [head.roles or {} for site in scan.sites if site.kind == kind for head in site.heads]
    assert found
    for roles in found:
        assert {role for role, value in roles.items() if value is None} == unknown
        assert set(roles) == set(ROLE_OF)


def test_only_the_first_text_and_its_first_tokens_count() -> None:
    model = trained()
    text, other = torch.randint(VOCABULARY, (1, 160)), torch.randint(VOCABULARY, (1, 160))
    one = attemper.scan(model, [text])
    assert attemper.scan(model, [torch.cat([text, other]), other]).sites[0].heads[0].roles == pytest.approx(
        one.sites[0].heads[0].roles, abs=1e-6
    )
    assert MOST_TOKENS == 256
    assert attemper.scan(model, [text], roles=False).sites[0].heads[0].roles is None


def test_files_of_sums_keep_scores_and_merge_to_those_of_the_first_text(tmp_path: Path) -> None:
    texts = [torch.randint(VOCABULARY, (1, 40)) for _ in range(2)]
    parts = [attemper.scan(trained(), [text], shard=(at, 2)) for at, text in enumerate(texts)]
    paths = [part.save(tmp_path / f"{at}.safetensors") for at, part in enumerate(parts)]
    loaded = [attemper.open(path) for path in paths]
    assert loaded[0].sites[0].heads[0].roles == parts[0].sites[0].heads[0].roles
    merged = loaded[1].merge(loaded[0])
    assert merged.sites[1].heads[1].roles == parts[0].sites[1].heads[1].roles


@pytest.mark.parametrize("roles", ["induction", None, 2])
def test_another_word_than_repeated_is_refused(roles: Any) -> None:
    with pytest.raises(InputError, match=r"scan\(roles=...\) must be True \(on the first text\), 'repeated'"):
        attemper.scan(trained(), [torch.zeros(1, 8, dtype=torch.long)], roles=roles)


@pytest.mark.parametrize(
    ("token", "separates"),
    [(".", True), ("Ġ,", True), ("▁", True), ("Ċ", True), ("##,", True), ("word", False), ("##s", False), ("+", False)],
)
def test_separators_are_told_by_their_letters(token: str, separates: bool) -> None:
    ids = torch.cat([torch.zeros(1), torch.arange(1, 12)]).long()[None]
    scan = attemper.scan(trained(), [ids], tokenizer=lambda found: [token if one == 3 else "a" for one in found])
    assert (scores(scan, 0, 0)["separator"] is not None) == separates


def test_the_real_encoder_has_its_previous_token_head_and_the_alarm_says_so() -> None:
    model, tokenizer = loaded()
    text = "One morning the village woke to find the river gone, and nobody, not even the miller, could say why. " * 5
    batch = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
    scan = attemper.scan(model, [dict(batch)], tokenizer=tokenizer)
    head = scan.sites[0].heads[2]
    assert head.role == "previous token"
    place = scan.sites[0].name, 2, "collapsed"
    (alarm,) = (one for one in scan.alarms if (one.site, one.head, one.kind) == place)
    assert alarm.message.endswith("is very low (previous-token head: sharp by its job)")
    assert head.roles is not None
    assert None not in head.roles.values()
