"""Reading a checkpoint's JSON files, in every encoding in which they are saved."""

import json

import pytest

from models.errors import ModelConfigError
from models.loading.json_file import describe_missing, is_lfs_pointer, read_json_object

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_every_unicode_encoding_is_read(tmp_path, encoding):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"name": "Größe"}, ensure_ascii=False), encoding=encoding)
    assert read_json_object(path) == {"name": "Größe"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "contains a list; it must contain a JSON object"),
        ("null", "contains null"),
        ("7", "contains a number"),
        ('"text"', "contains a string"),
        ("", r"is not valid JSON \(0 bytes\)"),
        ('{"a": 1,}', r"is not valid JSON \(9 bytes\): .*line 1 column"),
        (LFS_POINTER, "is a Git LFS pointer.*git lfs pull"),
    ],
)
def test_other_content_is_refused_with_what_was_found(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ModelConfigError, match=rf"config\.json {message}"):
        read_json_object(path)


def test_a_link_without_a_target_is_named_with_the_target(tmp_path):
    path = tmp_path / "config.json"
    path.symlink_to("../../blobs/4d7a")
    with pytest.raises(
        ModelConfigError, match=r"is a link to \.\./\.\./blobs/4d7a, which does not"
    ):
        read_json_object(path)
    assert describe_missing(tmp_path / "other") == f"{tmp_path / 'other'} does not exist."


def test_lfs_pointers_are_recognized(tmp_path):
    pointer, other = tmp_path / "pointer", tmp_path / "other"
    pointer.write_text(LFS_POINTER)
    other.write_bytes(b"\0" * 100)
    assert (is_lfs_pointer(pointer), is_lfs_pointer(other)) == (True, False)
