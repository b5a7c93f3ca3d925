"""The errors that loading or describing a model raises.

ModelError (a ValueError)
├── ModelConfigError          config.json is missing, is not JSON, or misses or contradicts a field
├── UnsupportedModelError     the model is well described, and this engine cannot run it
└── CheckpointError
    ├── CheckpointNotFoundError   no such folder, hub repository, or weight file
    └── WeightMismatchError       the weights are there and do not fit the model
"""


class ModelError(ValueError):
    """A model cannot be used; the message says what was got, what was wanted, and a remedy."""


class ModelConfigError(ModelError):
    """config.json does not describe a model."""


class UnsupportedModelError(ModelError):
    """The model needs something that this engine does not have."""


class CheckpointError(ModelError):
    """The checkpoint's files cannot be used."""


class CheckpointNotFoundError(CheckpointError):
    """The checkpoint, or a file it names, is not there."""


class WeightMismatchError(CheckpointError):
    """Weights are missing, unexpected, or of the wrong shape or dtype."""
