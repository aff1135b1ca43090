"""What messages say of each kind of hazard: the first line, what nvFuser may do, and the edit that removes the hazard.

Templates name `{read}`, `{may}`, `{wrote}` (the read, the write it may see, the write it must see, as the user wrote
them), `{must}` (the state to see, in words) and `{name}` (the tensor).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from guarded_nvfuser.contract import Rule
from guarded_nvfuser.effects import leaves
from guarded_nvfuser.hazards import Hazard, Kind
from guarded_nvfuser.states import key_of


class Mode(Enum):
    """What runs a program with a hazard."""

    ANY = "guard_on_hazard='rewrite' (the default) runs it without this hazard; 'fallback' leaves its ops to PyTorch"
    PYTORCH = "with guard_on_hazard='rewrite' (the default) or 'fallback' PyTorch writes this tensor"
    NONE = ""


@dataclass(frozen=True)
class Words:
    """The texts for one kind of hazard, or for one rule of the contract that fails.

    Attributes:
        headline: the first line, without its code.
        cause: what nvFuser, Thunder or autograd may do; empty if the rule or the headline says it.
        edit: what to write instead.
        mode: which mode runs the program; autograd's hazards and eager's own refusals have none.
        at_read, at_must, at_may: what stands beside the ops in the source; empty: the op is not shown.
    """

    headline: str
    cause: str
    edit: str
    mode: Mode = Mode.ANY
    at_read: str = "read here"
    at_must: str = ""
    at_may: str = "written here"


_ORDER = "nvFuser and Thunder order ops by data flow alone: a read may be moved, merged or repeated across a write"
_WORDS = {
    Kind.RAW: Words(
        "`{read}` may not see {must}",
        _ORDER,
        "use the value that was written instead of reading `{name}` again",
        at_must="this write must be seen",
        at_may="this write may be seen instead",
    ),
    Kind.WAR: Words(
        "`{read}` may already see what `{may}` writes",
        _ORDER,
        "write last, or out of place: a new tensor instead of `{may}`",
        at_must="this write must be seen",
        at_may="this write may be seen already",
    ),
    Kind.WAW: Words(
        "`{read}` may land before `{may}`",
        _ORDER,
        "write `{name}` once, with its final value",
        at_read="written here",
        at_may="this write must come first",
    ),
    Kind.TARGET: Words(
        "nvFuser cannot update the target of `{may}` in place",
        "",
        "write out of place: `h = h.op(...)` instead of `h.op_(...)`",
    ),
    Kind.LOST: Words(
        "`{wrote}` would never run",
        "Thunder drops a fusion whose results nobody uses, and its updates with it",
        "return `{name}` after the write",
        at_must="written here",
        at_may="",
    ),
    Kind.SAVED: Words(
        "backward reads `{name}`, which `{may}` overwrote after it was saved",
        "PyTorch eager refuses such a backward: one of the variables needed for gradient computation has been modified",
        "save a copy: use `{name}.clone()` where the value is needed later, or write out of place",
        at_read="needed in backward",
        at_may="overwritten here",
    ),
    Kind.UNTRACKED: Words(
        "the gradient of `{read}` would miss `{may}`",
        "Thunder derives gradients by names, and this write reached the tensor by another one",
        "write out of place (`torch.where(...)`, `torch.cat(...)`), so that autograd sees it",
        Mode.NONE,
    ),
    Kind.LAYOUT: Words(
        "nvFuser cannot write the target of `{may}` as it lies in memory",
        "nvFuser writes an updated input contiguously (NVIDIA/Fuser#5356): neighbours in memory would be overwritten",
        "pass a dense tensor, for instance `{name}.contiguous()`",
        Mode.PYTORCH,
    ),
    Kind.LEAF: Words(
        "a leaf Variable that requires grad is being used in an in-place operation: `{may}`",
        "PyTorch eager refuses it too",
        "update parameters under `torch.no_grad()` in a function of their own, or compute a new tensor",
        Mode.NONE,
    ),
    Kind.OVERLAP: Words(
        "the arguments `{name}` overlap in memory, and `{may}` writes one of them",
        "nvFuser takes its inputs for independent tensors",
        "pass tensors that do not share memory, or one tensor for both",
        Mode.PYTORCH,
    ),
    Kind.UNCERTAIN: Words(
        "`{read}` is a view or a copy by strides, which the trace does not hold, and its memory is written",
        "a later read sees the write if it is a view, and does not if it is a copy",
        "use `.view(...)` for a view, `.clone()` for a copy",
        Mode.PYTORCH,
        at_read="a view or a copy",
    ),
    Kind.UNDECLARED: Words(
        "nobody declared what `{read}` does to memory",
        "an op without declared effects may write whatever it is given, and return views of it",
        "keep the op away from tensors that are written",
        Mode.PYTORCH,
        at_read="may do anything to its operands",
    ),
}
_BY_RULE = {
    Rule.ONE_UPDATE: Words(
        "`{read}` is one of several updates of `{name}` in one fusion, and any of them may land last",
        "",
        "write `{name}` once, with its final value",
        at_read="written here",
        at_may="and here",
    ),
    Rule.ONE_NAME: Words(
        "`{read}` updates memory that the same fusion is given under a second name",
        "",
        "read and write `{name}` by one name, without views of it beside it",
        at_read="written here",
    ),
    Rule.TARGET_IS_INPUT: Words(
        "nvFuser cannot update the target of `{may}` in place: it is made inside the fusion",
        "",
        "write out of place: `h = h.op(...)` instead of `h.op_(...)`",
    ),
    Rule.TARGET_ON_DEVICE: Words(
        "nvFuser cannot update the target of `{may}` in place: it does not lie on a GPU",
        "",
        "move `{name}` to the GPU, or update it outside the compiled function",
    ),
    Rule.SAME_KIND: Words(
        "nvFuser cannot update the target of `{may}` in place: the value has another shape or dtype",
        "",
        "write a value of the target's shape and dtype: `{name}.copy_(value.to({name}.dtype).expand_as({name}))`",
    ),
}
_TWICE = Words(
    "`{read}` may be carried out twice",
    "Thunder's rematerialisation repeats what is cheap in every fusion that needs it, writes too",
    "write out of place: a new tensor instead of `{may}`",
    at_read="written here",
)
_ELSEWHERE = Words(
    "`{may}` may land in the memory of another tensor",
    "nvFuser returns what only moves data (clone, view, reshape, slice) as the memory of its input",
    "write out of place: a new tensor instead of `{may}`",
)
_MISTAKEN = Words(
    "`{read}` may be given another tensor's memory",
    "a pass of Thunder's took two tensors that hold the same values for one, and one of them is written",
    "write out of place, or make the tensors in different ways",
    at_read="here",
)


def words_for(hazard: Hazard) -> Words:
    """The texts for a hazard: by the rule that fails if it has texts of its own, else by kind.

    Args:
        hazard: any.

    Returns:
        Templates.
    """
    if hazard.kind in (Kind.WAW, Kind.TARGET) and hazard.rule in _BY_RULE:
        return _BY_RULE[hazard.rule]
    return _WORDS[hazard.kind] if hazard.kind is not Kind.WAW else _order_words(hazard)


def _order_words(hazard: Hazard) -> Words:
    """A write between regions: the judge says by its states how it goes astray (hazards.py, land and check_shares)."""
    read, may = hazard.read, hazard.may
    if read is None or may is None:
        return _ELSEWHERE
    if not any(effects.writes for _, effects in leaves(read)):
        return _MISTAKEN
    if hazard.must is not None and hazard.must.state == may.state:
        return _TWICE
    return _ELSEWHERE if key_of(read) == key_of(may.bsym) else _WORDS[Kind.WAW]
