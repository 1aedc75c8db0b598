"""One check of one model on one batch: what every rule reads, and how what it found becomes a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attemper.readings.labels import LAYER_KINDS
from attemper.results.check import Rule
from attemper.rules.declared import Declaration, Said, text_config
from attemper.rules.keys import ELSEWHERE, SeenKeys
from attemper.rules.perturbation import (
    COMPILED,
    OUTPUT,
    CannotExchangeError,
    Movement,
    Runner,
    Stay,
    Trace,
    changes,
    movement,
    with_others,
)
from attemper.rules.token_batch import TokenBatch
from attemper.sites.find import all_sites
from attemper.sites.names import Names, is_within, unwrap
from attemper.text import count, first_of


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


@dataclass
class Tests:
    """What exchanges of tokens have shown of a rule."""

    cuts: int = 0
    found: Movement | None = None
    what: str = ""
    """Which exchange moved it."""
    reasons: list[str] = field(default_factory=list)
    """Why others could not be made."""
    cause: str | None = None
    """What to do about it, in place of the rule's advice, where that is known."""

    def add(self, what: str, found: Movement | None) -> None:
        """Takes one exchange: what moves first, in the order of the model, is the place of the fault."""
        self.cuts += 1
        if found is not None and (self.found is None or found.place < self.found.place):
            self.found, self.what = found, what

    @contextmanager
    def attempt(self, refused: str, told: str = "{}") -> Iterator[None]:
        """A block whose errors say why something could not be tested: ``refused``, and what the model raised."""
        reason = None
        try:
            yield
        except CannotExchangeError as error:
            reason = str(error)
        except Exception as error:  # whatever a model raises for other tokens, more of them, or a cache
            reason = f"{refused}{type(error).__name__}: {error}"[:200]
        self.reasons += [] if reason is None else [told.format(reason)]


