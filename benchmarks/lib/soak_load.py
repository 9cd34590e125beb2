"""The requests of benchmarks/soak.py: drawn from a seed, good and bad, each with the answer that it must get."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.lib.http_client import read_texts
from benchmarks.lib.soak_models import NUM_FRAMES, RATE, STRIDE, WINDOW, Media, Models

MAX_MODEL_LEN = 512
MIB = 2**20
COMPLETIONS, CHAT, SESSIONS = "/v1/completions", "/v1/chat/completions", "/v1/video/sessions"
LEAVING = ("leaves mid-stream", "leaves before a token", "leaves mid-body")
SLOW, SESSION, LEFT_SESSION = "reads slowly", "video session", "leaves a session"
EXPRESSIONS = ("[a-z]{2,5}", "(yes|no), [0-9]{1,3}", "#[0-9a-f]{6}")
NUM_WINDOWS = -(-(NUM_FRAMES - WINDOW) // STRIDE) + 1  # the last window may be shorter


@dataclass(frozen=True)
class Item:
    """One request and its expected result."""

    number: int
    kind: str
    path: str
    body: dict[str, Any]
    raw: bytes | None = None  # sent instead of the body
    status: int = 200
    code: str | None = None  # of the expected error
    leave_after: int = 0  # events after which the client leaves the stream
    delay: float = 0.0  # seconds before leaving
    farewell: bool = True  # close, or abort
    pause: float = 0.0  # seconds before each event is read
    stream: bytes = b""  # of a video session

    @property
    def data(self) -> bytes:
        return self.raw if self.raw is not None else json.dumps(self.body).encode()

    @property
    def num_choices(self) -> int:
        return NUM_WINDOWS if self.is_session else int(self.body.get("n", 1))

    @property
    def is_session(self) -> bool:
        return bool(self.stream)


class Load:
    """Random items. `media`: what is shown to a model that sees."""

    def __init__(self, seed: int, models: Models, media: Media | None = None) -> None:
        self._random = random.Random(seed)
        self._texts = read_texts()
        self._models = models
        self._media = media
        self._makers: dict[str, tuple[int, Callable[[int], Item]]] = {
            "completes": (72, self._good),
            LEAVING[0]: (6, self._leaves_stream),
            LEAVING[1]: (4, self._leaves_early),
            LEAVING[2]: (3, self._leaves_body),
            "broken JSON": (3, self._broken),
            "wrong type": (3, self._wrong_type),
            "unknown field": (3, self._unknown_field),
            "prompt too long": (3, self._too_long),
            "body too large": (1, self._too_large),
            "wrong model": (2, self._wrong_model),
            SLOW: (3, self._slow),
        }
        if media is not None:
            self._makers |= {
                "sees": (12, self._seeing),
                "broken picture": (2, self._broken_picture),
                SESSION: (1, self._session),
                LEFT_SESSION: (1, self._left_session),
            }

    def draw(self, count: int) -> list[Item]:
        kinds = list(self._makers)
        weights = [self._makers[kind][0] for kind in kinds]
        drawn = self._random.choices(kinds, weights, k=count)
        return [replace(self._makers[kind][1](number), kind=kind) for number, kind in enumerate(drawn)]

    # ── good ones ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _good(self, number: int) -> Item:
        chance = self._random.random
        path = self._random.choice((COMPLETIONS, CHAT))
        body: dict[str, Any] = {"max_tokens": self._random.randint(4, self._models.most_tokens), **self._sampling()}
        body |= self._prompt(path)
        if chance() < 0.6:
            body["stream"] = True
            if chance() < 0.5:
                body["stream_options"] = {"include_usage": True}
        if chance() < 0.1:
            body["n"] = 2
        if chance() < 0.2:
            body["max_draft"] = self._random.choice((0, 1, 2))
        if chance() < 0.15:
            body |= {"logprobs": 2} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
        if chance() < 0.08:
            body["response_format"] = {"type": "json_object"}
        elif chance() < 0.08:
            body["structured_outputs"] = {"regex": self._random.choice(EXPRESSIONS)}
        elif chance() < 0.2:
            body["stop"] = self._random.choice((["\n"], [" the", "."], ["and", "zebra"], ","))
        return Item(number, "", path, body)

    def _sampling(self) -> dict[str, Any]:
        """Greedy, or sampled with a seed, so that a second run can be compared."""
        if self._random.random() < 0.5:
            return {"temperature": 0}
        sampled: dict[str, Any] = {"temperature": self._random.choice((0.5, 1.0, 1.3))}
        sampled["seed"] = self._random.getrandbits(31)
        if self._random.random() < 0.3:
            sampled["top_p"] = 0.9
        if self._random.random() < 0.2:
            sampled["top_k"] = 40
        if self._random.random() < 0.1:
            sampled["frequency_penalty"] = 0.5
        return sampled

    def _prompt(self, path: str) -> dict[str, Any]:
        text = self._text()
        if path == CHAT:
            return {"messages": [{"role": "user", "content": text}]}
        if self._random.random() < 0.1:
            count, last = self._random.randint(4, 64), self._models.vocabulary - 1
            return {"prompt": [self._random.randint(100, last) for _ in range(count)]}
        return {"prompt": text}

    def _text(self) -> str:
        """Short texts more often. Half of them have a beginning in common with others."""
        words = self._random.choice(self._texts).split()
        longest = self._models.longest
        text = " ".join(words[: round(math.exp(self._random.uniform(math.log(3), math.log(longest))))])
        return text[: MAX_MODEL_LEN // 2] if self._models.sees else text  # a token of these is a character or two

    def _slow(self, number: int) -> Item:
        item = self._good(number)
        return replace(item, body={**item.body, "stream": True}, pause=self._random.uniform(0.01, 0.1))

    # ── pictures and videos ──────────────────────────────────────────────────────────────────────────────────────────

    def _seeing(self, number: int) -> Item:
        """One to three pictures, or a video, and a question."""
        assert self._media is not None
        chance, parts = self._random, []
        if chance.random() < 0.7:
            urls = chance.choices(self._media.pictures, k=chance.randint(1, 3))
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        else:
            parts = [{"type": "video_url", "video_url": {"url": chance.choice(self._media.videos)}}]
        return self._asking(number, [*parts, {"type": "text", "text": self._text()[:100]}])

    def _asking(self, number: int, content: list[dict[str, Any]]) -> Item:
        body = {"messages": [{"role": "user", "content": content}], **self._sampling()}
        body["max_tokens"] = self._random.randint(4, 24)
        return Item(number, "", CHAT, body if self._random.random() < 0.5 else {**body, "stream": True})

    def _broken_picture(self, number: int) -> Item:
        assert self._media is not None
        whole = self._random.choice(self._media.pictures)
        broken = (whole[: len(whole) // 2], "data:image/png;base64,AAAA", "data:image/png;base64,$", whole[:-400])
        content = [{"type": "image_url", "image_url": {"url": self._random.choice(broken)}}]
        return replace(self._asking(number, content), status=400)

    def _session(self, number: int) -> Item:
        assert self._media is not None
        body = {"prompt": self._text()[:40], "window": WINDOW, "stride": STRIDE, "fps": RATE, "when_behind": "wait",
                "max_tokens": self._random.randint(2, 8)}  # fmt: skip
        return Item(number, "", SESSIONS, body, stream=self._random.choice(self._media.streams))

    def _left_session(self, number: int) -> Item:
        return replace(
            self._session(number), leave_after=self._random.randint(0, 2), farewell=self._random.random() < 0.5
        )

    # ── those that leave ─────────────────────────────────────────────────────────────────────────────────────────────

    def _leaves_stream(self, number: int) -> Item:
        item = self._good(number)
        body = {**item.body, "stream": True, "max_tokens": 48}
        return replace(item, body=body, leave_after=self._random.randint(1, 8), farewell=self._random.random() < 0.5)

    def _leaves_early(self, number: int) -> Item:
        return replace(self._good(number), delay=self._random.uniform(0, 0.3), farewell=self._random.random() < 0.7)

    def _leaves_body(self, number: int) -> Item:
        return replace(self._good(number), delay=self._random.uniform(0, 0.1), farewell=self._random.random() < 0.5)

    # ── bad ones ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _broken(self, number: int) -> Item:
        item = self._good(number)
        broken = (item.data[:-2], b"", b"[1, 2]", b'{"prompt": }', b"\xff\xfe" + item.data, b"null", b"[" * 5000)
        return replace(item, raw=self._random.choice(broken), status=400, code="invalid_json")

    def _wrong_type(self, number: int) -> Item:
        wrong = (
            {"max_tokens": "ten"}, {"max_tokens": 0}, {"temperature": 5}, {"temperature": "hot"}, {"n": 0}, {"n": 1.5},
            {"stream": "yes"}, {"stop": 3}, {"seed": "a"}, {"top_p": 0}, {"logit_bias": {"1": "x"}},
        )  # fmt: skip
        item = self._good(number)
        return replace(item, body={**item.body, **self._random.choice(wrong)}, status=400, code="invalid_value")

    def _unknown_field(self, number: int) -> Item:
        field_, code = self._random.choice(
            ((("max_token", 3), "unknown_field"), (("best_of", 4), "unsupported_field"),
             (("stream_options", {"usage": True}), "unknown_field"), (("x" * 300, None), "unknown_field"))
        )  # fmt: skip
        item = self._good(number)
        return replace(item, body={**item.body, field_[0]: field_[1]}, status=400, code=code)

    def _too_long(self, number: int) -> Item:
        """Too long by itself, or with its output."""
        item = replace(self._good(number), status=400, code="context_length_exceeded")
        long = "word " * self._random.choice((MAX_MODEL_LEN, 5 * MAX_MODEL_LEN, 100 * MAX_MODEL_LEN))
        prompts = ({"prompt": [7] * MAX_MODEL_LEN}, {"prompt": long}, {"prompt": "Hello", "max_tokens": MAX_MODEL_LEN})
        chats = ({"messages": [{"role": "user", "content": long}]}, {"max_tokens": MAX_MODEL_LEN})
        chosen = self._random.choice(prompts if item.path == COMPLETIONS else chats)
        return replace(item, body={**item.body, **chosen})

    def _too_large(self, number: int) -> Item:
        item = self._good(number)
        return replace(item, body={**item.body, "user": "x" * (3 * MIB)}, status=413, code="body_too_large")

    def _wrong_model(self, number: int) -> Item:
        item = self._good(number)
        return replace(item, body={**item.body, "model": "gpt-4o"}, status=404, code="model_not_found")
