"""Arithmetic of measurements: medians, spreads, ratios within one run, exponents of growth; and how rivals alternate."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Timer = Callable[[], float]


@dataclass(frozen=True)
class Spread:
    """The median of some values and the middle half of them."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def spread(values: Sequence[float]) -> Spread:
    """The median and the quartiles of some values.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values to take the median of")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


def ratios(targets: Sequence[float], references: Sequence[float]) -> list[float]:
    """Ratios of measurements that were taken in pairs, one right after the other.

    Raises:
        ValueError: not as many of the one as of the other.
    """
    if len(targets) != len(references):
        raise ValueError(f"{len(targets)} measurements cannot be compared with {len(references)} in pairs")
    return [target / reference for target, reference in zip(targets, references)]


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent p of cost = c * size**p that fits best: the slope of a line through the logarithms.

    Args:
        sizes: at least two different sizes.
        costs: the cost at each size, above 0.

    Raises:
        ValueError: fewer than two points.
    """
    if len(sizes) < 2 or len(sizes) != len(costs):
        raise ValueError("an exponent needs the costs of at least two sizes")
    line = statistics.linear_regression([math.log(size) for size in sizes], [math.log(cost) for cost in costs])
    return line.slope


@dataclass
class Rivals:
    """Rivals of a benchmark, timed right before or after each of its rounds (by turns), so that a ratio has one moment.

    Args:
        timer: what times them; the benchmark itself must use the same.
        runs: by name, a function that does the same work as the benchmark, given what `fresh` returned.
        fresh: makes new arguments for each run, outside of the time.
    """

    timer: Timer
    runs: Mapping[str, Callable]
    fresh: Callable[[], tuple] = tuple
    seconds: dict[str, list[float]] = field(default_factory=dict)
    _round: int = 0

    def before(self) -> tuple[tuple, dict]:
        """The benchmark's setup: rivals come first in even rounds. Returns the benchmark's own arguments."""
        if self._round % 2 == 0:
            self._run()
        args = self.fresh()
        gc.collect()
        return args, {}

    def after(self, *_: Any, **__: Any) -> None:
        """The benchmark's teardown: rivals come last in odd rounds."""
        if self._round % 2:
            self._run()
        self._round += 1

    def _run(self) -> None:
        for name, run in self.runs.items():
            args = self.fresh()
            gc.collect()
            gc.disable()
            started = self.timer()
            run(*args)
            self.seconds.setdefault(name, []).append(self.timer() - started)
            gc.enable()


def against(benchmark: Any, target: Callable, rivals: Rivals, rounds: int) -> dict[str, Spread]:
    """Run a benchmark beside its rivals and keep the ratios of the pairs in its `extra_info`.

    Args:
        benchmark: the fixture of pytest-benchmark, with the rivals' timer and without garbage collection.
        target: what is benchmarked.
        rivals: what it is compared with.
        rounds: how many pairs count; two more warm up.

    Returns:
        By rival, the benchmark's time over the rival's.
    """
    gc.collect()
    gc.freeze()  # what is there already need not be looked through before each run
    benchmark.pedantic(target, setup=rivals.before, teardown=rivals.after, rounds=rounds, warmup_rounds=WARM_UP)
    gc.unfreeze()
    if benchmark.stats is None:  # --benchmark-disable
        return {}
    own = list(benchmark.stats.stats.data)
    found = {name: ratios(own, seconds[WARM_UP:]) for name, seconds in rivals.seconds.items()}
    benchmark.extra_info["ratios"] = found
    return {name: spread(values) for name, values in found.items()}


WARM_UP = 2


def rounds_for(run: Callable[[], Any], *, budget: float, low: int = 3, high: int = 25) -> int:
    """How many rounds of a run fit into a budget of seconds; the run that finds out warms up too."""
    started = time.perf_counter()
    run()
    return max(low, min(high, int(budget / (time.perf_counter() - started + 1e-9))))
