"""Runs in another interpreter, the one that has vLLM: reads requests as JSON lines from stdin and answers
each with one on stdout. `vllm_process.py` speaks to it. Imports nothing of ours.

The engine runs in this very process, not (vLLM's default) in one of its own: so it computes only while it is
asked to. On one core that is also a little faster.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

# Sequences begin to decode one after the other: the first may be so many tokens ahead of the last.
MAX_LEAD = 64


class Settings(TypedDict):
    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int


class Request(TypedDict, total=False):
    do: str
    prompts: list[list[int]]
    num_tokens: int


Answer = Mapping[str, "str | int | float"]


def main() -> None:
    _use_one_openmp()
    # Beside this file lie modules of ours, under names that other packages may have too.
    sys.path.remove(str(Path(__file__).parent))
    # What is printed goes to the log; the pipe is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for answer in _serve(json.loads(sys.argv[1])):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _use_one_openmp() -> None:
    """Binding threads to cores works only where all of the process shares torch's OpenMP: vLLM gives its own
    workers the same when it starts them.
    """
    spec = find_spec("torch")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    libraries = [str(path) for folder in folders for path in sorted(Path(folder, "lib").glob("libgomp*.so*"))]
    preloaded = os.environ.get("LD_PRELOAD", "")
    if libraries and "omp" not in preloaded:
        os.environ["LD_PRELOAD"] = ":".join(filter(None, (preloaded, libraries[0])))
        os.execv(sys.executable, [sys.executable, *sys.argv])


def _serve(settings: Settings) -> Iterator[Answer]:
    if find_spec("vllm") is None:
        yield {"error": "it has no vllm"}
        return
    engine = Engine(settings)
    yield engine.described()
    for line in sys.stdin:
        yield engine.answer(json.loads(line))


class Engine:
    def __init__(self, settings: Settings) -> None:
        from vllm import LLM

        llm = LLM(
            model=settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"] + MAX_LEAD,
            max_num_seqs=settings["max_num_seqs"],
            enable_prefix_caching=False,
            seed=0,
        )
        self._engine = llm.llm_engine
        self._num_requests = 0
        self._num_drawn: dict[str, int] = {}  # by request that has begun

    def described(self) -> Answer:
        config = self._engine.vllm_config
        return {
            "version": _version(),
            "max_num_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
        }

    def answer(self, request: Request) -> Answer:
        if request["do"] == "prefill":
            began = time.perf_counter()
            self._begin(request["prompts"], max_tokens=1)
            self._draw_until(1)
            seconds = time.perf_counter() - began
            self._num_drawn.clear()
            return {"seconds": seconds, "num_tokens": len(request["prompts"][0])}
        if request["do"] == "begin":
            self._begin(request["prompts"], request["num_tokens"] + MAX_LEAD)
            self._draw_until(1)
        elif request["do"] == "decode":
            num_before = sum(self._num_drawn.values())
            began = time.perf_counter()
            self._draw_until(min(self._num_drawn.values()) + request["num_tokens"])
            seconds = time.perf_counter() - began
            return {"seconds": seconds, "num_tokens": sum(self._num_drawn.values()) - num_before}
        else:
            self._engine.abort_request(list(self._num_drawn))
            self._num_drawn.clear()
        return {}

    def _begin(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for prompt in prompts:
            request_id = f"bench-{self._num_requests}"
            self._num_requests += 1
            self._engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)
            self._num_drawn[request_id] = 0

    def _draw_until(self, num_tokens: int) -> None:
        """Until every request that has begun has so many."""
        while min(self._num_drawn.values()) < num_tokens:
            for output in self._engine.step():
                self._num_drawn[output.request_id] += len(output.outputs[0].token_ids)


def _version() -> str:
    import vllm

    return str(vllm.__version__)


if __name__ == "__main__":
    main()
