"""One check of one model on one batch: what every rule reads, and how what it found becomes a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attemper.readings.labels import LAYER_KINDS
from attemper.results.check import Rule
from attemper.rules.declared import Declaration, Said, text_config
from attemper.rules.keys import ELSEWHERE, Breach, SeenKeys, sites_in_words
from attemper.rules.moves import Movement, Noise, Runner, Stay, Trace, movement
from attemper.rules.token_batch import TokenBatch
from attemper.sites.names import unwrap
from attemper.text import count


@dataclass(frozen=True)
class RuleKind:
    """A rule of a check: the one record that adds it."""

    name: str
    judge: Callable[[Session, Tests], str | Rule]
    """Makes the tests; gives what is declared, in words, or the verdict where there is nothing to test."""
    advice: str
    """What to do where it is broken."""
    forbidden: str = ""
    """What rows must not see, in words, for the rules that say which keys a row may see."""

    def verdict(self, session: Session) -> Rule:
        """What became of the rule."""
        before, tests = session.runner.forwards, Tests()
        try:
            declared = self.judge(session, tests)
        except NotDeclaredError as error:
            return Rule(self.name, "not declared", None, "-", message=str(error))
        if isinstance(declared, Rule):
            return declared
        return session.conclude(self, declared, tests, session.runner.forwards - before)


class NotDeclaredError(Exception):
    """Says why nothing declares a rule."""


class CannotExchangeError(Exception):
    """Says why tokens cannot be exchanged."""


@dataclass
class Tests:
    """What exchanges of tokens have shown of a rule."""

    cuts: int = 0
    found: Movement | None = None
    what: str = ""
    """Which exchange moved it."""
    reasons: list[str] = field(default_factory=list)
    """Why others could not be made."""

    def add(self, what: str, found: Movement | None) -> None:
        """Takes one exchange."""
        self.cuts += 1
        if found is not None and self.found is None:
            self.found, self.what = found, what


@dataclass
class Session:
    """What rules read. ``base``: a pass of the batch as it is; ``again``: another, with other random numbers."""

    model: nn.Module
    batch: TokenBatch
    declared: Declaration
    runner: Runner
    keys: SeenKeys
    base: Trace
    again: Trace
    noise: Noise
    obstacle: str | None = None
    """Why exchanges cannot be told from noise: equal passes differ."""
    is_random: bool = False
    """Whether passes draw random numbers: those of two shapes cannot be compared."""
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        return text_config(self.model)

    def real(self, name: str) -> Tensor:
        """[B, L] bool: which places of a sequence are tokens."""
        side = self.declared if name == self.batch.tokens or self.declared.second is None else self.declared.second
        if side.padding is not None:
            return side.padding.value.to(self.batch.device)
        return torch.ones(side.shape, dtype=torch.bool, device=self.batch.device)

    def exchangeable(self, name: str) -> Tensor:
        """[B, L] bool: tokens that may become others: neither padding nor one that the model's code may look for.

        Raises:
            CannotExchangeError: there is none, or nothing to take their place.
        """
        tokens = self.batch[name]
        if tokens.is_floating_point():
            return self.real(name)
        special = torch.tensor(sorted(self._special), device=tokens.device, dtype=tokens.dtype)
        marks = self.real(name) & ~torch.isin(tokens, special)
        if not bool(marks.any()):
            raise CannotExchangeError("the batch holds special tokens alone")
        if len(self._candidates(tokens[marks])) < 2:
            raise CannotExchangeError("ids cannot be exchanged: the vocabulary has one")
        return marks

    @property
    def _special(self) -> set[int]:
        """Ids that a configuration names: the end of a text, an image, padding."""
        found: set[int] = set()
        for config in (getattr(unwrap(self.model), "config", None), self.config):
            for name, value in vars(config).items() if hasattr(config, "__dict__") else ():
                if name.endswith(("token_id", "token_index", "token_ids")):
                    found |= {one for one in (value if isinstance(value, list) else [value]) if type(one) is int}
        return found

    def _candidates(self, ids: Tensor) -> Tensor:
        """Ids that may take the place of others: those of the batch, or of the vocabulary."""
        own = ids.unique()
        tables = (one for one in self.model.modules() if isinstance(one, nn.Embedding) and one.num_embeddings > own[-1])
        table = next(tables, None)
        if len(own) > 7 or table is None:
            return own
        every = torch.arange(table.num_embeddings, device=ids.device, dtype=ids.dtype)
        allowed = every[~torch.isin(every, torch.tensor(sorted(self._special), device=ids.device, dtype=ids.dtype))]
        return allowed if len(allowed) > len(own) else own

    def exchange(self, name: str, places: Tensor, batch: TokenBatch | None = None) -> TokenBatch:
        """The batch with other tokens at ``places`` [B, L] of a sequence.

        Raises:
            CannotExchangeError: no token there can become another.
        """
        batch = self.batch if batch is None else batch
        tokens, allowed = batch[name], self.exchangeable(name)
        marks = places & (allowed if allowed.shape == places.shape else allowed.expand(places.shape))
        if not bool(marks.any()):
            raise CannotExchangeError("no token there can be exchanged")
        generator = torch.Generator().manual_seed(1)
        if tokens.is_floating_point():
            own = tokens[marks]
            drawn = torch.randn(tokens.shape, generator=generator).to(tokens)
            drawn = own.mean() + (own.std() if own.numel() > 1 and own.std() > 0 else 1.0) * drawn
            return batch.with_arguments(**{name: torch.where(_spread(marks, tokens), drawn, tokens)})
        known = self._candidates(tokens[marks])
        at = torch.searchsorted(known, tokens.contiguous()).clamp(max=len(known) - 1)
        steps = torch.randint(1, len(known), tokens.shape, generator=generator).to(tokens.device)
        return batch.with_arguments(**{name: torch.where(marks, known[(at + steps) % len(known)], tokens)})

    def stay(self, **marks: Tensor) -> Stay:
        """Rows that must not move, by the sequence of as many tokens; all tokens of a sequence that is not named."""
        by_length: dict[int, Tensor] = {}
        for name, length in self.batch.lengths.items():
            own = marks.get(name, self.real(name)).cpu()
            by_length[length] = by_length[length] & own if length in by_length else own
        # An output may end behind the last token of the longest sequence.
        longest = max(by_length)
        return lambda _, length: by_length.get(length, by_length[longest][:, :length] if length < longest else None)

    def test(self, tests: Tests, what: str, name: str, places: Tensor, stay: Stay, whole: Tensor | None = None) -> None:
        """Exchanges tokens at ``places`` and looks at what must ``stay``."""
        try:
            if self.obstacle is not None:
                raise CannotExchangeError(self.obstacle)
            changed = self.runner.trace(self.exchange(name, places))
        except CannotExchangeError as error:
            tests.reasons.append(str(error))
        except Exception as error:  # whatever a model raises for other tokens
            tests.reasons.append(f"the model does not take it: {type(error).__name__}: {error}"[:200])
        else:
            tests.add(what, movement(self.base, changed, stay, self.noise.same_shape))

    def declaration(self, rule: str, why: str = "nothing declares it") -> Said[Any]:
        """What is declared of a rule of ``Declaration``.

        Raises:
            NotDeclaredError: nothing is.
        """
        said = getattr(self.declared, rule)
        if said is None:
            raise NotDeclaredError(self.declared.notes.get(rule, why))
        return said

    def conclude(self, kind: RuleKind, declared: str, tests: Tests, forwards: int) -> Rule:
        """The verdict on a rule that is declared and was tested."""
        name, judged = kind.name, self.keys.judged.get(kind.name, [])
        parts = [f"proved at {count(len(judged), 'site')}"] if judged else []
        passes = f" ({count(forwards, 'forward pass', 'forward passes')})" if forwards else ""
        parts += [f"tested at {count(tests.cuts, 'cut')}{passes}"] if tests.cuts else []
        observed, reasons = "; ".join(parts) or "-", "; ".join(dict.fromkeys(tests.reasons))
        if self.keys.breaches.get(name) or tests.found is not None:
            return self._with_breach(kind, tests, Rule(name, "broken", declared, observed, forwards=forwards))
        left = self.keys.unread
        if name == "window":  # which layers without attention have not, nor a tower that reads pictures
            left = {one: why for one, why in left.items() if why not in LAYER_KINDS and not why.endswith(ELSEWHERE)}
        unread = sites_in_words(left)
        if not tests.cuts and (left or not judged):
            why = f"{observed}, and not at {unread}; {reasons}".rstrip("; ")
            if not judged:
                why = reasons or f"no keys were read: {unread or 'no attention was seen'}"
            return Rule(name, "cannot tell", declared, observed, message=why, forwards=forwards)
        observed += f"; not tested: {reasons}" if reasons else ""
        return Rule(name, "kept", declared, observed, message=observed, forwards=forwards)

    def _with_breach(self, kind: RuleKind, tests: Tests, rule: Rule) -> Rule:
        """The rule with where it is broken, and how far."""
        breaches, found = self.keys.breaches.get(kind.name, []), tests.found
        breach = next(iter(breaches), None)
        said = [] if breach is None else [_in_words(breach, len(breaches), kind.forbidden)]
        site, rows = (found.site, found.rows) if found is not None else ("", 0)
        if found is not None:
            where = "" if breach is not None and breach.site == site else f"{site}: "
            said.append(f"{where}{tests.what} moves {count(rows, 'row')} by {found.at_site:.3g} of their size")
            if breach is None and site in self.keys.judged.get(kind.name, ()):
                said.append("its rows see the keys that are declared: something beside the attention mixes tokens")
            elif breach is None and site in self.keys.unread and self.keys.unread[site] not in LAYER_KINDS:
                said.append(self.keys.unread[site])
        elif tests.cuts:
            said.append("exchanging tokens moves nothing that was looked at")
        if breach is not None and (found is None or self._place(breach.site) <= self._place(found.site)):
            site, rows = breach.site, breach.rows
        elif breach is not None:
            said.reverse()
        return replace(
            rule,
            site=site,
            rows=rows,
            keys=None if breach is None else breach.extra,
            weight=None if breach is None else breach.weight,
            moved=None if found is None else found.moved,
            message=f"{'; '.join(said)}. {kind.advice}",
        )

    def _place(self, site: str) -> int:
        """Where a site stands among the blocks in the order in which they ran."""
        order = {name: place for place, name in enumerate(self.base.rows)}
        module = site.partition("#")[0]
        around = (place for name, place in order.items() if name == module or module.startswith(f"{name}."))
        return order.get(site, next(around, len(order)))


def _in_words(breach: Breach, sites: int, forbidden: str) -> str:
    more = f" (and {count(sites - 1, 'more site')})" if sites > 1 else ""
    seen = f"{breach.seen:.4g} keys where {breach.expected:.4g} are declared"
    said = f"{breach.site}{more}: {count(breach.rows, 'row')}, which see {seen}"
    if breach.weight is not None:
        said += f", {breach.extra:.4g} of them {forbidden}, with {breach.weight:.3g} of the weight"
    elif breach.missing:
        said += f", and lack {breach.missing:.4g}"
    return said


def _spread(marks: Tensor, like: Tensor) -> Tensor:
    """Marks [B, L] that broadcast to [B, L, ...]."""
    return marks.view(*marks.shape, *(1,) * (like.dim() - 2))
