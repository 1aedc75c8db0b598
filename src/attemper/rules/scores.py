"""The softcap and the sinks that a model declares are in its final scores."""

from __future__ import annotations

import math

from attemper.results.check import Rule
from attemper.rules.keys import FinalScores
from attemper.rules.session import RuleKind, Session
from attemper.text import count

CAPS = ("attn_logit_softcapping", "attn_logit_softcap")
"""How configurations call it."""


def judge(session: Session) -> Rule:
    cap = next((value for name in CAPS if (value := getattr(session.config, name, None))), None)
    with_sinks = [name for name, one in session.modules.items() if getattr(one, "sinks", None) is not None]
    said = [f"a softcap of {cap:g} ({next(n for n in CAPS if getattr(session.config, n, None))})"] if cap else []
    said += [f"sinks at {count(len(with_sinks), 'site')} (their parameters)"] if with_sinks else []
    if not said:
        return session.none("scores", "neither a softcap nor sinks are declared")
    declared, sites = " and ".join(said), session.keys.scores
    for one in sites:
        wrong = _wrong(one, cap, one.site.partition("#")[0] in with_sinks, math.sqrt(max(session.base.eps, 1e-7)))
        if wrong is not None:
            advice = "Its kernel leaves it out: take another attention implementation."
            return Rule(
                "scores", "broken", declared, _observed(sites), one.site, message=f"{one.site}: {wrong}. {advice}"
            )
    missing = [name for name in with_sinks if name not in {one.site.partition("#")[0] for one in sites}]
    if not sites or missing:
        why = (
            f"the scores of {missing[0] if missing else 'no site'} cannot be read"
            if missing
            else "no scores can be read"
        )
        reason = next(iter(session.keys.unread.values()), "")
        return Rule(
            "scores", "cannot tell", declared, _observed(sites), message=f"{why}{': ' if reason else ''}{reason}"
        )
    return Rule("scores", "kept", declared, _observed(sites), message=_observed(sites))


def _observed(sites: list[FinalScores]) -> str:
    seen = [one for one in sites if one.mismatch is not None]
    return f"read at {count(len(sites), 'site')}, and the output follows from it at {len(seen)}" if sites else "-"


def _wrong(one: FinalScores, cap: float | None, sink: bool, limit: float) -> str | None:
    if cap is not None and (one.softcap is None or abs(one.softcap - cap) > 1e-6 * cap):
        return f"its softcap is {'none' if one.softcap is None else f'{one.softcap:g}'}, declared is {cap:g}"
    if sink and not one.sink:
        return "its scores have no sink, and the model has parameters for one"
    if one.mismatch is not None and one.mismatch > limit:
        return f"its output is {one.mismatch:.3g} of its size away from what its own q, k, v give with them"
    return None


RULE = RuleKind("scores", judge)
