from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from router.text.detokenizer import (
    REPLACEMENT,
    ByteLevelDetokenizer,
    ByteVocabulary,
    Detokenizer,
    WindowDetokenizer,
    byte_of_character,
)
from tests.models import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def pieces_of(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(each) for each in ids), detokenizer.flush()]


def ids_of_bytes(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    characters = {byte: character for character, byte in byte_of_character().items()}
    ids = [tokenizer.token_to_id(characters[byte]) for byte in raw]
    return [each for each in ids if each is not None]


def both(tokenizer: Tokenizer) -> tuple[Detokenizer, Detokenizer]:
    return ByteLevelDetokenizer(ByteVocabulary(tokenizer)), WindowDetokenizer(tokenizer)


def test_the_alphabet_is_the_tokenizers_own() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(byte_of_character()) == set(ByteLevel.alphabet())
    assert sorted(byte_of_character().values()) == list(range(256))


@given(ids=st.lists(st.integers(0, 520), max_size=40))
@settings(max_examples=200, deadline=None)
def test_pieces_join_to_the_decoding_of_any_ids(tokenizer: Tokenizer, ids: list[int]) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    for detokenizer in both(tokenizer):
        assert "".join(pieces_of(detokenizer, ids)) == whole


@given(raw=st.binary(max_size=40))
@settings(max_examples=200, deadline=None)
def test_pieces_join_to_the_decoding_of_any_bytes(tokenizer: Tokenizer, raw: bytes) -> None:
    ids = ids_of_bytes(tokenizer, raw)
    for detokenizer in both(tokenizer):
        assert "".join(pieces_of(detokenizer, ids)) == raw.decode(errors="replace")


@given(text=st.text(st.sampled_from("aé漢字\U0001f600\U0001f468\u200d\u0301 \n"), max_size=20))
@settings(max_examples=200, deadline=None)
def test_no_piece_of_valid_text_has_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    ids = ids_of_bytes(tokenizer, text.encode())
    for detokenizer in both(tokenizer):
        pieces = pieces_of(detokenizer, ids)
        assert "".join(pieces) == text
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_output_that_begins_inside_a_character_shows_nothing_of_the_prompt(tokenizer: Tokenizer) -> None:
    ids = ids_of_bytes(tokenizer, "漢字".encode())
    output = ids[2:]  # the prompt kept two bytes of the first character
    for detokenizer in both(tokenizer):
        assert "".join(pieces_of(detokenizer, output)) == tokenizer.decode(output)


WORDS = ["▁The", "▁cat", "s", "▁sat", "<0xE6>", "<0xBC>", "<0xA2>", "▁"]


def of_word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(WORDS)}, []))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def test_a_vocabulary_of_word_pieces_keeps_its_spaces() -> None:
    ids = [0, 1, 2, 3, 4, 5, 6, 1]
    assert pieces_of(WindowDetokenizer(of_word_pieces()), ids) == [
        "The",
        " cat",
        "s",
        " sat",
        "",
        "",
        "漢",
        " cat",
        "",
    ]


@pytest.mark.parametrize(
    ("prompt", "ids", "text"),
    [
        ([0], [1, 2], " cats"),
        ([0, 1], [2, 3], "s sat"),
        ([0, 4, 5, 6], [3], " sat"),
        ([7], [1], "cat"),
        ([0, 7], [1], " cat"),
        ([], [1], "cat"),
    ],
    ids=["a word", "the end of one", "behind bytes", "after nothing", "after a space", "no prompt"],
)
def test_the_first_word_keeps_the_space_between_it_and_the_prompt(
    prompt: list[int], ids: list[int], text: str
) -> None:
    assert "".join(pieces_of(WindowDetokenizer(of_word_pieces(), prompt), ids)) == text


def test_half_a_character_at_a_prompts_end_is_no_part_of_the_output() -> None:
    tokenizer = of_word_pieces()
    assert "".join(pieces_of(WindowDetokenizer(tokenizer, [0, 4, 5]), [6, 1])) == tokenizer.decode([6, 1])
