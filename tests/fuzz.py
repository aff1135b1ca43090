"""`python -m tests.fuzz --programs 20000 --seed 1`: random programs that mutate tensors, compared with eager.

Hypothesis grows the programs and shrinks those that fail; every core works. A refusal (HazardError) is allowed, a
silent difference or an internal error never is: the exit status is 1 then, and the programs are printed. What Thunder
refuses without this library too is counted apart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from guarded_nvfuser.options import INTERPRET_VARIABLE, ON_HAZARD_VARIABLE, SCHEDULE_VARIABLE
from tests.fuzz_check import MODES, PARTITIONS, Finding, Outcome, check_everywhere
from tests.generator import ALL, Features, Program, accepted, generate, parse

CHUNK = 25  # programs per run of Hypothesis, which ends at its first failure
_SHRINKING = 25.0  # seconds for each of two ways to shrink a failure


class Drawn:
    """Choices that Hypothesis makes, towards the first option and the lowest number when it shrinks."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def pick(self, options: Sequence) -> Any:
        options = list(options)
        return options[self.number(0, len(options) - 1)]

    def number(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))


@dataclass(frozen=True)
class Failure:
    """A program that must not do what it did, as small as it was made."""

    program: Program
    finding: Finding
    seed: int

    def __str__(self) -> str:
        head = f"{self.finding.signature} [{self.finding.config}, found by seed {self.seed}]"
        return f"{head}\n\n{self.program}\n{self.finding.detail.strip()}\n"


@dataclass
class Tally:
    """What some programs did: how many, outcomes per mode, what was refused or cannot be, and failures by signature."""

    programs: int = 0
    outcomes: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)
    failures: dict[str, Failure] = field(default_factory=dict)
    failed: Counter = field(default_factory=Counter)

    def add(self, program: Program, findings: Sequence[Finding], seed: int) -> None:
        """Count one program."""
        self.programs += 1
        for finding in findings:
            self.outcomes[finding.config.mode, _word(finding)] += 1
            if finding.outcome in (Outcome.REFUSED, Outcome.CANNOT):
                self.reasons[finding.outcome, finding.config.mode, finding.what] += 1
            if finding.failed:
                self.failed[finding.signature] += 1
                self._keep(Failure(program, finding, seed))

    def _keep(self, failure: Failure) -> None:
        kept = self.failures.get(failure.finding.signature)
        if kept is None or len(failure.program.source) < len(kept.program.source):
            self.failures[failure.finding.signature] = failure

    def __iadd__(self, other: Tally) -> Tally:
        self.programs += other.programs
        for name in ("outcomes", "reasons", "failed"):
            getattr(self, name).update(getattr(other, name))
        for failure in other.failures.values():
            self._keep(failure)
        return self


def _word(finding: Finding) -> str:
    if finding.outcome is not Outcome.SAME:
        return finding.outcome.value
    if not finding.wrote:
        return "nothing written"
    return "fell back" if finding.left else "rewritten" if finding.config.mode == "rewrite" else "fused as it is"


