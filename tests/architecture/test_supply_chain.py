"""The supply chain: what is installed is pinned by hash, and an audit that was not done is not taken for a good one."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCKS = sorted(path.name for path in ROOT.glob("requirements*.lock"))


def test_the_build_backend_is_pinned_to_the_locked_version() -> None:
    (required,) = PROJECT["build-system"]["requires"]
    assert re.fullmatch(r"hatchling==[\d.]+", required)
    assert f"\n{required} \\\n" in (ROOT / "requirements-dev.lock").read_text(encoding="utf-8")


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_package_has_a_version_and_hashes_and_no_index(lock: str) -> None:
    text = (ROOT / lock).read_text(encoding="utf-8")
    packages = re.split(r"\n(?=[a-z0-9])", text)[1:]
    assert len(packages) > 3
    for package in packages:
        assert re.match(r"[\w.-]+(\[[\w,-]+\])?==\S+", package), package.splitlines()[0]
        assert "--hash=sha256:" in package
    assert "index-url" not in text
    assert "find-links" not in text
    assert "://" not in text


def extras_in(lock: str) -> dict[str, set[str]]:
    """Return the extras of each package that `lock` names."""
    packages = re.findall(r"^([\w.-]+)(?:\[([\w,-]+)\])?==", (ROOT / lock).read_text(encoding="utf-8"), re.MULTILINE)
    return {canonicalize_name(name): set(filter(None, extras.split(","))) for name, extras in packages}


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
def test_a_lock_names_every_extra_that_one_of_its_packages_requires(lock: str) -> None:
    """If a lock pins only `a`, pip takes the newest `a[extra]`, which has no hash, and fails."""
    locked = extras_in(lock)
    required = [Requirement(text) for name in locked for text in requires_of(name)]
    with_extras = [one for one in required if one.extras and canonicalize_name(one.name) in locked]
    assert with_extras
    for one in with_extras:
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            assert one.extras <= locked[canonicalize_name(one.name)], str(one)


def requires_of(package: str) -> list[str]:
    """Return what a package requires: nothing if it is for another platform, and not installed."""
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


GOOD = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"], "aliases": []}]}
FIXED = {"name": "b", "version": "2", "vulns": []}
SKIPPED = {"name": "b", "skip_reason": "Dependency not found on PyPI and could not be audited: b (2)"}
LOCK = """# made by hand
a==1 \\
    --hash=sha256:aa
    # via c
b[extra]==1 ; python_full_version < '3' \\
    --hash=sha256:bb
b[extra]==2 ; python_full_version >= '3' \\
    --hash=sha256:bc
"""
# Does what pip-audit does with its files: a marker may be false for this Python, and a name is accepted only once.
LIKE_PIP_AUDIT = """
import json, re, sys
from pathlib import Path
from packaging.requirements import Requirement
found = []
for option, path in zip(sys.argv, sys.argv[1:]):
    if option == "--requirement":
        names = set()
        for entry in re.split(r"\\n(?=\\w)", Path(path).read_text()):
            required = Requirement(entry.split(chr(92))[0])
            assert "--hash=sha256:" in entry, entry
            if required.marker is None or required.marker.evaluate():
                assert required.name not in names, f"{path} has {required.name} twice"
                names.add(required.name)
                found.append({"name": required.name, "version": str(required.specifier)[2:], "vulns": []})
print(json.dumps({"dependencies": found}))
"""


def audit(folder: Path, pip_audit: str, *locks: Path) -> tuple[int, str]:
    """Run the audit with a module in the place of pip-audit. Returns its exit code and what it prints."""
    (folder / "pip_audit.py").write_text(pip_audit, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "audit"), *map(str, locks)],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("packages", "code", "says"),
    [
        ([GOOD, BAD, FIXED], 3, "audit: b 1: PYSEC-1, fixed in 2"),
        ([GOOD, BAD | {"vulns": []}, FIXED], 0, "audit: no known vulnerability in 3 packages"),
        (
            [GOOD, SKIPPED],
            4,
            "audit: NOT DONE for 2 of 3 packages: the index that answers has no advisories for b 1, b 2",
        ),
        ([GOOD, FIXED], 4, "audit: NOT DONE for 1 of 3 packages: the index that answers has no advisories for b 1"),
        ([BAD, FIXED], 3, "audit: NOT DONE for 1 of 3 packages"),
        ([], 4, "audit: NOT DONE for 3 of 3 packages"),
        (None, 4, "audit: NOT DONE. The advisories cannot be reached, or pip-audit failed: ConnectionError: no route"),
    ],
)
def test_an_audit_that_was_not_done_has_its_own_exit_code(
    tmp_path: Path, packages: list[object] | None, code: int, says: str
) -> None:
    """A report as pip-audit writes it, from a module with its name."""
    report = "raise SystemExit('Traceback\\nConnectionError: no route')"
    if packages is not None:
        report = f"print({json.dumps(json.dumps({'dependencies': packages}))})"
    lock = tmp_path / "requirements.lock"
    lock.write_text(LOCK, encoding="utf-8")
    ended, text = audit(tmp_path, report, lock)
    assert (ended, says in text) == (code, True), text


def test_make_audit_says_so_when_pip_audit_cannot_be_installed(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    python.chmod(0o700)
    done = subprocess.run(
        ["make", "--no-print-directory", "audit", f"AUDIT_VENV={python.parents[1]}", "PYTHON=true"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PIP_NO_INDEX": "1", "PIP_TARGET": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    *_, said, by_make = done.stderr.splitlines()
    assert said.startswith("audit: NOT DONE. pip-audit cannot be installed")
    assert by_make.endswith("Error 4")


def test_an_audit_without_packages_was_not_done(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("# nothing\n", encoding="utf-8")
    assert audit(tmp_path, LIKE_PIP_AUDIT, lock) == (4, "audit: NOT DONE. The locks have no packages\n")


def test_every_locked_version_is_looked_up_also_those_for_another_python_or_platform(tmp_path: Path) -> None:
    locks = [ROOT / lock for lock in LOCKS]
    pins = {pin for lock in locks for pin in re.findall(r"^[\w.-]+.*?==\S+", lock.read_text(), re.MULTILINE)}
    versions = {(canonicalize_name(pin.partition("==")[0].partition("[")[0]), pin.partition("==")[2]) for pin in pins}
    assert len(versions) > len({name for name, _ in versions}), "the locks have a package in two versions"
    assert audit(tmp_path, LIKE_PIP_AUDIT, *locks) == (
        0,
        f"audit: no known vulnerability in {len(versions)} packages\n",
    )
