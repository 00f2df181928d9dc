"""Dialogues from a file, as ShareGPT has them: the first thing that a user said is the prompt, and the answer
is as long as the one that it got.

JSON (a list) or JSONL; each entry has `conversations` of {from, value} or `messages` of {role, content}.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from pdserve.bench.errors import BenchError

_USERS = ("human", "user")
_ASSISTANTS = ("gpt", "chatgpt", "assistant", "bing", "bard")
# Of English text, where no tokenizer counts.
_BYTES_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Dialogue:
    prompt: str
    num_tokens: int  # of the answer


def read_dialogues(path: Path, count_tokens: Callable[[str], int] | None = None) -> list[Dialogue]:
    """Entries in which no user asks or nobody answers are left out. Without `count_tokens` the answers'
    lengths are estimated from their bytes. Raises BenchError.
    """
    count = count_tokens or estimated_tokens
    found = []
    for entry in _entries(path):
        turns = list(_turns(entry))
        for (speaker, text), (answerer, answer) in itertools.pairwise(turns):
            if speaker in _USERS and answerer in _ASSISTANTS and text.strip() and answer.strip():
                found.append(Dialogue(text, max(1, count(answer))))
                break
    if not found:
        raise BenchError(f"{path}: no dialogue in it, with a user who asks and an assistant who answers")
    return found


def estimated_tokens(text: str) -> int:
    return -(-len(text.encode()) // _BYTES_A_TOKEN)


def token_counter(path: Path) -> Callable[[str], int]:
    """`path`: a tokenizer.json, or the folder that has it. Raises BenchError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise BenchError(f"{file} is no tokenizer: {error}") from error
    # It may have been saved with both; the router sets them aside as well.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _entries(path: Path) -> list[object]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            loaded: list[object] = json.loads(text)
            return loaded
        # Texts may hold what else ends a line for Python, U+2028 for one.
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error


def _turns(entry: object) -> Iterator[tuple[str, str]]:
    """(speaker, text); what is neither is left out."""
    if not isinstance(entry, dict):
        return
    for list_name, speaker_name, text_name in (
        ("conversations", "from", "value"),
        ("conversation", "from", "value"),
        ("messages", "role", "content"),
    ):
        turns = entry.get(list_name)
        for turn in turns if isinstance(turns, list) else ():
            if isinstance(turn, dict):
                speaker, text = turn.get(speaker_name), turn.get(text_name)
                if isinstance(speaker, str) and isinstance(text, str):
                    yield speaker, text
