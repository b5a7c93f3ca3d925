"""What is said of packages that are not there."""

from benchmarks.gpu.packages import missing_packages, missing_text


def test_missing_packages_have_the_names_to_install_them_by(monkeypatch):
    found = {"zmq": None, "json": object()}
    monkeypatch.setattr("importlib.util.find_spec", found.get)
    assert missing_packages(["zmq", "json"]) == ["pyzmq"]


def test_text_says_what_is_missing_and_how_to_get_it():
    text = missing_text("the engine", ["msgspec", "pyzmq"])
    assert text.startswith("the engine needs msgspec, pyzmq")
    assert "`pip install msgspec pyzmq`" in text
