"""The wall around torch: what plans, decides and counts must run where torch is not installed."""

import subprocess
import sys

import pytest

FREE = [
    "faser", "faser.request", "faser.step", "faser.arrays", "faser.errors", "faser.engine.pages",
    "faser.engine.scheduler", "faser.engine.engine", "faser.engine.stats", "faser.policy", "faser.config",
    "faser.cli.main", "faser.text.tokenizer", "faser.runtime.ngram", "faser.progress", "faser.models.config",
    "faser.text.chat", "faser.text.stream", "faser.cli.arguments", "faser.cli.terminal", "faser.cost.profile",
    "faser.cli.profile", "faser.text.grammar", "faser.bench.command", "faser.bench.remote", "faser.bench.systems",
    "faser.bench.report.page", "faser.bench.simulate", "faser.models.generation",
]  # fmt: skip

BLOCK = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " is behind the wall")
sys.meta_path.insert(0, Wall())
"""


def run(code: str, blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    script = BLOCK.format(blocked=blocked) + code
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", FREE)
def test_the_module_imports_without_torch(module):
    done = run(f"import {module}", ("torch", "transformers", "safetensors", "huggingface_hub"))
    assert done.returncode == 0, done.stderr


def test_the_wall_works():
    assert run("import faser.llm", ("torch",)).returncode != 0


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
    libraries = ("jinja2", "shtab", "starlette", "uvicorn", "msgspec", "llguidance", "prometheus_client")
    done = run(code, ("torch", "numpy", "tokenizers", "rich", "safetensors", "huggingface_hub", "gguf", *libraries))
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
