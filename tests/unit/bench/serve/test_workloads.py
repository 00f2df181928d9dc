"""What is sent when: lengths, arrivals and shared beginnings are what was asked for."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import mean, pstdev

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.arrivals import random_arrivals
from pdserve.bench.serve.dialogues import Dialogue, read_dialogues, token_counter
from pdserve.bench.serve.prompts import in_words
from pdserve.bench.serve.trace import Trace, TraceRow
from pdserve.bench.serve.workload import Limits, Prompt, Workload
from pdserve.bench.serve.workloads import (
    conversation_trace,
    dialogue_workload,
    random_workload,
    shared_prefix_workload,
    trace_workload,
)

VOCAB = 1000


def common(one: Prompt, other: Prompt) -> int:
    """How many tokens (or letters) they begin alike with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def at(workload: Workload) -> list[float]:
    return [request.at_s for request in workload.requests]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_gaps_have_mean_one_and_the_variation_of_their_burstiness(
    burstiness: float, variation: float
) -> None:
    times = random_arrivals(4001, burstiness, np.random.default_rng(0))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert (len(times), times[0]) == (4001, 0.0)
    assert mean(gaps) == pytest.approx(1.0)
    assert pstdev(gaps) == pytest.approx(variation, rel=0.15, abs=1e-9)


def test_stretching_keeps_the_shape() -> None:
    workload = random_workload(50, 8, 4, vocab_size=VOCAB)
    slow, fast = workload.at_rate(0.5), workload.at_rate(20)
    assert (slow.rate, fast.rate) == (pytest.approx(0.5), pytest.approx(20))
    assert at(slow) == pytest.approx([40 * at_s for at_s in at(fast)])
    assert [each.prompt for each in slow.requests] == [each.prompt for each in fast.requests]


def test_an_infinite_rate_sends_all_at_once_and_cannot_be_stretched_back() -> None:
    burst = random_workload(5, 8, 4, vocab_size=VOCAB).at_rate(math.inf)
    assert at(burst) == [0.0] * 5
    with pytest.raises(BenchError, match="no gaps to stretch"):
        burst.at_rate(1)
    with pytest.raises(BenchError, match="above 0"):
        burst.at_rate(0)


