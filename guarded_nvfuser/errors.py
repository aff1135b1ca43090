"""Errors and warnings that a user can meet: what happens, where in their source, what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from guarded_nvfuser.arguments import current_sharing
from guarded_nvfuser.hazards import Hazard, Kind
from guarded_nvfuser.sources import Mark, Site, excerpt, site_of
from guarded_nvfuser.states import Write
from guarded_nvfuser.wording import Words, words_for

_TARGET = re.compile(r"([A-Za-z_][\w.]*)(?:\[.*?\])?(?:\.\w+_\(|\s*(?:[-+*/@&|^%]|<<|>>|//|\*\*)?=)")


class HazardWarning(UserWarning):
    """Ops were left to PyTorch, because nvFuser could have given them the wrong values."""


class HazardError(NotImplementedError):
    """A program that would not give what PyTorch eager gives; `hazards` holds them all.

    It derives from NotImplementedError, because that is what Thunder's own check raises.
    """

    def __init__(self, hazards: Sequence[Hazard], note: str = "") -> None:
        self.hazards = tuple(hazards)
        parts = [describe(hazard) for hazard in self.hazards]
        super().__init__("\n\n".join([*parts, *([note] if note else []), *_explained(self.hazards)]))


def _explained(hazards: Sequence[Hazard]) -> list[str]:
    codes = dict.fromkeys(hazard.kind.value for hazard in hazards)
    return [f"For more, try `python -m guarded_nvfuser explain {' '.join(codes)}`."] if codes else []


def describe(hazard: Hazard) -> str:
    """One hazard in full, in the form of rustc's messages.

    Args:
        hazard: any.

    Returns:
        The code and the headline; the read and the writes, underlined in the user's source; notes on what may happen;
        the edit that removes the hazard and the mode that runs the program as it is.
    """
    words, fields = words_for(hazard), _fields(hazard)
    lines = [headline(hazard)]
    places = _places(hazard, words)
    marks = [Mark(site, label, primary=bsym is places[0][0]) for bsym, label in places if (site := site_of(bsym))]
    lines += excerpt(marks)
    lines += [
        f"  = note: {label}: `{op_text(bsym)}`, which Thunder made" for bsym, label in places if site_of(bsym) is None
    ]
    lines += [f"  = note: {note}" for note in _notes(hazard, words)]
    lines.append(f"  = help: {words.edit.format(**fields)}")
    lines += [f"  = help: {words.mode.value}"] if words.mode.value else []
    return "\n".join(lines)


def headline(hazard: Hazard) -> str:
    """A hazard in one self-contained line, beginning with its code."""
    return f"error[{hazard.kind.value}]: {words_for(hazard).headline.format(**_fields(hazard))}"


def _fields(hazard: Hazard) -> dict[str, str]:
    return {
        "read": op_text(hazard.read),
        "must": _state(hazard.must),
        "wrote": write_text(hazard.must),
        "may": write_text(hazard.may),
        "name": name_text(hazard),
    }


def name_text(hazard: Hazard) -> str:
    """A hazard's tensor as the user calls it where they write it; Thunder's own names (`t21`) mean nothing to them."""
    if not re.fullmatch(r"t\d+", hazard.name):
        return hazard.name
    found = (_TARGET.match(write_text(write)) for write in (hazard.may, hazard.must) if write is not None)
    return next((match[1] for match in found if match), hazard.name)


def op_text(bsym: BoundSymbol | None) -> str:
    """An op as the user wrote it, or as Thunder names it."""
    if bsym is None:
        return "?"
    site = site_of(bsym)
    if site is None or not site.op:
        return "the return" if bsym.sym.name == "python_return" else bsym.sym.name
    return site.op


def write_text(write: Write | None) -> str:
    """A write as the user wrote it; state 0 is the tensor's value on entry."""
    return "the value on entry" if write is None else op_text(write.bsym)


def _state(write: Write | None) -> str:
    return "the value on entry" if write is None else f"what `{write_text(write)}` wrote"


def _places(hazard: Hazard, words: Words) -> list[tuple[BoundSymbol, str]]:
    """The ops to show, the one that the message is about first, each once."""
    of_writes = [(hazard.must, words.at_must), (hazard.may, words.at_may)]
    places = [(hazard.read, words.at_read)] if hazard.read is not None else []
    places += [(write.bsym, label) for write, label in of_writes if write is not None and label]
    # a dict keeps the first place of an op, and the last label: that of the write, where it is the op that reads
    return list({site_of(bsym) or op_text(bsym): (bsym, label) for bsym, label in places}.values())


def _notes(hazard: Hazard, words: Words) -> list[str]:
    where = f"in {hazard.region}" if hazard.region else "in the order of the regions"
    notes = _overlap(hazard)
    if hazard.rule is not None:
        return [*notes, f"{where}: {hazard.rule.value}"]
    if hazard.kind in (Kind.RAW, Kind.WAR):
        notes.append(f"{where}: it must see {_state(hazard.must)}, it may see {_state(hazard.may)}")
    return [*notes, *([words.cause] if words.cause else [])]


def _overlap(hazard: Hazard) -> list[str]:
    """How two arguments of the compilation under way overlap."""
    sharing = current_sharing()
    pairs = {f"{a}` and `{b}": detail for (a, b), detail in zip(sharing.overlapping_names, sharing.details)}
    return [pairs[hazard.name]] if hazard.kind is Kind.OVERLAP and hazard.name in pairs else []


_LEFT = {Kind.LAYOUT: "PyTorch writes it"}


def reasons(hazards: Sequence[Hazard]) -> dict[tuple[str, str], str]:
    """One line per region and reason, for the warning and the log; keyed by both."""
    found = {}
    for hazard in hazards:
        where = hazard.region or "between regions"
        reason = f"{headline(hazard).removeprefix('error').replace(']:', ']', 1)}{_at(hazard)}"
        found.setdefault((where, reason), f"{where}: {reason}; {_LEFT.get(hazard.kind, 'these ops run in PyTorch')}")
    return found


def _at(hazard: Hazard) -> str:
    site = next((site for bsym, _ in _places(hazard, words_for(hazard)) if (site := site_of(bsym))), None)
    return f" at {site.file}:{site.line}" if site else ""


def layout_error(region: BoundSymbol, targets: Sequence[TensorProxy]) -> HazardError:
    """The refusal of a region whose targets have gaps or overlap themselves, in mode "raise"."""
    hazards = []
    for target in targets:
        update = next(
            b for b in region.subsymbols if b.sym.name == "copy_" and b.flat_proxy_args[1].name == target.name
        )
        write = Write(update, target.name, -1, 1)
        hazards.append(Hazard(Kind.LAYOUT, -1, target.name, None, write, write, region.sym.name))
    return HazardError(hazards)


def leaf_error(write: Write) -> HazardError:
    """Eager's refusal of an in-place write to a tensor that requires grad."""
    return HazardError([Hazard(Kind.LEAF, write.buffer, write.target, None, None, write)])


__all__ = [
    "HazardError",
    "HazardWarning",
    "Site",
    "describe",
    "headline",
    "layout_error",
    "leaf_error",
    "op_text",
    "reasons",
    "site_of",
    "write_text",
]
