"""``attemper.check`` on models that are right and models that are not."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.rules import rules
from attemper.rules.perturbation import StableChoice
from attemper.sites.declared import windows_of_config
from tests.rules.public_faults import SMALL, llama, qwen

transformers = pytest.importorskip("transformers")


def ids(sequences: int = 2, tokens: int = 48) -> Tensor:
    return torch.randint(5, 90, (sequences, tokens))


def packed(*lengths: int) -> Tensor:
    """Positions of documents of these lengths, [1, T]."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def mask(tokens: int = 48, *, left: bool = False) -> Tensor:
    marks = torch.ones((2, tokens), dtype=torch.int64)
    marks[1, -10:] = 0
    return marks.flip(1) if left else marks


def verdicts(report: Any) -> dict[str, str]:
    return {rule.name: rule.verdict for rule in report.rules}


def test_documents_of_a_packed_llama_leak_with_the_default_cache_and_with_a_mask_of_ones_alone():
    model, batch = llama(num_hidden_layers=3), {"input_ids": ids(1, 64), "position_ids": packed(40, 24)}
    found = attemper.check(model, batch)["documents"]
    assert found.verdict == "broken"
    assert found.site == "model.layers.0.self_attn"
    assert found.declared == "2 documents in a sequence (position_ids of the batch, which start anew)"
    assert (found.rows, found.keys) == (24, 40)
    assert found.weight == pytest.approx(0.77, abs=0.02)
    assert found.moved == pytest.approx(1, abs=0.9)
    assert "in 24 rows, 52.5 keys are seen on average where 12.5 are declared" in found.message
    assert found.observed.startswith("seen broken at 3 sites; tested at")
    assert found.message.endswith(f"of its size. {rules.DOCUMENTS_REST}"), (
        "the batch has positions, and the model no states"
    )
    assert attemper.check(model, {**batch, "use_cache": False})["documents"].verdict == "kept"
    ones = {"use_cache": False, "attention_mask": torch.ones((1, 64), dtype=torch.int64)}
    assert attemper.check(model, {**batch, **ones})["documents"].verdict == "broken"
    del batch["position_ids"]
    found = attemper.check(model, batch, documents=packed(40, 24).eq(0).cumsum(1))["documents"]
    assert found.message.endswith(f"of its size. {rules.DOCUMENTS}")


def test_a_delta_rule_carries_its_state_into_the_next_document_and_is_named():
    batch = {"input_ids": ids(1, 48), "position_ids": packed(20, 28), "use_cache": False}
    report = attemper.check(qwen(), batch)
    found = report["documents"]
    assert (found.verdict, found.site, found.weight) == ("broken", "model.layers.0.linear_attn", None)
    assert "proved at 1 site" in found.observed  # its attention keeps documents apart
    assert report.unread["model.layers.0.linear_attn"] == "delta rule"
    assert found.message.endswith(f". {rules.DOCUMENTS_STATE}"), "the states alone carry other documents"
    leaking = attemper.check(qwen(), {**batch, "use_cache": True})
    assert leaking["documents"].message.endswith(f". {rules.DOCUMENTS_REST} {rules.DOCUMENTS_STATE}")
    assert [rule.name for rule in report.broken] == ["documents"]


@pytest.mark.quick("True")
@pytest.mark.parametrize("left", [False, True])
def test_a_padded_batch_is_kept_on_either_side(left: bool):
    report = attemper.check(llama(), {"input_ids": ids(), "attention_mask": mask(left=left)})
    expected = {"causal": "kept", "documents": "not declared", "padding": "kept", "window": "not declared"}
    expected |= {"batch": "kept", "cache": "kept", "repeat": "kept", "scores": "not declared"}
    assert verdicts(report) == expected
    assert report["padding"].declared == "10 padded of 96 (attention_mask of the batch)"
    assert report["padding"].observed == "proved at 2 sites; tested at 3 cuts (3 forward passes)"
    report.raise_if_broken()


def test_a_bool_mask_that_eager_attention_adds_to_its_scores_hides_nothing():
    """Eager attention of transformers adds a bool mask as 0 and 1; SDPA reads it as a mask."""
    seen = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    batch = {"input_ids": ids(1, 40), "attention_mask": seen, "use_cache": False}
    assert attemper.check(llama(attn_implementation="sdpa"), batch)["causal"].verdict == "kept"
    found = attemper.check(llama(attn_implementation="eager"), batch)["causal"]
    assert (found.verdict, found.site, found.keys) == ("broken", "model.layers.0.self_attn", None)
    assert "transformers' eager attention adds as 0 and 1, so that it hides nothing" in found.message


