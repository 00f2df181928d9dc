"""Greedy output equals transformers' `generate`, whatever family, length, chunks and neighbours."""

from __future__ import annotations

import pytest

from tests.unit.engine.driving import generate, prompt, request

BLOCK = 16
CHUNK = 48
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5)


@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_a_batch_of_all_lengths_equals_generate(family, compile, make_engine, reference):
    engine = make_engine(family, compile=compile, num_blocks=96)
    prompts = [prompt(length) for length in LENGTHS]
    outputs = generate(engine, *(request(ids, 24) for ids in prompts))
    for ids, output in zip(prompts, outputs, strict=True):
        assert output == reference(family).generate(ids, 24)


@pytest.mark.parametrize("length", LENGTHS)
def test_alone_equals_generate_cold_and_warm(length, engine, reference):
    ids = prompt(length)
    expected = reference("llama").generate(ids, 20)
    assert generate(engine, request(ids)) == [expected]
    assert generate(engine, request(ids)) == [expected]


@pytest.mark.parametrize("num_known", [1, 5, BLOCK, 19])
def test_a_resumed_sequence_goes_on_where_it_was(num_known, engine, reference):
    ids = prompt(21)
    expected = reference("llama").generate(ids, 20)
    resumed = request(ids, known=expected[:num_known])
    assert generate(engine, resumed) == [expected[num_known:]]


def test_decoding_goes_on_beside_a_long_prompt(make_engine, reference):
    engine = make_engine(max_num_batched_tokens=16)
    early = request(prompt(5), 30)
    engine.add(early)
    engine.step()
    late = request(prompt(100), 5)
    engine.add(late)
    for _ in range(4):
        ids = {output.sequence_id for output in engine.step().outputs}
        assert ids == {early.sequence_id, late.sequence_id}
    generate(engine)


def test_a_pool_without_prefix_cache_gives_the_same(make_engine, reference):
    engine = make_engine(enable_prefix_caching=False)
    ids = prompt(2 * BLOCK)
    expected = reference("llama").generate(ids, 20)
    assert generate(engine, request(ids), request(ids)) == [expected, expected]


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_other_block_sizes_give_the_same(block_size, make_engine, reference):
    engine = make_engine(block_size=block_size, num_blocks=256)
    ids = prompt(37)
    assert generate(engine, request(ids), request(prompt(3)))[0] == reference("llama").generate(ids, 20)
