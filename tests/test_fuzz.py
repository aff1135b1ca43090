"""Random programs that mutate tensors against eager: a fixed budget, what was found before, and the search itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import fuzz, fuzz_check
from tests.fuzz import CHUNK, Failure, Tally, reduced, report, search
from tests.fuzz_check import Eager, Outcome, check_everywhere, failures, look
from tests.generator import ALL, Program, Seeded, generate, parse
from tests.support import Config, jit

SEEDS = range(1000, 1010)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("seed", SEEDS)
def test_programs_are_as_in_eager(seed: int) -> None:
    """A fixed number of programs under every mode, partition and schedule; `python -m tests.fuzz` runs more."""
    tally = search(seed, CHUNK)
    assert not tally.failures, report(tally, 1.0)
    assert tally.programs == CHUNK
    for mode in fuzz_check.MODES:
        assert sum(count for (of, _), count in tally.outcomes.items() if of == mode) >= CHUNK


# --- what was found before: program, and the modes in which it still fails

PINNED: dict[str, str] = {
    "no_grad_write_through_a_view_of_a_leaf": """
        # calls: 1, each with a backward pass
        def make():
            x0 = values((6, 4), torch.float32, 0).requires_grad_()
            return x0,
        def program(x0):
            with torch.no_grad(): x0[None].mul_(0.5)
            t4 = x0.split(1)[0]
            return t4,
    """,
}
KNOWN: dict[str, str] = {"no_grad_write_through_a_view_of_a_leaf": "mode rewrite loses the gradient"}


def pinned(name: str) -> object:
    known = KNOWN.get(name)
    marks = [] if known is None else [pytest.mark.xfail(strict=True, reason=known, raises=AssertionError)]
    return pytest.param(parse(PINNED[name]), id=name, marks=marks)


@pytest.mark.parametrize("program", list(map(pinned, PINNED)))
def test_found_before(program: Program) -> None:
    found = failures(program)
    assert not found, "\n".join(f"{finding.config}: {finding.what}\n{finding.detail}" for finding in found)


# --- the search itself


def test_search_finds_and_shrinks_what_stock_gets_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Thunder's own executor in the guard's place, programs differ, and shrink to a few lines."""

    def unguarded(fn, config):
        return fuzz_check.stock(fn, config, [fuzz_check.STOCK])

    monkeypatch.setattr(fuzz_check, "jit", unguarded)
    monkeypatch.setattr(fuzz_check, "verdicts", lambda jitted: ())
    monkeypatch.setattr(fuzz, "_SHRINKING", 10.0)
    tally = search(3, CHUNK)
    different = [f for f in tally.failures.values() if f.finding.outcome is Outcome.DIFFERENT]
    assert different
    assert min(len(failure.program.body) for failure in different) <= 4


def test_same_seed_same_programs() -> None:
    programs = [generate(Seeded(seed)).source for seed in (1, 2, 1)]
    assert programs[0] == programs[2] != programs[1]


@pytest.mark.parametrize("seed", range(20))
def test_printed_programs_can_be_read_back(seed: int) -> None:
    program = generate(Seeded(seed))
    assert parse(program.source) == program


def test_programs_hold_what_they_should() -> None:
    """Every kind of line, of argument and of call occurs."""
    text = "\n".join(generate(Seeded(seed), ALL).source for seed in range(400))
    wanted = [".copy_(", "put(", "matmul" if "matmul" in text else " @ ", "torch.cat(", "torch.where(", "no_grad()"]
    wanted += ["requires_grad_()", "with a backward pass", "# calls: 3", "bfloat16", "permute(", "index_copy_", "[::2]"]
    wanted += ["x1 = x0", "m1[0], m1[1]", ".t()", "[..., :", ".sum(", "float16", "int64", "bool"]
    assert [words for words in wanted if words not in text] == []


def other(program: Program, change) -> list[str]:
    """How a program differs from eager if something is done to its arguments and results at the end."""

    def changed(*args):
        return change(args, eager.fn(*args))

    eager = Eager(program)
    return [kind for kind, _ in eager.differences(look(eager.make, changed, program, eager.tracked))]


