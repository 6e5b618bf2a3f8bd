"""Families of models: one file each, named as the checkpoint's `model_type`."""

from firstlight.models.causal import CausalModel
from firstlight.models.config import ConfigError, TextConfig
from firstlight.models.registry import FAMILIES, build_model, family

__all__ = ["FAMILIES", "CausalModel", "ConfigError", "TextConfig", "build_model", "family"]
