"""`pdserve bench ...`: what parts of pdserve reach on this machine, beside what it could at most."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from engine.config import EngineConfig, ModelConfig, NgramSpeculation
from pdserve.bench.rows import ROWS, Plan, parse_rows
from pdserve.bench.transfer_plan import Plan as TransferPlan
from pdserve.bench.transfer_plan import parse_tokens
from pdserve.cli import transfer_report
from pdserve.cli.bench_report import as_object, show
from pdserve.cli.bench_serve import serve
from pdserve.cli.check import AsJson
from pdserve.cli.console import INTERRUPTED, err, write
from pdserve.cli.up import interrupted

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure what this machine gives, and what of it is reached.",
)

app.command("serve")(serve)


class Dtype(Enum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Compile(Enum):
    AUTO = "auto"
    ON = "on"
    OFF = "off"


def _checked_rows(text: str | None) -> str | None:
    if text is not None:
        try:
            parse_rows(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return text


def _checked_tokens(text: str) -> str:
    try:
        parse_tokens(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def _checked_interpreter(path: Path | None) -> Path | None:
    if path is not None and shutil.which(path) is None:
        raise typer.BadParameter(f"there is no program {path}")
    return path


class Transport(Enum):
    ALL = "all"
    SHM = "shm"
    COLLECTIVE = "collective"
    GRPC = "grpc"


Model = Annotated[str, typer.Option("--model", metavar="ID", help="A model, as in model.id of the YAML.")]
Threads = Annotated[
    int, typer.Option("--threads", metavar="N", min=1, help="Cores to use, each for one thread.")
]
AsDtype = Annotated[Dtype, typer.Option("--dtype", metavar="DTYPE", help="As in model.dtype of the YAML.")]
Compiled = Annotated[Compile, typer.Option("--compile", metavar="auto|on|off", help="As in model.compile.")]
Rows = Annotated[
    str | None,
    typer.Option(
        "--rows",
        metavar="NAME,NAME",
        callback=_checked_rows,
        help=f"Some of the rows only: {', '.join(row.name for row in ROWS)}. By default all.",
    ),
]
Rounds = Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="How often each row is measured.")]
StepTokens = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens",
        metavar="N",
        min=1,
        help="Prompt tokens in a step, as in engine.max_num_batched_tokens of the YAML.",
    ),
]
VllmPython = Annotated[
    Path | None,
    typer.Option(
        "--vllm-python",
        metavar="PATH",
        callback=_checked_interpreter,
        help="An interpreter that has vLLM: compare with it.",
    ),
]
Speculative = Annotated[
    bool,
    typer.Option(
        "--speculative",
        metavar="",
        help="Measure speculative decoding too, on answers that repeat their prompt and on others.",
    ),
]

AsTransport = Annotated[
    Transport,
    typer.Option(
        "--transport",
        metavar="NAME",
        help=f"As in kv_transfer.transport: {', '.join(each.value for each in Transport)}.",
    ),
]
Tokens = Annotated[
    str,
    typer.Option("--tokens", metavar="N,N", callback=_checked_tokens, help="Lengths of prompts, in tokens."),
]
Requests = Annotated[
    int | None,
    typer.Option(
        "--requests",
        metavar="N",
        min=0,
        help="Real requests of each length; 0: none. By default fewer of what takes longer.",
    ),
]


@app.command("engine")
def engine(
    model: Model = "smollm2-135m",
    threads: Threads = 1,
    dtype: AsDtype = Dtype.AUTO,
    compile_: Compiled = Compile.AUTO,
    rows: Rows = None,
    rounds: Rounds = Plan().num_rounds,
    max_num_batched_tokens: StepTokens = None,
    vllm_python: VllmPython = None,
    speculative: Speculative = False,
    as_json: AsJson = False,
) -> None:
    """Measure the engine by itself on this machine's CPU.

    Tokens per second, and the share of what the machine could do at most:
    prefill of one prompt, and decoding at several batch sizes and contexts.
    The machine's own rates are measured in the same rounds as the rows. Give
    it a quiet machine: what else runs takes from every figure.

    All rows take minutes. Short runs: a few --rows, and --rounds 1.

    Examples:
        pdserve bench engine
        pdserve bench engine --rows prefill_128,decode_b1 --rounds 1
        pdserve bench engine --threads 2 --rows prefill_1024,decode_b8 --json
        pdserve bench engine --vllm-python ~/vllm-env/bin/python
    """
    chosen = ROWS if rows is None else parse_rows(rows)
    signal.signal(signal.SIGTERM, interrupted)
    config = ModelConfig(id=model, dtype=dtype.value, device="cpu", compile=compile_.value)
    budget = max_num_batched_tokens or EngineConfig().max_num_batched_tokens
    try:
        with _shown_progress(len(chosen) * rounds) as progress:
            progress.say("loading libraries")
            from pdserve.bench.engine import Wanted, run  # torch comes with it

            ngram = NgramSpeculation(method="ngram") if speculative else None
            wanted = Wanted(config, chosen, Plan(rounds), threads, budget, vllm_python, ngram)
            report = run(wanted, progress)
    except KeyboardInterrupt:
        err.print("interrupted: what was started has been ended")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        write(json.dumps(as_object(report)) + "\n")
    else:
        show(report)


@app.command("transfer")
def transfer(
    transport: AsTransport = Transport.ALL,
    tokens: Tokens = "64,1000,4000",
    model: Model = "smollm2-135m",
    rounds: Rounds = 10,
    requests: Requests = None,
    max_num_batched_tokens: StepTokens = None,
    as_json: AsJson = False,
) -> None:
    """Measure how KV travels between workers of this machine.

    First raw rates: blocks go from one process to another by each transport,
    and in turn with them the same bytes by the bare medium (a copy into shared
    memory, Gloo, a gRPC stream), without checksums on either side. Then real
    requests, one at a time, on a prefill and a decode worker that are started
    for it and ended again, with the checks that are usual: how long after the
    first token the decode worker has all KV and begins to decode, and what
    share of the KV was there before.

    Examples:
        pdserve bench transfer
        pdserve bench transfer --transport grpc --tokens 1000 --json
        pdserve bench transfer --requests 0
    """
    chosen = [
        each.value for each in Transport if each is not Transport.ALL and transport in (Transport.ALL, each)
    ]
    signal.signal(signal.SIGTERM, interrupted)
    budget = max_num_batched_tokens or EngineConfig().max_num_batched_tokens
    plan = TransferPlan(parse_tokens(tokens), rounds, requests, budget)
    try:
        with _shown_progress(plan.num_rounds_in_all(len(chosen))) as progress:
            progress.say("loading libraries")
            from pdserve.bench.transfer import run  # torch comes with it

            report = run(ModelConfig(id=model, device="cpu"), chosen, plan, progress)
    except KeyboardInterrupt:
        err.print("interrupted: what was started has been ended")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        write(json.dumps(transfer_report.as_object(report)) + "\n")
    else:
        transfer_report.show(report)


class _Shown:
    """A bar of rounds, with what is being measured in front; in a pipe, a line when each comes first."""

    def __init__(self, bar: Progress, num_rounds: int) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=num_rounds)
        self._said: set[str] = set()

    def say(self, what: str) -> None:
        self._bar.update(self._task, description=what)
        if not err.is_terminal and what not in self._said:
            self._said.add(what)
            err.print(what, markup=False)

    def advance(self) -> None:
        self._bar.advance(self._task)


@contextmanager
def _shown_progress(num_rounds: int) -> Iterator[_Shown]:
    # Other libraries' progress bars would run through this one.
    os.environ["TQDM_DISABLE"] = "1"
    logging.basicConfig(
        level=logging.WARNING, handlers=[RichHandler(console=err, show_time=False, show_path=False)]
    )
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        yield _Shown(bar, num_rounds)
