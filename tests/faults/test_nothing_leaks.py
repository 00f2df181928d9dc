"""A request that fails, is cancelled or never fits ends in bounded time, and everything it held is back.

`serving` looks at every pool and table at its end, and a fixture at all that is alive after each test.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from decode_worker.config import DecodeConfig
from engine.engine import Engine
from engine.loading import LoadedModel
from kv_transfer.send_queue import SenderConfig
from kv_transfer.transport.base import Connection, ConnectionEvents
from kv_transfer.transport.memory import Faults
from kv_transfer.ways import Way
from pdserve.client import Internal, InvalidArgument, PdserveError, ResourceExhausted
from prefill_worker.config import PrefillConfig
from router.events import Moment
from tests.faults.held_frame import HeldFrame
from tests.integration.router.harness import until
from tests.serving import Serving, TransportName, serving
from tests.unit.engine.driving import Reference, prompt
from worker.identity import Role

B = 16
LEASE_S = 0.5
LEGS = [moment for moment in Moment if moment not in (Moment.RECEIVED, Moment.FINISHED)]


async def works(serves: Serving, reference: Reference) -> None:
    """Every block of the pools can be used again, and by others than before."""
    ids = prompt(50, seed=77)
    answer = await serves.client.generate(ids, max_tokens=5, temperature=0, ignore_eos=True, timeout=20)
    reference.assert_follows(ids, answer.token_ids)


@pytest.mark.parametrize("leg", [Role.PREFILL, Role.DECODE])
async def test_one_leg_that_fails_ends_the_other_within_a_second(
    folder: Path, loaded: LoadedModel, reference: Reference, leg: Role
) -> None:
    async with serving(folder, loaded) as serves:
        (broken,) = serves.of(leg)
        engine: Engine = broken._loop.engine
        with pytest.MonkeyPatch.context() as patch:

            def breaks(*_: object) -> None:
                raise RuntimeError("no such kernel")

            patch.setattr(engine, "_compute", breaks)
            began = time.monotonic()
            with pytest.raises(Internal, match=broken.identity.worker_id):
                await serves.client.generate(prompt(60), max_tokens=30, ignore_eos=True)
            await until(serves.is_idle, 1.0)
            assert time.monotonic() - began < 1.0
        await works(serves, reference)


@pytest.mark.parametrize("frame", [0, 1, 2, 3])
@pytest.mark.parametrize("fate", ["killed", "damaged"])
async def test_kv_that_is_lost_or_damaged_on_its_way_is_shipped_again(
    folder: Path,
    loaded: LoadedModel,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    fate: str,
    frame: int,
) -> None:
    # A block in each frame, so that all four are there: an Open, and three of KV.
    small = PrefillConfig(min_group_bytes=1, sender=SenderConfig(frame_bytes=1))
    async with serving(folder, loaded, transport="memory", prefill_config=small) as serves:
        memory, connect = serves.memory, serves.memory.connect
        memory.faults = Faults(kill_at=frame) if fate == "killed" else Faults(corrupt=frozenset({frame}))

        def connect_once_badly(way: Way, events: ConnectionEvents) -> Connection:
            connection = connect(way, events)
            memory.faults = Faults()
            return connection

        monkeypatch.setattr(memory, "connect", connect_once_badly)
        answer = await serves.client.generate(
            prompt(60), max_tokens=9, temperature=0, ignore_eos=True, timeout=20
        )
        reference.assert_follows(prompt(60), answer.token_ids)
        # By luck damage may change no token: it must have been seen.
        assert answer.completions[0].num_resumes == 1
        await works(serves, reference)


# The memory transport delays frames at random; the others are as fast as they are.
TRANSPORTS = [
    "memory",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("grpc", "shm", "collective")),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("moment", LEGS)
async def test_a_cancel_at_each_moment_gives_every_block_back(
    folder: Path, loaded: LoadedModel, reference: Reference, moment: Moment, transport: TransportName
) -> None:
    """PREFILL_END and TRANSFER_END among them: between P's end and D's beginning."""
    async with serving(folder, loaded, transport=transport) as serves:
        serves.memory.faults = Faults(delay_s=lambda _: 0.003)
        work: list[asyncio.Future[object]] = []
        serves.router.on_event(lambda event: work[-1].cancel() if event.moment is moment else None)
        for number in range(10):
            generate = serves.client.generate(prompt(70, seed=number), max_tokens=300, ignore_eos=True)
            work.append(asyncio.ensure_future(generate))
            with pytest.raises(asyncio.CancelledError):
                await work[-1]
            await until(serves.is_idle)
        work.append(asyncio.ensure_future(asyncio.sleep(0)))  # what is left to cancel
        await works(serves, reference)
        (p,) = serves.of(Role.PREFILL)
        assert [used.transport for used in p.describe().kv_routes] == [transport]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_two_hundred_cancels_at_random_times_give_every_block_back(
    folder: Path, loaded: LoadedModel, reference: Reference, transport: TransportName
) -> None:
    dice = random.Random(15)
    async with serving(folder, loaded, transport=transport, num_blocks=40) as serves:
        serves.memory.faults = Faults(delay_s=lambda _: dice.random() * 0.004)

        async def one(number: int) -> None:
            ids = prompt(dice.randrange(1, 120), seed=number)
            limits: dict[str, object] = {"timeout": dice.random() * 0.2} if number % 3 == 0 else {}
            call = asyncio.ensure_future(
                serves.client.generate(ids, max_tokens=100, ignore_eos=True, n=1 + number % 2, **limits)  # type: ignore[arg-type]
            )
            await asyncio.sleep(dice.random() * 0.25)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

        for begin in range(0, 200, 40):
            await asyncio.gather(*(one(number) for number in range(begin, begin + 40)))
            await until(serves.is_idle)
            await works(serves, reference)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prompt_that_waits_for_longer_than_its_lease_keeps_it(
    folder: Path, loaded: LoadedModel, reference: Reference, transport: TransportName
) -> None:
    leases = DecodeConfig(lease_s=LEASE_S)
    async with serving(folder, loaded, transport=transport, decode_config=leases) as serves:
        (p,), (d,) = serves.of(Role.PREFILL), serves.of(Role.DECODE)
        busy = threading.Event()
        p._loop.call(lambda _: busy.wait(3 * LEASE_S))  # the engine does something else
        await works(serves, reference)
        assert d.describe().counters.num_expired_leases == 0
        assert [used.transport for used in p.describe().kv_routes] == [transport]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_kv_that_comes_after_its_lease_is_nobodys(
    folder: Path,
    loaded: LoadedModel,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    transport: TransportName,
) -> None:
    """The first frame waits until the router has reserved again, in a pool that holds the prompt once: over
    shm, where P writes by itself, blocks it might still write are given to nobody before."""
    held = HeldFrame(monkeypatch, transport)
    leases = DecodeConfig(lease_s=LEASE_S)
    async with serving(folder, loaded, transport=transport, decode_config=leases, num_blocks=12) as serves:
        (d,) = serves.of(Role.DECODE)
        ids = prompt(100)
        generate = serves.client.generate(ids, max_tokens=9, temperature=0, ignore_eos=True, timeout=20)
        answering = asyncio.ensure_future(generate)
        await until(lambda: d.describe().counters.num_expired_leases == 1)
        if transport != "shm":
            await until(lambda: d.describe().load.num_reservations == 1)
        held.gate.set()
        reference.assert_follows(ids, (await answering).token_ids)
        assert held.is_held
        await works(serves, reference)


@pytest.mark.parametrize("length", [4 * B, 4 * B + 1, 5 * B, 2048, 2049, 10_000])
async def test_what_never_fits_is_refused_at_once(folder: Path, loaded: LoadedModel, length: int) -> None:
    """A pool of four blocks: prompt and output of 64 tokens are the most."""
    async with serving(folder, loaded, num_blocks=4) as serves:
        began = time.monotonic()
        with pytest.raises(InvalidArgument, match=r"over 64 tokens|no room in 64"):
            await serves.client.generate([1] * length, max_tokens=1)
        with pytest.raises(InvalidArgument):
            await serves.client.generate([1] * length)
        assert time.monotonic() - began < 1.0
        assert (await serves.client.generate([1] * (4 * B - 1), max_tokens=1)).token_ids


async def test_the_smaller_pool_decides_what_fits(folder: Path, loaded: LoadedModel) -> None:
    roles = (Role.PREFILL, Role.DECODE)
    for small in roles:
        blocks = {role: 4 if role is small else 64 for role in roles}
        async with serving(folder, loaded, blocks=blocks) as serves:
            with pytest.raises(InvalidArgument):
                await serves.client.generate([1] * (4 * B), max_tokens=1)
            assert (await serves.client.generate([1] * (4 * B - 9), max_tokens=9)).token_ids


async def test_two_that_fit_only_one_after_the_other_both_finish(
    folder: Path, loaded: LoadedModel, reference: Reference
) -> None:
    async with serving(folder, loaded, num_blocks=6) as serves:
        prompts = [prompt(70, seed=number) for number in range(4)]
        answers = await asyncio.wait_for(
            asyncio.gather(
                *(
                    serves.client.generate(ids, max_tokens=20, temperature=0, ignore_eos=True)
                    for ids in prompts
                )
            ),
            timeout=20,
        )
    for ids, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 20
        reference.assert_follows(ids, answer.token_ids)


async def test_sixteen_sequences_of_one_request_fit_a_pool_that_holds_two(
    folder: Path, loaded: LoadedModel
) -> None:
    async with serving(folder, loaded, num_blocks=12) as serves:
        answer = await asyncio.wait_for(
            serves.client.generate(prompt(60), max_tokens=30, n=16, seed=4, ignore_eos=True), timeout=30
        )
        assert len(answer.completions) == 16
        assert all(len(each.token_ids) == 30 for each in answer.completions)
        with pytest.raises(PdserveError):
            await serves.client.generate(prompt(60), max_tokens=30, n=16, timeout=0.05, ignore_eos=True)


async def test_prompts_shorter_than_a_block_finish(
    folder: Path, loaded: LoadedModel, reference: Reference
) -> None:
    async with serving(folder, loaded) as serves:
        for length in range(1, B):
            answer = await serves.client.generate(
                prompt(length), max_tokens=4, temperature=0, ignore_eos=True, timeout=10
            )
            assert answer.timings.transfer_bytes > 0
            reference.assert_follows(prompt(length), answer.token_ids)


async def test_a_client_that_reads_nothing_holds_nothing_for_ever(
    folder: Path, loaded: LoadedModel, reference: Reference
) -> None:
    async with serving(folder, loaded, router={"default_timeout_s": 1.5}) as serves:
        stream = serves.client.generate_stream(prompt(9), max_tokens=900, ignore_eos=True, logprobs=20, n=4)
        async with aclosing(stream):
            await stream.__anext__()
            await until(serves.is_idle, 5.0)
        await works(serves, reference)


async def test_a_full_queue_refuses_and_forgets(folder: Path, loaded: LoadedModel) -> None:
    async with serving(folder, loaded, num_blocks=8, router={"max_queued_requests": 5}) as serves:
        answers = await asyncio.gather(
            *(serves.client.generate(prompt(60, seed=n), max_tokens=20) for n in range(40)),
            return_exceptions=True,
        )
        refusals = [answer for answer in answers if isinstance(answer, BaseException)]
        assert 0 < len(refusals) < 40
        assert all(isinstance(each, ResourceExhausted) and each.retry_after_s for each in refusals)
        assert serves.router._dispatcher.admission.num_waiting == 0
