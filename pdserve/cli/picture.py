"""A request's phases drawn in a terminal, one line each, on one scale of time."""

from __future__ import annotations

from pdserve.client import Finished

# What a character stands for at most: one in eight of it.
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_NAME_WIDTH = 9


def draw(finished: Finished, width: int) -> list[str]:
    """Lines of rich's markup, `width` columns for the time alone."""
    timings = finished.timings
    total_ms = timings.ttft_ms + timings.decode_ms
    if total_ms <= 0:
        return []
    read_ms = timings.queue_ms
    if finished.num_resumes:
        # What was begun before may have been lost with its worker.
        read_ms = max(read_ms, timings.ttft_ms - timings.prefill_ms)
    prefilled_ms = min(read_ms + timings.prefill_ms, timings.ttft_ms)
    lines = [
        _line("queue", "dim", "router", 0.0, timings.queue_ms, total_ms, width),
        _line("prefill", "dark_orange", finished.prefill_worker, read_ms, prefilled_ms, total_ms, width),
    ]
    if timings.transfer_bytes:
        arrived_ms = prefilled_ms + timings.handover_ms
        begun_ms = max(read_ms, arrived_ms - timings.transfer_ms)
        way = f"{finished.prefill_worker} → {finished.decode_worker}"
        lines.append(_line("KV", "medium_purple", way, begun_ms, arrived_ms, total_ms, width))
    if timings.decode_ms:
        decode = (timings.ttft_ms, total_ms)
        lines.append(_line("decode", "cyan", finished.decode_worker, *decode, total_ms, width))
    first = f"▲ first token, {timings.ttft_ms:.0f} ms"
    column = round(width * timings.ttft_ms / total_ms)
    if column + len(first) > width:
        first, column = f"first token, {timings.ttft_ms:.0f} ms ▲", max(0, column + 1 - len(first))
    end = f"{total_ms:.0f} ms"
    pad = " " * max(1, width - column - len(first) + 2)
    lines.append(f"{'':{_NAME_WIDTH}}{' ' * column}{first}[dim]{pad}{end} in all[/]")
    return lines


def _line(
    name: str, style: str, who: str, begin_ms: float, end_ms: float, total_ms: float, width: int
) -> str:
    begin = min(int(width * begin_ms / total_ms), width - 1)
    bar = _bar((width * (end_ms - begin_ms)) / total_ms)[: width - begin]
    rest = " " * (width - begin - len(bar) + 2)
    return f"{name:{_NAME_WIDTH}}{' ' * begin}[{style}]{bar}[/]{rest}[dim]{who}[/]"


def _bar(columns: float) -> str:
    """To an eighth of a column; what took any time at all is seen."""
    eighths = max(1, round(columns * 8))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
