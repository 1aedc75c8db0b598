"""One drawn call held against the oracle: results and gradients, each under the error of right arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

import attemper
from attemper import BackendError, InputError
from tests.fuzz import draws, oracle
from tests.fuzz.draws import Draw

SAMPLES = 3
"""Randomly rounded runs of the oracle."""
MORE_SAMPLES = 32
"""The same for a call that looks wrong: where two keys are nearly equal, a few runs may all choose the same one."""
FACTOR = 10
"""Times the largest of their errors, and times the root mean square along the last dimension."""
NOTHING = 1e-20
"""What comes from above is of the size of 1: less than this is not told from 0."""
REDO = "python -m tests.fuzz --seed {seed}"


def findings(seed: int, backends: tuple[str, ...]) -> list[str]:
    """What is wrong with the call of a seed; a line each. A clear refusal of a transform begins with "refused"."""
    made = draws.draw(seed, backends)
    lines = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lines = list(_found(made, SAMPLES)) and list(_found(made, MORE_SAMPLES))
    except Exception as error:
        lines = [f"{type(error).__name__}: {str(error)[:300]}"]
        if made.transform and isinstance(error, BackendError | InputError):
            return [f"refused {made.transform}: {str(error)[:120]}"]
    return [f"{line}\n  {made}\n  {REDO.format(seed=seed)}" for line in lines]


def _found(made: Draw, samples: int) -> Iterator[str]:
    passed = {name: _passed(made, name, tensor) for name, tensor in made.tensors.items()}
    answer = Answer(made, passed, samples)
    if made.transform:
        yield from _transformed(made, passed, answer)
        return
    got = _results(made, passed)
    for name in (*(["output"] if "output" in got else []), *made.stats):
        yield from answer.wrong(name, got[name])
    if made.wanted:
        # What no tensor has a part in is a constant: the mass without a sink.
        names = [name for name in made.wanted if got[name].requires_grad]
        ups = [answer.upstream(name).to(got[name].dtype) for name in names]
        grads = (
            torch.autograd.grad([got[n] for n in names], list(passed.values()), ups, allow_unused=True) if names else ()
        )
        for (name, leaf), grad in zip_longest(passed.items(), grads):
            yield from answer.wrong_gradient(name, torch.zeros_like(leaf) if grad is None else grad)


def _passed(made: Draw, name: str, tensor: Tensor) -> Tensor:
    """A leaf as the call gets it."""
    if made.mask == "parameter" and name == "attn_mask":
        return tensor.requires_grad_(bool(made.wanted))
    return draws.laid_out(tensor, made.layouts[name]).detach().requires_grad_(bool(made.wanted))


def _results(made: Draw, passed: dict[str, Tensor]) -> dict[str, Tensor]:
    """What attemper gives: ``output`` and statistics by name."""
    around = torch.autocast("cpu", torch.bfloat16) if made.autocast else nullcontext()
    options = {name: value for name, value in made.options.items() if not name.startswith("cu_")}
    options |= {name: passed[name] for name in ("temperature", "sink_logits", "attn_mask") if name in passed}
    options |= {"backend": made.backend, "normalizer": draws.normalizer(made, passed)}
    tensors: list[Any] = [passed[name] for name in ("query", "key", "value") if name in passed]
    with around:
        if made.function == "dense_weights":
            return {"output": attemper.functional.dense_weights(*tensors, **options)}
        if made.function == "attention_statistics":
            return _by_name(attemper.attention_statistics(*tensors, stats=made.stats, **options))
        if made.function == "attention":
            output, stats = attemper.attention(*tensors, stats=made.stats, **options)
            return {"output": output} | _by_name(stats)
        given: list[Any] = [tensor[0].transpose(0, 1) for tensor in tensors]
        given += [made.options["cu_seqlens_q"], made.options["cu_seqlens_k"]]
        output, stats = attemper.varlen_attention(*given, stats=made.stats, **options)
        return {"output": output.transpose(0, 1)[None]} | _by_name(stats)


def _by_name(stats: Any) -> dict[str, Tensor]:
    return {} if stats is None else {name: stats[name] for name in stats}


def _transformed(made: Draw, passed: dict[str, Tensor], answer: Answer) -> Iterator[str]:
    """The call inside a transform of ``torch.func``, of its query."""
    rest = {name: tensor.detach() for name, tensor in passed.items() if name != "query"}
    query = passed["query"].detach()
    ups = [answer.upstream(name) for name in made.wanted]

    def results(query: Tensor) -> tuple[Tensor, ...]:
        found = _results(made, rest | {"query": query})
        return tuple(found[name] for name in made.wanted)

    def loss(query: Tensor) -> Tensor:
        terms = [
            torch.where(up != 0, result.to(up.dtype), 0.0) * up for result, up in zip(results(query), ups, strict=True)
        ]
        return torch.stack([term.sum() for term in terms]).sum()

    if made.transform == "grad":
        yield from answer.wrong_gradient("query", torch.func.grad(loss)(query))
    elif made.transform == "vmap":
        for name, both in zip(made.wanted, torch.vmap(results)(torch.stack((query, query))), strict=True):
            yield from answer.wrong(name, both[0])
            yield from answer.wrong(name, both[1])
    elif made.transform == "vmap grad":
        for grad in torch.vmap(torch.func.grad(loss))(torch.stack((query, query))):
            yield from answer.wrong_gradient("query", grad)
    elif made.transform == "jacrev":
        jacobians = torch.func.jacrev(results)(query)
        total = torch.zeros(query.shape, dtype=torch.float64)
        for jacobian, up in zip(jacobians, ups, strict=True):
            total += (up.flatten() @ jacobian.double().reshape(up.numel(), query.numel())).reshape(query.shape)
        yield from answer.wrong_gradient("query", total.to(query.dtype))
    else:
        tangent = torch.randn(query.shape, generator=torch.Generator().manual_seed(made.seed)).to(query.dtype)
        moved: Any = torch.func.jvp(results, (query,), (tangent,))
        for name, one in zip(made.wanted, moved[1], strict=True):
            yield from answer.wrong_tangent(name, one, tangent)


class Answer:
    """The oracle's results of a call, its gradients, and what randomly rounded runs make of them."""

    def __init__(self, made: Draw, passed: dict[str, Tensor], samples: int) -> None:
        self.made, self.passed = made, passed
        double = made.dtype == torch.float64
        self.unit = 2.0**-53 if double else 2.0**-24
        mixed = made.autocast and len({passed[n].dtype for n in ("query", "key", "value") if n in passed}) > 1
        self.type = torch.bfloat16 if mixed else made.dtype
        self.mixed = mixed
        self._generator = torch.Generator().manual_seed(made.seed + 1)
        self._upstream: dict[str, Tensor] = {}
        self.exact = self._run(oracle.Rounding())
        self.rounded = [self._run(self._rounding()) for _ in range(samples)]
        if made.wanted:
            self.gradients = self._gradients(self.exact)
            self.rounded_gradients = [self._gradients(run) for run in self.rounded]

    def _rounding(self) -> oracle.Rounding:
        return oracle.Rounding(self._generator, self.unit, torch.finfo(self.type).eps / 2)

    def _run(self, rounding: oracle.Rounding) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(leaves, results)."""
        leaves = {
            name: tensor.detach()
            .as_subclass(Tensor)
            .double()
            .resolve_neg()
            .clone()
            .requires_grad_(bool(self.made.wanted))
            for name, tensor in self.passed.items()
        }
        tiny = torch.finfo(torch.float64 if self.made.dtype == torch.float64 else torch.float32).tiny
        return leaves, joined(self.made, leaves, self.mixed, rounding, tiny)

    def upstream(self, name: str) -> Tensor:
        if name not in self._upstream:
            result = self.exact[1][name].detach()
            drawn = torch.randn(result.shape, generator=self._generator, dtype=torch.float64)
            low = torch.float32 if name != "output" and self.made.dtype != torch.float64 else self.type
            self._upstream[name] = torch.where(result.isfinite(), drawn, 0.0).to(low).double()
        return self._upstream[name]

    def _gradients(self, run: tuple[dict[str, Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
        leaves, results = run
        pairs = [(results[name], self.upstream(name)) for name in self.made.wanted if results[name].requires_grad]
        if not pairs:
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        grads = torch.autograd.grad(
            [result for result, _ in pairs], list(leaves.values()), [up for _, up in pairs], allow_unused=True,
            retain_graph=True,
        )  # fmt: skip
        return {
            name: torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
        }

    def wrong(self, name: str, found: Tensor) -> Iterator[str]:
        dtype = self.type if name == "output" else torch.float64 if self.made.dtype == torch.float64 else torch.float32
        others = [run[1][name].detach() for run in self.rounded]
        want = self.exact[1][name].detach()
        if name in oracle.INTEGERS:
            most = self.exact[1].get(f"largest {name}", want)
            same = torch.stack([other == want for other in others]).all(0)
            wrong = same & ((found < want) | (found > most))
            if found.dtype != torch.int64 or bool(wrong.any()):
                yield f"{name} differs: {found[wrong].tolist()[:8]} for {want[wrong].tolist()[:8]}"
            return
        if found.dtype != dtype:
            yield f"{name} is {found.dtype}, not {dtype}"
        yield from held(name, found, want, others, torch.finfo(dtype))

    def wrong_gradient(self, name: str, found: Tensor) -> Iterator[str]:
        others = [run[name] for run in self.rounded_gradients]
        if found.dtype != self.passed[name].dtype:
            yield f"gradient of {name} is {found.dtype}"
        low = max((self.passed[name].dtype, self.type), key=lambda dtype: torch.finfo(dtype).eps)
        yield from held(f"gradient of {name}", found, self.gradients[name], others, torch.finfo(low))

    def wrong_tangent(self, name: str, found: Tensor, tangent: Tensor) -> Iterator[str]:
        tangents = [self._tangent(run, name, tangent.double()) for run in (self.exact, *self.rounded)]
        low = self.type if name == "output" else torch.float32
        # Its terms cancel, which rounded runs do not show.
        terms = 64 * self.unit * float(tangents[0].abs().amax()) if tangents[0].numel() else 0.0
        yield from held(f"tangent of {name}", found, tangents[0], tangents[1:], torch.finfo(low), terms)

    def _tangent(self, run: Any, name: str, tangent: Tensor) -> Tensor:
        """By two backward passes: the first is linear in what comes from above."""
        leaves, results = run
        if not results[name].requires_grad:
            return torch.zeros_like(results[name])
        above = torch.zeros_like(results[name], requires_grad=True)
        (grad,) = torch.autograd.grad(results[name], leaves["query"], above, create_graph=True, allow_unused=True)
        if grad is None or not grad.requires_grad:
            return torch.zeros_like(results[name])
        (moved,) = torch.autograd.grad(grad, above, tangent, allow_unused=True)
        return torch.zeros_like(results[name]) if moved is None else moved


def held(
    name: str, found: Tensor, want: Tensor, others: list[Tensor], stored: torch.finfo, more: float = 0.0
) -> Iterator[str]:
    """A line if ``found`` is further from ``want`` than randomly rounded runs explain."""
    found = found.detach().as_subclass(Tensor).double()
    if found.shape != want.shape:
        yield f"{name} has shape {list(found.shape)}, not {list(want.shape)}"
        return
    if not found.numel():
        return
    finite = want.isfinite()
    if not bool((found[~finite] == want[~finite]).all()) or not bool(found[finite].isfinite().all()):
        bad = (found.isfinite() != finite).nonzero()
        yield f"{name} is not finite where it should be, or the other way round, at {bad[:3].tolist()}"
        return
    want, found = (torch.where(finite, part, 0.0) for part in (want, found))
    errors = torch.stack([torch.where(finite, other, 0.0) - want for other in others]).abs()
    row = errors.square().mean(0).mean(-1, keepdim=True).sqrt() if want.dim() else errors.square().mean().sqrt()
    allowed = FACTOR * (errors.amax(0) + row) + stored.eps * want.abs() + more + NOTHING + stored.tiny * stored.eps
    error = (found - want).abs()
    if bool((error > allowed).any()):
        worst = int((error / allowed).flatten().argmax())
        times = float((error / allowed).flatten()[worst])
        yield (
            f"{name} is off by {float(error.flatten()[worst]):.3g}, {times:.3g} times what is allowed: "
            f"{float(found.flatten()[worst]):.9g} for {float(want.flatten()[worst]):.9g} at place {worst}"
        )


def joined(
    made: Draw, leaves: dict[str, Tensor], mixed: bool, rounding: oracle.Rounding, tiny: float
) -> dict[str, Tensor]:  # fmt: skip
    """The oracle's results; of packed documents, one after another."""
    if made.function != "varlen_attention":
        found = oracle.results(_call(made, leaves, mixed), rounding, tiny)
        return found | ({"output": _weights(made, leaves, rounding, tiny)} if made.function == "dense_weights" else {})
    starts_q, starts_k = (made.options[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    parts = []
    for i in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
        part = dict(leaves)
        part["query"] = leaves["query"][:, :, rows]
        part |= {name: leaves[name][:, :, keys] for name in ("key", "value")}
        temperature = leaves.get("temperature")
        if temperature is not None and temperature.dim() == 3 and temperature.shape[2] == leaves["query"].shape[2] > 1:
            part["temperature"] = temperature[:, :, rows]
        if (marked := _marked(made, leaves, 1, leaves["key"].shape[2])) is not None:
            part["spans"] = marked[:, keys]
        parts.append(oracle.results(_call(made, part, mixed), rounding, tiny))
    return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}


def _weights(made: Draw, leaves: dict[str, Tensor], rounding: oracle.Rounding, tiny: float) -> Tensor:
    """What is applied to values: the output over values that are one key each."""
    call = _call(made, leaves, False)
    keys = leaves["key"].shape[2]
    call.value = torch.eye(keys, dtype=torch.float64).expand(*leaves["key"].shape[:2], keys, keys)
    return oracle.results(call, rounding, tiny)["output"]


def _call(made: Draw, leaves: dict[str, Tensor], mixed: bool) -> oracle.Call:
    options = made.options
    query, key, value = (leaves.get(name) for name in ("query", "key", "value"))
    assert query is not None
    assert key is not None
    if mixed:
        query, key = (x + (x.detach().bfloat16().double() - x.detach()) for x in (query, key))
    (batch, heads, queries, size), keys = query.shape, key.shape[2]
    marks, bias, offset = _mask(made, leaves, queries, keys)
    left, right = options.get("window_size", (-1, -1))
    ruled = oracle.visible_keys(queries, keys, offset[1], bool(options.get("is_causal")), left, right)
    tokens = marks.any(2).any(1).expand(batch, keys) if made.mask != "causal bias" else torch.ones(batch, keys).bool()
    number: Any = leaves.get("learned", made.number)
    if made.normalizer in ("sink", "scalable_softmax") and not isinstance(number, Tensor):
        number = torch.full((heads,), float(number), dtype=torch.float64)
    given = leaves.get("temperature", torch.as_tensor(options.get("temperature", 1.0), dtype=torch.float64))
    scale = options.get("scale")
    return oracle.Call(
        query, key, value, (max(size, 1) ** -0.5 if scale is None else scale), given,
        (marks & ruled).expand(batch, heads, queries, keys), bias, options.get("softcap"), leaves.get("sink_logits"),
        made.normalizer, number, tokens & (tokens.long().cumsum(-1) <= options.get("first_tokens", 1)), offset[0],
        _marked(made, leaves, batch, keys),
    )  # fmt: skip


def _marked(made: Draw, leaves: dict[str, Tensor], batch: int, keys: int) -> Tensor | None:
    """[B, K] bool of the keys in the spans; of one of several documents they are among ``leaves``."""
    given: Any = leaves.get("spans")
    given = made.options.get("spans") if given is None else given
    if given is None or isinstance(given, Tensor):
        return None if given is None else given.expand(batch, keys)
    marks = torch.zeros(keys, dtype=torch.bool)
    for first, last in given:
        marks[first : last + 1] = True
    return marks.expand(batch, keys)


def _mask(
    made: Draw, leaves: dict[str, Tensor], queries: int, keys: int
) -> tuple[Tensor, Tensor | None, tuple[int, int]]:
    """What the mask shows [.., .., .., K], what it adds, and (where distances, where rules) have their diagonal."""
    options = made.options
    aligned = keys - queries if options.get("causal_alignment") == "bottom-right" else 0
    if "attn_mask" in leaves:
        mask = leaves["attn_mask"][(None,) * (4 - leaves["attn_mask"].dim())]
        low = torch.finfo(made.tensors["attn_mask"].dtype).min / 2
        marks = (mask.detach() > low).expand(*mask.shape[:3], keys)
        return marks, torch.where(mask > low, mask, 0.0), (aligned, aligned)
    given = options.get("attn_mask")
    if given is None:
        return torch.ones(1, 1, 1, keys, dtype=torch.bool), None, (aligned, aligned)
    if made.mask == "causal bias":
        own = keys - queries if int(given.variant) == 2 else 0
        marks = oracle.visible_keys(queries, keys, own, True, -1, -1)
        free = not options.get("is_causal") and options.get("window_size", (-1, -1)) == (-1, -1)
        return marks.reshape(1, 1, queries, keys), None, (own if free else aligned, aligned)
    marks = given[(None,) * (4 - given.dim())]
    return marks.expand(*marks.shape[:3], keys), None, (aligned, aligned)
