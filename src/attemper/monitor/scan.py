"""``attemper.scan``: every head of a model over batches of data, exact, streaming, without changing the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from attemper.backends.table import check_backend
from attemper.call.spans import Spans, spans_in_words
from attemper.errors import InputError
from attemper.monitor.checked_model import check_model, computed_on, device_of, hash_of, provenance, title, why_nothing
from attemper.monitor.collector import Collector
from attemper.monitor.forward import AttentionOrder, observation, run
from attemper.monitor.head_roles import RoleReader, repeated_text
from attemper.monitor.kept_rows import KeepRows, RowKeeper
from attemper.monitor.options import Scope
from attemper.monitor.token_ids import TextDigest
from attemper.readings.alarms import LIMITS
from attemper.readings.labels import reasons
from attemper.readings.limits import AlarmLimits, check_fewest_keys
from attemper.readings.part import (
    ELSEWHERE,
    Part,
    Segment,
    Shard,
    Totals,
    add,
    check_shard,
    digest_label,
    level,
)
from attemper.readings.reading import FEWEST_KEYS
from attemper.readings.roles import OF_REPEATS
from attemper.readings.sample import SiteKey
from attemper.results.scan import Scan
from attemper.sites.names import unwrap
from attemper.sites.padding import CallContext
from attemper.statistics import reading_names
from attemper.text import date_of


def scan(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    stats: str | Iterable[str] = "all",
    spans: Spans | Callable[[Any], Spans] | None = None,
    limits: AlarmLimits | Mapping[str, Any] | None = None,
    fewest_keys: int = FEWEST_KEYS,
    backend: str = "auto",
    name: str | None = None,
    text: str | None = None,
    shard: tuple[int, int] | None = None,
    keep_rows: KeepRows | None = None,
    roles: bool | str = True,
    tokenizer: Any = None,
    whole_passes: bool = False,
    on_batch: Callable[[int], None] | None = None,
) -> Scan:
    """Measures exact attention statistics of every head of ``model`` over ``batches``.

    Each batch runs through the model once, without gradients, in the mode (train or eval) that the model is in. In a
    model of transformers' own classes, in eval mode and without hooks, only the first pass, and each with a larger
    batch, must run to its end: others may end behind their last attention, and readings are the same bit for bit.
    Calls of transformers' attention registry are computed here, output and statistics in one pass, with the masks and
    the meaning that they have for the model's own implementation; every other attention runs as it is and is measured
    beside. Everything is put back afterwards, whatever happens. Padded
    queries are left out, by the model's 2-D attention masks. Layers that choose their keys (DeepSeek V3.2) have
    ``missed_mass`` as well, or it is among ``skipped`` with the reason.

    Args:
        model: any module.
        batches: an iterable of dict (``model(**batch)``), tuple or list (``model(*batch)``), or tensor
            (``model(batch)``), on the model's device.
        stats: what is measured beside "all", which always is: support_size, mean_distance, gini,
            entropy_with_sink, score_variance, self_weight, span_mass. Every reading then shows it. lse, mean_logit and
            visible_keys are of rows: see ``row_statistics``.
        spans: the keys whose weight ``span_mass`` sums, as :func:`attemper.attention` takes them, the same in every
            text; or a function of a batch that gives them, such as a bool tensor [B, K] that marks each text's prompt.
            Cross attention, whose keys are of another sequence, has neither ``span_mass`` nor ``self_weight``. Scans
            of other spans do not merge; whether two functions mark alike is not known.
        limits: of alarms: :class:`attemper.AlarmLimits`, or a mapping of the names collapsed, diffuse, logits and
            first_token; those not named keep their default.
        fewest_keys: a row must see so many keys to count for alarms about sharpness and first tokens. A head without
            such a row is not ``judged``, and the result's ``notes`` say so.
        backend: as in :func:`attemper.attention`.
        name: of the model in the result; None for its class and what it was loaded from: a hub id, or the last two
            names of a folder.
        text: what the batches are, by a name that the result shows (a file's, a data set's).
        shard: (I, N), if ``batches`` are part I of N of your data, I from 0 to N - 1. It labels the result, which then
            merges with the other parts: ``scan.save(path)``, ``attemper.open``, ``scan.merge``.
        keep_rows: queries whose rows are kept with every statistic, for ``Scan.rows()``: "last" (each text's last
            token), a list of places (below 0 from the last token back), or a function of a batch that gives one of
            these or a bool tensor [B, Q]. Padding is never kept, nor what a shorter text has not. A row takes 4 bytes
            a head and statistic (counts 8): one query of 32 layers of 32 heads 49 KB, on the host.
        roles: whether the role of each head is read (previous token, induction, ...), on the first text, up to 256
            tokens of it: docs/maths.md has what each is. "repeated" reads induction and duplicate token on a second
            pass, over random tokens that come twice: few texts repeat themselves enough.
        tokenizer: names ids of tokens, as in :func:`attemper.pattern`; without it nobody knows which are separators.
        whole_passes: True runs every pass to the model's output. For what the end of a pass does beside it: an error
            that its loss raises, a function mode of yours that counts operations, code that you patched in.
        on_batch: called with the number of batches done, after each.

    Returns:
        ``Scan``: ``.sites``, ``.skipped``, ``.alarms``; prints as a table; ``.to_json()``, ``.to_pandas()``,
        ``.save()``, ``.merge()``, ``.rows()``.

    Raises:
        InputError: the model is no module, or TorchScript; nothing to scan, no attention was seen, attention dropout
            is on, or a batch of another kind.
        BackendError: the named backend cannot do what a layer needs.
    """
    check_model("scan", model)
    if isinstance(batches, Tensor | Mapping | str):
        raise InputError(
            f"scan(batches) must be an iterable of batches, got one {type(batches).__name__}: write [batch] for one."
        )
    options = ScanOptions(stats, limits, fewest_keys, backend, name, text, spans, whole_passes, roles, tokenizer)
    keeper = None if keep_rows is None else RowKeeper(keep_rows)
    cut = None if shard is None else check_shard(shard)
    with block_scan(model, options, keeper) as reader:
        reader.read(batches, on_batch=on_batch)
    if not reader.batches:
        raise InputError("scan: batches is empty, or an iterator that was used up before.")
    reader.check()
    if roles == "repeated":
        repeated = scan(model, [repeated_text(model, reader.first)], backend=backend)
        assert repeated._part is not None
        reader.add_roles(repeated._part.segments[0].sites)
    part = reader.part({} if cut is None else {"shards": cut[1]}, None if cut is None else cut[0])
    rows = None if keeper is None else keeper.rows(part.segments[0].sites)
    return Scan(part.reading(), reader.last, part=part, rows=rows)


@dataclass(frozen=True)
class ScanOptions:
    """The options of :func:`scan` that say what is measured and what it is called, checked as far as they can be
    without a model.
    """

    stats: str | Iterable[str] = "all"
    limits: AlarmLimits | Mapping[str, Any] | None = None
    fewest_keys: int = FEWEST_KEYS
    backend: str = "auto"
    name: str | None = None
    text: str | None = None
    spans: Spans | Callable[[Any], Spans] | None = None
    whole_passes: bool = False
    roles: bool | str = True
    tokenizer: Any = None
    names: tuple[str, ...] = field(init=False)
    """``stats``, all of them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", AlarmLimits.of(self.limits, LIMITS))
        check_fewest_keys("scan", self.fewest_keys)
        object.__setattr__(self, "names", reading_names("scan", self.stats, self.spans is not None))
        if self.roles not in (True, False, "repeated"):
            raise InputError(
                "scan(roles=...) must be True (on the first text), 'repeated' (induction and duplicate token on random "
                f"tokens that come twice) or False, got {self.roles!r}."
            )
        RoleReader(self.tokenizer)


