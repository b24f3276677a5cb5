"""Objects below a URL of an object store: list, read, put (D6). The package `obstore` makes the requests.

The credentials come from the environment, with the names that the tools of AWS and Azure use (docs/guides/storage.md).
An error text never has them: Azure puts a shared access signature into the address of each request.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Final

from twinbus.errors import OperatorError
from twinbus.extras import missing_extra
from twinbus.storage_location import S3_SCHEMES, StorageLocation

if TYPE_CHECKING:
    from obstore.store import AzureStore, S3Store

_READ_BYTES: Final = 1024 * 1024
_LIST_CHUNK: Final = 1000
# Without these limits, a wrong address is an error only after three minutes.
_RETRIES: Final = 6
_RETRY_SECONDS: Final = 30
_SECRETS: Final = re.compile(r"(KEY|SECRET|TOKEN|SAS|PASSWORD)")
_STORES: Final = ("AWS_", "AZURE_")
_SHORTEST_SECRET: Final = 6
_QUERY: Final = re.compile(r"\?[^\s\"'<>]+")


class StorageError(OperatorError):
    """An object store did not do what was asked. The text has no credentials."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object, as a listing shows it."""

    name: str
    """Relative to the folder."""
    size: int
    modified: datetime


ObjectVersion = tuple[tuple[str, str], ...]
"""What a store says about the content of an object: it changes with each change of the object."""


class ObjectFolder:
    """The objects below a URL. Every method names an object by its path below the URL, and raises StorageError."""

    def __init__(self, location: StorageLocation) -> None:
        self.location = location
        self._store = _opened(location)

    def list(self, below: str = "") -> Iterator[StoredObject]:
        """Yields all objects in a folder and in the folders in it, ordered by name."""
        with storage_errors(self.location):
            for chunk in self._store.list(f"{below}/" if below else None, chunk_size=_LIST_CHUNK):
                for one in chunk:
                    yield StoredObject(one["path"], one["size"], one["last_modified"])

    def list_folder(self) -> tuple[tuple[StoredObject, ...], tuple[str, ...]]:
        """Returns the objects and the folders in this folder, without those in folders in it."""
        with storage_errors(self.location):
            found = self._store.list_with_delimiter()
        objects = (StoredObject(one["path"], one["size"], one["last_modified"]) for one in found["objects"])
        return tuple(objects), tuple(found["common_prefixes"])

    def exists(self, name: str) -> bool:
        try:
            with storage_errors(self.location / name):
                self._store.head(name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """Returns the content of an object. Raises FileNotFoundError."""
        with storage_errors(self.location / name):
            return bytes(self._store.get(name).bytes())

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Returns the bytes from `begin` to before `end`. Raises FileNotFoundError."""
        with storage_errors(self.location / name):
            return bytes(self._store.get_range(name, start=begin, end=end))

    def open(self, name: str, size: int | None = None) -> BinaryIO:
        """Returns a file to read an object with. Raises FileNotFoundError. `size` saves a request if it is known."""
        if size is None:
            with storage_errors(self.location / name):
                size = self._store.head(name)["size"]
        return io.BufferedReader(_ObjectReader(self, name, size), _READ_BYTES)

    def attributes(self, name: str) -> Mapping[str, str]:
        """Returns what `put_new` has stored beside the content. Raises FileNotFoundError."""
        with storage_errors(self.location / name):
            return {str(key).lower(): value for key, value in self._store.get(name).attributes.items()}

    def put_new(self, name: str, data: bytes, attributes: Mapping[str, str]) -> bool:
        """Stores a new object, all of it or nothing. Returns False if there is one of this name: it is not changed."""
        from obstore.exceptions import AlreadyExistsError  # noqa: PLC0415 - slow

        given: dict[Any, Any] = dict(attributes)
        with storage_errors(self.location / name):
            try:
                self._store.put(name, data, mode="create", attributes=given, use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

    def read_version(self, name: str) -> tuple[bytes, ObjectVersion] | None:
        """Returns the content of a small object, and its version; None if there is none."""
        try:
            with storage_errors(self.location / name):
                found = self._store.get(name)
                return bytes(found.bytes()), _version(found.meta)
        except FileNotFoundError:
            return None

    def put_if(self, name: str, data: bytes, version: ObjectVersion | None) -> ObjectVersion | None:
        """Stores an object if there is one with this version, or, with None, if there is none. Returns its version.

        Returns None if there is another one.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415 - slow

        condition: Any = "create" if version is None else dict(version)
        with storage_errors(self.location / name):
            try:
                return _version(self._store.put(name, data, mode=condition, use_multipart=False))
            except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                return None

    def put(self, name: str, file: IO[bytes]) -> None:
        """Stores an object, all of it or nothing. It replaces one of this name."""
        with storage_errors(self.location / name):
            self._store.put(name, file)

    def remove(self, name: str) -> None:
        """Removes an object. Does nothing if there is none."""
        with suppress(FileNotFoundError), storage_errors(self.location / name):
            self._store.delete(name)


def read_text(folder: StorageLocation, name: str) -> str:
    """Returns the text of a file in a folder, local or not. Raises FileNotFoundError."""
    if folder.is_url:
        return ObjectFolder(folder).read(name).decode()
    return (Path(folder) / name).read_text(encoding="utf-8")


class _ObjectReader(io.RawIOBase):
    """Reads an object in ranges."""

    def __init__(self, folder: ObjectFolder, name: str, size: int) -> None:
        super().__init__()
        self._folder = folder
        self._name = name
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._position)
        if wanted <= 0:
            return 0
        found = self._folder.read_range(self._name, self._position, self._position + wanted)
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)


def _version(found: Mapping[str, Any]) -> ObjectVersion:
    return tuple((key, found[key]) for key in ("e_tag", "version") if found.get(key))


def _opened(location: StorageLocation) -> S3Store | AzureStore:
    assert location.is_url, "a local folder needs no object store"
    try:
        from obstore.store import AzureStore, S3Store  # noqa: PLC0415 - slow; its error names the extra to install
    except ImportError as error:
        raise missing_extra(error, "storage") or error from error

    retries: Any = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)}
    prefix = location.key or None
    with storage_errors(location):
        if location.scheme in S3_SCHEMES:
            return S3Store(location.container, prefix=prefix, retry_config=retries)
        account: dict[str, Any] = {} if location.account is None else {"account_name": location.account}
        return AzureStore(location.container, prefix=prefix, retry_config=retries, **account)


# --- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def storage_errors(location: StorageLocation) -> Iterator[None]:
    """Turns an error of `obstore` inside the `with` block into a StorageError. FileNotFoundError stays as it is."""
    from obstore.exceptions import BaseError, NotFoundError  # noqa: PLC0415 - slow

    try:
        yield
    except (FileNotFoundError, NotFoundError):
        raise FileNotFoundError(f"{location} does not exist") from None
    except (BaseError, OSError) as error:
        # Without the chain: its texts may have credentials.
        raise explained(location, error) from None


def explained(location: StorageLocation, error: Exception) -> StorageError:
    """Returns the error with its cause in one line, without credentials."""
    text = without_credentials(str(error).partition("\n\nDebug source")[0])
    text = " ".join(re.sub(r"<[^>]*>", " ", text).split())
    hint = "Check the URL, the credentials in the environment, and the network: docs/guides/storage.md."
    return StorageError(f"{location}: {text}", hint)


def without_credentials(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns a text without the values of variables for credentials, and without what follows ? in an address."""
    for name, value in environment.items():
        if name.startswith(_STORES) and _SECRETS.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "…")
    return _QUERY.sub("?…", text)
