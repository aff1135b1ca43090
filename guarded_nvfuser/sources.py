"""Places in the user's source, and excerpts of it with the ops underlined, in the form of rustc's."""

from __future__ import annotations

import linecache
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import thunder
from thunder.core.symbol import BoundSymbol

_THUNDER = Path(thunder.__file__).parent


@dataclass(frozen=True)
class Site:
    """A place in the user's source.

    Attributes:
        file: the file's name; `line`: 1-based.
        text: the line, empty if nobody can read it.
        columns: where the op stands in the text (0-based, in characters); None if unknown.
        spread: the op goes on in the next lines; `columns` then end with this one.
    """

    file: str
    line: int
    text: str
    columns: tuple[int, int] | None
    spread: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f":{self.columns[0] + 1}" if self.columns else "")

    @property
    def op(self) -> str:
        """The op as the user wrote it; empty if the source is not there."""
        found = self.text[slice(*self.columns)] if self.columns else self.text
        return found.strip() + ("...)" if self.spread and found.rstrip().endswith("(") else "")


@dataclass(frozen=True)
class Mark:
    """An underlined op: where, what to say beside it, and whether it is the one that the message is about."""

    site: Site
    label: str
    primary: bool = False


def site_of(bsym: BoundSymbol | None) -> Site | None:
    """Where an op stands in the user's source; None for ops that Thunder made."""
    if bsym is None or bsym.source_filename is None or bsym.source_positions is None:
        return None
    positions = bsym.source_positions
    if positions.lineno is None or Path(bsym.source_filename).is_relative_to(_THUNDER):
        return None
    text = linecache.getline(bsym.source_filename, positions.lineno).rstrip()
    spread = positions.end_lineno is not None and positions.end_lineno > positions.lineno
    return Site(bsym.source_filename, positions.lineno, text, _columns(text, positions, spread), spread)


def _columns(text: str, positions, spread: bool) -> tuple[int, int] | None:
    """Python counts columns in bytes of UTF-8; here they are characters."""
    if positions.col_offset is None or positions.end_col_offset is None or not text:
        return None
    raw = text.encode()
    start = len(raw[: positions.col_offset].decode(errors="ignore"))
    end = len(text) if spread else len(raw[: positions.end_col_offset].decode(errors="ignore"))
    return (start, end) if start < end else None


def excerpt(marks: Sequence[Mark]) -> list[str]:
    """The lines of source that hold some marks, each op underlined: `^` for the primary ones, `-` for the others.

    Args:
        marks: in order of interest; the first one's place stands in the arrow.

    Returns:
        Lines of text: an arrow to the place, the source with line numbers, underlines with labels.
    """
    width = max((len(str(mark.site.line)) for mark in marks), default=0)
    lines: list[str] = []
    for found in _by_file(marks):
        readable = [mark for mark in found if mark.site.text]
        for mark in found[:1] if readable else found:
            label = "" if readable else f" ({mark.label})"
            lines.append(f"{' ' * width}{':::' if lines else '-->'} {mark.site}{label}")
        if readable:
            lines += [f"{' ' * width} |", *_listing(readable, width), f"{' ' * width} |"]
    return lines


def _by_file(marks: Sequence[Mark]) -> list[list[Mark]]:
    files = list(dict.fromkeys(mark.site.file for mark in marks))
    return [[mark for mark in marks if mark.site.file == file] for file in files]


def _listing(marks: Sequence[Mark], width: int) -> list[str]:
    lines: list[str] = []
    before = None
    for line, here in groupby(sorted(marks, key=lambda mark: mark.site.line), key=lambda mark: mark.site.line):
        here = list(here)
        if before is not None and line > before + 1:
            lines.append("...")
        lines.append(f"{line:>{width}} | {here[0].site.text}")
        lines += [f"{' ' * width} | {_underline(mark)}" for mark in here]
        before = line
    return lines


def _underline(mark: Mark) -> str:
    text = mark.site.text
    start, end = mark.site.columns or (len(text) - len(text.lstrip()), len(text))
    padding = "".join("\t" if character == "\t" else " " * _cells(character) for character in text[:start])
    length = sum(map(_cells, text[start:end]))
    return f"{padding}{('^' if mark.primary else '-') * length} {mark.label}"


def _cells(character: str) -> int:
    """How many cells of a terminal a character takes."""
    return 2 if unicodedata.east_asian_width(character) in "WF" else 0 if unicodedata.combining(character) else 1