class Session:
    """What rules read: the keys of one pass, and what two passes of the batch gave, with other random numbers."""

    def __init__(
        self,
        model: nn.Module,
        names: Names,
        batch: TokenBatch,
        declared: Declaration,
        keys: SeenKeys,
        fresh: Callable[[], object],
    ) -> None:
        self.model, self.batch, self.declared, self.keys = model, batch, declared, keys
        self.modules = {name: module for module, name in names.items()}
        self.config = text_config(model)
        mixing = [site.name for site in all_sites(names)]
        known = (*mixing, *keys.unread)  # a whole model may be unread, whose layers are looked at
        mixing += [name for name in keys.unread if not any(one.startswith(f"{name}.") for one in known)]
        self.runner = Runner(model, names, [name for name in mixing if name in self.modules], fresh)
        self.base, self.again = self.runner.trace(batch), self.runner.trace(batch, seed=False)
        self._noise: dict[str, float] = {}
        """Block -> how far it moves if the batch has another size, and nothing else changes."""
        limit = self.other_shape("")
        self.is_random = max(self._apart(self.again).values(), default=0.0) > limit
        """Whether passes differ by random numbers, or by what one stores: those of two shapes cannot be compared."""
        self.obstacle: str | None = None
        """Why exchanges cannot be told from noise."""
        if not self.is_random:
            self._noise = self._noise_of_size()
        elif max(self._apart(self.runner.trace(batch)).values(), default=0.0) > limit:
            self.obstacle = "two passes of the same batch differ, also with the same random numbers"

    def _apart(self, other: Trace, chosen: Tensor | None = None) -> dict[str, float]:
        """Block -> the largest relative change of a token between a pass and the base, or the base's ``chosen``."""
        base = self.base
        if chosen is not None:
            base = replace(base, rows={name: rows[chosen] for name, rows in base.rows.items()})
        return {name: float(change.max()) for name, change in changes(base, other, self.stay(chosen))}

    def _noise_of_size(self) -> dict[str, float]:
        sequences = self.batch.shape[0]
        chosen = torch.arange(-(-sequences // 2)) if sequences > 1 else torch.zeros(2, dtype=torch.int64)
        with suppress(Exception):  # whatever a model raises: what is packed has no sequences to leave out
            return self._apart(self.runner.trace(self.batch.of_sequences(chosen)), chosen)
        return {}

    def same_shape(self, block: str) -> float:
        """How far noise moves a block between passes of one shape: they round alike but where experts share tokens."""
        eps = self.base.eps
        return max(16 * eps, min(8 * self._noise.get(block, 0.0), math.sqrt(eps)))

    def other_shape(self, block: str) -> float:
        """The same between passes of two shapes, whose kernels add up in other orders."""
        return max(self.same_shape(block), math.sqrt(self.base.eps) / 2)

    def real(self, name: str) -> Tensor:
        """[B, L] bool: which places of a sequence are tokens."""
        side = self.declared if name == self.batch.tokens or self.declared.second is None else self.declared.second
        if side.padding is not None:
            return side.padding.value.to(self.batch.device)
        return torch.ones(side.shape, dtype=torch.bool, device=self.batch.device)

    @cached_property
    def _special(self) -> Tensor:
        """Ids that a configuration names: the end of a text, an image, padding. Code may look for them."""
        found: set[int] = set()
        for config in (getattr(unwrap(self.model), "config", None), self.config):
            for name, value in vars(config).items() if hasattr(config, "__dict__") else ():
                if name.endswith(("token_id", "token_index", "token_ids")):
                    found |= {one for one in (value if isinstance(value, list) else [value]) if type(one) is int}
        return torch.tensor(sorted(found), dtype=torch.int64, device=self.batch.device)

    def _candidates(self, ids: Tensor) -> Tensor:
        """Ids that may take the place of others: those of the batch, or of the vocabulary."""
        own = ids.unique()
        tables = (one for one in self.model.modules() if isinstance(one, nn.Embedding) and one.num_embeddings > own[-1])
        table = next(tables, None)
        if len(own) > 7 or table is None:
            return own
        every = torch.arange(table.num_embeddings, device=ids.device, dtype=ids.dtype)
        allowed = every[~torch.isin(every, self._special.to(ids))]
        return allowed if len(allowed) > len(own) else own

    def exchange(
        self, name: str, places: Tensor, batch: TokenBatch | None = None, *, alike: bool = False
    ) -> TokenBatch:
        """The batch with other tokens at ``places`` [B, L] of a sequence, or with one that is ``alike`` at all of them;
        neither padding nor special ones.

        Raises:
            CannotExchangeError: no token there can become another, or equal passes differ.
        """
        batch = self.batch if batch is None else batch
        tokens, marks = batch[name], places & self.real(name)
        if self.obstacle is not None:
            raise CannotExchangeError(self.obstacle)
        if not tokens.is_floating_point():
            marks = marks & ~torch.isin(tokens, self._special.to(tokens))
        if not bool(marks.any()):
            raise CannotExchangeError("no token there can be exchanged")
        if tokens.is_floating_point():
            other = with_others(tokens, marks)
        else:
            known = self._candidates(tokens[marks])
            if len(known) < 2:
                raise CannotExchangeError("ids cannot be exchanged: the vocabulary has one")
            at = torch.searchsorted(known, tokens.contiguous()).clamp(max=len(known) - 1)
            steps = torch.randint(1, len(known), tokens.shape, generator=torch.Generator().manual_seed(1))
            other = torch.where(marks, known[(at + steps.to(at)) % len(known)], tokens)
        if alike:
            other[marks] = other[marks][:1]
        return batch.with_arguments(**{name: other})

    def stay(self, chosen: Tensor | None = None, **marks: Tensor) -> Stay:
        """Rows that must not move, by the sequence of as many tokens; all tokens where none are named. Of all sequences
        or those ``chosen``.
        """
        by_length: dict[int, Tensor] = {}
        for name, length in self.batch.lengths.items():
            own = marks.get(name, self.real(name)).cpu()
            own = own if chosen is None else own[chosen]
            by_length[length] = by_length[length] & own if length in by_length else own
        # An output may end behind the last token of the longest sequence.
        longest = max(by_length)
        return lambda _, length: by_length.get(length, by_length[longest][:, :length] if length < longest else None)

    def test(self, tests: Tests, what: str, name: str, places: Tensor, stay: Stay) -> None:
        """Exchanges tokens at ``places`` and looks at what must ``stay``."""
        with tests.attempt("the model does not take it: "):
            changed = self.runner.trace(self.exchange(name, places))
            tests.add(what, movement(self.base, changed, stay, self.same_shape))

    def declaration(self, rule: str) -> Said[Any]:
        """What is declared of a rule of ``Declaration``.

        Raises:
            NotDeclaredError: nothing is.
        """
        if (said := getattr(self.declared, rule)) is None:
            raise NotDeclaredError("nothing declares it")
        return said

    def conclude(self, kind: RuleKind, declared: str, tests: Tests, forwards: int) -> Rule:
        """The verdict on a rule that is declared and was tested."""
        judged, left = self.keys.judged.get(kind.name, []), self.keys.unread
        if kind.name == "window":  # which layers without attention have not, nor a tower that reads pictures
            left = {one: why for one, why in left.items() if why not in LAYER_KINDS and not why.endswith(ELSEWHERE)}
        breaches = self.keys.breaches.get(kind.name, [])
        parts = [f"proved at {count(len(judged), 'site')}"] if judged else []
        parts = [f"seen broken at {count(len(breaches), 'site')}"] if breaches else parts
        passes = f" ({count(forwards, 'forward pass', 'forward passes')})" if forwards else ""
        parts += [f"tested at {count(tests.cuts, 'cut')}{passes}"] if tests.cuts else []
        observed, reasons = "; ".join(parts) or "-", "; ".join(dict.fromkeys(tests.reasons))
        rule = Rule(kind.name, "kept", declared, observed, forwards=forwards)
        if breaches or tests.found is not None:
            return self._with_breach(kind, tests, rule)
        if tests.cuts or (judged and not left):
            observed += f"; not tested: {reasons}" if reasons else ""
            return replace(rule, observed=observed, message=observed)
        unread = first_of(list(left), 3)
        why = f"{observed}, and not at {unread}; {reasons}".rstrip("; ")
        if not judged:
            why = reasons or f"no keys were read: {unread or 'no attention was seen'}"
        return replace(rule, verdict="cannot tell", message=why)

    def _with_breach(self, kind: RuleKind, tests: Tests, rule: Rule) -> Rule:
        """The rule with where it is broken, and how far."""
        breaches, found = self.keys.breaches.get(kind.name, []), tests.found
        breach, said = next(iter(breaches), None), ["exchanging tokens moves nothing that was looked at"]
        if found is not None:
            where = "" if breach is not None and breach.site == found.site else f"{found.site}: "
            output = "" if found.site in (OUTPUT, COMPILED) else ", and the output"
            said = [f"{where}{tests.what} moves {count(found.rows, 'row')}{output} by {found.moved:.3g} of its size"]
            if breach is None and found.site in self.keys.judged.get(kind.name, ()):
                said.append("its rows see the keys that are declared: something beside the attention mixes tokens")
            elif breach is None and (why := self.keys.unread.get(found.site, "")) not in LAYER_KINDS and why:
                said.append(why)
        elif not tests.cuts:
            said = []
        first = found if breach is None else breach
        if breach is not None:
            later = found is not None and self._place(breach.site) > found.place
            said.insert(len(said) if later else 0, breach.in_words(len(breaches), kind.forbidden))
            first = found if later else breach
        assert first is not None
        shown = {"keys": getattr(breach, "extra", None), "weight": getattr(breach, "weight", None)}
        shown |= {"moved": getattr(found, "moved", None), "message": f"{'; '.join(said)}. {tests.cause or kind.advice}"}
        return replace(rule, verdict="broken", site=first.site, rows=first.rows, **shown)

    def _place(self, site: str) -> int:
        """Where an attention, or what is around it, stands among the blocks, in the order in which they were done."""
        names, module = list(self.base.rows), site.partition("#")[0]
        around = (place for place, name in enumerate(names) if is_within(module, name))
        return names.index(site) if site in names else next(around, len(names))
