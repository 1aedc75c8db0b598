"""The sentence at the top: the worst first, and no more than the numbers say."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from attemper.readings.alarms import ALARMS
from attemper.readings.reading import Skipped
from attemper.report.document import towers
from attemper.report.headline import LONGEST, Verdict, distinct_warnings, verdict
from attemper.report.key_figures import first_warning, groups
from attemper.report.texts import LANGUAGES, say
from tests.report.readings import alarm, encoder_decoder, head, minilm, reading, silent, site


def sentence(found: Verdict) -> str:
    """All of it, in English."""
    return " ".join(map(say, (found.said, *found.rest)))


def test_notices_of_a_healthy_model_are_counted_and_not_called_fine() -> None:
    found = verdict(minilm())
    assert found.level == "notice"
    assert sentence(found) == (
        "No warning in 72 heads in 6 layers: 1 head is nearly one-hot, 3 heads are nearly uniform, and the largest "
        "logit is 77.25."
    )


def test_the_verdict_and_the_cards_of_alarms_say_the_same() -> None:
    """Every combination of severities: the level is that of the first card, and every card has its clause."""
    kinds = {"notice": "first_token", "warning": "logits", "critical": "nonfinite", "odd": "drifting"}
    clauses = {
        "notice": "rests on the first token", "warning": "has logits above 100", "critical": "has NaN",
        "odd": "raised the alarm “drifting”",
    }  # fmt: skip
    for severities in product(*(("", severity) for severity in kinds)):
        given = [severity for severity in severities if severity]
        alarms = tuple(alarm(kinds[severity], severity, "layer.0", 0, 1.0) for severity in given)
        one = reading(site("layer.0"), alarms=alarms)
        cards, found = groups(one, towers(one.sites)), verdict(one)
        assert len(cards) == len(given)
        assert found.level == (cards[0].level if cards else "fine")
        assert sentence(found).startswith("Nothing looks wrong") == (not cards)
        assert all(clauses[severity] in sentence(found) for severity in given)


def test_the_largest_logit_of_sampled_rows_is_a_bound() -> None:
    alarms = (alarm("logits", "warning", "layer.0", 1, 143.25),)
    warned = sentence(verdict(reading(site("layer.0"), alarms=alarms, sampled_rows=64)))
    assert warned == "1 head has logits above 100, the largest at least 143.2."
    calm = sentence(verdict(reading(site("layer.0", 1), sampled_rows=64)))
    assert calm == "Nothing looks wrong in 1 head in 1 layer; the largest logit is at least 10."


def test_a_critical_alarm_comes_first_and_says_where_it_begins() -> None:
    found = verdict(encoder_decoder())
    assert found.level == "critical"
    assert sentence(found) == (
        "1 head has NaN or infinite scores, in decoder.block.0.layer.1.EncDecAttention and 2 heads have logits above "
        "100, the largest 143.2. Besides, 8 heads rest on the first token. 8 heads have no valid row. 1 module was "
        "skipped and not measured."
    )
    assert len(str(say(found.said))) <= LONGEST


def test_heads_that_are_all_broken_are_critical_not_empty() -> None:
    broken = replace(silent("layer.0", 1), heads=(head(0, None, nonfinite_rows=5),))
    found = verdict(reading(broken, alarms=(alarm("nonfinite", "critical", "layer.0", 0, 5.0),)))
    assert found.level == "critical"
    assert sentence(found).startswith("1 head has NaN or infinite scores, in layer.0")


def test_nothing_measured_is_said() -> None:
    assert sentence(verdict(reading())) == "No attention was measured."
    skipped = (Skipped("a", "b"), Skipped("c", "d"))
    assert sentence(verdict(reading(skipped=skipped))) == "No attention was measured; 2 modules were skipped."
    found = verdict(reading(silent("layer.0", 4)))
    assert found.level == "empty"
    assert sentence(found) == "4 heads in 1 layer: none of them has a number, no row was valid."


def test_rows_that_see_too_few_keys_are_not_judged() -> None:
    one = head(0)
    short = replace(one, judged=False)
    found = verdict(reading(replace(site("layer.0", 1), heads=(short,)), fewest_keys=64))
    assert found.level == "unjudged"
    assert sentence(found) == (
        "1 head in 1 layer: the largest logit is 10 and 1 sees too few keys to judge sharpness (64 needed)."
    )
    found = verdict(reading(replace(site("layer.0", 2), heads=(one, replace(short, head=1)))))
    assert found.level == "fine"
    assert sentence(found).endswith("the largest logit is 10 and 1 sees too few keys to judge sharpness (32 needed).")


def test_many_kinds_of_alarms_are_counted_not_listed() -> None:
    alarms = tuple(alarm(f"kind{n}", "warning", "layer.0", 0, 1.0) for n in range(9))
    found = verdict(reading(site("layer.0"), alarms=alarms))
    assert "there are 4 more alarms" in sentence(found)
    assert "kind5" not in sentence(found)


def test_every_kind_of_alarm_has_its_clause_and_its_card() -> None:
    names = [f"layers.{layer}.attn" for layer in range(2)]
    twice = (*map(site, names), site(names[0], mode="train"))  # an alarm does not say in which mode
    for kind, many in product(ALARMS, (1, 2)):
        head = None if kind.whole else 0
        raised = tuple(alarm(kind.name, kind.severity, at, head, 0.01, step=9, since=3) for at in names[:many])
        given = reading(*twice, alarms=raised)
        subject = "" if kind.whole else "heads " if many > 1 else "head "
        assert f"{many} {subject}{kind.clause[many > 1]}" in sentence(verdict(given))
        (card,) = groups(given, towers(given.sites))
        assert (str(card.kind), card.many) == (kind.title, many)
        assert [place.site for place in card.told] == [0, 1][:many]


def test_heads_of_a_card_stand_in_the_order_in_which_their_alarms_began() -> None:
    began = {0: 30, 1: 20, 2: 20, 3: 40}
    values = {0: 120.0, 1: 130.0, 2: 300.0, 3: 900.0}
    raised = tuple(alarm("logits", "warning", "a", at, values[at], step=50, since=step) for at, step in began.items())
    given = reading(site("a"), alarms=raised)
    (card,) = groups(given, towers(given.sites))
    assert [place.head for place in (*card.told, *card.places)] == [2, 1, 0, 3], "of one step the largest first"
    assert card.order == "alarms.earliest_first"
    assert sentence(verdict(given)).startswith("4 heads have logits above 100 (the first at step 20), the largest 900.")


def test_an_alarm_that_goes_on_as_another_is_counted_once() -> None:
    raised = [alarm("falling", "warning", "a", 1, 0.3), alarm("layer_fallen", "warning", "a", None, 0.01)]
    first = replace(raised[0], ended=20, continues_as="layer_fallen", continues_since=20)
    assert distinct_warnings([first, raised[1], alarm("diffuse", "notice", "a", 0, 0.99)]) == [raised[1]]


def test_the_largest_value_of_a_run_has_a_step_of_its_own() -> None:
    """It is the largest since the warnings began, as on their cards, and not the one of the last step."""
    later = {"step": 50, "since": 20, "worst": 419.4, "worst_step": 210, "latest": 402.0, "latest_step": 299}
    raised = replace(alarm("logits", "warning", "a", 1, 120.0), **later)
    found = verdict(reading(site("a"), alarms=(raised,))).said
    assert say(found) == "1 head has logits above 100 (since step 20), the largest 419.4 at step 210."
    assert say(found, "zh") == "1 个头的 logit 过大，超过 100（自第 20 步起），最大 419.4（第 210 步）。"


@pytest.mark.parametrize(("kind", "order"), [("logits", [1, 0]), ("collapsed", [0, 1])])
def test_heads_of_a_card_of_a_scan_stand_worst_first(kind: str, order: list[int]) -> None:
    raised = tuple(alarm(kind, "warning", "a", at, value) for at, value in enumerate((0.01, 150.0)))
    given = reading(site("a"), alarms=raised)
    (card,) = groups(given, towers(given.sites))
    assert [place.head for place in card.places] == order
    assert card.order == "alarms.worst_first"


def test_an_alarm_of_the_loss_is_called_so_in_every_language() -> None:
    given = reading(site("a"), alarms=(alarm("nonfinite_loss", "critical", "loss", None, 1.0, step=9, since=3),))
    ((place,),) = (card.told for card in groups(given, towers(given.sites)))
    assert [say(place.label, one) for one in LANGUAGES] == ["Loss", "损失"]
    assert say(place.title, "zh").startswith("损失：")
    assert sentence(verdict(given)) == "1 time the loss was NaN or infinite (since step 3)."


def test_a_run_whose_warning_has_ended_is_not_called_fine() -> None:
    """Shuffled data raise the loss for good, and the alarm of the jump ends as the new loss becomes usual."""
    rang = replace(alarm("loss_spike", "warning", "loss", None, 9.0), since=182, ended=192)
    found = verdict(reading(site("layer.0")), (rang,))
    assert found.level == "notice"
    assert sentence(found) == (
        "1 earlier warning has ended, at step 192 (loss has jumped). No warning now; the largest logit is 17.5."
    )


@pytest.mark.parametrize(("heads", "label"), [(1, "a · 0"), (3, "a · 2 and 2 more")])
def test_the_first_warning_is_of_the_worst_head_and_says_how_many_began_with_it(heads: int, label: str) -> None:
    raised = tuple(alarm("logits", "warning", "a", at, 110.0 + at, step=9, since=9) for at in range(heads))
    later = alarm("logits", "warning", "a", 3, 900.0, step=12, since=12)
    given = reading(site("a"), alarms=(*raised, later))
    first = first_warning(given, towers(given.sites), given.alarms)
    assert first is not None
    assert first.place is not None
    assert say(first.place.label, "en") == label
