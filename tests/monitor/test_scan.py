"""What ``scan`` promises beside its numbers: nothing changed, nothing silent, padding out, batches in any order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper import InputError
from attemper.sites.observation import current

tf = pytest.importorskip("transformers")

from tests.monitor.tiny_models import TEXT, TINY, inputs, sharpened  # noqa: E402
from tests.support.scans import hooks  # noqa: E402


@pytest.fixture
def llama() -> Any:
    return sharpened(TINY["llama"].build())


def test_everything_is_put_back_after_a_scan_and_when_the_model_raises(llama: Any) -> None:
    batch = inputs("decoder", "left")
    before = llama(**batch).logits
    attemper.scan(llama, [batch])
    with pytest.raises(IndexError):
        attemper.scan(llama, [{"input_ids": torch.tensor([[5000]])}])
    assert llama.config._attn_implementation == "eager"
    assert hooks(llama) == 0
    assert current() == ()
    assert torch.equal(before, llama(**batch).logits)


def test_outputs_during_a_scan_are_those_of_the_model_at_real_tokens(llama: Any) -> None:
    batch = inputs("decoder", "right")
    expected = llama(**batch).logits
    seen: list[Tensor] = []
    handle = llama.register_forward_hook(lambda _m, _i, output: seen.append(output.logits))
    attemper.scan(llama, [batch])
    handle.remove()
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(seen[0][real], expected[real], rtol=0, atol=1e-5)


def test_two_batches_read_as_one(llama: Any) -> None:
    whole = inputs("decoder", "left")
    parts = [{name: tensor[rows] for name, tensor in whole.items()} for rows in (slice(0, 1), slice(1, 3))]
    one, two = attemper.scan(llama, [whole]), attemper.scan(llama, parts)
    assert one.tokens == two.tokens
    for a, b in zip(one.sites, two.sites, strict=True):
        for x, y in zip(a.heads, b.heads, strict=True):
            assert x.rows == y.rows
            assert x.normalized_entropy_histogram == y.normalized_entropy_histogram
            assert x.entropy_nats == pytest.approx(y.entropy_nats, abs=1e-6)
            assert x.first_token_mass == pytest.approx(y.first_token_mass, abs=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_reading(llama: Any, side: str) -> None:
    ids = torch.randint(3, 101, (1, 20))
    zeros = torch.zeros(1, 7, dtype=torch.int64)
    parts = (zeros, ids) if side == "left" else (ids, zeros)
    padded = {
        "input_ids": torch.cat(parts, 1),
        "attention_mask": torch.cat([torch.full_like(part, part is ids) for part in parts], 1),
        "position_ids": torch.cat([zeros if part is zeros else torch.arange(20)[None] for part in parts], 1),
    }
    plain = attemper.scan(llama, [{"input_ids": ids}])
    scan = attemper.scan(llama, [padded])
    assert scan.tokens == plain.tokens == 20
    for a, b in zip(plain.sites, scan.sites, strict=True):
        for x, y in zip(a.heads, b.heads, strict=True):
            assert (x.rows, x.empty_rows) == (y.rows, y.empty_rows) == (20, 0)
            for name in ("entropy_nats", "first_token_mass", "max_logit", "effective_tokens"):
                assert getattr(x, name) == pytest.approx(getattr(y, name), rel=1e-4, abs=1e-5), name


def test_first_token_mass_of_a_left_padded_row_is_on_its_first_real_token(llama: Any) -> None:
    batch = inputs("decoder", "left")
    scan = attemper.scan(llama, [batch])
    stats = scan.row_statistics(scan.sites[0].name)
    with pytest.raises(InputError, match=r"no site 'nope' was seen\. Sites: model\.layers\.0"):
        scan.row_statistics("nope")
    with torch.no_grad():
        weights = llama(**batch, output_attentions=True).attentions[0]
    first = batch["attention_mask"].argmax(1)
    rows = stats.defined_rows("first_token_mass")
    expected = torch.stack([weights[row, :, :, place] for row, place in enumerate(first.tolist())])
    torch.testing.assert_close(stats.first_token_mass[rows], expected[rows], rtol=0, atol=1e-6)


class ThreeFirst(nn.Module):
    """Its first tokens are three."""

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        return attemper.attention(x, x, x, is_causal=True, first_tokens=3).output


def test_first_tokens_are_as_many_under_padding_as_without():
    x, real = torch.randn(2, 1, 9, 8, generator=torch.Generator().manual_seed(0)), torch.ones(2, 9)
    real[1, 7:] = 0
    whole = attemper.scan(ThreeFirst(), [{"x": x, "attention_mask": real}])
    cut = [{"x": part, "attention_mask": None} for part in (x[:1], x[1:, :, :7])]
    apart = attemper.scan(ThreeFirst(), cut)
    (one,), (two,) = whole.sites[0].heads, apart.sites[0].heads
    assert one.rows == two.rows == 16
    assert one.first_token_mass == pytest.approx(two.first_token_mass, abs=1e-6)


def test_batches_may_be_dicts_tuples_lists_or_tensors(llama: Any) -> None:
    ids = torch.randint(3, 101, (2, 12))
    batches = ({"input_ids": ids}, (ids,), [ids], ids)
    readings = [attemper.scan(llama, [batch]).to_dict() | {"date": None} for batch in batches]
    assert all(reading == readings[0] for reading in readings)


def test_models_inside_a_module_of_ones_own_are_scanned() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (sharpened(TINY["bert"].build()) for _ in range(2))

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            left = self.left(input_ids, attention_mask=attention_mask).last_hidden_state
            return left + self.right(input_ids, attention_mask=attention_mask).last_hidden_state

    scan = attemper.scan(Mine().eval(), [inputs("encoder", "right")])
    assert [site.name.split(".")[0] for site in scan.sites] == ["left", "left", "right", "right"]
    assert scan.tokens == 40 + 31 + 5


def test_json_is_the_promised_document(llama: Any) -> None:
    document = json.loads(attemper.scan(llama, [inputs("decoder", "left")]).to_json())
    assert set(document) == {
        "schema",
        "model",
        "tokens",
        "backend",
        "sampled_rows",
        "fewest_keys",
        "text",
        "date",
        "dtype",
        "revision",
        "versions",
        "untrained_heads",
        "missing_shards",
        "computed_on",
        "text_digest",
        "notes",
        "sites",
        "skipped",
        "alarms",
        "unknown_roles",
    }
    assert document["sampled_rows"] is None
    assert document["schema"] == 2
    site = document["sites"][0]
    assert set(site) == {"name", "layer", "kind", "mode", "queries", "keys", "heads"}
    head = site["heads"][0]
    assert list(head) == [
        "head", "entropy_nats", "normalized_entropy", "effective_tokens", "max_weight", "max_logit", "logit_std",
        "mass", "first_token_mass", "gini", "normalized_entropy_histogram", "by_visible_keys", "rows", "empty_rows",
        "nonfinite_rows", "layer", "judged", "support_size", "mean_distance",
        "entropy_with_sink_nats", "score_variance", "self_weight", "span_mass", "missed_mass",
        "visible_keys", "expected_keys", "leaked_keys", "role", "roles",
    ]  # fmt: skip
    assert head["gini"] is None
    assert len(head["normalized_entropy_histogram"]) == 32
    assert set(head["by_visible_keys"][0]) == {
        "from",
        "to",
        "rows",
        "entropy_nats",
        "normalized_entropy",
        "first_token_mass",
    }
    assert sum(bucket["rows"] for bucket in head["by_visible_keys"]) == head["rows"]
    assert site["mode"] == "eval"
    assert (site["queries"], site["keys"]) == (40, 40)


def test_the_table_gathers_the_layers_of_a_stack_though_their_sites_alternate() -> None:
    text = str(attemper.scan(sharpened(TINY["t5"].build()), [inputs("encoder-decoder", None)]))
    assert text.count("cross attention, eval") == 1
    assert text.count("self attention, eval") == 2


WRONG: dict[str, tuple[Callable[[Any], nn.Module], Any, str]] = {
    "no batch": (lambda llama: llama, [], "batches is empty"),
    "a tensor": (lambda llama: llama, torch.zeros(1), r"an iterable of batches, got one Tensor: write \[batch\]"),
    "a dict": (lambda llama: llama, {"x": 1}, r"an iterable of batches, got one dict: write \[batch\]"),
    "text": (lambda llama: llama, ["text"], r"batch 1 is str; expected a dict.* Text is tokenized first"),
    "no attention": (
        lambda _: nn.Linear(3, 3), [torch.zeros(2, 3)], r"saw no attention in Linear.*attention_statistics",
    ),
    "dropout": (
        lambda _: tf.BertModel(tf.BertConfig(**TEXT)).train(), [inputs("encoder", None)], r"call model\.eval\(\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_scanned_is_refused_with_what_to_do(name: str, llama: Any) -> None:
    made, batches, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        attemper.scan(made(llama), batches)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_scanned(dtype: torch.dtype) -> None:
    model: Any = sharpened(TINY["qwen3"].build())
    model.to(dtype).train()  # there is no dropout
    scan = attemper.scan(model, [inputs("decoder", "left")])
    assert {site.mode for site in scan.sites} == {"train"}
    assert all(head.entropy_nats is not None and head.nonfinite_rows == 0 for site in scan.sites for head in site.heads)


def _sick(change: Callable[[nn.Linear], None]) -> attemper.Scan:
    torch.manual_seed(3)
    model: Any = TINY["bert"].build().eval()
    change(model.encoder.layer[0].attention.self.query)
    return attemper.scan(model, [inputs("encoder", None)])


def kinds(scan: attemper.Scan) -> set[tuple[str, int | None, str, str]]:
    return {(alarm.site, alarm.head, alarm.kind, alarm.severity) for alarm in scan.alarms if "layer.0." in alarm.site}


def test_nan_weights_are_nonfinite_and_critical_and_the_document_has_no_nan() -> None:
    def change(query: nn.Linear) -> None:
        query.weight.data[12] = torch.nan

    scan = _sick(change)
    assert ("encoder.layer.0.attention.self", 1, "nonfinite", "critical") in kinds(scan)
    head = scan.sites[0].heads[1]
    assert (head.rows, head.nonfinite_rows, head.entropy_nats) == (0, 120, None)
    json.loads(scan.to_json(), parse_constant=lambda word: pytest.fail(f"{word} in the document"))
