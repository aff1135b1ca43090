"""The long explanations: every code has one, and its programs do what it says."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import thunder

from guarded_nvfuser import Hazard, HazardError, HazardWarning, Kind, explain_programs, guarded_nvfuser_ex
from guarded_nvfuser.__main__ import main
from guarded_nvfuser.explain import EXPLANATIONS, Explanation
from guarded_nvfuser.options import OnHazard
from guarded_nvfuser.wording import words_for
from tests.support import Outcome, differences, run

CASES = pytest.mark.parametrize("explanation", EXPLANATIONS, ids=lambda explanation: explanation.kind.value)


def compiled(fn, mode: str, options: dict):
    executors = [explain_programs.shift_ex, guarded_nvfuser_ex]
    return thunder.jit(fn, executors=executors, guard_on_hazard=mode, **options)


@contextmanager
def shift_in_eager() -> Iterator[None]:
    """An operator registered with Thunder runs under Thunder only; eager has the function behind it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain_programs, "shift", explain_programs._shift_in_eager)
        yield


def in_eager(fn, args) -> Outcome:
    with shift_in_eager():
        return run(fn, args)


def codes_of(fn, explanation: Explanation, mode: str) -> set[str]:
    """The codes that a program is reported with: by the error, or by warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HazardWarning)
        try:
            compiled(fn, mode, explanation.options)(*explanation.args())
        except HazardError as error:
            return {hazard.kind.value for hazard in error.hazards}
    told = [str(warning.message) for warning in caught if warning.category is HazardWarning]
    return {text.split("[")[1].split("]")[0] for text in told}


def test_every_code_is_explained_once() -> None:
    assert [explanation.kind for explanation in EXPLANATIONS] == list(Kind)


@CASES
def test_failing_program_is_reported(explanation: Explanation) -> None:
    """By an error in mode raise, by a warning in mode rewrite."""
    assert explanation.kind.value in codes_of(explanation.fails, explanation, explanation.mode.value)
    if explanation.mode is OnHazard.RAISE:
        with pytest.raises(HazardError):
            compiled(explanation.fails, "raise", explanation.options)(*explanation.args())


@CASES
def test_repaired_program_is_not(explanation: Explanation) -> None:
    """Nothing is reported, nothing is left to PyTorch, and the results are eager's."""
    assert codes_of(explanation.repaired, explanation, explanation.mode.value) == set()
    found = run(compiled(explanation.repaired, explanation.mode.value, explanation.options), explanation.args)
    assert differences(in_eager(explanation.repaired, explanation.args), found) == []


@CASES
@pytest.mark.parametrize("mode", ["rewrite", "fallback"])
def test_modes_that_a_message_names_run_the_failing_program(explanation: Explanation, mode: str) -> None:
    """Where the help names a mode, this mode gives what eager gives; a mode that it does not name may refuse."""
    named = mode in words_for(Hazard(explanation.kind, 0, "x")).mode.value
    jitted = compiled(explanation.fails, mode, explanation.options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HazardWarning)
        try:
            found = run(jitted, explanation.args)
        except HazardError:
            assert not named
            return
    assert differences(in_eager(explanation.fails, explanation.args), found) == []


@CASES
def test_page_shows_both_programs(explanation: Explanation, capsys: pytest.CaptureFixture) -> None:
    """Code and title first, both programs as they are run, and their options; small letters work too."""
    assert main(["explain", explanation.kind.value.lower()]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"{explanation.kind.value}: {explanation.title}\n")
    for fn in (explanation.fails, explanation.repaired):
        assert all(f"    {line}".rstrip() in page for line in inspect.getsource(fn).splitlines())
    assert f"guard_on_hazard={explanation.mode.value!r}" in page
    assert all(f"{name}={value!r}" in page for name, value in explanation.options.items())
    assert max(map(len, page.splitlines())) <= 160


def test_titles_without_a_code(capsys: pytest.CaptureFixture) -> None:
    assert main(["explain"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [kind.value for kind in Kind]


def test_unknown_code_is_a_usage_error(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as left:
        main(["explain", "GNV099"])
    assert left.value.code == 2
    assert "unknown code 'GNV099'; the known ones are GNV001" in capsys.readouterr().err
