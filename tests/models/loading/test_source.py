"""Finding a model's folder and reading its configuration."""

import json

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from models.errors import CheckpointNotFoundError, ModelConfigError, UnsupportedModelError
from models.loading import source
from tests.oracles.make_checkpoint import write_random_checkpoint


def test_folder_is_used_as_it_is(tmp_path):
    assert source.resolve_model_folder(tmp_path) == tmp_path
    assert source.resolve_model_folder(str(tmp_path)) == tmp_path


def test_revision_of_a_folder_has_no_effect_and_says_so(tmp_path, caplog):
    assert source.resolve_model_folder(tmp_path, revision="v2") == tmp_path
    assert "revision 'v2' has no effect" in caplog.text


def test_hub_name_is_downloaded_without_weights_in_other_formats(tmp_path, monkeypatch):
    calls, tokens = [], []

    def fake_download(name, revision, allow_patterns, token):
        calls.append((name, revision, allow_patterns))
        tokens.append(token)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_download)
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes(b"")
    assert source.resolve_model_folder("some-org/some-model") == tmp_path
    options = {"with_weights": False, "revision": "v2", "token": "hf_geheim"}
    source.resolve_model_folder("some-org/some-model", **options)
    assert tokens == [None, None, "hf_geheim"]
    # With weights, the small files come first.
    [small, (name, revision, patterns), (_, other_revision, small_patterns)] = calls
    assert small == (name, revision, small_patterns)
    assert (name, revision, other_revision) == ("some-org/some-model", None, "v2")
    assert "model-*.safetensors" in patterns
    assert not any("safetensors" in pattern for pattern in small_patterns)
    assert not any(
        pattern.endswith((".bin", "*")) for pattern in patterns if pattern != "tokenizer*"
    )


class FakeHub:
    """A repository whose files are downloaded by their patterns, as the hub's client does."""

    def __init__(self, folder, names):
        self.folder, self.names, self.downloaded = folder, names, []
        self.is_offline = False

    def snapshot_download(self, name, revision, allow_patterns, token):
        assert name == "some-org/some-model"
        names = [] if self.is_offline else self.names
        self.folder.mkdir(exist_ok=True)
        for found in filter_repo_objects(names, allow_patterns=allow_patterns):
            (self.folder / found).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / found).write_bytes(b"")
        self.downloaded = sorted(
            str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()
        )
        return str(self.folder)

    def list_repo_files(self, name, revision, token):
        assert (name, revision, token) == ("some-org/some-model", "v2", None)
        if self.is_offline:
            raise RuntimeError("no network")
        return self.names


@pytest.fixture
def hub(tmp_path, monkeypatch):
    found = FakeHub(tmp_path / "hub", [])
    for name in ("snapshot_download", "list_repo_files"):
        monkeypatch.setattr(huggingface_hub, name, getattr(found, name))
    return found


GGUF_NAMES = [
    *("a-Q4_K_M.gguf", "a-UD-Q4_K_M.gguf", "a-UD-Q6_K.gguf", "a-IQ4_K_M.gguf", "a.Q8_0.gguf"),
    *("mmproj-Q8_0.gguf", "a.mmproj-Q8_0.gguf"),
]
PARTS = ["BF16/a-BF16-00001-of-00002.gguf", "BF16/a-BF16-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("some-org/some-model:Q4_K_M", "a-Q4_K_M.gguf"),
        ("some-org/some-model:UD-Q4_K_M", "a-UD-Q4_K_M.gguf"),
        ("some-org/some-model:Q6_K", "a-UD-Q6_K.gguf"),
        ("some-org/some-model:q8_0", "a.Q8_0.gguf"),
        ("some-org/some-model/a-IQ4_K_M.gguf", "a-IQ4_K_M.gguf"),
        ("some-org/some-model/more/b.gguf", "more/b.gguf"),
    ],
)
def test_a_gguf_file_of_the_hub_is_downloaded_alone(hub, model, wanted):
    hub.names = [*GGUF_NAMES, *PARTS, "more/b.gguf", "config.json", "model.safetensors"]
    path = source.resolve_model_folder(model, revision="v2", with_weights=False)
    assert path == hub.folder / wanted
    assert hub.downloaded == sorted([wanted, "config.json"])
    hub.is_offline = True
    assert source.resolve_model_folder(model, revision="v2") == path


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (":Q5_0", CheckpointNotFoundError, "no GGUF file of quantization Q5_0; it has .*a.Q8_0"),
        (":K_M", CheckpointNotFoundError, "no GGUF file of quantization K_M"),
        ("/b.gguf", CheckpointNotFoundError, r"no GGUF file b.gguf; .*such as .*model/BF16/a-B"),
        (
            ":Q2_K",
            CheckpointNotFoundError,
            "several GGUF .*it has a-Q2_K.gguf, b-Q2_K.gguf.*/a-Q",
        ),
        (":BF16", UnsupportedModelError, "00001-of-00002.gguf is a part of a split file"),
        ("/" + PARTS[1], UnsupportedModelError, "00002-of-00002.gguf is a part of a split file"),
        ("", CheckpointNotFoundError, "but GGUF files: .*a.Q8_0.gguf.*model:QUANT"),
    ],
)
def test_another_gguf_file_of_the_hub_is_refused(hub, model, error, message):
    hub.names = [*GGUF_NAMES, *PARTS, "a-Q2_K.gguf", "a-UD-Q2_K.gguf", "b-Q2_K.gguf"]
    with pytest.raises(error, match=message):
        source.resolve_model_folder(f"some-org/some-model{model}", revision="v2")
    assert hub.downloaded == []


