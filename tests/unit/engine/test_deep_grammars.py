"""What takes a process with it where it goes wrong: each is tried in one of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import write_tokenizer

ROOT = Path(__file__).parents[3]
_BEGIN = """
import asyncio, json, sys
from pathlib import Path
from types import SimpleNamespace
from pdserve.v1 import generation_pb2
from pdserve.v1.structured import grammar_text

folder = Path(sys.argv[1])
last = 1650
parts = {str(i): {"items": {"$ref": f"#/d/{i + 1}"}} for i in range(last)} | {str(last): {"type": "string"}}
schema = json.dumps({"$ref": "#/d/0", "d": parts}, separators=(",", ":"))
rules = "".join(f"r{i}: r{i + 1}\\n" for i in range(5000))
asked = {
    "schema": generation_pb2.StructuredOutput(json_schema=schema),
    "lark": generation_pb2.StructuredOutput(grammar=f'start: r0\\n{rules}r5000: "a"\\n'),
}[sys.argv[2]]
assert asked.ByteSize() < 1 << 16
"""
_WORKER = """
from engine.guidance import Grammars
from engine.loop import EngineLoop
from engine.progress import Progress

grammars = Grammars(folder / "tokenizer.json", 512, frozenset({508}))
made = grammars.prepare(grammar_text(asked)).result(30)
loop = EngineLoop(SimpleNamespace(progress=Progress(), has_work=False, check_integrity=lambda: None))
loop.start()
def compile_again(_):
    matcher = made.begin()
    matcher.append(0)  # not the grammar's: it begins anew
    return matcher.error
assert loop.call(compile_again).result(30) is not None
loop.stop()
"""
_ROUTER = """
from router.text.grammar_check import GrammarCheck
from router.text.model_folder import read_model_folder

(folder / "config.json").write_text('{"vocab_size": 512, "eos_token_id": 508}')
asyncio.run(GrammarCheck(read_model_folder(folder)).check(asked))
"""


@pytest.mark.parametrize("grammar", ["schema", "lark"])
@pytest.mark.parametrize("part", [_WORKER, _ROUTER], ids=["worker", "router"])
def test_a_grammar_whose_parts_lead_from_one_to_the_next_ends_no_process(
    tmp_path: Path, grammar: str, part: str
) -> None:
    write_tokenizer(tmp_path)
    command = [sys.executable, "-c", _BEGIN + part, str(tmp_path), grammar]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
