"""Quantized checkpoints: one file per format, and weights that are dequantized while loading."""

from models.loading.quantized.dequantized_checkpoint import DequantizedCheckpoint
from models.loading.quantized.find_format import find_weight_format
from models.loading.quantized.weight_format import WeightFormat

__all__ = ["DequantizedCheckpoint", "WeightFormat", "find_weight_format"]