def search(seed: int, programs: int, known: frozenset[str] = frozenset(), features: Features = ALL) -> Tally:
    """Run some programs under every mode, and shrink the first failure that is not known.

    Args:
        seed: makes the search the same every time, with one release of Hypothesis.
        programs: how many; fewer if one fails.
        known: signatures of failures that are counted, but not shrunk.
        features: what programs may contain.
    """
    tally, hunt = Tally(), _Hunt(seed, known)

    @hypothesis.seed(seed)
    @settings(
        max_examples=programs,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(st.data())
    def attempt(data: st.DataObject) -> None:
        hunt.look(generate(Drawn(data), features), tally)

    with suppress(AssertionError, HypothesisException):
        attempt()
    if hunt.smallest is not None:
        tally.failures[hunt.target] = reduced(hunt.smallest)
    return tally


class _Hunt:
    """The state of one search: the signature that is being shrunk, and the smallest program that has it."""

    def __init__(self, seed: int, known: frozenset[str]) -> None:
        self.seed, self.known = seed, known
        self.target: str | None = None
        self.smallest: Failure | None = None
        self.until = 0.0

    def look(self, program: Program, tally: Tally) -> None:
        """Check a program.

        Raises:
            AssertionError: it fails as the target does; the first new failure is the target.
        """
        if self.target is None:
            findings = check_everywhere(program, [PARTITIONS[(self.seed + tally.programs) % len(PARTITIONS)]])
            tally.add(program, findings, self.seed)
            new = next((f for f in findings if f.failed and f.signature not in self.known), None)
            if new is not None:
                self.target, self.until = new.signature, time.monotonic() + _SHRINKING
                self._found(Failure(program, new, self.seed))
        elif time.monotonic() < self.until and (failure := again(program, self.smallest)) is not None:
            self._found(failure)

    def _found(self, failure: Failure) -> None:
        if self.smallest is None or len(failure.program.source) <= len(self.smallest.program.source):
            self.smallest = failure
        raise AssertionError(self.target)


def again(program: Program, failure: Failure) -> Failure | None:
    """The failure of another program, if it fails in the same way under the same configuration."""
    config = failure.finding.config
    try:
        findings = check_everywhere(program, [(config.fusion_type, config.skip)], (config.mode,))
    except Exception:  # no program any more
        return None
    found = next((f for f in findings if f.failed and f.signature == failure.finding.signature), None)
    return None if found is None else Failure(program, found, failure.seed)


def reduced(failure: Failure) -> Failure:
    """The failure without the lines, arguments, results and calls that it does not need."""
    until = time.monotonic() + _SHRINKING
    smaller = True
    while smaller and time.monotonic() < until:
        smaller = False
        for program in _less(failure.program):
            if accepted(program) and (found := again(program, failure)) is not None:
                failure, smaller = found, True
                break
    return failure


def _less(program: Program) -> Iterator[Program]:
    """Programs that are a little less than one."""
    if program.calls > 1:
        yield replace(program, calls=1)
    if program.backward:
        yield replace(program, backward=False)
    for name in ("body", "results"):
        lines = getattr(program, name)
        for index in range(len(lines)):
            if len(lines) > 1 or name == "body":
                yield replace(program, **{name: lines[:index] + lines[index + 1 :]})
    for index in range(len(program.params)):
        yield replace(program, params=program.params[:index] + program.params[index + 1 :])
    for index in range(len(program.inputs)):
        yield replace(program, inputs=program.inputs[:index] + program.inputs[index + 1 :])
        plain = program.inputs[index].removesuffix(".requires_grad_()")
        if plain != program.inputs[index]:
            yield replace(program, inputs=(*program.inputs[:index], plain, *program.inputs[index + 1 :]))


# --- the command


def _start() -> None:
    """Interpret regions on the CPU, one thread per process; no variable of the caller's decides what is tested."""
    os.environ[INTERPRET_VARIABLE] = "1"
    for name in (ON_HAZARD_VARIABLE, SCHEDULE_VARIABLE):
        os.environ.pop(name, None)
    torch.set_num_threads(1)


def _work(job: tuple[int, int, frozenset[str]]) -> Tally:
    return search(*job)


def run(programs: int, seed: int, workers: int, said: Callable[[Tally, list[Failure], float], None]) -> Tally:
    """Search on some processes until enough programs have run.

    Args:
        programs: how many, at least.
        seed: the first chunk's; the others count up.
        workers: how many processes.
        said: called with the tally, the new failures and the seconds so far after each chunk.
    """
    total, started = Tally(), time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=_start, maxtasksperchild=20) as pool:
        while total.programs < programs:
            known = frozenset(total.failures)
            ahead = min(4 * workers, -(-(programs - total.programs) // CHUNK))
            for tally in pool.imap_unordered(_work, [(seed + i, CHUNK, known) for i in range(ahead)]):
                new = [failure for name, failure in tally.failures.items() if name not in total.failures]
                total += tally
                said(total, new, time.monotonic() - started)
            seed += ahead
    return total


def report(tally: Tally, seconds: float) -> str:
    """A tally as text."""
    lines = [f"{tally.programs} programs in {seconds:.0f} s, {tally.programs / max(seconds, 1e-9):.1f} a second", ""]
    words = sorted({word for _, word in tally.outcomes})
    lines.append(f"{'runs':10}" + "".join(f"{word:>18}" for word in words))
    for mode in MODES:
        lines.append(f"{mode:10}" + "".join(f"{tally.outcomes[mode, word]:18}" for word in words))
    for outcome in (Outcome.REFUSED, Outcome.CANNOT):
        lines += ["", f"{outcome.value}:"]
        lines += [f"{count:6}  {words}" for words, count in _reasons(tally, outcome)]
    lines += ["", f"{sum(tally.failed.values())} runs failed, in {len(tally.failures)} ways"]
    lines += [f"\n{tally.failed[name]} runs: {failure}" for name, failure in sorted(tally.failures.items())]
    return "\n".join(lines)


def _reasons(tally: Tally, outcome: Outcome) -> list[tuple[str, int]]:
    found: Counter = Counter()
    for (kind, mode, what), count in tally.reasons.items():
        if kind is outcome:
            found[f"{mode}: {what}" if outcome is Outcome.REFUSED else what] += count
    return found.most_common()


def replay(path: Path) -> int:
    """Run a program of a file under every configuration and print what differs."""
    program = parse(path.read_text())
    findings = check_everywhere(program)
    for finding in findings:
        print(f"{finding.config}: {finding.outcome.value} {finding.what}\n{finding.detail}".rstrip())
    return int(any(finding.failed for finding in findings))


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, print, and tell by the exit status whether something failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many programs to run")
    parser.add_argument("--seed", type=int, default=1, help="where to begin; the same seed gives the same programs")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="how many processes")
    parser.add_argument("--replay", type=Path, help="a file with one program, as printed; nothing else is run")
    options = parser.parse_args(arguments)
    _start()
    if options.replay is not None:
        return replay(options.replay)
    started = time.monotonic()
    tally = run(options.programs, options.seed, options.workers, _progress)
    print(report(tally, time.monotonic() - started))
    return int(bool(tally.failures))


def _progress(tally: Tally, new: Sequence[Failure], seconds: float) -> None:
    rate = tally.programs / max(seconds, 1e-9)
    words = f"{tally.programs} programs, {rate:.1f} a second, {len(tally.failures)} failures"
    print(*new, words, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
