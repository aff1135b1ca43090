"""What each pass of the guard costs inside a real fusion pass: a stopwatch around the passes' functions."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from guarded_nvfuser import cse, hazards, prepare, regions, results, rewrite, states, violations, writeback
from guarded_nvfuser.executor import impl

PASSES: dict[str, tuple[Callable, ...]] = {
    "scan": (states.writes_anything, results.in_doubt),
    "states": (states.analyse,),
    "rewrite": (rewrite.rewrite, prepare.without_dead_writes, prepare.in_program_order, results.keep_updates),
    "regions": (
        regions.form,
        cse.merge_common,
        regions.without_dead_ops,
        impl.rematerialize,
        impl.update_fusion_call_ctx,
        impl.dce,
    ),
    "write-back": (writeback.peel, writeback.put_back),
    "judge": (hazards.judge, hazards.program_hazards, hazards.overlap_hazards, violations.in_place),
    "results": (results.exposed_views, results.settle, results.separate_results),
}


class Stopwatch:
    """Seconds spent in each pass, without the passes that it calls; what is left is in "other"."""

    def __init__(self, timer: Callable[[], float] = time.process_time) -> None:
        self._timer = timer
        self._stack = ["other"]
        self._since = timer()
        self.seconds = dict.fromkeys((*PASSES, "other"), 0.0)

    def switch(self) -> None:
        """Book the time since the last switch."""
        now = self._timer()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def timing(self, name: str, function: Callable) -> Callable:
        """A function whose time is booked on a pass."""

        @functools.wraps(function)
        def timed(*args, **kwargs):
            self.switch()
            self._stack.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self._stack.pop()

        return timed


def _users() -> list[ModuleType]:
    """The modules that may have bound a pass to a name."""
    return [impl, *(module for name, module in sys.modules.items() if name.startswith("guarded_nvfuser."))]


@contextmanager
def stopwatch(timer: Callable[[], float] = time.process_time) -> Iterator[Stopwatch]:
    """Time the passes of every fusion pass inside a `with` block; afterwards the functions are as before.

    Args:
        timer: returns seconds.
    """
    watch, bound = Stopwatch(timer), []
    timed = {id(function): watch.timing(name, function) for name, group in PASSES.items() for function in group}
    for module in _users():
        for attribute, value in list(vars(module).items()):
            if id(value) in timed:
                bound.append((module, attribute, value))
                setattr(module, attribute, timed[id(value)])
    try:
        watch.switch()
        watch.seconds = dict.fromkeys(watch.seconds, 0.0)
        yield watch
        watch.switch()
    finally:
        for module, attribute, value in bound:
            setattr(module, attribute, value)
