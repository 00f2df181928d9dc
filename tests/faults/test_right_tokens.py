"""Whatever else goes on, a client gets its own tokens and all of them: through a router and real workers."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer

from engine.config import ModelConfig
from engine.loading import LoadedModel, load_model
from kv_transfer.transport.memory import Faults
from pdserve.client import Client, Delta, Event, FailedPrecondition, Finished, FinishReason, Started
from tests.faults.held_frame import HeldFrame
from tests.faults.worker_processes import launch_worker
from tests.integration.router.harness import until
from tests.integration.workers.mini_router import Cluster, Decoder, Route, spec
from tests.models import END_OF_TEXT, tiny_model
from tests.serving import TransportName, serving
from tests.unit.engine.driving import Reference, prompt
from worker.identity import Role

B = 16


async def events_of(client: Client, *args: object, **options: object) -> list[Event]:
    async with aclosing(client.generate_stream(*args, **options)) as stream:  # type: ignore[arg-type]
        return [event async for event in stream]


@pytest.mark.parametrize("odd", ["", "same", "\n\r\0 request_id=x", "/../1", "\U0001f600" * 200, "%s%n{}"])
async def test_fifty_requests_of_one_name_each_get_their_own_tokens(
    folder: Path, loaded: LoadedModel, reference: Reference, odd: str
) -> None:
    """A client's name for its request is echoed and is no key to anything."""
    num = 50 if odd == "same" else 5
    async with serving(folder, loaded, num_blocks=200) as serves:
        prompts = [prompt(3 + number, seed=number) for number in range(num)]
        answers = await asyncio.gather(
            *(
                serves.client.generate(ids, max_tokens=5, temperature=0, ignore_eos=True, request_id=odd)
                for ids in prompts
            )
        )
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.request_id == odd if odd else answer.request_id
        assert len(answer.token_ids) == 5
        reference.assert_follows(ids, answer.token_ids)


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B])
async def test_a_prefix_cached_on_either_side_or_both_changes_no_token(
    cluster: Cluster, reference: Reference, length: int
) -> None:
    prefills = [cluster.prefill_stub(await cluster.prefill_worker()) for _ in range(2)]
    decoders = [await cluster.subscribe(await cluster.decode_worker()) for _ in range(2)]

    async def through(p: int, d: int) -> None:
        answer = await Route(prefills[p], decoders[d]).generate(spec(prompt(length), 2 * B))
        assert len(answer.ids) == 2 * B
        reference.assert_follows(prompt(length), answer.ids)

    await through(0, 0)  # cold
    await through(0, 0)  # both have it
    await through(0, 1)  # P alone
    await through(1, 0)  # D alone


async def test_first_tokens_are_neither_lost_nor_mixed_while_kv_takes_its_time(
    folder: Path, loaded: LoadedModel, reference: Reference
) -> None:
    dice = random.Random(3)
    async with serving(folder, loaded, transport="memory", num_blocks=300) as serves:
        serves.memory.faults = Faults(delay_s=lambda _: dice.random() * 0.006)
        prompts = [prompt(dice.randrange(1, 60), seed=number) for number in range(50)]
        streams = await asyncio.gather(
            *(events_of(serves.client, ids, max_tokens=6, temperature=0, ignore_eos=True) for ids in prompts)
        )
    for ids, events in zip(prompts, streams, strict=True):
        assert isinstance(events[0], Started)
        assert [type(event) for event in events[1:]] == [Delta] * (len(events) - 2) + [Finished]
        tokens = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
        assert len(tokens) == 6
        reference.assert_follows(ids, tokens)


@dataclass(frozen=True)
class End:
    """How a stream ended."""

    tokens: list[int]
    text: str
    reason: FinishReason
    matched: object


async def end_of(client: Client, ids: tuple[int, ...], **options: object) -> End:
    events = await events_of(client, ids, temperature=0, **options)
    deltas = [event for event in events if isinstance(event, Delta)]
    tokens = [token for delta in deltas for token in delta.token_ids]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.usage.completion_tokens == len(tokens)
    assert finished.usage.prompt_tokens == len(ids)
    matched = finished.matched_token_id if finished.matched_stop is None else finished.matched_stop
    return End(tokens, "".join(delta.text for delta in deltas), finished.finish_reason, matched)