@pytest.mark.quick("Electra")
@pytest.mark.parametrize("name", ["Bert", "Electra"])
def test_an_encoder_with_absolute_positions_is_blamed_for_padding_on_the_left_alone(name: str):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(vocab_size=100, max_position_embeddings=128, **sizes)
    model = getattr(transformers, f"{name}Model")(config).eval()
    attemper.check(model, {"input_ids": ids(), "attention_mask": mask()}).raise_if_broken()
    report = attemper.check(model, {"input_ids": ids(), "attention_mask": mask(left=True)})
    found = report["padding"]
    assert [rule.name for rule in report.broken] == ["padding"]
    assert (found.site, found.keys) == ("embeddings.position_embeddings", None)
    assert found.observed.startswith("proved at 2 sites")  # no mask is at fault, and none is named
    assert "adding padding on the left" in found.message
    assert found.message.endswith(f". {rules.POSITIONS}")


class CountsFromTwo(nn.Module):
    """Has absolute positions that begin with 2 after padding, by the ids, as Kosmos-2.5; those it is given stand."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(100, 16), nn.Embedding(100, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        own = attention_mask.cumsum(1) * attention_mask + 1
        states = self.embedding(ids) + self.places(own if position_ids is None else position_ids)
        return self.layer(states, src_key_padding_mask=attention_mask == 0)


def test_positions_that_a_model_does_not_count_from_0_are_not_given_to_it():
    model, batch = CountsFromTwo().eval(), {"ids": ids(), "attention_mask": mask()}
    found = attemper.check(model, batch)["padding"]
    assert found.verdict == "kept"
    assert "padding added on the left (the model's own positions do not count from 0)" in found.message
    assert attemper.check(model, {"ids": ids(), "attention_mask": mask(left=True)})["padding"].verdict == "kept"


def test_an_encoder_decoder_is_causal_on_one_side_alone():
    sizes = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    batch = {"input_ids": ids(), "attention_mask": mask(), "decoder_input_ids": ids(2, 30)}
    report = attemper.check(model, batch)
    # Attention of the oldest transformers that are claimed does not say whether it is causal.
    told = hasattr(model.decoder.block[0].layer[0].SelfAttention, "is_causal")
    causal = ("kept", "proved at 2 sites") if told else ("not declared", "-")
    assert (report["causal"].verdict, report["causal"].observed[:17]) == causal
    assert (report["padding"].verdict, report["padding"].observed[:17]) == ("kept", "proved at 4 sites")  # cross, too
    assert not report.broken


def test_torch_layers_keep_and_break_what_is_declared_of_them():
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
    )
    causal, states = nn.Transformer.generate_square_subsequent_mask(24), torch.randn(2, 24, 32)
    report = attemper.check(model.eval(), {"src": states, "mask": causal, "is_causal": True})
    assert (report["causal"].verdict, report["causal"].declared) == ("kept", "is_causal of the batch")
    hidden = torch.zeros((2, 24), dtype=torch.bool)
    hidden[1, 18:] = True
    assert attemper.check(model, {"src": states, "src_key_padding_mask": hidden})["padding"].verdict == "kept"
    found = attemper.check(model, states, causal=True)["causal"]
    assert (found.verdict, found.site, found.declared) == ("broken", "layers.0.self_attn", "causal=")
    leak = attemper.check(model, states, documents=torch.tensor([[0] * 10 + [1] * 14] * 2))["documents"]
    assert (leak.verdict, leak.site) == ("broken", "layers.0.self_attn")


class Mixer(nn.Module):
    """A language model whose tokens are mixed by one layer."""

    def __init__(self, layer: nn.Module, vocabulary: int = 100, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(vocabulary, width), layer

    def forward(self, ids: Tensor) -> Tensor:
        states = self.layer(self.embedding(ids))
        return states[0] if isinstance(states, tuple) else states


class Attention(nn.Module):
    """Attention that is written by hand, over keys of at most ``ahead`` places behind a row's own, ``back`` before."""

    def __init__(self, ahead: int = 0, back: int = 1000, width: int = 16) -> None:
        super().__init__()
        self.project, self.ahead, self.back = nn.Linear(width, 3 * width), ahead, back

    def forward(self, states: Tensor) -> Tensor:
        query, key, value = self.project(states).chunk(3, -1)
        distance = torch.arange(states.shape[1]) - torch.arange(states.shape[1])[:, None]
        hidden = (distance > self.ahead) | (distance < -self.back)
        scores = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ value


