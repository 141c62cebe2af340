"""The environments of engines get our own torch, and do not fetch it again."""

from __future__ import annotations

import venv
from pathlib import Path

import pytest

from tests.engines.environment import share_torch

# What each package requires, as the metadata of a torch for CUDA and of its packages say it.
REQUIRED = {
    "torch": [
        "sympy>=1.13.3",
        'cuda-toolkit[cublas,nvtx]==13.0.3; platform_system == "Linux"',
        'nvidia-nccl-cu13==2.29.7; platform_system == "Linux"',
        'triton==3.7.1; platform_system == "Linux"',
    ],
    "cuda-toolkit": ["nvidia-cublas==13.1.1.3.*; extra == 'cublas'", "nvidia-npp==13.0.1.2.*; extra == 'npp'"],
    "nvidia-nccl-cu13": [],
    "nvidia-cublas": ["nvidia-cuda-nvrtc"],
    "nvidia-cuda-nvrtc": [],
    "triton": [],
    "sympy": [],
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that are found before all others, each with one file."""
    site = tmp_path / "site"
    for name, requirements in REQUIRED.items():
        module = name.replace("-", "_")
        metadata = site / f"{module}-1.0.dist-info"
        metadata.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
        (metadata / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {one}" for one in requirements)]))
        (site / module).mkdir()
        (site / module / "lib.so").write_text(name)
        (metadata / "RECORD").write_text(f"{module}/lib.so,,\n{metadata.name}/METADATA,,\n{metadata.name}/RECORD,,\n")
    monkeypatch.syspath_prepend(site)


@pytest.mark.usefixtures("installed")
def test_a_torch_for_gpus_is_shared_with_the_packages_that_it_cannot_be_imported_without(tmp_path: Path) -> None:
    venv.create(tmp_path / "engine")
    share_torch(tmp_path / "engine" / "bin" / "python")
    [theirs] = (tmp_path / "engine").glob("lib/python*/site-packages")
    shared = {path.read_text() for path in theirs.glob("*/lib.so")}
    assert shared == REQUIRED.keys() - {"sympy"}, "pip gets sympy, in the version that the engine's lock has"
