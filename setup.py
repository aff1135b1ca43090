"""Metadata of guarded_nvfuser."""

from pathlib import Path

from setuptools import find_packages, setup

# nvFuser publishes one wheel per CUDA and torch, all pre-releases: an exact pin needs no --pre.
NVFUSER = "0.2.36.dev20260301"


def nvfuser(cuda: str) -> list[str]:
    """The requirements that put nvFuser for a CUDA release beside torch 2.10."""
    return [f"nvfuser-{cuda}-torch210=={NVFUSER}", "torch==2.10.*"]


setup(
    name="guarded_nvfuser",
    version="0.1.0",
    description="nvFuser under Lightning Thunder for programs that mutate tensors: eager's results or an error",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["guarded_nvfuser", "guarded_nvfuser.*"]),
    package_data={"guarded_nvfuser": ["py.typed"]},
    python_requires=">=3.10,<3.13,!=3.11.*",
    install_requires=["lightning-thunder>=0.2.6,<0.3", "torch"],
    extras_require={
        "cu126": nvfuser("cu126"),
        "cu128": nvfuser("cu128"),
        "cu130": nvfuser("cu130"),
        "test": ["pytest", "pytest-benchmark", "hypothesis"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.12",
        "Typing :: Typed",
    ],
)
