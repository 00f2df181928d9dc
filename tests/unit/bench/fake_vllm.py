"""What stands in for vLLM: as much of its offline interface as `vllm_script.py` uses, in a package of its own
that an interpreter finds first. `FAKE_VLLM` says what goes wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGE = '''
import os, time
from types import SimpleNamespace
from vllm.sampling_params import RequestOutputKind

__version__ = "0.0.fake"
WRONG = os.environ.get("FAKE_VLLM", "")
print("what vLLM prints is no answer")


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize, output_kind):
        assert (temperature, ignore_eos, detokenize) == (0, True, False)
        assert output_kind is RequestOutputKind.DELTA
        self.max_tokens = max_tokens


class _Engine:
    """The first step draws a token for the first request only, as one does whose prompts come in chunks."""

    def __init__(self, max_num_seqs):
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=77))
        self.max_num_seqs = max_num_seqs
        self.left = {}
        self.is_first = True

    def add_request(self, request_id, prompt, params):
        assert request_id not in self.left and len(self.left) < self.max_num_seqs
        assert all(isinstance(token_id, int) for token_id in prompt["prompt_token_ids"])
        self.left[request_id] = params.max_tokens

    def step(self):
        if WRONG == "step":
            raise RuntimeError("a kernel is missing")
        if WRONG == "exit":
            os._exit(7)
        names = list(self.left)[: 1 if self.is_first else None]
        self.is_first = False
        for name in names:
            self.left[name] -= 1
            if self.left[name] == 0:
                del self.left[name]
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[1])]) for name in names
        ]

    def abort_request(self, request_ids):
        for request_id in request_ids:
            self.left.pop(request_id, None)


class LLM:
    def __init__(self, model, dtype, max_model_len, max_num_seqs, enable_prefix_caching, seed):
        assert not enable_prefix_caching
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        if WRONG == "load":
            raise ValueError(f"{model} is not for this engine")
        if WRONG == "hang":
            time.sleep(600)
        self.llm_engine = _Engine(max_num_seqs)
'''
_SAMPLING = "from enum import Enum\n\n\nclass RequestOutputKind(Enum):\n    DELTA = 1\n"


def fake_interpreter(folder: Path, wrong: str = "") -> Path:
    """An executable that runs this Python with the package in `folder`."""
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(_PACKAGE)
    (package / "sampling_params.py").write_text(_SAMPLING)
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nFAKE_VLLM={wrong} PYTHONPATH={folder} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path
