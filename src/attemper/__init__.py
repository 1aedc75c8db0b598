"""attemper measures and tempers the sharpness of attention in PyTorch Transformers.

The public names load on first use: ``import attemper`` alone does not import torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attemper import functional, nn, schedules
    from attemper.call.result import AttentionOutput, AttentionStats
    from attemper.control.calibrate import calibrate
    from attemper.control.calibration import Calibration
    from attemper.control.penalties import EntropyBonus, EntropyDiversity, EntropyTarget, ZLoss
    from attemper.control.qk_clip import QKClip
    from attemper.control.regularize import Regularizer, regularize
    from attemper.control.sigma_reparam import SigmaReparam, sigma_reparam_
    from attemper.control.temper import Tempered, temper
    from attemper.control.thermostat import Thermostat
    from attemper.errors import BackendError, InputError, MissingExtraError
    from attemper.fingerprints.explain import explain
    from attemper.fingerprints.explanation import Explanation
    from attemper.fingerprints.fingerprint import Fingerprint, load_fingerprint
    from attemper.fingerprints.taking.fingerprint import fingerprint
    from attemper.functional.attention import attention, attention_statistics, dense_weights, varlen_attention
    from attemper.integrations.folder import load
    from attemper.monitor.pattern import pattern
    from attemper.monitor.scan import scan
    from attemper.monitor.watch import Watch, watch
    from attemper.readings.limits import AlarmLimits
    from attemper.results.comparison import Comparison, compare
    from attemper.results.pattern import Pattern
    from attemper.results.run import open_run
    from attemper.results.scan import Scan, load_scan
    from attemper.sites.tap import tap
    from attemper.store.store import Store

__version__ = "0.3.0"

_HOMES = {
    "AlarmLimits": "attemper.readings.limits",
    "AttentionOutput": "attemper.call.result",
    "AttentionStats": "attemper.call.result",
    "BackendError": "attemper.errors",
    "InputError": "attemper.errors",
    "MissingExtraError": "attemper.errors",
    "calibrate": "attemper.control.calibrate",
    "Calibration": "attemper.control.calibration",
    "QKClip": "attemper.control.qk_clip",
    "Scan": "attemper.results.scan",
    "attention": "attemper.functional.attention",
    "attention_statistics": "attemper.functional.attention",
    "Comparison": "attemper.results.comparison",
    "Explanation": "attemper.fingerprints.explanation",
    "Fingerprint": "attemper.fingerprints.fingerprint",
    "explain": "attemper.fingerprints.explain",
    "fingerprint": "attemper.fingerprints.taking.fingerprint",
    "load_fingerprint": "attemper.fingerprints.fingerprint",
    "compare": "attemper.results.comparison",
    "Pattern": "attemper.results.pattern",
    "pattern": "attemper.monitor.pattern",
    "dense_weights": "attemper.functional.attention",
    "functional": "attemper.functional",
    "load": "attemper.integrations.folder",
    "load_scan": "attemper.results.scan",
    "nn": "attemper.nn",
    "open_run": "attemper.results.run",
    "scan": "attemper.monitor.scan",
    "schedules": "attemper.schedules",
    "SigmaReparam": "attemper.control.sigma_reparam",
    "sigma_reparam_": "attemper.control.sigma_reparam",
    "EntropyBonus": "attemper.control.penalties",
    "EntropyDiversity": "attemper.control.penalties",
    "EntropyTarget": "attemper.control.penalties",
    "ZLoss": "attemper.control.penalties",
    "Regularizer": "attemper.control.regularize",
    "regularize": "attemper.control.regularize",
    "tap": "attemper.sites.tap",
    "Thermostat": "attemper.control.thermostat",
    "temper": "attemper.control.temper",
    "Tempered": "attemper.control.temper",
    "Store": "attemper.store.store",
    "watch": "attemper.monitor.watch",
    "Watch": "attemper.monitor.watch",
    "varlen_attention": "attemper.functional.attention",
}

__all__ = [
    "AlarmLimits",
    "AttentionOutput",
    "AttentionStats",
    "BackendError",
    "Calibration",
    "Comparison",
    "EntropyBonus",
    "EntropyDiversity",
    "EntropyTarget",
    "Explanation",
    "Fingerprint",
    "InputError",
    "MissingExtraError",
    "Pattern",
    "QKClip",
    "Regularizer",
    "Scan",
    "SigmaReparam",
    "Store",
    "Tempered",
    "Thermostat",
    "Watch",
    "ZLoss",
    "attention",
    "attention_statistics",
    "calibrate",
    "compare",
    "dense_weights",
    "explain",
    "fingerprint",
    "functional",
    "load",
    "load_fingerprint",
    "load_scan",
    "nn",
    "open_run",
    "pattern",
    "regularize",
    "scan",
    "schedules",
    "sigma_reparam_",
    "tap",
    "temper",
    "varlen_attention",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        if not name.startswith("_"):
            import json
            from pathlib import Path

            lines = json.loads(Path(__file__).with_name("article_names.json").read_text("utf-8"))
            if name in lines:
                raise AttributeError(f"attemper has no {name}; write {lines[name]}", name=name)
        # With both, Python's traceback names the nearest public name.
        raise AttributeError(f"module 'attemper' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    home = import_module(_HOMES[name])
    value = home if _HOMES[name] == f"attemper.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
