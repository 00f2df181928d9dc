"""A request through a real router, real gRPC and scripted workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pdserve.client import Delta, Finished, FinishReason, Started
from tests.integration.router.harness import Cluster, running
from tests.scripted_workers import expected


async def test_a_request_streams_started_deltas_and_finished(cluster: Cluster) -> None:
    prompt = [1, 2, 3, 4, 5]
    stream = cluster.client.generate_stream(prompt, max_tokens=10, seed=7, request_id="mine")
    events = [event async for event in stream]
    started, *deltas, finished = events
    assert isinstance(started, Started)
    assert (started.prompt_tokens, started.cached_tokens) == (5, 4)
    assert (started.prefill_worker, started.decode_worker) == ("prefill-0", "decode-0")
    assert started.request_id == "mine"
    assert all(isinstance(delta, Delta) for delta in deltas)
    ids = tuple(token for delta in deltas if isinstance(delta, Delta) for token in delta.token_ids)
    assert ids == expected(prompt, 7, 10)
    assert isinstance(finished, Finished)
    assert finished.finish_reason is FinishReason.LENGTH
    assert finished.usage.completion_tokens == 10
    assert (finished.timings.transfer_ms, finished.timings.transfer_bytes) == (2.0, 1000)
    assert finished.timings.prefill_ms == 5.0
    assert 0 < finished.timings.ttft_ms < 1000
    assert 0 < finished.timings.reserve_ms <= finished.timings.queue_ms
    assert finished.num_resumes == 0


async def test_both_pools_did_their_part(cluster: Cluster) -> None:
    await cluster.client.generate("hello", max_tokens=5)
    assert cluster.p.num_prefills == 1
    assert cluster.d.num_tokens == 5


async def test_one_token_is_answered_by_the_prefill_worker_and_the_reservation_is_given_back(
    cluster: Cluster,
) -> None:
    answer = await cluster.client.generate([9, 9], max_tokens=1, seed=1)
    assert answer.token_ids == expected([9, 9], 1, 1)
    assert answer.finish_reason is FinishReason.LENGTH
    assert cluster.d.num_tokens == 0


async def test_fifty_requests_with_one_odd_request_id_do_not_mix(cluster: Cluster) -> None:
    name = 'same "id"\n\x00 €\U0001f600 %s {} ../..'
    prompts = [[number, number + 1, 3] for number in range(50)]
    answers = await asyncio.gather(
        *(cluster.client.generate(prompt, max_tokens=8, seed=5, request_id=name) for prompt in prompts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected(prompt, 5, 8)
        assert answer.request_id == name


async def test_without_a_seed_the_router_draws_one(cluster: Cluster) -> None:
    first = await cluster.client.generate([1], max_tokens=8)
    second = await cluster.client.generate([1], max_tokens=8)
    assert first.token_ids != second.token_ids


async def test_n_sequences_come_as_one_stream_and_the_first_is_as_if_alone(cluster: Cluster) -> None:
    answer = await cluster.client.generate([1, 2], max_tokens=6, seed=3, n=4)
    assert [completion.index for completion in answer.completions] == [0, 1, 2, 3]
    assert answer.completions[0].token_ids == expected([1, 2], 3, 6)
    assert len({completion.token_ids for completion in answer.completions}) == 4
    again = await cluster.client.generate([1, 2], max_tokens=6, seed=3, n=4)
    assert [each.token_ids for each in again.completions] == [each.token_ids for each in answer.completions]


async def test_n_sequences_stay_where_the_first_filled_the_caches(model_dir: Path) -> None:
    async with running(model_dir, num_prefills=3, num_decodes=3) as cluster:
        answer = await cluster.client.generate([1, 2], max_tokens=6, n=4)
        assert len({completion.prefill_worker for completion in answer.completions}) == 1
        assert len({completion.decode_worker for completion in answer.completions}) == 1


async def test_a_stop_string_across_tokens_ends_the_sequence_on_the_worker_too(cluster: Cluster) -> None:
    plain = await cluster.client.generate([4, 4], max_tokens=30, seed=2)
    stop = plain.text[5:8]
    place = plain.text.index(stop)
    cluster.d.step_s = 0.02
    answer = await cluster.client.generate([4, 4], max_tokens=30, seed=2, stop=stop)
    assert answer.finish_reason is FinishReason.STOP
    assert answer.text == plain.text[:place]
    assert answer.completions[0].matched_stop == stop
    assert answer.usage.completion_tokens == len(answer.token_ids) == place + len(stop)
    kept = await cluster.client.generate(
        [4, 4], max_tokens=30, seed=2, stop=[stop], include_stop_in_output=True
    )
    assert kept.text == plain.text[: place + len(stop)]


async def test_a_chat_is_rendered_by_the_models_template(cluster: Cluster) -> None:
    await cluster.client.generate([{"role": "user", "content": "hi"}], max_tokens=1)
    (prompt,) = cluster.p.prompts
    tokenizer = cluster.router._folder.tokenizer
    text = tokenizer.decode(list(prompt), skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_a_colocated_pool_serves_alone(model_dir: Path) -> None:
    async with running(model_dir, num_prefills=0, num_decodes=0, num_colocated=2) as cluster:
        answers = await asyncio.gather(
            *(cluster.client.generate([number], max_tokens=9, seed=1) for number in range(10))
        )
        for number, answer in enumerate(answers):
            assert answer.token_ids == expected([number], 1, 9)
            assert answer.prefill_worker == answer.decode_worker
            assert answer.timings.transfer_bytes == 0
        assert all(worker.num_tokens == 45 for worker in cluster.colocated)


async def test_the_model_is_described(cluster: Cluster) -> None:
    model = await cluster.client.get_model()
    assert (model.id, model.vocab_size, model.dtype) == ("tiny", 512, "float32")
    assert model.max_model_len == 400
    assert model.eos_token_ids == (508, 510)
    assert model.has_chat_template
