"""Object stores for tests, on free ports: moto's server for S3, in the process of the test or in its own; Azurite.

`deltalake` may keep Python's lock during a request, so it needs a server in another process.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.components import component_missing

Hook = Callable[[str, str], None]
"""A function that gets the method and the path of a request."""
SECRET = "tHe-SeCrEt-KeY-of-the-tests"


@dataclass
class StoreServer:
    """A running server: the environment with which a program uses it, and a container in it."""

    environment: dict[str, str]
    scheme: str
    container: str
    before: Hook | None = field(default=None)
    """Is called before a request is handled."""
    after: Hook | None = field(default=None)
    """Is called after a request was handled, before the answer is sent."""

    def url(self, path: str = "") -> str:
        """Return a URL that no other test has used."""
        return f"{self.scheme}://{self.container}/{path or uuid4().hex}"


@contextmanager
def s3_server() -> Iterator[StoreServer]:
    """Run moto's server with one bucket."""
    from moto.moto_server.werkzeug_app import (  # noqa: PLC0415 - slow
        DomainDispatcherApplication,
        create_backend_app,
    )
    from werkzeug.serving import make_server  # noqa: PLC0415

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    bucket = f"bucket-{uuid4().hex[:8]}"
    app = DomainDispatcherApplication(create_backend_app)
    found = StoreServer({}, "s3", bucket)

    def handle(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        request = (environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if found.before is not None:
            found.before(*request)
        answer = app(environ, start_response)
        if found.after is not None:
            found.after(*request)
        return answer

    server = make_server("127.0.0.1", 0, handle, threaded=True)
    thread = threading.Thread(target=server.serve_forever, name="moto")
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        made = urllib.request.Request(f"{address}/{bucket}", method="PUT")  # noqa: S310 - our own server
        urllib.request.urlopen(made).close()  # noqa: S310
        found.environment |= {
            "AWS_ENDPOINT_URL": address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "twinbus-tests",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def s3_process() -> Iterator[StoreServer]:
    """Run moto's server with one bucket in a process of its own."""
    command = [sys.executable, "-m", "tests.object_stores"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield StoreServer(**json.loads(process.stdout.readline()))
        finally:
            process.stdin.close()  # ends the process


AZURITE = Path(__file__).parent / "compat" / "javascript" / "node_modules" / "azurite"
# The account that every Azurite has. Its key is public.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextmanager
def azurite_process() -> Iterator[StoreServer]:
    """Run Azurite with one container. Skips the test if it is not installed."""
    program = AZURITE / "dist" / "src" / "blob" / "main.js"
    node = shutil.which("node")
    if node is None or not program.exists():
        component_missing("Azurite", install="in tests/compat/javascript: npm ci")
    options = ["--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence"]
    command = [node, str(program), *options, "--skipApiVersionCheck"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            found = next(line for line in process.stdout if "successfully listens" in line)
            address = found.split()[-1]
            container = f"container-{uuid4().hex[:8]}"
            _make_container(address, container)
            environment = {
                "AZURE_STORAGE_USE_EMULATOR": "true",
                "AZURITE_BLOB_STORAGE_URL": address,
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
                "AZURE_ALLOW_HTTP": "true",
            }
            yield StoreServer(environment, "az", container)
        finally:
            process.terminate()


def _make_container(address: str, container: str) -> None:
    """Make a container with one signed request, as the REST API of Azure Storage defines it."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "PUT" + "\n" * 12 + "".join(f"{name}:{value}\n" for name, value in headers.items())
    signed += f"/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{address}/{ACCOUNT}/{container}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()  # noqa: S310 - our own


if __name__ == "__main__":
    with s3_server() as running:
        values = {"environment": running.environment, "scheme": running.scheme, "container": running.container}
        print(json.dumps(values), flush=True)
        sys.stdin.read()
