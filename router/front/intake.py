"""From a client's message to the sequences that it asks for: check, tokenize once, fill in defaults."""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid

from pdserve.v1 import generation_pb2
from pdserve.v1.errors import InvalidArgument
from router.config import RouterConfig
from router.deadline import Deadline
from router.events import Listener
from router.fleet.workers import WorkerTable
from router.front.checks import RequestBounds, check_request, resolve_max_tokens
from router.request import Affinity, Request, SequencePlan, Timeline
from router.text.model_folder import ModelFolder
from router.text.tokenizer import TextCodec
from router.text.transcript import StopText, Transcript
from router.trace import RequestTrace


class Intake:
    def __init__(
        self,
        config: RouterConfig,
        folder: ModelFolder,
        codec: TextCodec,
        table: WorkerTable,
        listener: Listener,
    ) -> None:
        self._config = config
        self._codec = codec
        self._table = table
        self._listener = listener
        self._max_positions = folder.max_positions
        self._bounds = RequestBounds(
            model=config.model,
            vocab_size=folder.vocab_size,
            eos_token_ids=frozenset(folder.eos_token_ids),
            max_prompt_bytes=config.max_prompt_bytes,
            max_n=config.max_n,
        )

    @property
    def max_model_len(self) -> int:
        """Prompt and output together: by the model, the cluster's own limit, and every pool."""
        limits = (self._max_positions, self._config.max_model_len, self._table.max_sequence_tokens)
        return min((limit for limit in limits if limit is not None), default=2**31 - 1)

    async def accept(
        self,
        message: generation_pb2.GenerateRequest,
        deadline: Deadline,
        default_max_tokens: int,
        trace: RequestTrace,
    ) -> list[Request]:
        """One Request for each of the n sequences. Raises InvalidArgument, NotFound, Unimplemented."""
        received_at = time.monotonic()
        # What no check looks at would go to workers, once for each sequence.
        message.DiscardUnknownFields()
        check_request(message, self._bounds, default_max_tokens)
        if message.sampling.HasField("structured"):
            await self._codec.grammars.check(message.sampling.structured)
        prompt = await self._tokenize(message)
        if not prompt:
            raise InvalidArgument("prompt: it is no token at all")
        stop = generation_pb2.StopConditions()
        stop.CopyFrom(message.stop)
        stop.max_tokens = resolve_max_tokens(
            message.stop, len(prompt), self.max_model_len, default_max_tokens
        )
        # Strings are the router's: workers see ids only.
        del stop.stop[:]
        seed = message.sampling.seed if message.sampling.HasField("seed") else secrets.randbits(64)
        request_id = message.request_id or uuid.uuid4().hex
        affinity = Affinity()
        requests: list[Request] = []
        for index in range(message.n if message.HasField("n") else 1):
            sampling = generation_pb2.SamplingParams()
            sampling.CopyFrom(message.sampling)
            sampling.seed = seed_of(seed, index)
            plan = SequencePlan(request_id, uuid.uuid4().hex, index, prompt, sampling, stop, message.output)
            timeline = Timeline(received_at)
            requests.append(self._request(plan, message.stop, timeline, affinity, deadline, trace))
        return requests

    def _request(
        self,
        plan: SequencePlan,
        stop: generation_pb2.StopConditions,
        timeline: Timeline,
        affinity: Affinity,
        deadline: Deadline,
        trace: RequestTrace,
    ) -> Request:
        text = StopText(tuple(stop.stop), stop.min_tokens, stop.include_stop_in_output)
        return Request(
            plan=plan,
            transcript=Transcript(self._codec.detokenizer(plan.prompt_token_ids), text),
            timeline=timeline,
            deadline=deadline,
            retry_budget=self._config.retry_budget,
            listener=self._listener,
            trace=trace,
            affinity=affinity,
        )

    async def _tokenize(self, message: generation_pb2.GenerateRequest) -> tuple[int, ...]:
        which = message.WhichOneof("prompt")
        if which == "text":
            return await self._codec.encode_text(message.text)
        if which == "token_ids":
            return tuple(message.token_ids.ids)
        chat = message.chat
        has_opening = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        messages = [{"role": each.role, "content": each.content} for each in chat.messages]
        return await self._codec.encode_chat(messages, add_generation_prompt=has_opening)


def seed_of(seed: int, index: int) -> int:
    """The seed of one of n sequences. The first has the request's own, as if n were 1."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
