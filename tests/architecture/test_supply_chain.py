"""The supply chain: what is installed is pinned by hash, and an audit that was not done is not taken for a good one."""

import json
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
BAD = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"], "aliases": []}]}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found on PyPI and could not be audited: c (1)"}


@pytest.mark.parametrize(
    ("packages", "code", "says"),
    [
        ([GOOD], 0, "audit: no known vulnerability in 1 packages"),
        ([GOOD, BAD], 3, "audit: b 2: PYSEC-1, fixed in 3"),
        ([GOOD, SKIPPED], 4, "audit: NOT DONE for 1 of 2 packages"),
        ([BAD, SKIPPED], 3, "audit: NOT DONE for 1 of 2 packages"),
        ([], 4, "audit: NOT DONE"),
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
    (tmp_path / "pip_audit.py").write_text(report, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "audit"), *LOCKS],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, says in done.stdout + done.stderr) == (code, True), done.stderr
