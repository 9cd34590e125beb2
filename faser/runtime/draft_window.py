"""What a draft attends to: the whole context, or the first few tokens and the last N (`--draft-window`).

A draft (a model or a head) with a window reads and keeps less KV, and drafts for contexts longer than those it was
trained on. The first tokens are kept because attention leans on them whatever they say.
"""

from __future__ import annotations

from faser.errors import ConfigError
from faser.limits import DRAFT_SINKS, KeyWindow
from faser.models.config import ModelConfig

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
        return _own_window(draft, max_model_len) if draft is not None and is_head else None
    trained = draft.max_positions
    if isinstance(asked, int):
        if asked + DRAFT_SINKS > trained:
            raise ConfigError(
                f"draft_window={asked}: the draft was trained on {trained} tokens; give at most {trained - DRAFT_SINKS}"
            )
        return KeyWindow(asked, DRAFT_SINKS) if asked + DRAFT_SINKS < max_model_len else None
    size = min(USUAL_SIZE, trained - DRAFT_SINKS)
    if asked == "off" or size < KeyWindow.LEAST_SIZE:
        return None
    is_long = device == "cpu" and not is_head and max_model_len >= FEW_WINDOWS * (size + DRAFT_SINKS)
    return KeyWindow(size, DRAFT_SINKS) if is_long or max_model_len > trained else None


def _own_window(head: ModelConfig, max_model_len: int) -> KeyWindow | None:
    """That of a head whose layers all have the same: it begins again without a loss, for its keys follow from features.

    None: it computes its keys of whole contexts, and its layers see what its config says.
    """
    window = head.page_window
    is_long = window is not None and KeyWindow.LEAST_SIZE <= window.size < max_model_len
    return window if is_long and len(set(head.windows)) == 1 else None
