"""The tokenizer's configuration, for clients that tokenise as the server does."""

import asyncio
import json

import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.errors import InvalidRequestError
from paxkv.server.app import create_app
from paxkv.server.routes.tokenizer_info import TokenizerInfoRoutes
from paxkv.text.chat_template import ChatTemplate
from paxkv.text.tokenizer import Tokenizer
from tests.paxkv.fake_build import save_tokenizer
from tests.paxkv.server.fake_engine import FakeEngine


def info(engine):
    (route,) = TokenizerInfoRoutes(engine).routes()
    return json.loads(asyncio.run(route.endpoint(None)).body)


def test_tokens_are_text_and_the_template_is_the_one_of_chats(tmp_path):
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {
        "bos_token": {"content": "<s>", "lstrip": False},
        "vocab_file": "/home/a/vocab.json",
        "model_max_length": 99,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    path.write_text(json.dumps(config))
    engine = FakeEngine()
    engine.tokenizer = Tokenizer.from_folder(tmp_path)
    engine.chat_template = ChatTemplate({"default": "{{ messages }}", "tool_use": "other"})
    assert info(engine) == {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "model_max_length": 99,
        "chat_template": "{{ messages }}",
    }
    engine.chat_template = None
    assert "chat_template" not in info(engine)


def test_model_without_a_tokenizer_is_a_clear_error():
    engine = FakeEngine()
    engine.tokenizer = None
    with pytest.raises(InvalidRequestError, match="without a tokenizer"):
        info(engine)


@pytest.mark.parametrize("is_on", [False, True])
def test_the_route_exists_only_if_enabled(is_on):
    app = create_app(FakeEngine(), ServerConfig(enable_tokenizer_info_endpoint=is_on))
    assert ("/tokenizer_info" in {route.path for route in app.routes}) == is_on
