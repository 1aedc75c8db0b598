"""The softcap and the sinks that a model declares are in its final scores."""

from __future__ import annotations

import math

from attemper.results.check import Rule
from attemper.rules.keys import FinalScores
from attemper.rules.session import NotDeclaredError, RuleKind, Session, Tests
from attemper.text import count

CAPS = ("attn_logit_softcapping", "attn_logit_softcap")
"""How configurations call it."""


def judge(session: Session, tests: Tests) -> Rule:
    cap = next((value for name in CAPS if (value := getattr(session.config, name, None))), None)
    with_sinks = {name for name, one in session.modules.items() if getattr(one, "sinks", None) is not None}
    said = [f"a softcap of {cap:g} (config)"] if cap else []
    said += [f"sinks at {count(len(with_sinks), 'site')} (parameters of the model)"] if with_sinks else []
    if not said:
        raise NotDeclaredError("neither a softcap nor sinks are declared")
    sites = {one.site.partition("#")[0]: one for one in session.keys.scores}
    seen = sum(one.mismatch is not None for one in sites.values())
    observed = f"read at {count(len(sites), 'site')}, and the output follows from it at {seen}" if sites else "-"
    limit = math.sqrt(max(session.base.eps, 1e-7))
    wrong = ((name, _wrong(one, cap, name in with_sinks, limit)) for name, one in sites.items())
    site, why = next(((name, why) for name, why in wrong if why is not None), (None, None))
    declared = " and ".join(said)
    if why is not None:
        return Rule("scores", "broken", declared, observed, site, message=f"{site}: {why}. {RULE.advice}")
    missing = sorted(with_sinks - sites.keys())
    if missing or not sites:
        reason = next(iter(session.keys.unread.values()), "no attention was seen")
        message = f"the scores of {missing[0] if missing else 'the model'} cannot be read: {reason}"
        return Rule("scores", "cannot tell", declared, observed, message=message)
    return Rule("scores", "kept", declared, observed, message=observed)


def _wrong(one: FinalScores, cap: float | None, sink: bool, limit: float) -> str | None:
    if cap is not None and (one.softcap is None or abs(one.softcap - cap) > 1e-6 * cap):
        return f"its softcap is {'none' if one.softcap is None else f'{one.softcap:g}'}, declared is {cap:g}"
    if sink and not one.sink:
        return "its scores have no sink, and the model has parameters for one"
    if one.mismatch is not None and one.mismatch > limit:
        return f"its output is {one.mismatch:.3g} of its size away from what its own q, k, v give with them"
    return None


RULE = RuleKind("scores", judge, "Its kernel leaves it out: take another attention implementation.")
