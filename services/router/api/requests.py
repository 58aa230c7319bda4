"""Reads bodies into GenerationRequests, one for each choice.

The form of a body is checked by the structs of bodies.py; here is what depends on the model, the settings or two fields
at once. A larger `max_tokens` than fits is cut to what fits.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from moot.core.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from moot.core.noise import choice_seed
from moot.core.types import ModelInfo, SamplingParams
from moot.drafters.request.siblings import Siblings
from services.router.api.bodies import (
    MAX_NAME_CHARS,
    ChatCompletionRequest,
    CompletionRequest,
    SharedFields,
    is_unicode,
    read,
    refusal,
)
from services.router.api.settings import HttpSettings
from services.router.generation.request_types import GenerationRequest

RequestT = TypeVar("RequestT", bound=SharedFields)


def too_long(num_tokens: int, info: ModelInfo, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"the prompt has {num_tokens} tokens; this model's context is {info.context_limit} tokens, "
        "at least one of them for the output",
        param,
    )


_AS_THEY_ARE = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "ignore_eos"),
)
"""Fields of a body that are sampling parameters."""


@dataclass(frozen=True, slots=True)
class Checked(Generic[RequestT]):
    """A body that this model can serve. `params` lacks max_tokens and seed, which depend on prompt and choice;
    `max_tokens`: None where the context is the limit; `seed`: the request's, or one drawn for it."""

    body: RequestT
    model: str
    params: SamplingParams
    max_tokens: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class BodyReader:
    """Reads bodies for one model. `drafter_ids`: None where they are not known. `names`: as `read` takes them.

    Every method raises InvalidRequest with `param`, or ModelNotFound.
    """

    settings: HttpSettings
    info: ModelInfo
    drafter_ids: frozenset[str] | None
    names: Mapping[str, str] = field(default_factory=dict)

    def completion(self, values: Mapping[str, Any]) -> Checked[CompletionRequest]:
        model = self._model(values)
        body = read(CompletionRequest, values, self.names)
        for prompt in body.prompts:
            if not isinstance(prompt, str):
                if len(prompt) > self.info.context_limit:
                    raise too_long(len(prompt), self.info, self.names.get("prompt", "prompt"))
                self._check_ids("prompt", prompt)
        if body.echo and body.logprobs is not None:
            raise self._refusal("echo", "together with logprobs is not supported")
        checked = self._checked(body, model, body.max_tokens, body.logprobs)
        if len(body.prompts) * body.n > self.settings.max_choices:
            raise self._refusal("n", f"times the number of prompts must be at most {self.settings.max_choices}")
        if len(body.prompts) > 1 and body.prediction is not None:
            raise self._refusal("prediction", "needs a single prompt")
        return checked

    def chat(self, values: Mapping[str, Any]) -> Checked[ChatCompletionRequest]:
        model = self._model(values)
        body = read(ChatCompletionRequest, values, self.names)
        if body.top_logprobs is not None and not body.logprobs:
            raise self._refusal("top_logprobs", "needs `logprobs` to be true")
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise self._refusal("max_completion_tokens", "and `max_tokens` are the same limit: give one of them")
        goes_on, opens = body.continue_final_message, body.add_generation_prompt
        if goes_on and opens and "add_generation_prompt" in body.model_fields_set:
            raise self._refusal("continue_final_message", "and `add_generation_prompt` exclude each other")
        max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        return self._checked(body, model, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)

    def _refusal(self, field: str, problem: str) -> InvalidRequest:
        return refusal(field, problem, self.names)

    def _model(self, values: Mapping[str, Any]) -> str:
        """Check the model's name before all else: a caller that asks for another model has the wrong server. No name:
        left to the struct."""
        name, known = values.get("model"), self.settings.served_model_names
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or not is_unicode(name):
            return known[0]
        if name not in known:
            raise ModelNotFound(f"this server serves {', '.join(known)}, not the model asked for")
        return name

    def _check_ids(self, field: str, ids: Collection[int]) -> None:
        if ids and max(ids) >= self.info.vocab_size:
            raise self._refusal(field, f"must have token ids from 0 to {self.info.vocab_size - 1}")

    def _sampling(self, body: SharedFields, num_logprobs: int | None) -> SamplingParams:
        """The sampling parameters of a body, without `max_tokens` and `seed`."""
        allowed = None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids)
        bias = {int(token): amount for token, amount in body.logit_bias.items()}
        if len(body.allowed_token_ids or ()) > self.info.vocab_size:
            raise self._refusal("allowed_token_ids", f"must have at most {self.info.vocab_size} items")
        self._check_ids("allowed_token_ids", allowed or ())
        self._check_ids("stop_token_ids", body.stop_token_ids)
        self._check_ids("logit_bias", bias)
        return SamplingParams(
            **{name: getattr(body, name) for name in _AS_THEY_ARE},
            top_k=0 if body.top_k < 1 or body.top_k >= self.info.vocab_size else body.top_k,
            logit_bias=bias,
            allowed_token_ids=allowed,
            stop_token_ids=frozenset(body.stop_token_ids),
            logprobs=num_logprobs,
        )

    def _checked(
        self, body: RequestT, model: str, max_tokens: int | None, num_logprobs: int | None
    ) -> Checked[RequestT]:
        params = self._sampling(body, num_logprobs)
        if max_tokens is not None and params.min_tokens > max_tokens:
            raise self._refusal("min_tokens", "is more than max_tokens")
        if body.stream_options is not None and not body.stream:
            raise self._refusal("stream_options", "needs `stream` to be true")
        drafters = body.drafters or []
        if self.drafter_ids is not None and not self.drafter_ids.issuperset(drafters):
            known = ", ".join(sorted(self.drafter_ids)) or "none is configured"
            raise self._refusal("drafters", f"must be some of: {known}")
        if len(set(drafters)) < len(drafters):
            raise self._refusal("drafters", "names a drafter twice")
        return Checked(body, model, params, max_tokens, secrets.randbits(63) if body.seed is None else body.seed)