@contextmanager
def block_scan(model: nn.Module, options: ScanOptions, keeper: RowKeeper | None = None) -> Iterator[BlockScan]:
    """A model that is ready to be read, block after block. Everything is put back afterwards, whatever happens.

    Raises:
        InputError: the model is no module, or TorchScript.
        BackendError: the named backend does not run on the model's device.
    """
    check_model("scan", model)
    device = device_of(model)
    check_backend(options.backend, None if device is None else device.type)
    few, spans = options.fewest_keys, options.spans
    scope = Scope(options.names, options.backend, fewest_keys=few, spans=spans, missed_mass=True)
    collector = Collector(model, CallContext(), scope)
    collector.keeper = keeper
    collector.role_reader = RoleReader(options.tokenizer) if options.roles else None
    with observation(model, collector):
        yield BlockScan(model, options, collector)


class BlockScan:
    """Reads a model block after block; sums of a block are added up apart, and blocks in their order.

    Attributes:
        batches: how many were read.
        last: rows of the last call of each site, where they were kept.
        first: the first batch.
    """

    def __init__(self, model: nn.Module, options: ScanOptions, collector: Collector) -> None:
        self.batches = 0
        self.last: Mapping[str, Any] = {}
        self.first: Any = None
        self._model, self._options, self._collector = model, options, collector
        self._order = None if options.whole_passes else AttentionOrder(model, collector)
        self._hash = hash_of(unwrap(model))
        self._sites: Totals = {}
        self._dropped: dict[SiteKey, str] = {}
        self._backends: dict[str, None] = {}
        self._tokens = self._texts = self._blocks = 0
        self._digest = TextDigest()

    def go_on(self, part: Part) -> int:
        """Goes on after the blocks of an unfinished part; how many there are."""
        self._collector.role_reader = None
        (segment,) = part.segments
        (shard,) = segment.shards
        self._sites, self._dropped = segment.sites, dict(part.dropped)
        self._backends = dict.fromkeys(part.backends)
        self._collector.skipped |= {skip.name: skip.reason for skip in part.skipped}
        self._tokens, self._texts, self._blocks = shard.tokens, shard.texts or 0, shard.blocks or 0
        self._digest = TextDigest(shard.digest)
        return self._blocks

    def read(self, batches: Iterable[Any], texts: int = 0, on_batch: Callable[[int], None] | None = None) -> None:
        """Runs the batches of one block, which holds so many texts. ``on_batch``: called with the number of batches of
        the block that are done, after each.
        """
        collector = self._collector
        for done, batch in enumerate(batches, 1):
            self.batches += 1
            collector.take_batch(batch)
            run(f"scan: batch {self.batches}", self._model, batch, collector, self._order)
            self._digest.add(batch)
            for site in collector.sites.values():
                site.end_batch()
            if self.batches == 1 and self._options.roles == "repeated":
                self.first = batch
            collector.role_reader = None
            if on_batch is not None:
                on_batch(done)
        self.last = collector.last
        self._dropped |= {key: collector.skipped[key[0]] for key, site in collector.sites.items() if site.spoiled}
        found = collector.join(collector.snapshot())
        sites = {site.key: site.totals(collector.position(site)) for site in found.sites}
        (self._sites, sites), modules, dropped = level([self._sites, sites])
        collector.call_sites.joined |= modules
        collector.skipped = reasons(modules, ELSEWHERE) | collector.skipped
        self._dropped |= dropped
        self._dropped |= {key: why for key in self._sites if (why := collector.withdrawn(key[0])) is not None}
        self._sites = add(self._sites, sites)
        self._backends |= dict.fromkeys(found.backends)
        self._tokens, self._texts, self._blocks = self._tokens + found.tokens, self._texts + texts, self._blocks + 1
        collector.forget()

    def add_roles(self, sites: Totals) -> None:
        """Takes the scores that only a text with repeats tells from a scan of one."""
        found = dict(self._sites)
        for key in found.keys() & sites.keys():
            more = {name: scores for name, scores in sites[key].roles.items() if name in OF_REPEATS}
            found[key] = replace(found[key], roles={**found[key].roles, **more})
        self._sites = found

    def check(self) -> None:
        """Whether any attention was seen.

        Raises:
            InputError: none was.
        """
        if not self._sites and not self._dropped:
            raise InputError(why_nothing("scan", self._model, self._collector.skips(())))

    def part(self, law: Mapping[str, Any], index: int | None) -> Part:
        """What was read so far.

        Args:
            law: how the texts became batches and shards; ``shards`` is their number.
            index: which shard it is; None if it is none.
        """
        options, device = self._options, device_of(self._model)
        sites = {key: site for key, site in self._sites.items() if key not in self._dropped}
        label = digest_label(sites) if index is None else f"{index}/{law['shards']}"
        cut = (self._texts, self._blocks) if "block" in law else (None, None)
        shard = Shard(label, index, self._tokens, *cut, self._digest.value)
        summed = options.spans if "span_mass" in options.names else None
        spans = {} if summed is None else {"spans": spans_in_words(summed)}
        assert isinstance(options.limits, AlarmLimits)
        return Part(
            options.name or title(self._model),
            self._hash,
            {"stats": list(options.names), "fewest_keys": options.fewest_keys, **spans, **law},
            options.limits.to_dict(),
            (Segment((shard,), sites),),
            tuple(self._backends),
            (computed_on(device),),
            self._collector.skips({name for name, _, _ in sites}),
            self._dropped,
            options.text,
            **provenance(self._model, date_of(time.time()), self._collector.dtypes),
        )
