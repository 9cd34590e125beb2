"""A small model with a chat template, and a server of it."""

import json
from importlib.util import find_spec

import pytest

from tests.server.running import running
from tests.server.web import chromium

if find_spec("starlette") is None:  # without the server's packages its modules cannot be imported
    collect_ignore_glob = ["test_*.py"]

TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    """As `folder`, with room for longer texts and a chat template."""
    from tests.checkpoint import write_checkpoint

    path = tmp_path_factory.mktemp("chat-model")
    write_checkpoint(path, max_position_embeddings=512)
    settings = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="session")
def server(chat_folder, tmp_path_factory):
    """Speculates by prompt lookup, three tokens at a time."""
    flags = ("--draft", "ngram", "--policy", "fixed:3", "--served-model-name", "tiny")
    with running(chat_folder, tmp_path_factory.mktemp("server"), *flags) as found:
        yield found


@pytest.fixture(scope="session")
def seeing_folder(tmp_path_factory):
    """A small random model with eyes."""
    from tests.server.seeing import write_seeing_checkpoint

    path = tmp_path_factory.mktemp("seeing-model")
    write_seeing_checkpoint(path)
    return path


@pytest.fixture(scope="session")
def seeing_server(seeing_folder, tmp_path_factory):
    flags = ("--draft", "ngram", "--policy", "fixed:3", "--served-model-name", "tiny")
    with running(seeing_folder, tmp_path_factory.mktemp("log"), *flags) as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    """Per module: while it runs, no other event loop can run in this thread."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def plain_server(chat_folder, tmp_path_factory):
    """The same model without speculation."""
    with running(chat_folder, tmp_path_factory.mktemp("plain"), "--served-model-name", "tiny") as found:
        yield found


@pytest.fixture
def paced(chat_folder, tmp_path):
    """Starts servers whose engine takes a while for every step."""
    from functools import partial

    return partial(running, chat_folder, tmp_path, factory="tests.server.paced_engine:make")
