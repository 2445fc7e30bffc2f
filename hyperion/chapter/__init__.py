"""Chapters of the book. A notebook opens a `Chapter` to predict, run and store experiments.

A chapter is one notebook, a subject is a folder of experiments, and a profile states the sizes of the experiments. This package
also finds subjects, experiments and profiles by name.
"""

from hyperion.chapter.chapter import Chapter, open_chapter, run_information
from hyperion.chapter.context import Context, Experiment, Forecast, Options, Result
from hyperion.chapter.profiles import default_profile, load_profile, profile_names
from hyperion.chapter.subjects import experiment_named, experiment_names

__all__ = [
    "Chapter",
    "Context",
    "Experiment",
    "Forecast",
    "Options",
    "Result",
    "default_profile",
    "experiment_named",
    "experiment_names",
    "load_profile",
    "open_chapter",
    "profile_names",
    "run_information",
]
