"""Server: log-probabilities of texts by a running OpenAI-compatible server, in the first of three forms that it has.

vLLM and SGLang give log-probabilities of a prompt; vLLM's CPU worker has none under an adapter, but those of tokens that
it generates. `transformers serve` gives its greedy answers alone.
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.request
from functools import cached_property
from typing import Any, TypeGuard

import torch

from ...errors import CheckpointError
from .texts import LENGTH, Text

SECONDS = 600  # to wait for one answer
GREEDY = {"max_tokens": LENGTH // 2, "temperature": 0}
NOT_LISTED = (
    "It does not list {model!r}, only: {listed}. Servers leave out adapters that they cannot load, such as those of "
    "ranks above --max-lora-rank; their log says why"
)
UNNAMED = "Say which model it is there, by --model NAME; for transformers serve that is the folder that it was given"
OTHER_TOKENS = (
    "{url} gives its answers as text alone, and {model} generated other tokens than the tokenizer makes of that, as "
    "models do that have hardly been trained: check the merged folder itself, or a server that gives tokens, as vLLM does"
)


class NoAnswer(CheckpointError):
    """Raised where a server refuses or does not answer; the message has its words."""


class Server:
    """A running server. url: of its root, or of /v1. tokenizer: of its model."""

    def __init__(self, url: str, tokenizer: Any):
        self.url, self.tokenizer = url.rstrip("/").removesuffix("/v1"), tokenizer

    def request(self, path: str, body: dict | None = None) -> dict:
        """Get the JSON at a path, or post `body` there and return the answer. Raises NoAnswer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/v1/{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            reason = " ".join(error.read(2000).decode(errors="replace").split())
            raise NoAnswer(f"{request.full_url} answers {error.code}: {reason}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:  # no connection, or no JSON
            raise NoAnswer(f"{request.full_url} does not answer: {error}") from error
        if not isinstance(answer, dict):
            raise NoAnswer(f"{request.full_url} answers {answer!r:.80}, which is no JSON object")
        return answer

    @cached_property
    def models(self) -> dict[str, str | None]:
        """List the names of models, each with the name of its base if it is an adapter; none where the server has no
        list."""
        try:
            listed = self.request("models").get("data")
        except NoAnswer:
            return {}
        models = [each for each in _objects(listed) if isinstance(each.get("id"), str)]
        parents = (each.get("parent") for each in models)
        return {each["id"]: name if isinstance(name, str) else None for each, name in zip(models, parents)}

    def base_of(self, name: str) -> str | None:
        """Find the model that the adapter `name` is on there; None where the server does not say, as of merged models."""
        base, _, adapter = name.partition(":")  # SGLang's names
        return self.models.get(name) or (base if adapter and base in self.models else None)

    def observe(self, model: str, texts: list[Text]) -> tuple[list[Text], torch.Tensor | None]:
        """Observe the log-probabilities of texts' tokens, one text after the other.

        Returns:
            The texts, or what the server generated from their beginnings; and the log-probabilities [tokens] by `model`,
            or None where all that is known is that each token is the model's first choice.
        Raises:
            NoAnswer: it refuses all three forms, or has no such model, or its texts do not tell their tokens.
        """
        refusals = []
        for score in (self._score_prompt, self._score_generated):
            try:
                answers = [score(model, text) for text in texts]
            except NoAnswer as error:
                refusals.append(error)
            else:
                return [text for text, _ in answers], torch.cat([log_p for _, log_p in answers])
        try:
            texts = [generated for text in texts if (generated := self._generate_greedily(model, text)) is not None]
        except NoAnswer as error:
            listed = ", ".join(self.models)
            if listed and model not in self.models:
                raise NoAnswer(f"{refusals[0]}. {NOT_LISTED.format(model=model, listed=listed)}") from error
            raise (refusals[0] if model else NoAnswer(f"{refusals[0]}. {UNNAMED}")) from error
        if not texts:
            raise NoAnswer(OTHER_TOKENS.format(url=self.url, model=model))
        return texts, None

    def _complete(self, **body: Any) -> dict:
        """Request a completion. Returns its first choice, with the "usage" added."""
        reply = self.request("completions", body)
        return {**next(iter(_objects(reply.get("choices"))), {}), "usage": reply.get("usage")}

    def _score_prompt(self, model: str, text: Text) -> tuple[Text, torch.Tensor]:
        """Get the log-probabilities of the text itself, as a prompt."""
        choice = self._complete(model=model, prompt=text.ids, echo=True, logprobs=1, max_tokens=1, temperature=0)
        return text, self._read_log_p(choice, text.start, len(text.ids))

    def _score_generated(self, model: str, text: Text) -> tuple[Text, torch.Tensor]:
        """Get the log-probabilities of tokens that the model generates after the text's first half."""
        prompt = text.ids[: (len(text.ids) + 1) // 2]
        choice = self._complete(model=model, prompt=prompt, logprobs=1, return_token_ids=True, **GREEDY)
        generated = choice.get("token_ids") or ()
        if not isinstance(generated, (list, tuple)) or not all(_is_token(each) for each in generated):
            raise NoAnswer(f"{self.url}: {model} answers with token_ids {generated!r:.80}, which are none")
        return Text((*prompt, *generated), len(prompt)), self._read_log_p(choice, 0, len(generated))

    def _generate_greedily(self, model: str, text: Text) -> Text | None:
        """Continue the text's first half greedily, and tokenize the answer; None where other tokens were generated."""
        prompt = self.tokenizer.decode(text.ids[: (len(text.ids) + 1) // 2], skip_special_tokens=True)
        choice = self._complete(model=model, prompt=prompt, **GREEDY)
        answer, usage = choice.get("text") or "", choice["usage"]
        if not isinstance(answer, str):
            raise NoAnswer(f"{self.url}: {model} answers {prompt!r} with {answer!r:.80}, which is no text")
        prompt_ids = self.tokenizer(prompt)["input_ids"]
        # apart: some tokenizers take the space off where an answer begins, and put it there again
        answer_ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        if not answer_ids:
            raise NoAnswer(f"{self.url}: {model} answers {prompt!r} with nothing")
        num_generated = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(num_generated, int) and num_generated - len(answer_ids) not in (0, 1):  # 1: the end of the text
            return None
        return Text((*prompt_ids, *answer_ids), max(1, len(prompt_ids)))

    def _read_log_p(self, choice: dict, begin: int, end: int) -> torch.Tensor:
        """Read the log-probabilities of the tokens from `begin` to `end`. Raises NoAnswer where an answer has others, or
        none."""
        logprobs = choice.get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        values = values[begin:end] if isinstance(values, list) else []
        if not values or len(values) != end - begin or not all(map(_is_finite, values)):
            raise NoAnswer(f"{self.url} gives no log-probabilities of these tokens")
        return torch.tensor(values, dtype=torch.float64, device="cpu")


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_token(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _objects(listed: Any) -> list[dict]:
    """Select the objects in a server's list; none where it is no list."""
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
