"""The rules of a check, in the order in which they are shown: how each is judged, and what to do where it is broken.

A rule is a function here and a row of ``RULES``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from attemper.readings.labels import kind_of, layer_of
from attemper.results.check import Rule
from attemper.rules.declared import Said
from attemper.rules.keys import FinalScores
from attemper.rules.perturbation import CannotExchangeError, Trace, changes, movement, with_others
from attemper.rules.session import NotDeclaredError, RuleKind, Session, Tests
from attemper.rules.token_batch import HIDING, TokenBatch, takes
from attemper.sites.declared import Window
from attemper.text import count


def judge_causal(session: Session, tests: Tests) -> str:
    """No token moves an earlier one."""
    declared = session.declared.causal
    if not any(declared.value.values()):
        raise NotDeclaredError(declared.source + (": rows may see later keys, too" if declared.value else ""))
    name = session.batch.second or session.batch.tokens
    tokens = session.batch.lengths[name]
    places = torch.arange(tokens, device=session.batch.device)
    # At odd places: a leak within blocks of an even size shows.
    for cut in sorted({min(tokens * quarter // 4 | 1, tokens - 1) for quarter in (1, 2, 3)} - {0}):
        stay = session.stay(**{name: (places < cut) & session.real(name)})
        session.test(tests, f"exchanging tokens from place {cut} on", name, places >= cut, stay)
    return declared.source


DOCUMENTS = (
    "Give the attention what separates them: in transformers position_ids that start anew, with use_cache=False and "
    "without attention_mask, or a mask that is block-diagonal; in flash-attention cu_seqlens."
)
DOCUMENTS_REST = (
    "The batch has position_ids that start anew; transformers makes a mask of them only with use_cache=False and "
    "without attention_mask. Pass it so, or pass a mask that is block-diagonal."
)
DOCUMENTS_MASK = (
    "The batch has position_ids that start anew, and the attention does not look at them: pass a mask that is "
    "block-diagonal."
)
DOCUMENTS_STATE = "The state of a recurrent layer and of a convolution has to start anew, too (seq_idx, cu_seqlens)."
_STATES = {"delta rule", "state space", "linear attention", "recurrence", "convolution"}
"""Kinds of layers that carry something from token to token."""


def judge_documents(session: Session, tests: Tests) -> str | Rule:
    """No token moves one of another document of its sequence."""
    declared, name = session.declaration("documents"), session.batch.tokens
    documents = declared.value.to(session.batch.device)
    most = max(len(row[row >= 0].unique()) for row in documents)
    said = f"{count(most, 'document')} in a sequence ({declared.source})"
    if most < 2:
        return Rule("documents", "cannot tell", said, "-", message="no sequence has two documents")
    tests.cause = _what_separates(session, declared.source)
    number = documents.unique(return_inverse=True)[1]  # numbered in their order
    there = (documents >= 0) & session.real(name)
    for group, what in enumerate(("every second document", "the other documents")):
        own = (number % 2 == group) & there
        session.test(tests, f"exchanging {what}", name, own, session.stay(**{name: ~own & there}))
    return said


def _what_separates(session: Session, source: str) -> str:
    """What to do, without what the batch already has, nor what is for layers that the model does not have."""
    given, advice = session.batch.arguments, DOCUMENTS
    if source.startswith("position_ids"):
        advice = (
            DOCUMENTS_MASK
            if given.get("use_cache") is False and given.get("attention_mask") is None
            else DOCUMENTS_REST
        )
    if not any(kind_of(why) in _STATES for why in session.keys.unread.values()):
        return advice
    # Where no attention sees other documents, it is the states that carry them.
    return f"{advice} {DOCUMENTS_STATE}" if session.keys.breaches.get("documents") else DOCUMENTS_STATE


ADDED = 5
"""Padded places that are added."""
POSITIONS = (
    "Positions are counted from the left end, padding among them: pass position_ids that begin at the first token of "
    "each sequence, or pad on the right."
)


def judge_padding(session: Session, tests: Tests) -> str:
    """What stands in padded places moves no token, and adding padding on either side moves none."""
    declared, real = session.declaration("padding"), session.real(session.batch.tokens)
    padded = int((~real).sum())
    if session.obstacle is not None:
        tests.reasons.append(session.obstacle)
    elif padded:
        with tests.attempt("the model does not take it: "):
            _exchange_padding(session, tests, real)
    for side in ("right", "left") if session.obstacle is None else ():
        with tests.attempt("", f"padding added on the {side} ({{}})"):
            _add_padding(session, tests, declared, side)
    if tests.found is not None and isinstance(session.modules.get(tests.found.site), nn.Embedding):
        tests.cause = POSITIONS  # ids have the same embeddings, so this is a table of positions
    return f"{padded} padded of {real.numel()} ({declared.source})"


def _exchange_padding(session: Session, tests: Tests, real: Tensor) -> None:
    """Other things in padded places: embeddings where ids are read, since code may look for the id of padding."""
    name, tokens = session.batch.tokens, session.batch[session.batch.tokens]
    changed = None if tokens.is_floating_point() else session.runner.trace(session.batch, replace=~real)
    if changed is None or not session.runner.replaced:
        ids = tokens.flip(0, 1)[:, :1]
        other = with_others(tokens, ~real) if tokens.is_floating_point() else torch.where(real, tokens, ids)
        changed = session.runner.trace(session.batch.with_arguments(**{name: other}))
    whole = torch.ones(real.shape[0], dtype=torch.bool)
    found = movement(session.base, changed, session.stay(), session.same_shape, whole)
    tests.add("exchanging what stands in padded places", found)


def _add_padding(session: Session, tests: Tests, declared: Said[Tensor], side: str) -> None:
    if session.is_random:
        raise CannotExchangeError("two runs of the batch differ")
    batch = _with_padding(session, side, declared)
    changed = session.runner.trace(batch)
    (sequences, tokens), real = session.batch.shape, session.real(session.batch.tokens)
    changed = changed.cut(ADDED if side == "left" else 0, tokens, tokens + ADDED)
    # A model that is used with padding on the right may give what its first place has as the whole.
    usual = side == "right" or not bool(real[:, 0].all())
    whole = torch.ones(sequences, dtype=torch.bool) if usual else None
    found = movement(session.base, changed, session.stay(), session.other_shape, whole)
    if found is not None and "position_ids" in batch.arguments.keys() - session.batch.arguments.keys():
        same = session.batch.with_arguments(position_ids=(real.long().cumsum(1) - 1).clamp(min=0))
        if movement(session.base, session.runner.trace(same), session.stay(), session.other_shape) is not None:
            raise CannotExchangeError("the model's own positions do not count from 0")
    tests.add(f"adding padding on the {side}", found)


def _with_padding(session: Session, side: str, declared: Said[Tensor]) -> TokenBatch:
    """The batch with padding on a side."""
    batch, (size, tokens), real = session.batch, session.batch.shape, session.real(session.batch.tokens)
    tensors = {name: part for name, part in batch.arguments.items() if isinstance(part, Tensor)}
    if declared.source.partition(" ")[0] not in tensors and not any(_is_mask(part, real) for part in tensors.values()):
        raise CannotExchangeError("no argument of the batch is the mask")
    changes: dict[str, Tensor] = {}
    for name, part in tensors.items():
        if name.startswith("decoder_") or name == batch.second or tokens not in part.shape:
            continue
        if part.shape[:2] not in ((size, tokens), (1, tokens)) or part.shape[2:].count(tokens):
            raise CannotExchangeError(f"{name} has tokens along other dimensions")
        added = _filling(session, name, part, real).to(part).expand(part.shape[0], ADDED, *part.shape[2:])
        changes[name] = torch.cat([added, part] if side == "left" else [part, added], 1)
    # Positions that are counted from the ids themselves, as RoBERTa's, need none.
    tables = ((name, one) for name, one in session.modules.items() if isinstance(one, nn.Embedding))
    counted = any("position" in name and one.padding_idx is not None for name, one in tables)
    if side == "left" and "position_ids" not in tensors and bool(real[:, 0].all()) and not counted:
        if not takes(session.model, "position_ids"):
            raise CannotExchangeError("the batch has none there, and the model takes no position_ids")
        marks = torch.nn.functional.pad(real.long(), (ADDED, 0))
        changes["position_ids"] = (marks.cumsum(1) - 1).clamp(min=0)
    return batch.with_arguments(**changes)


def _is_mask(part: Tensor, real: Tensor) -> bool:
    same = part.shape == real.shape and part.dtype == torch.bool and not bool(real.all())
    return same and (torch.equal(part, real) or torch.equal(part, ~real))


def _filling(session: Session, name: str, part: Tensor, real: Tensor) -> Tensor:
    """What an argument has in places of padding: what stands there already, or what its name says."""
    pad = getattr(session.config, "pad_token_id", None)
    is_ids = name == session.batch.tokens and not part.is_floating_point()
    if is_ids and isinstance(pad, int) and pad >= 0:
        return torch.tensor(pad)
    if part.shape[:2] == real.shape and not bool(real.all()):
        return part[~real][0]
    if name in HIDING:
        return torch.tensor(-torch.inf if part.is_floating_point() else 1)
    return part[0, 0] if is_ids else torch.tensor(-100 if "label" in name else 0)


def judge_window(session: Session, tests: Tests) -> str | Rule:
    """Rows see as many keys as their layer's window has: layers with one and layers without."""
    declared, tokens = session.declaration("window"), session.batch.shape[1]
    windows = [one for one in declared.value if isinstance(one, Window)]
    tests.reasons += [one for one in declared.value if isinstance(one, str)]
    if not windows and not session.keys.judged["window"]:
        raise NotDeclaredError("; ".join(dict.fromkeys(tests.reasons)) or "no layer has a window")
    said = f"{' and '.join(sorted({str(one) for one in windows})) or 'no window'} ({declared.source})"
    if windows and all(one.size >= tokens for one in windows):
        message = f"the window is not shorter than the {count(tokens, 'token')} of the batch"
        return Rule("window", "cannot tell", said, "-", message=message)
    alike = len(windows) == len(declared.value) and len(set(windows)) == 1
    if alike and not windows[0].chunked and not session.keys.unread:
        causal = session.declared.causal.value
        back = bool(causal) and all(causal.values())
        for places in (torch.arange(tokens), torch.arange(tokens).flip(0))[: 1 if back else 2]:
            _test_reach(session, tests, windows[0].size - back, places)
    return said


