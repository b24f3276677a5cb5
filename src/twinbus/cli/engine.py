"""The options that choose where a verb does its work: in this process, or on Spark."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Engine(StrEnum):
    """Values of the option --engine."""

    NATIVE = "native"
    SPARK = "spark"


Master = Annotated[str | None, typer.Option(help="Spark master URL.", show_default="as submitted, or this machine")]
