"""attemper measures and tempers the sharpness of attention in PyTorch Transformers.

The public names load on first use: ``import attemper`` alone does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attemper import functional, nn, schedules, types
    from attemper.call.result import AttentionOutput as AttentionOutput
    from attemper.call.result import AttentionStats as AttentionStats
    from attemper.control.calibrate import calibrate
    from attemper.control.calibration import Calibration as Calibration
    from attemper.control.qk_clip import QKClip
    from attemper.control.regularize import EntropyBonus, EntropyDiversity, EntropyTarget, ZLoss, regularize
    from attemper.control.regularize import Regularizer as Regularizer
    from attemper.control.sigma_reparam import SigmaReparam as SigmaReparam
    from attemper.control.sigma_reparam import sigma_reparam_
    from attemper.control.temper import Tempered as Tempered
    from attemper.control.temper import temper
    from attemper.control.thermostat import Thermostat
    from attemper.errors import BackendError, InputError, MissingExtraError
    from attemper.fingerprints.record import Fingerprint as Fingerprint
    from attemper.fingerprints.record import load_fingerprint as load_fingerprint
    from attemper.fingerprints.taking.fingerprint import fingerprint
    from attemper.functional.attention import attention, attention_statistics, varlen_attention
    from attemper.functional.attention import dense_weights as dense_weights
    from attemper.integrations.folder import load
    from attemper.monitor.compare import compare
    from attemper.monitor.pattern import pattern
    from attemper.monitor.scan import scan
    from attemper.monitor.watch import Watch as Watch
    from attemper.monitor.watch import watch
    from attemper.readings.limits import AlarmLimits
    from attemper.results.comparison import Comparison as Comparison
    from attemper.results.explanation import Explanation as Explanation
    from attemper.results.explanation import explain
    from attemper.results.open import open
    from attemper.results.pattern import Pattern as Pattern
    from attemper.results.run import open_run as open_run
    from attemper.results.scan import Scan
    from attemper.results.scan import load_scan as load_scan
    from attemper.rules.check import check
    from attemper.sites.tap import tap
    from attemper.store.store import Store

__version__ = "0.3.0"

_HOMES = {
    "AlarmLimits": "attemper.readings.limits",
    "BackendError": "attemper.errors",
    "EntropyBonus": "attemper.control.regularize",
    "EntropyDiversity": "attemper.control.regularize",
    "EntropyTarget": "attemper.control.regularize",
    "InputError": "attemper.errors",
    "MissingExtraError": "attemper.errors",
    "QKClip": "attemper.control.qk_clip",
    "Scan": "attemper.results.scan",
    "Store": "attemper.store.store",
    "Thermostat": "attemper.control.thermostat",
    "ZLoss": "attemper.control.regularize",
    "attention": "attemper.functional.attention",
    "attention_statistics": "attemper.functional.attention",
    "calibrate": "attemper.control.calibrate",
    "check": "attemper.rules.check",
    "compare": "attemper.monitor.compare",
    "explain": "attemper.results.explanation",
    "fingerprint": "attemper.fingerprints.taking.fingerprint",
    "functional": "attemper.functional",
    "load": "attemper.integrations.folder",
    "nn": "attemper.nn",
    "open": "attemper.results.open",
    "pattern": "attemper.monitor.pattern",
    "regularize": "attemper.control.regularize",
    "scan": "attemper.monitor.scan",
    "schedules": "attemper.schedules",
    "sigma_reparam_": "attemper.control.sigma_reparam",
    "tap": "attemper.sites.tap",
    "temper": "attemper.control.temper",
    "types": "attemper.types",
    "varlen_attention": "attemper.functional.attention",
    "watch": "attemper.monitor.watch",
}

_FORMER = {
    "AttentionOutput": ("attemper.call.result", "attemper.types.AttentionOutput"),
    "AttentionStats": ("attemper.call.result", "attemper.types.AttentionStats"),
    "Calibration": ("attemper.control.calibration", "attemper.types.Calibration"),
    "Comparison": ("attemper.results.comparison", "attemper.types.Comparison"),
    "Explanation": ("attemper.results.explanation", "attemper.types.Explanation"),
    "Fingerprint": ("attemper.fingerprints.record", "attemper.types.Fingerprint"),
    "Pattern": ("attemper.results.pattern", "attemper.types.Pattern"),
    "Regularizer": ("attemper.control.regularize", "attemper.types.Regularizer"),
    "SigmaReparam": ("attemper.control.sigma_reparam", "attemper.types.SigmaReparam"),
    "Tempered": ("attemper.control.temper", "attemper.types.Tempered"),
    "Watch": ("attemper.monitor.watch", "attemper.types.Watch"),
    "dense_weights": ("attemper.functional.attention", "attemper.functional.dense_weights"),
    "load_fingerprint": ("attemper.fingerprints.record", "attemper.open(path)"),
    "load_scan": ("attemper.results.scan", "attemper.open(path)"),
    "open_run": ("attemper.results.run", "attemper.open(path)"),
}
"""Names that left, until 0.4: where each is defined, and what to write instead."""

__all__ = [
    "AlarmLimits",
    "BackendError",
    "EntropyBonus",
    "EntropyDiversity",
    "EntropyTarget",
    "InputError",
    "MissingExtraError",
    "QKClip",
    "Scan",
    "Store",
    "Thermostat",
    "ZLoss",
    "attention",
    "attention_statistics",
    "calibrate",
    "check",
    "compare",
    "explain",
    "fingerprint",
    "functional",
    "load",
    "nn",
    "open",
    "pattern",
    "regularize",
    "scan",
    "schedules",
    "sigma_reparam_",
    "tap",
    "temper",
    "types",
    "varlen_attention",
    "watch",
]


def __getattr__(name: str) -> object:
    if name in _FORMER:
        from warnings import warn

        home, line = _FORMER[name]
        warn(f"attemper.{name} goes in attemper 0.4; write {line}.", DeprecationWarning, stacklevel=2)
        return getattr(import_module(home), name)
    if name not in _HOMES:
        import json
        import sys
        from pathlib import Path

        names = "{}" if name.startswith("_") else Path(__file__).with_name("article_names.json").read_text("utf-8")
        if name in (lines := json.loads(names)):
            raise AttributeError(f"attemper has no {name}; write {lines[name]}", name=name)
        # With both, Python's traceback names the nearest public name.
        raise AttributeError(f"module 'attemper' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    home = import_module(_HOMES[name])
    value = home if _HOMES[name] == f"attemper.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
