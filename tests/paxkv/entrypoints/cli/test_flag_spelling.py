"""`plain_words` rewrites vLLM's spellings of flags."""

import pytest

from paxkv.entrypoints.cli.flag_spelling import plain_words
from paxkv.errors import ConfigError

KNOWN = {"--a-b", "--obj", "--compilation-config", "--port"}


@pytest.mark.parametrize(
    ("words", "plain"),
    [
        (["--a_b", "1"], ["--a-b", "1"]),
        (["--a_b=x_y"], ["--a-b=x_y"]),
        # Unknown flags stay unchanged, for the error message.
        (["--c_d=1", "--c.d", "1"], ["--c_d=1", "--c.d", "1"]),
        (["model_x", "./a.b"], ["model_x", "./a.b"]),
        (["--obj.x", "1", "--obj.y.z=text"], ['--obj={"x": 1, "y": {"z": "text"}}']),
        (["--obj.x=1", "--obj.x=2"], ['--obj={"x": 2}']),
        (["--obj.l+", "a", "--obj.l+=1,b"], ['--obj={"l": ["a", 1, "b"]}']),
        (["-O.level=3", "m"], ['--compilation-config={"level": 3}', "m"]),
        (["-cc.level", "3"], ['--compilation-config={"level": 3}']),
        (["-O3", "-O", "2"], ["-O3", "-O", "2"]),
        (["--obj.x=a=b"], ['--obj={"x": "a=b"}']),
        (["--", "--a_b"], ["--", "--a_b"]),
        (["--obj.x=true", "--obj.y=None"], ['--obj={"x": true, "y": null}']),
        (["--obj.x", "False", "--obj.y=True"], ['--obj={"x": false, "y": true}']),
        (["--obj.x", "-1", "--obj.y=--z"], ['--obj={"x": -1, "y": "--z"}']),
    ],
)
def test_vllms_spellings_become_known_flags(words, plain):
    assert plain_words(words, KNOWN) == plain


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--obj.x"], "needs a value"),
        # Otherwise --port would be the key's value, and the number would be the model.
        (["--obj.x", "--port", "8000"], "--obj.x needs a value"),
        (["--obj.=1"], "names no key"),
        (["--obj.x=1", "--obj.x.y=1"], "x already has a value that is not an object"),
        (["--obj.x=1", "--obj.x+=1"], "x already has a value that is not a list"),
        (["--obj", "{}", "--obj.x=1"], "given as a whole and key by key"),
    ],
)
def test_invalid_keys_are_rejected(words, reason):
    with pytest.raises(ConfigError, match=reason):
        plain_words(words, KNOWN)
