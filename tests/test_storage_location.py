"""Locations of ledgers and tables: local folders and URLs of object stores (D6)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.ledger import Ledger
from twinbus.storage_location import LocationError, StorageLocation, refuse_url

PARSED = {
    "s3://bucket": ("s3", "bucket", "", None),
    "s3://bucket/": ("s3", "bucket", "", None),
    "S3A://bucket//a//b/": ("s3a", "bucket", "a/b", None),
    "az://container/a b": ("az", "container", "a b", None),
    "abfss://container@account1.dfs.core.windows.net/a": ("abfss", "container", "a", "account1"),
    "abfs://container/a": ("abfs", "container", "a", None),
}
LOCAL = {
    "tables": "tables",
    "./s3:/tables": "./s3:/tables",
    "a:b/c": "a:b/c",
    "file:///var/tables": "/var/tables",
    "file:/var/a%20b": "/var/a b",
    "file://localhost/var": "/var",
}
REFUSED = {
    "gs://bucket/tables": "unknown scheme 'gs'",
    "http://host/tables": "unknown scheme 'http'",
    "s3:/bucket/tables": "two slashes",
    "s3:///tables": "two slashes",
    "s3://": "names no container",
    "file://elsewhere/var": "another machine",
    "s3://bucket/../other": "parts . and ..",
    "s3://key:hidden@bucket/a": "must not have @",
    "az://container/a?sig=hidden": "must not have ?",
    "abfss://container:hidden@account.example/a": "must not have @",
    "gs://key:hidden@bucket/a?b=hidden": "unknown scheme",
    "s3://bucket/a#hidden": "must not have ? or #",
    "s3://key:hidden?en@bucket/a": "must not have ? or #",
    "s3://key:hidden#en@bucket/a?b": "must not have ? or #",
    "az://container/a?sig=x@hidden": "must not have ? or #",
}


@pytest.mark.parametrize("text", PARSED)
def test_d6_a_url_names_scheme_container_and_path(text: str) -> None:
    found = StorageLocation.parse(text)
    assert (found.scheme, found.container, found.key, found.account) == PARSED[text]
    assert StorageLocation.parse(found.text) == found
    assert (found / "x").key == "/".join(filter(None, (found.key, "x")))
    with pytest.raises(LocationError, match="a local folder is needed here"):
        os.fspath(found)


@pytest.mark.parametrize("text", LOCAL)
def test_d6_other_texts_and_file_urls_are_local_folders(text: str) -> None:
    assert (StorageLocation.parse(text).scheme, os.fspath(StorageLocation.parse(text))) == ("", LOCAL[text])
    assert refuse_url(text) == Path(LOCAL[text])


@pytest.mark.parametrize("text", REFUSED)
def test_d6_an_unusable_url_is_refused_by_name_and_without_its_credentials(text: str) -> None:
    with pytest.raises(LocationError, match=re.escape(REFUSED[text])) as refused:
        StorageLocation.parse(text)
    assert "hidden" not in str(refused.value)
    if not text.startswith("file:"):
        with pytest.raises(LocationError, match="a local path is needed here") as refused:
            refuse_url(text)
        assert "hidden" not in str(refused.value)


@given(st.text(min_size=1))
def test_d6_a_text_without_a_scheme_is_never_changed(text: str) -> None:
    location = StorageLocation.parse(f"./{text}")
    assert (location.is_url, os.fspath(location)) == (False, f"./{text}")


def test_d6_d7_all_names_of_a_location_are_the_same_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ledger", "sub", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("ledger")
    (tmp_path / "away").symlink_to(tmp_path / "sub")
    account = {"AZURE_STORAGE_ACCOUNT_NAME": "account1"}
    for names in (
        ["ledger", "./ledger/", "sub/../ledger", "link", "away/../link", str(tmp_path / "link"), f"file://{tmp_path}/link"],
        ["gone", "./gone", "sub/../gone"],
        ["s3://bucket/a", "s3a://bucket/a/"],
        ["az://c/a", "abfss://c/a", "abfs://c@account1.dfs.core.windows.net/a", "abfss://c@account1.blob.core.windows.net/a"],
    ):  # fmt: skip
        assert len({StorageLocation.parse(name).canonical(account) for name in names}) == 1, names
    elsewhere = "abfss://c@other1.dfs.core.windows.net/a"
    others = ["ledger", "other", "s3://bucket/a", "s3://bucket/b", "az://c/a", "az://bucket/a", elsewhere]
    assert len({StorageLocation.parse(name).canonical(account) for name in others}) == len(others)
    assert str(StorageLocation.parse("link").absolute()) == str(tmp_path / "link"), "other machines have other links"


def test_d6_a_writer_of_a_ledger_refuses_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LocationError, match="s3://bucket/ledger is a URL"):
        Ledger("s3://bucket/ledger")
    with pytest.raises(LocationError, match="s3:/bucket/ledger is a URL"):
        Ledger(Path("s3://bucket/ledger"))
    assert not list(tmp_path.iterdir())
