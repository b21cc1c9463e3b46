"""Models that know their own steps."""

from plait.frontends.mmengine.model.base_model import BaseModel, BaseModule
from plait.frontends.mmengine.model.data_preprocessor import BaseDataPreprocessor, ImgDataPreprocessor, stack_batch

__all__ = ["BaseDataPreprocessor", "BaseModel", "BaseModule", "ImgDataPreprocessor", "stack_batch"]
