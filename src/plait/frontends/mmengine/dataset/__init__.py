"""Samplers, and how samples become a batch."""

from plait.frontends.mmengine.dataset.collate import default_collate, pseudo_collate
from plait.frontends.mmengine.dataset.sampler import DefaultSampler, InfiniteSampler
from plait.frontends.mmengine.dataset.workers import worker_init_fn

__all__ = ["DefaultSampler", "InfiniteSampler", "default_collate", "pseudo_collate", "worker_init_fn"]
