"""Answers of the HTTP API as types: the source of what /openapi.json says of answers."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

FinishName = Literal["stop", "length"]


class ErrorDetail(TypedDict):
    """`param`: the field that is wrong, with the way to it. No value of the request is quoted."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(TypedDict):
    """What every refusal and failure looks like; in a stream that has begun, its last event."""

    error: ErrorDetail


class PromptTokensDetails(TypedDict):
    """`cached_tokens`: those whose keys and values were still there."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """What a prediction was worth: tokens of the output that it had proposed, and tokens proposed in vain."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """A prompt counts once, however many choices continue it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class DrafterCounts(TypedDict):
    """What one drafter did for the request, in tokens and in votes."""

    num_proposed_tokens: int
    num_accepted_tokens: int
    num_votes_won: int


class SpeculativeDecoding(TypedDict):
    """Rounds and draft tokens, summed over the choices, under vLLM's names; a rate over nothing is null."""

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]
    drafters: dict[str, DrafterCounts]


class AnswerMetrics(TypedDict):
    """With `include_metrics`. `seed`: the request's, or the one that was drawn for it."""

    seed: int
    speculative_decoding: SpeculativeDecoding


class TokenAlternative(TypedDict):
    """A token, its text and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(TokenAlternative):
    """A token of the output, and the likeliest in its place."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(TypedDict):
    """One entry per token."""

    content: list[TokenEntry]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Four lists with one item per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class AssistantMessage(TypedDict):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """`stop_reason`: the stop string or token id that ended it; null: the model's own end, or the length.

    `token_ids`: with `return_token_ids`.
    """

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChatDelta(TypedDict):
    """What is new; `role` in a choice's first chunk only."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    """A piece of a choice; the last one says why it ended."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class CompletionChoice(TypedDict):
    """A choice, or in a stream a piece of one, of which the last says why it ended."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class _Envelope(TypedDict):
    id: str
    created: int
    model: str


class ChatCompletion(_Envelope):
    """Choices are numbered from 0; `created` is in Unix seconds. `prompt_token_ids`: with `return_token_ids`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    metrics: NotRequired[AnswerMetrics]


class ChatCompletionChunk(_Envelope):
    """With `stream_options.include_usage` a last chunk without choices has the usage, the others null."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]
    metrics: NotRequired[AnswerMetrics]


class TextCompletion(_Envelope):
    """Choices are numbered prompt-major: all of the first prompt, then those of the second."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    metrics: NotRequired[AnswerMetrics]


class TextCompletionChunk(_Envelope):
    """With `stream_options.include_usage` a last chunk without choices has the usage, the others null."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[AnswerMetrics]


class ModelCard(TypedDict):
    """`max_model_len`: the context in tokens; null before a verifier was seen."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(TypedDict):
    """The names that `model` takes."""

    object: Literal["list"]
    data: list[ModelCard]
