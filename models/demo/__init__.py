"""The embedded demo checkpoint and what made it: data, tokenizer, training, evaluation."""

import importlib.resources
from pathlib import Path

_FOLDER = Path(str(importlib.resources.files(__name__)))
CHECKPOINT = _FOLDER / "checkpoint"
DRAFT_HEAD = _FOLDER / "draft_head"
