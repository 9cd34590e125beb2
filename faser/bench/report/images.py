"""Charts as PNG files, drawn by a browser of this machine; without one there are none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from markupsafe import Markup

from faser.bench.report.svg import standalone

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER_SECONDS = 60.0  # for one image


def browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def write_images(directory: Path, images: Mapping[str, Markup], say: Callable[[str], None]) -> list[Path]:
    """Returns the files written. After the first failure none is tried: the next would fail too."""
    program = browser()
    if program is None:
        say(f"no PNGs beside the report: none of {', '.join(BROWSERS)} is on the path")
        return []
    written = []
    for name, chart in images.items():
        path = directory / name
        try:
            _photograph(program, chart, path)
        except (OSError, subprocess.SubprocessError) as error:
            say(f"no {name} beside the report: {program} failed ({error})")
            break
        written.append(path)
    return written


def _photograph(program: str, chart: Markup, path: Path) -> None:
    """A chart on white at twice its size. The browser has a temporary profile."""
    width, height = (int(number) for number in chart.partition('viewBox="0 0 ')[2].partition('"')[0].split())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page, picture = Path(folder) / "chart.html", Path(folder) / "chart.png"
        style = f"body{{margin:16px;background:#fff}}svg{{width:{width}px;display:block}}"
        page.write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style>{standalone(chart)}", "utf-8")
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
            "--hide-scrollbars", "--force-device-scale-factor=2", f"--window-size={width + 32},{height + 32}",
            f"--user-data-dir={folder}/profile", f"--screenshot={picture}", page.as_uri(),
        ]  # fmt: skip
        _run_alone([program, *flags])
        shutil.copyfile(picture, path)


def _run_alone(command: Sequence[str]) -> None:
    """In its own session: Ctrl-C in the terminal does not reach it, and its child processes end with it."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True) as process:
        try:
            status = process.wait(BROWSER_SECONDS)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    if status:
        raise subprocess.CalledProcessError(status, command[0])
