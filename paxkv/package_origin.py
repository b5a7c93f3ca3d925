"""Checks that `paxkv`, `models` and `pallas_kernels` are the three that belong together."""

import importlib.util
from pathlib import Path

from paxkv.errors import ConfigError

COMPANION_PACKAGES = ("models", "pallas_kernels")


def check_package_origin() -> None:
    """Compares where Python finds the companion packages with where `paxkv` lies.

    `models` is a common name: a folder of that name nearer on the path would be imported instead.

    Raises:
        ConfigError: One lies elsewhere, or nowhere; the message names both places.
    """
    wanted = Path(__file__).resolve().parents[1]
    for name in COMPANION_PACKAGES:
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin])
        if [Path(place).resolve() for place in places] != [wanted / name]:
            got = ", ".join(map(str, places)) or "nowhere"
            raise ConfigError(
                f"paxkv lies in {wanted} and needs its package {name!r} from there, but Python "
                f"finds it in: {got}. Rename or uninstall the other {name!r}, or start Python from "
                "another folder."
            )
