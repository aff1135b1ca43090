"""Errors and warnings: the code, the write and the read in the user's source, why, and what to do."""

from __future__ import annotations

import inspect
import linecache
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
from thunder.core import prims

from guarded_nvfuser import Hazard, HazardError, HazardWarning, Kind, guarded_nvfuser_ex
from guarded_nvfuser.errors import describe, headline, layout_error, leaf_error, op_text, reasons, site_of, write_text
from guarded_nvfuser.hazards import is_region
from tests.support import Config, jit, run


def tensors(*, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)
    return x, w.requires_grad_(grad)


def refusal(fn: Callable, *, grad: bool = False, mode: str = "raise", **options: Any) -> HazardError:
    """The error that mode raise gives for a program."""
    with pytest.raises(HazardError) as refused:
        run(jit(fn, Config(mode, **options)), lambda: tensors(grad=grad), backward=grad)
    return refused.value


def line_of(fn: Callable, text: str) -> int:
    """The number of the only line of a function that holds a text, as an error names it."""
    lines, first = inspect.getsourcelines(fn)
    [found] = [number for number, line in enumerate(lines, first) if text in line]
    return found


def read_after_write(x, w):
    z = x * w
    prims.copy_(z, x, grad_enabled=False)
    return x + w


def recomputed_read(x, w):
    y = x.sin()
    x.mul_(2)
    return y + x @ w


def updated_clone(x, w):
    t = x.clone()
    t.mul_(w)
    return t - x


def updated_twice(x, w):
    x.sub_(w)
    x.mul_(2)
    return x + w


def updated_temporary(x, w):
    h = w * 1.5
    h.view(-1).mul_(x.view(-1))
    return h.sin()


def lost_update(x, w):
    prims.copy_(w, x, grad_enabled=False)


def overwritten_save(x, w):
    y = w * x
    x.mul_(2)
    return y


def write_through_a_view(x, w):
    h = w * 1.5
    h.view(-1).mul_(2)
    return h.sin()


def parameter_in_place(x, w):
    w.mul_(2)
    return w * x


# kind, program, options, part of the headline, the write's text, the read's text
PROGRAMS = [
    (Kind.RAW, read_after_write, {}, "may not see", "prims.copy_(z, x", "x + w"),
    (Kind.WAR, recomputed_read, {}, "may already see", "x.mul_(2)", "x.sin()"),
    (Kind.WAW, updated_clone, {}, "may land out of order", "t.mul_(w)", None),
    (Kind.TARGET, updated_temporary, {"skip": True}, "cannot update the target", "h.view(-1).mul_", None),
    (Kind.LOST, lost_update, {}, "would never run", "prims.copy_(w, x", None),
    (Kind.SAVED, overwritten_save, {"grad": True}, "overwrote after it was saved", "x.mul_(2)", None),
    (Kind.UNTRACKED, write_through_a_view, {"grad": True}, "would miss", "h.view(-1).mul_(2)", "h.sin()"),
    (Kind.LEAF, parameter_in_place, {"grad": True}, "a leaf Variable that requires grad", "w.mul_(2)", None),
]


@pytest.mark.parametrize(
    "kind, fn, options, words, write, read", PROGRAMS, ids=lambda value: getattr(value, "name", "")
)
def test_every_kind_names_its_places(
    kind: Kind, fn: Callable, options: dict, words: str, write: str, read: str | None
) -> None:
    """A refusal carries its kind's code and names the write, and the read if there is one: file, line, text."""
    error = refusal(fn, **options)
    [hazard] = [hazard for hazard in error.hazards if hazard.kind is kind][:1]
    text = describe(hazard)
    assert text in str(error)
    first, *rest = text.splitlines()
    assert first.startswith(f"error[{kind.value}]: ")
    assert words in first
    for label, part in (("write", write), ("read", read)):
        if part is not None:
            place = f"  {label}: {inspect.getsourcefile(fn)}:{line_of(fn, part)}"
            assert place in rest
            assert rest[rest.index(place) + 1] == f"    | {linecache.getline(__file__, line_of(fn, part)).rstrip()}"
    assert any(line.startswith("  = help: ") for line in rest)


