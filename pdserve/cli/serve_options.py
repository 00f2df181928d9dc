"""The options of `pdserve bench serve` but for what is asked (workload_options.py): many, so that they stand
apart from what is done with them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.endpoint import Api


def parse_rates(text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--rates {text!r}: write numbers with commas, like 0.5,1,2") from None
    if not all(0 < rate < math.inf for rate in rates):
        raise typer.BadParameter(f"--rates {text!r}: a rate is above 0, and no infinity")
    return rates


def parse_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"--extra-body {text!r}: write a JSON object, like '{{\"top_k\": 5}}'")
    return value


def _positive(value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise typer.BadParameter(f"{value:g}: it has to be above 0")
    return value


def _url(value: str | None) -> str | None:
    if value is not None and not value.lower().startswith(("http://", "https://")):
        raise typer.BadParameter(f"{value!r}: it begins with http:// or https://")
    return value


def _plot_file(path: Path | None) -> Path | None:
    if path is not None:
        from pdserve.bench.serve.plot import check_ending  # numpy comes with it

        try:
            check_ending(path)
        except BenchError as error:
            raise typer.BadParameter(str(error)) from None
    return path


_TO, _WHEN, _OUT = "The server", "Arrivals", "Results"

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        callback=_url,
        rich_help_panel=_TO,
        help="Any OpenAI-compatible server, in place of a cluster.",
    ),
]
Http = Annotated[
    bool,
    typer.Option("--http", metavar="", rich_help_panel=_TO, help="The cluster's HTTP in place of its gRPC."),
]
AsApi = Annotated[
    Api,
    typer.Option(
        "--api", metavar="completions|chat", rich_help_panel=_TO, help="Of HTTP. A chat is sent as text."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="ID", rich_help_panel=_TO, help="Over HTTP; by default the first one listed."
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", metavar="KEY", envvar="OPENAI_API_KEY", rich_help_panel=_TO, help="Sent with --url only."
    ),
]
ExtraBody = Annotated[
    str,
    typer.Option(
        "--extra-body", metavar="JSON", rich_help_panel=_TO, help="Put into the body of each HTTP request."
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", callback=_positive, rich_help_panel=_TO, help="Each request's limit."
    ),
]

Rate = Annotated[
    float | None,
    typer.Option(
        "--rate",
        metavar="R",
        callback=_positive,
        rich_help_panel=_WHEN,
        help="Requests a second, or inf: all at once. By default 1, or a trace's own.",
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(
        "--burstiness",
        metavar="B",
        callback=_positive,
        rich_help_panel=_WHEN,
        help="1: Poisson; less: burstier; inf: a clock.",
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", min=0, rich_help_panel=_WHEN, help="Of lengths and arrivals.")
]
PromptSeed = Annotated[
    int | None,
    typer.Option(
        "--prompt-seed",
        metavar="N",
        min=0,
        rich_help_panel=_WHEN,
        help="Of the prompts' tokens. By default new ones each time: a cache may hold those of the last.",
    ),
]

GoodputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--goodput",
        metavar="NAME:MS ...",
        rich_help_panel=_OUT,
        help="Objectives on ttft, tpot, tbt, e2el; a request counts that meets them all.",
    ),
]
MoreObjectives = Annotated[
    list[str] | None, typer.Argument(metavar="NAME:MS", help="More objectives, behind --goodput's first.")
]
FindGoodput = Annotated[
    bool,
    typer.Option(
        "--find-goodput",
        metavar="",
        rich_help_panel=_OUT,
        help="Search the rate at which --target of the requests meet --goodput.",
    ),
]
Rates = Annotated[
    str | None,
    typer.Option(
        "--rates",
        metavar="R,R",
        rich_help_panel=_OUT,
        help="Where --find-goodput measures; else it searches from --rate.",
    ),
]
Target = Annotated[
    float,
    typer.Option("--target", metavar="SHARE", min=0.01, max=1, rich_help_panel=_OUT, help="Of requests."),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE", callback=_plot_file, rich_help_panel=_OUT, help="A PNG, SVG or PDF."
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FILE",
        dir_okay=False,
        rich_help_panel=_OUT,
        help="JSON with every request, for programs.",
    ),
]
