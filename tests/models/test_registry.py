"""The registry and the config agree on which architectures exist."""

from models.config import FAMILY_TRAITS
from models.registry import MODEL_CLASSES


def test_every_architecture_with_traits_has_a_class_of_its_name():
    assert {name: cls.__name__ for name, cls in MODEL_CLASSES.items()} == {
        name: name for name in FAMILY_TRAITS
    }
