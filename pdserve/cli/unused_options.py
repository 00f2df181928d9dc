"""Options that are of no use to what is asked: figures without them would be read as theirs."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from pdserve.bench.serve.choice import Kind

_MADE = (Kind.RANDOM, Kind.PREFIX)
# By parameter: for what it is.
_USED_BY: Mapping[str, tuple[Kind, ...]] = {
    "workload": (*_MADE, Kind.CONVERSATION),
    "tokenizer": (Kind.DIALOGUES,),
    "input_tokens": _MADE,
    "output_tokens": _MADE,
    "range_ratio": _MADE,
    "prefix_tokens": (Kind.PREFIX,),
    "prefixes": (Kind.PREFIX,),
    "trace_start": (Kind.TRACE,),
    "block_tokens": (Kind.TRACE,),
    "max_input_tokens": (Kind.TRACE, Kind.CONVERSATION),
    "max_output_tokens": (Kind.TRACE, Kind.CONVERSATION, Kind.DIALOGUES),
    "burstiness": (*_MADE, Kind.DIALOGUES),
}
_OF_HTTP = ("model", "extra_body")
_FILES = {Kind.TRACE: "--trace", Kind.DIALOGUES: "--sharegpt"}


def check_used(context: typer.Context, kind: Kind, is_http: bool) -> None:
    """Raises typer.BadParameter for one that was typed."""
    for name, kinds in _USED_BY.items():
        if kind not in kinds and _is_typed(context, name):
            told = _FILES.get(kind, f"--workload {kind.value}")
            raise typer.BadParameter(f"--{name.replace('_', '-')} has no use with {told}")
    for name in _OF_HTTP:
        if not is_http and _is_typed(context, name):
            raise typer.BadParameter(f"--{name.replace('_', '-')} is for HTTP: give --url or --http")


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