class Normalized(nn.Module):
    """A norm over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, states: Tensor) -> Tensor:
        return self.norm(states.transpose(1, 2)).transpose(1, 2)


class Noisy(nn.Linear):
    """Dropout that nobody turns off."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(input), 0.3)


class Result:
    """What a model gives as an object of its own."""

    def __init__(self, states: Tensor) -> None:
        self.states = states


class Bare(nn.Module):
    """Tokens that see later ones, without a part that is looked at; ``given``: how it gives what it found."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.table, self.given = nn.Parameter(torch.randn(100, 16)), given

    def forward(self, ids: Tensor) -> Any:
        states = self.table[ids]
        return self.given(states + states.flip(1))


@pytest.mark.parametrize("given", [Result, lambda states: states.flatten(0, 1), lambda states: [states]])
def test_what_a_model_gives_is_compared_in_whatever_form_it_is(given: Any):
    found = attemper.check(Bare(given).eval(), ids(), causal=True)["causal"]
    assert (found.verdict, found.site) == ("broken", "the output")


class Later(nn.Module):
    """A block that ``sees`` later tokens or does not; ``given``: the form of what it gives."""

    def __init__(self, given: Any, *, sees: bool) -> None:
        super().__init__()
        self.project, self.given, self.sees = nn.Linear(16, 16), given, sees

    def forward(self, states: Tensor) -> Any:
        own = self.project(states)
        return self.given(own + own.flip(1) if self.sees else own)


def _states(given: Any) -> Tensor:
    """The states that a block gave, in whatever form."""
    if isinstance(given, Result):
        return given.states
    parts = list(given.values()) if isinstance(given, dict) else list(given)
    return next(one for one in parts[::-1] if one is not None)


class Stack(nn.Module):
    """Three blocks, of which the second sees later tokens."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.layers = nn.ModuleList(Later(given, sees=layer == 1) for layer in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embedding(ids)
        for layer in self.layers:
            states = _states(layer(states))
        return states


FORMS = {
    "tuple": lambda states: (states, None),
    "weights first": lambda states: (torch.zeros(2, 4, 48, 48), states),
    "dict": lambda states: {"states": states},
    "list": lambda states: [states],
    "object": Result,
    "output of transformers": lambda states: transformers.utils.ModelOutput(states=states),
}


@pytest.mark.quick("weights first", "dict", "object")
@pytest.mark.parametrize("form", list(FORMS))
def test_the_first_block_is_named_whatever_blocks_give(form: str):
    found = attemper.check(Stack(FORMS[form]).eval(), ids(), causal=True)["causal"]
    assert (found.verdict, found.site) == ("broken", "layers.1")


@pytest.mark.quick("Falcon")
@pytest.mark.parametrize("name", ["Falcon", "GPTNeo"])
def test_blocks_of_a_model_outside_the_registry_are_looked_at_one_by_one(name: str):
    """Its attention was seen all the same, so that nothing of it is unread."""
    sizes = {"hidden_size": 32, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}
    own = {"num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "GPTNeo":
        own = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8}
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes, **own)).eval()
    assert not attemper.check(model, {"input_ids": ids(), "use_cache": False}).unread
    model.transformer.h[1].register_forward_hook(lambda _, args, out: (out[0] + out[0].mean(0, keepdim=True), *out[1:]))
    found = attemper.check(model, {"input_ids": ids(), "use_cache": False})["batch"]
    assert (found.verdict, found.site) == ("broken", "transformer.h.1")


