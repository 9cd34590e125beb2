"""From the journal of benchmarks/heads.py to tables, ratios and whether they reach their aims.

A loop has a mode, a policy, a text, a temperature and a batch. Figures measured later replace earlier ones. Imports the
standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.lib.head_models import HEADS
from benchmarks.lib.journal import Figures, failures, latest

OVER_MODEL = {1: 1.25, 4: 1.25, 16: 1.25, 64: 1.1}  # by batch
OVER_VLLM = 1.3
OVER_OFF = 1.0
PUBLISHED_MS = {("chat", 1): 1.6, ("code", 1): 1.1, ("chat", 16): 2.1, ("chat", 64): 3.5}
IDLE = 1.01
EQUAL = 0.03

Setting = tuple[str, float, int]  # text, temperature, batch
Ways = Mapping[tuple[str, str], Figures]  # the loops of a setting by mode and policy


@dataclass(frozen=True)
class Aim:
    """A figure beside what was hoped for; no aim: for information."""

    what: str
    where: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def holds(self) -> bool | None:
        if self.at_least is None and self.at_most is None:
            return None
        low, high = self.at_least, self.at_most
        return (low is None or self.value >= low) and (high is None or self.value <= high)

    def __str__(self) -> str:
        bounds = [f"at least {self.at_least:g}"] if self.at_least is not None else []
        bounds += [f"at most {self.at_most:g}"] if self.at_most is not None else []
        figure = f"{self.what}, {self.where}: {self.value:.3f}"
        return f"{figure}  (aim: {', '.join(bounds)})  {'reached' if self.holds else 'MISSED'}" if bounds else figure


def summarize(records: Sequence[Figures]) -> Figures:
    """All figures, then the aims."""
    loops = loops_of(records)
    return {
        "loops": [
            {"text": text, "temperature": temperature, "batch": batch, "ways": _ways(ways)}
            for (text, temperature, batch), ways in loops.items()
        ],
        "published": [_plain(record) for record in latest(records, "published", *_PUBLISHED).values()],
        "idle": [_plain(record) for record in latest(records, "idle", "mode", "batch").values()],
        "equal": [_plain(record) for record in latest(records, "equal", "mode", "text", "length").values()],
        "starts_s": {mode: record["seconds"] for (mode,), record in latest(records, "start", "mode").items()},
        "aims": [asdict(aim) | {"holds": aim.holds} for aim in aims(records)],
        "failed": failures(records),
    }


_PUBLISHED = ("head", "policy", "text", "batch")


def _plain(record: Figures) -> Figures:
    return {name: value for name, value in record.items() if name not in ("kind", "session")}


def _ways(ways: Ways) -> dict[str, list[float]]:
    """Milliseconds a token and tokens a step."""
    return {" ".join(way): [record["tpot_ms"], record["tokens_per_step"]] for way, record in ways.items()}


def loops_of(records: Sequence[Figures]) -> dict[Setting, dict[tuple[str, str], Figures]]:
    found: dict[Setting, dict[tuple[str, str], Figures]] = {}
    for key, record in latest(records, "loop", "text", "temperature", "batch", "mode", "policy").items():
        text, temperature, batch, mode, policy = key
        found.setdefault((text, temperature, batch), {})[mode, policy] = record
    return dict(sorted(found.items(), key=lambda item: (item[0][0] != "specbench", item[0][1:])))


# ── aims ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def aims(records: Sequence[Figures]) -> list[Aim]:
    loops = [aim for setting, ways in loops_of(records).items() for aim in _loop_aims(setting, ways)]
    return [*loops, *_published_aims(records), *_idle_aims(records), *_equal_aims(records)]


def fastest(ways: Ways, chosen: Callable[[str, str], bool]) -> float | None:
    """Milliseconds a token under the best of these modes and policies."""
    return min((record["tpot_ms"] for way, record in ways.items() if chosen(*way)), default=None)


def _loop_aims(setting: Setting, ways: Ways) -> Iterator[Aim]:
    text, temperature, batch = setting
    where = f"{text}, temperature {temperature:g}, batch {batch}"
    heads, eagle3 = (fastest(ways, lambda mode, _, these=these: mode in these) for these in (HEADS, ("eagle3",)))
    theirs = fastest(ways, lambda mode, _: mode.startswith("vllm:eagle3"))
    others = fastest(ways, lambda mode, _: mode.startswith("vllm:") and not mode.startswith("vllm:eagle3"))
    off, model = fastest(ways, lambda mode, _: mode == "off"), fastest(ways, lambda mode, _: mode == "model")
    ratios: list[tuple[str, float | None, float | None, float | None]] = [
        ("best head over the draft model", model, heads, OVER_MODEL.get(batch)),
        ("EAGLE-3 over vLLM with the same head", theirs, eagle3, OVER_VLLM),
        ("best head over vLLM's best other mode", others, heads, None),
    ]
    for head in HEADS:
        own = fastest(ways, lambda mode, policy, head=head: (mode, policy) == (head, "faser"))
        ratios.append((f"{head} under faser over off", off, own, OVER_OFF))
    for what, slower, faster, aim in ratios:
        if slower is not None and faster is not None:
            yield Aim(what, where, round(slower / faster, 4), at_least=aim)


def _published_aims(records: Sequence[Figures]) -> Iterator[Aim]:
    found = latest(records, "published", *_PUBLISHED).values()
    for text, batch in dict.fromkeys((record["text"], record["batch"]) for record in found):
        best = min(_at(found, text, batch), key=lambda record: record["tpot_ms"])
        where = f"{text}, batch {batch}, {best['head']} {best['policy']}"
        yield Aim("ms a token at published acceptance", where, best["tpot_ms"], at_most=PUBLISHED_MS.get((text, batch)))


def _at(records: Iterable[Figures], text: str, batch: int) -> list[Figures]:
    return [record for record in records if (record["text"], record["batch"]) == (text, batch)]


def _idle_aims(records: Sequence[Figures]) -> Iterator[Aim]:
    for (mode, batch), record in latest(records, "idle", "mode", "batch").items():
        what = "a step with the head off over one without a draft"
        yield Aim(what, f"{mode}, batch {batch}", record["ratio"], at_most=IDLE)


def _equal_aims(records: Sequence[Figures]) -> Iterator[Aim]:
    found = latest(records, "equal", "mode", "text", "length")
    for (mode, text, length), theirs in found.items():
        ours = found.get(("eagle3", text, length))
        if mode.startswith("vllm:") and ours is not None:
            value = round(ours["tokens_per_draft"] / theirs["tokens_per_draft"], 4)
            yield Aim("tokens a verification, ours over vLLM's", f"{text}, {mode}", value, 1 - EQUAL, 1 + EQUAL)


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def tables(records: Sequence[Figures]) -> str:
    """Milliseconds a token (tokens a step): a table in Markdown for each text and temperature, then the aims."""
    loops = loops_of(records)
    parts = []
    for text, temperature in dict.fromkeys(setting[:2] for setting in loops):
        some = {setting[2]: ways for setting, ways in loops.items() if setting[:2] == (text, temperature)}
        parts.append(f"{text}, temperature {temperature:g}: ms a token (tokens a step)\n\n{_table(some)}\n")
    return "\n".join([*parts, *map(str, aims(records))])


def _table(by_batch: Mapping[int, Ways]) -> str:
    lines = ["| | " + " | ".join(map(str, by_batch)) + " |", "|---" * (len(by_batch) + 1) + "|"]
    for way in dict.fromkeys(way for ways in by_batch.values() for way in ways):
        cells = [_cell(ways.get(way)) for ways in by_batch.values()]
        lines.append(f"| {' '.join(way)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(record: Figures | None) -> str:
    return "" if record is None else f"{record['tpot_ms']:.2f} ({record['tokens_per_step']:.2f})"