def test_comparison_sees_every_difference() -> None:
    program = parse("""
        # calls: 1, each with a backward pass
        def make():
            x0 = values((4, 8), torch.float32, 0)[..., :6]
            x1 = values((4, 6), torch.float32, 1).requires_grad_()
            return x0, x1,
        def program(x0, x1):
            t1 = x0.mul_(2)
            t0 = x1 * x0
            return t0, t1,
    """)

    def neighbour(args, results):
        args[0].data.as_strided((1,), (1,), 7).zero_()
        return results

    def gradient(args, results):
        return results[0] + args[1] - args[1].detach(), results[1]

    assert other(program, lambda args, results: results) == []
    assert other(program, lambda args, results: (results[0].double(), results[1])) == ["result dtype"]
    assert other(program, lambda args, results: (results[0] * 1.001, results[1]))[0] == "result values"
    assert other(program, lambda args, results: (results[0], results[1].clone())) == ["memory not shared"]
    assert other(program, lambda args, results: (results[0], results[1].t().contiguous().t())) == ["memory not shared"]
    assert other(program, neighbour) == ["memory values"]
    assert "gradient values" in other(program, gradient)


def test_exact_arithmetic_is_compared_exactly() -> None:
    """One unit in the last place counts where the program's arithmetic is exact, and does not where it rounds."""
    exact = """
        # calls: 1
        def make():
            x0 = values((4,), torch.float32)
            return x0,
        def program(x0):
            {}
            return t0,
    """

    def nudged(args, results):
        return (torch.nextafter(results[0], torch.tensor(9.0)),)

    assert other(parse(exact.format("t0 = x0 * 0.5")), nudged) == ["result values"]
    assert other(parse(exact.format("t0 = x0.sin()")), nudged) == []


def test_internal_error_is_a_failure_and_a_refusal_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    program = parse(PINNED["no_grad_write_through_a_view_of_a_leaf"])
    found = {f.config.mode: f.outcome for f in check_everywhere(program, [("consecutive", False)], ("raise",))}
    assert found == {"raise": Outcome.REFUSED}

    def broken(fn, config):
        jitted = jit(fn, config)
        monkeypatch.setattr("guarded_nvfuser.executor.analyse", None)
        return jitted

    monkeypatch.setattr(fuzz_check, "jit", broken)
    (finding,) = check_everywhere(program, [("consecutive", False)], ("raise",))
    assert finding.outcome is Outcome.CRASHED
    assert "TypeError" in finding.what


def test_what_thunder_cannot_is_counted_apart() -> None:
    """An op that Thunder does not know at all."""
    program = parse(
        "# calls: 1\ndef make():\n    x0 = values((4,))\n    return x0,\n"
        "def program(x0):\n    x0.fill_(2.0)\n    return x0,\n"
    )
    assert {f.outcome for f in check_everywhere(program)} == {Outcome.CANNOT}


def test_reduction_keeps_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines, arguments, results and calls that do not matter go."""
    program = parse("""
        # calls: 3
        def make():
            x0 = values((4,))
            x1 = values((4,))
            return x0, x1,
        def program(x0, x1):
            t0 = x1.sin()
            t1 = x0.neg()
            x1.mul_(2)
            t2 = t1.abs()
            return t0, t2, x0,
    """)

    def finds_neg(tried: Program, failure: Failure) -> Failure | None:
        return Failure(tried, failure.finding, 0) if "neg" in tried.source else None

    monkeypatch.setattr(fuzz, "again", finds_neg)
    finding = fuzz_check.Finding(Outcome.DIFFERENT, Config())
    small = reduced(Failure(program, finding, 0)).program
    assert small.body == ("t1 = x0.neg()",)
    assert small.params == ("x0",)
    assert small.calls == 1


def test_replay_runs_a_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "program.txt"
    path.write_text(generate(Seeded(5)).source)
    assert fuzz.main(["--replay", str(path)]) == 0
    assert "rewrite-consecutive-aliases-late: " in capsys.readouterr().out


def test_tallies_add_up() -> None:
    program, finding = generate(Seeded(1)), fuzz_check.Finding(Outcome.DIFFERENT, Config(), "result values", "1 and 2")
    total = Tally()
    for _ in range(2):
        part = Tally()
        part.add(program, [finding], 1)
        total += part
    assert (total.programs, sum(total.failed.values()), len(total.failures)) == (2, 2, 1)
    assert "result values" in report(total, 4.0)
    assert "0.5 a second" in report(total, 4.0)
