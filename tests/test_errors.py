"""Errors and warnings: the code, the write and the read in the user's source, why, and what to do."""

from __future__ import annotations

import inspect
import linecache
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
from thunder.core import prims

from guarded_nvfuser import Hazard, HazardError, HazardWarning, Kind, guarded_nvfuser_ex
from guarded_nvfuser.contract import Rule
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
    (Kind.WAW, updated_clone, {}, "may land in the memory of another tensor", "t.mul_(w)", None),
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
    """A refusal carries its kind's code and underlines the write, and the read if there is one, in the source."""
    error = refusal(fn, **options)
    [hazard] = [hazard for hazard in error.hazards if hazard.kind is kind][:1]
    text = describe(hazard)
    assert text in str(error)
    first, *rest = text.splitlines()
    assert first.startswith(f"error[{kind.value}]: ")
    assert words in first
    assert rest[0].split("--> ")[1].startswith(f"{inspect.getsourcefile(fn)}:")
    for part in filter(None, (write, read)):
        number = line_of(fn, part)
        source = f"{number} | {linecache.getline(__file__, number).rstrip()}"
        underline = rest[rest.index(source) + 1]
        column = source.index(part)
        assert set(underline[column : column + len(part)]) in ({"^"}, {"-"})
        assert underline[:column].strip() == "|"
    assert any(line.startswith("  = help: ") for line in rest)


def test_whole_message() -> None:
    """The message in full: headline, the read and the write underlined, notes, the edit and the mode, the long form."""
    error = refusal(recomputed_read)
    file, first = inspect.getsourcefile(recomputed_read), inspect.getsourcelines(recomputed_read)[1]
    pad = " " * len(str(first))
    assert str(error) == (
        f"error[GNV002]: `x.sin()` may already see what `x.mul_(2)` writes\n"
        f"{pad}--> {file}:{first + 1}:9\n"
        f"{pad} |\n"
        f"{first + 1} |     y = x.sin()\n"
        f"{pad} |         ^^^^^^^ read here\n"
        f"{first + 2} |     x.mul_(2)\n"
        f"{pad} |     --------- this write may be seen already\n"
        f"{pad} |\n"
        f"  = note: in nvFusion2: it must see the value on entry, it may see what `x.mul_(2)` wrote\n"
        f"  = note: nvFuser and Thunder order ops by data flow alone: a read may be moved, merged or repeated across a "
        f"write\n"
        f"  = help: write last, or out of place: a new tensor instead of `x.mul_(2)`\n"
        f"  = help: guard_on_hazard='rewrite' (the default) runs it without this hazard; 'fallback' leaves its ops to "
        f"PyTorch\n"
        f"\n"
        f"For more, try `python -m guarded_nvfuser explain GNV002`."
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
    *described, more = str(error).split("\n\n")
    assert described == [describe(hazard) for hazard in error.hazards]
    codes = dict.fromkeys(hazard.kind.value for hazard in error.hazards)
    assert more == f"For more, try `python -m guarded_nvfuser explain {' '.join(codes)}`."
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
    assert "`the return` may not see the value on entry" in headline(made_by_thunder)
    assert "  = note: read here: `the return`, which Thunder made" in describe(made_by_thunder)


def test_an_op_over_several_lines_shows_its_first() -> None:
    """An op that spans lines is underlined on the line it starts on, and named with dots for the rest."""

    def spread(x, w):
        y = x.sin()
        x.mul_(
            w,
        )
        return y + x @ w

    lines = str(refusal(spread)).splitlines()
    number = line_of(spread, "x.mul_(")
    source = lines.index(f"{number} |         x.mul_(")
    assert lines[source + 1].endswith(" |         ------- this write may be seen already")
    assert "what `x.mul_(...)` writes" in lines[0]


def test_columns_are_characters() -> None:
    """Python counts columns in bytes; wide characters take two cells of a terminal, and tabs stay tabs."""
    scope: dict[str, Any] = {}
    source = "def program(x, w):\n\ty = x.sin()\n\t名 = 'é'; x.mul_(2)\n\treturn y + x @ w\n"
    linecache.cache["<wide>"] = (len(source), None, source.splitlines(keepends=True), "<wide>")
    exec(compile(source, "<wide>", "exec"), scope)
    lines = str(refusal(scope["program"])).splitlines()
    assert lines[0] == "error[GNV002]: `x.sin()` may already see what `x.mul_(2)` writes"
    assert (
        lines[lines.index("3 | \t名 = 'é'; x.mul_(2)") + 1]
        == "  | \t          --------- this write may be seen already"
    )


def test_source_that_is_gone_still_has_a_place() -> None:
    """A program whose source nobody can read is refused with file and line."""
    scope: dict[str, Any] = {}
    source = "def program(x, w):\n    y = x.sin()\n    x.mul_(2)\n    return y + x @ w\n"
    exec(compile(source, "<nowhere>", "exec"), scope)
    linecache.checkcache()
    error = refusal(scope["program"])
    assert "--> <nowhere>:2 (read here)" in str(error)
    assert "::: <nowhere>:3 (this write may be seen already)" in str(error)
    assert "`sin` may already see what `copy_` writes" in str(error)


# --- warnings and the log


def test_fallback_warns_once_per_region_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    """What is left to PyTorch is said in one warning of a category of its own; the log has the same line."""
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO, "guarded_nvfuser"):
        warnings.simplefilter("always")
        jitted = jit(recomputed_read, Config("fallback"))
        jitted(*tensors())
        jitted(*tensors())
    told = [str(warning.message) for warning in caught if warning.category is HazardWarning]
    place = f"{__file__}:{line_of(recomputed_read, 'x.sin()')}"
    assert told == [
        f"nvFusion2: [GNV002] `x.sin()` may already see what `x.mul_(2)` writes at {place}; these ops run in PyTorch"
    ]
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
    """A region whose targets nvFuser cannot write is refused with one hazard per target and the reason with each."""

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
    assert str(error).count("NVIDIA/Fuser#5356") == len(error.hazards)
    assert "pass a dense tensor, for instance `x.contiguous()`" in str(error)