async def test_the_first_token_meets_every_stop_condition(folder: Path, loaded: LoadedModel) -> None:
    ids = prompt(20, seed=5)
    eos = {END_OF_TEXT: 1e4}
    async with serving(folder, loaded) as serves:
        client = serves.client
        plain = await end_of(client, ids, max_tokens=6, ignore_eos=True)
        first = plain.tokens[0]
        for limit in (1, 2):
            assert await end_of(client, ids, max_tokens=limit, ignore_eos=True) == End(
                plain.tokens[:limit],
                serves.router._folder.tokenizer.decode(plain.tokens[:limit]),
                FinishReason.LENGTH,
                None,
            )
        assert await end_of(client, ids, logit_bias=eos) == End([END_OF_TEXT], "", FinishReason.EOS, None)
        stopped = await end_of(client, ids, stop_token_ids=[first], ignore_eos=True)
        assert stopped == End([first], "", FinishReason.STOP, first)
        a_id = serves.router._folder.tokenizer.encode("a").ids[0]
        letter = {a_id: 1e4}
        word = await end_of(client, ids, stop="a", logit_bias=letter)
        assert word == End([a_id], "", FinishReason.STOP, "a")
        two = await end_of(client, ids, stop="aa", logit_bias=letter)
        assert two == End([a_id, a_id], "", FinishReason.STOP, "aa")
        kept = await end_of(client, ids, stop="a", logit_bias=letter, include_stop_in_output=True)
        assert kept.text == "a"
        # Before min_tokens nothing can end it, and then the first thing does.
        late = await end_of(client, ids, logit_bias=eos, min_tokens=3, max_tokens=9)
        assert (len(late.tokens), late.tokens[-1], late.reason) == (4, END_OF_TEXT, FinishReason.EOS)
        late = await end_of(client, ids, logit_bias=letter, stop="a", min_tokens=3, max_tokens=9)
        assert (late.tokens, late.reason, late.text) == ([a_id] * 4, FinishReason.STOP, "aaa")
        late = await end_of(client, ids, logit_bias=eos, min_tokens=3, max_tokens=3)
        assert (len(late.tokens), late.reason) == (3, FinishReason.LENGTH)
        assert END_OF_TEXT not in late.tokens


@pytest.mark.parametrize("transport", ["memory", "grpc", "shm", "collective"])
async def test_a_late_frame_lands_in_nobody_elses_blocks(
    folder: Path,
    loaded: LoadedModel,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    transport: TransportName,
) -> None:
    """A is cancelled while a frame of its KV hangs; B takes A's blocks; then the frame is let go. Over shm
    its sender writes by itself: there B gets A's blocks only when it has let go of them."""
    a, b = prompt(100, seed=1), prompt(100, seed=2)
    held = HeldFrame(monkeypatch, transport)
    roles = [Role.PREFILL, Role.PREFILL, Role.DECODE]
    async with serving(folder, loaded, roles, transport=transport, num_blocks=9) as serves:
        (decode,) = serves.of(Role.DECODE)
        stream = serves.client.generate_stream(a, max_tokens=20, temperature=0, ignore_eos=True)
        started = await stream.__anext__()
        await until(lambda: decode.load().num_reservations == 1 and held.is_held)
        await stream.aclose()
        is_kept = transport == "shm"
        await until(lambda: decode.load().kv_blocks_used == (decode.load().kv_blocks_quarantined * is_kept))
        events = serves.client.generate_stream(b, max_tokens=20, temperature=0, ignore_eos=True)
        if is_kept:
            assert decode.load().kv_blocks_quarantined == 7
            held.gate.set()
        tokens: list[int] = []
        async for event in events:
            if isinstance(event, Started) and not is_kept:
                assert isinstance(started, Started)
                assert event.prefill_worker != started.prefill_worker
            elif isinstance(event, Delta):
                tokens += event.token_ids
                held.gate.set()
        assert len(tokens) == 20
        reference.assert_follows(b, tokens)


