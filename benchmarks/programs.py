"""The programs that are benchmarked, at realistic sizes, each with its functional twin."""

from __future__ import annotations

from dataclasses import replace

from tests.quality import PAIRS, Pair

PROGRAMS = [replace(pair) for pair in PAIRS]
