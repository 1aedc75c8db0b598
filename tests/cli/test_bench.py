"""``attemper bench`` as a person meets it: sentences or JSON alone on stdout, mistakes told before the timing."""

from __future__ import annotations

import json
from functools import partial
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attemper.bench.timing import quotients
from tests.support.command import Run, bad_usage


@pytest.fixture
def command(run: Run):
    before = torch.get_num_threads()
    yield partial(run, "bench")
    torch.set_num_threads(before)


def test_every_ratio_is_told_in_a_sentence(command):
    ended = command("--shape", "1,2,32,16", "--backend", "blocked", "--quick")
    assert ended.code == 0, ended.err
    machine, full, causal = ended.out.strip().split("\n\n")
    assert f"torch {torch.__version__}" in machine
    assert full.startswith("1,2,32,16 float32, forward, full: attention with every statistic of one pass takes ")
    assert causal.startswith("1,2,32,16 float32, forward, causal: ")
    assert "A ratio is the median over the rounds of our time divided by the other's of the same round" in machine
    assert full.count(" by round.") == 4
    for words in (
        "on backend blocked",
        " times PyTorch's attention, without statistics (",
        " times entropy out of two calls of PyTorch's attention (",
        " times attention and entropy written by hand (",
        " times the same call that asks for no statistic (",
        "Against float64 the output was off by at most ",
    ):
        assert words in full
    assert ended.err.splitlines() == ["1 of 2: 1,2,32,16, forward, full", "2 of 2: 1,2,32,16, forward, causal"]


@given(rounds=st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1))
def test_the_quotient_of_two_medians_lies_between_the_quotients_of_the_rounds(rounds: list[tuple[float, float]]):
    ours, other = map(list, zip(*rounds, strict=True))
    found = quotients(ours, other)
    least, largest = min(found), max(found)
    assert least * (1 - 1e-12) <= median(ours) / median(other) <= largest * (1 + 1e-12)


def test_json_stands_alone_on_stdout(command):
    shapes = ("--shape", "2,4,2,1,32,16", "--shape", "1,2,24,16")
    options = ("--mode", "full", "--backend", "blocked", "--dtype", "bfloat16", "--threads", 1, "--pairs", 3)
    ended = command(*shapes, *options, "--json")
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["schema"] == 1
    decode, plain = document["rows"]
    assert decode["shape"] | {"keys": 32, "groups": 2, "queries": 1, "dtype": "bfloat16"} == decode["shape"]
    assert "sdpa_packed_heads" in decode["ratios"]
    assert "eager_entropy" in plain["ratios"]
    assert plain["machine"]["threads"] == 1
    assert plain["pairs"] == 3
    assert all(ratio > 0 for ratio in plain["ratios"].values())
    for name, (least, largest) in plain["ratio_ranges"].items():
        first, third = plain["ratio_quartiles"][name]
        assert least <= first <= plain["ratios"][name] <= third <= largest
        assert least <= plain["ms"] / plain["other_ms"][name] <= largest


@pytest.mark.parametrize("asked", [("--backward",), ("--what", "backward")])
def test_backward_says_what_it_takes_along(command, asked: tuple[str, ...]):
    ended = command("--shape", "1,2,32,16", "--mode", "causal", "--backend", "blocked", "--quick", *asked)
    assert ended.code == 0, ended.err
    assert "forward + backward, causal: attention with its entropies and their gradient takes" in ended.out
    assert "two calls" not in ended.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "1,8,2048"), "a shape must be B,H,N,D"),
        (("--backend", "fast"), "backend must be 'auto' or one of"),
        (("--dtype", "float64"), "is not one of"),
        (("--pairs", 2), "--pairs"),
        (("--what", "watch", "--shape", "1,2,64,16"), "watch is timed on a fixed model"),
    ],
)
def test_mistakes_are_told_before_anything_is_timed(command, monkeypatch, arguments, message: str):
    monkeypatch.setattr("attemper.bench.attention.measure", lambda *_, **__: pytest.fail("timed"))
    bad_usage(command(*arguments), message)


def test_normalizers_are_told_with_their_support_beside_our_softmax(command):
    ended = command(
        "--what", "normalizers", "--shape", "1,2,96,16", "--mode", "causal", "--backend", "blocked", "--quick"
    )
    assert ended.code == 0, ended.err
    _, *told = ended.out.strip().split("\n\n")
    assert [words.split("causal: ")[1].split(" with")[0] for words in told] == [
        "softmax_plus_one",
        "sigmoid",
        "top-64",
        "entmax(1.25)",
        "entmax15",
        "sparsemax",
    ]
    for words in told:
        assert "times our softmax attention (" in words
        assert "of the keys have weight" in words
        assert "Against float64 the output was off by at most " in words


def test_normalizers_have_their_numbers_as_json(command):
    ended = command(
        "--what", "normalizers", "--shape", "1,2,64,16", "--mode", "full", "--quick", "--backward", "--json"
    )
    assert ended.code == 0, ended.err
    rows = json.loads(ended.out)["rows"]
    assert all(row["ratios"]["softmax"] > 0 and row["shape"]["backward"] is True for row in rows)
    support = {row["normalizer"]: row["support"] for row in rows}
    assert support["sigmoid"] == 1
    assert 0 < support["sparsemax"] < support["entmax15"] < support["entmax(1.25)"] < 1
    assert support["top-64"] == 1, "no more than 64 keys are there"


@pytest.mark.slow("takes many seconds")
def test_memory_and_watch_are_told(command):
    memory = command("--what", "memory", "--shape", "1,2,64,16", "--mode", "full")
    assert memory.code == 0, memory.err
    assert "1,2,64,16 float32, forward, full: attention with every statistic " in memory.out
    watched = command("--what", "watch", "--pairs", 3, "--json")
    assert watched.code == 0, watched.err
    (row,) = json.loads(watched.out)["rows"]
    assert set(row["ratios"]) == {"sampled", "between"}
