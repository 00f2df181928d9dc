"""The router's rendering against transformers' own."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from pdserve.v1.errors import InvalidArgument
from router.text.chat_template import ChatTemplate
from router.text.model_folder import read_model_folder
from router.text.tokenizer import TextCodec
from tests.models import write_tokenizer

SIMPLE = [{"role": "user", "content": "Hi <b>é漢\U0001f600</b>"}]
LONG = [
    {"role": "system", "content": " You are terse.\n"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
TEMPLATES = {
    "specials": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    "blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\nU {{ m.content }}\n    {% else %}\n"
    "O {{ m.content }}\n    {% endif %}\n{% endfor %}\n",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "loop": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}{% if tools is none %}no tools{% endif %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}",
    "unset": "{{ unk_token }}{% if unk_token is defined %}defined{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [SIMPLE, LONG])
@pytest.mark.parametrize("has_opening", [True, False])
async def test_a_template_renders_as_in_transformers(
    tmp_path: Path, name: str, messages: list[dict[str, str]], has_opening: bool
) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["bos_token"] = {"__type": "AddedToken", "content": "<|im_start|>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))

    reference = AutoTokenizer.from_pretrained(tmp_path)
    theirs = reference.apply_chat_template(messages, add_generation_prompt=has_opening, return_dict=False)
    codec = TextCodec(read_model_folder(tmp_path))
    ours = await codec.encode_chat(messages, add_generation_prompt=has_opening)
    codec.close()
    assert list(ours) == list(theirs)


@pytest.mark.parametrize("part", ["role", "content"])
async def test_a_long_chat_is_not_rendered_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Wherever in its messages it is long."""
    write_tokenizer(tmp_path)
    codec = TextCodec(read_model_folder(tmp_path))
    threads: list[threading.Thread] = []

    def render(*_: object, **__: object) -> str:
        threads.append(threading.current_thread())
        return "x"

    monkeypatch.setattr(ChatTemplate, "render", render)
    for message in ({"role": "user", "content": "x"}, {"role": "user", "content": "x"} | {part: "x" * 5000}):
        await codec.encode_chat([message], add_generation_prompt=True)
    codec.close()
    short, long = threads
    assert short is threading.main_thread() is not long


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000) %}x{% endfor %}",
    ],
)
def test_what_a_template_refuses_is_an_invalid_argument(source: str) -> None:
    with pytest.raises(InvalidArgument, match="chat template"):
        ChatTemplate(source, {}).render(SIMPLE, add_generation_prompt=True)
