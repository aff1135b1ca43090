"""Benchmarks: what the guard costs when a program is compiled and when it is called, and what it saves.

Measure (results go to a JSON file of pytest-benchmark's), then report; a GPU is needed for `bench_cuda.py` alone:

    pytest benchmarks/bench_*.py --benchmark-json=benchmarks/results/cpu.json
    python -m benchmarks.report benchmarks/results/*.json

The plain `pytest` does not collect them.
"""