def test_layers_of_a_model_that_is_unread_as_a_whole_are_looked_at():
    """Nystromformer begins its inverse with the largest sum of the whole batch, so that sequences do move each other:
    the output of its own code in float64, too.
    """
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.NystromformerConfig(**sizes, segment_means_seq_len=48, num_landmarks=8)
    model, batch = transformers.NystromformerForMaskedLM(config).eval().double(), ids()
    for parameter in (one for one in model.parameters() if one.dim() > 1):
        nn.init.normal_(parameter, std=0.25)
    with torch.no_grad():
        alone, beside = torch.cat([model(one[None]).logits for one in batch]), model(batch).logits
    assert (alone - beside).norm() > 1e-3 * beside.norm()
    found = attemper.check(model, {"input_ids": batch})["batch"]
    assert (found.verdict, found.site) == ("broken", "nystromformer.encoder.layer.0.attention.self")


def test_what_cannot_be_compared_is_not_kept():
    report = attemper.check(Bare(lambda states: states.sum()).eval(), ids(), causal=True)
    for name in ("causal", "batch", "repeat"):
        assert report[name].verdict == "cannot tell"
        assert report[name].message == "nothing that the model gives has a row for each token"


def test_attention_by_hand_is_read_and_a_key_too_many_is_one():
    assert attemper.check(Mixer(Attention()).eval(), ids(), causal=True)["causal"].verdict == "kept"
    found = attemper.check(Mixer(Attention(ahead=1)).eval(), ids(), causal=True)["causal"]
    assert (found.verdict, found.site, found.keys) == ("broken", "layer", 1)
    report = attemper.check(Mixer(Attention(back=7)).eval(), ids(), causal=True, window=8)
    assert report["window"].verdict == "kept"
    assert report["window"].observed == "proved at 1 site; tested at 1 cut (1 forward pass)"
    for back in (6, 8):
        found = attemper.check(Mixer(Attention(back=back)).eval(), ids(), causal=True, window=8)["window"]
        assert (found.verdict, found.site, found.rows) == ("broken", "layer", 2 * (48 - min(back + 1, 8)))


class Near(nn.Module):
    """What mixes tokens without weights to read: means of ``back`` rows before a row, ``ahead`` behind it, and it."""

    def __init__(self, back: int, ahead: int = 0) -> None:
        super().__init__()
        self.project, self.back, self.ahead = nn.Linear(16, 16), back, ahead

    def forward(self, states: Tensor) -> Tensor:
        distance = torch.arange(states.shape[1]) - torch.arange(states.shape[1])[:, None]
        near = ((distance >= -self.back) & (distance <= self.ahead)).float()
        return states + near @ self.project(states) / near.sum(1, keepdim=True)


@pytest.mark.quick("layers0", "layers2", "layers5")
@pytest.mark.parametrize(
    ("layers", "causal", "wrong"),
    [
        ([(7, 0), (7, 0), (7, 0)], True, None),
        ([(8, 8), (8, 8), (8, 8)], False, None),
        ([(5, 0), (8, 0), (7, 0)], True, "layer.1"),
        ([(7, 0), (4, 0), (8, 0)], True, "layer.2"),
        ([(7, 7), (9, 7), (7, 7)], False, "layer.1"),
        ([(7, 7), (7, 7), (7, 9)], False, "layer.2"),
    ],
)
def test_a_window_that_is_too_wide_behind_a_narrower_one_is_named(layers: Any, causal: bool, wrong: str | None):
    model = Mixer(nn.Sequential(*(Near(*one) for one in layers)))
    found = attemper.check(model.eval(), ids(), causal=causal, window=8)["window"]
    assert (found.verdict, found.site) == ("broken" if wrong else "kept", wrong)
    assert found.forwards == 1 + (not causal)


class Looped(nn.Module):
    """One layer that runs again and again."""

    def __init__(self, layer: nn.Module, times: int) -> None:
        super().__init__()
        self.layers, self.times = nn.ModuleList([layer]), times

    def forward(self, states: Tensor) -> Tensor:
        for _ in range(self.times):
            states = self.layers[0](states)
        return states


@pytest.mark.parametrize("times", [2, 3])
def test_each_call_of_a_shared_layer_reaches_further_than_the_one_before(times: int):
    found = attemper.check(Mixer(Looped(Attention(back=3), times)).eval(), ids(), causal=True, window=4)["window"]
    assert found.verdict == "kept"
    wrong = attemper.check(Mixer(Looped(Attention(back=5), times)).eval(), ids(), causal=True, window=4)["window"]
    assert wrong.verdict == "broken"


