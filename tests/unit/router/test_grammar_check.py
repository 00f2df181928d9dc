from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models

from pdserve.v1 import generation_pb2
from pdserve.v1.errors import InvalidArgument, PdserveError, ResourceExhausted, Unimplemented
from router.text import grammar_check
from router.text.grammar_check import MAX_WAITING, GrammarCheck
from router.text.model_folder import ModelFolder, read_model_folder
from tests.models import END_OF_TEXT, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    (path / "config.json").write_text(f'{{"vocab_size": 512, "eos_token_id": {END_OF_TEXT}}}')
    return read_model_folder(path)


@pytest.fixture
def check(folder: ModelFolder) -> Iterator[GrammarCheck]:
    made = GrammarCheck(folder)
    yield made
    made.close()


def regex(text: str) -> generation_pb2.StructuredOutput:
    return generation_pb2.StructuredOutput(regex=text)


class Counted:
    """In place of the compiling: how often, and nothing goes through until it is open."""

    def __init__(self, compile_one: Callable[[str], PdserveError | None]) -> None:
        self.num_calls = 0
        self.gate = threading.Event()
        self._compile_one = compile_one

    def __call__(self, text: str) -> PdserveError | None:
        self.num_calls += 1
        if not self.gate.wait(20):
            raise TimeoutError
        return self._compile_one(text)


@pytest.fixture
def counted(check: GrammarCheck, monkeypatch: pytest.MonkeyPatch) -> Counted:
    made = Counted(check._error_of)
    monkeypatch.setattr(check, "_error_of", made)
    return made


async def test_what_passed_once_is_not_compiled_again(check: GrammarCheck, counted: Counted) -> None:
    counted.gate.set()
    for _ in range(3):
        await check.check(regex("a+"))
        with pytest.raises(InvalidArgument, match=r"^sampling.structured: .*unclosed group"):
            await check.check(regex("("))
    assert counted.num_calls == 1 + 3


async def test_only_so_many_are_remembered(
    check: GrammarCheck, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "_NUM_REMEMBERED", 2)
    counted.gate.set()
    for text in ("a", "b", "a", "c", "a", "b"):
        await check.check(regex(text))
    assert counted.num_calls == 4


async def test_a_slow_one_holds_up_new_grammars_only_and_too_many_are_refused(
    check: GrammarCheck, counted: Counted
) -> None:
    waiting = [asyncio.create_task(check.check(regex("a" * n))) for n in range(1, MAX_WAITING + 1)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted) as refused:
        await check.check(regex("b"))
    assert refused.value.retry_after_s is not None
    waiting.pop().cancel()
    await asyncio.sleep(0)
    counted.gate.set()
    await asyncio.gather(*waiting)
    await check.check(regex("b"))


async def test_one_that_takes_too_long_is_refused(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_COMPILE_S", 0.0)
    with pytest.raises(InvalidArgument, match="too long to compile"):
        await check.check(regex("a"))


async def test_a_model_that_cannot_have_grammars_says_why(folder: ModelFolder) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    for broken, why in (
        (replace(folder, eos_token_ids=()), "names no EOS token"),
        (replace(folder, tokenizer=words), "decoder"),
    ):
        check = GrammarCheck(broken)
        with pytest.raises(Unimplemented, match=why):
            await check.check(regex("a"))
        check.close()


@pytest.mark.parametrize("text", ["", "[1", '{"a":' * 3000])
async def test_a_schema_that_is_no_json_is_refused(check: GrammarCheck, text: str) -> None:
    with pytest.raises(InvalidArgument, match="not JSON"):
        await check.check(generation_pb2.StructuredOutput(json_schema=text))


async def test_no_constraint_is_refused(check: GrammarCheck) -> None:
    with pytest.raises(InvalidArgument, match="no constraint"):
        await check.check(generation_pb2.StructuredOutput())