def test_random_prompts_have_their_lengths_and_nothing_in_common() -> None:
    workload = random_workload(40, 100, 20, range_ratio=0.5, vocab_size=VOCAB, seed=1)
    for request in workload.requests:
        assert isinstance(request.prompt, tuple)
        assert 50 <= len(request.prompt) == request.num_prompt_tokens <= 150
        assert 10 <= request.max_tokens <= 30
        assert all(VOCAB // 8 <= token < VOCAB * 7 // 8 for token in request.prompt)
    pairs = itertools.combinations(workload.requests, 2)
    assert max(common(one.prompt, other.prompt) for one, other in pairs) < 4
    assert len({request.num_prompt_tokens for request in workload.requests}) > 10


def test_the_same_seed_makes_the_same_workload() -> None:
    one, same, other = (random_workload(5, 9, 3, vocab_size=VOCAB, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.requests[0].prompt != other.requests[0].prompt


def test_prefixes_are_shared_as_asked() -> None:
    workload = shared_prefix_workload(30, 3, 64, 10, 5, vocab_size=VOCAB)
    prompts = [request.prompt for request in workload.requests]
    assert {len(prompt) for prompt in prompts} == {74}
    assert len({prompt[:64] for prompt in prompts}) == 3
    assert len({prompt[64:] for prompt in prompts}) == 30


def test_a_trace_keeps_lengths_and_arrivals_and_counts_what_it_clips() -> None:
    rows = (TraceRow(5.0, 30, 4, None), TraceRow(6.0, 300, 40, None), TraceRow(9.0, 20, 400, None))
    workload = trace_workload(
        Trace("t", rows), limits=Limits(max_prompt_tokens=100, max_tokens=50), vocab_size=VOCAB
    ).at_rate(1.0)
    assert at(workload) == pytest.approx([0.0, 0.5, 2.0])
    assert [len(request.prompt) for request in workload.requests] == [30, 100, 20]
    assert [request.max_tokens for request in workload.requests] == [4, 40, 50]
    scaling = workload.scaling
    assert scaling is not None
    assert (scaling.trace_start_s, scaling.num_clipped_prompts, scaling.num_clipped_answers) == (5.0, 1, 1)
    assert (scaling.block_tokens, scaling.trace_rate) == (None, 0.5)
    assert workload.time_factor == pytest.approx(0.5)


@pytest.mark.parametrize("block_tokens", [None, 16])
def test_equal_block_ids_are_equal_beginnings(block_tokens: int | None) -> None:
    rows = (
        TraceRow(0.0, 1100, 4, (7, 8, 9)),
        TraceRow(1.0, 1500, 4, (7, 8, 10)),
        TraceRow(2.0, 1030, 4, (8, 7, 9)),
    )
    size = block_tokens or 512
    workload = trace_workload(Trace("t", rows), block_tokens=block_tokens, vocab_size=VOCAB)
    first, second, third = (request.prompt for request in workload.requests)
    assert [len(first), len(second), len(third)] == ([48] * 3 if block_tokens else [1100, 1500, 1030])
    assert 2 * size <= common(first, second) < 2 * size + 4
    assert common(first, third) < 4
    assert first[:size] == third[size : 2 * size]
    assert workload.scaling is not None
    assert (workload.scaling.block_tokens, workload.scaling.trace_block_tokens) == (size, 512)


def test_a_trace_without_blocks_cannot_have_them_shortened() -> None:
    with pytest.raises(BenchError, match="no blocks"):
        trace_workload(Trace("t", (TraceRow(0.0, 3, 1, None),)), block_tokens=16, vocab_size=VOCAB)


def test_the_made_up_conversation_has_the_statistics_of_azures() -> None:
    trace = conversation_trace(20_000)
    prompts = [row.num_prompt_tokens for row in trace.rows]
    answers = [row.num_tokens for row in trace.rows]
    assert mean(prompts) == pytest.approx(1155, rel=0.04)
    assert mean(answers) == pytest.approx(211, rel=0.04)
    assert np.percentile(prompts, [50, 90]).tolist() == pytest.approx([1020, 2735], rel=0.05)
    assert np.percentile(answers, [50, 90]).tolist() == pytest.approx([129, 424], rel=0.05)
    assert max(prompts) <= 14050
    assert max(answers) <= 1000
    gaps = np.diff([row.at_s for row in trace.rows])
    assert gaps.std() / gaps.mean() == pytest.approx(1.09, rel=0.05)


def test_as_words_prompts_still_begin_alike() -> None:
    workload = shared_prefix_workload(8, 1, 20, 5, 5, vocab_size=VOCAB)
    texts = [request.prompt for request in in_words(workload).requests]
    assert all(isinstance(text, str) and len(text.split()) == 25 for text in texts)
    assert len({tuple(str(text).split()[:20]) for text in texts}) == 1
    assert len(set(texts)) == 8
    assert in_words(in_words(workload)) == in_words(workload)


SHAREGPT = [
    {"conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hi, who is it?"}]},
    {"conversations": [{"from": "gpt", "value": "I begin."}, {"from": "human", "value": "No."}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"},
                  {"role": "assistant", "content": "1"}]},
    {"conversations": []},
    "nothing",
]  # fmt: skip


@pytest.mark.parametrize("as_lines", [False, True])
def test_dialogues_are_first_questions_with_their_answers_lengths(tmp_path: Path, as_lines: bool) -> None:
    file = tmp_path / "dialogues.json"
    file.write_text("\n".join(map(json.dumps, SHAREGPT)) if as_lines else json.dumps(SHAREGPT))
    assert read_dialogues(file, count_tokens=len) == [Dialogue("Hello?", 14), Dialogue("One?", 1)]
    assert read_dialogues(file)[0].num_tokens == 4


def test_a_file_without_dialogues_is_told(tmp_path: Path) -> None:
    file = tmp_path / "dialogues.json"
    file.write_text("[]")
    with pytest.raises(BenchError, match="no dialogue in it"):
        read_dialogues(file)
    file.write_text("[1,")
    with pytest.raises(BenchError, match="cannot be read"):
        read_dialogues(file)


def test_separators_of_lines_within_a_text_end_no_dialogue(tmp_path: Path) -> None:
    texts = "One\u2028two\x85three?", "Yes\u2029."
    turns = [{"from": who, "value": text} for who, text in zip(("human", "gpt"), texts, strict=True)]
    file = tmp_path / "dialogues.jsonl"
    file.write_text(2 * (json.dumps({"conversations": turns}, ensure_ascii=False) + "\r\n"), newline="")
    assert read_dialogues(file, count_tokens=len) == [Dialogue(texts[0], 5)] * 2


def test_a_tokenizer_counts_all_tokens_and_no_padding_whatever_it_was_saved_with(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"me": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.enable_truncation(4)
    words.enable_padding(length=8)
    words.save(str(tmp_path / "tokenizer.json"))
    count = token_counter(tmp_path)
    assert [count("me"), count("me " * 50)] == [1, 50]


def test_no_dialogue_is_sent_twice() -> None:
    dialogues = [Dialogue(str(index), 5 + index) for index in range(4)]
    for num_requests in (None, 4):
        workload = dialogue_workload(dialogues, num_requests, limits=Limits(max_tokens=6))
        assert sorted(str(request.prompt) for request in workload.requests) == ["0", "1", "2", "3"]
        assert max(request.max_tokens for request in workload.requests) == 6
    assert len(set(dialogue_workload(dialogues, 3).requests)) == 3
    assert len(dialogue_workload(dialogues * 50).requests) == 100
    with pytest.raises(BenchError, match="there are 4 dialogues, not 5: none is sent twice"):
        dialogue_workload(dialogues, 5)
    with pytest.raises(BenchError, match="there are no dialogues"):
        dialogue_workload([])
