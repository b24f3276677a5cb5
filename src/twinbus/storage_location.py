"""Where a ledger, tables or checkpoints are: a local folder, or a URL of an object store (D6).

Only `StorageLocation.canonical` does I/O: it follows symbolic links.

A URL never has credentials. They are in the environment, with the names that the tools of AWS and Azure use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from twinbus.errors import CallerError

S3_SCHEMES: Final = ("s3", "s3a")
AZURE_SCHEMES: Final = ("az", "abfs", "abfss")
SCHEMES: Final = (*S3_SCHEMES, *AZURE_SCHEMES, "file")
_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<slashes>/+)(?P<rest>.*)", re.DOTALL)
# What may follow a host, and may contain credentials.
_MORE: Final = re.compile(r"[?#].*", re.DOTALL)
_NAME: Final = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._$-]*")
_AZURE_HOST: Final = re.compile(r"(?P<account>[a-z0-9]{3,24})\.(dfs|blob)\.core\.windows\.net")
_AZURE_ACCOUNT: Final = "AZURE_STORAGE_ACCOUNT_NAME"
_CREDENTIALS: Final = "Put credentials into the environment."


class LocationError(CallerError, ValueError):
    """A path or a URL cannot be used at this place. The text never has what may be a credential."""


@dataclass(frozen=True, slots=True)
class StorageLocation(os.PathLike[str]):
    """A local folder, or a folder in an object store. Make it with `parse`."""

    text: str
    """The path as it was given, or the URL without a slash at the end."""
    scheme: str = ""
    """Empty for a local folder."""
    container: str = ""
    """The bucket of S3, or the container of Azure."""
    key: str = ""
    """The path in the container, without a slash at its beginning and end."""
    account: str | None = None
    """The storage account that an Azure URL names."""

    @classmethod
    def parse(cls, given: str | os.PathLike[str]) -> StorageLocation:
        """Returns the location of a path or a URL.

        Raises LocationError if the URL has another scheme than SCHEMES, no container, or credentials.
        """
        if isinstance(given, StorageLocation):
            return given
        text = os.fspath(given)
        found = _URL.fullmatch(text)
        if found is None:
            return cls(text)
        scheme, rest = found["scheme"].lower(), found["rest"]
        if scheme not in SCHEMES:
            folder = "" if found["slashes"] == "//" else f". A local folder of this name is ./{_shown(text)}"
            raise LocationError(
                f"{_shown(text)} has the unknown scheme {scheme!r}. Known are: {', '.join(SCHEMES)}{folder}"
            )
        if scheme == "file":
            return cls(_local_path(text, found["slashes"], rest))
        if found["slashes"] != "//":
            raise LocationError(f"{_shown(text)} is no URL: {scheme}:// has two slashes, and a container follows")
        return cls._in_store(text, scheme, rest)

    @classmethod
    def _in_store(cls, text: str, scheme: str, rest: str) -> StorageLocation:
        if _MORE.search(rest):
            raise LocationError(f"{_shown(text)} must not have ? or #. {_CREDENTIALS}")
        host, _, key = rest.partition("/")
        container, at, account_host = host.partition("@")
        account = None
        if at:
            found = _AZURE_HOST.fullmatch(account_host) if scheme in AZURE_SCHEMES else None
            if found is None:
                raise LocationError(f"{_shown(text)} must not have @ here. {_CREDENTIALS}")
            account = found["account"]
        if not _NAME.fullmatch(container):
            raise LocationError(f"{_shown(text)} names no container: write {scheme}://container/path")
        parts = [part for part in key.split("/") if part]
        if any(part in (".", "..") for part in parts):
            raise LocationError(f"{_shown(text)} must not have the parts . and ..")
        clean = "/".join(parts)
        return cls(f"{scheme}://{host}/{clean}".rstrip("/"), scheme, container, clean, account)

    @property
    def is_url(self) -> bool:
        """Whether this is in an object store."""
        return bool(self.scheme)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return f"{self.container}/{self.key}".rstrip("/").rpartition("/")[2] if self.is_url else Path(self).name

    def __str__(self) -> str:
        return self.text

    def __fspath__(self) -> str:
        """Returns the path of a local folder. Raises LocationError for a URL."""
        if self.is_url:
            raise LocationError(f"{self.text} is a URL, but a local folder is needed here")
        return self.text

    def __truediv__(self, name: str) -> StorageLocation:
        """Returns the location of a file or folder in this folder."""
        return StorageLocation.parse(f"{self.text}/{name}") if self.is_url else StorageLocation(str(Path(self) / name))

    def absolute(self) -> StorageLocation:
        """Returns the same location, with an absolute path. Symbolic links stay: another machine may have others."""
        return self if self.is_url else StorageLocation(str(Path(self).absolute()))

    def canonical(self, environment: Mapping[str, str] = os.environ) -> str:
        """Returns a text that is the same for all names of this location: all paths, and all schemes of its store.

        It is for comparisons only.
        """
        if not self.is_url:
            return os.path.realpath(self)
        if self.scheme in S3_SCHEMES:
            return f"s3://{self.container}/{self.key}"
        return f"az://{self.container}@{self.account or environment.get(_AZURE_ACCOUNT, '')}/{self.key}"


def refuse_url(given: str | os.PathLike[str]) -> Path:
    """Returns a local path. Raises LocationError if it is a URL, also one with an unknown scheme."""
    text = os.fspath(given)
    if (found := _URL.fullmatch(text)) is not None and found["scheme"].lower() != "file":
        raise LocationError(f"{_shown(text)} is a URL, but a local path is needed here")
    return Path(StorageLocation.parse(text))


def _local_path(text: str, slashes: str, rest: str) -> str:
    if slashes == "//":
        host, _, rest = rest.partition("/")
        if host != "localhost":
            raise LocationError(f"{_shown(text)} names another machine: write file:///path")
    return "/" + unquote(rest).lstrip("/")


def _shown(text: str) -> str:
    """Returns a URL without what may be a credential."""
    start = _MORE.sub("", text)
    if "@" in text[len(start) :]:  # the first ? or # may be in a password
        return f"{text.partition(':')[0]}://…"
    head, at, tail = start.rpartition("@")
    return f"{head.partition(':')[0]}://…@{tail}" if at else tail