class SequencesLast(nn.Module):
    """Attention of torch that has its tokens first, inside."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)

    def forward(self, states: Tensor) -> Tensor:
        own = states.transpose(0, 1)
        hidden = torch.ones(len(own), len(own), dtype=torch.bool).triu(1)
        return self.attention(own, own, own, attn_mask=hidden, need_weights=False)[0].transpose(0, 1)


def test_a_batch_of_as_many_sequences_as_tokens_is_read_the_right_way_round():
    report = attemper.check(Mixer(SequencesLast()).eval(), ids(12, 12), causal=True)
    assert [rule.name for rule in report.rules if rule.verdict == "kept"] == ["causal", "batch", "repeat"]


def test_rows_lack_no_key_that_nothing_declares_they_see():
    """A causal model that does not say so, and a mask of the batch's own beside a window of the configuration."""
    assert attemper.check(Mixer(Attention(back=7)).eval(), ids(), window=8)["window"].verdict == "kept"
    config = transformers.MistralConfig(**SMALL, sliding_window=16, attn_implementation="sdpa")
    documents = packed(20, 28).eq(0).cumsum(1)
    seen = (documents[:, :, None] == documents[:, None]) & torch.ones(48, 48, dtype=torch.bool).tril().triu(-15)
    batch = {"input_ids": ids(1), "attention_mask": seen[:, None], "use_cache": False}
    report = attemper.check(transformers.MistralForCausalLM(config).eval(), batch, documents=documents)
    assert (report["window"].verdict, report["documents"].verdict) == ("kept", "kept")


def test_a_recurrent_layer_is_tested_by_exchanging_tokens_alone():
    documents = packed(20, 28).eq(0).cumsum(1).expand(2, -1)
    report = attemper.check(Mixer(nn.GRU(16, 16, batch_first=True)).eval(), ids(), causal=True, documents=documents)
    assert (report["causal"].verdict, report["causal"].observed) == ("kept", "tested at 3 cuts (3 forward passes)")
    assert (report["documents"].verdict, report["documents"].site) == ("broken", "layer")
    both = Mixer(nn.GRU(16, 16, batch_first=True, bidirectional=True)).eval()
    assert attemper.check(both, ids(), causal=True)["causal"].verdict == "broken"


def test_a_batch_norm_in_training_mode_mixes_sequences_and_its_statistics_are_put_back():
    model = Mixer(Normalized())
    before = {name: part.clone() for name, part in model.state_dict().items()}
    found = attemper.check(model.train(), ids())["batch"]
    assert (found.verdict, found.site) == ("broken", "layer.norm")
    assert all(torch.equal(before[name], part) for name, part in model.state_dict().items())
    assert attemper.check(model.eval(), ids())["batch"].verdict == "kept"


class Experts(nn.Module):
    """Two experts, each of which takes at most ``capacity`` tokens of the batch, the first that chose it."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 2), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.capacity = capacity

    def forward(self, states: Tensor) -> Tensor:
        tokens = states.flatten(0, 1)
        chosen, mixed = self.router(tokens).argmax(-1), tokens.clone()
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero()[: self.capacity, 0]
            mixed[places] = expert(tokens[places])
        return mixed.view_as(states)


def test_experts_that_take_as_many_tokens_of_other_sequences_are_given_tokens_that_are_all_alike(full_size: bool):
    """Exchanged for others one by one, they leave half of these models with counts that change nothing."""
    for _ in range(8 if full_size else 2):
        full, batch = Experts(36), ids(3)
        report = attemper.check(Mixer(full).eval(), batch)
        assert (report["batch"].verdict, report["batch"].site, report["batch"].forwards) == ("broken", "layer", 4)
        full.capacity = batch.numel()
        assert attemper.check(Mixer(full).eval(), batch)["batch"].verdict == "kept"
        states = {"states": torch.randn(3, 24, 16)}
        full.capacity = 18
        assert attemper.check(full, states)["batch"].verdict == "broken"


class Chosen(nn.Module):
    """Each row sees the mean of the earlier rows that an indexer scores highest; ReLU scores most of them 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.embedding(ids)
        scores = (states @ states.transpose(1, 2) - 9).relu()
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1) | (attention_mask[:, None] == 0)
        chosen = scores.masked_fill(hidden, -torch.inf).topk(9, dim=-1).indices
        marks = torch.zeros_like(scores).scatter(-1, chosen, 1.0).masked_fill(hidden, 0.0)
        return states + marks @ states / marks.sum(-1, keepdim=True).clamp(min=1)


