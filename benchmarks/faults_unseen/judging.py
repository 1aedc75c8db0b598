"""Runs a pair both ways through ``attemper.explain`` and judges what it says."""

from __future__ import annotations

import contextlib
import importlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attemper

from .evidence import Calls, Claim, calls, predicts
from .evidence import _centred as centred
from .evidence import _size as size
from .models import cast, fresh, inputs, outputs
from .specs import SPECS, VOCABULARY
from .subjects import Case, Expect, Subject, subject

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
AGREE = 1e-4
"""Relative difference of outputs that the same function in float32 may have: the float32 rounding of three layers."""
ROUNDED = 4.0
"""How many times the clean bfloat16 run's distance from float32 a harmless bfloat16 run may be away."""
VISIBLE = 3.0
"""A bfloat16 fault that moves outputs less than so many times what bfloat16 itself does may be called too small."""

CLAIMS = {
    "yarn": r"YaRN",
    "new": r"newly initiali[sz]ed|initiali[sz]er|not loaded",
    "swapped": r"swapped|exchanged",
    "factor": r"times (that|those) of run",
    "transposed": r"transpos",
    "tied": r"\btied\b|copy of|copied",
    "layers": r"another layer|order of layers|of layer \d",
    "documents": r"document",
    "padding": r"padding",
    "pairing": r"interleaved|half-split|pairing",
    "grid": r"quanti[sz]ed|grid|bits",
}
"""Words by which a message names a cause. A fault lists those that are true of it."""

INVERSE = {"scale": "product", "key_shift": "sum", "distance_bias": "sum", "sink": "sum"}
OF_B = {"softcap", "window", "logn", "causality", "rotary", "key_rounding"}
"""Kinds whose number is run b's; run b may have none in one of the two directions."""
EXACT = {"window", "causality", "key_rounding"}


@dataclass
class Said:
    """What one direction said."""

    kind: str
    site: str
    value: float | None
    fault: bool
    message: str
    also: list[str]

    def short(self) -> str:
        value = "" if self.value is None else f" {self.value:.5g}"
        return f"{self.kind}{value} at {self.site}"


def said(one: Any, two: Any) -> Said:
    try:
        found = attemper.explain(one, two)
    except attemper.InputError as refusal:
        return Said("refused", "None", None, True, str(refusal), [])
    except Exception as crash:
        return Said("crashed", "None", None, True, f"{type(crash).__name__}: {crash}", [])
    also = [f"{remark.kind} at {remark.site}: {remark.message}" for remark in found.also]
    return Said(found.kind, str(found.site), found.value, found.is_fault, found.message, also)


