"""`pdserve bench ...`: what parts of pdserve reach on this machine, beside what it could at most."""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.config import EngineConfig, ModelConfig, NgramSpeculation
from pdserve.bench.rows import ROWS, Plan, parse_rows
from pdserve.cli.check import AsJson
from pdserve.cli.console import INTERRUPTED, err, out, write
from pdserve.cli.up import interrupted

if TYPE_CHECKING:
    from pdserve.bench.engine import Report
    from pdserve.bench.measure import RowResult

# A process that sleeps costs nothing; one that polls shows at once.
_SPINS_FROM = 0.02
app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure what this machine gives, and what of it is reached.",
)


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


Model = Annotated[str, typer.Option("--model", metavar="ID", help="A model, as in model.id of the YAML.")]
Threads = Annotated[
    int, typer.Option("--threads", metavar="N", min=1, help="Cores to use, each for one thread.")
]
AsDtype = Annotated[Dtype, typer.Option("--dtype", metavar="DTYPE", help="As in model.dtype of the YAML.")]
Compiled = Annotated[Compile, typer.Option("--compile", metavar="auto|on|off", help="As in model.compile.")]
Rows = Annotated[
    str | None,
    typer.Option("--rows", metavar="NAME,NAME", callback=_checked_rows, help="Some of the rows only."),
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
    typer.Option("--vllm-python", metavar="PATH", help="An interpreter that has vLLM: compare with it."),
]
Speculative = Annotated[
    bool,
    typer.Option(
        "--speculative",
        metavar="",
        help="Measure speculative decoding too, on answers that repeat their prompt and on others.",
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
    """Measure the engine by itself on this machine's CPU: tokens per second, and the share of what the
    machine could do at most.

    Prefill of one prompt, and decoding at several batch sizes and contexts. The machine's own rates are
    measured in the same rounds as the rows. Give it a quiet machine: what else runs takes from every figure.

    Examples:
        pdserve bench engine
        pdserve bench engine --threads 2 --rows prefill_1024,decode_b8 --json
        pdserve bench engine --vllm-python ~/vllm-env/bin/python
    """
    chosen = ROWS if rows is None else parse_rows(rows)
    signal.signal(signal.SIGTERM, interrupted)
    config = ModelConfig(id=model, dtype=dtype.value, device="cpu", compile=compile_.value)
    budget = max_num_batched_tokens or EngineConfig().max_num_batched_tokens
    try:
        with _shown_progress(len(chosen) * rounds) as progress:
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


class _Shown:
    """A bar of rounds, with the row that is being measured in front."""

    def __init__(self, bar: Progress, num_rounds: int) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=num_rounds)

    def say(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def advance(self) -> None:
        self._bar.advance(self._task)


@contextmanager
def _shown_progress(num_rounds: int) -> Iterator[_Shown]:
    # Other libraries' progress bars would run through this one.
    os.environ["TQDM_DISABLE"] = "1"
    logging.basicConfig(
        level=logging.WARNING, handlers=[RichHandler(console=err, show_time=False, show_path=False)]
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        yield _Shown(bar, num_rounds)


def as_object(report: Report) -> dict[str, object]:
    rows = [
        {
            "name": each.row.name,
            "tok_s": round(each.tok_s, 2),
            "limit_share": _rounded(each.limit_share),
            "vllm_tok_s": _rounded(each.vllm_tok_s, 2),
            "ratio": _rounded(each.ratio),
        }
        for each in report.rows
    ]
    machine = {
        "cpu": cpu_name(),
        "cores": report.cores,
        "matrix_gflop_s": round(report.rates.operations / 1e9, 1),
        "memory_gb_s": round(report.rates.num_bytes / 1e9, 2),
    }
    settings = {"dtype": report.dtype, "max_num_batched_tokens": report.max_num_batched_tokens}
    vllm = asdict(report.vllm) if report.vllm is not None else None
    speculation = [asdict(each) for each in report.speculation]
    return {
        "rows": rows,
        "speculation": speculation,
        "machine": machine,
        "settings": settings,
        "vllm": vllm,
    }


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def show(report: Report) -> None:
    out.print(_table(report))
    rates = report.rates
    plural = "s" if len(report.cores) > 1 else ""
    out.print(
        f"{cpu_name()}, {len(report.cores)} thread{plural}: {report.dtype} products at "
        f"{rates.operations / 1e9:.0f} GFLOP/s, memory read at {rates.num_bytes / 1e9:.1f} GB/s"
    )
    out.print(f"prompt tokens in a step: {report.max_num_batched_tokens}", end="")
    if report.vllm is not None:
        out.print(f", in vLLM {report.vllm.version} {report.vllm.max_num_batched_tokens}", end="")
        if report.vllm.idle_load > _SPINS_FROM:
            out.print(
                f"\n[yellow]vLLM kept {report.vllm.idle_load:.0%} of a core busy while ours ran[/]", end=""
            )
    out.print()
    if report.speculation:
        out.print(_speculation_table(report))


def _speculation_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("answer", no_wrap=True)
    for column in ("tok/s", "with speculation", "ratio", "drafts", "right"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in report.speculation:
        table.add_row(
            each.name,
            f"{each.plain_tok_s:.1f}",
            f"{each.speculative_tok_s:.1f}",
            f"{each.ratio:.2f}",
            str(each.num_drafts),
            str(each.num_accepted_drafts),
        )
    return table


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("row", no_wrap=True)
    headings = ("tok/s", "of the limit", "bound by")
    for column in headings if report.vllm is None else (*headings, "vLLM tok/s", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in report.rows:
        cells = [each.row.name, f"{each.tok_s:.1f}", _share(each), _bound(each)]
        if each.vllm_tok_s is not None:
            cells += [f"{each.vllm_tok_s:.1f}", f"{each.ratio:.2f}"]
        table.add_row(*cells)
    return table


def _share(result: RowResult) -> str:
    return "" if result.limit_share is None else f"{result.limit_share:.0%}"


def _bound(result: RowResult) -> str:
    if result.is_memory_bound is None:
        return ""
    return "memory" if result.is_memory_bound else "arithmetic"


def cpu_name() -> str:
    """As Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
