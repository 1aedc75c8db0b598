"""Types that attemper returns, for annotations and ``isinstance``. You never create them yourself."""

from attemper.call.result import AttentionOutput, AttentionStats
from attemper.control.calibration import Calibration
from attemper.control.regularize import Regularizer
from attemper.control.sigma_reparam import SigmaReparam
from attemper.control.temper import Tempered
from attemper.fingerprints.record import Fingerprint
from attemper.monitor.watch import Watch
from attemper.results.check import Check
from attemper.results.comparison import Comparison
from attemper.results.explanation import Explanation
from attemper.results.pattern import Pattern, Patterns
from attemper.results.run import Run
from attemper.results.scan import Scan

__all__ = [
    "AttentionOutput",
    "AttentionStats",
    "Calibration",
    "Check",
    "Comparison",
    "Explanation",
    "Fingerprint",
    "Pattern",
    "Patterns",
    "Regularizer",
    "Run",
    "Scan",
    "SigmaReparam",
    "Tempered",
    "Watch",
]