@contextlib.contextmanager
def rotary_of_the_other_convention(model: Any, wanted: bool | None) -> Iterator[None]:
    """Run b's engine pairs features the other way; None leaves it."""
    if wanted is None:
        yield
        return
    module: Any = importlib.import_module(type(model).__module__)
    before = module.apply_rotary_pos_emb

    def turned(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        pairs = cos.shape[-1] // 2
        if wanted:
            cos, sin = (part[:, None, :, :pairs].repeat_interleave(2, -1) for part in (cos, sin))
        else:
            repeated = torch.equal(cos[..., :pairs], cos[..., pairs:])
            once = slice(pairs) if repeated else slice(None, None, 2)
            cos, sin = (torch.cat([part[:, None, :, once]] * 2, -1) for part in (cos, sin))

        def turn(states: Tensor) -> Tensor:
            wide, kept = states[..., : 2 * pairs], states[..., 2 * pairs :]
            if wanted:
                half = torch.stack([-wide[..., 1::2], wide[..., ::2]], -1).flatten(-2)
            else:
                half = torch.cat([-wide[..., pairs:], wide[..., :pairs]], -1)
            return torch.cat([(wide * cos + half * sin).to(states.dtype), kept], -1)

        return turn(query), turn(key)

    module.apply_rotary_pos_emb = turned
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = before


@dataclass
class Run:
    """A model, its batches, and what they make."""

    model: Any
    batches: list[dict[str, Tensor]]
    pairing: bool | None = None

    def fingerprint(self) -> Any:
        with rotary_of_the_other_convention(self.model, self.pairing):
            return attemper.fingerprint(self.model, self.batches)

    def outputs(self) -> Tensor:
        with rotary_of_the_other_convention(self.model, self.pairing):
            return torch.cat([outputs(self.model, batch) for batch in self.batches])

    def calls(self) -> dict[str, Calls]:
        with rotary_of_the_other_convention(self.model, self.pairing):
            return calls(self.model, self.batches[0])


def typed(batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}


class Clean:
    """Clean runs of one architecture, and their fingerprints, by type and by batch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.runs: dict[tuple[str, torch.dtype], Run] = {}
        self.prints: dict[tuple[str, torch.dtype], Any] = {}
        self.made: dict[tuple[str, torch.dtype], Tensor] = {}

    def run(self, case: Subject, dtype: torch.dtype) -> Run:
        key = (case.clean, dtype)
        if key not in self.runs:
            model = fresh(self.name)
            if case.prepare is not None:
                case.prepare(Subject(case.spec, model, case.layer, case.draw, case.a, case.b))
            self.runs[key] = Run(cast(model, dtype), [typed(case.a, dtype)])
        return self.runs[key]

    def fingerprint(self, case: Subject, dtype: torch.dtype) -> Any:
        key = (case.clean, dtype)
        if key not in self.prints:
            self.prints[key] = self.run(case, dtype).fingerprint()
        return self.prints[key]

    def outputs(self, case: Subject, dtype: torch.dtype) -> Tensor:
        key = (case.clean, dtype)
        if key not in self.made:
            self.made[key] = self.run(case, dtype).outputs()
        return self.made[key]


def changed(name: str, case: Case) -> tuple[Subject, Any]:
    """A subject on which the case has acted, in float32."""
    one = subject(name, case.name, fresh(name), inputs(name), inputs(name))
    return one, case.make(one)


def batches(case: Subject, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    batch = typed(case.b, dtype)
    if not case.extra.get("split"):
        return [batch]
    count = len(next(iter(batch.values())))
    return [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(count)]


def run_b(case: Subject, dtype: torch.dtype) -> Run:
    model = cast(case.model, dtype)
    if case.attention is not None:
        model.set_attn_implementation(case.attention)
    return Run(model, batches(case, dtype), case.extra.get("interleaved"))


def far(one: Tensor, two: Tensor) -> float:
    if one.shape != two.shape:
        return math.inf
    return float((one - two).norm() / two.norm().clamp_min(1e-30))


def true_number(kind: str, value: float, known: float | None, claim: Any) -> bool:
    """Known by construction, or applied to run a."""
    if known is not None:
        allowed = 0.0 if kind in EXACT else (0.005 if kind == "scale" else 0.05) * abs(known)
        if abs(value - known) <= allowed:
            return True
    built = claim()
    return built is not None and predicts(kind, value, built)


def claim(one: Run, two: Run, clean: Run, site: str, spec: Any) -> Claim | None:
    """What tests a number at a site; ``clean`` is the clean run in run b's type."""
    a, b, rounded = (run.calls().get(site) for run in (one, two, clean))
    exact = Run(cast(fresh(spec.name), torch.float32), clean.batches).calls().get(site)
    if a is None or b is None or rounded is None or exact is None or a.query.shape != b.query.shape:
        return None
    whole = size(centred(a.scores(), a.visible))
    noise = size(centred(rounded.scores() - exact.scores(), exact.visible)) + 2e-6 * whole
    rope = None
    if spec.rope:
        angles = next(module for name, module in one.model.named_modules() if name.endswith("rotary_emb"))
        rope = (spec.rope, angles.inv_freq)
    return Claim(a, b, noise, spec.causal, rope)


def grade(found: Said, wanted: Expect, below: bool) -> str:
    known = wanted.kinds.get(found.kind)
    if known is None:
        return "fair" if below and found.kind in ("too_small", "rounding") else "wrong"
    if found.site not in known[1]:
        return "wrong"
    if known[0] == "best" and wanted.value is not None and found.value is None:
        return "fair"
    return "right" if known[0] == "best" else "fair"


def symmetric(there: Said, back: Said, wanted: Expect, numbers_true: bool) -> bool:
    """The same cause at the same site, with inverse numbers where kinds have them."""
    if (there.kind, there.site) != (back.kind, back.site):
        return False
    one, two = there.value, back.value
    if one is None or two is None:
        known = wanted.value if one is None else wanted.back
        return (one is None and two is None) or (there.kind in OF_B and known is None)
    how = INVERSE.get(there.kind)
    if how == "product":
        return abs(one * two - 1) < 0.01
    if how == "sum":
        return abs(one + two) <= 0.01 * abs(one)
    return numbers_true


def overclaims(found: Said, true: frozenset[str]) -> list[str]:
    """Causes that the message names and the fault has not. What stands under "Also" is a second-best or later one."""
    text = found.message.partition(" Also ")[0].replace(found.site, "")
    return [word for word, pattern in CLAIMS.items() if word not in true and re.search(pattern, text)]


def judge_fault(name: str, case: Case, setting: str, clean: Clean) -> dict[str, Any]:
    """One row of the table of faults."""
    one, wanted = changed(name, case)
    dtype = TYPES[setting]
    moved = far(Run(one.model, batches(one, torch.float32)).outputs(), clean.outputs(one, torch.float32))
    rounding = far(clean.outputs(one, torch.bfloat16), clean.outputs(one, torch.float32))
    below = setting == "bfloat16" and moved < VISIBLE * rounding
    run_a, other = clean.run(one, torch.float32), run_b(one, dtype)
    try:
        print_b = other.fingerprint()
    except Exception as crash:
        there = back = Said("crashed", "None", None, True, f"fingerprint: {type(crash).__name__}: {crash}", [])
    else:
        print_a = clean.fingerprint(one, torch.float32)
        there, back = said(print_a, print_b), said(print_b, print_a)
    spec = SPECS[name]
    reference = clean.run(one, dtype)
    false = []
    for direction, found, known, pair in (
        ("a b", there, wanted.value, (run_a, other)),
        ("b a", back, wanted.back, (other, run_a)),
    ):
        if found.value is not None and not true_number(
            found.kind, found.value, known, lambda p=pair, f=found: claim(p[0], p[1], reference, f.site, spec)
        ):
            false.append(direction)
    given = "wrong" if false else grade(there, wanted, below)
    return _short(
        {
            "pair": f"{name} {case.name} {setting}",
            "group": case.group,
            "setting": setting,
            "architecture": name,
            "grade": given,
            "there": there.short(),
            "back": back.short(),
            "kind": there.kind,
            "best": " ".join(sorted(kind for kind, (word, _) in wanted.kinds.items() if word == "best")),
            "wanted": {kind: [word, sorted(sites)] for kind, (word, sites) in wanted.kinds.items()},
            "value": wanted.value,
            "false_numbers": false,
            "asymmetric": not symmetric(there, back, wanted, not false),
            "overclaims": sorted({*overclaims(there, wanted.true), *overclaims(back, wanted.true)}),
            "below": below,
            "message": there.message,
            "message_back": back.message,
        }
    )


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Messages stay where something is wrong."""
    if row["grade"] in ("right", "fair") and not (row["asymmetric"] or row.get("overclaims")):
        for name in ("message", "message_back", "wanted", "also"):
            row.pop(name, None)
    return row


HARMLESS_SETTINGS = {
    "float32": (torch.float32, torch.float32),
    "float32 bfloat16": (torch.float32, torch.bfloat16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
}


def compared(case: Subject, made: Tensor) -> Tensor:
    """Outputs of real tokens, in the places that run a has them."""
    made = made[..., :VOCABULARY] if case.extra.get("vocabulary") else made
    made = made.flip(0) if case.extra.get("reversed") else made
    lengths = case.extra.get("rows")
    if lengths is None or case.spec.name == "t5":
        return made
    count = made.shape[1]
    side = case.extra.get("left") and count == max(lengths)
    parts = [row[count - real :] if side else row[:real] for row, real in zip(made, lengths, strict=True)]
    return torch.cat(parts)


def agreement(case: Subject, other: Run, clean: Clean, dtype: torch.dtype) -> float:
    """How far run b's outputs are from the clean float32 run's; raises if the change was not harmless."""
    padded_a = Subject(
        case.spec, None, 0, case.draw, case.a, case.b, extra={**case.extra, "left": False, "reversed": False}
    )
    exact = compared(padded_a, clean.outputs(case, torch.float32))
    made = compared(case, other.outputs())
    distance = (made - exact).norm(dim=-1) / exact.norm(dim=-1)
    experts = case.spec.name in ("mixtral", "gpt_oss")
    worst = float(distance.median() if experts else distance.square().mean().sqrt())
    rounded = compared(padded_a, clean.outputs(case, torch.bfloat16)) - exact
    allowed = AGREE if dtype != torch.bfloat16 else ROUNDED * float(rounded.norm() / exact.norm()) + AGREE
    if case.exact and not worst <= allowed:
        raise AssertionError(f"outputs differ by {worst:.2g}, {allowed:.2g} is rounding")
    return worst


def judge_harmless(name: str, case: Case, setting: str, clean: Clean) -> dict[str, Any] | None:
    """One row of the table of harmless pairs; None where the change has a type of its own and the setting another."""
    type_a, type_b = HARMLESS_SETTINGS[setting]
    one, _ = changed(name, case)
    if "dtype" in one.extra:
        if setting != "float32":
            return None
        type_b = one.extra["dtype"]
    other = run_b(one, type_b)
    try:
        apart = agreement(one, other, clean, type_b)
    except AssertionError as fault:
        raise AssertionError(f"{name} {case.name} {setting}: {fault}") from fault
    try:
        print_b = other.fingerprint()
    except Exception as crash:
        there = back = Said("crashed", "None", None, True, f"fingerprint: {type(crash).__name__}: {crash}", [])
    else:
        print_a = clean.fingerprint(one, type_a)
        there, back = said(print_a, print_b), said(print_b, print_a)
    numbers = [found.short() for found in (there, back) if found.value is not None]
    bits = {"int8": 8, "int4": 4, "bfloat16": 16, "float16": 16}.get(case.name.rpartition("-")[2])
    false = [found.short() for found in (there, back) if found.value is not None and found.value != bits]
    given = "blamed" if there.fault or back.fault or false else "right"
    if one.extra.get("may refuse") and (there.kind, back.kind) == ("refused", "refused"):
        given = "refused"
    return _short(
        {
            "pair": f"{name} {case.name} {setting}",
            "group": case.group,
            "setting": setting,
            "architecture": name,
            "grade": given,
            "there": there.short(),
            "back": back.short(),
            "kind": there.kind,
            "numbers": numbers,
            "false_numbers": false,
            "asymmetric": there.kind != back.kind,
            "apart": apart,
            "also": there.also,
            "message": there.message,
            "message_back": back.message,
        }
    )