def test_keys_that_an_indexer_scores_alike_are_chosen_in_one_order():
    """topk takes any of them, by the number of all: padding on the right made GLM 5 choose other keys."""
    report = attemper.check(Chosen().eval(), {"ids": ids(2, 96), "attention_mask": mask(96)}, causal=True)
    assert (report["padding"].verdict, report["causal"].verdict) == ("kept", "kept")
    states = torch.tensor([[0.0, 3.0, 0.0, 0.0, 1.0, 0.0]])
    with StableChoice():
        assert states.topk(4).indices.tolist() == torch.topk(states, k=4, dim=1).indices.tolist() == [[1, 4, 0, 2]]
        assert states.topk(2, largest=False).values.tolist() == [[0.0, 0.0]]
        assert torch.tensor(3.0).topk(1).values == 3


class AmongOthers(transformers.LlamaForCausalLM):
    """Takes ``use_cache`` among other arguments, as Qwen3-VL does."""

    def forward(self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, past_key_values=past_key_values, **kwargs)


def test_a_cache_that_is_turned_on_by_an_argument_without_a_name_is_tested():
    model = AmongOthers(transformers.LlamaConfig(**SMALL)).eval()
    assert attemper.check(model, {"input_ids": ids()})["cache"].verdict == "kept"


def test_random_numbers_break_one_rule_and_leave_the_others_to_be_tested():
    model, batch, state = Mixer(Noisy(16, 16)).eval(), ids(), torch.get_rng_state()
    report = attemper.check(model, batch, causal=True)
    assert torch.equal(state, torch.get_rng_state())
    assert [rule.name for rule in report.broken] == ["repeat"]
    assert report["causal"].verdict == "kept"


class Carried(nn.Module):
    """A recurrent layer that goes on where the pass before it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.GRU(16, 16, batch_first=True), None

    def forward(self, states: Tensor) -> Tensor:
        fits = self.state is not None and self.state.shape[1] == len(states)
        states, self.state = self.layer(states, self.state if fits else None)
        return states


def test_each_pass_begins_with_what_the_model_had_stored_before_the_check():
    model = Mixer(Carried()).eval()
    report = attemper.check(model, ids(), causal=True)
    assert model.layer.state is None
    assert [rule.name for rule in report.broken] == ["repeat"]
    assert report["repeat"].message.endswith("or it stores in one pass what the next one reads.")
    assert (report["causal"].verdict, report["batch"].verdict) == ("kept", "kept")


@pytest.mark.parametrize("sequences", [1, 2])
def test_positions_of_an_earlier_batch_with_pictures_do_not_count_for_a_cache(sequences: int):
    """Qwen2.5-VL adds the stored offset of its pictures in each pass with a cache; generate begins it anew."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    sizes = {**SMALL, "vocab_size": 120, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 2}
    sight = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
    sight |= {"out_hidden_size": 32, "fullatt_block_indexes": [0], "window_size": 16}
    marks = {"image_token_id": 101, "video_token_id": 102, "vision_start_token_id": 103, "vision_end_token_id": 104}
    config = transformers.Qwen2_5_VLConfig(text_config=sizes, vision_config=sight, **marks)
    model, tokens = transformers.Qwen2_5_VLForConditionalGeneration(config).eval(), ids(sequences, 30)
    tokens[:, 3:9] = torch.tensor([103, 101, 101, 101, 101, 104])
    picture = {"pixel_values": torch.randn(16 * sequences, 96), "image_grid_thw": torch.tensor([[1, 4, 4]] * sequences)}
    batch = {"input_ids": tokens, **picture, "mm_token_type_ids": (tokens == 101).int()}
    report = attemper.check(model, batch)
    assert (report["cache"].verdict, report.broken) == ("kept", ())
    with torch.no_grad():
        model(**batch)
    stored = model.model.rope_deltas
    assert stored.abs().min() > 0
    for one in (model, model.model):
        assert attemper.check(one, {"input_ids": ids(2, 30)})["cache"].verdict == "kept"
        assert model.model.rope_deltas is stored


