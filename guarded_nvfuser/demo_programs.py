"""The demo's programs. The report shows their source as a user would write it, so they have no annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


def recompute(x, w):
    y = x.sin()
    x.mul_(2)
    z = x @ w
    return y + z


def merge(x, y):
    a = x + y
    x.copy_(a * 2)
    b = x + y
    return a, b


def swap(x, y):
    t = x.clone()
    x.copy_(y)
    y.copy_(t)


def transpose(x):
    x.copy_(x.t() * 2)


def gaps(x):  # called with x = buf[:, :2], whose rows lie apart in memory
    x.mul_(2)


def halves(a, b):  # called with a, b = buf[:2], buf[2:], which share a storage and no element
    a.add_(1)
    return a + b


def refused(x, y):
    z = x * y
    x.copy_(z)
    return x + y


def split(a):
    a.tanh_()
    return a * a * a * a


@dataclass(frozen=True)
class Program:
    """One program of the demo."""

    name: str  # what `--only` selects it by
    fn: Callable  # returns tensors or nothing
    why: str  # the cause of what stock Thunder does
    real: str = ""  # what only real nvFuser gets wrong, from its contract; the interpreter cannot show it
    options: Mapping[str, Any] = field(default_factory=dict)  # further options of `thunder.jit`
    columns: int = 2  # of the buffers whose first two columns are the arguments
    shared: bool = False  # whether the arguments are consecutive rows of one buffer

    def args(self) -> dict[str, torch.Tensor]:
        """Fresh arguments by name: small numbers, which a reader can check by eye."""
        names = list(inspect.signature(self.fn).parameters)
        if self.shared:
            return dict(zip(names, torch.arange(1.0, 1 + 4 * len(names)).reshape(-1, 2).split(2)))
        numbers = torch.arange(2.0 * self.columns).reshape(2, self.columns)
        return {name: (numbers + 1 + 4 * index)[:, :2] for index, name in enumerate(names)}


_DATAFLOW, _NO_BARRIERS = {"fusion_type": "dataflow"}, {"skip_inplace_alias_updates": True}
PROGRAMS = (
    Program("recompute", recompute, "rematerialisation computes x.sin() again, after x was overwritten"),
    Program("dataflow", recompute, "nothing orders a read before a later write (ThunderFX's default)", "", _DATAFLOW),
    Program("merge", merge, "CSE merges the two x + y, across the write between them", "", _NO_BARRIERS),
    Program(
        "swap",
        swap,
        "rematerialisation clones x again, after x was overwritten",
        "wrong even where the clone stays in its place: a clone comes back as the memory of x itself",
    ),
    Program(
        "transpose",
        transpose,
        "x and x.t() enter the region as two inputs, and nvFuser takes them for independent tensors",
        "x itself is wrong: some threads read x.t() where others have already written x",
    ),
    Program(
        "gaps",
        gaps,
        "no trace tells how x lies in memory",
        "the update lands between x's rows (NVIDIA/Fuser#5356)",
        columns=4,
    ),
    Program("halves", halves, "Thunder takes arguments that share a storage for the same tensor", shared=True),
    Program("refused", refused, "Thunder refuses a region that reads a copy_'s target after it", "", _NO_BARRIERS),
    Program("split", split, "the barriers that Thunder inserts before in-place ops break fusions"),
)
