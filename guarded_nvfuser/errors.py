"""Errors and warnings that a user can meet: what happens, where in their source, what to do."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import dataclass

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from guarded_nvfuser.hazards import Hazard, Kind
from guarded_nvfuser.states import Write


class HazardWarning(UserWarning):
    """Ops were left to PyTorch, because nvFuser could have given them the wrong values."""


class HazardError(NotImplementedError):
    """A program that would not give what PyTorch eager gives; `hazards` holds them all.

    It derives from NotImplementedError, because that is what Thunder's own check raises.
    """

    def __init__(self, hazards: Sequence[Hazard], note: str = "") -> None:
        self.hazards = tuple(hazards)
        parts = [describe(hazard) for hazard in self.hazards]
        super().__init__("\n\n".join(parts + ([note] if note else [])))


@dataclass(frozen=True)
class Site:
    """A place in the user's source: file, line (1-based), the line's text, and the op's columns (0-based), if known."""

    file: str
    line: int
    text: str
    columns: tuple[int, int] | None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def site_of(bsym: BoundSymbol | None) -> Site | None:
    """Where an op stands in the user's source; None for ops that Thunder made."""
    if bsym is None or bsym.source_filename is None or bsym.source_positions is None:
        return None
    positions = bsym.source_positions
    if positions.lineno is None:
        return None
    text = linecache.getline(bsym.source_filename, positions.lineno).rstrip()
    one_line = positions.end_lineno == positions.lineno and positions.col_offset is not None
    columns = (positions.col_offset, positions.end_col_offset) if one_line else None
    return Site(bsym.source_filename, positions.lineno, text, columns)


_WHAT = {
    Kind.RAW: "`{read}` may not see `{must}`",
    Kind.WAR: "`{read}` may already see `{may}`",
    Kind.WAW: "`{may}` may land out of order, twice, or in another tensor's memory",
    Kind.TARGET: "nvFuser cannot update the target of `{may}` in place",
    Kind.LOST: "`{must}` would never run",
    Kind.SAVED: "backward reads `{name}`, which `{may}` overwrote after it was saved",
    Kind.UNTRACKED: "the gradient of `{read}` would miss `{may}`",
    Kind.LAYOUT: "nvFuser cannot write the target of `{may}` as it lies in memory",
    Kind.LEAF: "a leaf Variable that requires grad is being used in an in-place operation: `{may}`",
    Kind.UNCERTAIN: "`{read}` is a view or a copy by strides, which the trace does not hold, and its memory is written",
    Kind.UNDECLARED: "nobody declared what `{read}` does to memory",
    Kind.OVERLAP: "the arguments `{name}` overlap in memory, and `{may}` writes one of them",
}
_HELP = {
    Kind.RAW: "use the value that was written instead of reading the tensor again",
    Kind.WAR: "compute the read into a tensor of its own before the write, or write last",
    Kind.WAW: "write the tensor once, with its final value",
    Kind.TARGET: "write out of place: `x = x.op(...)` instead of `x.op_(...)`",
    Kind.LOST: "return the updated tensor",
    Kind.SAVED: "save a copy: use `{name}.clone()` where the value is needed later, or write out of place",
    Kind.UNTRACKED: "write out of place (`x = torch.cat(...)`, `torch.where(...)`), so that autograd sees it",
    Kind.LAYOUT: "pass a dense tensor, for instance `x.contiguous()`",
    Kind.LEAF: "update parameters under `torch.no_grad()`",
    Kind.UNCERTAIN: "use `.view(...)` for a view, `.clone()` for a copy",
    Kind.UNDECLARED: "keep the op away from tensors that are written",
    Kind.OVERLAP: "pass tensors that do not share memory, or one tensor for both",
}
_LEFT = {Kind.LAYOUT: "PyTorch writes it"}
_ELSEWHERE = "guard_on_hazard='fallback' leaves the ops on this tensor to PyTorch"


