"""What the guard's passes cost beside the stock fusion pass, over traces of growing length.

Both run by turns in one process, on the same program: the guard on the trace that it gets in mode "rewrite", stock on
the one with Thunder's barriers. Traces are those of CUDA tensors; nothing is launched, so no GPU is needed.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import pytest
from thunder.core.trace import TraceCtx
from thunder.extend import FusionExecutor

from benchmarks.measure import Rivals, against, rounds_for, spread
from benchmarks.passes import stopwatch
from benchmarks.structure import stock_ex
from benchmarks.synthetic import PROGRAMS, SIZES, Synthetic, for_fusion, traced
from guarded_nvfuser import guarded_nvfuser_ex
from guarded_nvfuser.cost import trace_cost
from guarded_nvfuser.options import on_hazard

LIMIT = 60.0  # seconds of stock's passes for one trace; the next length is not tried once this would be exceeded
BUDGET = 8.0  # seconds of rounds for one benchmark
WORST_GROWTH = 5.0  # what twice the length may cost, to tell beforehand whether a trace stays within the limit

pytestmark = pytest.mark.benchmark(timer=time.process_time, disable_gc=True)
_last: dict[str, float] = {}  # by program, what stock's passes took for the length before


def clocked(function: Callable, *args, **options) -> tuple[float, object]:
    """Seconds of processor time, and the result."""
    started = time.process_time()
    result = function(*args, **options)
    return time.process_time() - started, result


def ends_in_time(program: str) -> bool:
    """Whether stock's passes are expected to end within the limit for twice the length they ran on last."""
    return WORST_GROWTH * _last.get(program, 0.0) < LIMIT


def stock_trace(program: Synthetic, trace: TraceCtx) -> TraceCtx | None:
    """What stock's fusion pass gets; None where Thunder's own passes would take longer than the limit."""
    if not ends_in_time(program.name):
        return None
    taken, with_aliases = clocked(for_fusion, trace, stock_ex, aliases=True)
    _last[program.name] = taken
    return with_aliases if taken < LIMIT else None


def peak(executor: FusionExecutor, trace: TraceCtx) -> int:
    """Bytes that a fusion pass holds at most."""
    tracemalloc.start()
    try:
        executor.fusion_pass(trace)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", SIZES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_fusion_pass(benchmark, program: Synthetic, length: int) -> None:
    """The whole pass in mode "rewrite" beside stock's, and what each of its parts takes."""
    trace = traced(*program.make(length))
    guarded = for_fusion(trace, guarded_nvfuser_ex, aliases=False)
    stock = stock_trace(program, trace)
    if stock is not None:
        taken, fused = clocked(stock_ex.fusion_pass, stock)
        _last[program.name] = max(_last[program.name], taken)
        benchmark.extra_info["stock_regions"] = trace_cost(fused).regions
    elif not program.mutates:
        pytest.skip(f"the stock fusion pass, which the guard leaves as it is here, would take over {LIMIT:.0f} s")
    info = benchmark.extra_info
    info.update(program=program.name, mutates=program.mutates, length=length, ops=len(guarded.bound_symbols))
    rounds = rounds_for(lambda: guarded_nvfuser_ex.fusion_pass(guarded), budget=BUDGET)
    rivals = {} if stock is None else {"stock": lambda: stock_ex.fusion_pass(stock)}
    against(
        benchmark, lambda: guarded_nvfuser_ex.fusion_pass(guarded), Rivals(time.process_time, rivals), rounds=rounds
    )
    parts = []
    for _ in range(min(rounds, 7)):
        with stopwatch() as watch:
            fused = guarded_nvfuser_ex.fusion_pass(guarded)
        parts.append(watch.seconds)
    info["passes"] = {name: spread([part[name] for part in parts]).median for name in parts[0]}
    found = trace_cost(fused)
    info.update(regions=found.regions, bytes=found.bytes)


@pytest.mark.parametrize("mode", ["raise", "fallback"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_other_modes(benchmark, program: Synthetic, mode: str) -> None:
    """The modes that judge what stock made, on the same trace as stock."""
    trace = for_fusion(traced(*program.make(400)), stock_ex, aliases=True)

    def guard() -> None:
        with on_hazard(mode):
            guarded_nvfuser_ex.fusion_pass(trace)

    benchmark.extra_info.update(program=program.name, mutates=program.mutates, mode=mode)
    against(benchmark, guard, Rivals(time.process_time, {"stock": lambda: stock_ex.fusion_pass(trace)}), rounds=9)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_memory(benchmark, program: Synthetic) -> None:
    """The peak of Python's memory in the pass; the time is that of the traced pass, and means nothing."""
    trace = traced(*program.make(800))
    guarded, stock = (for_fusion(trace, ex, aliases=ex is stock_ex) for ex in (guarded_nvfuser_ex, stock_ex))
    for executor, its_trace in ((guarded_nvfuser_ex, guarded), (stock_ex, stock)):
        executor.fusion_pass(its_trace)  # caches are filled
    held = benchmark.pedantic(peak, args=(guarded_nvfuser_ex, guarded), rounds=1)
    of_stock = peak(stock_ex, stock)
    benchmark.extra_info.update(program=program.name, mutates=program.mutates, memory=held / of_stock)
