"""`faser watch`: a question about a video, answered window by window."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from statistics import median

from faser.errors import InvalidRequest
from faser.watch import StageSeconds, WindowAnswer

_STAGES = {"decode": "decode", "encode": "ViT", "prefill": "prefill", "answer": "answer"}


def print_answers(answers: Iterable[WindowAnswer], as_json: bool) -> None:
    """A line for each window as soon as it is answered; at the end, on stderr, what a window took."""
    seconds = []
    for answer in answers:
        print(json.dumps(as_dict(answer)) if as_json else as_line(answer), flush=True)
        seconds.append(answer.seconds)
    if not seconds:
        raise InvalidRequest("video without frames: expected at least one; it is damaged or was cut")
    print(summarise(seconds), file=sys.stderr)


def as_dict(answer: WindowAnswer) -> dict[str, object]:
    """The answer with its stages in milliseconds."""
    found = asdict(answer)
    stages = {name: round(1e3 * value, 3) for name, value in found.pop("seconds").items()}
    return {**found, "kept": round(answer.kept, 4), "milliseconds": stages}


def as_line(answer: WindowAnswer) -> str:
    text = " ".join(answer.text.split())
    grids = answer.grids_encoded + answer.grids_found
    encoded = f"{answer.grids_encoded} of {grids} grids encoded" if grids else "nothing encoded"
    figures = [", ".join(_stages(answer.seconds)), encoded]
    if answer.pruning != "none":
        figures.append(f"{answer.kept:.0%} of patches kept by {answer.pruning}")
    figures += _reuse(answer)
    return f"{answer.start:7.1f} to {answer.end:.1f} s  {text}  [{'; '.join(figures)}]"


def _reuse(answer: WindowAnswer) -> Iterator[str]:
    state = answer.reuse
    if state.is_on:
        yield f"{state.num_tokens} of {answer.num_tokens} tokens reused"
    if state.num_checks:
        ended = "" if state.is_on else ", so reuse has stopped"
        yield f"{state.num_differing} of {state.num_checks} checked answers differed{ended}"


def _stages(seconds: StageSeconds) -> Iterator[str]:
    for name, shown in _STAGES.items():
        yield f"{shown} {1e3 * getattr(seconds, name):.0f} ms"


def summarise(seconds: Sequence[StageSeconds]) -> str:
    """Medians over all windows."""
    typical = StageSeconds(**{name: median(getattr(each, name) for each in seconds) for name in _STAGES})
    return f"{len(seconds)} windows; median of each stage: {', '.join(_stages(typical))}"
