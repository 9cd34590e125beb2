"""The optional parts of FASER, and the command that installs a missing one.

A plain `pip install faser` has policies, the cost model, the simulator and the command line. pyproject.toml declares
what each extra brings. Here are the packages without which a part cannot start; others are looked for when a request or
a model needs them. Imports the standard library alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from faser.errors import MissingPackage

ENGINE = ("torch", "safetensors", "tokenizers", "jinja2")
PACKAGES = {
    "engine": ENGINE,
    "server": (*ENGINE, "starlette", "uvicorn", "httptools", "msgspec", "prometheus_client"),
    "bench": ("jinja2", "markupsafe"),
    "vision": ("PIL", "av"),
}


def require(extra: str) -> None:
    """Raise MissingPackage unless the packages of this extra can be imported. Imports none of them."""
    missing = [package for package in PACKAGES[extra] if not _is_installed(package)]
    if missing:
        raise MissingPackage(install_hint(extra, missing))


def install_hint(extra: str, missing: Sequence[str]) -> str:
    """The one line for a user: which packages are missing, and the command that installs them."""
    verb, them = ("is", "it") if len(missing) == 1 else ("are", "them")
    return f"{', '.join(missing)} {verb} missing; install {them} with: pip install 'faser[{extra}]'"


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:
        return False
