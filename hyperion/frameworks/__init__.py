"""The documented interface to the frameworks: one configuration, one plan and one JSON file for each combination that runs.

A combination is a framework, a model and a platform. `config` reads config.yaml, `plan` turns each combination into a plan, and
`run` trains according to the plans. `result` defines the JSON file of a combination, `logs` creates this file from a log of
Megatron or Primus, and `comparison` compares the files.
"""
