"""What the guard decided, as comments in the trace that `thunder.last_traces(jitted)[-1]` shows."""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol

from guarded_nvfuser.contract import operands_of
from guarded_nvfuser.effects import prim_id, tensors
from guarded_nvfuser.errors import reasons
from guarded_nvfuser.hazards import is_region
from guarded_nvfuser.verdict import Verdict


def commented(
    bsyms: Sequence[BoundSymbol], verdict: Verdict, stored: frozenset[str], milliseconds: float
) -> list[BoundSymbol]:
    """Put the verdict above the first op of a program and the actions above its regions.

    Headers of bound symbols are used, since these survive Thunder's later passes, which replace a trace's provenance.

    Args:
        bsyms: the program with regions.
        verdict: what was decided about it.
        stored: names of the results of updates that the kernels which compute them store (violations.py, in_place).
        milliseconds: how long the guard took, Thunder's own passes in between included.

    Returns:
        The program with headers.
    """
    found = [_headed(bsym, _actions(bsym, stored)) if is_region(bsym) else bsym for bsym in bsyms]
    first = next((i for i, bsym in enumerate(found) if bsym.sym.executor is not None or is_region(bsym)), None)
    if first is not None:
        found[first] = _headed(found[first], _provenance(verdict, milliseconds))
    return found


def _headed(bsym: BoundSymbol, lines: Sequence[str]) -> BoundSymbol:
    header = "\n".join([*lines, *([bsym.header] if bsym.header else [])])
    return bsym.from_bsym(header=header) if lines else bsym


def _provenance(verdict: Verdict, milliseconds: float) -> list[str]:
    words = "safe" if verdict.safe else "left in part to PyTorch"
    lines = [f"Fusion by guarded_nvfuser, mode {verdict.mode.value}: {words} (took {milliseconds:.1f} milliseconds)"]
    return lines + [f"guarded_nvfuser: {reason}" for reason in reasons(verdict.hazards).values()]


def _actions(region: BoundSymbol, stored: frozenset[str]) -> list[str]:
    together, apart = [], []
    for update in region.subsymbols:
        if prim_id(update) is PrimIDs.COPY_:
            names = {out.name for out in tensors(update.flat_outs)}
            (together if names & stored else apart).append(operands_of(update)[1].name)
    found = [f"guarded_nvfuser: updates {', '.join(together)} in place"] if together else []
    return found + ([f"guarded_nvfuser: updates {', '.join(apart)} in a kernel of its own"] if apart else [])
