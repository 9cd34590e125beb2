"""What a draft attends to: the whole context, or the first few tokens and the last N (`--draft-window`).

A draft (a model or a head) with a window reads and keeps less KV, and drafts for contexts longer than those it was
trained on. The first tokens are kept because attention leans on them whatever they say.
"""

from __future__ import annotations

from faser.errors import ConfigError
from faser.limits import KeyWindow
from faser.models.config import ModelConfig

SINKS = 4
USUAL_SIZE = 1024
FEW_WINDOWS = 4  # a context of fewer windows: `auto` shows whole contexts


def choose_window(
    asked: str | int, draft: ModelConfig | None, is_head: bool, max_model_len: int, device: str
) -> KeyWindow | None:
    """The window of a draft; None: it sees whole contexts. `asked` as in EngineOptions.

    On a GPU and of heads windows have not been measured yet, so `auto` takes one only where a draft could not draft
    without.
    """
    if draft is None or draft.windows:
        if isinstance(asked, int):
            why = f"the draft {'head' if is_head else 'model'} has windows of its own"
            why = "there is no draft model" if draft is None else why
            raise ConfigError(f"draft_window={asked}: {why}; use auto or off")
        return None
    trained = draft.max_positions
    if isinstance(asked, int):
        if asked + SINKS > trained:
            raise ConfigError(
                f"draft_window={asked}: the draft was trained on {trained} tokens; give at most {trained - SINKS}"
            )
        return KeyWindow(asked, SINKS) if asked + SINKS < max_model_len else None
    size = min(USUAL_SIZE, trained - SINKS)
    if asked == "off" or size < KeyWindow.LEAST_SIZE:
        return None
    is_long = device == "cpu" and not is_head and max_model_len >= FEW_WINDOWS * (size + SINKS)
    return KeyWindow(size, SINKS) if is_long or max_model_len > trained else None
