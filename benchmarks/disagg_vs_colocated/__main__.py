"""1P1D beside two colocated workers (and two vLLM servers where an environment has it) on the same two cores.

    python -m benchmarks.disagg_vs_colocated --trace AzureLLMInferenceTrace_conv.csv --plot comparison.png
    python -m benchmarks.disagg_vs_colocated --trace … --vllm-python ~/vllm-env/bin/python
    python -m benchmarks.disagg_vs_colocated --quick
    python -m benchmarks.disagg_vs_colocated --report      # of what is in the file; measures nothing

They run one after the other: latencies with nothing else to do (unloaded), streams while long prompts arrive
(interference), and the conversation trace at six rates (goodput), beside an ideal 1P1D that is simulated from
how long the engine alone takes. Every finished point is in --output at once; Ctrl-C loses the one that is
being measured, and the same command goes on from there. Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TypeVar

from benchmarks.disagg_vs_colocated import report
from benchmarks.disagg_vs_colocated.comparing import compare
from benchmarks.disagg_vs_colocated.machine import note_run
from benchmarks.disagg_vs_colocated.plotted import plot
from benchmarks.disagg_vs_colocated.results import Results
from benchmarks.disagg_vs_colocated.settings import FULL, QUICK, Ordering, Part, System, Wanted
from benchmarks.disagg_vs_colocated.trace_load import TraceLoad
from pdserve.bench.errors import BenchError
from pdserve.bench.interrupted import INTERRUPTED, hear_sigterm
from pdserve.bench.serve.plot import check_can_plot

_NUM_CORES = 2
# Processes that wanted a core in the last minute, above which figures are not worth much.
_QUIET_LOAD = 0.5
E = TypeVar("E", bound=Enum)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    hear_sigterm()
    try:
        _run(options)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: what is done is in {options.output}; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    return 0


def _run(options: argparse.Namespace) -> None:
    wanted = _wanted(options)
    load = TraceLoad(wanted)
    results = Results(options.output, setting(wanted, load))
    if options.plot is not None:
        check_can_plot(options.plot)
    if not options.report:
        if (busy := os.getloadavg()[0]) > _QUIET_LOAD:
            print(f"warning: this machine is not quiet: {busy:.1f} processes want a core", file=sys.stderr)
        note_run(results, busy)
        compare(results, wanted, load)
    print("\n".join(report.lines(results, wanted, load)))
    if options.plot is not None:
        plot(results, wanted, load, options.plot)


def setting(wanted: Wanted, load: TraceLoad) -> Mapping[str, object]:
    """What all points of one file have in common."""
    return {**asdict(wanted.sizes), "trace": load.name}


def _wanted(options: argparse.Namespace) -> Wanted:
    """Raises BenchError."""
    cores = options.cores or tuple(sorted(os.sched_getaffinity(0))[:_NUM_CORES])
    if len(cores) != _NUM_CORES or not set(cores) <= os.sched_getaffinity(0):
        raise BenchError(f"two cores are wanted that this process may use, not {cores}")
    systems = options.systems or (System.DISAGGREGATED, System.COLOCATED)
    if options.vllm_python is not None and System.VLLM not in systems:
        systems = (*systems, System.VLLM)
    if System.VLLM in systems and options.vllm_python is None and not options.report:
        raise BenchError("vllm is measured where --vllm-python names an interpreter that has it")
    return Wanted(
        sizes=QUICK if options.quick else FULL,
        parts=options.parts,
        systems=systems,
        orders=options.orders,
        seeds=tuple(range(options.seeds or (1 if options.quick else 2))),
        rates=options.rates,
        trace=options.trace,
        cores=cores,
        vllm_python=options.vllm_python,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disagg_vs_colocated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("disagg-vs-colocated.json"), help="(default: %(default)s)")
    add("--parts", type=_several(Part), default=tuple(Part), help="of unloaded,interference,goodput")
    add(
        "--systems",
        type=_several(System),
        help="of 1p1d,1p1d-sharing,colocated,vllm (default: all but the second)",
    )
    add("--orders", type=_several(Ordering), default=tuple(Ordering), help="of fcfs,shortest,least-left")
    add("--trace", type=Path, help="Azure's conversation trace (default: one is drawn that is like it)")
    add("--rates", type=_numbers(float), help="requests a second (default: six around the ideal's goodput)")
    add("--seeds", type=int, help="runs of each rate, with prompts of their own (default: 2)")
    add("--cores", type=_numbers(int), help="the two that are measured on (default: the first two)")
    add("--vllm-python", type=Path, help="an interpreter that has vLLM")
    add("--quick", action="store_true", help="a trial of some minutes, which says nothing")
    add("--report", action="store_true", help="measure nothing, show what is in the file")
    add("--plot", type=Path, help="a picture: .png, .svg or .pdf")
    return parser


def _several(kind: type[E]) -> Callable[[str], tuple[E, ...]]:
    def parse(text: str) -> tuple[E, ...]:
        try:
            return tuple(kind(each) for each in text.split(","))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _numbers(kind: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    def parse(text: str) -> tuple[float, ...]:
        try:
            return tuple(sorted({kind(each) for each in text.split(",")}))
        except ValueError:
            raise argparse.ArgumentTypeError(f"write numbers with commas, not {text!r}") from None

    return parse


if __name__ == "__main__":
    sys.exit(main())
