"""Experiments: one module each, and the chapter through which a notebook predicts, runs and keeps them."""

from hyperion.chapter.chapter import Chapter, open_chapter, run_information
from hyperion.chapter.context import Context, Forecast, Result
from hyperion.chapter.profiles import default_profile, load_profile, profile_names
from hyperion.chapter.registry import experiment_named, experiment_names

__all__ = [
    "Chapter",
    "Context",
    "Forecast",
    "Result",
    "default_profile",
    "experiment_named",
    "experiment_names",
    "load_profile",
    "open_chapter",
    "profile_names",
    "run_information",
]
