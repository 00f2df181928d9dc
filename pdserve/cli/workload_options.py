"""The options of `pdserve bench serve` that say what is asked: lengths, files, prompts."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Made(Enum):
    """Workloads that need no file."""

    RANDOM = "random"
    PREFIX = "prefix"
    CONVERSATION = "conversation"


_WHAT = "Requests"

AsWorkload = Annotated[
    Made,
    typer.Option(
        "--workload",
        metavar="random|prefix|conversation",
        rich_help_panel=_WHAT,
        help="prefix: prompts that begin alike. conversation: lengths and arrivals like Azure's trace.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        rich_help_panel=_WHAT,
        help="Azure's CSV or Mooncake's JSONL.",
    ),
]
ShareGpt = Annotated[
    Path | None,
    typer.Option(
        "--sharegpt",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        rich_help_panel=_WHAT,
        help="Dialogues as JSON; none is sent twice in a run.",
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="PATH",
        exists=True,
        rich_help_panel=_WHAT,
        help="Counts the answers of dialogues: a tokenizer.json or its folder. Else: four bytes a token.",
    ),
]
NumRequests = Annotated[
    int | None,
    typer.Option(
        "--requests", metavar="N", min=1, rich_help_panel=_WHAT, help="By default 100, or all of a trace."
    ),
]
InputTokens = Annotated[
    int, typer.Option("--input-tokens", metavar="N", min=1, rich_help_panel=_WHAT, help="Of each prompt.")
]
OutputTokens = Annotated[
    int, typer.Option("--output-tokens", metavar="N", min=1, rich_help_panel=_WHAT, help="Of each answer.")
]
RangeRatio = Annotated[
    float,
    typer.Option(
        "--range-ratio",
        metavar="R",
        min=0,
        max=0.999,
        rich_help_panel=_WHAT,
        help="Lengths are even over (1 - R) to (1 + R) times these.",
    ),
]
PrefixTokens = Annotated[
    int,
    typer.Option(
        "--prefix-tokens", metavar="N", min=1, rich_help_panel=_WHAT, help="Of prefix: before --input-tokens."
    ),
]
NumPrefixes = Annotated[
    int, typer.Option("--prefixes", metavar="N", min=1, rich_help_panel=_WHAT, help="Different ones.")
]
TraceStart = Annotated[
    float,
    typer.Option("--trace-start", metavar="SECONDS", min=0, rich_help_panel=_WHAT, help="Where to begin."),
]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        "--block-tokens",
        metavar="N",
        min=1,
        rich_help_panel=_WHAT,
        help="Shortens each of Mooncake's 512-token blocks to N tokens: what is shared stays shared.",
    ),
]
MaxInput = Annotated[
    int | None,
    typer.Option("--max-input-tokens", metavar="N", min=1, rich_help_panel=_WHAT, help="Clips a trace's."),
]
MaxOutput = Annotated[
    int | None,
    typer.Option(
        "--max-output-tokens", metavar="N", min=1, rich_help_panel=_WHAT, help="A trace's and dialogues'."
    ),
]
AsText = Annotated[
    bool,
    typer.Option(
        "--text",
        metavar="",
        rich_help_panel=_WHAT,
        help="Words in place of token ids, for servers that take none.",
    ),
]
VocabSize = Annotated[
    int | None,
    typer.Option(
        "--vocab-size", metavar="N", min=16, rich_help_panel=_WHAT, help="Where the server does not say it."
    ),
]
Temperature = Annotated[
    float, typer.Option("--temperature", metavar="T", min=0, rich_help_panel=_WHAT, help="0 is greedy.")
]
StopAtEos = Annotated[
    bool,
    typer.Option(
        "--stop-at-eos",
        metavar="",
        rich_help_panel=_WHAT,
        help="Answers may end before they are as long as planned.",
    ),
]
