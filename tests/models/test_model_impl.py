"""`model_impl` finds the class that it names, and each mistake gives an error of one line."""

import sys

import pytest

from models import load_model, read_config
from models.errors import ModelError
from models.families.llama import LlamaForCausalLM
from models.model_impl import load_model_impl
from models.registry import family_class
from tests.oracles.make_checkpoint import write_random_checkpoint

MODULE = """
from models.decoders.decoder import Decoder
from models.families.llama import LlamaForCausalLM
from {helper} import NAME

class MyModel(LlamaForCausalLM):
    pass

class Silent(Decoder):
    pass

class Alien:
    pass

def make():
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a module under a name that no other test uses, and its helper."""
    imported = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_model.py").write_text(MODULE.format(helper="own_helper"))
    (tmp_path / "own_helper.py").write_text("NAME = 'helper'\n")
    yield tmp_path
    for name in [name for name in sys.modules if name not in imported]:
        if name.startswith("own_"):
            del sys.modules[name]


@pytest.mark.parametrize("name", ["own_model", "own_model.py", "./own_model.py"])
def test_a_file_of_the_current_folder_and_its_neighbors_are_found(folder, name):
    found = load_model_impl(f"{name}:MyModel")
    assert (found.__module__, found.__name__) == ("own_model", "MyModel")
    assert load_model_impl("own_model:MyModel") is found
    # The folder hides nothing: it is the last one.
    assert sys.path[-1] == str(folder)


def test_a_file_elsewhere_is_found_by_its_path(folder, monkeypatch):
    monkeypatch.chdir("/")
    assert load_model_impl(f"{folder}/own_model.py:MyModel").__name__ == "MyModel"


def test_a_package_of_the_current_folder_is_found(folder):
    (folder / "own_package").mkdir()
    (folder / "own_package/own_model.py").write_text(MODULE.format(helper="own_helper"))
    assert load_model_impl("own_package.own_model:MyModel").__module__ == "own_package.own_model"


def test_an_installed_module_is_found_and_wins_over_the_current_folder(folder):
    (folder / "models").mkdir()
    found = load_model_impl("models.families.llama:LlamaForCausalLM")
    assert found is LlamaForCausalLM
    assert str(folder) not in sys.path


@pytest.mark.parametrize(
    ("model_impl", "message"),
    [
        ("vllm", "model_impl is 'vllm'; expected 'auto', 'module:Class' such as"),
        (":MyModel", "expected 'auto', 'module:Class'"),
        ("own_model:", "expected 'auto', 'module:Class'"),
        ("no_such:MyModel", "no module 'no_such' on sys.path or in the current folder /"),
        ("own_model.deep:MyModel", "no module 'own_model.deep' on sys.path"),
        ("gone.py:MyModel", "there is no file /.*gone.py; expected"),
        (
            "own_model:MyModell",
            r"'own_model' \(/.*own_model.py\) has no 'MyModell'; .* MyModel, Silent.$",
        ),
        (
            "own_model:Alien",
            "is a class derived from object; expected .* models.decoders.decoder.Decoder.",
        ),
        ("own_model:make", "is of type function; expected a class derived from"),
        ("own_model:Silent", "class 'Silent' of module .* has no `read_config`"),
        ("own_broken:MyModel", r"'own_broken' .*\(ZeroDivisionError: .*, in own_broken.py, line 2"),
        ("own_typo:MyModel", r"'own_typo' cannot be imported \(SyntaxError: .*own_typo.py, line 1"),
        ("own_needs:MyModel", "cannot be imported .*No module named 'no_such_thing'.*, line 1"),
        ("other/json.py:MyModel", "'json' is that of another module .*Rename the file"),
    ],
)
def test_mistakes_are_named(folder, model_impl, message):
    (folder / "own_broken.py").write_text("x = 1\n1 / 0\n")
    (folder / "own_typo.py").write_text("class MyModel(\n")
    (folder / "own_needs.py").write_text("import no_such_thing\n")
    (folder / "other").mkdir()
    (folder / "other/json.py").write_text("")
    with pytest.raises(ModelError, match=message) as error:
        load_model_impl(model_impl)
    assert "\n" not in str(error.value)


def test_the_class_replaces_that_of_the_architecture(folder):
    checkpoint = write_random_checkpoint(folder / "checkpoint", num_layers=1)
    loaded = load_model(checkpoint, model_impl="own_model:MyModel", load_format="dummy")
    assert loaded.class_name == "own_model.MyModel"
    assert loaded.packages == {"models", "own_model"}
    assert load_model(checkpoint, load_format="dummy").class_name == (
        "models.families.llama.LlamaForCausalLM"
    )
    assert family_class("Llama", model_impl="own_model:MyModel").__name__ == "MyModel"


@pytest.mark.parametrize(
    ("architectures", "wanted"), [(None, "MyModel"), ([], "MyModel"), (["Other"], "Other")]
)
def test_config_needs_no_name_of_an_architecture(folder, architectures, wanted):
    sizes = {"hidden_size": 64, "intermediate_size": 8, "num_attention_heads": 4}
    counts = {"vocab_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 8}
    fields = {"architectures": architectures, **sizes, **counts}
    assert read_config(fields, model_impl="own_model:MyModel").architecture == wanted


def test_read_config_must_return_a_config(folder):
    wrong = "class Wrong(Silent):\n    @classmethod\n    def read_config(cls, _): return {}\n"
    (folder / "own_dict.py").write_text(MODULE.format(helper="own_helper") + wrong)
    with pytest.raises(ModelError, match="read_config of own_dict.Wrong returned dict; expected"):
        read_config({}, model_impl="own_dict:Wrong")
