"""Front ends: APIs and configurations of other frameworks, translated into run descriptions of Plait's engine."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.frontends.key_report import ABSENT as ABSENT
    from plait.frontends.key_report import KeyEntry as KeyEntry
    from plait.frontends.key_report import KeyOutcome as KeyOutcome
    from plait.frontends.key_report import KeyReader as KeyReader
    from plait.frontends.key_report import KeyReport as KeyReport
    from plait.frontends.key_report import TranslatedSettings as TranslatedSettings
    from plait.frontends.key_report import Translation as Translation
    from plait.frontends.key_report import honoured as honoured
    from plait.frontends.key_report import honoured_as as honoured_as
    from plait.frontends.key_report import mapped as mapped
    from plait.frontends.key_report import refused as refused
    from plait.frontends.key_report import refused_unless as refused_unless
    from plait.frontends.key_report import unneeded as unneeded
    from plait.frontends.mirrored import MirroredPackage as MirroredPackage
else:
    from plait.lazy import attach_names

    attach_names(__name__)
