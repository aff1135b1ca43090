"""Fuel: how many of the guard's own decisions are carried out, to find the one that changes a result.

A decision is a tensor that the rewrite takes out of memory, or a write-back that joins the region of its value. They
are made in one order for one program, so that with fuel n the first n are carried out and the others are not: PyTorch
then runs the ops, or the write-back stays a copy. `python -m guarded_nvfuser bisect` halves it.
"""

from __future__ import annotations

import os

from thunder.core.symbol import BoundSymbol

from guarded_nvfuser.sources import site_of
from guarded_nvfuser.states import Program

FUEL_VARIABLE = "GUARDED_NVFUSER_FUEL"


class Fuel:
    """A supply of fuel, and what was decided with it.

    Args:
        limit: how many decisions are carried out; None: all of them.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.decisions: list[str] = []

    def spend(self, decision: str) -> bool:
        """Whether a decision, in words, is to be carried out."""
        self.decisions.append(decision)
        return self.limit is None or len(self.decisions) <= self.limit

    def unfuelled(self, program: Program) -> frozenset[str]:
        """Decide for each written buffer of a program whether it is rewritten.

        Args:
            program: before the rewrite.

        Returns:
            The names of the buffers that are to be left as they are.
        """
        left: set[str] = set()
        for buffer, writes in program.writes.items():
            names = program.names[buffer]
            if not self.spend(f"rewrite `{names[0]}`{_at(writes[0].bsym)}"):
                left.update(names)
        return frozenset(left)

    def may_elide(self, copy: BoundSymbol, region: str) -> bool:
        """Decide whether a write-back joins a region.

        Args:
            copy: the write-back.
            region: the region's name.
        """
        return self.spend(f"write `{copy.flat_proxy_args[1].name}` back in {region}{_at(copy)}")


def _at(bsym: BoundSymbol) -> str:
    site = site_of(bsym)
    return f" ({site.file}:{site.line})" if site else ""


def fuel_limit() -> int | None:
    """How many decisions the environment variable `GUARDED_NVFUSER_FUEL` allows; None if it is not set.

    Raises:
        ValueError: it holds no number.
    """
    text = os.environ.get(FUEL_VARIABLE, "")
    if text and not text.isdecimal():
        raise ValueError(f"{FUEL_VARIABLE}: {text!r} is no number of decisions")
    return int(text) if text else None
