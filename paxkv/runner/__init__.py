"""The device half of a step: rows and buckets on the host, one compiled program on the device."""

from paxkv.runner.model_runner import ModelRunner

__all__ = ["ModelRunner"]
