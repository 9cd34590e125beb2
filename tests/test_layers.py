"""The shape of the package: no module imports upwards, and no two classes share a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# From low to high. Modules of one layer may import each other.
LAYERS = (
    ("errors", "arrays", "extras", "machine", "progress", "threads"),
    ("vision", "request", "limits", "rules"),
    ("step",),
    ("cost",),
    ("policy",),
    ("engine",),
    ("text", "media", "models"),
    ("runtime",),
    ("config", "build", "llm", "watch"),
    ("traffic",),
    ("sim",),
    ("bench",),
    ("server",),
    ("cli",),
    ("vllm",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imported_modules(path: Path) -> Iterator[str]:
    """Modules of faser that the file imports, for type checking alone or inside a function too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("faser."))
        elif isinstance(node, ast.ImportFrom) and node.module == "faser":
            yield from (f"faser.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("faser."):
            yield node.module


def upward_imports() -> set[tuple[str, str]]:
    found = set()
    for path in (ROOT / "faser").rglob("*.py"):
        file = path.relative_to(ROOT).as_posix()
        layer = path.relative_to(ROOT / "faser").parts[0].removesuffix(".py")
        if layer != "__init__":  # the public names, loaded when they are first used
            found |= {(file, module) for module in imported_modules(path) if RANK[module.split(".")[1]] > RANK[layer]}
    return found


def test_every_module_has_a_layer():
    packages = {path.parent.name for path in (ROOT / "faser").glob("*/__init__.py")}
    modules = {path.stem for path in (ROOT / "faser").glob("*.py")} - {"__init__"}
    assert packages | modules <= set(RANK)


def test_no_module_imports_upwards():
    assert upward_imports() == set()


def test_imports_for_type_checking_and_inside_functions_count(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from faser.llm import LLM\n"
        "def late():\n    import faser.cli.main\n    from faser import sim\n"
    )
    assert set(imported_modules(file)) == {"faser.llm", "faser.cli.main", "faser.sim"}


def test_no_two_classes_share_a_name():
    files: dict[str, list[str]] = {}
    for path in (ROOT / "faser").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name.lstrip("_"), []).append(path.relative_to(ROOT).as_posix())
    assert {name: where for name, where in files.items() if len(where) > 1} == {}
