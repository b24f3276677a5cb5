"""Run the tests that depend on azure-servicebus with each version that pairs support.

`python -m tests.sdk.versions [--workers 2] [--tests tests/sdk …] [7.14 …]`

Each version gets an environment of its own: a venv that has that version of azure-servicebus and uamqp, the AMQP client
that its option `uamqp_transport` uses. Behind them, by a `.pth` file, come the packages of the environment that runs
this script. Neither the project's environment nor its locks change. The environments are kept in a folder outside of
the project, for the next run (`--folder`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from twinbus.sdk.private_names import TESTED_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/sdk", "tests/pairing", "tests/compat/python")
IGNORED = "tests/pairing/simulation"
"""Simulated worlds send nothing through the SDK."""
EARLIER_VERSIONS = ("7.8", "7.11", "7.12")
"""Versions that pairs do not support. Of these, only what docs/guides/serve.md says is tried."""
EARLIER_TESTS = ("tests/compat/python/test_versions.py",)
UAMQP = "uamqp==1.6.*"
# 7.8 is the last version that always uses uamqp. The project has no other package that needs these.
FURTHER_PACKAGES = {"7.8": ("msrest==0.7.*", "requests-oauthlib==2.0.*", "oauthlib==3.*")}
OLDER_VERSIONS = ("7.13", "7.14")
"""Versions that need `tests.sdk.older_versions` to use a local namespace."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sdk.versions", description=__doc__)
    parser.add_argument("versions", nargs="*", default=(*EARLIER_VERSIONS, *TESTED_VERSIONS), metavar="version")
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "twinbus-sdk-versions"))
    parser.add_argument("--tests", nargs="*")
    arguments = parser.parse_args()
    failed = []
    for version in arguments.versions:
        python = environment(arguments.folder / version, version)
        found = installed(python)
        if not found.startswith(f"{version}."):
            raise SystemExit(f"{arguments.folder / version} has azure-servicebus {found}: remove it and start again")
        print(f"--- azure-servicebus {found}", flush=True)
        tests = arguments.tests or (EARLIER_TESTS if version in EARLIER_VERSIONS else TESTS)
        if run_tests(python, tests, arguments.workers):
            failed.append(version)
    if failed:
        print(f"failed with azure-servicebus {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def environment(folder: Path, version: str) -> Path:
    """Make the environment of a version, unless it is there, and return its Python."""
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    if not (site / "uamqp").exists():
        venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        packages = (f"azure-servicebus=={version}.*", UAMQP, *FURTHER_PACKAGES.get(version, ()))
        subprocess.run([*pip, *packages], check=True)
    # Behind its own packages: a path that a .pth file names comes after the folder of the file.
    site.joinpath("project.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    if version in OLDER_VERSIONS:
        shutil.copy(ROOT / "tests" / "sdk" / "older_versions.py", site)
        # Behind project.pth: files are read in the order of their names.
        site.joinpath("zz_older_versions.pth").write_text("import older_versions\n", encoding="utf-8")
    return python


def installed(python: Path) -> str:
    command = [str(python), "-c", "import azure.servicebus; print(azure.servicebus.__version__)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def run_tests(python: Path, tests: Sequence[str], workers: int) -> int:
    options = ["-q", "-p", "no:cacheprovider", "-n", str(workers), "--dist", "loadgroup", f"--ignore={IGNORED}"]
    command = [str(python), "-m", "pytest", *options, *tests]
    # The project itself is installed by a .pth file, which is not read from a folder that a .pth file names.
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
