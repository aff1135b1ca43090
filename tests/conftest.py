"""Where tests run: on the CPU with interpreted regions, but for those marked `gpu`, which need a CUDA device."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from guarded_nvfuser.options import INTERPRET_VARIABLE, ON_HAZARD_VARIABLE, SCHEDULE_VARIABLE

REQUIRE_VARIABLE = "GUARDED_NVFUSER_REQUIRE_CUDA"
_SKIPPED = "needs a CUDA device"


@pytest.fixture(scope="session", autouse=True)
def interpreted() -> Iterator[None]:
    """Interpret regions in every test, and let no variable of the caller's decide what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INTERPRET_VARIABLE, "1")
        for name in (ON_HAZARD_VARIABLE, SCHEDULE_VARIABLE):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def on_device(request: pytest.FixtureRequest, interpreted: None) -> Iterator[None]:
    """Run nvFuser itself in tests marked `gpu`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("gpu") is not None:
            patch.delenv(INTERPRET_VARIABLE)
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if os.environ.get(REQUIRE_VARIABLE) == "1":
        pytest.fail(f"{REQUIRE_VARIABLE}=1, but there is no CUDA device", pytrace=False)
    pytest.skip(_SKIPPED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.getreports("skipped") if _SKIPPED in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(
            f"no CUDA device: {len(skipped)} gpu tests were skipped; {REQUIRE_VARIABLE}=1 makes them fail instead",
            yellow=True,
        )
