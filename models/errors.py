"""The errors that loading or describing a model raises.

ModelError (a ValueError)
├── ModelConfigError          config.json is missing or not JSON, or a field is missing or wrong
├── UnsupportedModelError     config.json is correct, and paxkv cannot run the model
└── CheckpointError
    ├── CheckpointNotFoundError   no such folder, hub repository, or weight file
    └── WeightMismatchError       the weights do not fit the model
"""


class ModelError(ValueError):
    """A model cannot be used. The message names the file and field, and says what to do."""


class ModelConfigError(ModelError):
    """config.json does not describe a model."""


class UnsupportedModelError(ModelError):
    """The model needs a feature that paxkv does not have."""


class CheckpointError(ModelError):
    """The checkpoint's files cannot be used."""


class CheckpointNotFoundError(CheckpointError):
    """The checkpoint, or a file that it names, does not exist."""


class WeightMismatchError(CheckpointError):
    """Weights are missing, unexpected, or of the wrong shape or dtype."""