def describe(hazard: Hazard) -> str:
    """One hazard in full: code and headline, the write, the read, why, and what to do."""
    lines = [headline(hazard)]
    for label, bsym in _places(hazard):
        lines += _place(label, bsym)
    lines += [f"  = note: {note}" for note in _notes(hazard)]
    lines.append(f"  = help: {_HELP[hazard.kind].format(name=hazard.name)}")
    if hazard.kind not in (Kind.UNTRACKED, Kind.LEAF):
        lines.append(f"  = help: {_ELSEWHERE}")
    return "\n".join(lines)


def headline(hazard: Hazard) -> str:
    """A hazard in one self-contained line, beginning with its code."""
    words = {
        "read": op_text(hazard.read),
        "must": write_text(hazard.must),
        "may": write_text(hazard.may),
        "name": hazard.name,
    }
    return f"error[{hazard.kind.value}]: {_WHAT[hazard.kind].format(**words)}"


def op_text(bsym: BoundSymbol | None) -> str:
    """An op as the user wrote it, or as Thunder names it."""
    if bsym is None:
        return "?"
    site = site_of(bsym)
    if site is None:
        return "the return" if bsym.sym.name == "python_return" else bsym.sym.name
    return site.text[slice(*site.columns)] if site.columns else site.text.strip()


def write_text(write: Write | None) -> str:
    """A write as the user wrote it; state 0 is the tensor's value on entry."""
    return "the value on entry" if write is None else op_text(write.bsym)


def _places(hazard: Hazard) -> list[tuple[str, BoundSymbol]]:
    write = hazard.must if hazard.kind in (Kind.RAW, Kind.LOST) else hazard.may or hazard.must
    places = [("write", write.bsym)] if write is not None else []
    if hazard.read is not None and all(hazard.read is not bsym for _, bsym in places):
        places.append(("read", hazard.read))
    return places


def _place(label: str, bsym: BoundSymbol) -> list[str]:
    site = site_of(bsym)
    if site is None:
        return [f"  {label}: {op_text(bsym)} (made by Thunder)"]
    lines = [f"  {label}: {site}", f"    | {site.text}"]
    if site.columns is not None:
        start, end = site.columns
        lines.append(f"    | {' ' * start}{'~' * max(end - start, 1)}")
    return lines


def _notes(hazard: Hazard) -> list[str]:
    where = f"in {hazard.region}" if hazard.region else "in the order of the regions"
    if hazard.rule is not None:
        return [f"{where}: {hazard.rule.value}"]
    if hazard.kind in (Kind.RAW, Kind.WAR, Kind.WAW):
        return [f"{where}: it must see {_state(hazard.must)}, it may see {_state(hazard.may)}"]
    return []


def _state(write: Write | None) -> str:
    return "the value on entry" if write is None else f"what `{write_text(write)}` wrote"


def reasons(hazards: Sequence[Hazard]) -> dict[tuple[str, str], str]:
    """One line per region and reason, for the warning and the log; keyed by both."""
    found = {}
    for hazard in hazards:
        where = hazard.region or "between regions"
        reason = headline(hazard).removeprefix("error").replace("]:", "]", 1)
        found.setdefault((where, reason), f"{where}: {reason}; {_LEFT.get(hazard.kind, 'these ops run in PyTorch')}")
    return found


def layout_error(region: BoundSymbol, targets: Sequence[TensorProxy]) -> HazardError:
    """The refusal of a region whose targets have gaps or overlap themselves, in mode "raise"."""
    hazards = []
    for target in targets:
        update = next(
            b for b in region.subsymbols if b.sym.name == "copy_" and b.flat_proxy_args[1].name == target.name
        )
        write = Write(update, target.name, -1, 1)
        hazards.append(Hazard(Kind.LAYOUT, -1, target.name, None, write, write, region.sym.name))
    return HazardError(
        hazards, "nvFuser writes an updated input contiguously (NVIDIA/Fuser#5356): neighbours would be overwritten."
    )


def leaf_error(write: Write) -> HazardError:
    """Eager's refusal of an in-place write to a tensor that requires grad."""
    return HazardError([Hazard(Kind.LEAF, write.buffer, write.target, None, None, write)])
