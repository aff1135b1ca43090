"""What is kept of each compilation for `report`, with Thunder's own statistics of the compiled function, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import thunder
from thunder.core.compile_data import _compile_data
from thunder.core.trace import TraceCtx

from guarded_nvfuser.arguments import Sharing, current_sharing
from guarded_nvfuser.counters import count
from guarded_nvfuser.errors import HazardError
from guarded_nvfuser.hazards import is_region
from guarded_nvfuser.options import OnHazard
from guarded_nvfuser.states import is_joint
from guarded_nvfuser.verdict import Verdict

_KEPT = "guarded_nvfuser_records"


@dataclass(frozen=True)
class Record:
    """One compilation.

    Attributes:
        source: the program as traced, before gradients, aliases' names aside; `joint`: gradients were derived from it.
        verdict: what was decided; None for a program that writes nothing.
        sharing: how the arguments share memory.
        fused: the trace with regions; None if the program was refused.
        traces: the list in which Thunder keeps this compilation's traces, which tells its cache entry.
    """

    source: TraceCtx | None
    joint: bool
    verdict: Verdict | None
    sharing: Sharing
    fused: TraceCtx | None
    traces: Sequence[TraceCtx]


def kept(trace: TraceCtx, fused: TraceCtx, verdict: Verdict | None = None) -> TraceCtx:
    """Keep and count a compilation, and return its trace with regions.

    Args:
        trace: what the fusion pass was given.
        fused: what it made of it.
        verdict: what was decided; None for a program that writes nothing.
    """
    _keep(trace, fused, verdict)
    count(
        compilations=1,
        writing=verdict is not None,
        regions=sum(map(is_region, fused.bound_symbols)),
        rewrites=verdict is not None and verdict.mode is OnHazard.REWRITE,
        hazards=len(verdict.hazards) if verdict is not None else 0,
    )
    return fused


@contextmanager
def keeping_refusals(trace: TraceCtx, mode: OnHazard) -> Iterator[None]:
    """Keep and count a program that is refused in a `with` block."""
    try:
        yield
    except HazardError as error:
        _keep(trace, None, Verdict(mode, error.hazards))
        count(compilations=1, writing=1, hazards=len(error.hazards), refusals=1)
        raise


def _keep(trace: TraceCtx, fused: TraceCtx | None, verdict: Verdict | None) -> None:
    _, stats = _compile_data.get()
    if stats is None:
        return
    traces = stats.last_traces
    source = next((each for each in reversed(traces) if not is_joint(each)), None) if verdict is not None else None
    record = Record(source, is_joint(trace), verdict, current_sharing(), fused, traces)
    stats.__dict__.setdefault(_KEPT, []).append(record)


def records_of(jitted: Callable) -> tuple[Record, ...]:
    """The compilations of a function with this library's executor, refused ones too, in order."""
    return tuple(thunder.compile_stats(jitted).__dict__.get(_KEPT, ()))
