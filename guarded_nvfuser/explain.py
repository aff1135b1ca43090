"""`python -m guarded_nvfuser explain CODE`: what a code means, with a program that fails and its repair.

Both programs are run by tests/test_explain.py: the first is reported with the code, the second is not, and gives what
PyTorch eager gives.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from guarded_nvfuser import explain_programs as programs
from guarded_nvfuser.hazards import Kind
from guarded_nvfuser.options import OnHazard

_NO_BARRIERS = {"skip_inplace_alias_updates": True}
_WIDTH = 100


def _two(grad: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)
    return x, w.requires_grad_(grad)


def _two_with_gradient() -> tuple[torch.Tensor, ...]:
    return _two(grad=True)


def _gaps() -> tuple[torch.Tensor, ...]:
    return (torch.arange(16.0).reshape(4, 4)[:, :2],)


def _overlapping() -> tuple[torch.Tensor, ...]:
    buffer = torch.arange(8.0)
    return buffer[:5], buffer[3:]


@dataclass(frozen=True)
class Explanation:
    """One code's page.

    Attributes:
        kind: the kind of hazard; `title`: what it is, in one line; `text`: how it comes about and what to do.
        fails, repaired: the programs.
        args: makes arguments for both.
        mode: in which the first is reported, by an error in mode "raise" and by a warning in the others.
        options: of `thunder.jit`, beside the mode.
    """

    kind: Kind
    title: str
    text: str
    fails: Callable
    repaired: Callable
    args: Callable[[], tuple[torch.Tensor, ...]] = _two
    mode: OnHazard = OnHazard.RAISE
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def page(self) -> str:
        """The page, for a terminal."""
        paragraphs = [textwrap.fill(part, _WIDTH, break_on_hyphens=False) for part in self.text.split("\n\n")]
        options = {"guard_on_hazard": self.mode.value} | self.options
        call = ", ".join(f"{name}={value!r}" for name, value in options.items())
        how = "raises HazardError" if self.mode is OnHazard.RAISE else "warns, and PyTorch runs these ops"
        parts = [
            f"{self.kind.value}: {self.title}",
            *paragraphs,
            f"This {how} with thunder.jit(fn, executors=[guarded_nvfuser_ex], {call}):",
            _source(self.fails),
            "This does not:",
            _source(self.repaired),
        ]
        return "\n\n".join(parts)


def _source(fn: Callable) -> str:
    return textwrap.indent(inspect.getsource(fn).rstrip(), "    ")


EXPLANATIONS = (
    Explanation(
        Kind.RAW,
        "a read may miss a write that comes before it",
        "A fusion computes with the values that its inputs have when it starts. A read that follows a write in the "
        "program is not ordered after it unless the data says so: nvFuser may load the input before the update "
        "lands, and a pass that merges equal expressions may take two reads for one, across the write between them.\n\n"
        "Read the value that was written: then data flow orders the two. Mode 'rewrite' does this for you.",
        programs.raw_fails,
        programs.raw_repaired,
        options=_NO_BARRIERS,
    ),
    Explanation(
        Kind.WAR,
        "a read may see a write that comes after it",
        "Nothing but data flow ties a read to its place. Rematerialisation computes a cheap read again in the "
        "fusion that needs it, which may stand behind the write; the dataflow partition moves reads; inside one "
        "fusion, kernels that run later read an input after an earlier kernel has updated it, and threads read what "
        "others have stored.\n\n"
        "Write out of place, or after everything that needs the old value. Mode 'rewrite' turns the write into a "
        "value of its own and writes the input back at the end.",
        programs.war_fails,
        programs.war_repaired,
    ),
    Explanation(
        Kind.WAW,
        "a write may land out of order, twice, or in another tensor's memory",
        "nvFuser does not order two updates of one tensor: the last store wins, whichever it is. And what only "
        "moves data (a clone, a view, a reshape) comes back from a fusion as the memory of its input, so that a "
        "write to the copy lands in the original.\n\n"
        "Write a tensor once, with its final value, and make a new one instead of updating a copy.",
        programs.waw_fails,
        programs.waw_repaired,
    ),
    Explanation(
        Kind.TARGET,
        "nvFuser cannot update this tensor in place",
        "A fusion updates an input by storing one of its outputs through that input's pointer. The target therefore "
        "has to be an input of the fusion, on the GPU, and the stored value has to have its shape and dtype: "
        "nvFuser checks none of this. A tensor that the fusion itself makes has no memory to update.\n\n"
        "Write out of place.",
        programs.target_fails,
        programs.target_repaired,
        options=_NO_BARRIERS,
    ),
    Explanation(
        Kind.LOST,
        "a write would never happen",
        "Thunder drops a fusion whose results nobody uses, although it updates an input.\n\n"
        "Return the updated tensor, so that somebody does.",
        programs.lost_fails,
        programs.lost_repaired,
        options=_NO_BARRIERS,
    ),
    Explanation(
        Kind.SAVED,
        "backward reads a tensor that was overwritten after it was saved",
        "The gradient of `w * x` needs x as it was. PyTorch eager keeps a version with every saved tensor and "
        "refuses the backward: one of the variables needed for gradient computation has been modified by an inplace "
        "operation. Thunder would read what x holds by then, and give a wrong gradient.\n\n"
        "Write out of place, or use a copy where the old value is needed. Mode 'rewrite' saves the value itself.",
        programs.saved_fails,
        programs.saved_repaired,
        _two_with_gradient,
    ),
    Explanation(
        Kind.UNTRACKED,
        "a gradient would miss a write",
        "Thunder derives gradients from the trace by names. A write that reaches a tensor through another name, for "
        "instance through a view of it, is not in what it differentiates; the gradient would be that of the program "
        "without the write.\n\n"
        "Write out of place. Mode 'rewrite' does this before gradients are derived, where the write has a "
        "functional form; the other modes refuse.",
        programs.untracked_fails,
        programs.untracked_repaired,
        _two_with_gradient,
    ),
    Explanation(
        Kind.LAYOUT,
        "nvFuser cannot write this tensor as it lies in memory",
        "nvFuser stores an updated input at contiguous addresses (NVIDIA/Fuser#5356). If the tensor has gaps, such "
        "as `buffer[:, :n]` or `x[::2]`, its neighbours in memory are overwritten. This is known only when the "
        "program is called, and is looked at once for each layout.\n\n"
        "Pass a dense tensor (a permuted one is dense), or write out of place.",
        programs.layout_fails,
        programs.layout_repaired,
        _gaps,
    ),
    Explanation(
        Kind.LEAF,
        "an in-place write to a parameter",
        "PyTorch eager refuses to update a leaf tensor that requires grad in place, and so does this library: a "
        "leaf Variable that requires grad is being used in an in-place operation.\n\n"
        "Update parameters under `torch.no_grad()` in a function of their own, as optimizers do, or compute a new "
        "tensor.",
        programs.leaf_fails,
        programs.leaf_repaired,
        _two_with_gradient,
    ),
    Explanation(
        Kind.OVERLAP,
        "two arguments overlap in memory, and one of them is written",
        "nvFuser takes the inputs of a fusion for independent tensors. Where two arguments have a byte in common "
        "without being the same tensor, a write to one changes the other, which no fusion knows of. Arguments that "
        "share a storage but no byte of it, and one tensor given twice, are fine.\n\n"
        "Pass tensors that do not share memory. Modes 'rewrite' and 'fallback' leave these ops to PyTorch.",
        programs.overlap_fails,
        programs.overlap_repaired,
        _overlapping,
    ),
    Explanation(
        Kind.UNCERTAIN,
        "a view or a copy, and only the strides tell",
        "`reshape` and `contiguous` return a view where the strides allow it and a copy where they do not. If the "
        "memory is written afterwards, the two mean different things, and the trace does not hold strides. PyTorch "
        "runs these ops, which decides as eager does.\n\n"
        "Say which is meant: `.view(...)` for a view, `.clone()` for a copy.",
        programs.uncertain_fails,
        programs.uncertain_repaired,
        mode=OnHazard.REWRITE,
    ),
    Explanation(
        Kind.UNDECLARED,
        "an operator whose effects nobody declared",
        "Thunder's operators say nothing of what they write. This library knows the effects of Thunder's and "
        "PyTorch's; an operator that you registered may do anything to what it is given, and return views of it. It "
        "runs in its place in the program, and so does everything that touches its operands.\n\n"
        "Keep it away from tensors that should be fused, or write it with operators that are known.",
        programs.undeclared_fails,
        programs.undeclared_repaired,
        mode=OnHazard.REWRITE,
    ),
)
_BY_CODE = {explanation.kind.value: explanation for explanation in EXPLANATIONS}


def add_parser(commands: Any) -> None:
    """Add the subcommand `explain` to a command line.

    Args:
        commands: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    about = "say at length what a code such as GNV002 means"
    parser = commands.add_parser("explain", help=about, description=f"{about}; without a code, list them all.")
    parser.add_argument("codes", nargs="*", type=_code, metavar="CODE", help="GNV001, ...")
    parser.set_defaults(run=run)


def _code(text: str) -> str:
    if text.upper() not in _BY_CODE:
        raise argparse.ArgumentTypeError(f"unknown code {text!r}; the known ones are {', '.join(_BY_CODE)}")
    return text.upper()


def run(options: argparse.Namespace) -> int:
    """Print the pages of some codes, or the titles of all.

    Args:
        options: `codes`, as parsed.

    Returns:
        The exit status: 0.
    """
    if not options.codes:
        print("\n".join(f"{each.kind.value}  {each.title}" for each in EXPLANATIONS))
    else:
        print("\n\n\n".join(_BY_CODE[code].page for code in dict.fromkeys(options.codes)))
    return 0
