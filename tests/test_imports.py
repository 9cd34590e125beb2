"""What each part of FASER imports: no torch where nothing computes, nothing undeclared, and a missing extra by name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from faser.extras import PACKAGES

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Modules that run where torch is not installed.
WITHOUT_TORCH = [
    "faser", "faser.request", "faser.step", "faser.arrays", "faser.errors", "faser.engine.pages",
    "faser.engine.scheduler", "faser.engine.engine", "faser.engine.stats", "faser.policy", "faser.config",
    "faser.cli.main", "faser.text.tokenizer", "faser.engine.lookup", "faser.progress", "faser.models.config",
    "faser.text.chat", "faser.text.stream", "faser.cli.arguments", "faser.cli.terminal", "faser.cost.profile",
    "faser.cli.profile", "faser.text.grammar", "faser.bench.command", "faser.bench.remote", "faser.bench.systems",
    "faser.bench.report.page", "faser.bench.simulate", "faser.models.generation", "faser.vllm", "faser.vllm.patches",
    "faser.vllm.scheduling", "faser.vllm.dashboard", "faser.media.prepare", "faser.media.placement",
    "faser.media.fetch", "faser.media.load", "faser.media.messages", "faser.media.live", "faser.watch",
]  # fmt: skip
# Modules that need numpy and nothing else: a plugin for another engine uses them.
WITH_NUMPY_ALONE = [
    "faser.policy", "faser.cost.profile", "faser.engine.engine", "faser.step", "faser.request", "faser.vllm",
    "faser.vllm.scheduling", "faser.vllm.patches", "faser.vllm.dashboard",
]  # fmt: skip

WALL = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        root = name.split(".")[0]
        if {condition}:
            raise ModuleNotFoundError(name + " is behind the wall", name=name)
sys.meta_path.insert(0, Wall())
"""


def run(code: str, blocked: Iterable[str]) -> subprocess.CompletedProcess[str]:
    """Run Python code that cannot import the blocked packages."""
    return _run(code, f"root in {tuple(blocked)!r}")


def run_with_only(code: str, *packages: str) -> subprocess.CompletedProcess[str]:
    """Run Python code that can import these packages and the standard library alone."""
    return _run(code, f"root not in sys.stdlib_module_names and root not in {packages!r}")


def _run(code: str, condition: str) -> subprocess.CompletedProcess[str]:
    script = WALL.format(condition=condition) + code
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_the_module_imports_without_torch(module):
    done = run(f"import {module}", ("torch", "transformers", "safetensors", "huggingface_hub"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", WITH_NUMPY_ALONE)
def test_the_module_needs_numpy_and_the_standard_library_alone(module):
    done = run_with_only(f"import {module}", "faser", "numpy")
    assert done.returncode == 0, done.stderr


def test_the_wall_works():
    assert run("import faser.llm", ["torch"]).returncode != 0


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([], "chat"),
        (["generate"], "--policy"),
        (["chat"], "--system"),
        (["serve"], "--port"),
        (["completion"], "zsh"),
        (["bench"], "--policies"),
        (["profile"], "--budget"),
        (["simulate"], "--replicas"),
    ],
)
def test_help_needs_no_library_at_all(command, says):
    code = f"import faser.cli.main; faser.cli.main.main({[*command, '--help']!r})"
    done = run_with_only(code, "faser")
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_a_server_of_text_needs_no_decoder():
    done = run("import faser.server.app, faser.server.worker", PACKAGES["vision"])
    assert done.returncode == 0, done.stderr


# ---- missing extras ----


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["generate", "Hello"], "engine"),
        (["chat"], "engine"),
        (["profile"], "engine"),
        (["bench"], "engine"),
        (["bench", "--url", "http://127.0.0.1:1"], "engine"),
        (["bench", "--url", "http://127.0.0.1:1", "--workload", "w", "--report", "r"], "bench"),
        (["simulate", "--report", "r"], "bench"),
        (["serve"], "server"),
    ],
)
def test_a_command_names_its_missing_extra_in_one_line(command, extra):
    code = f"import sys, faser.cli.main; sys.exit(faser.cli.main.main({command!r}))"
    done = run(code, PACKAGES[extra])
    missing = ", ".join(PACKAGES[extra])
    assert done.stderr == (
        f"faser {command[0]}: {missing} are missing; install them with: pip install 'faser[{extra}]'\n"
    )
    assert done.returncode == 1


@pytest.mark.parametrize("package", PACKAGES["server"])
def test_serve_names_any_one_missing_package(package):
    done = run("import sys, faser.cli.main; sys.exit(faser.cli.main.main(['serve']))", [package])
    assert done.stderr == f"faser serve: {package} is missing; install it with: pip install 'faser[server]'\n"


def test_importing_llm_names_the_missing_extra():
    done = run("from faser import LLM", ["torch"])
    right = "faser.errors.MissingPackage: torch is missing; install it with: pip install 'faser[engine]'"
    assert done.stderr.splitlines()[-1] == right


# ---- what pyproject.toml declares ----

IMPORT_NAMES = {"cuda-bindings": "cuda", "pillow": "PIL"}  # where it is not the name of the distribution
# Which extras the modules of a folder may need, besides the plain installation.
EXTRAS_OF = {
    "models": ("engine",),
    "text": ("engine",),
    "media": ("vision",),
    "build.py": ("engine",),
    "llm.py": ("engine",),
    "runtime": ("engine", "gpu"),
    "bench": ("engine", "bench"),
    "server": ("engine", "server"),
    "vllm": ("engine", "vllm", "gpu"),  # vLLM on a GPU brings Triton
}


def declared(extra: str | None) -> set[str]:
    """The import names of what an extra lists itself; None: the plain installation."""
    requirements = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names} - {"faser"}


def imported_packages(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.split(".")[0]


def test_every_package_that_faser_imports_is_declared_for_the_part_that_imports_it():
    undeclared = set()
    for path in (ROOT / "faser").rglob("*.py"):
        part = path.relative_to(ROOT / "faser").parts[0]
        allowed = declared(None).union(*map(declared, EXTRAS_OF.get(part, ())), sys.stdlib_module_names, {"faser"})
        undeclared |= {(path.relative_to(ROOT).as_posix(), name) for name in set(imported_packages(path)) - allowed}
    assert undeclared == set()


def test_every_package_that_tests_and_tools_import_is_declared():
    allowed = declared(None).union(*map(declared, PROJECT["optional-dependencies"]), sys.stdlib_module_names)
    files = [path for folder in ("tests", "tools") for path in (ROOT / folder).rglob("*.py")]
    found = {name for path in files for name in imported_packages(path)}
    assert found - allowed - {"faser", "tests", "tools", "benchmarks"} == set()


@pytest.mark.parametrize("extra", PACKAGES)
def test_what_a_part_checks_for_is_what_its_extra_installs(extra):
    engine = declared("engine") if extra == "server" else set()
    assert set(PACKAGES[extra]) <= declared(extra) | engine