@pytest.mark.slow("takes seconds")
def test_windows_of_a_configuration_hold_at_layers_with_one_and_without():
    config = transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=8, sliding_window_pattern=2)
    model = transformers.Gemma3ForCausalLM(config).eval()
    report = attemper.check(model, {"input_ids": ids(), "attention_mask": mask(), "use_cache": False})
    assert (report["window"].verdict, report["window"].declared) == ("kept", "8 keys (config.layer_types)")
    short = {"input_ids": ids(2, 8), "use_cache": False}
    assert attemper.check(model, short)["window"].message == "the window is not shorter than the 8 tokens of the batch"
    assert not report.broken


@pytest.mark.parametrize(
    ("kinds", "verdict", "said"),
    [
        (["sliding_attention", "of_another_kind"], "kept", "no window is known of layers of the kind of_another_kind"),
        (["full_attention", "of_another_kind"], "broken", "in 80 rows, 8 keys are seen on average where 28.5 are"),
        (["of_another_kind"] * 2, "not declared", "no window is known of layers of the kind of_another_kind"),
        (["sliding_attention"], "kept", "config.layer_types has no entry for layer 1"),
    ],
)
def test_layers_of_which_no_window_is_known_are_named_and_the_others_judged(kinds: Any, verdict: str, said: str):
    """DeepSeek V4's layers see a window and pooled keys: their kind says neither."""
    config = transformers.MistralConfig(**SMALL, sliding_window=8)
    config.layer_types = kinds  # Mistral itself gives all layers a window
    model = transformers.MistralForCausalLM(config).eval()
    found = attemper.check(model, {"input_ids": ids(), "use_cache": False})["window"]
    assert found.verdict == verdict
    assert said in found.message
    if verdict == "kept":
        assert found.observed == f"proved at 1 site; not tested: {said}"


def test_a_layer_without_a_configuration_of_its_own_has_no_window_that_is_known():
    each = SimpleNamespace(layer_types=["full_attention"], num_hidden_layers=2)
    config = SimpleNamespace(is_heterogeneous=True, num_hidden_layers=3, per_layer_config=[each, each])
    assert windows_of_config(config)[1] == (
        None,
        "config.layer_types has no entry for layer 1",
        "config.per_layer_config has no entry for layer 2",
    )


@pytest.mark.slow("takes seconds")
def test_chunks_are_counted_from_where_each_document_begins():
    """As Llama 4 of transformers does for packed positions: each document sees what it sees alone."""
    sizes = {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 8}
    kinds = {"layer_types": ["chunked_attention", "full_attention"]}
    config = transformers.Llama4TextConfig(**{**SMALL, **sizes, **kinds}, attn_temperature_tuning=False)
    model, places = transformers.Llama4ForCausalLM(config).eval(), packed(20, 28)
    batch = {"input_ids": ids(1), "position_ids": places, "use_cache": False}
    report = attemper.check(model, batch)
    assert (report["window"].verdict, report["documents"].verdict) == ("kept", "kept")
    with torch.no_grad():
        alone = model(batch["input_ids"][:, 20:], use_cache=False).logits
        assert torch.allclose(alone, model(**batch).logits[:, 20:], atol=1e-5)
    at = torch.arange(48)
    seen = (at[:, None] >= at) & (at[:, None] // 8 == at // 8)  # from where the pack begins
    wrong = {"attention_mask": dict.fromkeys(("chunked_attention", "full_attention"), seen[None, None])}
    assert attemper.check(model, {**batch, **wrong})["window"].verdict == "broken"


def test_a_softcap_and_sinks_are_read_from_the_final_scores():
    config = transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=8, attn_implementation="eager")
    model = transformers.Gemma2ForCausalLM(config).eval()
    assert attemper.check(model, {"input_ids": ids(), "use_cache": False})["scores"].verdict == "kept"
    model.model.layers[1].self_attn.attn_logit_softcapping = None
    found = attemper.check(model, {"input_ids": ids(), "use_cache": False})["scores"]
    assert (found.verdict, found.site) == ("broken", "model.layers.1.self_attn")
    assert "its softcap is none, declared is 50" in found.message


