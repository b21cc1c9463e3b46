"""`plait tune`: find the fastest settings of a run by measuring short runs (trials)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.tune.config import RankCandidates as RankCandidates
    from plait.tune.config import TuneConfig as TuneConfig
    from plait.tune.config import make_tune_config as make_tune_config
    from plait.tune.config import rank_by_rule as rank_by_rule
    from plait.tune.search import Tuned as Tuned
    from plait.tune.search import tune as tune
    from plait.tune.trial import TrialOutcome as TrialOutcome
else:
    from plait.lazy import attach_names

    attach_names(__name__)