@pytest.mark.parametrize("transport", ["grpc", "memory"])
async def test_joined_deltas_are_the_decoding_of_all_ids(
    folder: Path, loaded: LoadedModel, transport: str
) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    emoji = tokenizer.encode("say \U0001f600").ids
    prompts = [
        *("漢字かな", "\U0001f468\u200d\U0001f469\u200d\U0001f467"),
        *(emoji[:-cut] for cut in (1, 2, 3)),
    ]
    async with serving(folder, loaded, transport=transport, num_blocks=100) as serves:  # type: ignore[arg-type]
        streams = await asyncio.gather(
            *(events_of(serves.client, each, max_tokens=60, seed=3, ignore_eos=True) for each in prompts)
        )
        for events in streams:
            deltas = [event for event in events if isinstance(event, Delta)]
            tokens = [token for delta in deltas for token in delta.token_ids]
            assert "".join(delta.text for delta in deltas) == tokenizer.decode(tokens)
        # Forced to the last bytes of the cut character: nothing of the prompt comes out with them.
        rest = emoji[-1]
        forced = await serves.client.generate(emoji[:-1], max_tokens=1, temperature=0, logit_bias={rest: 1e4})
        assert (forced.token_ids, forced.text) == ((rest,), tokenizer.decode([rest]))


async def test_output_alone_is_output_in_a_storm(
    folder: Path, loaded: LoadedModel, reference: Reference
) -> None:
    ids = prompt(70, seed=9)
    async with serving(folder, loaded, num_blocks=80) as serves:  # so few that some must wait or be preempted
        alone = await serves.client.generate(ids, max_tokens=20, temperature=0, ignore_eos=True)
        storm = [
            serves.client.generate(prompt(5 + n, seed=n), max_tokens=20, temperature=0.9, ignore_eos=True)
            for n in range(59)
        ]
        among, *_ = await asyncio.gather(
            serves.client.generate(ids, max_tokens=20, temperature=0, ignore_eos=True), *storm
        )
    reference.assert_follows(ids, alone.token_ids)
    reference.assert_follows(ids, among.token_ids)


async def test_a_prefix_has_one_name_whatever_a_process_hashes_with(
    folder: Path, reference: Reference
) -> None:
    """D finds P's prompt in its own cache, though Python's hash differs between the two. (That a name is the
    same in every process is a test of the engine's: none crosses the wire yet.)"""
    async with (
        launch_worker("prefill", folder, os.environ | {"PYTHONHASHSEED": "1"}) as prefill,
        launch_worker("decode", folder, os.environ | {"PYTHONHASHSEED": "2"}) as decode,
    ):
        decoder = await Decoder(decode.address, "router").opened()
        way = Route(prefill.prefill_stub(), decoder)
        cold = await way.generate(spec(prompt(5 * B + 3), 6))
        warm = await way.generate(spec(prompt(5 * B + 3), 6))
        # And each worker is one process: nothing was forked beside gRPC's threads.
        for worker in (prefill, decode):
            assert psutil.Process(worker.process.pid).children() == []
        await decoder.close()
    reference.assert_follows(prompt(5 * B + 3), warm.ids)
    assert cold.end is not None
    assert warm.end is not None
    assert (cold.end.num_blocks, warm.end.num_blocks) == (6, 1)


@pytest.mark.parametrize("other", ["model", "dtype"])
async def test_kv_of_another_model_or_dtype_is_never_read(
    folder: Path, loaded: LoadedModel, tmp_path: Path, other: str
) -> None:
    if other == "model":
        foreign = load_model(ModelConfig(id=str(tiny_model(tmp_path, seed=1)), device="cpu"))
    else:
        foreign = load_model(ModelConfig(id=str(folder), device="cpu", dtype="bfloat16"))
    async with serving(folder, loaded, models={Role.DECODE: foreign}) as serves:
        with pytest.raises(FailedPrecondition) as refused:
            await serves.client.generate(prompt(40), max_tokens=5)
        assert refused.value.reason == "LAYOUT_MISMATCH"
