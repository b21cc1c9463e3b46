"""Configurations as dicts and as files of Python."""

from plait.frontends.mmengine.config.command_line import DictAction
from plait.frontends.mmengine.config.config import Config
from plait.frontends.mmengine.config.tree import ConfigDict

__all__ = ["Config", "ConfigDict", "DictAction"]