def test_whole_message() -> None:
    """The message in full, for one hazard: headline, both places with the op underlined, note, two ways out."""
    error = refusal(recomputed_read)
    file, first = inspect.getsourcefile(recomputed_read), inspect.getsourcelines(recomputed_read)[1]
    assert str(error) == (
        f"error[GNV002]: `x.sin()` may already see `x.mul_(2)`\n"
        f"  write: {file}:{first + 2}\n"
        f"    |     x.mul_(2)\n"
        f"    |     ~~~~~~~~~\n"
        f"  read: {file}:{first + 1}\n"
        f"    |     y = x.sin()\n"
        f"    |         ~~~~~~~\n"
        f"  = note: in nvFusion2: it must see the value on entry, it may see what `x.mul_(2)` wrote\n"
        f"  = help: compute the read into a tensor of its own before the write, or write last\n"
        f"  = help: guard_on_hazard='fallback' leaves the ops on this tensor to PyTorch"
    )


def test_error_is_what_thunders_check_raises() -> None:
    """Code that catches Thunder's own refusal of in-place copies catches this one."""
    error = refusal(recomputed_read)
    assert isinstance(error, NotImplementedError)
    assert error.hazards
    assert all(isinstance(hazard, Hazard) for hazard in error.hazards)


def test_every_hazard_is_described_once() -> None:
    """An error holds all hazards of a program, each in a paragraph of its own, in their order."""
    error = refusal(updated_twice, skip=True)
    assert len(error.hazards) > 1
    assert str(error).split("\n\n") == [describe(hazard) for hazard in error.hazards]
    assert len(set(map(headline, error.hazards))) == len(error.hazards)


def test_contract_claims_are_notes() -> None:
    """Where a region breaks the contract, the note says which claim fails and what nvFuser may do."""
    [hazard] = [hazard for hazard in refusal(updated_temporary, skip=True).hazards if hazard.kind is Kind.TARGET]
    assert f"  = note: in {hazard.region}: {hazard.rule.value}" in describe(hazard).splitlines()


def test_gradients_are_not_sent_to_fallback() -> None:
    """Fallback cannot repair what Thunder's autograd derived wrongly, so the help does not name it."""
    for fn in (write_through_a_view, parameter_in_place):
        error = refusal(fn, grad=True, mode="fallback")
        assert "guard_on_hazard" not in str(error)
        assert "= help: " in str(error)


def test_every_kind_has_words_and_help() -> None:
    """No kind lacks its headline or its help, and each has a code of its own."""
    write = refusal(recomputed_read).hazards[0].may
    for kind in Kind:
        text = describe(Hazard(kind, 0, "x", write.bsym, write, write))
        assert text.startswith(f"error[{kind.value}]: ")
        assert "  = help: " in text
        assert "{" not in text
    assert len({kind.value for kind in Kind}) == len(Kind)


def test_the_value_on_entry_has_a_name() -> None:
    """State 0 is not a write; it is called the value on entry. A missing op is called nothing."""
    assert write_text(None) == "the value on entry"
    assert op_text(None) == "?"
    assert site_of(None) is None


def test_ops_of_thunders_own_have_no_place() -> None:
    """An op that no line of the user's made is named as Thunder names it, and said to be Thunder's."""
    [hazard] = [hazard for hazard in refusal(overwritten_save, grad=True).hazards if hazard.kind is Kind.SAVED][:1]
    assert site_of(hazard.read) is None or site_of(hazard.read).file == __file__
    made_by_thunder = Hazard(Kind.RAW, 0, "x", prims.python_return.bind((), output=None), None, None)
    assert "`the return` may not see `the value on entry`" in headline(made_by_thunder)
    assert "  read: the return (made by Thunder)" in describe(made_by_thunder)


def test_an_op_over_several_lines_shows_its_first() -> None:
    """An op that spans lines is shown by the line it starts on, without an underline that would not fit."""

    def spread(x, w):
        y = x.sin()
        x.mul_(
            w,
        )
        return y + x @ w

    error = refusal(spread)
    lines = str(error).splitlines()
    place = lines.index(f"  write: {__file__}:{line_of(spread, 'x.mul_(')}")
    assert lines[place + 1] == "    |         x.mul_("
    assert "~" not in lines[place + 2]


