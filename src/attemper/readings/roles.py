"""The roles that a head may have: what each means, its score, and from which score on a head has it. Without torch.

``ROLES`` is the one list of them: JSON, tables, pages and alarms iterate over it. To add a role is to add a record. A
score is a function of a ``RoleText``, the weights of one site on one text. docs/maths.md has the definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

FEWEST_ROWS = 8
"""A score of fewer rows is not known: in a short text every causal head looks at its own token."""
RoleScores: TypeAlias = Mapping[str, float | None]
"""Role -> the score of a head; None where it is not known."""


@dataclass(frozen=True)
class RoleText:
    """The weights of a site on a text, as arrays of any library; H heads, Q queries, K keys."""

    weights: Any
    """[H, Q, K], renormalised so that each row sums to 1."""
    visible: Any
    """[H|1, Q, K] bool: keys that the row sees."""
    counts: Any
    """[H|1, Q] bool: rows that count: no padding, no sum of 0, no NaN."""
    normalized_entropy: Any
    """[H, Q]"""
    first: Any
    """[K] bool: the first token of the text, or of each document."""
    distance: Any = None
    """[Q, K]: the place of the query less that of the key; None where places are not known."""
    same_token: Any = None
    """[Q, K] bool: the key is the query's token; None where tokens are not known."""
    after_same_token: Any = None
    """[Q, K] bool: the key before this one is the query's token."""
    separators: Any = None
    """[K] bool: punctuation and separators; None where nobody can tell."""


@dataclass(frozen=True)
class Role:
    """One role."""

    name: str
    meaning: str
    """What its score is, in a sentence."""
    needs: str
    """Without what no head has a score."""
    values: Callable[[RoleText], Any] | None
    """[Q, K] or [K]: u of ``sum p u``, such as 1 for keys that count; gives None where it is not known."""
    score: Callable[[RoleText, Any, Any], Any]
    """[H], of the text, the values and their sums [H, Q]; not finite where it is not known."""
    threshold: float
    """A head has the role only with a score above it."""
    general: bool = False
    """Whether it describes a head only where no other role does: a previous-token head is local, too."""

    @property
    def key(self) -> str:
        """Its name in keys of texts and in columns."""
        return self.name.replace(" ", "_")

    @property
    def title(self) -> str:
        """What a head that has it is called."""
        return f"{self.name.replace(' ', '-')} head"

    @property
    def column(self) -> str:
        """The column of its score in CSV and frames."""
        return f"{self.key}_score"


def _choosing(text: RoleText) -> Any:
    """[H|1, Q] bool: rows that see two keys or more. With one there is nothing to choose."""
    return text.counts & (text.visible.sum(-1) > 1)


def _mean(values: Any, rows: Any) -> Any:
    """[H]: the mean of [H, Q] over some rows; infinite or NaN for fewer than ``FEWEST_ROWS``."""
    many = rows.sum(-1)
    return (values * rows).sum(-1) / (many * (many >= FEWEST_ROWS))


def _weight_on(text: RoleText, keys: Any, sums: Any) -> Any:
    """[H]: the mean weight on some keys, over the rows that see one and have a choice."""
    return _mean(sums, (keys & text.visible).any(-1) & _choosing(text))


def _at(distance: int) -> Callable[[RoleText], Any]:
    return lambda text: None if text.distance is None else text.distance == distance


def _duplicates(text: RoleText) -> Any:
    if text.distance is None or text.same_token is None:
        return None
    return text.same_token & (text.distance > 0)


def _after_duplicates(text: RoleText) -> Any:
    if text.distance is None or text.after_same_token is None:
        return None
    return text.after_same_token & (text.distance >= 0)


def _separators(text: RoleText) -> Any:
    return None if text.separators is None else text.separators & ~text.first


def _distances(text: RoleText) -> Any:
    return None if text.distance is None else abs(text.distance)


def _nearness(text: RoleText, far: Any, sums: Any) -> Any:
    """1 less the mean distance, as a share of what equal weights on the same keys have."""
    rows, many = _choosing(text), text.visible.sum(-1)
    equal = (text.visible * far).sum(-1) / (many + (many < 1))
    return 1 - _mean(sums, rows) / _mean(equal, rows)


def _evenness(text: RoleText, *_: Any) -> Any:
    return _mean(text.normalized_entropy, _choosing(text))


def _on(name: str, meaning: str, needs: str, keys: Callable[[RoleText], Any], threshold: float = 0.4) -> Role:
    return Role(name, meaning, needs, keys, _weight_on, threshold)


_REPEATS = "the model to read token ids, and 8 rows whose token came before (try roles='repeated')"
ROLES = (
    _on(
        "previous token",
        "Weight on the token before the query's own.",
        "8 rows that see the token before theirs",
        _at(1),
    ),
    _on(
        "next token",
        "Weight on the token after the query's own.",
        "8 rows that see the token after theirs, which a causal mask hides",
        _at(-1),
    ),
    _on("own token", "Weight on the query's own token.", "8 rows that see their own token and another", _at(0)),
    _on(
        "first token",
        "Weight on the first token of the text: a sink.",
        "8 rows that see the first token",
        lambda text: text.first,
    ),
    _on(
        "separator",
        "Weight on punctuation and separators behind the first token.",
        "tokenizer=, and 8 rows that see punctuation or separators",
        _separators,
        0.6,
    ),
    _on("duplicate token", "Weight on earlier occurrences of the query's token.", _REPEATS, _duplicates),
    _on(
        "induction",
        "Weight on the tokens that followed earlier occurrences of the query's token.",
        _REPEATS,
        _after_duplicates,
    ),
    Role(
        "local",
        "1 less the mean distance to the keys, as a share of that of equal weights.",
        "8 rows that see two keys, and their positions (cross attention has none)",
        _distances,
        _nearness,
        threshold=0.8,
        general=True,
    ),
    Role(
        "diffuse",
        "Entropy of the weights, as a share of that of equal weights.",
        "8 rows that see two keys",
        None,
        _evenness,
        0.95,
        general=True,
    ),
)
ROLE_OF = {role.name: role for role in ROLES}
SHARP = tuple(role.name for role in ROLES if not role.general)
"""Roles whose heads look at one token, or few: a low entropy is their job."""
BY_JOB = "{said} ({role}: sharp by its job)"
"""What an alarm of sharpness says of a head with one of these roles."""
ADVICE = "Nothing to do: a head with such a role looks at one token, or few. Other layers may need it as it is."
"""What it advises."""
OF_REPEATS = ("duplicate token", "induction")
"""Roles that only a text with repeats tells."""


def role_of(scores: RoleScores | None) -> str | None:
    """The role with the highest score among those above their thresholds; a general one only where no other is.

    Example:
        >>> role_of({"previous token": 0.7, "own token": 0.1, "local": 0.99}), role_of({"local": 0.5}), role_of(None)
        ('previous token', None, None)
    """
    known = [(role, score) for role in ROLES if (score := (scores or {}).get(role.name)) is not None]
    beyond = [(not role.general, score, role.name) for role, score in known if score > role.threshold]
    return max(beyond, key=lambda one: one[:2])[2] if beyond else None
