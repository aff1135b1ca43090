"""Counters for monitoring: what the guard has done in this process, readable from Python.

The one piece of state that outlives compilations; everything else is kept with a compiled function.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from threading import Lock


@dataclass(frozen=True)
class Counters:
    """What the guard has done in this process, over all compiled functions.

    Attributes:
        compilations: programs that it fused; `writing`: those of them that write memory.
        regions: nvFuser regions in them.
        rewrites: programs that were compiled as if they did not mutate.
        hazards: reads and writes for which ops were left to PyTorch or a program was refused.
        fallbacks: reasons told by a `HazardWarning`, each once per compilation or layout.
        refusals: programs refused with a `HazardError` while they were compiled.
    """

    compilations: int = 0
    writing: int = 0
    regions: int = 0
    rewrites: int = 0
    hazards: int = 0
    fallbacks: int = 0
    refusals: int = 0

    def __sub__(self, earlier: Counters) -> Counters:
        before = asdict(earlier)
        return Counters(**{name: count - before[name] for name, count in asdict(self).items()})


_lock = Lock()
_total = Counters()


def counters() -> Counters:
    """What the guard has done so far, as a snapshot; subtract an earlier one for what happened in between."""
    with _lock:
        return _total


def count(**more: int) -> None:
    """Add to counters, all at once.

    Args:
        more: by a counter's name, what to add.
    """
    global _total
    with _lock:
        _total = replace(_total, **{name: getattr(_total, name) + number for name, number in more.items()})