def _test_reach(session: Session, tests: Tests, reach: int, places: Tensor) -> None:
    """Exchanges the first tokens in the order of ``places`` [T], and looks at those behind the reach of each block."""
    tokens, name, base = len(places), session.batch.tokens, session.base
    passed = {one for block in base.rows if (one := _pass_of(block))[0] is not None}
    deepest = max((number + 1 for number, _ in passed if number is not None), default=0)
    layers = max(deepest, len(passed)) if passed else len(session.keys.judged["window"])
    cut, real = max((tokens - reach) // 2, 1), session.real(name).cpu()
    if not layers or cut + reach >= tokens:
        return
    with tests.attempt("the model does not take it: "):
        changed = session.runner.trace(session.exchange(name, (places < cut).to(session.batch.device)))
        moved = changes(base, changed, lambda _, length: real if length == tokens else None)
        ends = {block: real & (places > end) for block, end in _ends(moved, reach, places, cut - 1, layers)}
        found = movement(base, changed, lambda block, _: ends.get(block), session.same_shape)
        tests.add(f"exchanging the {'last' if places[0] else 'first'} {count(cut, 'token')}", found)


def _ends(
    moved: Iterable[tuple[str, Tensor]], reach: int, places: Tensor, last: int, layers: int
) -> Iterator[tuple[str, int]]:
    """Each block, and the last place that it may move where all up to ``last`` were exchanged: a layer as far as its
    window goes beyond those that moved before it. So a narrower layer before it hides nothing.
    """
    layer, before, beyond = None, last, last + layers * reach
    for block, change in moved:
        number, call = _pass_of(block)
        if number is not None and (number, call) != layer:
            layer, before = (number, call), last
        # What stands beside the layers may be behind the last of them.
        end = beyond if number is None else before + reach
        yield block, end
        last = max(last, min(end, int((places * (change > 0)).max())))


def _pass_of(block: str) -> tuple[int | None, str]:
    """The number of the layer that a block is in, and which of the layer's calls it is: a shared layer runs again."""
    return layer_of(block), block.partition("#")[2]


def judge_batch(session: Session, tests: Tests) -> str:
    """Other sequences of the batch move nothing."""
    batch, base, sequences = session.batch, session.base, session.batch.shape[0]
    with tests.attempt("the model does not take two sequences: "):
        if sequences == 1:
            if any(name.startswith("cu_seq") for name in batch.arguments):
                raise CannotExchangeError("what is packed by cu_seqlens is one sequence")
            sequences = 3 if batch.shape[1] == 2 else 2  # never as many as tokens
            batch = batch.of_sequences(torch.zeros(sequences, dtype=torch.int64))
            base = session.runner.trace(batch)
        half = torch.arange(sequences) < -(-sequences // 2)
        # Tokens that are all alike, too: of others, experts of limited capacity may take as many as they took.
        for alike, keep in product((False, True), (half, ~half)):
            changed = batch
            for name in batch.lengths:
                changed = session.exchange(name, (~keep).to(batch.device)[:, None], changed, alike=alike)
            stay = session.stay(**{name: session.real(name).cpu() & keep[:, None] for name in batch.lengths})
            found = movement(base, session.runner.trace(changed), stay, session.same_shape, keep)
            tests.add("exchanging other sequences" + " for one token" * alike, found)
    return "other sequences move nothing (always)"


CACHES = ("past_key_values", "cache", "cache_params")
"""How models call their cache, as an argument and in their result."""
PREFIX, BEYOND = 16, 48
"""Tokens that are read, and at most so many where a window is to be passed."""


def judge_cache(session: Session, tests: Tests) -> str | Rule:
    """Token by token, and in two chunks, a model with a cache gives what one pass gives."""
    name = next((one for one in CACHES if takes(session.model, one)), None)
    uses = bool(getattr(session.config, "use_cache", False))  # whose argument may be among **kwargs
    if name is None or not uses or not any(session.declared.causal.value.values()):
        raise NotDeclaredError("the model has no cache")
    if session.batch.arguments.get("use_cache") is False:
        raise NotDeclaredError("use_cache=False in the batch")
    written = session.batch.second or session.batch.tokens
    vectors = "the batch holds no ids" if session.batch[written].is_floating_point() else None
    why = session.obstacle or vectors or ("two runs of the batch differ" if session.is_random else None)
    if why is not None:
        return Rule("cache", "cannot tell", "config.use_cache", "-", message=why)
    with tests.attempt("the model does not read with a cache: "):
        prefix = _prefix(session, written)
        tokens = prefix.lengths[written]
        every, limit = torch.ones((1, tokens), dtype=torch.bool), session.other_shape
        base = _read_in_parts(session, prefix, written, name, [tokens], cached=False)
        halves = [tokens // 2 + 1, tokens - tokens // 2 - 1] if tokens > 2 else [tokens]
        for what, sizes in (("reading token by token", [1] * tokens), ("reading in two chunks", halves)):
            changed = _read_in_parts(session, prefix, written, name, sizes)
            tests.add(what, movement(base, changed, lambda _, length: every if length == tokens else None, limit))
    return "config.use_cache"


def _prefix(session: Session, written: str) -> TokenBatch:
    """The first tokens of the first sequence, and what an encoder reads whole."""
    windows = session.declared.window.value if session.declared.window is not None else ()
    beyond = [one.size + 8 for one in windows if isinstance(one, Window) and one.size + 8 <= BEYOND]
    real = session.real(written)[0]
    most = min(max([PREFIX, *beyond]), int(real.sum()))
    first = int(real.int().argmax())
    one = session.batch.of_sequences(torch.zeros(1, dtype=torch.int64))
    kept = {written: one[written][:, first : first + most]}
    if session.batch.second is not None:
        encoder = ("attention_mask", session.batch.tokens)
        kept |= {name: one[name] for name in encoder if name in one.arguments}
    return TokenBatch(kept, 0, session.batch.tokens, session.batch.second)


def _read_in_parts(
    session: Session, prefix: TokenBatch, written: str, name: str, sizes: Sequence[int], *, cached: bool = True
) -> Trace:
    """Outputs of the tokens that are written, read in parts of these sizes."""
    found: Trace | None = None
    cache, start = None, 0
    for size in sizes:
        own: dict[str, Any] = {written: prefix[written][:, start : start + size], "use_cache": cached}
        own |= {} if cache is None else {name: cache}
        trace = session.runner.trace(prefix.with_arguments(**own), cache=name)
        cache, start = trace.cache, start + size
        if cached and cache is None and start < sum(sizes):
            raise ValueError(f"its result has no {name}")
        found = trace if found is None else found.join(trace)
    assert found is not None
    return found


def judge_repeat(session: Session, tests: Tests) -> str:
    """Two runs are equal: dropout is off."""
    with tests.attempt("it cannot be compared: "):
        whole = torch.ones(session.batch.shape[0], dtype=torch.bool)
        found = movement(session.base, session.again, session.stay(), session.other_shape, whole)
        tests.add("running the same batch again", found)
    return "two runs are equal (always)"


SCORES = "Its kernel leaves it out: take another attention implementation."
SOFTCAPS = ("attn_logit_softcapping", "attn_logit_softcap")
"""How configurations call it."""


def judge_scores(session: Session, tests: Tests) -> Rule:
    """The softcap and the sinks that a model declares are in its final scores."""
    cap = next((value for name in SOFTCAPS if (value := getattr(session.config, name, None))), None)
    with_sinks = {name for name, one in session.modules.items() if getattr(one, "sinks", None) is not None}
    said = [f"a softcap of {cap:g} (config)"] if cap else []
    said += [f"sinks at {count(len(with_sinks), 'site')} (parameters of the model)"] if with_sinks else []
    if not said:
        raise NotDeclaredError("neither a softcap nor sinks are declared")
    sites = {one.site.partition("#")[0]: one for one in session.keys.scores}
    seen = sum(one.mismatch is not None for one in sites.values())
    observed = f"read at {count(len(sites), 'site')}, and the output follows from it at {seen}" if sites else "-"
    limit = math.sqrt(max(session.base.eps, 1e-7))
    wrong = ((name, _fault_of_scores(one, cap, name in with_sinks, limit)) for name, one in sites.items())
    site, why = next(((name, why) for name, why in wrong if why is not None), (None, None))
    declared = " and ".join(said)
    if why is not None:
        return Rule("scores", "broken", declared, observed, site, message=f"{site}: {why}. {SCORES}")
    missing = sorted(with_sinks - sites.keys())
    if missing or not sites:
        reason = next(iter(session.keys.unread.values()), "no attention was seen")
        message = f"the scores of {missing[0] if missing else 'the model'} cannot be read: {reason}"
        return Rule("scores", "cannot tell", declared, observed, message=message)
    return Rule("scores", "kept", declared, observed, message=observed)


def _fault_of_scores(one: FinalScores, cap: float | None, sink: bool, limit: float) -> str | None:
    if cap is not None and (one.softcap is None or abs(one.softcap - cap) > 1e-6 * cap):
        return f"its softcap is {'none' if one.softcap is None else f'{one.softcap:g}'}, declared is {cap:g}"
    if sink and not one.sink:
        return "its scores have no sink, and the model has parameters for one"
    if one.mismatch is not None and one.mismatch > limit:
        return f"its output is {one.mismatch:.3g} of its size away from what its own q, k, v give with them"
    return None


RULES = (
    RuleKind(
        "causal",
        judge_causal,
        "Give the attention is_causal=True or a mask that hides later keys; a recurrent layer or a convolution may "
        "only look back.",
        "later tokens",
    ),
    RuleKind("documents", judge_documents, DOCUMENTS, "of other documents"),
    RuleKind(
        "padding",
        judge_padding,
        "Give the mask to whatever mixes tokens, also pooling, convolutions and routers; with padding on the left give "
        "position_ids that begin at the first token.",
        "of padding",
    ),
    RuleKind(
        "window",
        judge_window,
        "Give each layer the window of the configuration: look at the kernel's size, whether it counts the row's own "
        "key, and the mask.",
        "outside of the window",
    ),
    RuleKind(
        "batch",
        judge_batch,
        "Statistics of the batch (BatchNorm in training mode), experts of limited capacity and pooling over the batch "
        "do this: evaluate with statistics of the training, and without a limit.",
    ),
    RuleKind(
        "cache",
        judge_cache,
        "Look at the positions and the mask of a pass that begins with a cache, and at what the cache keeps.",
    ),
    RuleKind(
        "repeat",
        judge_repeat,
        "Call model.eval(). Where that does not help, code draws random numbers in evaluation, too: F.dropout without "
        "training=self.training, sampling, noise; or it stores in one pass what the next one reads.",
    ),
    RuleKind("scores", judge_scores, SCORES),
)
