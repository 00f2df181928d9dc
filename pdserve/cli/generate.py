"""`pdserve generate PROMPT`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.answer import Answer, as_object, broken_object, show_logprobs
from pdserve.cli.console import err, out, write
from pdserve.cli.explain import ask_facts, explanation
from pdserve.cli.late import saying_why_late
from pdserve.cli.target import Choice, Target, asks_router
from pdserve.client import ChatMessage, Delta, GenerateOptions, PdserveError, Prompt, Started

Text = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help='The prompt; "-", or none in a pipe, reads stdin.')
]
Chat = Annotated[
    bool, typer.Option("--chat", metavar="", help="Put the prompt through the model's chat template.")
]
TokenIds = Annotated[
    str | None, typer.Option("--token-ids", metavar="1,2,3", help="Token ids in place of a text.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy: always the likeliest token.")]
TopK = Annotated[int, typer.Option("--top-k", help="Draw from the K likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens of this mass.")]
MinP = Annotated[
    float,
    typer.Option("--min-p", help="Least share of the best token's p; 0 is off."),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; may be repeated.")
]
JsonSchema = Annotated[
    Path | None,
    typer.Option("--json-schema", metavar="FILE", help="The answer is JSON of the schema in this file."),
]
Regex = Annotated[
    str | None, typer.Option("--regex", metavar="R", help="The whole answer matches this regular expression.")
]
Grammar = Annotated[
    Path | None, typer.Option("--grammar", metavar="FILE", help="The answer is one of this Lark grammar.")
]
Logprobs = Annotated[
    int | None,
    typer.Option("--logprobs", metavar="K", help="Show log p of each token and the K likeliest."),
]
Timeout = Annotated[
    float | None, typer.Option("--timeout", metavar="SECONDS", help="The request's time limit.")
]
Explain = Annotated[
    bool,
    typer.Option("--explain", metavar="", help="Show who did what, how long it took, and what it cost."),
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="One JSON object at the end, for programs.")]


@asks_router
def generate(
    choice: Choice,
    prompt: Text = None,
    chat: Chat = False,
    token_ids: TokenIds = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed draws the same tokens.")] = None,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    grammar: Grammar = None,
    n: Annotated[int, typer.Option("--n", help="Answers to the one prompt.")] = 1,
    logprobs: Logprobs = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
    explain: Explain = False,
) -> None:
    """Generate text; it is printed as it comes. Greedy unless --temperature is set.

    Examples:
        pdserve generate "The capital of France is" --max-tokens 8
        pdserve generate --chat "Tell me a joke." --temperature 0.8 --seed 7
        pdserve generate --chat "Why is the sky blue?" --explain
        pdserve generate --token-ids 504,3575,282 --json
        pdserve generate --chat "When was the first moon landing?" --regex "[0-9]{4}-[0-9]{2}-[0-9]{2}"
    """
    options = GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=stop or (),
        n=n,
    )
    if seed is not None:
        options["seed"] = seed
    if logprobs is not None:
        options["logprobs"] = logprobs
    if json_schema is not None:
        options["json_schema"] = _file("--json-schema", json_schema)
    if regex is not None:
        options["regex"] = regex
    if grammar is not None:
        options["grammar"] = _file("--grammar", grammar)
    asked = _prompt(prompt, chat, token_ids)
    at = choice.target()
    live = n == 1 and not as_json
    begun: dict[int, Answer] = {}
    try:
        answers = asyncio.run(saying_why_late(at, stream(at, asked, options, timeout, live, begun)))
    except PdserveError as error:
        if as_json and begun:
            _write_json(
                [broken_object(answer, error, logprobs is not None) for _, answer in sorted(begun.items())], n
            )
        raise
    if as_json:
        _write_json([as_object(answer, logprobs is not None) for answer in answers], n)
    elif not live:
        for answer in answers:
            out.print(f"[bold]{answer.index}:[/] ", end="")
            write(answer.text + "\n")
    if logprobs is not None and not as_json:
        show_logprobs(answers)
    if explain:
        (err if as_json else out).print(explanation(answers, asyncio.run(ask_facts(at))))


def _write_json(objects: list[dict[str, object]], n: int) -> None:
    write(json.dumps(objects[0] if n == 1 else {"completions": objects}, ensure_ascii=False) + "\n")


def _prompt(text: str | None, chat: bool, token_ids: str | None) -> Prompt:
    if token_ids is not None:
        if text is not None:
            raise typer.BadParameter("give a prompt or --token-ids, not both")
        if chat:
            raise typer.BadParameter("--chat needs a text, not --token-ids")
        return _parsed_ids(token_ids)
    words = _from_stdin(is_asked=text == "-") if text in (None, "-") else text
    if not words:
        raise typer.BadParameter("give a prompt or --token-ids")
    return [ChatMessage("user", words)] if chat else words


def _file(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{option} {path}: is not UTF-8: see its byte {error.start}") from None
    except OSError as error:
        raise typer.BadParameter(f"{option} {path}: {error.strerror}") from None


def _from_stdin(is_asked: bool) -> str | None:
    """None: somebody sits there who has not asked to type a prompt."""
    if sys.stdin is None or (not is_asked and sys.stdin.isatty()):
        return None
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin is not UTF-8: see its byte {error.start}") from None


def _parsed_ids(text: str) -> Sequence[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--token-ids {text!r}: write numbers with commas, like 1,2,3") from None


async def stream(
    target: Target,
    prompt: Prompt,
    options: GenerateOptions,
    timeout: float | None,
    live: bool,
    begun: dict[int, Answer] | None = None,
) -> list[Answer]:
    """The answers, whole; `live` writes the text of the only one as it comes. `begun` gets them by index as
    they come, for whoever wants them after a failure."""
    answers: dict[int, Answer] = {} if begun is None else begun
    wrote = False
    try:
        async with (
            target.client() as client,
            aclosing(client.generate_stream(prompt, timeout=timeout, **options)) as events,
        ):
            async for event in events:
                answer = answers.setdefault(event.index, Answer(event.index))
                if isinstance(event, Started):
                    answer.started = event
                elif isinstance(event, Delta):
                    answer.add(event)
                    if live:
                        write(event.text)
                        wrote = wrote or bool(event.text)
                else:
                    answer.finished = event
    finally:
        if wrote:
            write("\n")  # also behind a part of an answer, before the error
    return [answers[index] for index in sorted(answers)]
