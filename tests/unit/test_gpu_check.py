"""The script that checks a GPU, tried where there may be none."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_check import Reference, Tally, main
from tests.models import tiny_model


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err == "torch finds no GPU here: nothing was checked\n"


def test_its_rehearsal_checks_tokens_and_a_hand_over(tmp_path, capsys):
    torch.set_num_threads(1)
    assert main(["--rehearse", "--model", str(tiny_model(tmp_path))]) == 0
    told = capsys.readouterr().out
    assert "float32, torch alone: 320 tokens, 0 ties, 0 wrong" in told
    assert "float32, 1P1D over gRPC, torch alone: 256 tokens, 0 ties, 0 wrong" in told


def test_it_counts_a_wrong_token(tmp_path):
    reference, tally = Reference(tiny_model(tmp_path), "float32", "cpu"), Tally()
    greedy = reference._model.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, eos_token_id=None
    )[0, 3:].tolist()
    reference.count([5, 6, 7], greedy, tally)
    assert (tally.num_tokens, tally.num_wrong) == (3, 0)
    reference.count([5, 6, 7], [*greedy[:2], (greedy[2] + 1) % 500], tally)
    assert (tally.num_tokens, tally.num_wrong) == (6, 1)
