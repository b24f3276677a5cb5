"""Follows a page as a reader does: runs its commands in order and its programs, in an empty folder.

The word after the fence of a block says what the block is. `console` has commands after `$ `, each followed by its
output. `python` is a program, and a `text` block directly after it is its output. `…` stands for any text. A command
that ends with `&` runs until the page ends. A program that begins with its name as a comment is kept under that name.
"""

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 60.0
SPARK_PATIENCE = 250.0
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SERVE = re.compile(r"twinbus serve\b(?!.*--namespace)")
_NAMED = re.compile(r"# (\w+\.py)\n")

Inside = Callable[[list[str], Path], list[str]]
"""Returns the command that runs a command elsewhere, in a folder."""


@dataclass(frozen=True)
class Command:
    """One line that a reader types, and the output that the page shows; None if the page shows no output."""

    text: str
    shown: str | None


@dataclass(frozen=True)
class Program:
    text: str
    shown: str | None


def steps(page: str) -> Iterator[Command | Program]:
    """Return the commands and programs of a page, in order."""
    blocks = list(_BLOCK.finditer(page))
    for number, block in enumerate(blocks):
        kind, text = block.groups()
        if kind == "console":
            yield from _commands(text)
        elif kind == "python":
            after = blocks[number + 1] if number + 1 < len(blocks) else None
            shows = after is not None and after[1] == "text" and _prints(page[block.end() : after.start()])
            yield Program(text, after[2] if shows and after is not None else None)


def hidden_commands(page: str) -> list[str]:
    """Return commands that are in a block of another kind, so that this module does not run them."""
    typed = re.compile(r"\$ |(twinbus|pip|make|spark-submit|python|export) ")
    return [
        line
        for kind, text in _BLOCK.findall(page)
        if kind not in ("console", "python")
        for line in text.splitlines()
        if typed.match(line)
    ]


def _prints(between: str) -> bool:
    return between.strip() in ("", "It prints:")


def _commands(text: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        typed = 1
        while lines[typed - 1].endswith("\\"):
            typed += 1
        shown = "\n".join(lines[typed:]).strip("\n")
        yield Command("\n".join(lines[:typed]), shown or None)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Reader:
    """Uses free ports instead of 5672 and 5673, in the commands and in the expected output."""

    def __init__(self, folder: Path, inside: Inside = lambda command, _: command) -> None:
        self.folder = folder
        self._inside = inside
        self._background: list[subprocess.Popen[bytes]] = []
        self._ports = {"5672": str(_free_port()), "5673": str(_free_port())}
        self._serving: subprocess.Popen[bytes] | None = None
        self._programs = 0
        home = {"HOME": str(folder.parent), "XDG_CONFIG_HOME": str(folder.parent / "none")}
        own = {name: value for name, value in os.environ.items() if not name.startswith("TWINBUS_")}
        self.environment = {
            **own,
            **home,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src"),
            "COLUMNS": "120",
            "NO_COLOR": "1",
            # For programs that start a JVM for a short time: the options halve its processor time.
            "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        }

    def follow(self, step: Command | Program) -> None:
        """Run a step. Raises AssertionError if it fails, or if its output is not the output on the page."""
        text, shown = self._here(step.text), None if step.shown is None else self._here(step.shown)
        if isinstance(step, Program):
            self._run_program(text, shown)
        elif _SERVE.match(step.text):
            self._serve(text, shown)
        elif step.text.endswith("&"):
            self._begin(text)
        else:
            self._type(text, shown)

    def stop(self) -> None:
        for process in self._background:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE)
        self._background.clear()
        self._stop_serving()

    def _stop_serving(self) -> None:
        if self._serving is not None:
            self._serving.terminate()
            self._serving.communicate(timeout=PATIENCE)
            self._serving = None

    def _here(self, text: str) -> str:
        return re.sub(r"(?<!\d)567[23](?!\d)", lambda port: self._ports[port[0]], text)

    def _run_program(self, text: str, shown: str | None) -> None:
        self._programs += 1
        named = _NAMED.match(text)
        file = self.folder / (named[1] if named else f"program_{self._programs}.py")
        file.write_text(text, encoding="utf-8")
        is_test = "def test_" in text
        command = [sys.executable, *(["-m", "pytest", "-q", "-p", "no:cacheprovider"] if is_test else []), file.name]
        done = subprocess.run(
            self._inside(command, self.folder),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SPARK_PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{text}\nended with {done.returncode}:\n{done.stdout}{done.stderr}"
        if not is_test:
            _compare(text, shown or "", done.stdout)

    def _type(self, text: str, shown: str | None) -> None:
        kept = self.folder.parent / "environment"
        script = f"{text}\nended=$?\nenv -0 > {kept}\nexit $ended"
        done = subprocess.run(
            self._inside(["bash", "-c", script], self.folder),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SPARK_PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"$ {text}\nended with {done.returncode}:\n{done.stdout}"
        self.environment = dict(pair.split("=", 1) for pair in kept.read_text().split("\0") if "=" in pair)
        if shown is not None:
            _compare(text, shown, done.stdout)

    def _serve(self, text: str, shown: str | None) -> None:
        """Start a server in its own shell. It runs until the next server starts or the page ends."""
        self._stop_serving()
        named = " ".join(
            f"--namespace {name}={port}"
            for name, port in zip(("primary", "secondary"), self._ports.values(), strict=True)
        )
        self._serving = subprocess.Popen(
            self._inside(["bash", "-c", f"exec {text} {named}"], self.folder),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        printed = self._until_ready(self._serving)
        if shown is not None:
            _compare(text, shown, printed)

    def _begin(self, text: str) -> None:
        """Start a command that runs until the page ends. Its output is in the folder above."""
        with (self.folder.parent / "background.log").open("ab") as log:
            self._background.append(
                subprocess.Popen(
                    self._inside(["bash", "-c", f"exec {text.removesuffix('&')}"], self.folder),
                    cwd=self.folder,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    @staticmethod
    def _until_ready(process: "subprocess.Popen[bytes]") -> str:
        assert process.stdout is not None
        until, printed = time.monotonic() + PATIENCE, b""
        while not printed.endswith(b"ready\n"):
            there, _, _ = select.select([process.stdout], [], [], max(until - time.monotonic(), 0))
            read = os.read(process.stdout.fileno(), 65536) if there else b""
            assert read, f"serve is not ready: {printed.decode()}"
            printed += read
        return printed.decode()


def _compare(text: str, shown: str, printed: str) -> None:
    pattern = re.escape(_stripped(shown)).replace("…", ".*")
    assert re.fullmatch(pattern, _stripped(printed), re.DOTALL), f"{text}\nprints:\n{printed}\nThe page shows:\n{shown}"


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
