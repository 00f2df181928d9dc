"""What a client may ask: OpenAI's fields and vLLM's extensions.

Unknown keys are ignored, as OpenAI-compatible servers do. What is known and not served is refused by name:
an answer that silently lacks what was asked for is worse than none. `null` is as good as left out, but for a
text completion's `max_tokens`: many clients write every field down.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from router.http.fields import (
    Int32,
    Items,
    LogitBias,
    Messages,
    Name,
    Parts,
    Prompt,
    RequestId,
    Seed,
    StopString,
    StopStrings,
    StopTokenIds,
)
from router.http.structured import StructuredFields

# What OpenAI gives where a text completion names no limit.
DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: bool | None = False
    # vLLM's: the usage so far in every chunk.
    continuous_usage_stats: bool | None = False


class SamplingFields(StructuredFields):
    """What both kinds of request have."""

    model: Name | None = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    max_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None

    # vLLM's extensions.
    request_id: RequestId | None = ""
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int32 | None = None
    ignore_eos: bool | None = False
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    # Known, and not served.
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = True
    use_beam_search: bool | None = False
    truncate_prompt_tokens: int | None = None
    bad_words: Items[str] | None = None
    allowed_token_ids: Items[int] | None = None
    # Keeps others from finding out by its speed what is in the prefix cache.
    cache_salt: object = None
    logits_processors: object = None


class CompletionRequest(SamplingFields):
    prompt: Prompt
    max_tokens: Int32 | None = DEFAULT_COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, lt=2**32)] | None = None

    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    prompt_embeds: object = None
    add_special_tokens: bool | None = True


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    type: str
    text: str = ""


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    role: str
    content: str | Parts[ContentPart] | None = None
    tool_calls: object = None


class ChatCompletionRequest(SamplingFields):
    messages: Messages[ChatMessage]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    add_generation_prompt: bool | None = True

    tools: list[object] | None = None
    tool_choice: object = None
    functions: list[object] | None = None
    function_call: object = None
    modalities: Items[str] | None = None
    audio: object = None
    continue_final_message: bool | None = False
    # vLLM's: the last message before the answer.
    echo: bool | None = False
    add_special_tokens: bool | None = False
    documents: object = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