def test_leaf_error_speaks_as_eager_does() -> None:
    """The refusal of an in-place write to a leaf begins like PyTorch's and names the op."""
    write = refusal(parameter_in_place, grad=True).hazards[0].may
    with pytest.raises(RuntimeError) as eager:
        parameter_in_place(*tensors(grad=True))
    words = str(eager.value).rstrip(".")
    assert str(leaf_error(write)).splitlines()[0] == f"error[GNV009]: {words}: `w.mul_(2)`"
    assert "torch.no_grad()" in str(leaf_error(write))


# --- words by rule and by what the judge found


def words_of(rule: Rule | None, kind: Kind = Kind.WAW, **fields: Any) -> str:
    write = refusal(updated_twice, skip=True).hazards[0].must
    found = {"read": write.bsym, "must": None, "may": write} | fields
    return headline(Hazard(kind, 0, "x", found["read"], found["must"], found["may"], None, rule))


def test_waw_says_how_the_write_goes_astray() -> None:
    """Two updates, two names, another order, another memory, twice: each has a headline of its own."""
    writes = [hazard.must for hazard in refusal(updated_twice, skip=True).hazards if hazard.kind is Kind.RAW]
    first = next(write for write in writes if write.state == 1)
    second = next(write for write in writes if write.state == 2)
    taken = prims.python_return.bind((), output=None)
    heads = [
        words_of(Rule.ONE_UPDATE),
        words_of(Rule.ONE_NAME),
        words_of(None, read=second.bsym, may=first),
        words_of(None, read=first.bsym, may=first),
        words_of(None, read=second.bsym, must=second, may=second),
        words_of(None, read=taken, may=first),
    ]
    assert [head.removeprefix("error[GNV003]: ") for head in heads] == [
        "`x.sub_(w)` is one of several updates of `x` in one fusion, and any of them may land last",
        "`x.sub_(w)` updates memory that the same fusion is given under a second name",
        "`x.mul_(2)` may land before `x.sub_(w)`",
        "`x.sub_(w)` may land in the memory of another tensor",
        "`x.mul_(2)` may be carried out twice",
        "`the return` may be given another tensor's memory",
    ]


@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name)
def test_every_rule_of_the_contract_has_words(rule: Rule) -> None:
    """Whatever claim fails, the message says what nvFuser may do and what to write instead."""
    write = refusal(updated_twice, skip=True).hazards[0].must
    for kind in (Kind.WAW, Kind.TARGET, Kind.WAR):
        text = describe(Hazard(kind, 0, "x", write.bsym, None, write, "nvFusion0", rule))
        assert f"  = note: in nvFusion0: {rule.value}" in text.splitlines()
        assert "{" not in text


def test_target_says_why() -> None:
    """The headline of an update that nvFuser cannot do says what is wrong with the target."""
    ends = {rule: words_of(rule, Kind.TARGET).rsplit(": ", 1)[1] for rule in Rule if "TARGET" in rule.name}
    assert ends == {
        Rule.TARGET_IS_INPUT: "it is made inside the fusion",
        Rule.TARGET_ON_DEVICE: "it does not lie on a GPU",
    }


def test_names_are_the_users() -> None:
    """Thunder's name for a tensor gives way to the one that the user writes it by, also in an assignment to a part."""

    def scaled(x, w):
        y = w * x
        x *= 2
        return y

    [hazard] = refusal(scaled, grad=True).hazards[:1]
    assert re.fullmatch(r"t\d+", hazard.name)
    assert headline(hazard).startswith("error[GNV006]: backward reads `x`, which `x *= 2` overwrote")
    assert "`x.clone()`" in describe(hazard)


def test_overlap_says_how() -> None:
    """Arguments that overlap are described by dtype, shape, strides and distance."""

    def add(a, b):
        a.add_(1)
        return a + b

    def overlapping(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = torch.zeros(8)
        return buffer[: 4 * step : step], buffer[3:7]

    for step in (1, 2):
        a, b = overlapping(step)
        with pytest.raises(HazardError) as refused:
            jit(add, Config("raise"))(a, b)
        distance = b.data_ptr() - a.data_ptr()
        assert (
            f"  = note: `a` is float32[4] with strides [{step}] at byte 0, `b` is float32[4] with strides [1] "
            f"at byte {distance}"
        ) in str(refused.value)


def test_ops_inside_thunder_are_named_by_thunder() -> None:
    """Some of Thunder's operators are traced from Thunder's own source, which says nothing to a user."""

    def reshaped(x, w):
        z = x.reshape(16)
        x.mul_(2)
        return z + 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HazardWarning)
        jit(reshaped, Config("rewrite"))(*tensors())
    told = [str(warning.message) for warning in caught if warning.category is HazardWarning]
    assert told
    assert all("[GNV011] `reshape` is a view or a copy by strides" in text for text in told)
    assert not any("single_device_symbol" in text for text in told)