def test_source_that_is_gone_still_has_a_place() -> None:
    """A program whose source nobody can read is refused with file and line."""
    scope: dict[str, Any] = {}
    source = "def program(x, w):\n    y = x.sin()\n    x.mul_(2)\n    return y + x @ w\n"
    exec(compile(source, "<nowhere>", "exec"), scope)
    linecache.checkcache()
    error = refusal(scope["program"])
    assert "  write: <nowhere>:3" in str(error)
    assert "  read: <nowhere>:2" in str(error)


# --- warnings and the log


def test_fallback_warns_once_per_region_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    """What is left to PyTorch is said in one warning of a category of its own; the log has the same line."""
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO, "guarded_nvfuser"):
        warnings.simplefilter("always")
        jitted = jit(recomputed_read, Config("fallback"))
        jitted(*tensors())
        jitted(*tensors())
    told = [str(warning.message) for warning in caught if warning.category is HazardWarning]
    assert told == ["nvFusion2: [GNV002] `x.sin()` may already see `x.mul_(2)`; these ops run in PyTorch"]
    assert [record.message for record in caplog.records if record.name == "guarded_nvfuser"] == told


def test_rewriting_and_safe_programs_warn_of_nothing() -> None:
    """No warning where nothing is left to PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", HazardWarning)
        jit(recomputed_read, Config("rewrite"))(*tensors())
        jit(lambda x, w: x.mul_(w), Config("fallback"))(*tensors())


def test_a_warning_can_be_made_an_error() -> None:
    """Strict users filter the category; the program is then refused before it runs."""
    x, w = tensors()
    before = x.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", HazardWarning)
        with pytest.raises(HazardWarning, match="GNV002"):
            jit(recomputed_read, Config("fallback"))(x, w)
    assert torch.equal(x, before)


def test_reasons_merge_what_reads_alike() -> None:
    """Two hazards of one region with the same headline are one reason; other regions and headlines are others."""
    [hazard] = refusal(recomputed_read).hazards[:1]
    elsewhere = Hazard(hazard.kind, hazard.buffer, hazard.name, hazard.read, hazard.must, hazard.may, None)
    found = reasons([hazard, hazard, elsewhere])
    assert [where for where, _ in found] == ["nvFusion2", "between regions"]
    assert all(text.endswith("; these ops run in PyTorch") for text in found.values())


# --- errors made for a target or a leaf


def test_layout_error_names_each_target() -> None:
    """A region whose targets nvFuser cannot write is refused with one hazard per target and the reason once."""

    def two(x, w):
        x.mul_(2)
        w.add_(1)

    jitted = thunder.jit(two, executors=[guarded_nvfuser_ex])
    jitted(*tensors())
    [region] = [bsym for bsym in thunder.last_traces(jitted)[-1].bound_symbols if is_region(bsym)]
    error = layout_error(region, [arg for arg in region.args if arg.name in ("x", "w")])
    assert [(hazard.kind, hazard.name, hazard.region) for hazard in error.hazards] == [
        (Kind.LAYOUT, "x", "nvFusion0"),
        (Kind.LAYOUT, "w", "nvFusion0"),
    ]
    assert str(error).count("NVIDIA/Fuser#5356") == 1
    assert "pass a dense tensor, for instance `x.contiguous()`" in str(error)


def test_leaf_error_speaks_as_eager_does() -> None:
    """The refusal of an in-place write to a leaf begins like PyTorch's and names the op."""
    write = refusal(parameter_in_place, grad=True).hazards[0].may
    with pytest.raises(RuntimeError) as eager:
        parameter_in_place(*tensors(grad=True))
    words = str(eager.value).rstrip(".")
    assert str(leaf_error(write)).startswith(f"error[GNV009]: {words}: `w.mul_(2)`\n")
    assert "torch.no_grad()" in str(leaf_error(write))
