"""Every family's tokens are transformers' own, and what would not be is refused when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine import attention
from engine.attention_probe import AttentionProbe
from engine.attention_rules import AttentionRules
from engine.config import ModelConfig
from engine.engine import Engine
from engine.errors import UnsupportedModel
from engine.loading import load_model
from engine.model_probe import probe_model
from engine.request import NewToken
from engine.sampling import SamplingParams
from tests.families import DOC, REFUSED, SERVED, Family, Need, document
from tests.models import tiny_model
from tests.unit.engine.driving import Reference, drain, hand_over, prompt, request, tokens_of

LENGTHS = (1, 40, 61)
BATCHED = 20  # a prompt takes several chunks
NUM_KNOWN = 5
MAX_TOKENS = 14
SAMPLING = SamplingParams(num_logprobs=3)
# Of one log probability, between kernels that add up in other orders.
LOGPROB_ERROR = 1e-3

# What a layer's rules are without each need.
WITHOUT: dict[Need, Callable[[AttentionRules, int], AttentionRules]] = {
    Need.SCALING: lambda rules, head_dim: replace(rules, scaling=head_dim**-0.5),
    Need.WINDOW: lambda rules, _: replace(rules, sliding_window=None),
    Need.SOFT_CAP: lambda rules, _: replace(rules, softcap=None),
    Need.SINKS: lambda rules, _: replace(rules, sinks=None),
}


@pytest.fixture(params=SERVED, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def eager(family: Family, model_root: Path) -> Reference:
    return Reference(tiny_model(model_root, family.name), "eager")


class Follower:
    """Holds tokens and log probabilities against transformers' forward over the whole text."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    def check(self, ids: Sequence[int], known: Sequence[int], tokens: Sequence[NewToken]) -> None:
        before = (*ids, *known)
        drawn = [token.token_id for token in tokens]
        assert [token.position for token in tokens] == list(range(len(known), MAX_TOKENS))
        self._reference.assert_follows(before, drawn)
        scores = self._reference.scores([*before, *drawn])[len(before) - 1 : -1]
        for token, expected in zip(tokens, torch.log_softmax(scores, -1), strict=True):
            assert token.logprobs is not None
            for each in (token.logprobs.chosen, *token.logprobs.top):
                assert each.logprob == pytest.approx(float(expected[each.token_id]), abs=LOGPROB_ERROR)


@pytest.mark.parametrize("compile", ["auto", "off"])
def test_paged_prefill_decode_resume_and_hand_over_give_transformers_tokens(
    family, make_engine, eager, compile
):
    follower = Follower(eager)
    make_engine = partial(make_engine, compile=compile)
    engine: Engine = make_engine(family.name, max_num_batched_tokens=BATCHED)
    items = [request(prompt(length), MAX_TOKENS, sampling=SAMPLING) for length in LENGTHS]
    for item in items:
        engine.add(item)
    outputs = drain(engine)
    for item in items:
        follower.check(item.prompt_token_ids, (), tokens_of(outputs[item.sequence_id]))

    tokens = [token.token_id for token in tokens_of(outputs[items[-1].sequence_id])]
    known = tokens[:NUM_KNOWN]
    resumed = request(prompt(LENGTHS[-1]), MAX_TOKENS, known=known, sampling=SAMPLING)
    cold: Engine = make_engine(family.name, max_num_batched_tokens=BATCHED)
    cold.add(resumed)
    follower.check(resumed.prompt_token_ids, known, tokens_of(drain(cold)[resumed.sequence_id]))

    target: Engine = make_engine(family.name)
    for item in (replace(resumed, sequence_id="resumed"), *items):
        first, _ = hand_over(cold, target, item)
        rest = tokens_of(drain(target)[item.sequence_id])
        follower.check(item.prompt_token_ids, item.known_token_ids, [first, *rest])


def test_the_needs_are_those_that_arrive_and_each_is_felt(family, make_engine, eager, monkeypatch):
    """Without any one of them the log probabilities would be others: so the test above can tell."""
    arrived: set[Need] = set()
    left_out: list[Need] = []
    attend = attention.attend

    def watched(batch, layer, query, key, value, rules, native):
        for need, without in WITHOUT.items():
            plain = without(rules, query.shape[-1])
            if plain is not rules and plain != rules:
                arrived.add(need)
                rules = plain if need in left_out else rules
        return attend(batch, layer, query, key, value, rules, native)

    monkeypatch.setattr(attention, "attend", watched)

    def logprobs() -> list[float]:
        item = request(prompt(LENGTHS[-1]), 1, sampling=SamplingParams(num_logprobs=20))
        engine = make_engine(family.name, compile="off", enable_prefix_caching=False)
        engine.add(item)
        (token,) = tokens_of(drain(engine)[item.sequence_id])
        assert token.logprobs is not None
        return [each.logprob for each in sorted(token.logprobs.top, key=lambda each: each.token_id)]

    whole = logprobs()
    assert arrived == family.needs
    for need in family.needs:
        left_out[:] = [need]
        assert max(abs(a - b) for a, b in zip(whole, logprobs(), strict=True)) > 10 * LOGPROB_ERROR


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_what_we_could_not_honour_is_refused_by_name_and_reason(family, tmp_path):
    folder = tiny_model(tmp_path, family.name)
    with pytest.raises(UnsupportedModel, match=family.refusal) as caught:
        load_model(ModelConfig(id=str(folder), device="cpu", max_model_len=512))
    assert family.name in str(caught.value)


def test_the_documented_families_are_the_tested_ones():
    assert DOC.read_text(encoding="utf-8") == document(), "run python -m tests.families"


def notes(**others: object) -> None:
    part = torch.zeros(1, 2, 3, 16)
    AttentionProbe(0).note(0, part, part, others.pop("value", part), None, others)


def test_what_an_attention_asks_for_and_we_do_not_know_is_refused_by_name():
    notes(dropout=0.1, is_causal=True, slopes=None)
    with pytest.raises(UnsupportedModel, match="alibi_slopes"):
        notes(alibi_slopes=1)
    with pytest.raises(UnsupportedModel, match="attention_mask"):
        notes(attention_mask=torch.zeros(1))
    with pytest.raises(UnsupportedModel, match="16 and 8"):
        notes(value=torch.zeros(1, 2, 3, 8))
    with pytest.raises(UnsupportedModel, match="not causal"):
        notes(is_causal=False)


class Smearing(torch.nn.Module):
    """Passes everything on, and lets each token see a little of the one before it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, **kwargs: object) -> object:
        embedded = self.inner.get_input_embeddings()(input_ids)
        before = torch.nn.functional.pad(embedded, (0, 0, 1, -1))
        return self.inner(inputs_embeds=embedded + 0.3 * before, **kwargs)


def test_a_model_that_mixes_tokens_beside_its_attention_is_refused(tmp_path):
    folder = tiny_model(tmp_path)
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention.ATTENTION_NAME)
    cpu = torch.device("cpu")
    config: PreTrainedConfig = module.config
    assert probe_model(module, config, cpu).num_kv_heads == 2
    with pytest.raises(UnsupportedModel, match="llama: layer 0 mixes tokens"):
        probe_model(Smearing(module), config, cpu)
    config.layer_types = ["sliding_attention"] * 2
    with pytest.raises(UnsupportedModel, match="layer 0 slides"):
        probe_model(module, config, cpu)
