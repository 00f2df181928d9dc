"""The metrics of requests: names, units and help texts, in groups.

Names and units are those that users of vLLM know; what a disaggregated system has besides comes on top.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from pdserve.v1 import generation_pb2
from pdserve.v1.errors import CODE_NAMES
from router.metrics.buckets import LATENCY_SECONDS, REQUEST_SECONDS, TOKEN_SECONDS, TOKENS

# A stop string, a stop id and EOS are one to whoever counts.
FINISH_REASONS = {
    generation_pb2.FINISH_REASON_EOS: "stop",
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}


class Felt:
    """By clients, in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ttft = _seconds(
            registry, "time_to_first_token", "Request received → first token on its way to the client."
        )
        self.itl = _seconds(
            registry,
            "inter_token_latency",
            "Between one delivery of tokens to a client and the next.",
            TOKEN_SECONDS,
        )
        self.e2e = _seconds(
            registry, "e2e_request_latency", "Request received → last token.", REQUEST_SECONDS
        )
        self.tpot = _seconds(
            registry,
            "request_time_per_output_token",
            "Of a finished request: first token → last token, over the tokens after the first.",
            TOKEN_SECONDS,
        )


class Phases:
    """Of finished requests, in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.queue = _seconds(registry, "request_queue_time", "In all queues, until the first token.")
        self.prefill = _seconds(
            registry, "request_prefill_time", "Of the steps that computed some of the prompt."
        )
        self.decode = _seconds(registry, "request_decode_time", "First token → last token.", REQUEST_SECONDS)
        self.inference = _seconds(
            registry, "request_inference_time", "Prefill begun → last token.", REQUEST_SECONDS
        )
        phase = Histogram(
            "pdserve_time_to_first_token_phase_seconds",
            "TTFT of finished requests, in the parts that add up to it: in all queues, asking for room, and "
            "the prefill until its token is here.",
            ["phase"],
            buckets=LATENCY_SECONDS,
            registry=registry,
        )
        self.in_queue, self.in_reserve, self.in_prefill = map(phase.labels, ("queue", "reserve", "prefill"))


class HandOvers:
    """Of finished requests that were handed over, in seconds. The last two by the workers' clocks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.transfer = _seconds(
            registry,
            "request_kv_transfer_time",
            "First block pushed → commit acknowledged; mostly beside the prefill.",
        )
        self.ready = _seconds(
            registry, "request_kv_ready_time", "First token drawn → all KV at the decode worker."
        )
        self.decode_start = _seconds(
            registry,
            "request_decode_start_time",
            "First token drawn → the decode worker's first step with the sequence.",
        )


class Counts:
    """How many requests, of how many tokens, with what end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def count(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"pdserve_{name}", help, labels, registry=registry)

        def tokens(name: str, help: str) -> Histogram:
            return Histogram(f"pdserve_{name}", help, buckets=TOKENS, registry=registry)

        self.tokens_in = tokens("request_prompt_tokens", "Prompt tokens of a finished request.")
        self.tokens_out = tokens("request_generation_tokens", "Generated tokens of a finished request.")
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self.generation_tokens = count("generation_tokens", "Tokens generated.")
        self.prefix_queries = count(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache of a prefill worker."
        )
        self.prefix_hits = count("prefix_cache_hits", "Of those, the ones that were cached.")
        self.resumed = count("request_resumed", "Finished requests that went on elsewhere on the way.")
        self._success = count(
            "request_success", "Finished requests, by the reason of their end.", "finished_reason"
        )
        self._failures = count(
            "request_failures", "Requests that ended with an error, by gRPC's name of it.", "code"
        )
        # From the start at 0: an increase from nothing would be no increase.
        for reason in FINISH_REASONS.values():
            self._success.labels(reason)
        for code in CODE_NAMES:
            self._failures.labels(code)

    def finished(self, reason: generation_pb2.FinishReason) -> None:
        self._success.labels(FINISH_REASONS.get(reason, "other")).inc()

    def failed(self, code: str) -> None:
        self._failures.labels(code).inc()


def _seconds(
    registry: CollectorRegistry, name: str, help: str, buckets: tuple[float, ...] = LATENCY_SECONDS
) -> Histogram:
    return Histogram(f"pdserve_{name}_seconds", help, buckets=buckets, registry=registry)