def test_a_config_json_beside_gguf_files_is_no_model(hub):
    hub.names = ["config.json", *GGUF_NAMES]
    found = source.resolve_model_folder("some-org/some-model", revision="v2", with_weights=False)
    assert found == hub.folder
    with pytest.raises(CheckpointNotFoundError, match="but GGUF files: a-IQ4_K_M.gguf"):
        source.resolve_model_folder("some-org/some-model", revision="v2")


def test_mistrals_own_weights_are_downloaded_if_there_is_no_config_json(hub):
    own = ["consolidated.safetensors", "params.json", "tekken.json"]
    hub.names = [*own, "consolidated.00.pth", "README.md"]
    source.resolve_model_folder("some-org/some-model")
    assert hub.downloaded == own


def test_mistrals_own_weights_are_not_downloaded_beside_a_config_json(hub):
    hub.names = ["config.json", "consolidated.safetensors", "model.safetensors", "params.json"]
    source.resolve_model_folder("some-org/some-model")
    assert hub.downloaded == ["config.json", "model.safetensors", "params.json"]


def test_unreachable_hub_says_what_to_check(monkeypatch):
    def offline(name, revision, allow_patterns, token):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network and not cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointNotFoundError) as error:
        source.resolve_model_folder("some-org/some-model", revision="v2")
    for part in (
        "some-org/some-model' at revision 'v2'",
        "no network and not cached",
        "Check the spelling",
    ):
        assert part in str(error.value)


def test_failure_without_a_message_is_reported_too(monkeypatch):
    def broken(name, revision, allow_patterns, token):
        raise TimeoutError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(CheckpointNotFoundError, match="TimeoutError: no message"):
        source.resolve_model_folder("some-org/some-model")


def test_mistyped_folder_is_not_taken_for_a_hub_name():
    with pytest.raises(CheckpointNotFoundError, match="neither a folder nor a hub repository"):
        source.resolve_model_folder("./no/such/folder")


def test_folder_without_config_is_named(tmp_path):
    with pytest.raises(ModelConfigError, match=r"config\.json does not exist"):
        source.read_model_config(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '"text"', "[" * 10**5], ids=[*"abc", "deep"])
def test_malformed_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        source.read_model_config(tmp_path)


def test_config_that_is_a_folder_is_named(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelConfigError, match="config.json cannot be read: Is a directory"):
        source.read_model_config(tmp_path)


def test_turn_ending_tokens_of_generation_config_are_added(tmp_path):
    write_random_checkpoint(tmp_path, num_layers=1)
    assert source.read_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2, 7]}))
    assert source.read_model_config(tmp_path).eos_token_ids == (2, 9, 7)
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    config = source.read_model_config(tmp_path, generation_folder=other)
    assert config.eos_token_ids == (2, 5)


def test_turn_ending_tokens_are_checked_under_the_name_of_their_file(tmp_path):
    write_random_checkpoint(tmp_path, num_layers=1)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "7"}))
    with pytest.raises(ModelConfigError, match=r"^generation_config\.json: eos_token_id is '7'"):
        source.read_model_config(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_configs_with_a_byte_order_mark_are_read(tmp_path, name):
    write_random_checkpoint(tmp_path, num_layers=1)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    config = source.read_model_config(tmp_path)
    path = tmp_path / name
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    assert source.read_model_config(tmp_path) == config


def test_folder_of_an_adapter_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelConfigError, match="contains a LoRA adapter.*merge_and_unload"):
        source.read_model_config(tmp_path)


def test_repository_of_the_cache_is_answered_with_its_snapshot(tmp_path):
    folder = tmp_path / "snapshots" / "4d7a"
    write_random_checkpoint(folder, num_layers=1)
    with pytest.raises(ModelConfigError, match="does not exist. Use the folder .*/snapshots/4d7a"):
        source.read_model_config(tmp_path)


def test_file_in_place_of_a_folder_is_named(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"")
    with pytest.raises(
        CheckpointNotFoundError, match=r"model\.bin' is a file; it must be a folder"
    ):
        source.resolve_model_folder(path)