def plan_requests(
    checked: Checked[Any],
    prompts: tuple[tuple[int, ...], ...],
    info: ModelInfo,
    base_id: str,
    caller: str,
    fingerprint: str,
    param: str,
    prediction: tuple[int, ...] = (),
) -> tuple[GenerationRequest, ...]:
    """One request per choice, numbered prompt-major. `param`: the field the prompts came from, for errors;
    `prediction`: ids of the likely answer."""
    body, params = checked.body, checked.params
    salt = hashlib.sha256(f"{caller}\0{body.cache_salt}".encode()).hexdigest()[:32]
    planned: list[GenerationRequest] = []
    for prompt in prompts:
        room = info.context_limit - len(prompt)
        if not prompt:
            raise InvalidRequest(f"`{param}` has no tokens", param)
        if room < 1:
            raise too_long(len(prompt), info, param)
        max_tokens = room if checked.max_tokens is None else min(checked.max_tokens, room)
        if params.min_tokens > max_tokens:
            raise InvalidRequest(f"`min_tokens` is more than the {max_tokens} tokens there can be", "min_tokens")
        siblings = Siblings(body.n) if body.n > 1 else None
        for choice_index in range(body.n):
            index = len(planned)
            planned.append(
                GenerationRequest(
                    request_id=f"{base_id}-{index}",
                    prompt_token_ids=prompt,
                    params=replace(params, max_tokens=max_tokens, seed=choice_seed(checked.seed, index)),
                    num_speculative_tokens=body.num_speculative_tokens,
                    drafters=None if body.drafters is None else tuple(body.drafters),
                    # Callers do not see each other's prefix cache; without keys all are one caller.
                    cache_salt=salt if caller or body.cache_salt else "",
                    body_fingerprint=fingerprint,
                    stop_strings=body.stop_strings,
                    skip_special_tokens=body.skip_special_tokens,
                    include_stop_str_in_output=body.include_stop_str_in_output,
                    prediction_token_ids=prediction,
                    siblings=siblings,
                    choice_index=choice_index,
                )
            )
    return tuple(planned)
