"""Experiments, in one folder for each subject. A folder holds the experiments of its subject, their figures and their exercises.

An experiment returns rows. A row holds one measured value together with its check, its limit and its conditions
(`hyperion.results.Row`). An experiment can also return samples: a table of single measurements, such as the time of each call.
"""
