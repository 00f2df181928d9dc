"""One answer, put together from its events, and the ways it is shown."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from pdserve.cli.console import out
from pdserve.client import Delta, Finished, FinishReason, PdserveError, PositionLogprobs, Started


@dataclass(slots=True)
class Answer:
    index: int
    started: Started | None = None
    finished: Finished | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)


def as_object(answer: Answer, with_logprobs: bool) -> dict[str, object]:
    """What `generate --json` prints."""
    _, finished = _ends(answer)
    usage, timings = finished.usage, finished.timings
    return _said(answer, with_logprobs) | {
        "finish_reason": finished.finish_reason.value,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "draft_tokens": usage.draft_tokens,
            "accepted_draft_tokens": usage.accepted_draft_tokens,
        },
        "timings": {
            "queue_ms": timings.queue_ms,
            "prefill_ms": timings.prefill_ms,
            "transfer_ms": timings.transfer_ms,
            "transfer_bytes": timings.transfer_bytes,
            "ttft_ms": timings.ttft_ms,
            "decode_ms": timings.decode_ms,
            "mean_itl_ms": timings.mean_itl_ms,
            "handover_ms": timings.handover_ms,
            "decode_start_ms": timings.decode_start_ms,
            "hidden_bytes": timings.hidden_bytes,
            "reserve_ms": timings.reserve_ms,
        },
        # Those that finished it.
        "prefill_worker": finished.prefill_worker,
        "decode_worker": finished.decode_worker,
        "num_resumes": finished.num_resumes,
    }


def broken_object(answer: Answer, error: PdserveError, with_logprobs: bool) -> dict[str, object]:
    """In place of `as_object` where the stream broke before the answer's end: its tokens are valid."""
    if answer.finished is not None:
        return as_object(answer, with_logprobs)
    told = {"code": error.code.name, "reason": error.reason, "message": error.message}
    return _said(answer, with_logprobs) | {"finish_reason": None, "error": told}


def _said(answer: Answer, with_logprobs: bool) -> dict[str, object]:
    said: dict[str, object] = {"text": answer.text, "token_ids": answer.token_ids}
    if with_logprobs:
        said["logprobs"] = [_logprobs_object(position) for position in answer.logprobs]
    return said


def _logprobs_object(position: PositionLogprobs) -> dict[str, object]:
    chosen = position.chosen
    top = [{"token_id": each.token_id, "logprob": each.logprob} for each in position.top]
    return {"token_id": chosen.token_id, "logprob": chosen.logprob, "top": top}


def show_logprobs(answers: list[Answer]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("answer", "token id", "log p", "likeliest (token id: log p)"):
        table.add_column(column)
    for answer in answers:
        for position in answer.logprobs:
            top = "  ".join(f"{each.token_id}: {each.logprob:.3f}" for each in position.top)
            table.add_row(
                str(answer.index), str(position.chosen.token_id), f"{position.chosen.logprob:.3f}", top
            )
    out.print(table)


def timings_table(answers: list[Answer]) -> Table:
    """Which worker did what, and how long it took."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2))
    for answer in answers:
        for row in _explained(answer):
            table.add_row(*map(Text, row))  # a stop text may look like markup
    return table


def _explained(answer: Answer) -> list[tuple[str, str, str]]:
    started, finished = _ends(answer)
    usage, timings = finished.usage, finished.timings
    computed = usage.prompt_tokens - usage.cached_tokens
    rate = f"{computed / timings.prefill_ms * 1000:.0f} tok/s" if timings.prefill_ms else ""
    speed = f"{1000 / timings.mean_itl_ms:.0f} tok/s" if timings.mean_itl_ms else ""
    return [
        ("queue", "router", f"{timings.queue_ms:.1f} ms"),
        *_resumed(started, finished),
        (
            "prefill",
            finished.prefill_worker,
            f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached) "
            f"in {timings.prefill_ms:.1f} ms {rate}",
        ),
        ("KV shipped", *_shipped(finished)),
        (
            "decode",
            finished.decode_worker,
            f"{usage.completion_tokens} tokens in {timings.decode_ms:.1f} ms {speed}",
        ),
        *_drafted(finished),
        ("TTFT", "client's first token", f"{timings.ttft_ms:.1f} ms"),
        ("ITL", "mean between tokens", f"{timings.mean_itl_ms:.1f} ms"),
        ("end", finished.finish_reason.value, _why_it_ended(finished)),
    ]


def _resumed(started: Started, finished: Finished) -> list[tuple[str, str, str]]:
    if not finished.num_resumes:
        return []
    first = " → ".join(dict.fromkeys((started.prefill_worker, started.decode_worker)))
    return [("resumed", f"{finished.num_resumes} times", f"begun on {first}; those below finished it")]


def _drafted(finished: Finished) -> list[tuple[str, str, str]]:
    usage = finished.usage
    if not usage.draft_tokens:
        return []
    return [
        (
            "drafts",
            finished.decode_worker,
            f"{usage.accepted_draft_tokens} of {usage.draft_tokens} guessed tokens were right",
        )
    ]


def _why_it_ended(finished: Finished) -> str:
    if finished.finish_reason is FinishReason.LENGTH:
        return f"{finished.usage.completion_tokens} tokens were the limit"
    if finished.matched_stop is not None:
        return f"at the stop text {finished.matched_stop!r}"
    token = f" (token id {finished.matched_token_id})" if finished.matched_token_id is not None else ""
    is_eos = finished.finish_reason is FinishReason.EOS
    return f"the model ended its answer{token}" if is_eos else f"at a stop token{token}"


def _shipped(finished: Finished) -> tuple[str, str]:
    if finished.prefill_worker == finished.decode_worker:
        return finished.decode_worker, "nothing: one worker did both"
    timings = finished.timings
    what = f"{timings.transfer_bytes / 1e6:.2f} MB in {timings.transfer_ms:.1f} ms"
    if timings.transfer_bytes:
        hidden = timings.hidden_bytes / timings.transfer_bytes
        what += f", {hidden:.0%} before the first token"
    if timings.decode_start_ms:
        what += f"; decoding began {timings.decode_start_ms:.1f} ms after that token"
    return f"{finished.prefill_worker} → {finished.decode_worker}", what


def _ends(answer: Answer) -> tuple[Started, Finished]:
    """A stream that ended without an error had both."""
    if answer.started is None or answer.finished is None:
        raise ValueError(f"answer {answer.index} has no end")
    return answer.started, answer.finished
