"""`plait tune`: the fastest settings, found by measuring."""

from plait.tune.autotuning import Account, Translated, translate_autotuning
from plait.tune.config import TuneConfig, make_tune_config
from plait.tune.order import Rank, rank_by_rule
from plait.tune.search import Tuned, tune
from plait.tune.trial import Outcome

__all__ = [
    "Account",
    "Outcome",
    "Rank",
    "Translated",
    "TuneConfig",
    "Tuned",
    "make_tune_config",
    "rank_by_rule",
    "translate_autotuning",
    "tune",
]
