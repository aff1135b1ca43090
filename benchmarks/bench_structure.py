"""The structure of each program; what is timed is three compilations, and means little."""

from __future__ import annotations

import pytest

from benchmarks.programs import PROGRAMS
from benchmarks.structure import row
from tests.quality import Pair

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("pair", PROGRAMS, ids=lambda pair: pair.name)
def test_structure(benchmark, pair: Pair) -> None:
    found = benchmark.pedantic(row, args=(pair,), rounds=1)
    guarded = found.guarded
    benchmark.extra_info.update(
        structure=found.as_json(),
        regions=guarded.regions,
        hazards=found.hazards,
        copies=found.copies,
        bytes=guarded.bytes,
    )
