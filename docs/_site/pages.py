"""Pages of the site that are made from the code, and links between the site and files outside of `docs`.

MkDocs calls the functions `on_…`. `make docs` builds the site.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import typer.main
from mkdocs.structure.files import File
from prometheus_client import CollectorRegistry

import twinbus
import twinbus.aio
import twinbus.testing
from twinbus.cli.main import app
from twinbus.namespace.meter import DepthCollector, OperationMeter, ResourceCollector
from twinbus.namespace.resources import ResourceLimits, Resources
from twinbus.pairing.events import LEVELS
from twinbus.pairing.metrics import PairMetrics

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Files beside `docs` that are pages of the site.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    pages = {page: outside_page((ROOT / name).read_text(encoding="utf-8"), page) for name, page in OUTSIDE.items()} | {
        "reference/commands.md": commands(),
        "reference/events.md": events(),
        "reference/metrics.md": metrics(),
        "decisions/index.md": decisions(),
        **api_pages(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files outside of `docs` at their pages. A link to another file becomes plain text."""
    here = posixpath.dirname(page.file.src_uri)
    return relinked(markdown, lambda target: inside_target(here, target))


def relinked(markdown: str, find: Any) -> str:
    def link(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match.group(0)
        found = find(target)
        return text if found is None else f"{image}[{text}]({found})"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def inside_target(here: str, target: str) -> str | None:
    path, mark, anchor = target.partition("#")
    whole = posixpath.normpath(posixpath.join("docs", here, path))
    if whole in OUTSIDE:
        return posixpath.relpath(OUTSIDE[whole], here or ".") + mark + anchor
    if whole == "docs/decisions":
        return posixpath.relpath("decisions/index.md", here or ".")
    return target if whole.startswith("docs/") else None


def outside_page(text: str, page: str) -> str:
    """Return a file of the project's root as a page: its links are relative to the root."""

    def find(target: str) -> str | None:
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(path)
        if path in OUTSIDE:
            return OUTSIDE[path] + mark + anchor
        if path in ("docs/decisions", "docs/guides"):
            return "decisions/index.md" if path.endswith("decisions") else "index.md"
        return path.removeprefix("docs/") + mark + anchor if path.startswith("docs/") else None

    return relinked(text, find)


# --- commands --------------------------------------------------------------------------------------------------------


def commands() -> str:
    parts = [
        "# Commands\n\nEvery verb of `twinbus`, from its help. All use the same [exit codes](../guides/exit-codes.md)."
    ]
    root = typer.main.get_command(app)
    parts += describe(root, "twinbus")
    return "\n\n".join(parts) + "\n"


def describe(command: click.Command, name: str) -> Iterator[str]:
    inner = getattr(command, "commands", {})
    if name != "twinbus":
        yield f"## {name}" if name.count(" ") == 1 else f"### {name}"
        yield help_text(command.help or "")
    rows = [option_row(one) for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
    if rows and name != "twinbus":
        yield "| option | default | meaning |\n| --- | --- | --- |\n" + "\n".join(rows)
    for word, verb in inner.items():
        yield from describe(verb, f"{name} {word}")


def help_text(text: str) -> str:
    words, _, examples = text.partition("Examples:")
    words = words.replace("\b", "").strip()
    lines = [line.strip() for line in examples.replace("\b", "").strip().splitlines() if line.strip()]
    return words + ("\n\n```console\n" + "\n".join(f"$ {line}" for line in lines) + "\n```" if lines else "")


def option_row(one: Any) -> str:
    names = (
        ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
        if one.opts[0].startswith("-")
        else f"`{one.human_readable_name}`"
    )
    if one.metavar:
        names += f" `{one.metavar}`"
    shown = getattr(one, "show_default", None)
    default = shown if isinstance(shown, str) else one.default
    plain = "" if default in (None, False, ()) or callable(default) else f"{getattr(default, 'value', default)}"
    meaning = (getattr(one, "help", "") or "").replace("|", "\\|")
    if getattr(one, "envvar", None):
        variables = one.envvar if isinstance(one.envvar, str) else ", ".join(one.envvar)
        meaning += f" Environment: `{variables}`."
    return f"| {names} | {plain} | {meaning} |"


# --- events and metrics ----------------------------------------------------------------------------------------------


def events() -> str:
    lines = [
        "# Events of a pair",
        "`pair.on(name, callback)` calls the callback with an object of the class. The log (logger `twinbus.pairing`), "
        "OpenTelemetry and the ledger have the same names and fields. `at` is the monotonic time of the process.",
    ]
    classes = {one.name: one for one in map(vars_of, twinbus.__all__) if isinstance(getattr(one, "name", None), str)}
    for name, level in LEVELS.items():
        one = classes[name]
        text = (one.__doc__ or "").partition("Example:")[0]
        given = ", ".join(f"`{field.name}`" for field in fields(one))
        level_name = {20: "info", 30: "warning", 40: "error"}[level]
        lines += [
            f"## {name}",
            " ".join(text.split()),
            f"Class `twinbus.{one.__name__}`, fields {given}; log level {level_name}.",
        ]
    return "\n\n".join(lines) + "\n"


def vars_of(name: str) -> Any:
    return getattr(twinbus, name)


def metrics() -> str:
    pair = table(PairMetrics.of(CollectorRegistry()).collect())
    meter = OperationMeter()
    namespace = [*meter.registry.collect(), *ResourceCollector(Resources(ResourceLimits())).collect()]
    nothing: Any = SimpleNamespace(queues=list, topics=list)
    namespace += DepthCollector(nothing).collect()
    return (
        "# Metrics\n\n## Of a pair\n\nIn the default registry of the process, with the extra `telemetry`.\n\n"
        f"{pair}\n\n## Of a local namespace\n\n`GET /metrics` on its port.\n\n{table(namespace)}\n"
    )


def table(found: Any) -> str:
    rows = sorted(
        {(one.name + ("_total" if one.type == "counter" else ""), one.type, one.documentation) for one in found}
    )
    return "| name | kind | meaning |\n| --- | --- | --- |\n" + "\n".join(
        f"| `{name}` | {kind} | {re.sub(r' [(][A-Z][0-9]+[)]', '', text)} |" for name, kind, text in rows
    )


def decisions() -> str:
    lines = ["# Decisions", "Decisions that would surprise a reader: context, decision, figures, cost.", ""]
    for path in sorted((DOCS / "decisions").glob("0*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines[:2]) + "\n\n" + "\n".join(lines[3:]) + "\n"


# --- the API ---------------------------------------------------------------------------------------------------------


def api_pages() -> dict[str, str]:
    public = [name for name in twinbus.__all__ if not name.startswith("__") and name != "EVENTS"]
    errors = [name for name in public if name.endswith("Error")]
    events = [name for name in public if isinstance(getattr(vars_of(name), "name", None), str)]
    first = [
        "pair_connection_strings",
        "pair_namespaces",
        "Pair",
        "PairedSender",
        "SendAvailabilityOptions",
        "EntityState",
    ]
    rest = first + [name for name in public if name not in {*errors, *events, *first, "Ledger"}]
    return {
        "api/twinbus.md": api_page(
            "twinbus", (twinbus.__doc__ or "").partition("\n\n    make a pair")[0], "twinbus", rest
        ),
        "api/aio.md": api_page("twinbus.aio", twinbus.aio.__doc__ or "", "twinbus.aio", twinbus.aio.__all__),
        "api/events.md": api_page(
            "Events",
            "What callbacks of `pair.on` get. The [list of events](../reference/events.md) has their names.",
            "twinbus",
            events,
        ),
        "api/errors.md": api_page(
            "Errors", "Three families say who acts next: the caller, time, or an operator.", "twinbus", errors
        ),
        "api/ledger.md": api_page(
            "Ledger", "The append-only record. Its [format](../ledger.md) has a page of its own.", "twinbus", ["Ledger"]
        ),
        "api/testing.md": api_page(
            "twinbus.testing", twinbus.testing.__doc__ or "", "twinbus.testing", twinbus.testing.__all__
        ),
        "api/kombu.md": read_api_page("twinbus.kombu"),
        "api/spark-source.md": read_api_page("twinbus.pipeline.servicebus"),
        "api/spark-session.md": read_api_page("twinbus.pipeline.session"),
    }


def read_api_page(module: str) -> str:
    """Return the page of a module that this site cannot import: what it needs is not installed for the site.

    Members without a docstring are left out: kombu and Spark use them, not programs.
    """
    path = ROOT / "src" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (names,) = (
        ast.literal_eval(one.value)
        for one in tree.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "__all__"
    )
    entries = (f"::: {module}.{name}\n    options:\n      show_if_no_docstring: false" for name in names)
    return f"# {module}\n\n{ast.get_docstring(tree) or ''}\n\n" + "\n\n".join(entries) + "\n"


def api_page(title: str, text: str, module: str, names: list[str]) -> str:
    return f"# {title}\n\n{text}\n\n" + "\n\n".join(f"::: {module}.{name}" for name in names) + "\n"
