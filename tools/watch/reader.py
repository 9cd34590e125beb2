"""The frozen language model behind the eyes: prompts, and how likely its answers are.

Knows the chat format, the tokens of a prompt and a forward pass that gradients go through. Knows nothing of pixels, of
scenes or of training. The model's weights never change.

Several questions about one window share its tokens: behind the window each question is a branch, which sees the
beginning, the window and itself, at the positions it would have alone. So a window is read once, and every answer is
what a prompt with one question gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from faser.models.transformer import Transformer
from tools.distill import SYSTEM, layer_weights, run_layer
from tools.watch.questions import QUESTIONS, Question

# Special tokens of SmolLM2 that no chat uses: they stand for tokens of a picture and of a video.
IMAGE_TOKEN, VIDEO_TOKEN = "<jupyter_script>", "<empty_output>"
BEGINNING = SYSTEM + "<|im_start|>user\n"
ENDING = "<|im_end|>"
BRANCH_LENGTH = 24  # tokens of the longest question with its answer, and one more


class Encodes(Protocol):
    def encode(self, text: str) -> Sequence[int]: ...


def branch_text(question: str) -> str:
    """What follows the window in a prompt."""
    return f"\n{question}{ENDING}\n<|im_start|>assistant\n"


@dataclass(frozen=True, eq=False)
class Branches:
    """The questions of some windows as tokens; what follows an answer's end is padding."""

    ids: Tensor  # [windows, questions, tokens]
    answer_at: Tensor  # [windows, questions] index of the answer's token in its branch; its end follows


class Prompts:
    """Texts to tokens. Every answer must be one token."""

    def __init__(self, tokenizer: Encodes, length: int = BRANCH_LENGTH) -> None:
        self._tokenizer, self.length = tokenizer, length
        self.beginning = list(tokenizer.encode(BEGINNING))
        (self.end,) = tokenizer.encode(ENDING)
        self.answer_ids = {answer: self.word(answer) for _, answers, _ in QUESTIONS.values() for answer in answers}
        self.encode = lru_cache(maxsize=4096)(self._encode)

    def __reduce__(self) -> tuple[type[Prompts], tuple[Encodes, int]]:
        return Prompts, (self._tokenizer, self.length)  # a cache does not travel to another process

    def word(self, text: str) -> int:
        ids = self._tokenizer.encode(text)
        assert len(ids) == 1, f"{text!r} has {len(ids)} tokens; expected one"
        return int(ids[0])

    def _encode(self, question: Question) -> tuple[list[int], int]:
        ids = list(self._tokenizer.encode(branch_text(question.text)))
        assert len(ids) + 2 <= self.length, f"{question.text!r} has {len(ids) + 2} tokens; expected {self.length}"
        filled = [*ids, self.answer_ids[question.answer], self.end]
        return filled + [self.end] * (self.length - len(filled)), len(ids)

    def branches(self, questions: Sequence[Question]) -> tuple[Tensor, Tensor]:
        """Of one window: ids [questions, tokens], places of answers [questions]."""
        encoded = [self.encode(question) for question in questions]
        return torch.tensor([ids for ids, _ in encoded]), torch.tensor([at for _, at in encoded])


def branch_layout(shared: int, branches: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions [tokens] and mask [tokens, tokens] of `shared` tokens and the branches behind, all of one length."""
    branch = torch.arange(branches, device=device).repeat_interleave(length)
    owner = torch.cat((torch.full((shared,), -1, device=device), branch))
    steps = torch.arange(length, device=device).repeat(branches) + shared
    positions = torch.cat((torch.arange(shared, device=device), steps))
    index = torch.arange(len(owner), device=device)
    is_before = index[None] <= index[:, None]
    return positions, is_before & ((owner[None] == -1) | (owner[None] == owner[:, None]))


class Reader:
    def __init__(self, model: Transformer, prompts: Prompts, run: Callable[..., Tensor] = run_layer) -> None:
        self.model, self.prompts, self._run = model, prompts, run
        beginning = torch.tensor(prompts.beginning, device=model.device)
        self._beginning = model.embed(beginning).detach()  # [tokens, hidden]

    def answer_logits(self, seen: Tensor, branches: Branches) -> Tensor:
        """Logits of the answer and of its end [windows, questions, 2, vocabulary].

        seen [windows, tokens, hidden]: what the eyes give; no tokens: the model without eyes.
        """
        windows, questions, length = branches.ids.shape
        beginning = self._beginning.expand(windows, -1, -1)
        text = self.model.embed(branches.ids.flatten(1))
        x = torch.cat((beginning, seen.to(beginning.dtype), text), dim=1)
        shared = x.shape[1] - questions * length
        hidden = self._hidden(x, *branch_layout(shared, questions, length, x.device))
        behind = hidden[:, shared:].view(windows, questions, length, -1)
        # The token before the answer predicts it; the answer predicts its end.
        places = branches.answer_at[..., None] + torch.tensor([-1, 0], device=x.device)
        picked = behind.gather(2, places[..., None].expand(-1, -1, -1, behind.shape[-1]))
        return F.linear(picked, self.model.head).float()

    def _hidden(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        model = self.model
        cos, sin = model.cos[positions], model.sin[positions]
        for index in range(model.num_layers):
            x = self._run(model.config, layer_weights(model, index), x, cos, sin, mask)
        return F.rms_norm(x, x.shape[-1:], model.final_norm, model.config.norm_eps)

    def right_ids(self, branches: Branches) -> Tensor:
        """[windows, questions, 2] the answer and its end."""
        places = branches.answer_at[..., None] + torch.tensor([0, 1], device=branches.ids.device)
        return branches.ids.gather(2, places)