@pytest.mark.slow("compiles a model for several shapes")
def test_a_compiled_model_is_checked_as_it_was_written_and_as_it_runs():
    wrong, right = (Mixer(Attention(ahead)).eval() for ahead in (1, 0))
    compiled: Any = torch.compile(wrong, backend="eager")
    found = attemper.check(compiled, ids(), causal=True)["causal"]
    assert (found.verdict, found.site) == ("broken", "layer")
    compiled = torch.compile(right, backend="eager")
    kept = attemper.check(compiled, ids(), causal=True)["causal"]
    assert (kept.verdict, kept.observed) == ("kept", "proved at 1 site; tested at 3 cuts (6 forward passes)")


def test_bad_input_is_one_clear_line():
    model = Mixer(Attention()).eval()
    alone = attemper.check(Mixer(Attention(), vocabulary=1).eval(), torch.zeros((2, 8), dtype=torch.int64), causal=True)
    assert (alone["causal"].verdict, alone["batch"].verdict) == ("kept", "cannot tell")
    assert alone["batch"].message == "ids cannot be exchanged: the vocabulary has one"
    nothing = attemper.check(model, ids())
    assert {rule.message for rule in nothing.unproved} == {
        "nothing declares it",
        "the model has no cache",
        "neither a softcap nor sinks are declared",
    }
    for wrong, said in (
        ({"documents": torch.zeros((2, 7), dtype=torch.int64)}, r"whole numbers \[2, 48\], or cu_seqlens"),
        ({"documents": torch.zeros(2, 48)}, r"got \[2, 48\] torch.float32"),
        ({"documents": [40, 8]}, r"got list\. Pass torch\.tensor\(\[0, 40, 48\]\), where each document begins"),
        ({"documents": torch.tensor([40, 8])}, r"torch.int64\. Pass torch\.tensor\(\[0, 40, 48\]\)"),
        ({"documents": (0, 40, 48)}, r"got tuple\. Pass torch\.tensor\(\[0, 40, 48\]\)"),
        ({"documents": [0, 30, 20, 48]}, r"documents= must be sorted: entry 2 is 20, and the one before it is 30\."),
        ({"documents": torch.tensor([0, 50, 48])}, r"entry 2 is 48, and the one before it is 50\. cu_seqlens say"),
        ({"documents": [40, 9]}, r"got list\.$"),
        ({"documents": ["a"]}, r"got list\.$"),
        ({"padding": torch.ones(2, 47, dtype=torch.int64)}, r"1 for a token and 0 for padding; got \[2, 47\]"),
        ({"window": 0}, "an int of at least 1; got 0"),
        ({"causal": "yes"}, "must be True, False or None, got 'yes'"),
    ):
        given: Any = wrong
        with pytest.raises(attemper.InputError, match=said):
            attemper.check(model, ids(), **given)
    packs: Any = {"ids": ids(1), "cu_seq_lens_q": torch.tensor([0, 30, 20, 48])}
    name: Any = "gpt2"
    for one, batch, said in (
        (model, packs, r"cu_seq_lens_q of the batch must be sorted: entry 2 is 20"),
        (name, ids(), r"must be a torch.nn.Module, got str"),
        (model, "text", r"must be a dict .* got str"),
        (nn.TransformerEncoderLayer(16, 2), torch.zeros(3, 2, 16), "takes tokens first: make it with batch_first=True"),
        (model, [{"input_ids": ids()}], r"takes one batch, .*: pass one dict\.$"),
        (model, ({"input_ids": ids()},), r"takes one batch, .*: pass one dict\.$"),
        (model, {"labels": torch.zeros(2)}, "holds no tokens"),
    ):
        with pytest.raises(attemper.InputError, match=said):
            attemper.check(one, batch)


def test_a_report_is_json_a_page_and_an_error(tmp_path: Any):
    report = attemper.check(Mixer(Attention(ahead=1)).eval(), ids(), causal=True, name="mine")
    with pytest.raises(AssertionError, match=r"(?s)mine breaks what is declared.*causal: layer: in 94 rows"):
        report.raise_if_broken()
    document = json.loads(report.to_json(tmp_path / "check.json"))
    assert json.loads((tmp_path / "check.json").read_text("utf-8")) == document
    assert [rule["verdict"] for rule in document["rules"]] == list(verdicts(report).values())
    page = report.to_html(tmp_path / "check.html").read_text("utf-8")
    assert "1 rule is broken" in page
    assert "later tokens" in page
    assert str(report).startswith("mine: tokens 2 x 48, 11 forward passes")
