"""Structure: regions, ops left to PyTorch and bytes moved, for stock Thunder, the guard, and a functional twin.

Exact counts that need no GPU: regions are formed as for a GPU, and run on the CPU by the interpreter.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import thunder
from thunder.extend import FusionExecutor

from guarded_nvfuser import Cost, HazardWarning, cost, guarded_nvfuser_ex, verdicts
from guarded_nvfuser.executor import InterpretableNvFuserExecutor
from guarded_nvfuser.options import INTERPRET_VARIABLE
from tests.quality import Pair

stock_ex = InterpretableNvFuserExecutor("stock_nvfuser")  # Thunder's passes, its regions, no guard


@contextmanager
def interpreted() -> Iterator[None]:
    """Run regions on the CPU inside a `with` block."""
    before = os.environ.get(INTERPRET_VARIABLE)
    os.environ[INTERPRET_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[INTERPRET_VARIABLE]
        else:
            os.environ[INTERPRET_VARIABLE] = before


@dataclass(frozen=True)
class Row:
    """One program of the table; a cost is None where the program is refused.

    Attributes:
        name: the program.
        stock, guarded, twin: costs under stock Thunder, under the guard, and of the functional twin under the guard.
        copies: updates that the guard leaves to copies outside of regions.
        hazards: what the guard could not rewrite.
    """

    name: str
    stock: Cost | None
    guarded: Cost
    twin: Cost | None
    copies: int
    hazards: int

    def as_json(self) -> dict[str, Any]:
        """Plain values, for `extra_info`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Row:
        """The row that `as_json` took apart."""
        costs = {name: values[name] and Cost(**values[name]) for name in ("stock", "guarded", "twin")}
        return cls(values["name"], copies=values["copies"], hazards=values["hazards"], **costs)


def compiled(fn: Callable, args: Sequence, executor: FusionExecutor, **options: Any) -> Callable:
    """A program after its first call."""
    jitted = thunder.jit(fn, executors=[executor], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HazardWarning)
        jitted(*args)
    return jitted


def stock_cost(pair: Pair) -> Cost | None:
    """What stock Thunder makes of a program; None where it refuses."""
    try:
        return cost(compiled(pair.program, pair.make_args(), stock_ex))
    except (NotImplementedError, RuntimeError):
        return None


def copies(jitted: Callable) -> int:
    """Copies that PyTorch runs, outside of regions."""
    return sum(bsym.sym.name == "copy_" for bsym in thunder.last_traces(jitted)[-1].bound_symbols)


def row(pair: Pair) -> Row:
    """The structure of a program beside its twin's."""
    guarded = compiled(pair.program, pair.make_args(), guarded_nvfuser_ex)
    twin = cost(compiled(pair.twin, pair.make_args(), guarded_nvfuser_ex)) if pair.twin else None
    hazards = sum(len(verdict.hazards) for verdict in verdicts(guarded))
    return Row(pair.name, stock_cost(pair), cost(guarded), twin, copies(guarded), hazards)
