"""What the guard decided for a compiled function: readable afterwards, kept with Thunder's own compile statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import thunder
from thunder.core.compile_data import _compile_data

from guarded_nvfuser.hazards import Hazard
from guarded_nvfuser.options import OnHazard

_ATTRIBUTE = "guarded_nvfuser_verdicts"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one compilation.

    Attributes:
        mode: what was to be done on a hazard.
        hazards: why ops were left to PyTorch or the program refused; in mode "rewrite" those that the rewrite left, in the
            others those of the regions that Thunder's own passes form.
    """

    mode: OnHazard
    hazards: tuple[Hazard, ...]

    @property
    def safe(self) -> bool:
        """Whether everything could be fused as it was."""
        return not self.hazards


def record(verdict: Verdict) -> Verdict:
    """Keep a verdict with the statistics of the compilation under way, and return it."""
    _, stats = _compile_data.get()
    if stats is not None:
        stats.__dict__.setdefault(_ATTRIBUTE, []).append(verdict)
    return verdict


def verdicts(jitted: Callable) -> tuple[Verdict, ...]:
    """The verdicts on a function compiled with this executor, one per compilation that wrote memory.

    Args:
        jitted: what `thunder.jit` returned.

    Raises:
        TypeError: `jitted` was not made by `thunder.jit`.
        RuntimeError: it was never called, so nothing was compiled yet.
    """
    check_compiled(jitted)
    return tuple(thunder.compile_stats(jitted).__dict__.get(_ATTRIBUTE, ()))


def check_compiled(jitted: Callable) -> None:
    """Refuse what was not compiled, with the message that says what to do.

    Raises:
        TypeError: `jitted` was not made by `thunder.jit`.
        RuntimeError: it was never called, so nothing was compiled yet.
    """
    stats = thunder.compile_stats(jitted)
    if stats is None:
        raise TypeError(
            f"{jitted!r} is not a compiled function: pass what thunder.jit(fn, executors=[guarded_nvfuser_ex]) returned"
        )
    if stats.cache_misses == 0:
        raise RuntimeError(
            f"{jitted!r} was never called, so Thunder has not compiled it yet: call it once, then ask again"
        )
