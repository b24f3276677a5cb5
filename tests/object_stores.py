"""Object stores for tests: moto's server for S3. The server runs in the process of the test, on a free port."""

from __future__ import annotations

import logging
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

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
